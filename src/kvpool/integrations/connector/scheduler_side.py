"""SchedulerSide: the half of a connector that runs in the process of the engine's scheduler. Read this first.

    look_up          says what can be loaded for a waiting request: from the host now, from tiers below after a while
    order_load       the engine has pages for it: orders the load
    follow, orders   order stores of what this step writes; all orders go to the workers with the step
    take_report      handles what the workers did: publishes stores, ends loads, orders published blocks to the tiers
    finish, reset    a request ends; everything is forgotten

It decides with numbers only; the workers move the bytes (`worker_side.py`). Requests are objects of the engine, read by the
attributes of vLLM's requests.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvpool.config import DType, KVCacheConfig, LayerSpec, StatePart, StateSpec
from kvpool.errors import ConfigError, KVPoolError
from kvpool.integrations.connector.loading import Loader, LoadStats, TierLookups
from kvpool.integrations.connector.orders import Introduction, JobProgress, Orders, Report
from kvpool.integrations.connector.reports import BlockEvent, BlockEvents, Increments, NoHitWarning
from kvpool.integrations.connector.requests import (
    NO_OPTIONS,
    Adapters,
    RequestOptions,
    TrackedRequest,
    items_of,
    scope_of,
)
from kvpool.integrations.connector.saving import Saver
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.write_back import EngineCache, WriteBack
from kvpool.manager import KVCacheManager
from kvpool.prefix.readers import Pin
from kvpool.quiet import QuietLog


class StepClock:
    """A clock that stops between a look-up and the load that it promises, so that nothing expires in between."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: float | None = None

    def __call__(self) -> float:
        return self._clock() if self._held is None else self._held

    def hold(self) -> None:
        """Stops the clock: a load is promised."""
        if self._held is None:
            self._held = self._clock()

    def go_on(self) -> None:
        """Lets the clock run: no promise is open."""
        self._held = None


