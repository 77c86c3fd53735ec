"""A decided step becomes a `BatchPlan`: flat arrays for the forward pass. From then on its tokens are in flight."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.request import joined
from kvpool.scheduling.round import DecodeRows, PromptChunk, Round
from kvpool.scheduling.running import Lanes, Running


def assemble(round: Round) -> BatchPlan:
    """The plan of a round."""
    roster = round.roster
    round.take_copies()
    running, stats, decode = roster.running, roster.stats, round.decode
    uniform = not round.chunks and decode is not None and decode.counts is None and not running.num_special
    rows = _uniform_rows(decode, running.lanes) if uniform and decode is not None else _mixed_rows(round)
    plan = BatchPlan(
        number=round.number,
        is_uniform=uniform,
        copies=round.copies,
        admitted=round.admitted,
        resumed=round.resumed,
        preempted=round.preempted,
        departures=running.departures,
        chunk_residences=tuple(sequence.residence for sequence in round.chunks),
        decode_batch=decode.batch if decode is not None else None,
        manager=roster.manager,
        **rows,
    )
    if uniform:
        _depart_uniform(plan, running)
    else:
        _depart_mixed(plan, running, list(round.chunks.values()))
        stats.draft_tokens += int(plan.num_drafts.sum())
    for sequence in running.proposals:  # they were for this step, planned or not
        sequence.drafts = None
    running.proposals.clear()
    stats.steps += 1
    stats.decode_tokens += int(plan.query_start[plan.num_decode])
    stats.prefill_tokens += plan.num_prefill_tokens
    return plan


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
        is_steered=np.zeros(num_rows, np.bool_),
    )


def _mixed_rows(round: Round) -> dict[str, Any]:
    """Rows that decode, with or without drafts, and chunks of prompts behind them."""
    decode, lanes, config = round.decode, round.roster.running.lanes, round.roster.manager.config
    chunks = list(round.chunks.items())
    decoding = () if decode is None else decode.sequences
    num_decode = len(decoding)
    row_lanes = np.array([sequence.lane for sequence in round.chunks], np.int64)
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
    num_drafts = counts - 1
    num_drafts[num_decode:] = 0
    token_ids = [] if decode is None else [_inputs(decode, lanes)]
    slots = [np.empty((len(config.groups), 0), np.int32)] if decode is None else [decode.slots]
    return dict(
        sequences=(*decoding, *round.chunks),
        num_decode=num_decode,
        token_ids=joined(*token_ids, *(sequence.tokens[chunk.start : chunk.stop] for sequence, chunk in chunks)),
        positions=np.repeat(kv_lengths - query_start[1:], counts) + np.arange(int(query_start[-1])),
        slots=np.concatenate([*slots, *(chunk.slots for _, chunk in chunks)], axis=1),
        query_start=query_start,
        kv_lengths=kv_lengths,
        lanes=row_lanes,
        num_samples=num_samples,
        num_drafts=num_drafts,
        is_steered=lanes.is_steered[row_lanes],
    )


def _newest_samples(rows: DecodeRows, lanes: Lanes) -> Int32Array:
    """The input of each row that decodes; -1 if it is not back yet."""
    samples = lanes.last_token[rows.lanes]
    samples[lanes.in_flight[rows.lanes] > 0] = -1
    return samples


def _inputs(rows: DecodeRows, lanes: Lanes) -> Int32Array:
    """The newest samples, and drafts behind them."""
    samples = _newest_samples(rows, lanes)
    if rows.counts is None:
        return samples
    drafts = (sequence.drafts for sequence in rows.sequences)
    pieces = zip(samples.tolist(), drafts, rows.counts.tolist(), strict=True)
    return joined(*chain.from_iterable(([first], () if ids is None else ids[: n - 1]) for first, ids, n in pieces))


def _depart_uniform(plan: BatchPlan, running: Running) -> None:
    """Notes all samples as in flight. A sequence whose last one is among them leaves the batch that decodes."""
    running.lanes.in_flight[plan.lanes] += 1
    _step_aside(plan, running, running.lanes.has_its_last_in_flight(plan.lanes))


def _depart_mixed(plan: BatchPlan, running: Running, chunks: list[PromptChunk]) -> None:
    """Notes samples as in flight. Sequences that need the result to go on leave the batch; prompts that end here join it."""
    lanes = running.lanes
    samples = plan.num_samples > 0
    lanes.in_flight[plan.lanes] += samples
    waits = lanes.has_its_last_in_flight(plan.lanes) | (plan.num_samples > 1) | (plan.num_drafts > 0) | plan.is_steered
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
