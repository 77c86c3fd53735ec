"""Candidates of the adaptive policy in order: rows of runs that are worth the same at the same age.

A *row* holds the candidates of one priority, kind and weight, by age. What a kind is worth rises with age up to a peak and
falls behind it, so the run of a row that is worth least is its oldest or its youngest, and nobody needs the values of those
between.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final, TypeAlias

from kvpool.eviction.experience import EDGES, NUM_KINDS, Worth, bin_of
from kvpool.eviction.policy import NO_CANDIDATES, Item, Queue, Run, Tokens

MARGIN: Final = 0.8  # a younger run goes instead of the oldest only if its value is below this part of the oldest's
WEIGHTS: Final = 32  # classes of what a block counts for its depth, in steps of a quarter octave
WEIGHT_OF: Final = [2 ** (weight_class / 4) for weight_class in range(WEIGHTS)]
_LAST: Final = len(EDGES) - 1
Place: TypeAlias = tuple[Any, ...]


class Candidate(Item):
    """A run in its row, and what the policy knows about it. It lies in `run.entry` for as long as the run is in the cache."""

    __slots__ = ("cohort", "hits", "owner", "row", "since", "tokens", "trimmed")

    def __init__(
        self, run: Run, row: Row, since: int, cohort: int, hits: int, tokens: Tokens, trimmed: int, owner: object
    ) -> None:
        super().__init__(run.last_access, run)
        self.row = row
        self.since = since  # when the run was last used, by the beginning of that epoch
        self.cohort = cohort
        self.hits = hits  # those seen
        self.tokens = tokens  # with those of the lost blocks
        self.trimmed = trimmed  # blocks that it has lost since its last use
        self.owner = owner  # the policy


class Row(Queue[Candidate]):
    """The candidates of one priority, kind and weight."""

    __slots__ = (
        *("age_key", "kind", "least", "newer", "number", "of_newer", "of_older", "older", "place_by_age"),
        *("place_by_value", "priority", "rates", "value", "weight"),
    )

    of_newer: float
    of_older: float

    def __init__(self, number: int, priority: int, kind: int, weight_class: int, rates: list[float]) -> None:
        super().__init__()
        self.number = number
        self.priority = priority
        self.kind = kind
        self.rates = rates  # what its runs are worth, by age bin, before their weight
        self.weight = WEIGHT_OF[weight_class]
        # Two epochs that were asked about, by their beginnings, and what runs last used in them are worth: most runs that are
        # looked at are the oldest and the youngest.
        self.newer = self.older = -1  # none
        self.least: Candidate | None = None  # the one by which it stands in the order of values
        self.value = 0.0  # of that one
        self.age_key = -1  # by which it stands in the order of ages: the key of its oldest candidate
        self.place_by_value: Place = ()  # its entry in either order; it may have older ones, which count no more
        self.place_by_age: Place = ()


class RowOrder:
    """Finds the next victim, by ages that are right when `refresh` is called, and a little later."""

    def __init__(self, worth: Worth) -> None:
        self._worth = worth
        self.ordered_at = 0  # the moment by which candidates are in order
        self._rows: dict[int, Row] = {}
        # Heaps of tuples that end with a row. Nobody takes them apart but for that: the row knows the rest.
        self._by_value: list[Place] = []  # priority, value and key of a candidate
        self._by_age: list[Place] = []  # priority, key of the oldest candidate
        self._oldest: Candidate | None = None  # of the lowest priority; None if it must be found
        self._of_oldest = 0.0  # its value

    def clear(self) -> list[Run]:
        """Empties all rows and returns the runs that were in them."""
        return [run for row in self._rows.values() for run in row.clear()]

    def row(self, priority: int, kind: int, weight_class: int) -> Row:
        """The row for a candidate that is about to come."""
        number = (priority * NUM_KINDS + kind) * WEIGHTS + weight_class
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = Row(number, priority, kind, weight_class, self._worth.of(kind))
        return row

    def push(self, candidate: Candidate) -> None:
        """Adds a candidate to its row."""
        row = candidate.row
        key: int = candidate.key
        row.insert(candidate)
        if row.least is None:
            self._look_at(row)
            heappush(self._by_value, row.place_by_value)
        elif (value := self._value(row, candidate.since)) < row.value:
            self._stand(row, candidate, value)
            heappush(self._by_value, row.place_by_value)
        if row.num_runs == 1 or key < row.age_key:
            self._stand_by_age(row, key)
            heappush(self._by_age, row.place_by_age)
            self._oldest = None  # it may be older

    def first(self) -> Run:
        """The run that goes next: the one that is worth least, unless the oldest is hardly worth more."""
        by_value = self._by_value
        while by_value:
            place = by_value[0]
            row: Row = place[-1]
            least = row.least
            if least is None or row.place_by_value is not place:
                heappop(by_value)  # it stands elsewhere now, or nowhere
            elif least.run is None:
                if self._look_at(row):
                    heapreplace(by_value, row.place_by_value)
            else:
                oldest = self._oldest
                if oldest is None or oldest.run is None:
                    oldest = self._find_oldest()
                chosen = oldest if row.value > MARGIN * self._of_oldest else least
                assert chosen.run is not None
                return chosen.run
        raise LookupError(NO_CANDIDATES)

    def learn(self, worth: Worth, now: int) -> None:
        """Kinds are worth something else now. Rows without candidates are forgotten on the way."""
        self._worth = worth
        rows, self._rows, self._by_age = self._rows, {}, []
        for number, row in rows.items():
            if row.num_runs:
                row.rates = worth.of(row.kind)
                self._rows[number] = row
                self._stand_by_age(row, row.age_key)
                self._by_age.append(row.place_by_age)
            else:
                row.place_by_value = row.place_by_age = ()  # they hold the row, and it holds them
        heapify(self._by_age)
        self.refresh(now)

    def refresh(self, now: int) -> None:
        """Puts all rows in order by the ages of their runs at this moment."""
        self.ordered_at = now
        self._by_value = by_value = []
        self._oldest = None
        for row in self._rows.values():
            row.newer = row.older = -1
            if not row.num_runs:
                row.least = None
            elif self._look_at(row):
                by_value.append(row.place_by_value)
        heapify(by_value)

    def _value(self, row: Row, since: int) -> float:
        """What runs of this row that were last used then are worth."""
        if since == row.older:
            return row.of_older
        if since == row.newer:
            return row.of_newer
        rates, age = row.rates, self.ordered_at - since
        if age < 0:
            age = 0
        lower = bin_of(age)
        value = rates[lower]
        if lower < _LAST:  # on the way from the value of its bin to that of the next one
            start = EDGES[lower]
            value += (rates[lower + 1] - value) * ((age - start) / (EDGES[lower + 1] - start))
        value *= row.weight
        if since > row.newer:
            row.newer, row.of_newer = since, value
        else:
            row.older, row.of_older = since, value
        return value

    def _look_at(self, row: Row) -> bool:
        """Finds the run of a row that is worth least, by which it stands in the order of values; False if it has none."""
        least = row.first()
        if least is None:
            row.least = None
            return False
        value = self._value(row, least.since)
        youngest = row.last() if row.num_runs > 1 else None
        if youngest is not None and youngest is not least:
            of_youngest = self._value(row, youngest.since)
            if of_youngest < value:
                least, value = youngest, of_youngest
        self._stand(row, least, value)
        return True

    def _stand(self, row: Row, least: Candidate, value: float) -> None:
        row.least, row.value = least, value
        row.place_by_value = (row.priority, value, least.key, row.number, row)

    def _stand_by_age(self, row: Row, key: int) -> None:
        row.age_key = key
        row.place_by_age = (row.priority, key, row.number, row)

    def _find_oldest(self) -> Candidate:
        """The oldest candidate of the lowest priority, which is worth `_of_oldest`; there is one."""
        by_age = self._by_age
        while True:
            place = by_age[0]
            row: Row = place[-1]
            oldest = row.first() if row.place_by_age is place else None
            if oldest is None:
                heappop(by_age)  # it stands elsewhere, or has no candidates
                continue
            key: int = oldest.key
            if key != row.age_key:
                self._stand_by_age(row, key)
                heapreplace(by_age, row.place_by_age)
                if by_age[0] is not row.place_by_age:
                    continue
            self._oldest = oldest
            self._of_oldest = row.value if oldest is row.least else self._value(row, oldest.since)
            return oldest
