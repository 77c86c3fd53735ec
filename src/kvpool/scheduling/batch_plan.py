"""BatchPlan: what one step computes, as the arrays that a forward pass takes; and PlanBuilder, which collects it.

A builder gets rows that decode, chunks of prompts, and sequences that were admitted or preempted. `plan_of` makes a
`BatchPlan` of it. From then on the samples of the plan are in flight.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kvpool.config import KVCacheConfig, Tier
from kvpool.core.handle import SequenceBatch
from kvpool.core.kind import StatePlaces
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array
from kvpool.pools.pool import CopyOp
from kvpool.scheduling.cost_model import CostModel
from kvpool.scheduling.queues import Queues
from kvpool.scheduling.request import (
    NO_TOKENS,
    Finished,
    FinishReason,
    Request,
    RequestGroup,
    ScheduledSequence,
    joined,
)
from kvpool.scheduling.running import Lanes, Running, make_rows


@dataclass(eq=False)
class BatchPlan:
    """One step. Row i computes the tokens `query_start[i]:query_start[i + 1]` of the flat arrays for `sequences[i]`.

    The first `num_decode` rows decode, the others are chunks of prompts. Run `copies` first, in order and after the
    forward pass of the plan before; then the forward pass; then give `complete` the samples. Read tables (`batch.csr()`,
    `batch.padded_table()`) before the next `step()`: it moves the lengths on.
    """

    number: int
    sequences: tuple[ScheduledSequence, ...]
    num_decode: int
    token_ids: Int32Array  # -1: sampled by a plan in flight; take the newest sample of its lane on the device
    positions: Int64Array
    slots: Int32Array  # [layer group, token]: where keys and values go, -1: nowhere
    query_start: Int32Array  # [row + 1]
    kv_lengths: Int64Array  # [row]: tokens that the last query of the row sees, itself included
    lanes: Int64Array  # [row]
    num_samples: Int64Array  # [row]: tokens to sample behind the row's last token; 0: its prompt goes on
    num_drafts: Int64Array  # [row]: the last so many tokens of the row are drafts; sample behind each, and before
    is_uniform: bool  # every row decodes one token and samples one
    copies: list[CopyOp]
    states: StatePlaces | None = None  # where layers that keep a state read and leave it
    num_kept: Int64Array | None = None  # [row]: behind so many of the row's tokens they leave it; drafts follow
    admitted: list[ScheduledSequence] = field(default_factory=list)
    resumed: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[ScheduledSequence] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)  # over without a sample: deadlines, refused requests
    departures: int = 0  # with the residences: rows of sequences that left since are stale
    chunk_residences: tuple[int, ...] = ()
    decode_batch: SequenceBatch | None = None
    manager: KVCacheManager | None = field(default=None, repr=False)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute (there may be copies): all sequences wait for a plan in flight or for memory, or are done."""
        return not self.sequences

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - int(self.query_start[self.num_decode])

    @cached_property
    def has_unknown_tokens(self) -> bool:
        """Whether samples of a plan in flight are among its tokens."""
        return bool((self.token_ids < 0).any())

    @cached_property
    def decodes_several(self) -> BoolArray:
        """[row]: it decodes and has several tokens: drafts, or accepted drafts that are computed again."""
        several: BoolArray = np.diff(self.query_start) > 1
        several[self.num_decode :] = False
        return several

    @cached_property
    def sampling_rows(self) -> Int64Array:
        """Rows that sample behind their last token, in the order of the tokens that `complete` takes."""
        return np.arange(len(self.lanes)) if self.is_uniform else np.flatnonzero(self.num_samples)

    @cached_property
    def logits_indices(self) -> Int64Array:
        """Flat indices of the tokens whose logits are needed: the last of each sampling row, and those before drafts."""
        rows = self.sampling_rows
        ends = self.query_start[rows + 1].astype(np.int64)
        counts = self.num_drafts[rows] + 1
        if not self.num_drafts.any():
            return ends - 1
        first = np.repeat(ends - counts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        return first + np.arange(int(counts.sum()))

    @cached_property
    def first_samples(self) -> Int64Array:
        """The index of the first sample of each sampling row, where a row has one sample more than drafts, or several."""
        counts: Int64Array = (self.num_samples + self.num_drafts)[self.sampling_rows]
        firsts: Int64Array = np.cumsum(counts) - counts
        return firsts

    @cached_property
    def batch(self) -> SequenceBatch:
        """All rows as a batch of the manager, for CSR lists and padded tables."""
        if self.decode_batch is not None and self.num_decode == len(self.sequences):
            return self.decode_batch
        assert self.manager is not None
        return self.manager.batch([sequence.live_handle() for sequence in self.sequences])

    def current_rows(self, departures: int) -> BoolArray:
        """Rows whose sequence has not left the GPU since; `departures` are those that the scheduler counts now."""
        current = np.ones(len(self.sequences), np.bool_)
        if self.departures != departures:
            current[:] = [sequence.is_running for sequence in self.sequences]
            for row, residence in enumerate(self.chunk_residences, self.num_decode):
                current[row] &= self.sequences[row].residence == residence
        return current

    def seconds(self, costs: CostModel, config: KVCacheConfig) -> float:
        """Seconds that this step takes by a cost model; simulators add them up."""
        seconds = costs.transfer_seconds(transferred_bytes(self.copies, config))
        seconds += costs.decode_seconds(self.num_decode, int(self.kv_lengths[: self.num_decode].sum()))
        return seconds + sum(costs.prefill_seconds(num_tokens, context) for num_tokens, context in self.prefills())

    def prefills(self) -> list[tuple[int, int]]:
        """Tokens of each chunk of a prompt, and the tokens before it."""
        counts = np.diff(self.query_start)[self.num_decode :]
        contexts = self.kv_lengths[self.num_decode :] - counts
        return list(zip(counts.tolist(), contexts.tolist(), strict=True))


def transferred_bytes(copies: list[CopyOp], config: KVCacheConfig) -> int:
    """Bytes that copies move over the link between GPU and host."""
    return sum(
        op.num_blocks * config.groups[op.group].block_bytes
        for op in copies
        if Tier.GPU in (op.src_tier, op.dst_tier) and op.src_tier != op.dst_tier
    )


class PromptChunk(NamedTuple):
    """Tokens `start..stop` of a sequence whose prompt is not computed yet, and where their keys and values go."""

    start: int
    stop: int
    slots: Int32Array


class DecodeRows(NamedTuple):
    """Sequences that decode in this step. A row has accepted drafts that are computed again, its newest token, and drafts."""

    sequences: tuple[ScheduledSequence, ...]
    lanes: Int64Array
    batch: SequenceBatch
    counts: Int64Array | None  # tokens of each row; None: one
    drafts: Int64Array | None  # how many of these are drafts; None: none
    slots: Int32Array

    def only(self, manager: KVCacheManager, kept: set[ScheduledSequence]) -> DecodeRows:
        """Some of the rows."""
        sequences = [sequence for sequence in self.sequences if sequence in kept]
        keep = np.array([sequence in kept for sequence in self.sequences], np.bool_)
        counts, drafts = (None if numbers is None else numbers[keep] for numbers in (self.counts, self.drafts))
        columns = keep if self.counts is None else np.repeat(keep, self.counts)
        return DecodeRows(*make_rows(manager, sequences), counts, drafts, self.slots[:, columns])


class PlanBuilder:
    """The step that is being planned."""

    def __init__(self, queues: Queues, number: int) -> None:
        self.queues = queues
        self.number = number  # of the plan that it becomes
        self.copies: list[CopyOp] = []
        self.budget = queues.config.max_tokens_per_step
        self.seconds: float | None = None  # left for prompts; None: as long as they take
        self.decode: DecodeRows | None = None
        self.chunks: dict[ScheduledSequence, PromptChunk] = {}
        self.admitted: list[ScheduledSequence] = []
        self.resumed: list[ScheduledSequence] = []
        self.preempted: list[ScheduledSequence] = []
        self.refused: list[tuple[RequestGroup, str]] = []

    @property
    def computes_nothing(self) -> bool:
        return self.decode is None and not self.chunks

    @property
    def is_idle(self) -> bool:
        """Nothing is computed, and no sequence was admitted or resumed."""
        return self.computes_nothing and not (self.admitted or self.resumed)

    @property
    def is_full(self) -> bool:
        """No more prompt tokens fit. The first chunk always fits into the time limit, so that prompts make progress."""
        return self.budget <= 0 or (self.seconds is not None and self.seconds <= 0 and bool(self.chunks))

    def limit_prompts(self) -> None:
        """Limits the prompt tokens of a step in which sequences decode to what `max_step_seconds` leaves."""
        goal, rows, queues = self.queues.config.max_step_seconds, self.decode, self.queues
        if goal is not None and rows is not None:
            context = int(queues.running.lanes.places[rows.lanes].sum())
            self.seconds = goal - queues.costs.decode_seconds(len(rows.lanes), context)

    def take_copies(self) -> None:
        """Takes the copies that the manager has planned so far, and remembers which blocks they bring to the GPU."""
        copies = self.queues.manager.take_copies()
        self.copies += copies
        if self.queues.running.arrivals is not None:
            self.queues.running.arrivals.note(self.number, copies)

    def hold_back(self, sequence: ScheduledSequence, *, decodes: bool) -> bool:
        """Keeps a sequence out of steps until its blocks are on the GPU; False if they are."""
        arrivals = self.queues.running.arrivals
        if arrivals is None:
            return False
        self.take_copies()
        held = arrivals.hold_back(sequence, decodes=decodes)
        self.queues.stats.arrival_waits += held
        return held

    def plan_chunk(self, sequence: ScheduledSequence, chunk: PromptChunk) -> None:
        self.chunks[sequence] = chunk
        self.budget -= chunk.stop - chunk.start
        self._spend(chunk)

    def _spend(self, chunk: PromptChunk, sign: int = 1) -> None:
        if self.seconds is not None:
            self.seconds -= sign * self.queues.costs.prefill_seconds(chunk.stop - chunk.start, chunk.start)

    def chunk_stop(self, request: Request, start: int, target: int) -> int:
        """Where the next chunk of a prompt ends: at the end of a block, unless it is the last chunk or within one block.

        A span that is computed as a whole goes before the limits of a chunk. If it does not fit into the step, the chunk
        ends before it, and may be empty.
        """
        size = self.queues.manager.config.block_size
        limit = min(self.budget, self.queues.config.chunk_tokens)
        if self.seconds is not None:
            limit = min(limit, max(size, self._num_tokens_in_time(start, limit)))
        stop = min(target, start + limit)
        aligned = stop // size * size
        stop = aligned if start < aligned and stop < target else stop
        return request.step_stop(start, stop, start + self.budget)

    def _num_tokens_in_time(self, start: int, limit: int) -> int:
        """How many tokens of a prompt behind `start` can be computed in the seconds that are left, up to `limit`."""
        assert self.seconds is not None
        prefill_seconds = self.queues.costs.prefill_seconds
        return bisect_right(range(1, limit + 1), self.seconds, key=lambda count: prefill_seconds(count, start))

    def preempt(self, sequence: ScheduledSequence) -> None:
        """Takes a sequence off the GPU and out of this step."""
        num_planned = self._withdraw(sequence)
        self.queues.preempt(sequence, num_planned)
        self.preempted.append(sequence)

    def refuse(self, group: RequestGroup, reason: str) -> None:
        """Ends a request that can never fit, and takes its sequences out of this step."""
        for sequence in group.sequences:
            if sequence.is_running:
                self._withdraw(sequence)
        self.queues.finish(group.sequences, FinishReason.REFUSED)
        self.refused.append((group, reason))

    def _withdraw(self, sequence: ScheduledSequence) -> int:
        """Gives back what this step planned for a running sequence; returns how many of its places that was.

        Its row in `decode` stays until the whole step is decided. `Planner` then removes such rows together.
        """
        num_planned = 0
        chunk = self.chunks.pop(sequence, None)
        if chunk is not None:
            num_planned = chunk.stop - chunk.start
            self._spend(chunk, -1)
        elif self.decode is not None and sequence in self.decode.sequences:
            counts = self.decode.counts
            num_planned = 1 if counts is None else int(counts[self.decode.sequences.index(sequence)])
        self.budget += num_planned
        return num_planned


def plan_of(builder: PlanBuilder) -> BatchPlan:
    """Makes the plan, and marks its samples as in flight."""
    queues = builder.queues
    running, stats, decode = queues.running, queues.stats, builder.decode
    uniform = not builder.chunks and decode is not None and decode.counts is None and not running.lanes_kept
    rows = _uniform_rows(decode, running.lanes) if uniform and decode is not None else _mixed_rows(builder)
    plan = BatchPlan(
        number=builder.number,
        is_uniform=uniform,
        copies=builder.copies,
        admitted=builder.admitted,
        resumed=builder.resumed,
        preempted=builder.preempted,
        departures=running.departures,
        chunk_residences=tuple(sequence.residence for sequence in builder.chunks),
        decode_batch=decode.batch if decode is not None else None,
        manager=queues.manager,
        **rows,
    )
    if queues.manager.config.state_group is not None and plan.sequences:
        _place_states(plan, queues.manager)
    builder.take_copies()
    if uniform:
        _depart_uniform(plan, running)
    else:
        _depart_mixed(plan, running, list(builder.chunks.values()))
        stats.draft_tokens += int(plan.num_drafts.sum())
    while running.proposals:  # drafts are for this step only, also those that were not planned
        running.proposals.pop().drafts = None
    stats.steps += 1
    stats.decode_tokens += int(plan.query_start[plan.num_decode])
    stats.prefill_tokens += plan.num_prefill_tokens
    return plan


def _place_states(plan: BatchPlan, manager: KVCacheManager) -> None:
    """Says where each row reads its state, and behind which of its tokens it leaves the next one.

    A row that decodes leaves it behind the last full block that ends in its known tokens, where it may stay as a checkpoint,
    or else behind the last of these. Drafts may be rejected, so they are behind it.
    """
    size = manager.config.block_size
    starts, stops = plan.kv_lengths - np.diff(plan.query_start), plan.kv_lengths - plan.num_drafts
    ends = stops // size * size
    crosses = ends > starts
    crosses[plan.num_decode :] = False
    stops[crosses] = ends[crosses]
    plan.states = manager.state_places(plan.batch, starts, stops)
    plan.num_kept = stops - starts


def _uniform_rows(decode: DecodeRows, lanes: Lanes) -> dict[str, Any]:
    """One token and one sample for every row: the usual step, in as few operations as possible."""
    num_rows = len(decode.sequences)
    kv_lengths = lanes.places[decode.lanes]
    return dict(
        sequences=decode.sequences,
        num_decode=num_rows,
        token_ids=_newest_samples(decode, lanes),
        positions=kv_lengths - 1,
        slots=decode.slots,
        query_start=np.arange(num_rows + 1, dtype=np.int32),
        kv_lengths=kv_lengths,
        lanes=decode.lanes,
        num_samples=np.ones(num_rows, np.int64),
        num_drafts=np.zeros(num_rows, np.int64),
    )


def _mixed_rows(builder: PlanBuilder) -> dict[str, Any]:
    """Rows that decode, with or without drafts, and chunks of prompts behind them."""
    decode, lanes, config = builder.decode, builder.queues.running.lanes, builder.queues.manager.config
    chunks = list(builder.chunks.items())
    decoding = () if decode is None else decode.sequences
    num_decode = len(decoding)
    row_lanes = np.array([sequence.lane for sequence in builder.chunks], np.int64)
    if decode is not None:
        row_lanes = np.concatenate([decode.lanes, row_lanes])
    counts = np.ones(len(row_lanes), np.int64)
    if decode is not None and decode.counts is not None:
        counts[:num_decode] = decode.counts
    counts[num_decode:] = [chunk.stop - chunk.start for _, chunk in chunks]
    query_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    kv_lengths = lanes.places[row_lanes]
    num_samples = lanes.samples[row_lanes]
    num_samples[num_decode:] *= np.array([chunk.stop == len(sequence.tokens) for sequence, chunk in chunks], np.int64)
    num_drafts = np.zeros(len(counts), np.int64)
    if decode is not None and decode.drafts is not None:
        num_drafts[:num_decode] = decode.drafts
    token_ids = [] if decode is None else [_inputs(decode, lanes)]
    slots = [np.empty((len(config.groups), 0), np.int32)] if decode is None else [decode.slots]
    return dict(
        sequences=(*decoding, *builder.chunks),
        num_decode=num_decode,
        token_ids=joined(*token_ids, *(sequence.tokens[chunk.start : chunk.stop] for sequence, chunk in chunks)),
        positions=np.repeat(kv_lengths - query_start[1:], counts) + np.arange(int(query_start[-1])),
        slots=np.concatenate([*slots, *(chunk.slots for _, chunk in chunks)], axis=1),
        query_start=query_start,
        kv_lengths=kv_lengths,
        lanes=row_lanes,
        num_samples=num_samples,
        num_drafts=num_drafts,
    )


def _newest_samples(rows: DecodeRows, lanes: Lanes) -> Int32Array:
    """The input of each row that decodes; -1 if its sample is still in flight."""
    samples = lanes.last_token[rows.lanes]
    samples[lanes.in_flight[rows.lanes] > 0] = -1
    return samples


def _inputs(rows: DecodeRows, lanes: Lanes) -> Int32Array:
    """The newest samples, accepted drafts before them that are computed again, and drafts behind them."""
    samples = _newest_samples(rows, lanes)
    if rows.counts is None:
        return samples
    nums = np.zeros(len(samples), np.int64) if rows.drafts is None else rows.drafts
    pieces = zip(rows.sequences, samples.tolist(), nums.tolist(), strict=True)
    ids = (
        (row.accepted, [newest], NO_TOKENS if row.drafts is None else row.drafts[:num]) for row, newest, num in pieces
    )
    return joined(*chain.from_iterable(ids))


def _depart_uniform(plan: BatchPlan, running: Running) -> None:
    """Marks all samples as in flight. A sequence whose last sample is among them leaves the batch that decodes."""
    running.lanes.in_flight[plan.lanes] += 1
    _step_aside(plan, running, running.lanes.has_its_last_in_flight(plan.lanes))


def _depart_mixed(plan: BatchPlan, running: Running, chunks: list[PromptChunk]) -> None:
    """Marks samples as in flight. Sequences that wait for their sample leave the batch; prompts that end here join it."""
    lanes = running.lanes
    samples = plan.num_samples > 0
    lanes.in_flight[plan.lanes] += samples
    waits = lanes.has_its_last_in_flight(plan.lanes) | (plan.num_samples > 1) | plan.decodes_several
    waits &= samples
    _step_aside(plan, running, waits[: plan.num_decode])
    for row, chunk in enumerate(chunks, plan.num_decode):
        sequence = plan.sequences[row]
        if chunk.stop == sequence.prefill_target:
            del running.prefilling[sequence]
            if not waits[row]:
                running.decoding.add(sequence)
    for row in np.flatnonzero(plan.num_drafts).tolist():
        plan.sequences[row].num_drafts_in_flight = int(plan.num_drafts[row])


def _step_aside(plan: BatchPlan, running: Running, waits: BoolArray) -> None:
    for row in waits.nonzero()[0].tolist():
        running.decoding.discard(plan.sequences[row])
