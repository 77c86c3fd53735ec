"""What the adaptive policy has learned: how often runs of each kind are reused at each age, and what keeping one is worth.

Ages are counted in milliseconds. Runs of one kind that were last used in the same epoch are a *cohort*, which is a number:
when the epoch began times the number of kinds plus the kind, so that older cohorts come first.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.scope import NUM_HINTS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Shaped = tuple[Floats, int, npt.NDArray[np.bool_]]  # a hazard by age, the bin of its peak, and which kinds have it

MAX_AGE: Final = 2**27  # milliseconds, a day and a half; older runs are worth as much as this old ones
_FANS: Final = 4
_TURNS: Final = 4
_SIZES: Final = 11
_OWN: Final = _FANS * NUM_HINTS  # branches, by fan-out and hint, of what requests add; those of what they share follow
_BRANCHES: Final = 2 * _OWN + 1  # and one of what has the lowest priority
_SHARED: Final = _OWN * _TURNS * _SIZES  # the first kind of what is shared
LOWEST: Final = _SHARED + _OWN * _TURNS  # the kind of what has the lowest priority, whoever published it
NUM_KINDS: Final = LOWEST + 1
_HOT: Final = (_FANS, 2 * _FANS - 1)  # fans of what is shared, as first of all or by many: it comes again
_WIDENING = 1.35
_SURELY = 12.0  # reuses in one bin; more would leave nothing to compute with behind it
_KIND_PRIOR = 5.5  # exposure, in caches x epochs, that a kind borrows from those with the same fan-out and hint
_PRIOR = 4.0  # the same, that a family of kinds borrows from the assumption that reuse gets rarer with age
_HINT_PRIOR = 0.25  # caches full of runs, in each age bin, that the kinds of one hint borrow from their family
_LEAD = 4.0  # times as often as the rest what is shared is at most taken to be reused, while little is known of it
_BRANCH_OF: Ints = np.repeat(np.arange(_BRANCHES), [*[_TURNS * _SIZES] * _OWN, *[_TURNS] * _OWN, 1])  # by kind


def kind_of(num_known: int, fan_out: int, turn: int, num_new: int, hint: int = 0) -> int:
    """The kind of what a request adds: `num_new` blocks behind `num_known` that had been there before.

    Kinds are told apart by how many requests had gone on from the same place (none could, nobody else, few, many), by the
    turn, and by how much is new, in powers of two. `as_shared` is the kind of the blocks before it.
    """
    fan = 0 if num_known <= 1 else 1 if fan_out <= 1 else 2 if fan_out <= 3 else 3
    size = num_new.bit_length()
    turn, size = turn if turn < _TURNS else _TURNS - 1, size if size < _SIZES else _SIZES - 1
    return ((fan * NUM_HINTS + hint) * _TURNS + turn) * _SIZES + size


def as_shared(kind: int) -> int:
    """The kind of what a request shares with those before it, by the kind of what it adds; how much that is says nothing."""
    return kind if kind >= _SHARED else _SHARED + kind // _SIZES


def _edges() -> list[int]:
    """Where age bins begin, in milliseconds: from a quarter of a second on they widen by a factor."""
    edges, at = [0], 256.0
    while at < MAX_AGE:
        edges.append(round(at))
        at *= _WIDENING
    return edges


EDGES: Final = _edges()
_ENDS: Final = [*EDGES[1:], MAX_AGE]
_BINS: Final = len(EDGES)
_FIRST_BIN: Final = [
    max(0, bisect_right(EDGES, 1 << bits >> 1) - 1) for bits in range(MAX_AGE.bit_length() + 1)
]  # by length
_FROM: Floats = np.array(EDGES, np.float64)
_UPTO: Floats = np.array(_ENDS, np.float64)
_WIDTHS: Floats = _UPTO - _FROM
_MIDDLES: Floats = (_FROM + _UPTO) / 2


def bin_of(age: int) -> int:
    """The bin of an age that is not negative: a few steps from the first bin of its power of two, and no search."""
    if age >= MAX_AGE:
        return _BINS - 1
    found = _FIRST_BIN[age.bit_length()]
    while _ENDS[found] <= age:
        found += 1
    return found


class Experience:
    """How many blocks were reused, and how many could have been for how long, by kind and age; both fade slowly.

    Kinds have rows in the order in which they were met.
    """

    def __init__(self) -> None:
        self.has_news = False  # whether anything was reused since the last digest
        self._rows: dict[int, int] = {}  # of the kinds met so far
        self._row_of: Ints = np.zeros(NUM_KINDS, np.int64)  # the same
        self.num_noted = 0  # how much waits for the next digest
        self._num_reuses = 0.0  # how many runs the hits are of
        self._reused: list[int] = []  # since the last digest: kind, age and blocks of each
        # What is followed since then, and no longer: cohort, moment and blocks of each, those alike in one
        self._begun: list[int] = []
        self._ended: list[int] = []
        self._alive: Ints = np.zeros(0, np.int64)  # cohorts that are followed
        self._alive_blocks: Ints = np.zeros(0, np.int64)  # and how many blocks of each
        self._hits: Floats = np.zeros((0, _BINS))
        self._followed: Floats = np.zeros((0, _BINS))  # block-milliseconds, if nobody left any more
        self._exposure: Floats = np.zeros((0, _BINS))

    def count(self, cohort: int, now: int, blocks: int) -> None:
        """At this moment so many blocks of a cohort were reused."""
        since, kind = divmod(cohort, NUM_KINDS)
        self._reused += (kind, now - since, blocks)
        self.num_noted += 1
        self.has_news = True

    def follow(self, cohort: int, now: int, blocks: int) -> None:
        """From this moment on, so many more blocks of a cohort are followed, or fewer."""
        self.num_noted += 1
        changes = self._begun if blocks > 0 else self._ended
        if changes and changes[-3] == cohort and changes[-2] == now:
            changes[-1] += blocks
            return
        changes += cohort, now, blocks

    def digest(self, now: int, fading: float) -> None:
        """Counts what was noted.

        What is followed from an age on is exposed at all later ones, less what is no longer followed then, and less what
        is not yet that old.
        """
        self.has_news, self.num_noted = False, 0
        cohort, moment, change = _columns(self._begun + self._ended)
        reused, age, blocks = _columns(self._reused)
        since, kind = np.divmod(cohort, NUM_KINDS)
        self._meet(kind)
        self._meet(reused)
        used, row_of = len(self._rows), self._row_of
        places = row_of[reused] * _BINS + np.searchsorted(_FROM, age, side="right") - 1
        self._hits = (
            _grown(self._hits, used) + np.bincount(places, blocks, used * _BINS).reshape(used, _BINS)
        ) * fading
        self._num_reuses = (self._num_reuses + len(reused)) * fading
        self._followed = _grown(self._followed, used) + _exposed(row_of[kind], moment - since, change, used)
        self._begun, self._ended, self._reused = [], [], []
        self._change_alive(cohort, change)
        since, kind = np.divmod(self._alive, NUM_KINDS)
        to_come = _exposed(row_of[kind], now - since, self._alive_blocks, used)
        self._exposure = np.maximum(self._followed - to_come, 0.0) * fading
        self._followed = self._exposure + to_come

    def _meet(self, kinds: Ints) -> None:
        """Gives new kinds a row."""
        for kind in np.unique(kinds).tolist():
            if kind not in self._rows:
                self._row_of[kind] = self._rows[kind] = len(self._rows)

    def _change_alive(self, cohorts: Ints, changes: Ints) -> None:
        every, index = np.unique(np.concatenate((self._alive, cohorts)), return_inverse=True)
        blocks = np.bincount(index, np.concatenate((self._alive_blocks, changes)), len(every)).astype(np.int64)
        self._alive, self._alive_blocks = every[blocks != 0], blocks[blocks != 0]

    def worth(self, capacity: int, turnover: float) -> Worth:
        """What keeping runs is worth by all that was digested.

        `turnover` is the time in which the cache lately was filled anew. Behind the kinds that were met, each branch of them
        has a row without a history: kinds that come later are worth what others of this fan-out and hint are.
        """
        kinds = np.array(list(self._rows), np.int64)
        met = np.unique(_BRANCH_OF[kinds])
        branches = np.append(_BRANCH_OF[kinds], met)
        hits, exposure = _grown(self._hits, len(branches)), _grown(self._exposure, len(branches))
        turnover = max(turnover, 1.0)
        little = capacity * turnover / 32
        usual = (hits.sum() + 1.0) / (exposure.sum() + little + 1.0)
        rarer = usual * 0.25 / (_MIDDLES / (turnover + 1.0) + 0.125)  # with age, where nothing is known
        family_prior = np.full(_BINS, _PRIOR * little + 1.0)
        hint_prior = _HINT_PRIOR * capacity * np.minimum(_WIDTHS, turnover / 8) + 1.0
        shapes = _shapes(hits, exposure, branches, rarer, family_prior, hint_prior)
        few = _KIND_PRIOR * little * usual
        lead = min((_LEAD - 1.0) * few, (hits.sum() + 1.0) / (self._num_reuses + 1.0))  # one more reuse
        hazard = np.empty((len(branches) + 2, _BINS))
        hazard[-2:] = shapes[0][0]
        hazard[-2] *= 1.0 + lead / few
        last_peak = 0
        for shape, peak, of_shape in shapes:
            hazard[:-2][of_shape] = shape
            last_peak = max(last_peak, peak)
        hazard[:-2] *= _factors(hits.sum(axis=1), (exposure * hazard[:-2]).sum(axis=1), branches, few, lead)[:, None]
        row_of_branch = np.repeat([-1, -2], [_OWN, _OWN + 1])
        row_of_branch[met] = np.arange(len(kinds), len(branches))
        rows = row_of_branch[_BRANCH_OF]
        rows[kinds] = np.arange(len(kinds))
        return Worth(hazard, rows, last_peak)


class Worth:
    """For every kind and age bin: the most hits per block and time that keeping a run for some time can bring."""

    def __init__(self, hazard: Floats, rows: Ints, peak: int) -> None:
        # By row. The last two are of kinds of which nothing is known: what is shared, and all else.
        self._rates = _best_rates(hazard, peak)
        self._rows = rows  # by kind
        # By row, those that were asked for: of hundreds that were met, few are in the cache.
        self._known: dict[int, list[float]] = {}

    def of(self, kind: int) -> list[float]:
        """By age bin; it rises to a peak and falls behind it."""
        row = int(self._rows[kind])
        rates = self._known.get(row)
        if rates is None:
            rates = self._known[row] = self._rates[row].tolist()
        return rates


def _columns(noted: list[int]) -> Ints:
    """What was noted in threes, by column."""
    return np.array(noted, np.int64).reshape(-1, 3).T


def _grown(rows: Floats, num_rows: int) -> Floats:
    """An array with rows of zeros behind its own."""
    missing = num_rows - len(rows)
    return np.vstack([rows, np.zeros((missing, _BINS))]) if missing else rows


def _exposed(row: Ints, age: Ints, blocks: Ints, num_rows: int) -> Floats:
    """How long blocks are at each age if they are followed from these ages on for ever, by row and bin."""
    age = np.minimum(age, MAX_AGE)
    bins = np.searchsorted(_FROM, age, side="right") - 1
    places = row * _BINS + bins
    size = num_rows * _BINS
    starting = np.bincount(places, blocks, size).reshape(num_rows, _BINS)
    partly = np.bincount(places, blocks * (_UPTO[bins] - age), size).reshape(num_rows, _BINS)
    earlier = np.add.accumulate(starting, axis=1) - starting
    return np.asarray(partly + earlier * _WIDTHS)


def _shapes(
    hits: Floats, exposure: Floats, branches: Ints, expected: Floats, family_prior: Floats, hint_prior: Floats
) -> list[Shaped]:
    """The hazards by age that kinds have in common: those of a family, and in it those of one hint.

    A hint says when reuse comes, not only how often: after a call of a tool soon or never, after an answer when a person
    has read it. So a hint has a shape of its own, which is its family's where little was seen. The first is of no kind.
    """
    fans, hints = np.divmod(branches, NUM_HINTS)
    is_hot = (fans == _HOT[0]) | (fans == _HOT[1])
    nobody = np.zeros(len(branches), np.bool_)
    shapes: list[Shaped] = []
    for of_family in (~is_hot, is_hot):
        shape, peak = _shape(hits[of_family], exposure[of_family], expected, family_prior)
        if not shapes:
            shapes.append((shape, peak, nobody))
        said = np.unique(hints[of_family]).tolist()
        if len(said) == 1:
            shapes.append((shape, peak, of_family))
            continue
        for hint in said:
            of_hint = of_family & (hints == hint)
            own, peak = _shape(hits[of_hint], exposure[of_hint], shape, hint_prior)
            shapes.append((own, peak, of_hint))
    return shapes


def _shape(hits: Floats, exposure: Floats, expected: Floats, prior: Floats) -> tuple[Floats, int]:
    """The hazard by age that rises to one bin, which is returned, and then falls; where little was seen, what is expected."""
    reused = hits.sum(axis=0) + prior * expected
    exposed = exposure.sum(axis=0) + prior
    peak = int((reused / exposed).argmax())
    rising = _falling_rates(reused[:peak][::-1], exposed[:peak][::-1])[::-1]
    return np.array(rising + _falling_rates(reused[peak:], exposed[peak:])), peak


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


def _factors(seen: Floats, expected: Floats, branches: Ints, few: float, lead: float) -> Floats:
    """How much more often kinds are reused than their family; where little was seen, as others of this fan-out and hint.

    What is shared leads by so many reused blocks: that it was reused before says that it comes again.
    """
    seen_there = np.bincount(branches, seen, _BRANCHES) + few
    seen_there[_OWN:] += lead
    expected_there = np.bincount(branches, expected, _BRANCHES) + few
    factors: Floats = (seen + few * (seen_there / expected_there)[branches]) / (expected + few)
    return factors


def _best_rates(hazard: Floats, peak: int) -> Floats:
    """Of every row of hazards, none of which rises behind the bin `peak`: the best rate of hits from each bin on.

    This is its Gittins index. Where a hazard falls, it is the hazard itself: waiting makes it no better. With G the chance to
    be unused up to an age and T the time spent unused from it on, keeping a run from bin i to bin j brings (G[i] - G[j]) hits
    for (T[i] - T[j]). T is summed up from the end: where runs are almost surely reused early, what is left behind is small,
    and would be lost beside what came before.
    """
    best = np.minimum(np.maximum(hazard, 1e-15), _SURELY / _WIDTHS).T.copy()  # by bin: what is compared lies together
    if peak:
        fading = np.exp(-_WIDTHS[:, None] * best)
        unused = np.ones((_BINS + 1, len(hazard)))
        np.multiply.accumulate(fading, axis=0, out=unused[1:])
        left = np.zeros((_BINS + 1, len(hazard)))
        np.add.accumulate((unused[:-1] * (1 - fading) / best)[::-1], axis=0, out=left[-2::-1])
        for start in range(peak):
            rates = unused[start] - unused[start + 1 :]
            rates /= left[start] - left[start + 1 :]
            np.maximum.reduce(rates, axis=0, out=best[start])
    return best.T
