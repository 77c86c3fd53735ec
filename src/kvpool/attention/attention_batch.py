"""PagedBatch: which blocks, which queries and how many keys one step has for one layer group. Host arrays only.

`shared_prefixes` finds sequences that begin with the same blocks, so that their queries can read these together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config.layers import LayerGroup, ceil_div
from kvpool.core.handle import CSRTable
from kvpool.errors import InvalidArgumentError
from kvpool.kernels.attention_spec import AttentionSpec

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class KeyRanges(NamedTuple):
    """The listed tokens that some queries read: `[0, sinks)` and `[start, end)`, as indices into the list."""

    sinks: Int64Array
    start: Int64Array
    end: Int64Array


@dataclass(frozen=True)
class PagedBatch:
    """A variable-length batch over paged memory: sequence i has `query_lens[i]` queries over `kv_lens[i]` tokens.

    One tensor holds the queries of all sequences, one after another: rows of one token (decode), chunks of a prompt (prefill)
    and drafts, in any mix and order. With causal attention or a window the queries are the *last* tokens of their sequence.
    `kv_lens` counts them, so their K and V must be written before attention runs. `kv_lens` says how many tokens may be
    read, because block lists also cover reserved tokens that are not written yet.

    The block lists come from the manager: `manager.batch(handles).csr(group)`. If blocks have left a window, a list holds the
    first `sink_blocks` blocks, then those from position `first_position` on. `gaps` is the number of positions between them.
    """

    indptr: Int32Array
    indices: Int32Array
    query_lens: Int64Array
    kv_lens: Int64Array
    gaps: Int64Array
    block_size: int

    @classmethod
    def of(cls, csr: CSRTable, group: LayerGroup, query_lens: npt.ArrayLike, kv_lens: npt.ArrayLike) -> PagedBatch:
        """A batch from the manager's CSR lists of `group`, without checks: `kv.batch(handles).csr(group.index)`."""
        sinks = ceil_div(group.sink_tokens, group.block_size) * group.block_size
        gaps = np.maximum(csr.first_position.astype(np.int64) - sinks, 0)
        return cls.build(csr.indptr, csr.indices, query_lens, kv_lens, block_size=group.block_size, gaps=gaps)

    @classmethod
    def build(
        cls,
        indptr: npt.ArrayLike,
        indices: npt.ArrayLike,
        query_lens: npt.ArrayLike,
        kv_lens: npt.ArrayLike,
        *,
        block_size: int,
        gaps: npt.ArrayLike | None = None,
    ) -> PagedBatch:
        """A batch from plain arrays, with checks; InvalidArgumentError names the first sequence that does not fit."""
        queries = _integers("query_lens", query_lens, np.int64)
        count = len(queries)
        missing = np.zeros(count, np.int64) if gaps is None else _integers("gaps", gaps, np.int64)
        batch = cls(
            _integers("indptr", indptr, np.int32),
            _integers("indices", indices, np.int32),
            queries,
            _integers("kv_lens", kv_lens, np.int64),
            missing,
            block_size,
        )
        batch._check()
        return batch

    def _check(self) -> None:
        count = len(self)
        shapes = (("kv_lens", self.kv_lens, count), ("gaps", self.gaps, count), ("indptr", self.indptr, count + 1))
        for name, array, length in shapes:
            if len(array) != length:
                raise InvalidArgumentError(
                    f"{name} has {len(array)} entries, but query_lens has {count}: needed is {length}"
                )
        if self.block_size < 1:
            raise InvalidArgumentError(f"block_size={self.block_size} must be at least 1")
        if not count:
            return
        held = np.diff(self.indptr).astype(np.int64)
        if self.indptr[0] != 0 or int(held.min()) < 0 or self.indptr[-1] > len(self.indices):
            raise InvalidArgumentError(
                f"indptr must rise from 0 to at most len(indices)={len(self.indices)}, got {self.indptr[:8]}..."
            )
        wrong = (self.query_lens < 0) | (self.kv_lens < 0) | (self.kv_lens - self.gaps > held * self.block_size)
        wrong |= (self.gaps < 0) | ((self.gaps > self.kv_lens) & (self.kv_lens > 0))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InvalidArgumentError(
                f"sequence {row}: {self.query_lens[row]} queries over {self.kv_lens[row]} tokens, {self.gaps[row]} of them "
                f"not held, do not fit its {held[row]} blocks of {self.block_size}; extend it before planning"
            )

    def __len__(self) -> int:
        return len(self.query_lens)

    def padded(self, num_query_tokens: int) -> PagedBatch:
        """The batch with so many queries. Those at the end belong to a sequence without keys; their attention is zero."""
        missing = num_query_tokens - self.num_query_tokens
        if not missing:
            return self
        return replace(
            self,
            indptr=np.append(self.indptr, self.indptr[-1:]),
            query_lens=np.append(self.query_lens, missing),
            kv_lens=np.append(self.kv_lens, 0),
            gaps=np.append(self.gaps, 0),
        )

    @property
    def num_query_tokens(self) -> int:
        """Rows of the query tensor."""
        return int(self.query_lens.sum())

    @property
    def num_listed(self) -> Int64Array:
        """Tokens of each sequence that its block list holds and that may be read."""
        listed: Int64Array = np.maximum(self.kv_lens - self.gaps, 0)
        return listed

    def check_for(self, spec: AttentionSpec) -> None:
        """Raises InvalidArgumentError if the queries of a sequence need tokens that are missing or not held any more."""
        if spec.sees_all:
            return
        alive = (self.query_lens > 0) & (self.kv_lens > 0)
        first_query = self.kv_lens - self.query_lens
        wrong = alive & (first_query < 0)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InvalidArgumentError(
                f"sequence {row} has {self.query_lens[row]} queries but kv_lens={self.kv_lens[row]}: kv_lens counts this "
                "step's tokens too, and 0 marks a padding row"
            )
        # A list with a gap must still hold the first position that the first query sees.
        sinks = spec.sink_slots(self.block_size)
        wrong = alive & (self.gaps > 0) & (spec.first_visible(first_query) < self.gaps + sinks)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InvalidArgumentError(
                f"sequence {row}: the query at position {first_query[row]} sees tokens before {self.gaps[row] + sinks}, "
                "which left its window; plan a step before the next one is committed"
            )

    def key_ranges(self, spec: AttentionSpec, rows: Any, first: Int64Array, last: Int64Array) -> KeyRanges:
        """The listed tokens that queries at positions `first` to `last` (inclusive) of sequences `rows` read."""
        listed, gaps = self.num_listed[rows], self.gaps[rows]
        if spec.sees_all:
            zero = np.zeros_like(listed)
            return KeyRanges(zero, zero, listed)
        end = np.clip(last + 1 - gaps, 0, listed) if spec.causal else listed
        start = np.clip(spec.first_visible(first) - gaps, 0, end)
        return KeyRanges(np.minimum(spec.sink_tokens, start), start, end)


