"""Which sequences of a batch begin with the same blocks, so that their queries can read these once, together. Arrays only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvpool.attention.attention_batch import Int64Array, PagedBatch


class SharedPrefix(NamedTuple):
    """Sequences whose first `num_tokens` tokens, whole blocks, lie in the same places; all their queries are behind them."""

    rows: Int64Array
    num_tokens: int


def shared_prefixes(batch: PagedBatch, rows: Int64Array, fewest_saved: int) -> list[SharedPrefix]:
    """Disjoint groups of `rows` that save at least so many reads of a token each, by reading what they share once.

    Where few of a group share more than all of it do, the group is divided, if that saves more. Lists must have no gaps.
    """
    found = []
    before = (batch.kv_lens - batch.query_lens) // batch.block_size  # whole blocks that every query of a sequence sees
    waiting = list(_divided(batch, rows[before[rows] > 0], 0))
    while waiting:
        group = waiting.pop()
        num_shared = _num_shared(batch, group, before)
        parts = list(_divided(batch, group[before[group] > num_shared], num_shared))
        below = sum((len(part) - 1) * _num_shared(batch, part, before) for part in parts)
        saved = (len(group) - 1) * num_shared
        if below > saved:
            waiting += parts
        elif saved * batch.block_size >= fewest_saved:
            found.append(SharedPrefix(np.sort(group), num_shared * batch.block_size))
    return found


def _divided(batch: PagedBatch, rows: Int64Array, column: int) -> Iterator[Int64Array]:
    """Those of `rows` that have the same block in a column of their lists; blocks that a single one has are left out."""
    blocks = batch.indices[batch.indptr[rows] + column]
    order = np.argsort(blocks, kind="stable")
    starts = np.flatnonzero(np.diff(blocks[order])) + 1
    return (rows[part] for part in np.split(order, starts) if len(part) > 1)


def _num_shared(batch: PagedBatch, rows: Int64Array, before: Int64Array) -> int:
    """How many blocks at the beginning of all their lists are the same."""
    limit = int(before[rows].min())
    lists = batch.indices[batch.indptr[rows][:, None] + np.arange(limit)]
    same = (lists == lists[0]).all(0)
    return limit if same.all() else int(same.argmin())
