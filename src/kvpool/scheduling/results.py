"""Applies the samples of a step: commits tokens, accepts or rewinds drafts, forks sequences, ends sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, as_array
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.capacity import Capacity
from kvpool.scheduling.queues import Queues
from kvpool.scheduling.request import FinishReason, RequestGroup, ScheduledSequence, joined
from kvpool.scheduling.running import make_rows


class Fork(NamedTuple):
    """A sequence that branched off another one: copy what the engine keeps for the parent's lane to the child's."""

    parent: ScheduledSequence
    child: ScheduledSequence  # its lane is -1 if it ended at once or waits for a place


class Results:
    """Carries out one `Scheduler.complete`."""

    def __init__(self, queues: Queues, capacity: Capacity, plan: BatchPlan, tokens: Int32Array) -> None:
        self.queues = queues
        self.manager = queues.manager
        self.running = queues.running
        self.capacity = capacity
        self.plan = plan
        self.tokens = tokens
        self.ended: dict[FinishReason, list[ScheduledSequence]] = {}
        self.forks: list[Fork] = []
        self.groups: dict[RequestGroup, None] = {}  # of sequences that ended

    # --- what was given ----------------------------------------------------------------------------------------------

    def checked_counts(self, given: Any) -> Int64Array:
        """How many tokens each sampling row got; raises before anything changes if they do not fit the plan."""
        plan, rows = self.plan, self.plan.sampling_rows
        if (
            plan.is_uniform
            and len(self.tokens) == len(rows)
            and (given is None or np.array_equal(given, plan.num_samples))
        ):
            return plan.num_samples
        wanted, drafts = plan.num_samples[rows], plan.num_drafts[rows]
        if given is None:
            if drafts.any():
                raise InvalidArgumentError("the plan has drafts: counts must say how many tokens each row accepted")
            counts = wanted
        else:
            array = as_array(given, "counts")
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise InvalidArgumentError(f"counts must hold one int for every row that samples, got {given!r}")
            if array.shape != rows.shape:
                raise InvalidArgumentError(f"got {len(array)} counts for {len(rows)} rows that sample")
            counts = array.astype(np.int64)
        if len(self.tokens) != int(counts.sum()):
            raise InvalidArgumentError(f"got {len(self.tokens)} tokens where the plan samples {int(counts.sum())}")
        fits = np.where(drafts > 0, (counts >= 1) & (counts <= drafts + 1), counts == wanted)
        if not fits.all():
            row = int((~fits).argmax())
            raise InvalidArgumentError(
                f"{plan.sequences[int(rows[row])]!r} got {int(counts[row])} tokens; its row samples {int(wanted[row])} "
                f"with {int(drafts[row])} drafts"
            )
        return counts

    def apply(self, counts: Int64Array) -> None:
        """Commits the step and hands out its samples."""
        plan, rows = self.plan, self.plan.sampling_rows
        if plan.is_uniform and plan.departures == self.running.departures:
            self._commit_all()
            self._advance(rows, self.tokens)
        else:
            self._apply_by_row(rows, counts)
        for reason, sequences in self.ended.items():
            self.queues.finish(sequences, reason)

    def _apply_by_row(self, rows: Int64Array, counts: Int64Array) -> None:
        plan = self.plan
        current = plan.current_rows(self.running.departures)
        several = plan.decodes_several
        self._commit_decode(current[: plan.num_decode] & ~several[: plan.num_decode])
        self._commit_chunks(current)
        simple = current[rows] & (plan.num_samples[rows] == 1) & ~several[rows]
        if simple.all():
            self._advance(rows, self.tokens)
        else:
            first = np.cumsum(counts) - counts
            self._advance(rows[simple], self.tokens[first[simple]])
            self._advance_singly(rows[~simple], first[~simple], counts[~simple], current)

    # --- commit ------------------------------------------------------------------------------------------------------

    def _commit_all(self) -> None:
        """Commits the inputs of all rows that decoded."""
        if self.plan.decode_batch is not None:
            lanes = self.plan.lanes[: self.plan.num_decode]
            self.manager.commit_batch(self.plan.decode_batch, self.running.lanes.last_token[lanes])

    def _commit_decode(self, chosen: BoolArray) -> None:
        """Commits the inputs of some rows that decoded one token."""
        if chosen.all():
            self._commit_all()
        elif chosen.any():
            sequences = [self.plan.sequences[row] for row in np.flatnonzero(chosen).tolist()]
            _, lanes, batch = make_rows(self.manager, sequences)
            self.manager.commit_batch(batch, self.running.lanes.last_token[lanes])

    def _commit_chunks(self, current: BoolArray) -> None:
        plan = self.plan
        for row in range(plan.num_decode, len(plan.sequences)):
            if current[row]:
                num_tokens = int(plan.query_start[row + 1] - plan.query_start[row])
                self.manager.commit(plan.sequences[row].live_handle(), num_tokens)

    def _settle_drafts(self, row: int, sequence: ScheduledSequence, samples: Int32Array) -> Int32Array:
        """Rewinds rejected drafts; returns what to commit: the inputs and the accepted ones, all but the last of `samples`.

        Where layers keep a state, only what it covers is committed. The rest is rewound and computed again.
        """
        plan, handle = self.plan, sequence.live_handle()
        first, end = plan.query_start[row : row + 2].tolist()
        known = joined(plan.token_ids[first : end - int(plan.num_drafts[row])], samples[:-1])
        num_kept = len(known) if plan.num_kept is None else int(plan.num_kept[row])
        if num_kept < end - first:
            self.manager.rewind(handle, end - first - num_kept)
            self.running.lanes.places[sequence.lane] -= end - first - num_kept
        self.running.put_aside(sequence, known[num_kept:])
        sequence.num_drafts_in_flight = 0
        self.queues.stats.accepted_draft_tokens += len(samples) - 1
        return known[:num_kept]

    # --- samples -----------------------------------------------------------------------------------------------------

    def _advance(self, rows: Int64Array, samples: Int32Array) -> None:
        """Gives each of these running sequences one sample, in array operations."""
        plan, lanes = self.plan, self.running.lanes
        row_lanes = plan.lanes if plan.is_uniform and len(rows) == len(plan.lanes) else plan.lanes[rows]
        lanes.last_token[row_lanes] = samples
        lanes.generated[row_lanes] += 1
        lanes.in_flight[row_lanes] -= 1
        for at in lanes.ended(row_lanes, samples).nonzero()[0].tolist():
            self._end(plan.sequences[int(rows[at])], int(samples[at]))

    def _advance_singly(self, rows: Int64Array, first: Int64Array, counts: Int64Array, current: BoolArray) -> None:
        """Gives samples to rows with drafts, rows with several samples, and rows whose sequence has left the GPU."""
        plan = self.plan
        given = [
            self.tokens[start : start + count] for start, count in zip(first.tolist(), counts.tolist(), strict=True)
        ]
        settled: dict[KVCacheHandle, Int32Array] = {}
        for row, samples in zip(rows.tolist(), given, strict=True):
            sequence, num_drafts = plan.sequences[row], int(plan.num_drafts[row])
            if sequence.is_finished:
                continue
            if num_drafts:
                samples = samples[: sequence.request.num_until_stop(samples)]
            if not current[row]:
                self._advance_departed(sequence, samples, bool(num_drafts))
            elif plan.decodes_several[row]:
                settled[sequence.live_handle()] = self._settle_drafts(row, sequence, samples)
                self._put(sequence, samples)
            else:
                self._branch(sequence, samples)
        if settled:
            numbers = [len(tokens) for tokens in settled.values()]
            self.manager.commit_batch(list(settled), np.concatenate(list(settled.values())), numbers)

    def _put(self, sequence: ScheduledSequence, samples: Int32Array) -> None:
        """Adds samples to a running sequence, and ends it if it is complete."""
        lanes, lane = self.running.lanes, sequence.lane
        lanes.last_token[lane] = samples[-1]
        lanes.generated[lane] += len(samples)
        lanes.in_flight[lane] -= 1
        if lanes.ended(np.array([lane]), samples[-1:])[0]:
            self._end(sequence, int(samples[-1]))
        else:
            self.running.decoding.add(sequence)

    def _branch(self, sequence: ScheduledSequence, samples: Int32Array) -> None:
        """The first sample continues the sequence, each further one a fork of it."""
        known = self.running.known_tokens(sequence)
        if not sequence.group.branched:
            self.running.branch(sequence)
        for sample in samples[1:].tolist():
            child = self._new_child(sequence, joined(known, [sample]))
            if child.is_finished:
                continue
            if self.running.num_free_lanes > 0:
                (handle,) = self.manager.fork(sequence.live_handle(), child.id)
                self.running.enter(child, handle, handle.num_reserved)
                self.capacity.promise(self.running.lanes, child)
                self.running.decoding.add(child)
            else:
                self.queues.resuming.push(child)
        self.capacity.promise(self.running.lanes, sequence)
        self._put(sequence, samples[:1])

    def _advance_departed(self, sequence: ScheduledSequence, samples: Int32Array, one_after_the_other: bool) -> None:
        """Samples of a sequence that was preempted meanwhile: it resumes with them."""
        known = sequence.tokens
        sequence.in_flight -= 1
        sequence.tokens = joined(known, samples if one_after_the_other else samples[:1])
        if not one_after_the_other:
            sequence.group.branched = True
            for sample in samples[1:].tolist():
                child = self._new_child(sequence, joined(known, [sample]))
                if not child.is_finished:
                    self.queues.resuming.push(child)
        if _is_over(sequence):
            self._end(sequence, int(sequence.tokens[-1]))

    def _new_child(self, parent: ScheduledSequence, tokens: Int32Array) -> ScheduledSequence:
        child = parent.group.new_sequence(tokens)
        child.urgency, child.seniority = parent.urgency, parent.seniority
        self.queues.policy.charge(child, child.request.num_places + 1 - len(tokens))
        self.forks.append(Fork(parent, child))
        if _is_over(child):
            self.queues.end(child, _reason(child, int(tokens[-1])))
        return child

    def _end(self, sequence: ScheduledSequence, last_token: int) -> None:
        self.ended.setdefault(_reason(sequence, last_token), []).append(sequence)
        self.groups[sequence.group] = None


def _reason(sequence: ScheduledSequence, last_token: int) -> FinishReason:
    return FinishReason.STOP if last_token in sequence.request.stop_ids else FinishReason.LENGTH


def _is_over(sequence: ScheduledSequence) -> bool:
    request, tokens = sequence.request, sequence.tokens
    return len(tokens) >= len(request.prompt) + request.max_new_tokens or int(tokens[-1]) in request.stop_ids
