"""What the adaptive policy has learned: how often runs of each kind are reused at each age, and what keeping one is worth.

Ages are counted in epochs. Runs of one kind that were last used in the same epoch are a *cohort*, which is a number: the
epoch times the number of kinds plus the kind, so that older cohorts come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_AGE: Final = 256  # epochs; older runs are worth as much as this old ones and are not followed
_DEPTHS, _SIZES, _REUSES = 6, 5, 2
NUM_KINDS = _DEPTHS * _SIZES * _REUSES
_HISTORY = 0.999  # weight of what was counted an epoch ago
_KIND_PRIOR = 1.0  # exposure, in caches x epochs, that a kind borrows from all kinds together
_PRIOR = 4.0  # the same, that all kinds borrow from the assumption that reuse gets rarer with age

# The parts of a kind that follow from the bits of a run's depth and of its length, both in blocks: powers of four.
DEPTH_PART = [min((bits + 1) // 2, _DEPTHS - 1) * _SIZES * _REUSES for bits in range(65)]
SIZE_PART = [min(max(bits - 1, 0) // 2, _SIZES - 1) * _REUSES for bits in range(65)]


def _age_bins() -> tuple[list[int], list[int]]:
    """First epochs of bins that widen with age, and the bin of every age."""
    starts, width, at = [], 1.0, 0
    while at < MAX_AGE:
        starts.append(at)
        at += round(width)
        if len(starts) >= 4:
            width *= 1.25
    bins = np.searchsorted(starts, np.arange(MAX_AGE), side="right") - 1
    return starts, bins.tolist()


_STARTS, BIN_OF_AGE = _age_bins()
_WIDTHS: Floats = np.diff([*_STARTS, MAX_AGE]).astype(np.float64)
_BINS = len(_STARTS)
_FALLING: Floats = 8 / (np.array(_STARTS) + _WIDTHS / 2 + 4)  # how reuse gets rarer with age where nothing is known
_NEVER_BACK: Floats = np.tril(np.full((_BINS, _BINS), 1e300), -1)  # the time that it takes to become younger


class Experience:
    """How many blocks were reused, and how many could have been, by kind and age; both fade slowly.

    Kinds have rows in the order in which they were met.
    """

    def __init__(self) -> None:
        self.epoch = 0  # up to which all is counted
        self.has_news = False  # whether anything was reused since the last digest
        self._rows: dict[int, int] = {}  # of the kinds met so far
        self._reused: dict[int, int] = {}  # blocks since the last digest, by row * bins + bin
        self._hits: Floats = np.zeros((NUM_KINDS, _BINS))
        self._exposure: Floats = np.zeros((NUM_KINDS, _BINS))
        self._alive: Floats = np.zeros((NUM_KINDS, MAX_AGE + 1))  # blocks that are followed, by age; none in the last
        self._changes: list[tuple[int, int, int, int]] = []  # of `_alive`: epoch, row, epoch of the last use, blocks

    def count(self, cohort: int, epoch: int, blocks: int) -> None:
        """Blocks of a cohort were reused in this epoch."""
        last_use, kind = divmod(cohort, NUM_KINDS)
        if epoch - last_use < MAX_AGE:
            row = self._rows.setdefault(kind, len(self._rows))
            place = row * _BINS + BIN_OF_AGE[epoch - last_use]
            self._reused[place] = self._reused.get(place, 0) + blocks
            self.has_news = True

    def follow(self, epoch: int, changes: Mapping[int, int]) -> None:
        """From this epoch on, so many more blocks of these cohorts are followed, or fewer."""
        rows = self._rows
        for cohort, blocks in changes.items():
            if blocks:
                last_use, kind = divmod(cohort, NUM_KINDS)
                self._changes.append((epoch, rows.setdefault(kind, len(rows)), last_use, blocks))

    def digest(self, epoch: int) -> None:
        """Counts the time from the last digest up to the beginning of `epoch`.

        A block was exposed once at each age from the first at which it was followed to the last: it is noted at the
        first of these ages and taken off behind the last, and the notes are summed up over ages.
        """
        passed, self.epoch = min(epoch - self.epoch, MAX_AGE), epoch
        self.has_news = False
        for place, reused in self._reused.items():
            self._hits[divmod(place, _BINS)] += reused
        self._reused.clear()
        used = len(self._rows)
        alive = self._alive[:used]
        when, row, last_use, blocks = np.array(self._changes, np.int64).reshape(-1, 4).T
        self._changes.clear()
        aged = np.zeros((used, MAX_AGE + 1))
        aged[:, passed:] = alive[:, : MAX_AGE + 1 - passed]
        np.add.at(aged, (row, np.minimum(epoch - last_use, MAX_AGE)), blocks)
        np.add.at(alive, (row, np.minimum(when - last_use, MAX_AGE)), blocks)
        exposed = np.add.accumulate((alive - aged)[:, :MAX_AGE], axis=1)
        self._exposure[:used] += np.add.reduceat(exposed, _STARTS, axis=1)
        self._exposure *= _HISTORY**passed
        self._hits *= _HISTORY**passed
        aged[:, MAX_AGE] = 0.0
        self._alive[:used] = aged

    def values(self, capacity: int) -> list[list[float]]:
        """For every kind and age bin: the most hits per block and epoch that keeping a run for some time can bring."""
        used = len(self._rows)
        hits, exposure = self._hits[:used], self._exposure[:used]
        all_hits, all_exposure = np.add.reduce(hits), np.add.reduce(exposure)
        usual = (np.add.reduce(all_hits) + 1.0) / (np.add.reduce(all_exposure) + 100.0)
        prior, kind_prior = _PRIOR * capacity, _KIND_PRIOR * capacity
        hazard = np.empty((used + 1, _BINS))
        overall = np.divide(all_hits + prior * usual * _FALLING, all_exposure + prior, out=hazard[-1])
        np.divide(hits + kind_prior * overall, exposure + kind_prior, out=hazard[:-1])
        *best, unseen = _best_rates(hazard)
        values = [unseen] * NUM_KINDS  # kinds of which nothing is known are all alike
        for kind, rates in zip(self._rows, best, strict=True):
            values[kind] = rates
        return values


def _best_rates(hazard: Floats) -> list[list[float]]:
    """Of every row of hazards by age bin: the best rate of hits from each bin on (its Gittins index).

    With G the chance to be unused up to an age and T the time spent unused from it on, keeping a run from bin i to
    bin j brings (G[i] - G[j]) hits for (T[i] - T[j]). T is summed up from the end: where runs are almost surely reused
    early, what is left behind is small, and would be lost beside what came before.
    """
    np.minimum(np.maximum(hazard, 1e-12, out=hazard), 0.9, out=hazard)
    fading = np.exp(_WIDTHS * np.log1p(-hazard))
    unused = np.ones((len(hazard), _BINS + 1))
    np.multiply.accumulate(fading, axis=1, out=unused[:, 1:])
    left = np.zeros((len(hazard), _BINS + 1))
    np.add.accumulate((unused[:, :-1] * (1 - fading) / hazard)[:, ::-1], axis=1, out=left[:, -2::-1])
    gained = unused[:, :-1, None] - unused[:, None, 1:]
    spent = left[:, :-1, None] - left[:, None, 1:] + _NEVER_BACK
    best: list[list[float]] = np.maximum.reduce(gained / spent, axis=2).tolist()
    return best
