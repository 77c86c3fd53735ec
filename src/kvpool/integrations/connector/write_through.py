"""Write-through: the host takes blocks when they are computed, under a policy, and the tiers below it take them from there.

The rows of the host are the blocks of a manager that holds no bytes: prefixes are found, kept and evicted as in an engine of
kvpool's own. `saving.py` stores, `loading.py` loads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvpool.config import DType, KVCacheConfig, LayerSpec, StatePart, StateSpec
from kvpool.core.cache import Pin
from kvpool.errors import KVPoolError
from kvpool.integrations.connector.loading import Loader, LoadStats, TierLookups
from kvpool.integrations.connector.orders import Introduction, Orders
from kvpool.integrations.connector.reports import BlockEvent, BlockEvents
from kvpool.integrations.connector.requests import TrackedRequest
from kvpool.integrations.connector.saving import Saver, SaveStats
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.manager import KVCacheManager
from kvpool.quiet import QuietLog

_log = logging.getLogger("kvpool")

_MAX_EVENTS = 65_536  # kept until the engine takes them
# Any shape will do: the manager only counts rows.
_ANY_LAYER = [LayerSpec(kv_heads=1, head_dim=8)]
_ANY_STATE = [StateSpec((StatePart("state", (1,), DType.FLOAT32),))]


class WriteThrough:
    """Knows which blocks the host and the tiers have. `workers` are the introductions of all of them."""

    def __init__(
        self,
        settings: ConnectorSettings,
        block_size: int,
        workers: Sequence[Introduction],
        new_job: Callable[[], int],
        *,
        stores: bool = True,
        hash_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hash_size` is the number of tokens of each hash in `block_hashes` of requests. With it, events are reported."""
        self._clock = StepClock(clock)
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
        self._stores = stores
        self._new_job = new_job
        self._lookups = TierLookups(settings, workers) if settings.has_tiers else None
        self._events = None if hash_size is None else BlockEvents(self.manager, block_size, hash_size)
        spills = settings.has_tiers and not settings.read_only
        common: dict[str, Any] = dict(has_states=has_states, events=self._events)
        self._saver = Saver(self.manager, block_size, num_rows, new_job, has_tiers=spills, **common)
        self._loader = Loader(self.manager, block_size, self._lookups, self._saver.make_room, clock=clock, **common)
        self._block_size = block_size
        self._now = clock
        # Requests without a first token, and how many tokens of their prompts they compute
        self._beginning: dict[str, tuple[TrackedRequest, int]] = {}
        self._pins = PromptPins(self.manager, block_size)

    @property
    def saved(self) -> SaveStats:
        """Counts of blocks that were stored."""
        return self._saver.stats

    @property
    def loaded(self) -> LoadStats:
        """Counts of requests and of blocks that were loaded."""
        return self._loader.stats

    def look_up(self, tracked: TrackedRequest, num_computed: int) -> int | None:
        """How many tokens after the engine's own can be loaded. None: ask again."""
        self._clock.hold()
        self._saver.publish()
        self._pins.apply()
        return self._loader.look_up(tracked, num_computed)

    def order_load(
        self,
        tracked: TrackedRequest,
        pages: Sequence[list[int]],
        num_tokens: int,
        orders: Orders,
        state_pages: Sequence[list[int]] = (),
    ) -> None:
        """The engine has given a request these pages of each group, for what it had and what was looked up."""
        self._loader.order(tracked, pages, num_tokens, self._new_job(), orders, state_pages)

    def taken(self, tracked: TrackedRequest | None, pages: Sequence[Sequence[int]], num_found: int = 0) -> None:
        """If it computes the request for the first time, the time until its first token is measured."""
        if self._lookups is not None and tracked is not None and tracked.began is None:
            tracked.began = self._now()
            to_compute = tracked.num_prompt - num_found * self._block_size
            self._beginning[tracked.request.request_id] = tracked, to_compute

    def _measure(self) -> None:
        """Learns from requests that have their first token how long prompts take."""
        for name, (tracked, num_tokens) in list(self._beginning.items()):
            if tracked.num_ids > tracked.num_prompt and tracked.began is not None:
                del self._beginning[name]
                self._loader.decider.observe_prompt(num_tokens, self._now() - tracked.began)

    def fills(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The planned step computes a request up to `num_tokens`."""
        if self._stores and not tracked.options.no_store:
            self._saver.save(tracked, num_tokens)

    def reads_any(self, pages: Iterable[Sequence[int]]) -> bool:
        """Whether a store in flight reads one of these pages."""
        return self._saver.reads_any(pages)

    def order(self, num_requests: int, orders: Orders) -> None:
        """Orders stores of what the step fills."""
        self._clock.go_on()
        if self._beginning:
            self._measure()
        self._saver.order(orders)
        self._pins.apply()

    def confirm(self, job: int, num_blocks: int) -> None:
        """All workers are done with a job; each of them moved `num_blocks` blocks or more."""
        if not self._loader.confirm(job, num_blocks):
            self._saver.confirm(job, num_blocks)

    def finish(self, tracked: TrackedRequest) -> None:
        """The engine is done with a request."""
        self._saver.finish(tracked)
        self._measure()
        self._beginning.pop(tracked.request.request_id, None)
        if tracked.options.pin is not None and tracked.is_known:
            self._pins.add(tracked)

    def forget(self) -> None:
        """Nothing that was stored so far is found again, on the host or in a tier."""
        self._saver.forget()
        self._pins.end_all()
        self.manager.cache.reset()
        if self._events is not None:
            self._events.forget_tiers()

    @property
    def has_waiting(self) -> bool:
        """Whether a step must confirm stores in flight, or carry some to the tiers."""
        return self._saver.has_waiting

    def take_events(self) -> Sequence[BlockEvent]:
        """Blocks that came to the host and the tiers, and left them, since the last call."""
        return () if self._events is None else self._events.take()

    def check(self) -> None:
        """Raises an error if the books do not agree."""
        self.manager.check()

    def close(self) -> None:
        """Closes the tiers."""
        if self._lookups is not None:
            self._lookups.close()


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


_MANY = 1024  # with so many pins, expired ones are dropped


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
