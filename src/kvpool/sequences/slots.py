"""Slots: where in the pools the keys and values of positions lie, as kernels take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, as_array
from kvpool.sequences.batch import SequenceBatch
from kvpool.sequences.state import CacheState


def writable_blocks(state: CacheState, group: Any) -> BoolArray:
    """For every GPU block of the group's pool, whether a sequence may write it now.

    A sequence writes from its first uncommitted position on, and behind all that is published of it: a fork may have
    published what it has not committed itself, and of a fully cached prompt the last token is computed again.
    """
    rows, size = state.rows, state.context.block_size
    kind = rows.group(group)
    pool = kind.gpu
    mask = np.zeros(pool.num_blocks, np.bool_)
    live = np.array([r for r in rows.live_rows() if (h := rows.handles[r]) is not None and h.swapped is None], np.int64)
    if not len(live):
        return mask
    if kind.grows:
        published = np.array([tip.end for row in live.tolist() if (tip := rows.tips[row]) is not None], np.int64)
        first, last = np.maximum(rows.committed[live] // size, published), rows.num_blocks[live]
    else:
        first, last = np.zeros(len(live), np.int64), rows.num_cross_blocks[live]
    counts = np.maximum(last - first, 0)
    owners = np.repeat(live, counts)
    columns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    ids = rows.tables[kind.index][owners, columns]
    mask[ids[ids >= 0]] = True
    writable: BoolArray = mask & (pool.refs <= 1)
    return writable


class Slots:
    """Block id x block size + offset, for every layer group and position; -1 where nothing is to be written."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.rows = state.rows

    def between(
        self, batch: SequenceBatch, start: Int64Array, stop: Int64Array | None, out: Int32Array | None
    ) -> Int32Array:
        """Slots (block id x block size + offset) of positions start..stop of every sequence; `stop` None means one each."""
        rows, size = self.rows, self.state.context.block_size
        if stop is None:
            positions, owners = start, batch.rows
        else:
            counts = stop - start
            ends = np.cumsum(counts)
            total = int(ends[-1]) if len(ends) else 0
            positions = np.arange(total) - np.repeat(ends - counts - start, counts)
            owners = np.repeat(batch.rows, counts)
        slots = out if out is not None else np.empty((len(self.state.groups), len(positions)), np.int32)
        column = positions // size
        offset = positions - column * size
        for group in self.state.growing:
            of_group = slots[group.index]
            blocks = rows.tables[group.index][owners, column]
            np.multiply(blocks, size, out=of_group)
            of_group += offset.astype(np.int32)
            if group.slides:
                hidden = group.hidden(column, rows.window_start[group.index][owners])
                of_group[hidden | (blocks < 0)] = -1
        slots[len(self.state.growing) :] = -1
        present = (positions < rows.present[owners]) & (positions >= rows.committed[owners])
        if present.any():
            # The last token of a fully cached prompt: computed for its logits, not written again.
            slots[:, present] = -1
        return slots

    def asked(self, batch: SequenceBatch, start: Any, stop: Any) -> tuple[Int64Array, Int64Array]:
        """The positions that a caller asks slots for, checked against the places that the sequences have."""
        first, last = _positions(start, "start", len(batch)), _positions(stop, "stop", len(batch))
        capacity = self.rows.num_blocks[batch.selection] * self.state.context.block_size
        if len(batch) and (int(first.min()) < 0 or (last < first).any() or (last > capacity).any()):
            raise InvalidArgumentError(
                f"slots were asked for positions {first.tolist()[:8]}..{last.tolist()[:8]}, "
                f"but the sequences have places for {capacity.tolist()[:8]} tokens; call extend first"
            )
        return first, last

    def check_out(self, out: Int32Array, num_slots: int) -> None:
        """Refuses an array that slots cannot be written into."""
        shape = (len(self.state.groups), num_slots)
        if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != np.int32 or not out.flags.writeable:
            given = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else repr(out)
            raise InvalidArgumentError(f"out must be a writeable int32 array of shape {shape}, got {given}")


def _positions(value: Any, name: str, batch_size: int) -> Int64Array:
    """One position for all sequences, or one for each, as an array."""
    array = as_array(value, name)
    wrong_type = array.size and array.dtype.kind not in "iu"  # an empty list has no type of its own
    if wrong_type or array.shape not in ((), (batch_size,)) or int(array.max(initial=0)) > 2**40:
        raise InvalidArgumentError(f"{name} must be one position or one per sequence ({batch_size}), got {value!r}")
    return np.broadcast_to(array.astype(np.int64), (batch_size,))
