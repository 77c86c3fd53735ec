"""The order of the adaptive policy finds what an obvious search over all candidates finds."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import StandInRun

from kvpool.eviction.experience import EDGES, MAX_AGE, NUM_KINDS, Experience, Worth, bin_of
from kvpool.eviction.kind_rows import MARGIN, WEIGHT_OF, Candidate, Row, RowOrder

KINDS = 5


def push(order: RowOrder, row: Row, run: StandInRun, since: int) -> Candidate:
    """A run that was last used then becomes a candidate."""
    candidate = Candidate(run, row, since, 0, 0, run.tokens, 0, None)
    order.push(candidate)
    return candidate


def rising_and_falling(seed: int) -> Worth:
    """Worth of a few kinds whose hazards have their peaks at different ages, some at once."""
    random = np.random.default_rng(seed)
    bins = np.arange(len(EDGES))
    peaks = [0, *random.integers(1, 24, KINDS).tolist()]
    hazard = [random.uniform(1e-7, 1e-5) * np.exp(-np.abs(bins - peak) / random.uniform(1, 12)) for peak in peaks]
    return Worth(np.array(hazard), np.minimum(np.arange(NUM_KINDS), KINDS), max(peaks))


class Searched:
    """All candidates in a list, valued one by one."""

    def __init__(self, worth: Worth) -> None:
        self.worth = worth
        self.now = 0
        self.live: list[tuple[Any, int, int, int, Candidate]] = []  # row, kind, class of the weight, since, itself

    def value(self, kind: int, weight_class: int, since: int) -> float:
        rates = self.worth.of(kind)
        return float(np.interp(max(0, self.now - since), EDGES, rates)) * WEIGHT_OF[weight_class]

    def allowed(self) -> list[StandInRun]:
        """Those that may go next: of equal ones any."""
        lowest = min(row.priority for row, *_ in self.live)
        values = [(self.value(*at), item) for row, *at, item in self.live if row.priority == lowest]
        least = min(value for value, _ in values)
        oldest_value, oldest = min(values, key=lambda found: found[1].key)
        if least > 1.000001 * MARGIN * oldest_value:
            return [oldest.run]
        may_go = [item.run for value, item in values if value <= least * 1.000001]
        return [*may_go, oldest.run] if least > 0.999999 * MARGIN * oldest_value else may_go


def test_the_victim_is_the_one_that_is_worth_least_of_all_unless_the_oldest_hardly_is() -> None:
    ends = {is_oldest for seed in range(5) for is_oldest in went(seed)}
    assert ends == {True, False}  # the oldest of a row, and the youngest before older ones


def went(seed: int) -> set[bool]:
    """Compares victims with those of a search; whether they were the oldest of their rows, where there were others."""
    random, worth = np.random.default_rng(seed), rising_and_falling(seed)
    order, searched = RowOrder(worth), Searched(worth)
    now, ends = 0, set()
    for tick in range(600):
        now += int(random.integers(0, 400) ** 2)
        kind, weight_class = int(random.integers(KINDS)), int(random.choice([0, 0, 5]))
        run = StandInRun(last_access=tick, created=tick, fingerprint=tick)
        row = order.row(int(random.choice([20, 35, 35])), kind, weight_class)
        searched.live.append((row, kind, weight_class, now, push(order, row, run, now)))
        if tick % 7 == 0:
            if tick % 140 == 0:
                worth = searched.worth = rising_and_falling(seed + tick)
                order.learn(worth, now)
            order.refresh(now)
            searched.now = now
        while len(searched.live) > 40 or (searched.live and random.random() < 0.2):
            victim = order.first()
            assert victim in searched.allowed()
            (found,) = [found for found in searched.live if found[-1].run is victim]
            of_row = [item.key for row, *_, item in searched.live if row is found[0]]
            if len(of_row) > 1:
                ends.add(found[-1].key == min(of_row))
            searched.live.remove(found)
            found[0].discard(found[-1])
        if searched.live and random.random() < 0.3:  # somebody uses one again
            found = searched.live.pop(int(random.integers(len(searched.live))))
            found[0].discard(found[-1])
    return ends


def test_given_a_run_older_than_every_bin_then_it_is_worth_what_the_last_bin_says() -> None:
    worth = Worth(np.linspace(2e-6, 1e-6, len(EDGES))[None], np.zeros(NUM_KINDS, np.int64), 0)
    order = RowOrder(worth)
    row = order.row(35, 0, 0)
    push(order, row, StandInRun(), 0)
    order.refresh(2 * MAX_AGE)
    assert row.value == worth.of(0)[-1]


def test_what_a_kind_is_worth_lies_on_the_line_between_the_edges_of_its_bin() -> None:
    rates = np.random.default_rng(0).uniform(1.0, 2.0, len(EDGES)).tolist()
    order = RowOrder(rising_and_falling(0))
    order.ordered_at, row = 2 * MAX_AGE, order.row(35, 0, 0)
    row.rates = rates
    for age in {max(0, edge + off) for edge in EDGES for off in (-1, 0, 1)}:
        assert order._value(row, order.ordered_at - age) == pytest.approx(np.interp(age, EDGES, rates), rel=1e-9)
    assert order._value(row, order.ordered_at + 1) == rates[0]  # it was used after the rows were put in order


def test_given_an_item_that_lost_blocks_then_its_row_counts_what_is_left() -> None:
    order = RowOrder(rising_and_falling(0))
    row = order.row(35, 0, 0)
    item = push(order, row, StandInRun(num_blocks=5), 0)
    row.trim(item, 2)
    assert row.num_blocks == 2
    row.discard(item)
    assert row.num_blocks == 0


def test_given_no_candidates_then_it_says_so() -> None:
    order = RowOrder(rising_and_falling(0))
    row = order.row(35, 0, 0)
    row.discard(push(order, row, StandInRun(), 0))
    with pytest.raises(LookupError, match="no run can be evicted"):
        order.first()


def test_given_candidates_that_come_late_then_all_of_them_go_in_the_end() -> None:
    random, order = np.random.default_rng(3), RowOrder(rising_and_falling(3))
    keys = random.permutation(300).tolist()
    for key in keys:
        row = order.row(35, key % KINDS, 0)
        run = StandInRun(last_access=key, created=key)
        run.entry = row, push(order, row, run, key * 50)
    order.refresh(300 * 50)
    gone = []
    while True:
        try:
            run = order.first()
        except LookupError:
            break
        gone.append(run.last_access)
        row, item = run.entry
        row.discard(item)
    assert sorted(gone) == list(range(300))


def test_what_a_kind_is_worth_rises_to_a_peak_and_falls_behind_it() -> None:
    random, learned = np.random.default_rng(5), Experience()
    kinds = [int(kind) for kind in random.integers(NUM_KINDS, size=40)]
    for since in range(0, 3_000_000, 5_000):
        kind = kinds[since % len(kinds)]
        cohort = since * NUM_KINDS + kind
        learned.follow(cohort, since, 4)
        age = int(random.exponential(1000 * (1 + kind % 97)))
        learned.follow(cohort, since + age, -4)
        if kind % 3:
            learned.count(kind, age, 4)
    learned.digest(4_000_000, 1.0)
    worth = learned.worth(500, 100_000.0)
    for kind in {*kinds, 0, 1}:
        rates = np.array(worth.of(kind))
        peak = int(rates.argmax())
        steps = np.diff(rates) / rates[1:]
        assert (steps[:peak] > -1e-9).all()
        assert (steps[peak:] < 1e-9).all()


@given(st.integers(0, 2 * MAX_AGE))
def test_an_age_lies_in_the_last_bin_that_begins_before_it(age: int) -> None:
    assert bin_of(age) == bisect_right(EDGES, age) - 1


def test_every_edge_and_its_neighbours_lie_in_their_bins() -> None:
    ages = [age for edge in EDGES for age in (edge - 1, edge, edge + 1) if age >= 0]
    assert [bin_of(age) for age in ages] == [bisect_right(EDGES, age) - 1 for age in ages]
