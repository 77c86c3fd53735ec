"""Speculation: how many tokens a step drafts, drafts from the text before, which drafts count, and what MTP layers read.

`DraftModel` in `drafts.py` has drafts from a model, and `Guesses` in `sampling.py` says which of these are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.pools.arrays import Int32Array, Int64Array, within
from kvpool.scheduling import BatchPlan, ScheduledSequence
from kvpool.storage.moving import upload

PROBE_AFTER = 32  # steps; behind so many, the other choice is measured
MOST_PROBE_AFTER = 256  # while the choice stays
PROBE_STEPS = 3  # that measure it. The first does not count: behind others it waits, or the draft has to catch up
FORGETTING = 0.997  # how much less each draft counts than the next one, for how often they are right
MARGIN = 1.05  # drafts must give so many times the tokens a second: beginning and ending with them costs some, too
LONGEST_ENDING = 3  # tokens at the end of a text that are looked for before it


class DraftStats(NamedTuple):
    """How drafts do. `SchedulerStats` counts those that were verified and accepted."""

    length: int  # tokens that a step drafts for a sequence
    acceptance: float  # how likely a draft is right if those before it are


class DraftLength:
    """Chooses how many tokens a step drafts for a sequence: as many as give most tokens a second.

    If each draft is right with probability p, given that those before it are, n drafts give 1 + p + ... + p^n tokens. Seconds
    are measured for each n, in batches of similar size; those of other n are estimated from the nearest ones.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.chosen = most
        self._right, self._tried = 0.5, 1.0
        self._seconds: dict[int, dict[int, float]] = {}  # by the bits of the batch size, then by drafts
        self._interval = PROBE_AFTER
        self._since_probe = 0
        self._drafted: bool | None = None  # whether the last step had drafts

    @property
    def acceptance(self) -> float:
        """How likely a draft is right if those before it are, by the last few hundred of them."""
        return self._right / self._tried

    def choose(self, num_sequences: int) -> int:
        """How many tokens the next step should draft for each of so many sequences."""
        seconds = self._seconds.get(num_sequences.bit_length(), {})
        for number in (0, self.most):  # first measure these
            if number not in seconds:
                self.chosen = number
                return number
        best = max(range(1, self.most + 1), key=lambda number: self._rate(number, seconds))
        before, self.chosen = self.chosen, best if self._rate(best, seconds) > MARGIN * self._rate(0, seconds) else 0
        self._since_probe += 1
        if bool(before) != bool(self.chosen):
            self._interval = PROBE_AFTER
        if self._since_probe <= self._interval:
            return self.chosen
        if self._since_probe >= self._interval + PROBE_STEPS:
            self._since_probe = 0
            self._interval = min(2 * self._interval, MOST_PROBE_AFTER)
        return 0 if self.chosen else best

    def _rate(self, number: int, seconds: Mapping[int, float]) -> float:
        """Tokens a second of one sequence with so many drafts."""
        tokens = sum(self.acceptance**power for power in range(number + 1))
        return tokens / max(seconds[number] if number in seconds else _estimate(number, seconds), 1e-9)

    def observe(self, num_sequences: int, number: int, seconds: float) -> None:
        """A step that only decoded took so long with so many drafts of each sequence."""
        before, self._drafted = self._drafted, number > 0
        if before != self._drafted:  # it took longer than the next ones will
            return
        known = self._seconds.setdefault(num_sequences.bit_length(), {})
        average = known.setdefault(number, seconds)
        known[number] = average + 0.2 * (min(seconds, 2 * average) - average)  # one stall must not count for long

    def verified(self, right: int, tried: int) -> None:
        """Of the drafts of a step, `tried` were compared with the model's token, up to the first wrong one."""
        kept = FORGETTING**tried
        self._right = kept * self._right + right
        self._tried = kept * self._tried + tried


