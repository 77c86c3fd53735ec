"""Which blocks may be written: those of exactly one sequence that are not published."""

from __future__ import annotations

import numpy as np

from kvpool.pools.arrays import BoolArray
from kvpool.sequences.live.cache_state import CacheState


def writable_blocks(state: CacheState, group: int) -> BoolArray:
    """For every GPU block of the group's pool, whether a sequence may write it now.

    A sequence writes from its first uncommitted position on; everything before may be published. A block that is there
    already (the last one of a fully cached prompt) is published too, though its last token is not committed yet.
    """
    rows, size = state.rows, state.block_size
    kind = rows.group(group)
    pool = kind.gpu
    mask = np.zeros(pool.num_blocks, np.bool_)
    live = np.array([r for r in rows.live_rows() if (h := rows.handles[r]) is not None and h.swapped is None], np.int64)
    if not len(live):
        return mask
    if kind.grows:
        present = np.where(rows.present[live] > rows.written[live], rows.present[live], 0)
        first, last = np.maximum(rows.committed[live], present) // size, rows.num_blocks[live]
    else:
        first, last = np.zeros(len(live), np.int64), rows.num_cross_blocks[live]
    counts = np.maximum(last - first, 0)
    owners = np.repeat(live, counts)
    columns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    ids = rows.tables[group][owners, columns]
    mask[ids[ids >= 0]] = True
    writable: BoolArray = mask & (pool.refs <= 1)
    return writable
