"""SchedulerSide: the half of a connector that runs in the process of the engine's scheduler. Read this first.

    look_up          says what can be loaded for a waiting request: from the host now, from tiers below after a while
    order_load       the engine has pages for it: orders the load
    follow, orders   order stores of what this step writes; all orders go to the workers with the step
    take_report      handles what the workers did: publishes stores, ends loads, orders published blocks to the tiers
    finish, reset    a request ends; everything is forgotten

It decides with numbers only; the workers move the bytes (`worker_side.py`). What the host keeps, a `HostCache` decides:
`WriteThrough` or `WriteBack`. Requests are objects of the engine, read by the attributes of vLLM's requests.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kvpool.errors import ConfigError
from kvpool.integrations.connector.loading import LoadStats
from kvpool.integrations.connector.orders import Introduction, JobProgress, Orders, Report
from kvpool.integrations.connector.reports import BlockEvent, Increments, NoHitWarning
from kvpool.integrations.connector.requests import (
    NO_OPTIONS,
    Adapters,
    RequestOptions,
    TrackedRequest,
    items_of,
    scope_of,
)
from kvpool.integrations.connector.saving import SaveStats
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.write_back import EngineCache, WriteBack
from kvpool.integrations.connector.write_through import WriteThrough
from kvpool.quiet import QuietLog
from kvpool.scope import ReuseHint

_log = logging.getLogger("kvpool")

_NO_WRITE_BACK = (
    "host_write='back' needs vLLM's prefix caching, layers in one group without states, and no KV events: blocks go to the "
    "host when they are computed, as with 'through'"
)


class HostCache(Protocol):
    """What the host keeps: `WriteThrough` what the engine computes, `WriteBack` what it loses."""

    @property
    def saved(self) -> SaveStats:
        """Counts of blocks that were stored."""

    @property
    def loaded(self) -> LoadStats:
        """Counts of requests and of blocks that were loaded."""

    def look_up(self, tracked: TrackedRequest, num_computed: int) -> int | None:
        """How many tokens after the engine's own can be loaded. None: ask again."""

    def order_load(
        self,
        tracked: TrackedRequest,
        pages: Sequence[list[int]],
        num_tokens: int,
        orders: Orders,
        state_pages: Sequence[list[int]] = (),
    ) -> None:
        """The engine has given a request these pages of each group, for what it had and what was looked up."""

    def taken(self, tracked: TrackedRequest | None, pages: Sequence[Sequence[int]], num_found: int = 0) -> None:
        """The engine has given these pages to a request. It fills all but the first `num_found`, which hold what it needs."""

    def fills(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The planned step computes a request up to `num_tokens`, which fills blocks that were not stored."""

    def reads_any(self, pages: Iterable[Sequence[int]]) -> bool:
        """Whether a store in flight reads one of these pages."""

    def order(self, num_requests: int, orders: Orders) -> None:
        """Orders stores beside the planned step of so many requests."""

    def confirm(self, job: int, num_blocks: int) -> None:
        """All workers are done with a job; each of them moved `num_blocks` blocks or more."""

    def finish(self, tracked: TrackedRequest) -> None:
        """The engine is done with a request. Copies of its pages in flight go on."""

    def forget(self) -> None:
        """Nothing that was stored so far is found again."""

    @property
    def has_waiting(self) -> bool:
        """Whether a step must confirm stores in flight, or carry some to the tiers."""

    def take_events(self) -> Sequence[BlockEvent]:
        """Blocks that came to the host and the tiers, and left them, since the last call."""

    def check(self) -> None:
        """Raises an error if the books do not agree."""

    def close(self) -> None:
        """Closes the tiers."""


class SchedulerSide:
    """Knows which blocks the host and the tiers have. `workers` are the introductions of all of them."""

    def __init__(
        self,
        settings: ConnectorSettings,
        block_size: int,
        workers: Sequence[Introduction],
        *,
        loads: bool = True,
        stores: bool = True,
        hash_size: int | None = None,
        cache: EngineCache | None = None,
        step_pages: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hash_size` is the number of tokens of each hash in `block_hashes` of requests. With it, events are reported.

        `cache` is the engine's own; the tokens of a step fill `step_pages` pages of it at most. With it, blocks are stored
        when it gives them up next, if the settings ask for that.
        """
        self.num_workers = len(workers)
        if not workers or {worker.num_workers for worker in workers} != {len(workers)}:
            raise ConfigError(f"{len(workers)} workers introduced themselves to the connector; all of them must")
        num_rows = min(worker.num_rows for worker in workers)
        has_states = any(worker.num_checkpoints for worker in workers)
        self.host: HostCache
        if cache is not None and stores and settings.writes_back and not has_states and hash_size is None:
            self.host = WriteBack(cache, num_rows, step_pages, self._job)
        else:
            if settings.host_write == "back" and stores:
                _log.warning("kvpool connector: %s", _NO_WRITE_BACK)
            self.host = WriteThrough(
                settings, block_size, workers, self._job, stores=stores, hash_size=hash_size, clock=clock
            )
        self._no_hit_warning = NoHitWarning(block_size, num_rows, self.stats)
        self._adapters = Adapters()
        self._increments = Increments()
        self._block_size = block_size
        self._loads = loads
        self._has_disk = settings.disk is not None
        self._requests: dict[str, TrackedRequest] = {}
        self._reports: dict[int, JobProgress] = {}  # jobs that some workers have done
        self._orders = Orders()
        self._num_jobs = 0
        self._epoch = ""
        self._quiet = QuietLog(_log)

    @property
    def writes_back(self) -> bool:
        """Whether blocks go to the host when the engine gives them up, and not when they are computed."""
        return isinstance(self.host, WriteBack)

    # --- loads -------------------------------------------------------------------------------------------------------

    def look_up(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens after `num_computed_tokens` can be loaded, outside of steps. None: ask again."""
        tracked = self._tracked(request)
        if not self._loads or not tracked.is_known:
            return 0
        num_tokens = self.host.look_up(tracked, num_computed_tokens)
        if num_tokens is not None and not tracked.was_looked_up:
            tracked.was_looked_up = True
            self.host.loaded.requests += 1
            self._no_hit_warning.looked(tracked, tracked.num_local, num_tokens // self._block_size)
        return num_tokens

    def order_load(
        self, request: Any, pages: Sequence[list[int]], num_tokens: int, state_pages: Sequence[list[int]] = ()
    ) -> None:
        """The engine gave the request these pages of each group: orders a load of `num_tokens` tokens into them.

        `state_pages` are those of each group that keeps states, with one at the last block that is loaded.
        """
        tracked = self._tracked(request)
        tracked.hits = (0, 0, 0)
        if not num_tokens:
            return
        self._orders.fences_loads |= self.host.reads_any([of_group[tracked.num_local :] for of_group in pages])
        self.host.order_load(tracked, pages, num_tokens, self._orders, state_pages)

    def leave_to_others(self, request_id: str, pages: Sequence[Sequence[int]]) -> None:
        """The engine gave these pages to a request that another connector loads, in no order with what the GPU does."""
        self._orders.settles |= self.host.reads_any(pages)
        if (tracked := self._requests.get(request_id)) is not None:
            self.host.taken(tracked, pages, tracked.num_local)

    def hit_blocks(self, request: Any) -> tuple[int, int, int]:
        """Of the last load of a request: blocks from the host, the disk and the remote store."""
        host, first, others = self._tracked(request).hits
        return (host, first, others) if self._has_disk else (host, 0, first + others)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _will_write(self, pages: Iterable[Sequence[int]]) -> None:
        """Pages that the engine gave to a request. If a store of their last owner still reads one, the step waits for it."""
        self._orders.fence = self._orders.fence or self.host.reads_any(pages)

    def follow(
        self, request_id: str, pages: Sequence[Sequence[int]], num_tokens: int, *, num_computed: int = 0
    ) -> None:
        """A step computes a request, new or resumed, from `num_computed` to `num_tokens`; `pages` are all its pages."""
        self._will_write(of_group[num_computed // self._block_size :] for of_group in pages)
        tracked = self._requests.get(request_id)
        self.host.taken(tracked, pages, num_computed // self._block_size)
        if tracked is not None:
            tracked.pages, tracked.num_seen = [list(of_group) for of_group in pages], 0
            self.host.fills(tracked, num_tokens)

    def follow_checkpoint(
        self, request_id: str, pages: Sequence[Sequence[int]], num_tokens: int, state_pages: Sequence[int]
    ) -> None:
        """Behind this step the engine has the states behind `num_tokens` tokens, in these pages of each group of states.

        `pages` are all pages of the other groups. If layers keep states, this takes the place of `follow`.
        """
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.pages, tracked.state_pages = [list(of_group) for of_group in pages], list(state_pages)
            self.host.fills(tracked, num_tokens)

    def follow_on(
        self,
        steps: Iterable[tuple[str, Sequence[Sequence[int]] | None, int]],
        tables: Callable[[str], list[list[int]]] | None = None,
    ) -> None:
        """The same for running requests: their new pages, if they got any, and how far the step computes them.

        If pages leave a window, `tables` has all current pages of a request, and the new ones are ignored.
        """
        requests, size = self._requests, self._block_size
        for request_id, new_pages, num_tokens in steps:
            tracked = requests.get(request_id)
            if new_pages:
                self._will_write(new_pages)
                self.host.taken(tracked, new_pages)
                if tracked is not None and tables is None:
                    for of_group, new in zip(tracked.pages, new_pages, strict=True):
                        of_group += new
            if tracked is not None and num_tokens >= (tracked.num_seen + 1) * size:
                if tables is not None:
                    tracked.pages = tables(request_id)
                self.host.fills(tracked, num_tokens)

    def orders(self, *, is_idle: bool) -> Orders:
        """What goes to the workers with this step."""
        orders, self._orders = self._orders, Orders()
        orders.is_idle = is_idle
        self.host.order(len(self._requests), orders)
        return orders

    def take_report(self, report: Report) -> None:
        """What workers did in a step. A job counts when all of them have done it."""
        for job, progress in sorted(report.jobs.items()):
            if job in self._reports:
                progress = self._reports.pop(job).joined(progress)
            if progress.num_workers < self.num_workers:
                self._reports[job] = progress
            else:
                self.host.confirm(job, progress.num_blocks)

    @property
    def has_waiting(self) -> bool:
        """Whether the engine must run steps without requests, because stores to tiers are in flight."""
        return self.host.has_waiting

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, hint: ReuseHint | None = None) -> None:
        """The engine is done with a request. Copies of its pages in flight go on. What the request hinted itself counts."""
        if (tracked := self._requests.pop(request_id, None)) is not None:
            tracked.hint = tracked.options.hint() or hint
            self.host.finish(tracked)
            if self._loads:
                self._no_hit_warning.ended(tracked)

    def reset(self) -> None:
        """Forgets everything: what was stored so far is never found again, on the host or in a tier."""
        self.host.forget()
        self._no_hit_warning.forget()
        self._epoch = uuid.uuid4().hex
        for tracked in self._requests.values():
            tracked.is_cached = False

    def stats(self) -> dict[str, int]:
        """Requests so far, and blocks stored and loaded."""
        return {**vars(self.host.saved), **vars(self.host.loaded)}

    def take_counts(self) -> dict[str, int]:
        """How much `stats` have grown since the last call."""
        return self._increments.since(self.stats())

    def take_events(self) -> Sequence[BlockEvent]:
        """Blocks that came to the host and the tiers, and left them, since the last call."""
        return self.host.take_events()

    def close(self) -> None:
        """Closes the tiers."""
        self.host.close()

    def _job(self) -> int:
        self._num_jobs += 1
        return self._num_jobs

    def _tracked(self, request: Any) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            adapter = "" if request.lora_request is None else self._adapters.identity(request.lora_request)
            scope = scope_of(request, self._epoch, adapter or "")
            tracked = TrackedRequest(request, self._block_size, scope, items_of(request))
            tracked.is_cached = adapter is not None and getattr(request, "prompt_embeds", None) is None
            tracked.options = self._options_of(request)
            self._requests[request.request_id] = tracked
        return tracked

    def _options_of(self, request: Any) -> RequestOptions:
        """The options of a request. Wrong ones do not stop the engine: they are logged, and the request has none."""
        try:
            options = RequestOptions.of(request.kv_transfer_params)
            if self.writes_back and {options.priority, options.pin, options.expected_seconds} != {None}:
                self._quiet.warning(
                    "kvpool connector: request %s: priority, pin and expected_seconds have no effect unless blocks go to the "
                    "host when they are computed: set host_write='through'",
                    request.request_id,
                )
            return options
        except ConfigError as error:
            self._quiet.warning("kvpool connector: request %s: %s", request.request_id, error)
            return NO_OPTIONS