def _estimate(number: int, seconds: Mapping[int, float]) -> float:
    """The seconds of a step with so many drafts, from those of other numbers. The first draft costs more than the others."""
    nearest = sorted((other for other in seconds if other), key=lambda other: abs(other - number))[:2]
    one, other = nearest if len(nearest) > 1 else (nearest[0], 0)
    slope = (seconds[one] - seconds[other]) / (one - other)
    return max(seconds[0], seconds[one] + slope * (number - one))


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


class HiddenStates:
    """What the model's last layer computed for the newest tokens: MTP layers read it beside the next token.

    These are the hidden states of the last `length` tokens of each lane, and of all tokens of the newest step.

    They are kept on the device, in one tensor: a ring for each lane, zeros, then the step. They are not part of the cache:
    those of a prefix that was found there, swapped in or forked are unknown, and count as zeros.
    """

    def __init__(self, num_lanes: int, length: int, num_tokens: int, size: int, like: Tensor) -> None:
        self._length = length
        self._zeros = num_lanes * length
        self._memory = torch.zeros(self._zeros + 1 + num_tokens, size, dtype=like.dtype, device=like.device)
        self.step = self._memory[self._zeros + 1 :]  # the runner of the model writes those of a step here
        self._owners: list[tuple[ScheduledSequence, int] | None] = [None] * num_lanes  # and their residence
        self._first = np.zeros(num_lanes, np.int64)  # the first token of each owner that a step computed
        self._stop = np.zeros(num_lanes, np.int64)  # behind the last one
        self._plan: BatchPlan | None = None  # the newest step, while only `step` has its states

    def begin(self, plan: BatchPlan) -> None:
        """A step was launched: its states are in `step`."""
        self._plan = plan
        starts = self._starts(plan)
        for row, (sequence, lane) in enumerate(zip(plan.sequences, plan.lanes.tolist(), strict=True)):
            if self._owners[lane] != (owner := (sequence, sequence.residence)):
                self._owners[lane] = owner
                self._first[lane] = self._stop[lane] = starts[row]

    def end(self) -> None:
        """Keeps the newest states of the step, before the next one overwrites it."""
        plan, length = self._plan, self._length
        assert plan is not None
        counts = np.diff(plan.query_start)
        tokens = np.flatnonzero(np.repeat(counts, counts) - within(counts) <= length)
        places = np.repeat(plan.lanes, counts)[tokens] * length + plan.positions[tokens] % length
        chosen, to = upload(np.stack([tokens, places]), self._memory.device)
        self._memory.index_copy_(0, to, self.step.index_select(0, chosen))
        self._stop[plan.lanes] = plan.kv_lengths
        self._plan = None

    def first(self, sequence: ScheduledSequence, position: int) -> int:
        """The first token of a sequence whose predecessor's state can be given, or that nobody has computed before.

        `position` is the next token to compute.
        """
        lane = sequence.lane
        if self._owners[lane] != (sequence, sequence.residence):
            return position
        return int(max(self._first[lane], self._stop[lane] - self._length + 1))

    def before(self, sequence: ScheduledSequence, first: int, stop: int, row: int | None = None) -> Int64Array:
        """Where `read` finds the state of the predecessor of each token `first..stop` of a sequence.

        `row` is that of the sequence in the newest step.
        """
        lane, positions = sequence.lane, np.arange(first - 1, stop - 1)
        found = lane * self._length + positions % self._length
        if self._owners[lane] != (sequence, sequence.residence):
            return np.full_like(found, self._zeros)
        if row is not None and self._plan is not None:
            offset = self._zeros + 1 + self._plan.query_start[row] - self._starts(self._plan)[row]
            found = np.where(positions >= self._starts(self._plan)[row], positions + offset, found)
        return np.where(positions < self._first[lane], self._zeros, found)

    def read(self, places: Int64Array, into: Tensor) -> None:
        """Copies states from where `before` found them."""
        torch.index_select(self._memory, 0, upload(places, self._memory.device), out=into[: len(places)])

    @staticmethod
    def _starts(plan: BatchPlan) -> Int64Array:
        starts: Int64Array = plan.kv_lengths - np.diff(plan.query_start)
        return starts
