"""How many tokens a step drafts: as many as give most tokens a second, by what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PROBE_AFTER = 32  # steps; behind so many, the other choice is measured
MOST_PROBE_AFTER = 256  # while the choice stays
PROBE_STEPS = 3  # that measure it. The first does not count: behind others it waits, or the draft has to catch up
FORGETTING = 0.997  # how much less each draft counts than the next one, for how often they are right
MARGIN = 1.05  # drafts must give so many times the tokens a second: beginning and ending with them costs some, too


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
