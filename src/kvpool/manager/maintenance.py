"""What operators and background tasks do with a cache: retention, tiers, shape, observation. `KVCacheManager` inherits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.compiling import mypyc_attr
from kvpool.config import Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.errors import InvalidArgumentError
from kvpool.events import Created, Event, EventLog, Subscription
from kvpool.manager.arguments import check_scope, check_seconds
from kvpool.manager.checks import Checker
from kvpool.manager.compaction import Compaction
from kvpool.manager.facade import Facade
from kvpool.manager.guard import Observer, PressureChange
from kvpool.manager.inspection import CachedRun, Inspector, KVCacheBlock
from kvpool.manager.invalidation import Invalidation
from kvpool.manager.picture import Picture, RunsPicture, picture, read_runs, runs_picture
from kvpool.manager.pins import Pin, Pins
from kvpool.pools.arrays import as_count, as_flag
from kvpool.pools.pool import BlockPool, ResizeResult
from kvpool.prefix.node import NEVER
from kvpool.prefix.orders import TenantQuota
from kvpool.prefix.tenants import TenantQuotas
from kvpool.scope import ReuseScope
from kvpool.sequences.admission import InFlight
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.prompt import DEFAULT_SCOPE, Items, as_prompt
from kvpool.sequences.swap import Onboarding
from kvpool.stats import CacheStats, EvictionReason, MemoryPressure


@mypyc_attr(allow_interpreted_subclasses=True)
class Maintenance(Facade):
    """Verbs that concern the cache as a whole rather than one sequence."""

    _in_flight: InFlight
    _pins: Pins
    _invalidation: Invalidation
    _compaction: Compaction
    _quotas: TenantQuotas
    _onboarding: Onboarding
    events: EventLog

    # --- retention ---------------------------------------------------------------------------------------------------

    def pin(
        self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, ttl: float | None = None, multimodal: Items | None = None
    ) -> Pin:
        """Keeps the cached full blocks of `tokens` (or of a handle's committed tokens) from eviction, until `unpin` or `ttl`.

        Raises `PinBudgetError` when more than `max_pinned_tokens` would be pinned.
        """
        check_seconds(ttl, "ttl")
        with self._guard:
            if isinstance(tokens, KVCacheHandle):
                check_scope(scope)
                if multimodal is not None:
                    raise InvalidArgumentError(
                        "the multimodal items of a request are known; give them with tokens only"
                    )
                row = self._state.any_row_of(tokens)
                scope, items = tokens.scope, None
                coded = self._state.rows.token_ids(row)[: int(self._state.rows.committed[row])]
            else:
                prompt = as_prompt(tokens, scope, multimodal)
                tokens, scope, items = prompt.tokens, prompt.scope, prompt.items
                coded = self._coded(prompt)
            pin = self._pins.pin(coded, scope, ttl)
            if self._observers:
                self._tell("pin", pin, tokens, scope, ttl, items)
            return pin

    def unpin(self, pin: Pin) -> None:
        """Ends a pin."""
        _check_pin(pin)
        with self._guard:
            self._pins.unpin(pin)
            if self._observers:
                self._tell("unpin", None, pin)

    def is_pinned(self, pin: Pin) -> bool:
        """Whether a pin still holds: it was not ended, its time is not over, its prefix was not invalidated."""
        _check_pin(pin)
        with self._guard.query:  # every operation begins with what is due
            return self._pins.active.get(pin.pin_id) is pin

    def set_quota(self, tenant: str, *, guaranteed: float | int = 0, maximum: float | int | None = None) -> None:
        """Limits a tenant's idle cache: blocks (int) or a fraction of each GPU pool (float).

        Up to `guaranteed`, other tenants' requests cannot evict it; beyond `maximum`, its own blocks go first. Call with
        neither to remove the quota.
        """
        if not isinstance(tenant, str):
            raise InvalidArgumentError(f"tenant must be a string, got {tenant!r}")
        limits: list[Any] = [n.item() if isinstance(n, np.generic) else n for n in (guaranteed, maximum)]
        with self._guard:
            self._quotas.set(tenant, *limits)
            if self._observers:
                self._tell("set_quota", None, tenant, *limits)

    def quotas(self) -> dict[str, TenantQuota]:
        """The quotas in force, by tenant, with what each tenant has cached."""
        with self._guard.query:
            return {tenant: quota.view() for tenant, quota in self._state.cache.orders.quotas.items()}

    def evict(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Evicts up to `num_blocks` cached blocks now, in the order of the policy; returns how many became free."""
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._guard:
            chosen = self._pool(pool, tier)
            freed = self._state.cache.evict(chosen, num_blocks, None, EvictionReason.EXPLICIT)
            if self._observers:
                self._tell("evict", freed, num_blocks, chosen.index, tier)
            return freed

    def gc(self) -> int:
        """Drops cached runs and pins whose time is over; returns the number of blocks (positions) dropped."""
        with self._guard.query:  # every operation begins with what is due
            return self._guard.num_expired

    @property
    def now(self) -> float:
        """The time by the manager's clock."""
        return self._state.context.clock()

    def next_deadline(self) -> float | None:
        """Seconds until the next time to live, priority or pin runs out; None when nothing does."""
        with self._guard.query:
            deadline = self._state.cache.expiry.calendar.next
            return None if deadline == NEVER else deadline - self._state.context.now

    def invalidate(
        self,
        prefix: Any = None,
        *,
        scope: ReuseScope | None = None,
        session: str | None = None,
        tenant: str | None = None,
        multimodal: Items | None = None,
    ) -> int:
        """Removes cached content that must not be reused: below a prefix, in a scope, made by a session, or of a tenant.

        `prefix` (with `scope`, default scope otherwise, and its items in `multimodal`) removes what follows its last full
        block match, that block included. What a session made goes with all that others built on it or copied from it. Live
        requests that hold or compute some of what is removed keep their blocks and go on; they publish nothing more.
        Of a tenant everything goes, whatever its adapters and salts. Returns the blocks removed.
        """
        given = [prefix is not None or scope is not None, session is not None, tenant is not None]
        if sum(given) != 1:
            raise InvalidArgumentError(
                "invalidate takes a prefix, a scope, a prefix with its scope, a session, or a tenant"
            )
        for name, value in (("session", session), ("tenant", tenant)):
            if value is not None and not isinstance(value, str):
                raise InvalidArgumentError(f"{name} must be a string, got {value!r}")
        if scope is not None:
            check_scope(scope)
        if prefix is None and multimodal is not None:
            raise InvalidArgumentError("multimodal items need the ids of the tokens that stand for them: give a prefix")
        prompt = None if prefix is None else as_prompt(prefix, scope or DEFAULT_SCOPE, multimodal)
        with self._guard:
            if session is not None:
                removed = self._invalidation.of_session(session)
            elif tenant is not None:
                removed = self._invalidation.of_tenant(tenant)
            elif prompt is not None:
                removed = self._invalidation.below_prefix(self._coded(prompt), prompt.scope)
            else:
                assert scope is not None
                removed = self._invalidation.in_scope(scope)
            if self._observers:
                ids, items = (None, None) if prompt is None else (prompt.tokens, prompt.items)
                self._tell(
                    "invalidate", removed, ids, scope if prompt is None else prompt.scope, session, items, tenant
                )
            return removed

    def reset_prefix_cache(self) -> int:
        """Forgets everything cached, on all tiers, also under live requests. Returns the blocks removed.

        What live requests have computed so far, and what they go on to compute with it, is not published either.
        """
        with self._guard:
            removed = self._invalidation.everything()
            if self._observers:
                self._tell("reset_prefix_cache", removed)
            return removed

    # --- tiers -------------------------------------------------------------------------------------------------------

    def offload(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Moves up to `num_blocks` of the runs that would be evicted next one tier down; returns how many moved."""
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._guard:
            chosen = self._pool(pool, tier)
            moved = self._onboarding.offload(chosen, num_blocks)
            if self._observers:
                self._tell("offload", moved, num_blocks, chosen.index, tier)
            return moved

    def onboard(self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, multimodal: Items | None = None) -> int:
        """Brings the cached prefix of `tokens` up to the GPU ahead of its request; returns how many blocks move."""
        prompt = as_prompt(tokens, scope, multimodal)
        with self._guard:
            moved = self._onboarding.onboard(self._coded(prompt), prompt.scope)
            if self._observers:
                self._tell("onboard", moved, prompt.tokens, prompt.scope, prompt.items)
            return moved

    def prefetch(self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, multimodal: Items | None = None) -> int:
        """Another name for `onboard`."""
        return self.onboard(tokens, scope, multimodal)

    # --- shape -------------------------------------------------------------------------------------------------------

    def defragment(self, tier: Tier = Tier.GPU) -> int:
        """Plans the fewest moves that leave every pool's live blocks at its lowest ids; returns how many."""
        with self._guard:
            self._pool(0, tier)
            moved = self._compaction.defragment(tier)
            if self._observers:
                self._tell("defragment", moved, tier)
            return moved

    def resize(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> ResizeResult:
        """Grows or shrinks a pool while requests run; says what had to be evicted and moved."""
        with self._guard:
            chosen = self._pool(pool, tier)
            least = 1 if tier == Tier.GPU else 0
            num_blocks = as_count(num_blocks, "num_blocks", least, MAX_BLOCKS)
            result = self._compaction.resize(chosen, num_blocks)
            self._state.cache.mover.find_lower_tiers()
            self._guard.calm = (0, 0)
            if self.events.listening:
                self.events.created(self._state.pool_sizes())
            if self._observers:
                self._tell("resize", result, num_blocks, chosen.index, tier)
            return result

    def _pool(self, index: int, tier: Tier) -> BlockPool:
        if not isinstance(tier, Tier) or tier == Tier.REMOTE:
            raise InvalidArgumentError(f"pools exist on GPU, HOST and DISK, not on {tier!r}")
        return self._state.pools[as_count(index, "pool", maximum=len(self._state.pools) - 1)][tier]

    # --- observation -------------------------------------------------------------------------------------------------

    def on_memory_pressure(self, callback: Callable[[PressureChange], None]) -> Callable[[], None]:
        """Calls back whenever the pressure level changes; returns a function that stops it."""
        if not callable(callback):
            raise InvalidArgumentError(f"on_memory_pressure takes a callable, got {callback!r}")

        def call(change: PressureChange) -> None:  # a registration of its own, also of a callback that has one already
            callback(change)

        def stop() -> None:
            with self._guard.lock:
                if call in self._guard.pressure_callbacks:
                    self._guard.pressure_callbacks.remove(call)

        with self._guard.lock:
            self._guard.pressure_callbacks.append(call)
        return stop

    def on_operation(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after every operation, when capacity may have changed; returns a function that stops it."""
        if not callable(callback):
            raise InvalidArgumentError(f"on_operation takes a callable, got {callback!r}")

        def call() -> None:
            callback()

        def stop() -> None:
            with self._guard.lock:  # a new list: another thread may be walking along the old one
                self._guard.capacity_callbacks = [c for c in self._guard.capacity_callbacks if c is not call]

        with self._guard.lock:
            self._guard.capacity_callbacks = [*self._guard.capacity_callbacks, call]
        return stop

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Tells `observer` of every operation that succeeds; returns a function that ends it. See `manager/guard.py`."""
        with self._guard.lock:
            self._observers = (*self._observers, observer)
            self._state.cache.tree.choose_source = self._chosen_source

        def stop() -> None:
            with self._guard.lock:
                self._observers = tuple(known for known in self._observers if known is not observer)
                if not self._observers:
                    self._state.cache.tree.choose_source = None

        return stop

    def _chosen_source(self, run: int) -> int:
        for observer in self._observers:
            run = observer.choose_source(run)
        return run

    @property
    def pressure(self) -> MemoryPressure:
        return self._guard.level

    @property
    def usage(self) -> float:
        """The fraction of the fullest GPU pool that live sequences hold."""
        with self._guard.lock:
            return max(pool.num_referenced / pool.num_blocks for pool in self._state.gpu_pools)

    def get_num_free_blocks(self, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Blocks on the free list (evictable cached blocks not included; see `stats`)."""
        with self._guard.lock:
            return int(self._pool(pool, tier).num_free)

    def num_blocks(self, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Blocks of a pool on one tier, as large as it is now."""
        with self._guard.lock:
            return int(self._pool(pool, tier).num_blocks)

    def has_tier(self, *tiers: Tier) -> bool:
        """Whether any of these tiers has blocks now."""
        with self._guard.lock:
            return any(self._pool(index, tier).num_blocks for index in range(len(self._state.pools)) for tier in tiers)

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """How much memory block tables take: layer groups, rows and columns, grown as live sequences needed them."""
        with self._guard.lock:
            tables = self._state.rows.tables
            return (len(tables), *tables[0].shape)

    @property
    def policy_name(self) -> str:
        """The name of the eviction policy."""
        return self._state.cache.orders.policies[Tier.GPU].name

    def cached_runs(self) -> list[CachedRun]:
        """Every run of blocks that can be found, with its place and age. Looks at everything: for people and tests."""
        with self._guard.query:
            return Inspector(self._state).runs()

    def picture(self) -> Picture:
        """Every block and every live sequence as arrays, at one moment. Changes nothing; cheap enough for many a second."""
        with self._guard.lock:
            return picture(self._state)

    def runs_picture(self) -> RunsPicture:
        """Every cached run as arrays. Changes nothing; takes a few microseconds for each run, and lets others in between."""
        return runs_picture(read_runs(self._state, self._guard.lock))

    def stats(self) -> CacheStats:
        """One consistent snapshot of everything counted."""
        with self._guard.query:
            return Inspector(self._state).snapshot(self._guard.level)

    def block(self, block_id: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> KVCacheBlock:
        """Who uses one block, and as what. Looks at everything: for people and tests, not for engines."""
        with self._guard.query:
            chosen = self._pool(pool, tier)
            as_count(block_id, "block_id", maximum=chosen.num_blocks - 1)
            return Inspector(self._state).block(chosen, block_id)

    def check(self) -> None:
        """Proves every invariant or raises `InvariantError` naming what is broken. Slow: for tests and doubts."""
        with self._guard.query:
            Checker(self._state, self._in_flight, self._pins).run()

    # --- events ------------------------------------------------------------------------------------------------------

    def subscribe(self, snapshot: bool = True) -> Subscription:
        """Follows what the prefix cache holds; the first events describe what is cached already. See `kvpool.events`."""
        if not self._state.config.event_buffer_size:
            raise InvalidArgumentError("events are off: event_buffer_size is 0; configure how many events to keep")
        return self.events.subscribe(as_flag(snapshot, "snapshot"))

    def _event_snapshot(self, mark: Callable[[], int]) -> list[Event]:
        """Created and Stored events for everything cached now, parents before children."""
        with self._guard:
            as_of = mark()
            cache = self._state.cache
            return [
                Created(as_of, self._state.pool_sizes()),
                *cache.announcer.snapshot(cache.tree.roots.values(), as_of),
            ]


def _check_pin(pin: object) -> None:
    if not isinstance(pin, Pin):
        raise InvalidArgumentError(f"a pin is what pin() returned, got {pin!r}")
