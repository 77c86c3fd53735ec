"""A step as bytes, numbers only: what the ranks of a divided model need of a `BatchPlan`, and the copies before it.

header        counts and flags, 32-bit integers
copies        if any: their number; for each: six integers, then the blocks that are read and the blocks that are written
token ids, slots, kv_lengths, kept tokens
positions, query_start, samples, drafts, unless every row has one token and one sample
block lists   for each layer group: indptr, last_page_len, first_position, then the blocks
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import Tier
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.pools.pool import CopyKind, CopyOp
from kvpool.scheduling import BatchPlan
from kvpool.sequences.batch import CSRTable

_HEADER = struct.Struct("<7i")
_HEADER_WORDS = _HEADER.size // 4
_COUNT = struct.Struct("<i")
_COPY = struct.Struct("<6i")
_UNIFORM, _LAUNCH, _KEEPS, _UNKNOWN, _COPIES = 1, 2, 4, 8, 16
_KINDS = tuple(CopyKind)
_TIERS = tuple(Tier)


class BlockLists:
    """The block lists of a step, one for each layer group: what a runner asks of a batch of sequences."""

    def __init__(self, tables: Sequence[CSRTable]) -> None:
        self.tables = tables

    def csr(self, group: int = 0) -> CSRTable:
        """The lists of one layer group."""
        return self.tables[group]

    def padded_table(self, group: int = 0) -> Int32Array:
        """All blocks that the step reads, in one row."""
        return self.tables[group].indices[None]


def make_lists(plan: BatchPlan, num_groups: int) -> BlockLists:
    """Makes the block lists of a step, which cost more than its message. The step then runs with them, too."""
    lists = BlockLists([plan.batch.csr(group) for group in range(num_groups)])
    vars(plan)["batch"] = lists
    return lists


class StepInputs(NamedTuple):
    """One step of the model, with the copies that come before it."""

    copies: list[CopyOp]
    plan: BatchPlan
    launch: bool = False
    keep: Int64Array | None = None


def encode(step: StepInputs, lists: BlockLists, place: Callable[[int], Int32Array]) -> Int32Array:
    """Writes the message of a step into the memory that `place` has for so many integers."""
    copies, plan, launch, keep = step
    rows, num_groups = len(plan.sequences), len(lists.tables)
    flags = plan.is_uniform * _UNIFORM + launch * _LAUNCH + (keep is not None) * _KEEPS
    flags += plan.has_unknown_tokens * _UNKNOWN + bool(copies) * _COPIES
    num_kept = 0 if keep is None else len(keep)
    parts: list[npt.NDArray[Any]] = [plan.token_ids, plan.slots.reshape(-1), plan.kv_lengths]
    if copies:
        parts.insert(0, np.frombuffer(encode_copies(copies), np.int32))
    if keep is not None:
        parts.append(keep)
    if not plan.is_uniform:  # otherwise every row has one token, the last one, and one sample
        parts += plan.positions, plan.query_start, plan.num_samples, plan.num_drafts
    for table in lists.tables:
        parts += table.indptr, table.last_page_len, table.first_position, table.indices
    message = place(_HEADER_WORDS + sum(map(len, parts)))
    _HEADER.pack_into(message.data, 0, plan.number, rows, plan.num_decode, plan.num_tokens, flags, num_kept, num_groups)
    np.concatenate(parts, out=message[_HEADER_WORDS:], casting="unsafe")
    return message


def encode_copies(copies: Sequence[CopyOp]) -> bytes:
    """The message of copies without a step, which is a part of that of a step, too."""
    parts = [_COUNT.pack(len(copies))]
    for op in copies:
        tokens = -1 if op.num_tokens is None else op.num_tokens
        where = _TIERS.index(op.src_tier), _TIERS.index(op.dst_tier)
        head = _COPY.pack(_KINDS.index(op.kind), op.group, *where, len(op.src), tokens)
        parts += [head, *_as_bytes(op.src, op.dst)]
    return b"".join(parts)


class _Reader:
    """Reads a message from its beginning to its end."""

    def __init__(self, message: bytearray) -> None:
        self._message = np.frombuffer(message, np.int32)
        self._at = 0

    def fields(self, form: struct.Struct) -> tuple[Any, ...]:
        found = form.unpack_from(self._message.data, 4 * self._at)
        self._at += form.size // 4
        return found

    def take(self, count: int) -> Int32Array:
        self._at += count
        return self._message[self._at - count : self._at]

    def copies(self) -> list[CopyOp]:
        found = []
        for _copy in range(self.fields(_COUNT)[0]):
            kind, group, source, target, count, tokens = self.fields(_COPY)
            where, blocks = (_TIERS[source], _TIERS[target]), (self.take(count), self.take(count))
            found.append(CopyOp(_KINDS[kind], group, *where, *blocks, None if tokens < 0 else tokens))
        return found


def decode_copies(message: bytearray) -> list[CopyOp]:
    """The copies of a message of `encode_copies`."""
    return _Reader(message).copies()


def decode(message: bytearray) -> StepInputs:
    """The step of a message."""
    reader = _Reader(message)
    number, rows, num_decode, num_tokens, flags, num_kept, num_groups = reader.fields(_HEADER)
    copies, take = reader.copies() if flags & _COPIES else [], reader.take
    token_ids, slots = take(num_tokens), take(num_groups * num_tokens).reshape(num_groups, num_tokens)
    kv_lengths, kept = take(rows).astype(np.int64), take(num_kept).astype(np.int64)
    if flags & _UNIFORM:
        positions, query_start = kv_lengths - 1, np.arange(rows + 1, dtype=np.int32)
        samples, drafts = np.ones(rows, np.int64), np.zeros(rows, np.int64)
    else:
        positions, query_start = take(num_tokens).astype(np.int64), take(rows + 1)
        samples, drafts = take(rows).astype(np.int64), take(rows).astype(np.int64)
    tables = []
    for _group in range(num_groups):
        indptr, last, first = take(rows + 1), take(rows), take(rows)
        tables.append(CSRTable(indptr, take(int(indptr[-1])), last, first))
    nobody: Any = (None,) * rows  # only the first rank knows the sequences
    plan = BatchPlan(
        number=number,
        sequences=nobody,
        num_decode=num_decode,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=query_start,
        kv_lengths=kv_lengths,
        lanes=np.zeros(rows, np.int64),
        num_samples=samples,
        num_drafts=drafts,
        is_steered=np.zeros(rows, np.bool_),
        is_uniform=bool(flags & _UNIFORM),
        copies=copies,
    )
    vars(plan)["batch"] = BlockLists(tables)
    vars(plan)["has_unknown_tokens"] = bool(flags & _UNKNOWN)
    return StepInputs(copies, plan, bool(flags & _LAUNCH), kept if flags & _KEEPS else None)


def _as_bytes(*arrays: npt.NDArray[Any]) -> list[bytes]:
    return [np.ascontiguousarray(array, np.int32).tobytes() for array in arrays]
