"""A step as bytes, numbers only: what the ranks of a divided model need of a `BatchPlan`, and the copies before it.

header        counts and flags, 32-bit integers
copies        if any: their number; for each: six integers, then the blocks that are read and the blocks that are written
token ids, slots, kv_lengths, kept tokens, slots of adapters
states        if layers keep any: where they are read and left, and behind how many tokens of each row
pictures      if any: five integers, positions of tokens, spans; rank 0 sends their features from device to device
positions, query_start, samples, drafts, unless every row has one token and one sample
block lists   for each layer group: indptr, last_page_len, first_position, then the blocks

Steps in which a draft model guesses (`GuessSteps`) are one message, with the same header: positions, slots, the rows that
compute a token more, block lists.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import LayerGroup, Tier
from kvpool.config.layers import GroupKind
from kvpool.engine.spans import Span
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.pools.pool import CopyKind, CopyOp
from kvpool.scheduling import BatchPlan
from kvpool.sequences.batch import CSRTable, SequenceBatch
from kvpool.sequences.states import StatePlaces

_HEADER = struct.Struct("<7i")
_HEADER_WORDS = _HEADER.size // 4
_COUNT = struct.Struct("<i")
_COPY = struct.Struct("<6i")
_PICTURES = struct.Struct("<5i")  # axes of positions, the shape of features, and the number of spans
_UNIFORM, _LAUNCH, _KEEPS, _UNKNOWN, _COPIES, _DRAFT, _GUESSES, _ADAPTED, _PICTURED = 1, 2, 4, 8, 16, 32, 64, 128, 256
_STATES, _PARTLY = 512, 1024
_KINDS = tuple(CopyKind)
_TIERS = tuple(Tier)


class BlockLists:
    """The block lists of a step, one for each layer group: what a runner asks of a batch of sequences."""

    def __init__(self, tables: Sequence[CSRTable]) -> None:
        self.tables = tables

    @classmethod
    def of(cls, batch: SequenceBatch, groups: Sequence[LayerGroup], states: StatePlaces | None = None) -> BlockLists:
        """Makes them, which costs more than a message with them. Of states, they are the blocks that are read."""
        read = np.full(len(batch.rows), -1, np.int32) if states is None else states.sources
        one_each, none = np.arange(len(read) + 1, dtype=np.int32), np.zeros(len(read), np.int32)
        held = CSRTable(one_each, read, none, none)
        return cls([held if group.kind is GroupKind.STATE else batch.csr(group.index) for group in groups])

    def csr(self, group: int = 0) -> CSRTable:
        """The lists of one layer group."""
        return self.tables[group]

    def padded_table(self, group: int = 0) -> Int32Array:
        """All blocks that the step reads, in one row."""
        return self.tables[group].indices[None]


def make_lists(plan: BatchPlan, groups: Sequence[LayerGroup]) -> BlockLists:
    """Makes the block lists of a step. It then runs with them, too."""
    lists = BlockLists.of(plan.batch, groups, plan.states)
    vars(plan)["batch"] = lists
    return lists


class SentPictures(NamedTuple):
    """What images change in a step: positions, tokens that see one another, and features in the places of embeddings."""

    positions: Int64Array  # [axis, token]
    spans: Sequence[Span]
    features: tuple[int, int, int] = (0, 0, 0)  # their shape: layers, tokens, hidden size


class StepInputs(NamedTuple):
    """One step of the model, with the copies that come before it."""

    copies: list[CopyOp]
    plan: BatchPlan
    launch: bool = False
    keep: Int64Array | None = None
    adapter_slots: Int64Array | None = None  # of each token, -1 without an adapter
    pictures: SentPictures | None = None
    unknown: bool = False  # only the device of rank 0 has all token ids
    by_draft: bool = False  # the draft model computes it


class GuessSteps(NamedTuple):
    """The steps in which a draft model guesses: every row has one token in each, and some rows one more in the first."""

    positions: Sequence[Int64Array]  # of each step
    slots: Int32Array  # [layer group, token] of all steps
    again: Int64Array  # rows whose older token stands behind the newest of all rows, in the first step
    batch: SequenceBatch  # or its `BlockLists`

    @property
    def sizes(self) -> list[int]:
        """Tokens of each step."""
        return [len(piece) for piece in self.positions]


def encode(step: StepInputs, lists: BlockLists, place: Callable[[int], Int32Array]) -> Int32Array:
    """Writes the message of a step into the memory that `place` has for so many integers."""
    copies, plan, launch, keep, adapter_slots, pictures, unknown, by_draft = step
    rows, num_groups = len(plan.sequences), len(lists.tables)
    flags = plan.is_uniform * _UNIFORM + launch * _LAUNCH + (keep is not None) * _KEEPS
    flags += unknown * _UNKNOWN + bool(copies) * _COPIES + by_draft * _DRAFT
    flags += (adapter_slots is not None) * _ADAPTED + (pictures is not None) * _PICTURED
    num_kept = 0 if keep is None else len(keep)
    parts: list[npt.NDArray[Any]] = [plan.token_ids, plan.slots.reshape(-1), plan.kv_lengths]
    if copies:
        parts.insert(0, np.frombuffer(encode_copies(copies), np.int32))
    if keep is not None:
        parts.append(keep)
    if adapter_slots is not None:
        parts.append(adapter_slots)
    if plan.states is not None:
        flags += _STATES
        parts += plan.states
    if plan.num_kept is not None:
        flags += _PARTLY
        parts.append(plan.num_kept)
    if pictures is not None:
        counts = _PICTURES.pack(len(pictures.positions), *pictures.features, len(pictures.spans))
        spans = np.array(pictures.spans, np.int32).reshape(-1)
        parts += np.frombuffer(counts, np.int32), pictures.positions.reshape(-1), spans
    if not plan.is_uniform:  # otherwise every row has one token, the last one, and one sample
        parts += plan.positions, plan.query_start, plan.num_samples, plan.num_drafts
    header = plan.number, rows, plan.num_decode, plan.num_tokens, flags, num_kept, num_groups
    return _written(header, parts, lists, place)


def encode_guesses(steps: GuessSteps, lists: BlockLists, place: Callable[[int], Int32Array]) -> Int32Array:
    """Writes the message of steps that guess, like `encode`."""
    again, num_groups = len(steps.again), len(lists.tables)
    rows = steps.sizes[0] - again
    header = 0, rows, len(steps.positions), sum(steps.sizes), _GUESSES, again, num_groups
    return _written(header, [*steps.positions, steps.slots.reshape(-1), steps.again], lists, place)


def _written(
    header: tuple[int, ...], parts: list[npt.NDArray[Any]], lists: BlockLists, place: Callable[[int], Int32Array]
) -> Int32Array:
    for table in lists.tables:
        parts += table.indptr, table.last_page_len, table.first_position, table.indices
    message = place(_HEADER_WORDS + sum(map(len, parts)))
    _HEADER.pack_into(message.data, 0, *header)
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

    def pictures(self, num_tokens: int) -> SentPictures:
        axes, layers, rows, size, num_spans = self.fields(_PICTURES)
        positions = self.take(axes * num_tokens).astype(np.int64).reshape(axes, num_tokens)
        spans = [Span(*each) for each in self.take(3 * num_spans).reshape(-1, 3).tolist()]
        return SentPictures(positions, spans, (layers, rows, size))

    def lists(self, num_groups: int, rows: int) -> BlockLists:
        tables = []
        for _group in range(num_groups):
            indptr, last, first = self.take(rows + 1), self.take(rows), self.take(rows)
            tables.append(CSRTable(indptr, self.take(int(indptr[-1])), last, first))
        return BlockLists(tables)


def decode_copies(message: bytearray) -> list[CopyOp]:
    """The copies of a message of `encode_copies`."""
    return _Reader(message).copies()


def decode(message: bytearray) -> StepInputs | GuessSteps:
    """The step of a message, or the steps."""
    reader = _Reader(message)
    number, rows, num_decode, num_tokens, flags, num_kept, num_groups = reader.fields(_HEADER)
    if flags & _GUESSES:
        return _decode_guesses(reader, rows, num_decode, num_tokens, num_kept, num_groups)
    copies, take = reader.copies() if flags & _COPIES else [], reader.take
    token_ids, slots = take(num_tokens), take(num_groups * num_tokens).reshape(num_groups, num_tokens)
    kv_lengths, kept = take(rows).astype(np.int64), take(num_kept).astype(np.int64)
    adapter_slots = take(num_tokens).astype(np.int64) if flags & _ADAPTED else None
    states = StatePlaces(take(rows), take(rows)) if flags & _STATES else None
    num_left = take(rows).astype(np.int64) if flags & _PARTLY else None
    pictures = reader.pictures(num_tokens) if flags & _PICTURED else None
    if flags & _UNIFORM:
        positions, query_start = kv_lengths - 1, np.arange(rows + 1, dtype=np.int32)
        samples, drafts = np.ones(rows, np.int64), np.zeros(rows, np.int64)
    else:
        positions, query_start = take(num_tokens).astype(np.int64), take(rows + 1)
        samples, drafts = take(rows).astype(np.int64), take(rows).astype(np.int64)
    lists = reader.lists(num_groups, rows)
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
        states=states,
        num_kept=num_left,
    )
    vars(plan)["batch"] = lists
    keep, marks = kept if flags & _KEEPS else None, (bool(flags & _UNKNOWN), bool(flags & _DRAFT))
    return StepInputs(copies, plan, bool(flags & _LAUNCH), keep, adapter_slots, pictures, *marks)


def _decode_guesses(
    reader: _Reader, rows: int, num_steps: int, num_tokens: int, num_again: int, num_groups: int
) -> GuessSteps:
    sizes = [rows + num_again] + [rows] * (num_steps - 1)
    positions = [reader.take(size).astype(np.int64) for size in sizes]
    slots = reader.take(num_groups * num_tokens).reshape(num_groups, num_tokens)
    again = reader.take(num_again).astype(np.int64)
    batch: Any = reader.lists(num_groups, rows)
    return GuessSteps(positions, slots, again, batch)


def _as_bytes(*arrays: npt.NDArray[Any]) -> list[bytes]:
    return [np.ascontiguousarray(array, np.int32).tobytes() for array in arrays]
