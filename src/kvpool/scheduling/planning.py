"""Plans one step: memory for running sequences, chunks of prompts, admissions. The result is a `BatchPlan`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.core.batch import SequenceBatch
from kvpool.errors import OutOfBlocksError
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling.admitting import Admissions
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.capacity import Capacity
from kvpool.scheduling.plan_builder import DecodeRows, PlanBuilder, PromptChunk, plan_of
from kvpool.scheduling.queues import Queues
from kvpool.scheduling.request import ScheduledSequence
from kvpool.scheduling.running import make_rows


class Planner:
    """Makes plans: sequences that decode come first, then prompts that have begun, then waiting requests."""

    def __init__(self, queues: Queues, capacity: Capacity) -> None:
        self.queues = queues
        self.manager = queues.manager
        self.running = queues.running
        self.capacity = capacity
        self.admissions = Admissions(queues, capacity)

    def plan(self, number: int, num_in_flight: int) -> tuple[BatchPlan, PlanBuilder]:
        """The next step."""
        builder = PlanBuilder(self.queues, number)
        arrivals = self.running.arrivals
        if arrivals:
            self._begin(arrivals.take_landed())
        departures = self.running.departures
        self._go_on(builder)
        self.admissions.run(builder)
        if arrivals and builder.computes_nothing:  # the device may wait: it has nothing else to do
            self._begin(arrivals.take_next())
            self._go_on(builder)
        if builder.decode is not None and departures != self.running.departures:
            builder.decode = self._still_running(builder.decode)
        if not num_in_flight and builder.is_idle:
            self._refuse_what_never_fits(builder)
        return plan_of(builder), builder

    def _begin(self, arrived: dict[ScheduledSequence, bool]) -> None:
        for sequence, decodes in arrived.items():
            self.running.begin(sequence, decodes=decodes)

    def _go_on(self, builder: PlanBuilder) -> None:
        """Plans the running sequences: one token for each that decodes, then the next chunks of prompts."""
        if len(self.running.decoding):
            self._decode(builder)
            builder.limit_prompts()
        if self.running.prefilling:
            self._continue_prompts(builder)

    def _still_running(self, rows: DecodeRows) -> DecodeRows | None:
        """The rows without preempted sequences."""
        kept = {sequence for sequence in rows.sequences if sequence.is_running}
        return rows.only(self.manager, kept) if kept else None

    def _refuse_what_never_fits(self, builder: PlanBuilder) -> None:
        """Nobody can go on: refuses running requests that fitted before the pool shrank."""
        for group in {sequence.group: None for sequence in self.running.members}:
            reason = self.capacity.why_never(group.request)
            if reason is not None:
                builder.refuse(group, reason)

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, builder: PlanBuilder) -> None:
        """Reserves a place for the next token of every sequence that decodes, and for its drafts while there is room."""
        sequences, lanes, batch = self.running.decoding.rows()
        counts, drafts = self._counts(sequences), None
        if self.running.proposals:
            drafts = self._draft_counts(sequences, lanes, builder.budget - _total(counts, len(sequences)))
            counts = counts if drafts is None else drafts + (1 if counts is None else counts)
        rows: DecodeRows | None
        try:
            slots = self.manager.extend_batch(batch, 1 if counts is None else counts)
            rows = DecodeRows(sequences, lanes, batch, counts, drafts, slots)
        except OutOfBlocksError:
            rows = self._decode_under_pressure(sequences, builder)
        if rows is not None:
            self.running.lanes.places[rows.lanes] += 1 if rows.counts is None else rows.counts
            builder.budget -= rows.slots.shape[1]
            builder.decode = rows

    def _counts(self, sequences: Sequence[ScheduledSequence]) -> Int64Array | None:
        """Tokens of each row without drafts: its newest one, and those that it computes again; None: one each."""
        if not self.running.recomputing:
            return None
        return np.array([1 + len(sequence.accepted) for sequence in sequences], np.int64)

    def _draft_counts(
        self, sequences: tuple[ScheduledSequence, ...], lanes: Int64Array, spare: int
    ) -> Int64Array | None:
        """The proposed drafts of each row, as far as `spare` tokens of the step and `max_new_tokens` allow."""
        counts = np.zeros(len(sequences), np.int64)
        left = self.running.lanes.limit[lanes] - self.running.lanes.generated[lanes] - 1
        for row, sequence in enumerate(sequences):
            if sequence.drafts is not None:
                counts[row] = max(0, min(len(sequence.drafts), int(left[row]), spare))
                spare -= int(counts[row])
        return counts if counts.any() else None

    def _decode_under_pressure(
        self, sequences: tuple[ScheduledSequence, ...], builder: PlanBuilder
    ) -> DecodeRows | None:
        """Memory is short: drops drafts and serves the highest ranks; others are preempted or sit out this step."""
        left = sorted(sequences, key=lambda sequence: sequence.rank)
        while left:
            rows, counts = make_rows(self.manager, left), self._counts(left)
            try:
                slots = self.manager.extend_batch(rows[2], 1 if counts is None else counts)
                return DecodeRows(*rows, counts, None, slots)
            except OutOfBlocksError:
                needy = self._needy(rows[2], left) or left
                requester = needy[self._num_served(needy)]
                victim = self.queues.victim(requester)
                if victim is not None:
                    builder.preempt(victim)
                    left = [sequence for sequence in left if sequence.is_running]
                else:  # lower ranks would find no victim either
                    stalled = {sequence for sequence in needy if sequence.rank >= requester.rank}
                    self.queues.stats.stalls += len(stalled)
                    left = [sequence for sequence in left if sequence not in stalled]
        return None

    def _needy(self, batch: SequenceBatch, sequences: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """The sequences whose next tokens need a new block: their last block is full, or a fork shares it."""
        at_the_end = batch.lengths() % self.manager.config.block_size == 0
        return [
            sequence
            for sequence, ends in zip(sequences, at_the_end.tolist(), strict=True)
            if (ends or sequence.group.next_index > 1 or len(sequence.accepted)) and any(self._needs(sequence))
        ]

    def _needs(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """Blocks per pool that the next step of a sequence takes, without drafts."""
        return self.manager.blocks_needed(sequence.live_handle(), 1 + len(sequence.accepted))

    def _num_served(self, needy: list[ScheduledSequence]) -> int:
        """How many of these sequences, in order of rank, the available blocks suffice for; at most all but one."""
        needs = [(s.request.scope.tenant, self._needs(s)) for s in needy[:-1]]
        return self.capacity.supply.num_served(needs)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _continue_prompts(self, builder: PlanBuilder) -> None:
        """Plans the next chunk of every prompt that has begun, the highest rank first."""
        for sequence in sorted(self.running.prefilling, key=lambda sequence: sequence.rank):
            if builder.is_full:
                return
            if not sequence.is_running:  # preempted for one before it
                continue
            start, handle = int(self.running.lanes.places[sequence.lane]), sequence.live_handle()
            slots: Int32Array | None
            if handle.num_reserved > start:  # it was held back with a place for its only token
                slots = self.manager.slot_mapping([handle], start, handle.num_reserved)
            else:
                stop = builder.chunk_stop(sequence.request, start, sequence.prefill_target)
                stop = self.manager.step_end(handle, start, stop)
                if stop == start:  # what it must compute at once does not fit into this step
                    continue
                slots = self._extend_chunk(sequence, start, stop, builder)
            if slots is None:
                self.queues.stats.stalls += 1
                continue
            stop = start + slots.shape[1]
            self.running.lanes.places[sequence.lane] = stop
            builder.plan_chunk(sequence, PromptChunk(start, stop, slots))

    def _extend_chunk(
        self, sequence: ScheduledSequence, start: int, stop: int, builder: PlanBuilder
    ) -> Int32Array | None:
        """Reserves a chunk. Preempts lower ranks, then makes the chunk smaller; None if not even one token fits."""
        while stop > start:
            try:
                return self.manager.extend(sequence.live_handle(), stop - start)
            except OutOfBlocksError:
                victim = self.queues.victim(sequence)
                if victim is not None:
                    builder.preempt(victim)
                else:
                    stop = start + (stop - start) // 2
                    stop = sequence.request.step_stop(start, stop, stop)
        return None


def _total(counts: Int64Array | None, num_rows: int) -> int:
    """Tokens of all rows; None: one each."""
    return num_rows if counts is None else int(counts.sum())
