"""Divides the attention of a batch into work items of about equal size, enough of them to fill a GPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpool.attention.batch import Int32Array, Int64Array, PagedBatch
from kvpool.kernels.paged_attention import ITEM_FIELDS, TILE_FIELDS
from kvpool.kernels.paged_spec import AttentionSpec


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

    Keys are divided evenly over about `target_items` items, in multiples of `tile_keys`; each tile has at least one. A
    tile with sink tokens before its window has one more for these.
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
    share = -(-int(lengths.sum()) // max(1, target_items))
    share = -(-max(share, 1) // tile_keys) * tile_keys

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
    split = np.flatnonzero(divided)
    tiles = np.empty((len(split), TILE_FIELDS), np.int32)
    tiles[:, 0] = (starts[row] + first)[split]
    tiles[:, 1] = tokens[split]
    tiles[:, 3] = counts[split]
    tiles[:, 2] = np.cumsum(counts[split]) - counts[split]
    return Work(items, tiles, int(counts[split].sum()))


def _within(counts: Int64Array) -> Int64Array:
    """0, 1, ... inside each run of so many."""
    ends = np.cumsum(counts)
    index: Int64Array = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return index
