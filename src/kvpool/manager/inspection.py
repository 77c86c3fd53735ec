"""`manager.inspect`: looking at the cache. Single numbers, counters, single blocks, why something missed, and everything at
once as arrays (`snapshots.py`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from kvpool.checks import as_count, as_flag
from kvpool.config import Tier
from kvpool.core.cache import LOCAL_TIERS, Cache
from kvpool.core.handle import KVCacheHandle, any_row_of
from kvpool.core.node import Node
from kvpool.core.prompt import DEFAULT_SCOPE, Items, as_prompt
from kvpool.errors import InvalidArgumentError
from kvpool.manager.guard import Guard
from kvpool.manager.snapshots import RunsSnapshot, Snapshot, runs_snapshot, snapshot
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.blocks import idle_blocks
from kvpool.prefix.tree import all_nodes
from kvpool.scope import ReuseScope
from kvpool.sequences.explain import explain, explain_request
from kvpool.sequences.missed import MissedSpan, tokens_by_cause
from kvpool.stats import CacheStats, GroupStats, MemoryPressure, MissCause, PoolStats


class BlockState(str, Enum):
    """What a block is used for at the moment."""

    FREE = "free"
    REFERENCED = "referenced"
    CACHED = "cached"
    PINNED = "pinned"


class KVCacheBlock(NamedTuple):
    """One block as it stands now."""

    block_id: int
    pool: int
    tier: Tier
    state: BlockState
    group: int | None  # the layer group that uses it
    request_ids: tuple[Hashable, ...]  # live requests that hold it
    position: int | None  # of its first token in the sequence or prefix that it belongs to
    is_published: bool  # other requests can find it by its content
    priority: int | None = None  # of the cached run that it belongs to

    @property
    def ref_count(self) -> int:
        return len(self.request_ids)


class CachedRun(NamedTuple):
    """A run of cached blocks as it stands now."""

    number: int  # of its insertion; both parts of a divided run keep it
    tier: Tier
    start: int  # depth of its first block in the prompt
    num_blocks: int
    block_ids: tuple[Int32Array, ...]  # per layer group; -1 where one read block by block is gone
    tenant: str
    priority: int
    is_pinned: bool
    is_read: bool  # by a live request
    idle_seconds: float  # since its last use
    published_by: int  # `KVCacheHandle.serial` of the request that computed it
    scope: ReuseScope  # who may reuse it


class Inspector:
    """Answers questions about the cache, most of them by looking at everything."""

    def __init__(self, cache: Cache, guard: Guard) -> None:
        self.cache = cache
        self.guard = guard
        cache.rows.missed_tokens = self._missed_tokens

    # --- numbers -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The time by the manager's clock."""
        return self.cache.clock()

    @property
    def pressure(self) -> MemoryPressure:
        """The level of memory pressure after the last operation."""
        return self.guard.level

    @property
    def usage(self) -> float:
        """The fraction of the fullest GPU pool that live sequences hold."""
        with self.guard.lock:
            return max(pool.num_referenced / pool.num_blocks for pool in self.cache.gpu_pools)

    @property
    def policy_name(self) -> str:
        """The name of the eviction policy."""
        return self.cache.orders.policies[GPU].name

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """How much memory block tables take: layer groups, rows and columns, grown as live sequences needed them."""
        with self.guard.lock:
            tables = self.cache.rows.tables
            return (len(tables), *tables[0].shape)

    def num_free_blocks(self, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Blocks on the free list (evictable cached blocks not included; see `stats`)."""
        with self.guard.lock:
            return int(self.cache.pool(pool, tier).num_free)

    def num_blocks(self, pool: int = 0, tier: Tier = Tier.GPU) -> int:
        """Blocks of a pool on one tier, as large as it is now."""
        with self.guard.lock:
            return int(self.cache.pool(pool, tier).num_blocks)

    def has_tier(self, *tiers: Tier) -> bool:
        """Whether any of these tiers has blocks now."""
        with self.guard.lock:
            return any(
                self.cache.pool(index, tier).num_blocks for index in range(len(self.cache.pools)) for tier in tiers
            )

    def stats(self) -> CacheStats:
        """One consistent snapshot of everything counted."""
        with self.guard.query:
            cache = self.cache
            counters = cache.counters
            pools = tuple(
                PoolStats(
                    pool.index,
                    pool.tier,
                    cache.config.pools[pool.index].groups,
                    pool.num_blocks,
                    pool.num_free,
                    pool.num_referenced,
                    pool.num_cached,
                    pool.num_pinned,
                    pool.peak_referenced,
                    cache.config.pools[pool.index].block_bytes,
                )
                for tiers in cache.pools
                for pool in tiers
                if pool.num_blocks or pool.tier == Tier.GPU
            )
            totals = {
                each.name: getattr(counters, each.name)
                for each in fields(CacheStats)
                if isinstance(getattr(counters, each.name, None), int)
            }
            return CacheStats(
                pools=pools,
                groups=self._groups(),
                num_sequences=len(cache.requests),
                num_swapped=sum(handle.swapped is not None for handle in cache.requests.values()),
                num_cached_runs=self.cache.num_runs,
                hit_tokens={tier.name: counters.hit_tokens[tier] for tier in Tier},
                hit_blocks={tier.name: counters.hit_blocks[tier] for tier in Tier},
                evictions=dict(counters.evictions),
                lifetime_seconds=counters.lifetime.summary(),
                idle_before_eviction_seconds=counters.idle_before_eviction.summary(),
                reuse_gap_seconds=counters.reuse_gap.summary(),
                tenants={tenant: tuple(quota.cached) for tenant, quota in self.cache.orders.quotas.items()},
                pressure=self.pressure,
                **totals,
            )

    # --- single blocks and runs --------------------------------------------------------------------------------------

    def block(self, block_id: int, *, pool: int = 0, tier: Tier = Tier.GPU) -> KVCacheBlock:
        """Who uses one block, and as what. Looks at everything: for people and tests, not for engines."""
        with self.guard.query:
            chosen = self.cache.pool(pool, tier)
            as_count(block_id, "block_id", maximum=chosen.num_blocks - 1)
            holders: list[Hashable] = []
            group = column = None
            for handle_id, of_group, ids in self._held(chosen):
                found = np.flatnonzero(ids == block_id)
                if len(found):
                    holders.append(handle_id)
                    group, column = of_group, int(found[0])
            node = None
            for part, of_group, ids in self._runs(chosen):
                found = np.flatnonzero(ids == block_id)
                if len(found):
                    node, group, column = part, of_group, part.start + int(found[0])
            if holders:
                state = BlockState.REFERENCED
            elif node is None:
                state = BlockState.FREE
            else:
                by_itself = chosen.tier == GPU and group is not None and self.cache.groups[group].by_block
                pinned = (
                    block_id in self.cache.pinned_blocks[chosen.index]
                    if by_itself
                    else node.pins > 0 and node.tier == chosen.tier
                )
                state = BlockState.PINNED if pinned else BlockState.CACHED
            position = None if column is None else column * self.cache.block_size
            published = node is not None and not node.detached
            priority = None if node is None else node.priority
            return KVCacheBlock(
                block_id, chosen.index, chosen.tier, state, group, tuple(holders), position, published, priority
            )

    def runs(self) -> list[CachedRun]:
        """Every run of blocks that can be found, parents before children. Looks at everything: for people and tests."""
        with self.guard.query:
            read, now = self.runs_snapshot(), self.cache.now
        ends = np.cumsum(read.num_blocks)
        found = []
        for i, (end, length) in enumerate(zip(ends.tolist(), read.num_blocks.tolist(), strict=True)):
            scope = read.scopes[read.scope[i]]
            found.append(
                CachedRun(
                    number=int(read.number[i]),
                    tier=Tier(int(read.tier[i])),
                    start=int(read.start[i]),
                    num_blocks=length,
                    block_ids=tuple(ids[end - length : end] for ids in read.block_ids),
                    tenant=scope.tenant,
                    priority=int(read.priority[i]),
                    is_pinned=bool(read.is_pinned[i]),
                    is_read=bool(read.is_read[i]),
                    idle_seconds=now - float(read.last_access_at[i]),
                    published_by=int(read.published_by[i]),
                    scope=scope,
                )
            )
        return found

    def check(self) -> None:
        """Proves every invariant or raises `InvariantError` naming what is broken. Slow: for tests and doubts."""
        from kvpool.manager.checks import Checker  # nobody else needs it

        with self.guard.query:
            Checker(self.cache).run()

    # --- why something missed ----------------------------------------------------------------------------------------

    def explain(
        self,
        tokens: Any,
        scope: ReuseScope = DEFAULT_SCOPE,
        multimodal: Items | None = None,
        *,
        all_tenants: bool = False,
    ) -> list[MissedSpan]:
        """Why tokens of a prompt would not be served from the cache now, each for one cause: docs/why.md.

        Given the handle of a request, why they were not when it was admitted. The answer is for the tenant of the prompt.
        With `all_tenants` it is for an admin: it names other tenants, and tells what they hold.
        """
        cache, everything = self.cache, as_flag(all_tenants, "all_tenants")
        if cache.departed is None:
            raise InvalidArgumentError(
                "nothing is remembered of what left the cache: remembered_blocks is 0, or enable_prefix_caching is False"
            )
        if isinstance(tokens, KVCacheHandle):
            if scope is not DEFAULT_SCOPE or multimodal is not None:
                raise InvalidArgumentError("the scope and the multimodal items of a request are known")
            with self.guard.query:
                any_row_of(cache.rows, tokens)
                return explain_request(cache, cache.departed, tokens, everything)
        prompt = as_prompt(tokens, scope, multimodal)
        with self.guard.query:
            return explain(cache, cache.departed, prompt, everything)

    def _missed_tokens(self, handle: KVCacheHandle) -> dict[MissCause, int]:
        """How many tokens of a request missed for each cause."""
        return {} if self.cache.departed is None else tokens_by_cause(self.explain(handle))

    # --- everything at once ------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Every block and every live sequence as arrays, at one moment. Cheap enough for many a second."""
        with self.guard.lock:
            return snapshot(self.cache)

    def runs_snapshot(self) -> RunsSnapshot:
        """Every cached run as arrays. Takes a few microseconds for each run, and lets others in between.

        What is added, divided or taken out between two pieces may be missing; each run that is there is as it was at
        one moment.
        """
        return runs_snapshot(self.cache, self.guard.lock)

    # --- the work ----------------------------------------------------------------------------------------------------

    def _held(self, pool: BlockPool) -> Iterator[tuple[Hashable, int, Int32Array]]:
        """(request, group, ids) of every live sequence with blocks in a pool."""
        rows = self.cache.rows
        for row in rows.live_rows():
            handle = rows.handles[row]
            for group in self.cache.config.pools[pool.index].groups:
                if handle.swapped is None and pool.tier == GPU:
                    yield handle.request_id, group, rows.visible_blocks(group, row)
                elif handle.swapped is not None and pool.tier == Tier.HOST:
                    yield handle.request_id, group, handle.swapped[group]

    def _runs(self, pool: BlockPool) -> Iterator[tuple[Node, int, Int32Array]]:
        """(node, group, ids) of every run with blocks in a pool, or with a host copy there."""
        for node in all_nodes(self.cache):
            held = node.ids if node.tier == pool.tier else node.host_copy if pool.tier == Tier.HOST else None
            if held is not None:
                for group in self.cache.growing:
                    if group.pool == pool.index:
                        yield node, group.index, held[group.index]

    def _groups(self) -> tuple[GroupStats, ...]:
        """Blocks in use per layer group and tier. Groups with a pool of their own are read off it."""
        found: list[GroupStats] = []
        for spec in self.cache.groups:
            for tier in LOCAL_TIERS:
                pool = self.cache.pools[spec.pool][tier]
                if not pool.num_blocks:
                    continue
                if len(self.cache.config.pools[spec.pool].groups) == 1:
                    counts = (pool.num_referenced, pool.num_cached, pool.num_pinned)
                else:
                    counts = self._count(spec.index, pool)
                found.append(GroupStats(spec.index, tier, *counts))
        return tuple(found)

    def _count(self, group: int, pool: BlockPool) -> tuple[int, int, int]:
        """Referenced, cached and pinned blocks of a group that shares its pool."""
        held = [ids[ids >= 0] for _, of_group, ids in self._held(pool) if of_group == group]
        referenced = len(np.unique(np.concatenate(held))) if held else 0
        cached = pinned = 0
        for node, of_group, ids in self._runs(pool):
            if of_group != group:
                continue
            if node.tier != pool.tier:  # its host copy
                idle, kept = int((ids >= 0).sum()), 0
            else:
                idle, kept = idle_blocks(self.cache, node, self.cache.groups[group])
            cached += idle
            pinned += kept
        return referenced, cached, pinned
