"""One step, decided: memory for those that run, chunks of prompts, and who comes in. The result is a `BatchPlan`."""

from __future__ import annotations

from itertools import chain

import numpy as np

from kvpool.blocks.arrays import Int32Array, Int64Array
from kvpool.blocks.batch import SequenceBatch
from kvpool.errors import OutOfBlocksError
from kvpool.scheduling.admission import Admissions
from kvpool.scheduling.capacity import Capacity
from kvpool.scheduling.plan import BatchPlan
from kvpool.scheduling.request import ScheduledSequence, joined
from kvpool.scheduling.roster import Roster
from kvpool.scheduling.round import Chunk, DecodeRows, Round
from kvpool.scheduling.running import make_rows

_NO_ROWS: Int64Array = np.empty(0, np.int64)


class Planner:
    """Makes plans: decode first, then prompts that have begun, then whoever is next."""

    def __init__(self, roster: Roster, capacity: Capacity) -> None:
        self.roster = roster
        self.manager = roster.manager
        self.running = roster.running
        self.capacity = capacity
        self.admissions = Admissions(roster, capacity)

    def plan(self, number: int) -> tuple[BatchPlan, Round]:
        """The next step."""
        round = Round(self.roster)
        if len(self.running.decoding):
            self._decode(round)
        departures = self.running.departures
        if self.running.prefilling:
            self._continue_prompts(round)
        self.admissions.run(round)
        if round.decode is not None and departures != self.running.departures:
            round.decode = round.decode.without_departed(self.roster)
        return self._assemble(round, number), round

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, round: Round) -> None:
        """A place for the next token of every sequence that decodes, and for its drafts while there is room."""
        sequences, lanes, batch = self.running.decoding.rows()
        if self.running.num_steered:
            sequences, lanes, batch = make_rows(self.manager, [s for s in sequences if self._is_ready(s)])
        counts = self._draft_counts(sequences, lanes, round.budget) if self.running.num_proposals else None
        rows: DecodeRows | None
        try:
            slots = self.manager.extend_batch(batch, 1 if counts is None else counts)
            rows = DecodeRows(sequences, lanes, batch, counts, slots)
        except OutOfBlocksError:
            rows = self._decode_under_pressure(sequences, round)
        if rows is not None:
            self.running.lanes.places[rows.lanes] += 1 if rows.counts is None else rows.counts
            round.budget -= rows.slots.shape[1]
            round.decode = rows

    def _is_ready(self, sequence: ScheduledSequence) -> bool:
        """Beams of one request advance together or not at all."""
        if not sequence.request.steered:
            return True
        return all(other.is_finished or other in self.running.decoding for other in sequence.group.sequences)

    def _draft_counts(
        self, sequences: tuple[ScheduledSequence, ...], lanes: Int64Array, budget: int
    ) -> Int64Array | None:
        """Tokens of each row: one, and the drafts that were proposed, as far as the step and `max_new_tokens` allow."""
        spare = budget - len(sequences)
        counts = np.ones(len(sequences), np.int64)
        left = self.running.lanes.limit[lanes] - self.running.lanes.generated[lanes] - 1
        for row, sequence in enumerate(sequences):
            if sequence.drafts is not None:
                drafts = min(len(sequence.drafts), int(left[row]), spare)
                counts[row] += drafts
                spare -= drafts
        return counts if int(counts.sum()) > len(sequences) else None

    def _decode_under_pressure(self, sequences: tuple[ScheduledSequence, ...], round: Round) -> DecodeRows | None:
        """Not all get a block: drafts are dropped, the highest ranks are served, others give way or sit out this step."""
        left = sorted(sequences, key=lambda sequence: sequence.rank)
        while left:
            rows = make_rows(self.manager, left)
            try:
                return DecodeRows(*rows, None, self.manager.extend_batch(rows[2]))
            except OutOfBlocksError:
                needy = self._needy(rows[2], left)
                requester = needy[self._num_served(needy)]
                victim = self.roster.victim(requester)
                if victim is not None:
                    round.preempt(victim)
                    left = [sequence for sequence in left if sequence.is_running]
                else:  # nor is there one for those that rank below
                    stalled = {sequence for sequence in needy if sequence.rank >= requester.rank}
                    self.roster.stats.stalls += len(stalled)
                    left = [sequence for sequence in left if sequence not in stalled]
        return None

    def _needy(self, batch: SequenceBatch, sequences: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Those that need a block for their next token: at a block's end, or in a block that a fork shares."""
        at_the_end = batch.lengths() % self.manager.config.block_size == 0
        return [
            sequence
            for sequence, ends in zip(sequences, at_the_end.tolist(), strict=True)
            if (ends or sequence.request.n > 1) and any(self.manager.blocks_needed(sequence.live_handle()))
        ]

    def _num_served(self, needy: list[ScheduledSequence]) -> int:
        """How many of the needy, in order of rank, get their blocks from what there is; at most all but one."""
        free = list(self.capacity.free_blocks())
        for position, sequence in enumerate(needy[:-1]):
            for pool, need in enumerate(self.manager.blocks_needed(sequence.live_handle())):
                free[pool] -= need
            if min(free) < 0:
                return position
        return len(needy) - 1

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _continue_prompts(self, round: Round) -> None:
        """The next chunk of every prompt that has begun, the senior first."""
        for sequence in sorted(self.running.prefilling, key=lambda sequence: sequence.rank):
            if round.budget <= 0:
                return
            if not sequence.is_running:  # it gave way to one before it
                continue
            start = int(self.running.lanes.places[sequence.lane])
            stop = round.chunk_stop(start, sequence.prefill_target)
            slots = self._extend_chunk(sequence, stop - start, round)
            if slots is None:
                self.roster.stats.stalls += 1
                continue
            stop = start + slots.shape[1]
            self.running.lanes.places[sequence.lane] = stop
            round.plan_chunk(sequence, Chunk(start, stop, slots))

    def _extend_chunk(self, sequence: ScheduledSequence, num_tokens: int, round: Round) -> Int32Array | None:
        """Places for a chunk: those below give way, then the chunk gets smaller; None: not even one token has a place."""
        while True:
            try:
                return self.manager.extend(sequence.live_handle(), num_tokens)
            except OutOfBlocksError:
                victim = self.roster.victim(sequence)
                if victim is not None:
                    round.preempt(victim)
                elif num_tokens > 1:
                    num_tokens //= 2
                else:
                    return None

    # --- the plan ----------------------------------------------------------------------------------------------------

    def _assemble(self, round: Round, number: int) -> BatchPlan:
        """The arrays of the step; from here on its tokens are in flight."""
        decode, lanes = round.decode, self.running.lanes
        chunks = list(round.chunks.items())
        decode_rows = decode.sequences if decode is not None else ()
        num_decode = len(decode_rows)
        row_lanes = decode.lanes if decode is not None else _NO_ROWS
        row_lanes = np.concatenate([row_lanes, [sequence.lane for sequence, _ in chunks]]).astype(np.int64)
        counts = np.ones(len(row_lanes), np.int64)
        if decode is not None and decode.counts is not None:
            counts[:num_decode] = decode.counts
        counts[num_decode:] = [chunk.stop - chunk.start for _, chunk in chunks]
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        kv_lengths = lanes.places[row_lanes]
        positions = np.repeat(kv_lengths - query_start[1:], counts) + np.arange(int(query_start[-1]))
        token_ids = [self._inputs(decode)] if decode is not None else []
        token_ids += [sequence.tokens[chunk.start : chunk.stop] for sequence, chunk in chunks]
        slots = [decode.slots] if decode is not None else []
        slots += [chunk.slots for _, chunk in chunks]
        num_samples = lanes.samples[row_lanes]
        for row, (sequence, chunk) in enumerate(chunks, num_decode):
            num_samples[row] *= chunk.stop == len(sequence.tokens)
        num_drafts = counts - 1
        num_drafts[num_decode:] = 0
        plan = BatchPlan(
            number=number,
            sequences=(*decode_rows, *(sequence for sequence, _ in chunks)),
            num_decode=num_decode,
            token_ids=np.concatenate(token_ids) if token_ids else np.empty(0, np.int32),
            positions=positions,
            slots=np.concatenate(slots, axis=1) if slots else np.empty((len(self.manager.config.groups), 0), np.int32),
            query_start=query_start,
            kv_lengths=kv_lengths,
            lanes=row_lanes,
            num_samples=num_samples,
            num_drafts=num_drafts,
            is_steered=lanes.is_steered[row_lanes],
            copies=self.manager.take_copies(),
            admitted=round.admitted,
            resumed=round.resumed,
            preempted=round.preempted,
            departures=self.running.departures,
            chunk_residences=tuple(sequence.residence for sequence, _ in chunks),
            decode_batch=decode.batch if decode is not None else None,
            manager=self.manager,
        )
        self._depart(plan, [chunk for _, chunk in chunks])
        return plan

    def _inputs(self, rows: DecodeRows) -> Int32Array:
        """What decodes: the newest sample of each row, -1 if it is not back yet, and the drafts behind it."""
        lanes = self.running.lanes
        inputs: Int32Array = np.where(lanes.in_flight[rows.lanes] > 0, np.int32(-1), lanes.last_token[rows.lanes])
        if rows.counts is None:
            return inputs
        drafts = (sequence.drafts for sequence in rows.sequences)
        pieces = zip(inputs.tolist(), drafts, rows.counts.tolist(), strict=True)
        return joined(*chain.from_iterable(([first], () if ids is None else ids[: n - 1]) for first, ids, n in pieces))

    def _depart(self, plan: BatchPlan, chunks: list[Chunk]) -> None:
        """The plan is on its way: what it samples is in flight, and who cannot go on without its result steps aside."""
        running, lanes, stats = self.running, self.running.lanes, self.roster.stats
        lanes.in_flight[plan.lanes] += plan.num_samples > 0
        waits = lanes.generated[plan.lanes] + lanes.in_flight[plan.lanes] >= lanes.limit[plan.lanes]
        waits |= (plan.num_samples > 1) | (plan.num_drafts > 0) | plan.is_steered
        for row in np.flatnonzero(waits[: plan.num_decode]).tolist():
            running.decoding.discard(plan.sequences[row])
        for row, chunk in enumerate(chunks, plan.num_decode):
            sequence = plan.sequences[row]
            if chunk.stop == sequence.prefill_target:
                del running.prefilling[sequence]
                if not waits[row]:
                    running.decoding.add(sequence)
        if running.num_proposals:
            self._note_drafts(plan)
        stats.steps += 1
        stats.decode_tokens += int(plan.query_start[plan.num_decode])
        stats.prefill_tokens += plan.num_prefill_tokens

    def _note_drafts(self, plan: BatchPlan) -> None:
        for sequence, count in zip(plan.sequences, plan.num_drafts.tolist(), strict=True):
            if sequence.drafts is not None:
                sequence.drafts = sequence.drafts[:count]
            sequence.num_drafts_in_flight = count
            self.roster.stats.draft_tokens += count
        self.running.num_proposals = 0
