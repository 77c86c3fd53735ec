"""Looking at single blocks and groups, for people and tests: slow scans of what the hot paths keep in aggregate."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np

from kvpool.config import Tier
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.node import Node
from kvpool.scope import ReuseScope
from kvpool.sequences.state import LOCAL_TIERS, CacheState
from kvpool.stats import CacheStats, GroupStats, MemoryPressure, PoolStats


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
    block_ids: tuple[Int32Array, ...]  # per layer group; -1 where a windowed block is gone
    tenant: str
    priority: int
    is_pinned: bool
    is_read: bool  # by a live request
    idle_seconds: float  # since its last use
    published_by: int  # `KVCacheHandle.serial` of the request that computed it
    scope: ReuseScope  # who may reuse it


class Inspector:
    """Answers questions about single blocks and groups by looking at everything."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.context = state.context
        self.tree = state.cache.tree
        self.windows = state.cache.windows

    def block(self, pool: BlockPool, block_id: int) -> KVCacheBlock:
        """Finds out who uses a block."""
        holders: list[Hashable] = []
        group = column = None
        for handle_id, of_group, ids in self._held(pool):
            found = np.flatnonzero(ids == block_id)
            if len(found):
                holders.append(handle_id)
                group, column = of_group, int(found[0])
        node = None
        for part, of_group, ids in self._runs(pool):
            found = np.flatnonzero(ids == block_id)
            if len(found):
                node, group, column = part, of_group, part.start + int(found[0])
        if holders:
            state = BlockState.REFERENCED
        elif node is None:
            state = BlockState.FREE
        else:
            by_itself = pool.tier == GPU and group is not None and self.context.groups[group].slides
            pinned = (
                block_id in self.windows.pinned[pool.index] if by_itself else node.pins > 0 and node.tier == pool.tier
            )
            state = BlockState.PINNED if pinned else BlockState.CACHED
        position = None if column is None else column * self.state.block_size
        published = node is not None and not node.detached
        priority = None if node is None else node.priority
        return KVCacheBlock(
            block_id, pool.index, pool.tier, state, group, tuple(holders), position, published, priority
        )

    def runs(self) -> list[CachedRun]:
        """Every run that can be found, parents before children."""
        found = []
        for node in self.tree.nodes():
            if node.detached:
                continue
            self.context.sync(node)
            ids = tuple(part.copy() for part in node.ids)
            found.append(
                CachedRun(
                    node.created,
                    node.tier,
                    node.start,
                    node.num_blocks,
                    ids,
                    node.root.scope.tenant,
                    node.priority,
                    node.pins > 0,
                    node.active > 0,
                    self.context.now - node.last_access_at,
                    node.published_by,
                    node.root.scope,
                )
            )
        return found

    def snapshot(self, pressure: MemoryPressure) -> CacheStats:
        """Everything counted, at one moment."""
        state = self.state
        counters = state.counters
        pools = tuple(
            PoolStats(
                pool.index,
                pool.tier,
                state.config.pools[pool.index].groups,
                pool.num_blocks,
                pool.num_free,
                pool.num_referenced,
                pool.num_cached,
                pool.num_pinned,
                pool.peak_referenced,
                state.config.pools[pool.index].block_bytes,
            )
            for tiers in state.pools
            for pool in tiers
            if pool.num_blocks or pool.tier == Tier.GPU
        )
        same = {
            name: getattr(counters, name)
            for name in (
                "requests",
                "allocation_failures",
                "extend_failures",
                "prompt_tokens",
                "prompt_blocks",
                "partial_hit_tokens",
                "full_hits_with_logits",
                "blocks_allocated",
                "blocks_merged",
                "copies_on_write",
                "forks",
                "rewinds",
                "swaps_out",
                "swaps_in",
                "swapped_blocks",
                "offloaded_blocks",
                "onboarded_blocks",
                "shadowed_blocks",
                "defragmented_blocks",
            )
        }
        return CacheStats(
            pools=pools,
            groups=self.groups(),
            num_sequences=len(state.requests),
            num_swapped=sum(handle.swapped is not None for handle in state.requests.values()),
            num_cached_runs=state.cache.tree.num_runs,
            hit_tokens={tier.name: counters.hit_tokens[tier] for tier in Tier},
            hit_blocks={tier.name: counters.hit_blocks[tier] for tier in Tier},
            evictions=dict(counters.evictions),
            lifetime_seconds=counters.lifetime.summary(),
            idle_before_eviction_seconds=counters.idle_before_eviction.summary(),
            reuse_gap_seconds=counters.reuse_gap.summary(),
            tenants={tenant: tuple(quota.cached) for tenant, quota in state.cache.orders.quotas.items()},
            pressure=pressure,
            **same,
        )

    def _held(self, pool: BlockPool) -> Iterator[tuple[Hashable, int, Int32Array]]:
        """(request, group, ids) of every live sequence with blocks in a pool."""
        rows = self.state.rows
        for row in rows.live_rows():
            handle = rows.handles[row]
            assert handle is not None
            for group in self.state.config.pools[pool.index].groups:
                if handle.swapped is None and pool.tier == GPU:
                    yield handle.request_id, group, rows.visible_blocks(group, row)
                elif handle.swapped is not None and pool.tier == Tier.HOST:
                    yield handle.request_id, group, handle.swapped.ids[group]

    def _runs(self, pool: BlockPool) -> Iterator[tuple[Node, int, Int32Array]]:
        """(node, group, ids) of every run with blocks in a pool, or with a shadow there."""
        for node in self.tree.nodes():
            self.context.sync(node)
            held = node.ids if node.tier == pool.tier else node.shadow if pool.tier == Tier.HOST else None
            if held is not None:
                for group in self.context.cached:
                    if group.pool == pool.index:
                        yield node, group.index, held[group.index]

    def groups(self) -> tuple[GroupStats, ...]:
        """Blocks in use per layer group and tier. Groups with a pool of their own are read off it."""
        found: list[GroupStats] = []
        for spec in self.state.groups:
            for tier in LOCAL_TIERS:
                pool = self.state.pools[spec.pool][tier]
                if not pool.num_blocks:
                    continue
                if len(self.state.config.pools[spec.pool].groups) == 1:
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
        kept = self.windows.pinned[pool.index]
        for node, of_group, ids in self._runs(pool):
            if of_group != group:
                continue
            ids = ids[ids >= 0]
            if self.context.groups[group].slides and pool.tier == GPU:
                idle = ids[pool.refs[ids] == 0]
                cached += len(idle)
                pinned += sum(block in kept for block in idle.tolist()) if kept else 0
            elif node.tier != pool.tier:
                cached += len(ids)
            elif not node.active:
                cached += len(ids)
                pinned += len(ids) if node.pins else 0
        return referenced, cached, pinned
