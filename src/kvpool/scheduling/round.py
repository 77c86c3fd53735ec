"""What one step has decided so far: rows that decode, chunks of prompts, who came and who went."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.pools.pool import CopyOp
from kvpool.scheduling.request import FinishReason, RequestGroup, ScheduledSequence
from kvpool.scheduling.roster import Roster
from kvpool.scheduling.running import make_rows
from kvpool.sequences.batch import SequenceBatch


class PromptChunk(NamedTuple):
    """Tokens `start..stop` of a sequence whose prompt is not computed yet, and where their keys and values go."""

    start: int
    stop: int
    slots: Int32Array


class DecodeRows(NamedTuple):
    """Sequences that decode in this step: one token each, and `counts - 1` drafts behind it."""

    sequences: tuple[ScheduledSequence, ...]
    lanes: Int64Array
    batch: SequenceBatch
    counts: Int64Array | None  # None: one token each
    slots: Int32Array

    def only(self, manager: KVCacheManager, kept: set[ScheduledSequence]) -> DecodeRows:
        """Some of the rows."""
        sequences = [sequence for sequence in self.sequences if sequence in kept]
        keep = np.array([sequence in kept for sequence in self.sequences], np.bool_)
        counts = None if self.counts is None else self.counts[keep]
        columns = keep if self.counts is None else np.repeat(keep, self.counts)
        return DecodeRows(*make_rows(manager, sequences), counts, self.slots[:, columns])


class Round:
    """The step being planned."""

    def __init__(self, roster: Roster, number: int) -> None:
        self.roster = roster
        self.number = number  # of the plan that it becomes
        self.copies: list[CopyOp] = []
        self.budget = roster.config.max_tokens_per_step
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
        """Nothing is computed and nobody came in."""
        return self.computes_nothing and not (self.admitted or self.resumed)

    @property
    def is_full(self) -> bool:
        """No more prompt tokens fit. The first chunk always does: prompts go on however long the others take to decode."""
        return self.budget <= 0 or (self.seconds is not None and self.seconds <= 0 and bool(self.chunks))

    def limit_prompts(self) -> None:
        """Somebody decodes in this step: prompts get what the goal for its length leaves."""
        goal, rows, roster = self.roster.config.max_step_seconds, self.decode, self.roster
        if goal is not None and rows is not None:
            context = int(roster.running.lanes.places[rows.lanes].sum())
            self.seconds = goal - roster.costs.decode_seconds(len(rows.lanes), context)

    def take_copies(self) -> None:
        """Takes over what the manager planned so far; notes what that brings to the GPU."""
        copies = self.roster.manager.take_copies()
        self.copies += copies
        if self.roster.running.arrivals is not None:
            self.roster.running.arrivals.note(self.number, copies)

    def hold_back(self, sequence: ScheduledSequence, *, decodes: bool) -> bool:
        """Keeps a sequence out of steps until its blocks are on the GPU; False if they are."""
        arrivals = self.roster.running.arrivals
        if arrivals is None:
            return False
        self.take_copies()
        held = arrivals.hold_back(sequence, decodes=decodes)
        self.roster.stats.arrival_waits += held
        return held

    def plan_chunk(self, sequence: ScheduledSequence, chunk: PromptChunk) -> None:
        self.chunks[sequence] = chunk
        self.budget -= chunk.stop - chunk.start
        self._spend(chunk)

    def _spend(self, chunk: PromptChunk, sign: int = 1) -> None:
        if self.seconds is not None:
            self.seconds -= sign * self.roster.costs.prefill_seconds(chunk.stop - chunk.start, chunk.start)

    def chunk_stop(self, start: int, target: int) -> int:
        """Where the next chunk of a prompt ends: at a block's end unless it is the last one or smaller than a block."""
        size = self.roster.manager.config.block_size
        limit = min(self.budget, self.roster.config.chunk_tokens)
        if self.seconds is not None:
            limit = min(limit, max(size, self._num_tokens_in_time(start, limit)))
        stop = min(target, start + limit)
        aligned = stop // size * size
        return aligned if start < aligned and stop < target else stop

    def _num_tokens_in_time(self, start: int, limit: int) -> int:
        """How many tokens of a prompt behind `start` can be computed in the seconds that are left, up to `limit`."""
        assert self.seconds is not None
        prefill_seconds = self.roster.costs.prefill_seconds
        return bisect_right(range(1, limit + 1), self.seconds, key=lambda count: prefill_seconds(count, start))

    def preempt(self, sequence: ScheduledSequence) -> None:
        """Takes a sequence off the GPU, out of this step too if it was in it; beams go together."""
        together = [other for other in sequence.group.sequences if other.is_running] if sequence.request.steered else []
        for leaving in together or [sequence]:
            self._preempt_one(leaving)

    def _preempt_one(self, sequence: ScheduledSequence) -> None:
        num_planned = self._withdraw(sequence)
        self.roster.preempt(sequence, num_planned)
        self.preempted.append(sequence)

    def refuse(self, group: RequestGroup, reason: str) -> None:
        """Ends a request that can never fit; those of its sequences that are in this step leave it."""
        for sequence in group.sequences:
            if sequence.is_running:
                self._withdraw(sequence)
        self.roster.finish(group.sequences, FinishReason.REFUSED)
        self.refused.append((group, reason))

    def _withdraw(self, sequence: ScheduledSequence) -> int:
        """Gives back what this step planned for a running sequence; returns how many of its places that was.

        The rows that decode are sorted out when all is decided: those behind them would have to move.
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
