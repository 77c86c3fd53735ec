"""Looking at single blocks and groups, for people and tests: slow scans of what the hot paths keep in aggregate."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np

from kvpool.blocks.arrays import Int32Array
from kvpool.blocks.node import Node
from kvpool.blocks.pool import GPU, BlockPool
from kvpool.blocks.state import LOCAL_TIERS, CacheState
from kvpool.config import Tier
from kvpool.stats import GroupStats


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

    @property
    def ref_count(self) -> int:
        return len(self.request_ids)


class Inspector:
    """Answers questions about single blocks and groups by looking at everything."""

    def __init__(self, state: CacheState) -> None:
        self.state = state

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
        for part, of_group in self._runs(pool):
            found = np.flatnonzero(part.ids[of_group] == block_id)
            if len(found):
                node, group, column = part, of_group, part.start + int(found[0])
        if holders:
            state = BlockState.REFERENCED
        elif node is None:
            state = BlockState.FREE
        else:
            by_itself = pool.tier == GPU and group in self.state.cache.windowed
            pinned = block_id in self.state.cache.pinned_windowed[pool.index] if by_itself else node.pins > 0
            state = BlockState.PINNED if pinned else BlockState.CACHED
        position = None if column is None else column * self.state.block_size
        published = node is not None and not node.detached
        return KVCacheBlock(block_id, pool.index, pool.tier, state, group, tuple(holders), position, published)

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

    def _runs(self, pool: BlockPool) -> Iterator[tuple[Node, int]]:
        """(node, group) of every run on a pool's tier."""
        for node in self.state.cache.nodes():
            self.state.cache.sync(node)
            if node.tier == pool.tier:
                for group in self.state.config.pools[pool.index].groups:
                    if group < self.state.growing:
                        yield node, group

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
        cache = self.state.cache
        held = [ids[ids >= 0] for _, of_group, ids in self._held(pool) if of_group == group]
        referenced = len(np.unique(np.concatenate(held))) if held else 0
        cached = pinned = 0
        kept = cache.pinned_windowed[pool.index]
        for node, of_group in self._runs(pool):
            if of_group != group:
                continue
            ids = node.ids[group][node.ids[group] >= 0]
            if group in cache.windowed and pool.tier == GPU:
                idle = ids[pool.refs[ids] == 0]
                cached += len(idle)
                pinned += sum(block in kept for block in idle.tolist()) if kept else 0
            elif not node.active:
                cached += len(ids)
                pinned += len(ids) if node.pins else 0
        return referenced, cached, pinned
