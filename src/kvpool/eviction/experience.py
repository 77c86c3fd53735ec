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
_FANS, _TURNS, _SIZES = 4, 4, 11
_KINDS_PER_FAN = _TURNS * _SIZES
_SHARED: Final = _FANS * _KINDS_PER_FAN  # the first kind of what a request shares with others
LOWEST: Final = 2 * _SHARED  # the kind of what has the lowest priority, whoever published it
NUM_KINDS = LOWEST + 1
_HOT: Final = (_FANS, 2 * _FANS - 1)  # fans of what is shared, as first of all or by many: it comes again
_HISTORY = 0.999  # weight of what was counted an epoch ago
_KIND_PRIOR = 2.0  # exposure, in caches x epochs, that a kind borrows from those with the same fan-out
_PRIOR = 4.0  # the same, that a family of kinds borrows from the assumption that reuse gets rarer with age


def kind_of(num_known: int, fan_out: int, turn: int, num_new: int) -> int:
    """The kind of what a request adds: `num_new` blocks behind `num_known` that had been there before.

    Kinds are told apart by how many requests had gone on from the same place (none could, nobody else, few, many), by the
    turn, and by how much is new, in powers of two. `as_shared` is the kind of the blocks before it.
    """
    fan = 0 if num_known <= 1 else 1 if fan_out <= 1 else 2 if fan_out <= 3 else 3
    return (fan * _TURNS + min(turn, _TURNS - 1)) * _SIZES + min(num_new.bit_length(), _SIZES - 1)


def as_shared(kind: int) -> int:
    """The kind of what a request shares with those before it, by the kind of what it adds."""
    return kind if kind >= _SHARED else kind + _SHARED


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
        kinds = np.array(list(self._rows), np.int64)
        hits, exposure = self._hits[: len(kinds)], self._exposure[: len(kinds)]
        usual = (hits.sum() + 1.0) / (exposure.sum() + 100.0)
        fans = kinds // _KINDS_PER_FAN
        is_hot = np.isin(fans, _HOT)
        shapes = [_shape(hits[of_family], exposure[of_family], usual, capacity) for of_family in (~is_hot, is_hot)]
        hazard = np.array(shapes)[is_hot.astype(np.int64)]
        hazard *= _factors(hits.sum(axis=1), (exposure * hazard).sum(axis=1), fans, _KIND_PRIOR * capacity * usual)[:, None]
        *best, unseen = _best_rates(np.vstack([hazard, shapes[0]]))
        values = [unseen] * NUM_KINDS  # kinds of which nothing is known are all alike
        for kind, rates in zip(self._rows, best, strict=True):
            values[kind] = rates
        return values


def _shape(hits: Floats, exposure: Floats, usual: float, capacity: int) -> Floats:
    """The hazard by age that all kinds of a family have in common: it rises to one age and falls behind it."""
    prior = _PRIOR * capacity
    reused = hits.sum(axis=0) + prior * usual * _FALLING
    exposed = exposure.sum(axis=0) + prior
    peak = int((reused / exposed).argmax())
    rising = _falling_rates(reused[:peak][::-1], exposed[:peak][::-1])[::-1]
    return np.array(rising + _falling_rates(reused[peak:], exposed[peak:]))


def _falling_rates(reused: Floats, exposed: Floats) -> list[float]:
    """Rates that never rise, nearest to `reused / exposed`: neighbours that rise are put together."""
    groups: list[tuple[float, float, int]] = []
    for hits, time in zip(reused.tolist(), exposed.tolist(), strict=True):
        bins = 1
        while groups and hits * groups[-1][1] > groups[-1][0] * time:
            more_hits, more_time, more_bins = groups.pop()
            hits, time, bins = hits + more_hits, time + more_time, bins + more_bins
        groups.append((hits, time, bins))
    return [hits / time for hits, time, bins in groups for _ in range(bins)]


def _factors(seen: Floats, expected: Floats, fans: npt.NDArray[np.int64], few: float) -> Floats:
    """How much more often kinds are reused than their family; a kind of which little was seen takes after its fan-out."""
    seen_by_fan, expected_by_fan = np.bincount(fans, seen) + few, np.bincount(fans, expected) + few
    factors: Floats = (seen + few * (seen_by_fan / expected_by_fan)[fans]) / (expected + few)
    return factors


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
