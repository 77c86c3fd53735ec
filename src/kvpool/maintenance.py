"""What operators and background tasks do with a cache: retention, tiers, shape, observation. `KVCacheManager` inherits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.blocks.admission import Admissions
from kvpool.blocks.arrays import as_count, as_token_array
from kvpool.blocks.calendar import NEVER
from kvpool.blocks.checks import Checker
from kvpool.blocks.compaction import Compaction, ResizeResult
from kvpool.blocks.handle import KVCacheHandle
from kvpool.blocks.hashing import ReuseScope
from kvpool.blocks.inspection import Inspector, KVCacheBlock
from kvpool.blocks.invalidation import Invalidation
from kvpool.blocks.pins import Pin, Pins
from kvpool.blocks.pool import BlockPool
from kvpool.blocks.quota import Quota
from kvpool.blocks.state import CacheState
from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.events import Created, Event, EventLog, PoolSize, Stored, Subscription
from kvpool.guard import Guard, PressureChange
from kvpool.layers import MAX_BLOCKS
from kvpool.stats import CacheStats, EvictionReason, MemoryPressure, PoolStats

DEFAULT_SCOPE = ReuseScope()


class Maintenance:
    """Verbs that concern the cache as a whole rather than one sequence."""

    _state: CacheState
    _guard: Guard
    _admissions: Admissions
    _pins: Pins
    _invalidation: Invalidation
    _compaction: Compaction
    events: EventLog

    # --- retention ---------------------------------------------------------------------------------------------------

    def pin(self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, ttl: float | None = None) -> Pin:
        """Keeps the cached full blocks of `tokens` (or of a handle's committed tokens) from eviction, until `unpin` or `ttl`.

        Raises `PinBudgetError` when more than `max_pinned_tokens` would be pinned.
        """
        check_seconds(ttl, "ttl")
        with self._guard:
            check_scope(scope)
            if isinstance(tokens, KVCacheHandle):
                row = self._state.any_row_of(tokens)
                scope = tokens.scope
                ids = self._state.rows.token_ids(row)[: int(self._state.rows.committed[row])]
            else:
                ids = as_token_array(tokens)
            return self._pins.pin(ids, scope, ttl)

    def unpin(self, pin: Pin) -> None:
        """Ends a pin."""
        if not isinstance(pin, Pin):
            raise InvalidArgumentError(f"unpin takes what pin() returned, got {pin!r}")
        with self._guard:
            self._pins.unpin(pin)

    def set_quota(self, tenant: str, *, guaranteed: float | int = 0, maximum: float | int | None = None) -> None:
        """Limits a tenant's idle cache: blocks (int) or a fraction of each GPU pool (float).

        Up to `guaranteed`, other tenants' requests cannot evict it; beyond `maximum`, its own blocks go first. Call with
        neither to remove the quota.
        """
        if not isinstance(tenant, str):
            raise InvalidArgumentError(f"tenant must be a string, got {tenant!r}")
        with self._guard:
            pools = self._state.gpu_pools
            low = [_share(guaranteed, pool.num_blocks, "guaranteed") for pool in pools]
            high = [None if maximum is None else _share(maximum, pool.num_blocks, "maximum") for pool in pools]
            for floor, limit in zip(low, high, strict=True):
                if limit is not None and floor > limit:
                    raise InvalidArgumentError(f"guaranteed={guaranteed} is more than maximum={maximum} for {tenant!r}")
            others = [q for q in self._state.cache.quotas.values() if q.tenant != tenant]
            for index, pool in enumerate(pools):
                promised = low[index] + sum(q.guaranteed[index] for q in others)
                if low[index] and promised > pool.num_blocks:  # a pool that shrank may be short of what was promised
                    raise InvalidArgumentError(
                        f"guarantees of pool {index} would add up to {promised} blocks of {pool.num_blocks}; lower one"
                    )
            self._install_quota(tenant, low, high)

    def _install_quota(self, tenant: str, low: list[int], high: list[int | None]) -> None:
        cache = self._state.cache
        remove = not any(low) and all(limit is None for limit in high)
        quota = None if remove else Quota(tenant, low, high, [cache.new_policy() for _ in range(cache.num_tiers)])
        cache.quotas.pop(tenant, None)
        if quota is not None:
            cache.quotas[tenant] = quota
        roots = [root for root in cache.roots.values() if root.scope.tenant == tenant]
        for root in roots:
            candidates = [n for n in root.subtree() if cache.is_candidate(n)]
            for node in candidates:
                root.policies[node.tier].remove(node)
                node.entry = None
            root.policies = cache.policies if quota is None else quota.policies
            root.quota = quota
            for node in candidates:
                root.policies[node.tier].add(node)
        if quota is not None:
            quota.cached, quota.pinned = self._idle_blocks(tenant)
            for root in roots:
                cache.enforce_quota(root)

    def _idle_blocks(self, tenant: str) -> tuple[list[int], list[int]]:
        """Recounts the unread GPU blocks that a tenant's runs hold, and how many of them are pinned."""
        cache = self._state.cache
        counts, pinned = [0] * len(self._state.pools), [0] * len(self._state.pools)
        for node in cache.nodes():
            if node.root.scope.tenant == tenant and node.tier == Tier.GPU:
                cache.sync(node)
                for group in range(cache.num_cached_groups):
                    pool = cache.pool(group, Tier.GPU)
                    ids = node.ids[group]
                    if group in cache.windowed:
                        idle = ids[ids >= 0]
                        idle = idle[pool.refs[idle] == 0]
                        counts[pool.index] += len(idle)
                        pinned[pool.index] += sum(block in cache.pinned_windowed[pool.index] for block in idle.tolist())
                    elif not node.active:
                        counts[pool.index] += len(ids)
                        pinned[pool.index] += len(ids) if node.pins else 0
        return counts, pinned

    def evict(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Evicts up to `num_blocks` cached blocks now, in the order of the policy; returns how many became free."""
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._guard:
            return self._state.cache.evict(self._pool(pool, tier), num_blocks, None, EvictionReason.EXPLICIT)

    def gc(self) -> int:
        """Drops cached runs and pins whose time is over; returns the number of blocks (positions) dropped."""
        with self._guard:  # every operation begins with what is due
            return self._guard.num_expired

    def next_deadline(self) -> float | None:
        """Seconds until the next time to live, priority or pin runs out; None when nothing does."""
        with self._guard:
            cache = self._state.cache
            return None if cache.calendar.next == NEVER else cache.calendar.next - cache.now

    def invalidate(self, prefix: Any = None, *, scope: ReuseScope | None = None, session: str | None = None) -> int:
        """Removes cached content that must not be reused: below a prefix, in a scope, or made by a session.

        `prefix` (with `scope`, default scope otherwise) removes what follows its last full block match, that block
        included. Live requests that hold or compute some of it keep their blocks and go on; they publish nothing more.
        Returns the blocks removed.
        """
        given = [prefix is not None or scope is not None, session is not None]
        if sum(given) != 1:
            raise InvalidArgumentError("invalidate takes a prefix, a scope, a prefix with its scope, or a session")
        if session is not None and not isinstance(session, str):
            raise InvalidArgumentError(f"session must be a string, got {session!r}")
        if scope is not None:
            check_scope(scope)
        ids = None if prefix is None else as_token_array(prefix, "prefix")
        with self._guard:
            if session is not None:
                return self._invalidation.of_session(session)
            if ids is not None:
                return self._invalidation.below_prefix(ids, scope or DEFAULT_SCOPE)
            assert scope is not None
            return self._invalidation.in_scope(scope)

    def reset_prefix_cache(self) -> int:
        """Forgets everything cached, on all tiers, also under live requests. Returns the blocks removed.

        What live requests have computed so far, and what they go on to compute with it, is not published either.
        """
        with self._guard:
            return self._invalidation.everything()

    # --- tiers -------------------------------------------------------------------------------------------------------

    def offload(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Moves up to `num_blocks` of the runs that would be evicted next one tier down; returns how many moved."""
        num_blocks = as_count(num_blocks, "num_blocks")
        with self._guard:
            source, cache = self._pool(pool, tier), self._state.cache
            if cache.lower_tier[tier] is None:
                raise InvalidArgumentError(f"there is no tier below {tier.name}: configure host_blocks or disk_blocks")
            before = source.num_free
            while source.num_free - before < num_blocks:
                victim = cache.victim(source, None)
                wanted = -(-(num_blocks - (source.num_free - before)) // cache.blocks_per_position[pool])
                if victim is None or not cache.demote(victim, min(victim.num_blocks, wanted)):
                    break
            return source.num_free - before

    def onboard(self, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE) -> int:
        """Brings the cached prefix of `tokens` up to the GPU ahead of its request; returns how many blocks move."""
        ids = as_token_array(tokens)
        check_scope(scope)
        with self._guard:
            state, cache = self._state, self._state.cache
            match = cache.match(scope, ids, partial=False)
            if not match.path or match.path[-1].tier == Tier.GPU:
                return 0
            needs, supply = [0] * len(state.pools), state.supply(scope.tenant)
            self._admissions.count_match(match, needs, supply)
            state.refuse_shortage(needs, supply, f"onboarding a prefix of {match.num_blocks} blocks")
            node = match.path[-1]
            if node.end > match.num_blocks:
                node = cache.split(node, match.num_blocks - node.start)
            cache.hold(node)
            for gpu_pool, need in zip(state.gpu_pools, needs, strict=True):
                cache.make_room(gpu_pool, need, scope.tenant)
            moved = 0
            for part in cache.path_to(node):
                if part.tier != Tier.GPU:
                    cache.promote(part)
                    moved += part.num_blocks
            cache.release(node)
            cache.enforce_quota(node.root)
            return moved

    prefetch = onboard

    # --- shape -------------------------------------------------------------------------------------------------------

    def defragment(self, tier: Tier = Tier.GPU) -> int:
        """Plans the fewest moves that leave every pool's live blocks at its lowest ids; returns how many."""
        with self._guard:
            self._pool(0, tier)
            return self._compaction.defragment(tier)

    def resize(self, num_blocks: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> ResizeResult:
        """Grows or shrinks a pool while requests run; says what had to be evicted and moved."""
        num_blocks = as_count(num_blocks, "num_blocks", minimum=1 if tier == Tier.GPU else 0, maximum=MAX_BLOCKS)
        with self._guard:
            result = self._compaction.resize(self._pool(pool, tier), num_blocks)
            self._state.cache.find_lower_tiers()
            self._guard.calm = (0, 0)
            if self.events.listening:
                self.events.created(self._pool_sizes())
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

    def stats(self) -> CacheStats:
        """One consistent snapshot of everything counted."""
        with self._guard:
            state = self._state
            counters = state.counters
            pools = tuple(
                PoolStats(
                    pool.index, pool.tier, state.config.pools[pool.index].groups, pool.num_blocks, pool.num_free,
                    pool.num_referenced, pool.num_cached, pool.num_pinned, pool.peak_referenced,
                    state.config.pools[pool.index].block_bytes,
                )
                for tiers in state.pools
                for pool in tiers
                if pool.num_blocks or pool.tier == Tier.GPU
            )  # fmt: skip
            same = {
                name: getattr(counters, name)
                for name in (
                    "requests", "allocation_failures", "extend_failures", "prompt_tokens", "prompt_blocks",
                    "partial_hit_tokens", "full_hits_with_logits", "blocks_allocated", "blocks_merged",
                    "copies_on_write", "forks", "rewinds", "swaps_out", "swaps_in", "swapped_blocks",
                    "offloaded_blocks", "onboarded_blocks", "defragmented_blocks",
                )
            }  # fmt: skip
            return CacheStats(
                pools=pools,
                groups=Inspector(state).groups(),
                num_sequences=len(state.requests),
                num_swapped=sum(handle.swapped is not None for handle in state.requests.values()),
                num_cached_runs=state.cache.num_runs,
                hit_tokens={tier.name: counters.hit_tokens[tier] for tier in Tier},
                hit_blocks={tier.name: counters.hit_blocks[tier] for tier in Tier},
                evictions=dict(counters.evictions),
                lifetime_seconds=counters.lifetime.summary(),
                idle_before_eviction_seconds=counters.idle_before_eviction.summary(),
                reuse_gap_seconds=counters.reuse_gap.summary(),
                tenants={tenant: tuple(quota.cached) for tenant, quota in state.cache.quotas.items()},
                pressure=self._guard.level,
                **same,
            )

    def block(self, block_id: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> KVCacheBlock:
        """Who uses one block, and as what. Looks at everything: for people and tests, not for engines."""
        with self._guard:
            chosen = self._pool(pool, tier)
            as_count(block_id, "block_id", maximum=chosen.num_blocks - 1)
            return Inspector(self._state).block(chosen, block_id)

    def check(self) -> None:
        """Proves every invariant or raises `InvariantError` naming what is broken. Slow: for tests and doubts."""
        with self._guard:
            Checker(self._state, self._admissions, self._pins).run()

    # --- events ------------------------------------------------------------------------------------------------------

    def subscribe(self, snapshot: bool = True) -> Subscription:
        """Follows what the prefix cache holds; the first events describe what is cached already. See `kvpool.events`."""
        if not self._state.config.event_buffer_size:
            raise InvalidArgumentError("events are off: event_buffer_size is 0; configure how many events to keep")
        return self.events.subscribe(snapshot)

    def _pool_sizes(self) -> tuple[PoolSize, ...]:
        return tuple(
            PoolSize(group.index, tier, self._state.pools[group.pool][tier].num_blocks)
            for group in self._state.groups
            for tier in (Tier.GPU, Tier.HOST, Tier.DISK)
        )

    def _event_snapshot(self, mark: Callable[[], int]) -> list[Event]:
        """Created and Stored events for everything cached now, parents before children."""
        with self._guard:
            as_of = mark()
            events: list[Event] = [Created(as_of, self._pool_sizes())]
            for root in self._state.cache.roots.values():
                for node in root.subtree():
                    if node is not root:
                        self._state.cache.digests(node)
                        events.extend(
                            Stored(as_of, parent, tuple(digests), tokens, self._state.block_size, root.scope, node.tier,
                                   node.priority, group, node.session)
                            for group, parent, digests, tokens in self._state.cache.stored_runs(node, 0)
                        )  # fmt: skip
            return events


def check_scope(scope: ReuseScope) -> ReuseScope:
    if not isinstance(scope, ReuseScope):
        raise InvalidArgumentError(f"scope must be a ReuseScope, got {scope!r}")
    return scope


def check_seconds(value: float | None, name: str) -> None:
    if value is not None and not (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0):
        raise InvalidArgumentError(f"{name} must be a positive number of seconds or None, got {value!r}")


def _share(value: float | int, num_blocks: int, name: str) -> int:
    """Blocks out of an int (blocks) or a float (fraction of the pool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer)):
        raise InvalidArgumentError(f"{name} must be a number of blocks or a fraction, got {value!r}")
    if not 0 <= value <= (1.0 if isinstance(value, float) else num_blocks):
        raise InvalidArgumentError(f"{name}={value} is outside the pool of {num_blocks} blocks")
    return round(value * num_blocks) if isinstance(value, float) else int(value)
