"""Candidates of the adaptive policy in order: cells of runs that are worth the same, by value and by age.

A *cell* holds the candidates of one priority and place. A place is a number: the cohort of its runs (`experience`) times the
number of weights, plus the class of their weight, so that older ones come first.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from kvpool.eviction.experience import EDGES, NUM_KINDS
from kvpool.eviction.queues import RunQueue
from kvpool.eviction.run import Run

MARGIN: Final = 0.8  # a younger run goes instead of the oldest only if its value is below this part of the oldest's
WEIGHTS: Final = 32  # classes of what a block counts for its depth, in steps of a quarter octave
WEIGHT_OF: Final = [2 ** (weight_class / 4) for weight_class in range(WEIGHTS)]
_PLACES: Final = 2**54  # a cell is known by its priority times this plus its place: the lowest priority comes first
_NEVER: Final = 2**62
_STEPS: Final = 8  # in which a value goes from one age bin to the next


class Cell(RunQueue):
    """The candidates of one priority and place."""

    __slots__ = ("due", "floor", "kind", "priority", "since", "value", "weight")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.priority, place = divmod(number, _PLACES)
        cohort, weight_class = divmod(place, WEIGHTS)
        self.since, self.kind = divmod(cohort, NUM_KINDS)
        self.weight = WEIGHT_OF[weight_class]
        self.value = 0.0  # of its kind, at its age when it was last looked at
        self.floor = 0.0  # by which it stands in the order: its value is not below this
        self.due = 0  # when that may be no longer so


class CellOrder:
    """Finds the cell that gives the next victim. `now` never goes back."""

    def __init__(self, rates: list[list[float]]) -> None:
        self._rates = rates  # by kind and age bin
        self._cells: dict[int, Cell] = {}
        self._by_value: list[tuple[int, float, int]] = []  # heap of cells: priority, floor, number
        self._by_age: list[int] = []  # heap of the same cells: number
        self._due: list[tuple[int, int]] = []  # heap of the same cells: when their floors end, number
        self._least = self._oldest = self._first = _NO_CELL  # the first of both heaps, and the victim's
        self._until = 0  # when their values change

    def clear(self) -> list[Run]:
        """Empties all cells and returns the runs that were in them."""
        return [run for cell in self._cells.values() for run in cell.clear()]

    def open(self, priority: int, place: int, now: int) -> Cell:
        """The cell for a candidate that is about to come."""
        number = priority * _PLACES + place
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = Cell(number)
        elif cell.num_runs:
            return cell
        self._place(cell, number, now)
        heappush(self._by_age, number)
        self._least = _NO_CELL  # another one may come first now
        return cell

    def first(self, now: int) -> Cell:
        """The cell whose head goes next: the one that is worth least, unless the oldest is hardly worth more."""
        due = self._due
        while due and due[0][0] <= now:
            self._grow_older(now)
        if not self._least.num_runs or not self._oldest.num_runs or now >= self._until:
            self._choose(now)
        return self._first

    def learn(self, rates: list[list[float]], now: int) -> None:
        """Kinds are worth something else now. Cells without candidates are forgotten on the way."""
        self._rates = rates
        self._cells = {number: cell for number, cell in self._cells.items() if cell.num_runs}
        self._by_age = list(self._cells)
        heapify(self._by_age)
        self._by_value, self._due = [], []
        for number, cell in self._cells.items():
            self._place(cell, number, now)
        self._least = _NO_CELL

    def _value(self, cell: Cell, now: int) -> int:
        """Values a cell by its age; returns when that will change."""
        age, rates = now - cell.since, self._rates[cell.kind]
        upper = bisect_right(EDGES, age)
        if upper == len(EDGES):
            cell.value = rates[upper - 1] * cell.weight
            return _NEVER
        start = EDGES[upper - 1]  # on the way from the value of this bin to that of the next one
        width = EDGES[upper] - start
        step = (age - start) * _STEPS // width
        cell.value = (rates[upper - 1] + (rates[upper] - rates[upper - 1]) * step / _STEPS) * cell.weight
        return cell.since + start + -(-(step + 1) * width // _STEPS)

    def _place(self, cell: Cell, number: int, now: int) -> None:
        """Gives a cell its place by the least that it will be worth up to the end of the next bin.

        Most cells are never the first, so that nobody needs their values at every step.
        """
        rates = self._rates[cell.kind]
        upper = bisect_right(EDGES, now - cell.since)
        self._value(cell, now)
        if upper + 1 < len(EDGES):
            cell.floor = min(cell.value, rates[upper] * cell.weight, rates[upper + 1] * cell.weight)
            cell.due = cell.since + EDGES[upper + 1]
        else:
            cell.floor, cell.due = min(cell.value, rates[-1] * cell.weight), _NEVER
        heappush(self._by_value, (cell.priority, cell.floor, number))
        heappush(self._due, (cell.due, number))

    def _grow_older(self, now: int) -> None:
        """Places the cell anew whose floor has ended first."""
        when, number = heappop(self._due)
        cell = self._cells.get(number)
        if cell is not None and cell.due == when and cell.num_runs:
            self._place(cell, number, now)
            self._least = _NO_CELL

    def _choose(self, now: int) -> None:
        cells, by_value, by_age = self._cells, self._by_value, self._by_age
        until = 0
        while by_value:
            _, floor, number = by_value[0]
            least = cells[number]
            if not least.num_runs or least.floor != floor:
                heappop(by_value)
                continue
            until = self._value(least, now)
            if least.value == floor:
                break
            least.floor, least.due = least.value, until  # others may be worth less than it is just now
            heapreplace(by_value, (least.priority, least.value, number))
            heappush(self._due, (until, number))
        if not by_value:
            raise LookupError("no run can be evicted: every cached run is referenced, pinned or has children")
        while not cells[by_age[0]].num_runs:
            heappop(by_age)
        self._least = least
        self._oldest = oldest = cells[by_age[0]]
        self._until = min(until, self._value(oldest, now))
        self._first = oldest if least.value > MARGIN * oldest.value else least


_NO_CELL = Cell(0)
