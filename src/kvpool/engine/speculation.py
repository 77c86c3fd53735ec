"""Speculation: drafts from the text before, and which drafts of a step count."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress

import numpy as np

from kvpool.engine.generation import Generation
from kvpool.engine.step_part import StepPart
from kvpool.errors import SequenceStateError
from kvpool.pools.arrays import Int32Array, Int64Array, within
from kvpool.scheduling import BatchPlan, Scheduler

LONGEST_ENDING = 3  # tokens at the end of a text that are looked for before it


def propose(tokens: Int32Array, num_draft: int) -> Int32Array:
    """Up to `num_draft` tokens that followed the latest earlier occurrence of the longest known ending of `tokens`.

    >>> propose(np.array([5, 6, 7, 8, 1, 5, 6], np.int32), num_draft=2).tolist()
    [7, 8]
    """
    total = len(tokens)
    for length in range(min(LONGEST_ENDING, total - 1), 0, -1):
        ending = tokens[total - length :]
        # Candidates end before the last token, so that something follows each of them.
        windows = np.lib.stride_tricks.sliding_window_view(tokens[: total - 1], length)
        places = np.flatnonzero((windows == ending).all(axis=1))
        if len(places):
            start = int(places[-1]) + length
            return tokens[start : start + num_draft].copy()
    return np.empty(0, np.int32)


def num_accepted(plan: BatchPlan, samples: Int32Array) -> Int64Array:
    """How many samples of each sampling row with drafts count: the first, one behind each right draft, none behind a stop.

    For rows with several samples, which have no drafts, it is 1.
    """
    rows = plan.sampling_rows
    drafts = plan.num_drafts[rows]
    counts = drafts + 1
    number = within(counts)
    taken = samples[np.repeat(plan.first_samples, counts) + number]
    is_last = number == np.repeat(drafts, counts)
    verified = plan.token_ids[np.where(is_last, 0, plan.logits_indices + 1)]
    ends = np.where(is_last | (taken != verified), number, plan.num_tokens)
    starts = np.cumsum(counts) - counts
    accepted: Int64Array = np.minimum.reduceat(ends, starts) + 1
    for at in np.flatnonzero(accepted > 1).tolist():
        request = plan.sequences[int(rows[at])].request
        accepted[at] = request.num_until_stop(taken[starts[at] : starts[at] + accepted[at]])
    return accepted


class PromptLookup(StepPart):
    """Proposes drafts for all sequences that decode, before each step is planned."""

    def __init__(self, scheduler: Scheduler, generations: Mapping[Hashable, Generation], num_draft_tokens: int) -> None:
        self._scheduler = scheduler
        self._generations = generations  # by request id
        self._num_draft_tokens = num_draft_tokens  # of one sequence in one step, at most

    def planning(self) -> None:
        """Proposes what followed the last tokens of each text before."""
        for sequence in self._scheduler.decoding:
            generation = self._generations.get(sequence.request.id)
            if generation is None or generation.params.needs_each_token:
                continue
            guess = propose(self._scheduler.token_ids(sequence), self._num_draft_tokens)
            with suppress(SequenceStateError):  # its sample is in flight
                self._scheduler.propose(sequence, guess)
