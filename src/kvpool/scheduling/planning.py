"""One step, decided: memory for those that run, chunks of prompts, and who comes in. The result is a `BatchPlan`."""

from __future__ import annotations

import numpy as np

from kvpool.errors import OutOfBlocksError
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling.admitting import Admissions
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.capacity import Capacity
from kvpool.scheduling.request import ScheduledSequence
from kvpool.scheduling.roster import Roster
from kvpool.scheduling.round import DecodeRows, PromptChunk, Round, plan_of
from kvpool.scheduling.running import make_rows
from kvpool.sequences.batch import SequenceBatch


class Planner:
    """Makes plans: decode first, then prompts that have begun, then whoever is next."""

    def __init__(self, roster: Roster, capacity: Capacity) -> None:
        self.roster = roster
        self.manager = roster.manager
        self.running = roster.running
        self.capacity = capacity
        self.admissions = Admissions(roster, capacity)

    def plan(self, number: int, num_in_flight: int) -> tuple[BatchPlan, Round]:
        """The next step."""
        round = Round(self.roster, number)
        arrivals = self.running.arrivals
        if arrivals:
            self._begin(arrivals.take_landed())
        departures = self.running.departures
        self._go_on(round)
        self.admissions.run(round)
        if arrivals and round.computes_nothing:  # nobody is kept waiting: the device may wait for what comes first
            self._begin(arrivals.take_next())
            self._go_on(round)
        if round.decode is not None and (departures != self.running.departures or self.running.num_steered):
            round.decode = self._settled(round.decode)
        if not num_in_flight and round.is_idle:
            self._break_deadlock(round)
        return plan_of(round), round

    def _begin(self, arrived: dict[ScheduledSequence, bool]) -> None:
        for sequence, decodes in arrived.items():
            self.running.begin(sequence, decodes=decodes)

    def _go_on(self, round: Round) -> None:
        """Plans the running sequences: one token for each that decodes, then the next chunks of prompts."""
        if len(self.running.decoding):
            self._decode(round)
            round.limit_prompts()
        if self.running.prefilling:
            self._continue_prompts(round)

    def _settled(self, rows: DecodeRows) -> DecodeRows | None:
        """What is left of the rows now that some gave way: beams of one request advance together or not at all."""
        kept = {sequence for sequence in rows.sequences if sequence.is_running}
        for sequence in [sequence for sequence in kept if sequence.request.steered]:
            if not all(other.is_finished or other in kept for other in sequence.group.sequences):
                kept.discard(sequence)
                self.manager.rewind(sequence.live_handle(), 1)
                self.running.lanes.places[sequence.lane] -= 1
        return rows.only(self.manager, kept) if kept else None

    def _break_deadlock(self, round: Round) -> None:
        """Preempts a request when none can go on: the beams of several requests hold memory that the others wait for.

        The lowest rank gives way, unless it belongs to the highest: that one's beams come back first and fit together.
        """
        if self.running.members:
            lowest = max(self.running.members, key=lambda sequence: sequence.rank)
            highest = min([*self.running.members, *self.roster.resuming], key=lambda sequence: sequence.rank)
            reason = self.capacity.why_never(highest.request)
            if reason is not None:  # it did fit before the pool shrank
                round.refuse(highest.group, reason)
            elif lowest.group is not highest.group:
                round.preempt(lowest)

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, round: Round) -> None:
        """A place for the next token of every sequence that decodes, and for its drafts while there is room."""
        sequences, lanes, batch = self.running.decoding.rows()
        if self.running.num_steered:
            sequences, lanes, batch = make_rows(self.manager, [s for s in sequences if self._is_ready(s)])
        counts = self._draft_counts(sequences, lanes, round.budget) if self.running.proposals else None
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
                needy = self._needy(rows[2], left) or left
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
            if (ends or sequence.group.next_index > 1) and any(self.manager.blocks_needed(sequence.live_handle()))
        ]

    def _num_served(self, needy: list[ScheduledSequence]) -> int:
        """How many of the needy, in order of rank, get their blocks from what there is; at most all but one."""
        needs = [(s.request.scope.tenant, self.manager.blocks_needed(s.live_handle())) for s in needy[:-1]]
        return self.capacity.supply.num_served(needs)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _continue_prompts(self, round: Round) -> None:
        """The next chunk of every prompt that has begun, the senior first."""
        for sequence in sorted(self.running.prefilling, key=lambda sequence: sequence.rank):
            if round.is_full:
                return
            if not sequence.is_running:  # it gave way to one before it
                continue
            start, handle = int(self.running.lanes.places[sequence.lane]), sequence.live_handle()
            slots: Int32Array | None
            if handle.num_reserved > start:  # it was held back with a place for its only token
                slots = self.manager.slot_mapping([handle], start, handle.num_reserved)
            else:
                stop = round.chunk_stop(start, sequence.prefill_target)
                slots = self._extend_chunk(sequence, stop - start, round)
            if slots is None:
                self.roster.stats.stalls += 1
                continue
            stop = start + slots.shape[1]
            self.running.lanes.places[sequence.lane] = stop
            round.plan_chunk(sequence, PromptChunk(start, stop, slots))

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
