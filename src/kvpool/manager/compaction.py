"""Pools that change shape: live blocks moved together, pools grown or cut while requests run."""

from __future__ import annotations

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.kind import Group
from kvpool.errors import OutOfBlocksError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import BlockPool, CopyKind, CopyOp, ResizeResult
from kvpool.prefix.evict import evict
from kvpool.prefix.tree import all_nodes
from kvpool.stats import EvictionReason


def defragment(cache: Cache, tier: Tier) -> int:
    """Moves live blocks so that each pool uses its lowest ids only; as few moves as possible. Returns their number."""
    moved = 0
    for tiers in cache.pools:
        pool = tiers[tier]
        moved += _gather_below(cache, pool, pool.num_blocks - pool.num_free)
    cache.counters.defragmented_blocks += moved
    return moved


def resize(cache: Cache, pool: BlockPool, num_blocks: int) -> ResizeResult:
    """Changes the number of blocks of a pool; evicts and moves what stands in the way, or changes nothing."""
    live = pool.num_blocks - pool.num_free
    evicted = moved = 0
    if num_blocks < live:
        evictable = pool.num_cached - pool.num_pinned
        if live - num_blocks > evictable:
            raise OutOfBlocksError(
                f"pool {pool.index} on {pool.tier.name} cannot shrink to {num_blocks} blocks: "
                f"{live - evictable} are in use or pinned; free or swap out requests first"
            )
        evicted = _evict_regardless(cache, pool, live - num_blocks)
    if num_blocks < pool.num_blocks:
        moved = _gather_below(cache, pool, num_blocks)
    pool.resize(num_blocks)
    return ResizeResult(num_blocks, evicted, moved)


def _evict_regardless(cache: Cache, pool: BlockPool, num_blocks: int) -> int:
    """Evicts although it may cost tenants what was guaranteed to them: the memory is going away."""
    quotas = list(cache.orders.quotas.values())
    guaranteed = [quota.guaranteed for quota in quotas]
    for quota in quotas:
        quota.guaranteed = [0] * len(quota.guaranteed)
    try:
        return evict(cache, pool, pool.num_free + num_blocks, None, EvictionReason.RESIZE)
    finally:
        for quota, limits in zip(quotas, guaranteed, strict=True):
            quota.guaranteed = limits


def _gather_below(cache: Cache, pool: BlockPool, limit: int) -> int:
    """Moves every live block with an id of `limit` or more to a free id below it."""
    free = pool.free_ids()
    holes = np.sort(free[free < limit])
    owners = _owners(cache, pool)
    movers = [(block, group, before) for block, group, before in owners if block >= limit]
    if not movers:
        if limit == pool.num_blocks - pool.num_free:
            pool.set_free_ids(np.sort(free)[::-1])
        return 0
    remap = np.arange(pool.num_blocks, dtype=np.int32)
    taken = _place(movers, holes, remap)
    by_group: dict[int, list[int]] = {}
    for block, group, _ in movers:
        by_group.setdefault(group, []).append(block)
    for group, blocks in by_group.items():
        src = np.array(blocks, np.int32)
        cache.copies.append(CopyOp(CopyKind.DEFRAGMENT, group, pool.tier, pool.tier, src, remap[src]))
    _apply(cache, pool, remap)
    sources = np.array([block for block, _, _ in movers], np.int32)
    pool.refs[taken] = pool.refs[sources]
    pool.refs[sources] = 0
    still_free = np.setdiff1d(free, taken)
    pool.set_free_ids(np.sort(np.concatenate([still_free, sources]))[::-1].astype(np.int32))
    return len(movers)


def _owners(cache: Cache, pool: BlockPool) -> list[tuple[int, int, int]]:
    """(block, group, block before it in its sequence or run) for every live block, in sequence order."""
    found: dict[int, tuple[int, int, int]] = {}
    for group, ids in _runs(cache, pool):
        before = -1
        for block in ids.tolist():
            if block >= 0:
                found.setdefault(block, (block, group, before))
            before = block
    return list(found.values())


def _runs(cache: Cache, pool: BlockPool) -> list[tuple[int, Int32Array]]:
    """Every array of block ids of this pool: tables of live rows, then cached runs."""
    runs: list[tuple[int, Int32Array]] = []
    groups = [group for group in cache.groups if group.pool == pool.index]
    for row in cache.rows.live_rows():
        handle = cache.rows.handles[row]
        for group in groups:
            if pool.tier == Tier.HOST and handle.swapped is not None:
                runs.append((group.index, handle.swapped[group.index]))
            elif pool.tier == Tier.GPU and handle.swapped is None:
                runs.extend((group.index, ids) for ids in _held(cache, group, row))
    for node in all_nodes(cache):
        if node.tier == pool.tier and node.open_row < 0:
            runs.extend((group.index, node.ids[group.index]) for group in groups if group.grows)
        if node.host_copy is not None and pool.tier == Tier.HOST:
            runs.extend((group.index, node.host_copy[group.index]) for group in groups if group.grows)
    return runs


def _held(cache: Cache, group: Group, row: int) -> list[Int32Array]:
    """The parts of a row's table that name its own blocks; what the row has passed may be another's by now."""
    ids = cache.rows.all_blocks(group.index, row)
    if not group.by_block:
        return [ids]
    tip = cache.rows.tips[row]
    start = int(cache.rows.first_held[group.index, row])
    if tip.open_row == row:
        start = min(start, tip.start)  # an open node reads its ids from here
    return [ids[: min(group.sinks, start)], ids[start:]]


def _place(movers: list[tuple[int, int, int]], holes: Int32Array, remap: Int32Array) -> Int32Array:
    """Chooses a hole for each mover: right behind its predecessor if that is free, else the lowest one."""
    available = dict.fromkeys(holes.tolist())
    taken = np.empty(len(movers), np.int32)
    for i, (block, _, before) in enumerate(movers):
        wanted = int(remap[before]) + 1 if before >= 0 else -1
        hole = wanted if wanted in available else next(iter(available))
        del available[hole]
        remap[block] = taken[i] = hole
    return taken


def _apply(cache: Cache, pool: BlockPool, remap: Int32Array) -> None:
    """Writes the new ids wherever the old ones stand."""
    cache.rows.moves += 1
    for _, ids in _runs(cache, pool):
        present = ids >= 0
        ids[present] = remap[ids[present]]
    if pool.tier == Tier.GPU:
        pinned = cache.pinned_blocks[pool.index]
        cache.pinned_blocks[pool.index] = {int(remap[block]): count for block, count in pinned.items()}
