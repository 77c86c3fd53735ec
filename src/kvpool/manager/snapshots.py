"""The whole cache at once as arrays, for those who look at it several times a second: the live view.

Blocks and sequences, at one moment, are a few operations on whole arrays; runs cost a step of Python each, so they are asked
for less often and read in pieces. Nothing is changed, nothing expires, and nobody is called back.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle
from kvpool.core.node import Node
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array
from kvpool.pools.pool import GPU, BlockPool
from kvpool.scope import ReuseScope
from kvpool.stats import Counters

PIECE: Final = 256  # runs that are read while the lock is held
_COUNTED = (
    *("requests", "allocation_failures", "extend_failures", "prompt_tokens", "partial_hit_tokens", "blocks_allocated"),
    *("copies_on_write", "forks", "swaps_out", "swaps_in", "swapped_blocks", "offloaded_blocks", "onboarded_blocks"),
)


class PoolSnapshot(NamedTuple):
    """One pool on one tier. A block that is not free and has no holder is cached."""

    pool: int
    tier: Tier
    num_referenced: int
    num_cached: int
    num_pinned: int
    is_free: BoolArray  # of every block
    num_holders: Int32Array  # live sequences that hold a block
    holder: Int32Array  # the place in `Snapshot.sequences` of one of them; -1 where nobody does

    @property
    def num_blocks(self) -> int:
        return len(self.is_free)


class SequenceSnapshot(NamedTuple):
    """One live sequence."""

    serial: int
    request_id: Hashable
    scope: ReuseScope
    session: str | None
    is_swapped: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_written: int
    num_reserved: int
    tables: tuple[Int32Array, ...]  # per layer group; -1 where a block was given up


class RunsSnapshot(NamedTuple):
    """Cached runs, parents before children; `number` and `start` together name one as long as it lives."""

    number: Int64Array  # of its insertion; both parts of a divided run keep it
    start: Int64Array  # depth of its first block in the prompt
    num_blocks: Int64Array
    parent: Int64Array  # the place of its parent in these arrays; -1 at the top of a scope
    tier: npt.NDArray[np.uint8]
    priority: npt.NDArray[np.uint8]
    is_pinned: BoolArray
    is_read: BoolArray  # by a live sequence
    num_hits: Int64Array
    last_access_at: npt.NDArray[np.float64]
    published_by: Int64Array  # `KVCacheHandle.serial` of the request that computed it
    scope: Int64Array  # place in `scopes`
    scopes: tuple[ReuseScope, ...]
    # Per cached layer group: those of all runs one after the other, -1 where one is gone
    block_ids: tuple[Int32Array, ...]
    pools: tuple[int, ...]  # of each of `block_ids`
    by_block: tuple[bool, ...]  # whether blocks of a group are read one by one: on the GPU they are pinned so, too


class Snapshot(NamedTuple):
    """The pools and the live sequences."""

    tick: int  # grows with every operation: equal ticks, equal snapshots
    now: float
    pools: tuple[PoolSnapshot, ...]
    sequences: tuple[SequenceSnapshot, ...]
    pinned_blocks: tuple[tuple[int, Int32Array], ...]  # (pool, ids) of GPU blocks that are pinned one by one
    counts: dict[str, int]  # totals since the manager was made; of hits by tier, of evictions by reason


_OF_NODE = attrgetter(
    *("created", "start", "num_blocks", "tier", "priority", "pins", "active", "hits", "last_access_at", "published_by")
)


def snapshot(cache: Cache) -> Snapshot:
    """Every block and every live sequence, for who holds the lock."""
    handles = [cache.rows.handles[row] for row in cache.rows.live_rows()]
    sequences = tuple(_sequence(cache, handle) for handle in handles if handle is not None)
    pools = tuple(
        _pool(cache, pool, sequences) for tiers in cache.pools for pool in tiers if pool.num_blocks or pool.tier == GPU
    )
    kept = tuple((index, np.fromiter(ids, np.int32, len(ids))) for index, ids in enumerate(cache.pinned_blocks) if ids)
    return Snapshot(cache.tick, cache.clock(), pools, sequences, kept, _counts(cache.counters))


def runs_snapshot(cache: Cache, lock: AbstractContextManager[Any]) -> RunsSnapshot:
    """Every cached run. Holds the lock for a piece of them at a time."""
    nodes: list[tuple[Any, ...]] = []
    parents: list[int] = []
    scope: list[int] = []
    ids: list[list[Int32Array]] = [[_NO_IDS] for _ in cache.growing]
    with lock:
        roots = list(cache.roots.values())
        stack = [(child, -1, place) for place, root in enumerate(roots) for child in (root.children or {}).values()]
    while stack:
        with lock:
            piece: list[Node] = []
            while stack and len(piece) < PIECE:
                node, parent, place = stack.pop()
                if node.detached:  # since its parent was read
                    continue
                node.sync()
                if node.children is not None:
                    mine = len(nodes) + len(piece)
                    stack.extend([(child, mine, place) for child in node.children.values()])
                parents.append(parent)
                scope.append(place)
                piece.append(node)
            nodes.extend(map(_OF_NODE, piece))
            if piece:
                for group, parts in enumerate(ids):
                    parts.append(np.concatenate([node.ids[group] for node in piece]))
        time.sleep(0)  # whoever waits for the lock gets it
    columns = list(zip(*nodes, strict=True)) or [()] * 10
    number, start, num_blocks, tier, priority, pins, active, hits, last_access_at, published_by = columns
    return RunsSnapshot(
        number=np.array(number, np.int64),
        start=np.array(start, np.int64),
        num_blocks=np.array(num_blocks, np.int64),
        parent=np.array(parents, np.int64),
        tier=np.fromiter(map(int, tier), np.uint8, len(tier)),
        priority=np.array(priority, np.uint8),
        is_pinned=np.array(pins, np.int64) > 0,
        is_read=np.array(active, np.int64) > 0,
        num_hits=np.array(hits, np.int64),
        last_access_at=np.array(last_access_at, np.float64),
        published_by=np.array(published_by, np.int64),
        scope=np.array(scope, np.int64),
        scopes=tuple(root.scope for root in roots),
        block_ids=tuple(map(np.concatenate, ids)),
        pools=tuple(group.pool for group in cache.growing),
        by_block=tuple(group.by_block for group in cache.growing),
    )


def _counts(counters: Counters) -> dict[str, int]:
    counts = {name: getattr(counters, name) for name in _COUNTED}
    counts |= {f"hit_tokens.{tier.name}": counters.hit_tokens[tier] for tier in Tier}
    return counts | {f"evictions.{reason}": count for reason, count in counters.evictions.items()}


def _sequence(cache: Cache, handle: KVCacheHandle) -> SequenceSnapshot:
    rows, row = cache.rows, handle.row
    if handle.swapped is not None:
        tables = tuple(ids.copy() for ids in handle.swapped)
    else:
        tables = tuple(rows.visible_blocks(group.index, row).copy() for group in cache.groups)
    return SequenceSnapshot(
        handle.serial,
        handle.request_id,
        handle.scope,
        handle.session,
        handle.swapped is not None,
        handle.num_prompt_tokens,
        handle.num_cached_tokens,
        rows.written.item(row),
        rows.reserved.item(row),
        tables,
    )


def _pool(cache: Cache, pool: BlockPool, sequences: tuple[SequenceSnapshot, ...]) -> PoolSnapshot:
    is_free = np.zeros(pool.num_blocks, np.bool_)
    is_free[pool.free_ids()] = True
    count = np.zeros(pool.num_blocks, np.int32)
    holder = np.full(pool.num_blocks, -1, np.int32)
    groups = cache.config.pools[pool.index].groups
    held, whose = [], []
    for place, sequence in enumerate(sequences):
        if pool.tier == (Tier.HOST if sequence.is_swapped else GPU):
            for group in groups:
                held.append(sequence.tables[group])
                whose.append(place)
    if held:
        ids = np.concatenate(held)
        owners = np.repeat(np.asarray(whose, np.int32), [len(part) for part in held])
        there = ids >= 0
        ids, owners = ids[there], owners[there]
        count += np.bincount(ids, minlength=pool.num_blocks).astype(np.int32)
        holder[ids] = owners
    return PoolSnapshot(
        pool.index, pool.tier, pool.num_referenced, pool.num_cached, pool.num_pinned, is_free, count, holder
    )


_NO_IDS: Int32Array = np.empty(0, np.int32)
