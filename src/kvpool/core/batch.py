"""A batch of live sequences, and what kernels are handed for it: padded tables, CSR lists, slot mappings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.core.handle import GivenHandle, KVCacheHandle
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array, Int64Array, largest

if TYPE_CHECKING:
    from kvpool.core.cache import Cache


_NOT_PREPARED: Int64Array = np.empty(0, np.int64)


class CSRTable(NamedTuple):
    """The blocks of a batch in FlashInfer's form: sequence i has `indices[indptr[i]:indptr[i + 1]]`.

    `last_page_len` is the number of tokens in each sequence's last block. Only blocks that a sequence still holds are
    listed; `first_position` is the position of the first token behind those that it gave up.
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array
    first_position: Int32Array


def as_handles(handles: Sequence[GivenHandle]) -> tuple[GivenHandle, ...]:
    """The members of a batch; whether they are live handles is checked where they are used."""
    try:
        return tuple(handles)
    except Exception:
        message = f"a batch is a sequence of handles, got {handles!r}; put a single one in a list"
        raise InvalidArgumentError(message) from None


class SequenceBatch:
    """Handles whose rows are looked up once and used for many steps. Make it with `manager.batch(handles)`.

    A batch stays usable while all of its sequences live; after one of them is freed or swapped out, every use raises
    until a new batch is made.
    """

    __slots__ = (
        "_checked",
        "_serials",
        "_cache",
        "handles",
        "last_slots",
        "moves",
        "ones",
        "rows",
        "selection",
        "sizes",
        "slot_steps",
    )

    def __init__(self, cache: Cache, handles: Sequence[GivenHandle]) -> None:
        self._cache: Cache = cache
        self.handles = as_handles(handles)
        self.rows: Int64Array = np.array([cache.row_of(handle) for handle in self.handles], np.int64)
        if len(set(self.rows.tolist())) != len(self.rows):
            raise InvalidArgumentError("a batch must not hold the same sequence twice; fork it instead")
        # Consecutive rows are addressed by a slice: array operations then work on views instead of copies.
        self.selection: Any = self.rows
        if len(self.rows) and (np.diff(self.rows) == 1).all():
            self.selection = slice(int(self.rows[0]), int(self.rows[-1]) + 1)
        self._serials = cache.rows.serials[self.rows]
        self._checked = cache.rows.moves  # when these were looked at last
        # The slots of the step before, and `SequenceRows.moves` at that time: while it stands, the next slots follow them.
        self.last_slots: Int32Array | None = None
        self.moves = -1
        self.ones = self.sizes = _NOT_PREPARED  # set with the first step, as the next one
        self.slot_steps: Int32Array

    @property
    def num_committed(self) -> Int64Array:
        """The committed tokens of each sequence."""
        return self._cache.rows.committed[self.rows]

    def __len__(self) -> int:
        return len(self.handles)

    def __iter__(self) -> Iterator[KVCacheHandle]:
        return iter(self.handles)

    def refresh(self) -> None:
        """Checks that all sequences still live on the GPU (only after something ended or moved)."""
        rows = self._cache.rows
        if rows.moves != self._checked:
            if (rows.serials[self.rows] != self._serials).any():
                for handle in self.handles:
                    self._cache.row_of(handle)  # raises for the one that ended
            self._checked = rows.moves

    def lengths(self) -> Int64Array:
        """Reserved tokens of each sequence (a copy)."""
        with self._cache.rows.lock:
            self.refresh()
            lengths: Int64Array = self._cache.rows.reserved[self.selection].copy()
            return lengths

    def padded_table(self, group: int = 0, out: Int32Array | None = None) -> Int32Array:
        """Block ids, one row per sequence, -1 behind the last block and where a block was given up.

        Without `out`, a full-attention group with consecutive rows gives a read-only view of the manager's own table:
        valid until the next operation. `out` receives a copy and must have enough columns.
        """
        with self._cache.rows.lock:
            self.refresh()
            return self._padded_table(group, out)

    def _padded_table(self, group: int, out: Int32Array | None) -> Int32Array:
        rows = self._cache.rows
        kind = self._cache.group(group)
        counts = kind.pick(rows.num_blocks, rows.num_fixed)
        columns = largest(counts[self.selection]) if len(self.rows) else 0
        table = rows.tables[group]
        if out is not None:
            _check_out(out, (len(self.rows), columns), "a padded table", exact=False)
            out[:, columns:] = -1
            target = out[:, :columns]
            target[...] = table[self.selection, :columns]
        else:
            target = table[self.selection, :columns]  # an array of its own, whose memory may be the table's
        if kind.by_block:
            target = target if out is not None else target.copy()
            starts = rows.first_held[group][self.selection][:, None]
            target[kind.hidden(np.arange(columns), starts)] = -1
        elif out is None:
            target.setflags(write=False)
        return out if out is not None else target

    def csr(
        self,
        group: int = 0,
        *,
        indptr: Int32Array | None = None,
        indices: Int32Array | None = None,
        last_page_len: Int32Array | None = None,
    ) -> CSRTable:
        """The batch's blocks in CSR form, into the given arrays where there are any (`indices` may be longer)."""
        with self._cache.rows.lock:
            self.refresh()
            return self._csr(group, indptr, indices, last_page_len)

    def _csr(
        self, group: int, indptr: Int32Array | None, indices: Int32Array | None, last_page_len: Int32Array | None
    ) -> CSRTable:
        rows = self._cache.rows
        size = rows.block_size
        kind = self._cache.group(group)
        count = len(self.rows)
        lengths = kind.lengths(rows, self.selection, self.handles)
        ends = (lengths + (size - 1)) // size
        starts = np.zeros(count, np.int64)
        table = rows.tables[group]
        columns = int(ends.max()) if count else 0
        column = np.arange(columns)
        held = column < ends[:, None]
        first = np.zeros(count, np.int32)
        sizes = ends
        if kind.by_block:
            starts = rows.first_held[group][self.selection]
            held &= ~kind.hidden(column, starts[:, None])
            sizes = held.sum(axis=1)
            first = (kind.first_listed(starts) * size).astype(np.int32)
        indptr = _array(indptr, count + 1, "indptr")
        indptr[0] = 0
        np.cumsum(sizes, out=indptr[1:])
        total = int(indptr[-1])
        picked = table[self.selection, :columns][held]
        if indices is None:
            indices = picked
        else:
            _check_out(indices, (total,), "indices", exact=False)
            indices[:total] = picked
        last_page_len = _array(last_page_len, count, "last_page_len")
        np.subtract(lengths, (ends - 1) * size, out=last_page_len, casting="unsafe")
        last_page_len[lengths == 0] = 0
        return CSRTable(indptr, indices, last_page_len, first)


def _array(out: Int32Array | None, length: int, name: str) -> Int32Array:
    if out is None:
        return np.empty(length, np.int32)
    _check_out(out, (length,), name, exact=True)
    return out


def _check_out(out: npt.NDArray[Any], shape: tuple[int, ...], name: str, exact: bool) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != np.int32:
        raise InvalidArgumentError(
            f"the array for {name} must be int32, got {getattr(out, 'dtype', type(out).__name__)}"
        )
    fits = (
        out.shape == shape
        if exact
        else len(out.shape) == len(shape) and out.shape[:-1] == shape[:-1] and out.shape[-1] >= shape[-1]
    )
    if not fits:
        raise InvalidArgumentError(f"the array for {name} has shape {out.shape}, needed is {shape}")