_NO_WRITE_BACK = (
    "host_write='back' needs vLLM's prefix caching, layers in one group without states, and no KV events: blocks go to the "
    "host when they are computed, as with 'through'"
)
_MAX_EVENTS = 65_536  # kept until the engine takes them
# Any shape will do: the manager only counts rows.
_ANY_LAYER = [LayerSpec(kv_heads=1, head_dim=8)]
_ANY_STATE = [StateSpec((StatePart("state", (1,), DType.FLOAT32),))]


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
        self._clock = StepClock(clock)
        self.num_workers = len(workers)
        if not workers or {worker.num_workers for worker in workers} != {len(workers)}:
            raise ConfigError(f"{len(workers)} workers introduced themselves to the connector; all of them must")
        num_rows = min(worker.num_rows for worker in workers)
        num_checkpoints = min(worker.num_checkpoints for worker in workers)
        has_states = num_checkpoints > 0
        self.manager = KVCacheManager(
            KVCacheConfig(
                [*_ANY_LAYER, *_ANY_STATE] if has_states else _ANY_LAYER,
                block_size=block_size,
                gpu_blocks=(num_rows, num_checkpoints) if has_states else num_rows,
                partial_match=False,
                watermark=0.0,
                eviction_policy=settings.policy or "adaptive",
                default_ttl=settings.ttl,
                event_buffer_size=0 if hash_size is None else _MAX_EVENTS,
            ),
            clock=self._clock,
        )
        for salt, limits in settings.quotas.items():
            self.manager.cache.set_quota(salt, **limits)
        self._lookups = TierLookups(settings, workers) if settings.has_tiers else None
        self._events = None if hash_size is None else BlockEvents(self.manager, block_size, hash_size)
        spills = settings.has_tiers and not settings.read_only
        common: dict[str, Any] = dict(has_states=has_states, events=self._events)
        self._saver = Saver(self.manager, block_size, num_rows, self._job, has_tiers=spills, **common)
        self._loader = Loader(self.manager, block_size, self._lookups, self._saver.make_room, **common)
        self._write_back: WriteBack | None = None
        if cache is not None and stores and settings.writes_back and not has_states and hash_size is None:
            self._write_back = WriteBack(cache, num_rows, step_pages, self._job)
        elif settings.host_write == "back" and stores:
            _log.warning("kvpool connector: %s", _NO_WRITE_BACK)
        self._no_hit_warning = NoHitWarning(block_size, num_rows, self.stats)
        self._pins = PromptPins(self.manager, block_size)
        self._adapters = Adapters()
        self._increments = Increments()
        self._block_size = block_size
        self._loads, self._stores = loads, stores
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
        return self._write_back is not None

    # --- loads -------------------------------------------------------------------------------------------------------

    def look_up(self, request: Any, num_computed_tokens: int) -> int | None:
        """How many tokens after `num_computed_tokens` can be loaded, outside of steps. None: ask again."""
        tracked = self._tracked(request)
        if not self._loads or not tracked.is_known:
            return 0
        num_tokens = self._num_found(tracked, num_computed_tokens)
        if num_tokens is not None and not tracked.was_looked_up:
            tracked.was_looked_up = True
            self._load_stats.requests += 1
            self._no_hit_warning.looked(tracked, tracked.num_local, num_tokens // self._block_size)
        return num_tokens

    def _num_found(self, tracked: TrackedRequest, num_computed_tokens: int) -> int | None:
        if self._write_back is not None:
            return self._write_back.look_up(tracked, num_computed_tokens, self._orders)
        self._clock.hold()
        self._saver.publish()
        self._pins.apply()
        return self._loader.look_up(tracked, num_computed_tokens)

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
        self._orders.fences_loads |= self._reads_any([of_group[tracked.num_local :] for of_group in pages])
        if self._write_back is not None:
            self._write_back.order_load(tracked, pages[0], num_tokens, self._orders)
        else:
            self._loader.order(tracked, pages, num_tokens, self._job(), self._orders, state_pages)

    def leave_to_others(self, request_id: str, pages: Sequence[Sequence[int]]) -> None:
        """The engine gave these pages to a request that another connector loads, in no order with what the GPU does."""
        self._orders.settles |= self._reads_any(pages)
        tracked = self._requests.get(request_id)
        if self._write_back is not None and tracked is not None:
            self._write_back.taken(tracked, pages[0], tracked.num_local)

    def hit_blocks(self, request: Any) -> tuple[int, int, int]:
        """Of the last load of a request: blocks from the host, the disk and the remote store."""
        host, first, others = self._tracked(request).hits
        return (host, first, others) if self._has_disk else (host, 0, first + others)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _will_write(self, pages: Iterable[Sequence[int]]) -> None:
        """Pages that the engine gave to a request. If a store of their last owner still reads one, the step waits for it."""
        self._orders.fence = self._orders.fence or self._reads_any(pages)

    def _reads_any(self, pages: Iterable[Sequence[int]]) -> bool:
        return (self._write_back or self._saver).reads_any(pages)

    def follow(
        self, request_id: str, pages: Sequence[Sequence[int]], num_tokens: int, *, num_computed: int = 0
    ) -> None:
        """A step computes a request, new or resumed, from `num_computed` to `num_tokens`; `pages` are all its pages."""
        self._will_write(of_group[num_computed // self._block_size :] for of_group in pages)
        tracked = self._requests.get(request_id)
        if self._write_back is not None:
            self._write_back.taken(tracked, pages[0], num_computed // self._block_size)
        if tracked is not None:
            tracked.pages, tracked.num_seen = [list(of_group) for of_group in pages], 0
            self._consider(tracked, num_tokens)

    def follow_checkpoint(
        self, request_id: str, pages: Sequence[Sequence[int]], num_tokens: int, state_pages: Sequence[int]
    ) -> None:
        """Behind this step the engine has the states behind `num_tokens` tokens, in these pages of each group of states.

        `pages` are all pages of the other groups. If layers keep states, this takes the place of `follow`.
        """
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.pages, tracked.state_pages = [list(of_group) for of_group in pages], list(state_pages)
            self._consider(tracked, num_tokens)

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
            if new_pages:
                self._will_write(new_pages)
            tracked = requests.get(request_id)
            if self._write_back is not None and new_pages:
                self._write_back.taken(tracked, new_pages[0])
            if tracked is None:
                continue
            if new_pages and tables is None:
                for of_group, new in zip(tracked.pages, new_pages, strict=True):
                    of_group += new
            if num_tokens >= (tracked.num_seen + 1) * size:
                if tables is not None:
                    tracked.pages = tables(request_id)
                self._consider(tracked, num_tokens)

    def _consider(self, tracked: TrackedRequest, num_tokens: int) -> None:
        if not self._stores or tracked.options.no_store:
            return
        if self._write_back is not None:
            self._write_back.fills(tracked, num_tokens)
        else:
            self._saver.save(tracked, num_tokens)

    def orders(self, *, is_idle: bool) -> Orders:
        """What goes to the workers with this step."""
        orders, self._orders = self._orders, Orders()
        orders.is_idle = is_idle
        if self._write_back is not None:
            self._write_back.order(len(self._requests), orders)
            return orders
        self._clock.go_on()
        self._saver.order(orders)
        self._pins.apply()
        return orders

    def take_report(self, report: Report) -> None:
        """What workers did in a step. A job counts when all of them have done it."""
        for job, progress in sorted(report.jobs.items()):
            if job in self._reports:
                progress = self._reports.pop(job).joined(progress)
            if progress.num_workers < self.num_workers:
                self._reports[job] = progress
            elif self._write_back is not None:
                self._write_back.confirm(job, progress.num_blocks)
            elif not self._loader.confirm(job, progress.num_blocks):
                self._saver.confirm(job, progress.num_blocks)

    @property
    def has_waiting(self) -> bool:
        """Whether the engine must run steps without requests, because stores to tiers are in flight."""
        return (self._write_back or self._saver).has_waiting

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self, request_id: str) -> None:
        """The engine is done with a request. Copies of its pages in flight go on."""
        if (tracked := self._requests.pop(request_id, None)) is not None:
            self._saver.finish(tracked)
            if self._loads:
                self._no_hit_warning.ended(tracked)
            if tracked.options.pin is not None and tracked.is_known and self._write_back is None:
                self._pins.add(tracked)

    def reset(self) -> None:
        """Forgets everything: what was stored so far is never found again, on the host or in a tier."""
        self._saver.forget()
        if self._write_back is not None:
            self._write_back.forget()
        self._no_hit_warning.forget()
        self._pins.end_all()
        self.manager.cache.reset()
        if self._events is not None:
            self._events.forget_tiers()
        self._epoch = uuid.uuid4().hex
        for tracked in self._requests.values():
            tracked.is_cached = False

    def stats(self) -> dict[str, int]:
        """Requests so far, and blocks stored and loaded."""
        saved = self._saver.stats if self._write_back is None else self._write_back.saved
        return {**vars(saved), **vars(self._load_stats)}

    @property
    def _load_stats(self) -> LoadStats:
        return self._loader.stats if self._write_back is None else self._write_back.loaded

    def take_counts(self) -> dict[str, int]:
        """How much `stats` have grown since the last call."""
        return self._increments.since(self.stats())

    def take_events(self) -> Sequence[BlockEvent]:
        """Blocks that came to the host and the tiers, and left them, since the last call."""
        return () if self._events is None else self._events.take()

    def close(self) -> None:
        """Closes the tiers."""
        if self._lookups is not None:
            self._lookups.close()

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
            if self._write_back is not None and (options.priority is not None or options.pin is not None):
                self._quiet.warning(
                    "kvpool connector: request %s: priority and pin have no effect unless blocks go to the host when they "
                    "are computed: set host_write='through'",
                    request.request_id,
                )
            return options
        except ConfigError as error:
            self._quiet.warning("kvpool connector: request %s: %s", request.request_id, error)
            return NO_OPTIONS


# --- pins ------------------------------------------------------------------------------------------------------------


_MANY = 1024  # with so many pins, expired ones are dropped

_log = logging.getLogger("kvpool")


class PromptPins:
    """Pins of the host, by scope and prompt."""

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._due: list[TrackedRequest] = []
        self._pins: dict[tuple[object, ...], Pin] = {}
        self._quiet = QuietLog(_log)

    def add(self, tracked: TrackedRequest) -> None:
        """A request has ended that asked for a pin of its prompt, or for its end."""
        self._due.append(tracked)

    def apply(self) -> None:
        """Pins the prompts whose blocks are all stored."""
        if not self._due:
            return
        over = [tracked for tracked in self._due if tracked.saving is None]
        self._due = [tracked for tracked in self._due if tracked.saving is not None]
        for tracked in over:
            self._pin(tracked)

    def _pin(self, tracked: TrackedRequest) -> None:
        tokens = tracked.tokens(tracked.num_prompt // self._block_size * self._block_size)
        items = tracked.items_within(len(tokens))
        key = tracked.scope, items, tokens.tobytes()
        before, seconds = self._pins.pop(key, None), tracked.options.pin
        if seconds:
            try:
                self._pins[key] = self._manager.cache.pin(tokens, tracked.scope, float(seconds), items)
            except KVPoolError as error:
                name = tracked.request.request_id
                self._quiet.warning("kvpool connector: the prompt of %s is not pinned: %s", name, error)
        if before is not None and self._manager.cache.is_pinned(before):
            self._manager.cache.unpin(before)
        if len(self._pins) > _MANY:
            self._pins = {key: pin for key, pin in self._pins.items() if self._manager.cache.is_pinned(pin)}

    def end_all(self) -> None:
        """Ends all pins."""
        self._due.clear()
        for pin in self._pins.values():
            if self._manager.cache.is_pinned(pin):
                self._manager.cache.unpin(pin)
        self._pins.clear()


_log = logging.getLogger("kvpool")