def _integers(name: str, values: npt.ArrayLike, dtype: Any) -> Any:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"{name} must be a list of integers, got {array.dtype} of shape {array.shape}")
    return array.astype(dtype, copy=False)


class SharedPrefix(NamedTuple):
    """Sequences with the same blocks for their first `num_tokens` tokens. All their queries come after these."""

    rows: Int64Array
    num_tokens: int


def shared_prefixes(batch: PagedBatch, rows: Int64Array, fewest_saved: int) -> list[SharedPrefix]:
    """Disjoint groups of `rows` whose shared blocks are read once; each saves at least so many reads of a token.

    If a part of a group shares more than all of it, the group is divided, provided that saves more. Lists must have no gaps.
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
    """Divides `rows` by their block in a column of their lists; rows that share it with no other are left out."""
    blocks = batch.indices[batch.indptr[rows] + column]
    order = np.argsort(blocks, kind="stable")
    starts = np.flatnonzero(np.diff(blocks[order])) + 1
    return (rows[part] for part in np.split(order, starts) if len(part) > 1)


def _num_shared(batch: PagedBatch, rows: Int64Array, before: Int64Array) -> int:
    """How many of the first blocks are the same in all their lists."""
    limit = int(before[rows].min())
    lists = batch.indices[batch.indptr[rows][:, None] + np.arange(limit)]
    same = (lists == lists[0]).all(0)
    return limit if same.all() else int(same.argmin())
