"""Candidates of the adaptive policy in order: rows of runs that are worth the same at the same age.

A *row* holds the candidates of one priority, kind and weight, by age. What a kind is worth rises with age up to a peak and
falls behind it, so the run of a row that is worth least is its oldest or its youngest, and nobody needs the values of those
between.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from kvpool.eviction.experience import EDGES, NUM_KINDS, Worth, bin_of
from kvpool.eviction.run import KEY, NO_CANDIDATES, RUN, Item, Run, RunQueue

MARGIN: Final = 0.8  # a younger run goes instead of the oldest only if its value is below this part of the oldest's
WEIGHTS: Final = 32  # classes of what a block counts for its depth, in steps of a quarter octave
WEIGHT_OF: Final = [2 ** (weight_class / 4) for weight_class in range(WEIGHTS)]
_SINCE: Final = 6  # in an item of a row: when its run was last used, by the beginning of that epoch
_LAST: Final = len(EDGES) - 1


class Row(RunQueue):
    """The candidates of one priority, kind and weight."""

    __slots__ = ("age_key", "kind", "least", "number", "priority", "rates", "value", "weight")

    def __init__(self, number: int, priority: int, kind: int, weight_class: int, rates: list[float]) -> None:
        super().__init__()
        self.number = number
        self.priority = priority
        self.kind = kind
        self.rates = rates  # what its runs are worth, by age bin, before their weight
        self.weight = WEIGHT_OF[weight_class]
        self.least: Item | None = None  # the item by which it stands in the order of values
        self.value = 0.0  # of that item
        self.age_key = -1  # by which it stands in the order of ages: the key of its oldest item


class RowOrder:
    """Finds the next victim, by ages that are right when `refresh` is called, and a little later."""

    def __init__(self, worth: Worth) -> None:
        self._worth = worth
        self.ordered_at = 0  # the moment by which candidates are in order
        self._rows: dict[int, Row] = {}
        self._by_value: list[
            tuple[int, float, int, int]
        ] = []  # heap of rows: priority, value and key of an item, number
        self._by_age: list[tuple[int, int, int]] = []  # heap of rows: priority, key of the oldest item, number
        self._oldest: Item | None = None  # of the lowest priority; None if it must be found
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

    def push(self, row: Row, run: Run, since: int) -> Item:
        """Adds a candidate to its row; it was last used in the epoch that began then."""
        key = run.last_access
        item = row.push(key, run)
        item.append(since)
        least = row.least
        if least is None or least[RUN] is None:
            self._look_at(row)
        elif (value := self._value(row, since)) < row.value:
            self._stand(row, item, value)
        if row.num_runs == 1 or key < row.age_key:
            row.age_key = key
            heappush(self._by_age, (row.priority, key, row.number))
            self._oldest = None  # it may be older
        return item

    def first(self) -> Run:
        """The run that goes next: the one that is worth least, unless the oldest is hardly worth more."""
        by_value, rows = self._by_value, self._rows
        while by_value:
            _, value, key, number = by_value[0]
            row = rows[number]
            least = row.least
            if least is None or row.value != value or least[KEY] != key:
                heappop(by_value)  # it stands elsewhere now
            elif least[RUN] is None:
                heappop(by_value)
                self._look_at(row)
            else:
                oldest = self._oldest
                if oldest is None or oldest[RUN] is None:
                    oldest = self._find_oldest()
                run: Run = oldest[RUN] if value > MARGIN * self._of_oldest else least[RUN]
                return run
        raise LookupError(NO_CANDIDATES)

    def learn(self, worth: Worth, now: int) -> None:
        """Kinds are worth something else now. Rows without candidates are forgotten on the way."""
        self._worth = worth
        self._rows = {number: row for number, row in self._rows.items() if row.num_runs}
        for row in self._rows.values():
            row.rates = worth.of(row.kind)
        self._by_age = [(row.priority, row.age_key, number) for number, row in self._rows.items()]
        heapify(self._by_age)
        self.refresh(now)

    def refresh(self, now: int) -> None:
        """Puts all rows in order by the ages of their runs at this moment."""
        self.ordered_at = now
        self._by_value = []
        self._oldest = None
        for row in self._rows.values():
            self._look_at(row)

    def _value(self, row: Row, since: int) -> float:
        """What runs of this row that were last used then are worth."""
        rates, age = row.rates, self.ordered_at - since
        if age <= 0:
            return rates[0] * row.weight
        lower = bin_of(age)
        if lower == _LAST:
            return rates[lower] * row.weight
        start = EDGES[lower]  # on the way from the value of this bin to that of the next one
        way = (age - start) / (EDGES[lower + 1] - start)
        return (rates[lower] + (rates[lower + 1] - rates[lower]) * way) * row.weight

    def _look_at(self, row: Row) -> None:
        """Finds the run of a row that is worth least, and gives the row its place by it."""
        least = row.first()
        if least is None:
            row.least = None
            return
        value = self._value(row, least[_SINCE])
        youngest = row.last()
        if youngest is not None and youngest is not least:
            of_youngest = self._value(row, youngest[_SINCE])
            if of_youngest < value:
                least, value = youngest, of_youngest
        self._stand(row, least, value)

    def _stand(self, row: Row, least: Item, value: float) -> None:
        """A row stands in the order of values by this item."""
        row.least, row.value = least, value
        heappush(self._by_value, (row.priority, value, least[KEY], row.number))

    def _find_oldest(self) -> Item:
        """The oldest item of the lowest priority, which is worth `_of_oldest`; there is one."""
        rows, by_age = self._rows, self._by_age
        while True:
            priority, key, number = by_age[0]
            row = rows.get(number)
            item = None if row is None or row.age_key != key else row.first()
            if row is None or item is None:
                heappop(by_age)  # it stands elsewhere, or has no candidates
                continue
            if item[KEY] != key:
                row.age_key = item[KEY]
                heapreplace(by_age, (priority, row.age_key, number))
                if by_age[0][2] != number:
                    continue
            self._oldest = item
            self._of_oldest = row.value if item is row.least else self._value(row, item[_SINCE])
            return item
