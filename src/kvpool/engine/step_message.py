"""A step as bytes, numbers only: what the ranks of a divided model need of a `BatchPlan`, and the copies before it.

header        counts and flags, 32-bit integers
copies        for each: six integers, then the blocks that are read and the blocks that are written
token ids, positions, slots, query_start, kv_lengths, samples, drafts, kept tokens
block lists   for each layer group: indptr, last_page_len, first_position, then the blocks
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import Tier
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.pools.pool import CopyKind, CopyOp
from kvpool.scheduling import BatchPlan
from kvpool.sequences.batch import CSRTable

_HEADER = struct.Struct("<8i")
_COPY = struct.Struct("<6i")
_UNIFORM, _LAUNCH, _KEEPS = 1, 2, 4
_KINDS = tuple(CopyKind)
_TIERS = tuple(Tier)


class BlockLists:
    """The block lists of a step as they were received: what a runner asks of a batch of sequences."""

    def __init__(self, tables: Sequence[CSRTable]) -> None:
        self._tables = tables

    def csr(self, group: int = 0) -> CSRTable:
        """The lists of one layer group."""
        return self._tables[group]

    def padded_table(self, group: int = 0) -> Int32Array:
        """All blocks that the step reads, in one row."""
        return self._tables[group].indices[None]


class StepInputs(NamedTuple):
    """One step of the model, with the copies that come before it."""

    copies: list[CopyOp]
    plan: BatchPlan
    launch: bool = False
    keep: Int64Array | None = None

    @property
    def has_unknown_tokens(self) -> bool:
        """Whether the first rank has tokens on its device that the message does not have."""
        return bool((self.plan.token_ids < 0).any())


def encode(step: StepInputs, num_groups: int) -> bytes:
    """The message of a step."""
    copies, plan, launch, keep = step
    flags = plan.is_uniform * _UNIFORM + launch * _LAUNCH + (keep is not None) * _KEEPS
    kept = np.empty(0, np.int32) if keep is None else keep
    rows = len(plan.sequences)
    parts: list[Any] = [
        _HEADER.pack(plan.number, rows, plan.num_decode, plan.num_tokens, flags, len(copies), len(kept), num_groups)
    ]
    for op in copies:
        tokens = -1 if op.num_tokens is None else op.num_tokens
        where = _TIERS.index(op.src_tier), _TIERS.index(op.dst_tier)
        parts += [
            _COPY.pack(_KINDS.index(op.kind), op.group, *where, len(op.src), tokens),
            _int32(op.src),
            _int32(op.dst),
        ]
    arrays = (plan.token_ids, plan.positions, plan.slots, plan.query_start, plan.kv_lengths)
    parts += [*map(_int32, (*arrays, plan.num_samples, plan.num_drafts, kept))]
    for group in range(num_groups):
        lists = plan.batch.csr(group)
        parts += [*map(_int32, (lists.indptr, lists.last_page_len, lists.first_position, lists.indices))]
    return b"".join(parts)


def decode(message: bytearray) -> StepInputs:
    """The step of a message."""
    number, rows, num_decode, num_tokens, flags, num_copies, num_kept, num_groups = _HEADER.unpack_from(message)
    at = _HEADER.size

    def take(count: int) -> Int32Array:
        nonlocal at
        at += 4 * count
        return np.frombuffer(message, np.int32, count, at - 4 * count)

    copies = []
    for _copy in range(num_copies):
        kind, group, source, target, count, tokens = _COPY.unpack_from(message, at)
        at += _COPY.size
        limit = None if tokens < 0 else tokens
        copies.append(CopyOp(_KINDS[kind], group, _TIERS[source], _TIERS[target], take(count), take(count), limit))
    token_ids, positions = take(num_tokens), take(num_tokens).astype(np.int64)
    slots = take(num_groups * num_tokens).reshape(num_groups, num_tokens)
    query_start, kv_lengths = take(rows + 1), take(rows).astype(np.int64)
    samples, drafts = take(rows).astype(np.int64), take(rows).astype(np.int64)
    keep = take(num_kept).astype(np.int64) if flags & _KEEPS else None
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
    return StepInputs(copies, plan, bool(flags & _LAUNCH), keep)


def _int32(array: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array, np.int32).tobytes()
