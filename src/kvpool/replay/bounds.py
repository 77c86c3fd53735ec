"""Bounds that no policy can beat that gets the same blocks: an infinite cache, and the optimum of a given size.

The optimum is Belady's. Of the blocks that the current request does not hold, it evicts the one whose next use is farthest
away, and of equals the deepest. A request that uses a block uses everything before it, so the next use of a parent is never
later than that of a child. So the optimum never evicts a parent before its child: it is exact for the model that `simulate`
runs.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.replay.simulate import PrefillTime, ReplayConfig, ReplayResult, totals
from kvpool.replay.trace import Trace, to_blocks

USUAL_TIME = PrefillTime()
INFINITE, OPTIMUM, FLAT_FIFO = "infinite", "optimum", "fifo-flat"
MODELS = (INFINITE, OPTIMUM, FLAT_FIFO)  # names that may be used like policies, but need no manager


def run_model(
    trace: Trace,
    name: str,
    capacity: int | None,
    host: int = 0,
    disk: int = 0,
    time: PrefillTime = USUAL_TIME,
    *,
    block_size: int | None = None,
) -> ReplayResult:
    """The row of one bound (or of the flat FIFO), in blocks of `block_size` tokens, by default the trace's.

    The optimum of a GPU with lower tiers is that of one cache as large as all of them, because evicted blocks go to the next
    tier and come back when they are used. The hits of a tier are what it adds to the optimum of the tiers above it. A prompt
    larger than the GPU gets its blocks there until the next request, and the lower tiers keep theirs.
    """
    if name not in MODELS:
        raise InvalidArgumentError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    ReplayConfig(capacity=capacity, host=host, disk=disk, block_size=block_size)  # refuses sizes that are none
    blocks = _dense(to_blocks(trace, block_size, keep_ends=False))
    if name == OPTIMUM and capacity is not None and (host or disk):
        return _optimum_of_tiers(trace, blocks, capacity, host, disk, time)
    if name == INFINITE or capacity is None:
        hits, kind = _infinite_hits(blocks), "offline bound: nothing is ever evicted"
    elif name == OPTIMUM:
        hits, kind = (
            _optimal_hits(blocks, capacity),
            "offline bound: Belady's optimum, exact under the prefix constraint",
        )
    else:
        hits, kind = _flat_fifo_hits(blocks, capacity), "model: first in first out per block, parents may leave first"
    result = ReplayResult(**totals(trace, hits, blocks.unit, time, {}), policy=name, capacity=capacity, bound=kind)
    result.hit_blocks_by_tier = {"GPU": result.hit_blocks}
    return result


def _optimum_of_tiers(
    trace: Trace, blocks: Trace, capacity: int, host: int, disk: int, time: PrefillTime
) -> ReplayResult:
    hits = _optimal_hits(blocks, capacity)
    by_tier = {"GPU": int(hits.sum())}
    below = 0
    for tier, size in (("HOST", host), ("DISK", disk)):
        below += size
        if size:
            hits = _optimal_hits(blocks, capacity, below)
            by_tier[tier] = int(hits.sum()) - sum(by_tier.values())
    kind = (
        "offline bound: Belady's optimum of all tiers as one; by tier, what each adds to the optimum of those above it"
    )
    found = totals(trace, hits, blocks.unit, time, by_tier)
    return ReplayResult(**found, policy=OPTIMUM, capacity=capacity, bound=kind, hit_blocks_by_tier=by_tier)


def _dense(trace: Trace) -> Trace:
    """The same trace with consecutive ids from 0 on, because the following lists have an entry for every id."""
    return replace(trace, ids=np.unique(trace.ids, return_inverse=True)[1].astype(np.int32))


def _infinite_hits(trace: Trace) -> Int32Array:
    """A block hits if it was seen before. In a request these are the first blocks."""
    seen = np.zeros(int(trace.ids.max(initial=-1)) + 1, np.bool_)
    hits = np.zeros(len(trace), np.int32)
    for index in range(len(trace)):
        ids = trace.ids_of(index)
        known = seen[ids]
        hits[index] = len(ids) if known.all() else int(known.argmin())
        seen[ids] = True
    return hits


def next_uses(trace: Trace) -> Int64Array:
    """For every id of the trace, the request that uses it next; `len(trace)` when none does."""
    owner = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    order = np.argsort(trace.ids, kind="stable")
    following = np.full(len(order), len(trace), np.int64)
    same = trace.ids[order[:-1]] == trace.ids[order[1:]]
    following[order[:-1][same]] = owner[order[1:][same]]
    return following


def _optimal_hits(trace: Trace, capacity: int, below: int = 0) -> Int32Array:
    """Evicts the block with the farthest next use from a GPU of `capacity` blocks with `below` blocks under it.

    Outdated entries of the heap are dropped when they come up.
    """
    following = next_uses(trace).tolist()
    size = int(trace.ids.max(initial=-1)) + 1
    next_use = [-1] * size  # of a resident block; -1: not resident
    hits = np.zeros(len(trace), np.int32)
    heap: list[tuple[int, int, int]] = []
    resident = 0
    offsets = trace.offsets.tolist()
    for index in range(len(trace)):
        start = offsets[index]
        ids = trace.ids_of(index).tolist()
        if not ids:
            continue  # it asks for nothing: what a prompt larger than the cache left there stays for the next one
        count = next((at for at, block in enumerate(ids) if next_use[block] < 0), len(ids))
        hits[index] = count
        missing = {block for block in ids[count:] if next_use[block] < 0}
        excess = resident + len(missing) - max(capacity, len(ids)) - below
        # Blocks of this request have the nearest next use of all, `index`, so they are never chosen
        while excess > 0 and heap:
            distance, _, block = heap[0]
            if next_use[block] != -distance or -distance == index:
                if -distance == index:
                    break
                heappop(heap)
                continue
            heappop(heap)
            next_use[block] = -1
            resident -= 1
            excess -= 1
        resident += len(missing)
        for position, block in enumerate(ids):
            use = following[start + position]
            next_use[block] = use
            heappush(heap, (-use, -position, block))
    return hits


def _flat_fifo_hits(trace: Trace, capacity: int) -> Int32Array:
    """First in, first out without the tree: a parent may be evicted before its children, which are then useless."""
    inserted = [-1] * (int(trace.ids.max(initial=-1)) + 1)  # request that inserted a resident block
    queue: list[tuple[int, int, int]] = []  # (request, -depth, block)
    hits = np.zeros(len(trace), np.int32)
    resident = 0
    for index in range(len(trace)):
        ids = trace.ids_of(index).tolist()
        hits[index] = next((at for at, block in enumerate(ids) if inserted[block] < 0), len(ids))
        pinned = set(ids)
        missing = {block: position for position, block in enumerate(ids) if inserted[block] < 0}
        spared = []
        while resident + len(missing) > capacity and queue:
            entry = heappop(queue)
            if entry[2] in pinned:
                spared.append(entry)
                continue
            inserted[entry[2]] = -1
            resident -= 1
        for entry in spared:
            heappush(queue, entry)
        for block, position in missing.items():
            inserted[block] = index
            heappush(queue, (index, -position, block))
        resident += len(missing)
    return hits
