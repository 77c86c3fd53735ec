"""Divides the attention of a batch into work items of about equal size, enough of them to fill a GPU."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from kvpool.attention.attention_batch import Int32Array, Int64Array, PagedBatch
from kvpool.config.layers import ceil_div
from kvpool.kernels.attention import ITEM_FIELDS, TILE_FIELDS
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.pools.arrays import within

MANY_WAVES = 4  # waves of programs on the GPU, if one is not enough
_FULL = 0.9  # if so much of all waves is used, the last wave is full enough
_SHORTEST_KEYS = 256  # the fewest keys for an item, because items must be merged


class Work(NamedTuple):
    """Work items and tiles as the kernels take them, and the number of partial results."""

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
    waves: int = MANY_WAVES,
    most_partials: int | None = None,
) -> Work:
    """Work for sequences `rows`, whose queries go `tile_tokens` to a tile.

    Keys are divided in multiples of `tile_keys`, so that about `target_items` items run at once. Each tile has at least one
    item, and one more if it has sink tokens before its window. With `waves` = 1, tiles that fill the GPU are not divided to
    fill the last wave evenly. At most `most_partials` partial results are made; None, or `max_partials`: no limit.
    """
    num_tiles = ceil_div(batch.query_lens[rows], tile_tokens)
    row = np.repeat(rows, num_tiles)
    lens = batch.query_lens[row]
    first = within(num_tiles) * tile_tokens  # queries before the tile, of its sequence
    tokens = np.minimum(lens - first, tile_tokens)
    position = batch.kv_lens[row] - lens + first
    sinks, key_start, key_end = batch.key_ranges(spec, row, position, position + tokens - 1)
    items = np.empty((len(row), ITEM_FIELDS), np.int32)  # one for each tile, to begin with
    items[:, 0] = (np.cumsum(batch.query_lens) - batch.query_lens)[row] + first
    items[:, 1] = tokens
    items[:, 2] = position
    items[:, 3] = batch.indptr[row]
    items[:, 4] = batch.gaps[row]
    items[:, 5] = key_start
    items[:, 6] = key_end
    items[:, 7] = -1

    lengths = key_end - key_start
    # The others (padding) have one item that gives zeros, and are not divided
    with_keys = np.flatnonzero(lengths)
    units = ceil_div(lengths[with_keys], tile_keys)
    ranges = np.ones(len(row), np.int64)
    ranges[with_keys] = ceil_div(units, _shares(units, target_items, waves, max(1, _SHORTEST_KEYS // tile_keys)))
    if most_partials is not None and _num_partials(ranges + (sinks > 0)) > most_partials:
        ranges[with_keys] = ceil_div(units, _equal_share(units, target_items, waves))
    tiles, num_partials = np.empty((0, TILE_FIELDS), np.int32), 0
    counts = ranges + (sinks > 0)
    split = np.flatnonzero(counts > 1)
    if len(split):
        num_partials = int(counts[split].sum())
        tiles = np.empty((len(split), TILE_FIELDS), np.int32)
        tiles[:, :2] = items[split, :2]
        tiles[:, 2] = np.cumsum(counts[split]) - counts[split]
        tiles[:, 3] = counts[split]
        items = _split(items, counts, sinks, ceil_div(lengths, ranges * tile_keys) * tile_keys)
    order = np.argsort(items[:, 5] - items[:, 6], kind="stable")  # long ones first, short ones fill the gaps
    return Work(items[order], tiles, num_partials)


def _split(items: Int32Array, counts: Int64Array, sinks: Int64Array, step: Int64Array) -> Int32Array:
    """Replaces each item by `counts` items: one for its sink tokens, if it has some, then ranges of `step` keys."""
    extra = sinks > 0
    tile = np.repeat(np.arange(len(items)), counts)
    number = within(counts) - extra[tile]  # -1: the sink tokens
    start, end = items[tile, 5], items[tile, 6]
    begin = start + number * step[tile]
    divided = items[tile]
    divided[:, 5] = np.where(number < 0, 0, np.minimum(begin, end))
    divided[:, 6] = np.where(number < 0, sinks[tile], np.minimum(begin + step[tile], end))
    partial = counts[tile] > 1
    divided[:, 7] = np.where(partial, np.cumsum(partial) - 1, -1)
    return divided


def max_items(num_tiles: int, target_items: int) -> int:
    """The most items that up to `num_tiles` tiles are divided into."""
    return 2 * num_tiles + target_items * (1 if num_tiles < target_items else MANY_WAVES)


def max_partials(spec: AttentionSpec, num_tiles: int, target_items: int, waves: int) -> int:
    """The number of partial results for which up to `num_tiles` tiles can be divided into equal shares."""
    return max(2, waves) * target_items + (2 * num_tiles if spec.sink_tokens else 0)


def _num_partials(counts: Int64Array) -> int:
    return int(counts[counts > 1].sum())


def _shares(units: Int64Array, target_items: int, waves: int, fewest: int) -> Int64Array:
    """Units of keys that an item of each tile takes at most.

    If all tiles run at once, they are divided as finely as one wave of programs allows. With somewhat more tiles, a few would
    run alone at the end, so tiles are divided into several waves. With many waves only long tiles are divided. If equal
    shares still leave much of the last wave empty, later items are smaller, down to `fewest`, to fill it.
    """
    equal = np.full(len(units), _equal_share(units, target_items, waves))
    num_items = _num_items(units, equal)
    if num_items <= target_items or num_items >= _FULL * target_items * ceil_div(num_items, target_items):
        return equal
    longest_first = np.argsort(-units, kind="stable")
    left = np.cumsum(units[longest_first][::-1])[::-1]  # units of a tile and all behind it
    shrinking = np.empty_like(equal)
    shrinking[longest_first] = np.maximum(fewest, left // target_items)
    room = max_items(len(units), target_items) - len(units)  # every tile may have an item of sink tokens besides
    return shrinking if _num_items(units, shrinking) <= room else equal


def _equal_share(units: Int64Array, target_items: int, waves: int) -> int:
    limit = target_items if len(units) <= target_items else waves * target_items
    if len(units) >= limit:
        return max(1, ceil_div(int(units.sum()), target_items))

    def fits(share: int) -> bool:
        return _num_items(units, share) <= limit

    low = max(1, ceil_div(int(units.sum()), limit))
    return bisect_left(range(low, int(units.max(initial=1))), True, key=fits) + low


def _num_items(units: Int64Array, share: Int64Array | int) -> int:
    """How many items tiles with so many units have, if each item takes up to its share."""
    return int(ceil_div(units, share).sum())
