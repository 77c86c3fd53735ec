"""Divides the attention of a batch into work items of about equal size, enough of them to fill a GPU."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from kvpool.attention.batch import Int32Array, Int64Array, PagedBatch
from kvpool.kernels.paged_attention import ITEM_FIELDS, TILE_FIELDS
from kvpool.kernels.paged_spec import AttentionSpec

_WAVES = 4  # how often a GPU is filled where once is not enough


class Work(NamedTuple):
    """Work items and tiles as the kernels take them, and how many partial results the items leave."""

    items: Int32Array  # [items, ITEM_FIELDS]
    tiles: Int32Array  # [tiles, TILE_FIELDS]; only those with partial results
    num_partials: int


def divide_work(
    spec: AttentionSpec,
    batch: PagedBatch,
    rows: Int64Array,
    *,
    tile_tokens: int,
    tile_keys: int,
    target_items: int,
) -> Work:
    """Work for sequences `rows`, whose queries go `tile_tokens` to a tile.

    Keys are divided in multiples of `tile_keys`, so that about `target_items` items run at once; each tile has at least
    one. A tile with sink tokens before its window has one more for these.
    """
    lens = batch.query_lens[rows]
    num_tiles = -(-lens // tile_tokens)
    row = np.repeat(rows, num_tiles)
    first = _within(num_tiles) * tile_tokens  # queries before the tile, of its sequence
    tokens = np.minimum(batch.query_lens[row] - first, tile_tokens)
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    position = batch.kv_lens[row] - batch.query_lens[row] + first
    sinks, key_start, key_end = batch.key_ranges(spec, row, position, position + tokens - 1)
    lengths = key_end - key_start
    share = tile_keys * _share(-(-lengths // tile_keys), target_items)
    ranges = np.maximum(1, -(-lengths // share))
    extra = (sinks > 0).astype(np.int64)
    counts = ranges + extra
    tile = np.repeat(np.arange(len(row)), counts)
    number = _within(counts) - extra[tile]  # -1: the sink tokens
    even = -(-lengths // ranges)  # the tile's keys, divided evenly over its ranges
    even = -(-np.maximum(even, 1) // tile_keys) * tile_keys
    begin = key_start[tile] + number * even[tile]
    items = np.empty((len(tile), ITEM_FIELDS), np.int32)
    items[:, 0] = (starts[row] + first)[tile]
    items[:, 1] = tokens[tile]
    items[:, 2] = position[tile]
    items[:, 3] = batch.indptr[row][tile]
    items[:, 4] = batch.gaps[row][tile]
    items[:, 5] = np.where(number < 0, 0, np.minimum(begin, key_end[tile]))
    items[:, 6] = np.where(number < 0, sinks[tile], np.minimum(begin + even[tile], key_end[tile]))

    divided = counts > 1
    partial = np.where(divided[tile], np.cumsum(divided[tile]) - 1, -1)
    items[:, 7] = partial
    items = items[np.argsort(items[:, 5] - items[:, 6], kind="stable")]  # long ones first, short ones fill the gaps
    split = np.flatnonzero(divided)
    tiles = np.empty((len(split), TILE_FIELDS), np.int32)
    tiles[:, 0] = (starts[row] + first)[split]
    tiles[:, 1] = tokens[split]
    tiles[:, 3] = counts[split]
    tiles[:, 2] = np.cumsum(counts[split]) - counts[split]
    return Work(items, tiles, int(counts[split].sum()))


def max_items(num_tiles: int, target_items: int) -> int:
    """The most items that up to `num_tiles` tiles are divided into."""
    return 2 * num_tiles + target_items * (1 if num_tiles <= target_items else _WAVES)


def _share(units: Int64Array, target_items: int) -> int:
    """Units of keys that one item takes at most.

    Tiles that all run at once are divided as finely as one wave of programs allows. With somewhat more tiles than that, a
    few would run alone at the end: they are divided into several waves. Many waves need no dividing, but for long ones.
    """
    limit = target_items if len(units) <= target_items else _WAVES * target_items
    if len(units) >= limit:
        return max(1, -(-int(units.sum()) // target_items))

    def fits(share: int) -> bool:
        return int((-(-units // share)).sum()) <= limit

    low = max(1, -(-int(units.sum()) // limit))
    return bisect_left(range(low, int(units.max(initial=1))), True, key=fits) + low


def _within(counts: Int64Array) -> Int64Array:
    """0, 1, ... inside each run of so many."""
    ends = np.cumsum(counts)
    index: Int64Array = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return index
