"""Every policy against a slow and obvious model, or against the properties that make it worth choosing."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import StandInRun

from kvpool import eviction
from kvpool.errors import InvalidArgumentError
from kvpool.eviction import (
    EvictionPolicy,
    KeyedPolicy,
    LRUPolicy,
    make_policy,
    policy_names,
    register_policy,
)
from kvpool.eviction.policy import Item, Queue
from kvpool.replay.policies import (
    _MAX_CHECKPOINTS,
    ARCPolicy,
    CostAwarePolicy,
    GhostPolicy,
    S3FIFOPolicy,
    SievePolicy,
    TwoQueuePolicy,
)

BUILT_IN = ("lru", "lfu", "fifo", "clock", "sieve", "s3fifo", "2q", "arc", "priority", "cost", "adaptive")


# --- models: a list, and the definition of the policy written down as directly as possible -------------------------


class KeyedModel:
    def __init__(self, key: Callable[[StandInRun], Any]) -> None:
        self.key = key
        self.candidates: list[StandInRun] = []

    def victim(self) -> StandInRun:
        return min(self.candidates, key=lambda run: (self.key(run), -run.start, run.created))

    def forget(self, run: StandInRun) -> None:
        self.candidates.remove(run)


class ClockModel:
    """A queue; a visited head goes to the end of what was inserted so far."""

    def __init__(self) -> None:
        self.candidates: list[StandInRun] = []
        self.seen: dict[StandInRun, int] = {}
        self.moved: dict[StandInRun, tuple[int, int]] = {}
        self.newest = 0

    def victim(self) -> StandInRun:
        while True:
            run = min(self.candidates, key=lambda r: (*self.moved.get(r, (r.created, 0)), -r.start))
            if run.hits <= self.seen.get(run, 0):
                return run
            self.seen[run] = run.hits
            last = max((number for _, number in self.moved.values()), default=0)
            self.moved[run] = (self.newest, last + 1)

    def forget(self, run: StandInRun) -> None:
        self.candidates.remove(run)
        self.seen.pop(run, None)
        self.moved.pop(run, None)


class SieveModel:
    """A row that never moves, and a hand."""

    def __init__(self) -> None:
        self.candidates: list[StandInRun] = []
        self.seen: dict[StandInRun, int] = {}
        self.hand = (-1, 0)

    def victim(self) -> StandInRun:
        while True:
            row = sorted(self.candidates, key=lambda r: (r.created, -r.start))
            ahead = [run for run in row if (run.created, -run.start) > self.hand]
            if not ahead:
                self.hand = (-1, 0)
                continue
            if ahead[0].hits <= self.seen.get(ahead[0], 0):
                return ahead[0]
            self.seen[ahead[0]] = ahead[0].hits
            self.hand = (ahead[0].created, -ahead[0].start)

    def forget(self, run: StandInRun) -> None:
        self.candidates.remove(run)
        self.seen.pop(run, None)


class World:
    """Drives a policy the way the tree does, and a model beside it. Runs are candidates or away (in use, pinned)."""

    def __init__(self, policy: EvictionPolicy, model: Any = None) -> None:
        self.policy = policy
        self.model: Any = model or KeyedModel(lambda run: 0)
        self.exact = model is not None
        self.away: list[StandInRun] = []
        self.tick = 0
        self.peak_blocks = 0

    @property
    def candidates(self) -> list[StandInRun]:
        return self.model.candidates  # type: ignore[no-any-return]

    def add(self, run: StandInRun) -> None:
        self.policy.add(run)
        self.candidates.append(run)
        self.model.newest = max(getattr(self.model, "newest", 0), run.created)
        self.peak_blocks = max(self.peak_blocks, sum(r.num_blocks for r in self.candidates))

    def take(self, number: int) -> StandInRun | None:
        if not self.candidates:
            return None
        run = self.candidates.pop(number % len(self.candidates))
        self.policy.remove(run)
        return run

    def victim(self) -> StandInRun | None:
        if not self.candidates:
            with pytest.raises(LookupError):
                self.policy.victim()
            return None
        run = self.policy.victim()
        if self.exact:
            assert run is self.model.victim()
        assert run in self.candidates
        assert self.policy.victim() is run, "a victim stays the victim until it is removed"
        assert isinstance(run, StandInRun)
        return run

    def step(self, action: str, number: int) -> None:
        self.tick += number % 2  # ties of last_access happen
        getattr(self, f"do_{action}")(number)
        assert len(self.policy) == len(self.candidates)
        assert all(run in self.policy for run in self.candidates)
        assert not any(run in self.policy for run in self.away)

    def do_insert(self, number: int) -> None:
        self.tick += 1
        self.add(
            StandInRun(
                num_blocks=1 + number % 5,
                start=number % 4,
                created=self.tick,
                last_access=self.tick,
                priority=(0, 35, 100)[number % 3],
                fingerprint=number % 40,
            )
        )

    def do_reuse(self, number: int) -> None:
        self.do_hit(number)
        self.do_release(len(self.away) - 1)

    def do_pin(self, number: int) -> None:
        if run := self.take(number):
            self.policy.remove(run)  # idempotent
            self.away.append(run)

    def do_hit(self, number: int) -> None:
        if run := self.take(number):
            run.hits += 1 + number % 2
            run.last_access = self.tick
            self.away.append(run)

    def do_release(self, number: int) -> None:
        if self.away:
            self.add(self.away.pop(number % len(self.away)))

    def do_readd(self, number: int) -> None:
        if self.candidates:
            self.policy.add(self.candidates[number % len(self.candidates)])  # idempotent

    def do_split(self, number: int) -> None:
        run = self.take(number)
        if run is None:
            return
        if (upper_blocks := run.num_blocks // 2) > 0:
            alike = {name: getattr(run, name) for name in ("start", "created", "last_access", "hits", "priority")}
            upper = StandInRun(upper_blocks, fingerprint=number, **alike)
            self.away.append(upper)
            run.start += upper_blocks
            run.num_blocks -= upper_blocks
        self.add(run)

    def do_evict(self, number: int) -> None:
        run = self.victim()
        if run is None:
            return
        if run.num_blocks > 1 and number % 3 == 0:  # only its tail
            self.candidates.remove(run)
            self.policy.remove(run)
            run.num_blocks -= 1
            self.add(run)
            return
        self.policy.evicted(run)
        self.policy.remove(run)
        self.model.forget(run)
        if number % 4 == 1:  # offloaded, and back later: the same object, but new to the policy
            self.away.append(run)

    def drain(self) -> None:
        while self.candidates:
            self.do_evict(2)
        assert self.victim() is None
        assert len(self.policy) == 0


ACTIONS = st.sampled_from(
    ["insert", "insert", "insert", "reuse", "reuse", "evict", "evict", "hit", "pin", "release", "readd", "split"]
)
STEPS = st.lists(st.tuples(ACTIONS, st.integers(0, 1000)), min_size=40, max_size=120)
MODELS: dict[str, Callable[[], Any]] = {
    "lru": lambda: KeyedModel(lambda run: run.last_access),
    "lfu": lambda: KeyedModel(lambda run: (run.hits, run.last_access)),
    "fifo": lambda: KeyedModel(lambda run: run.created),
    "priority": lambda: KeyedModel(lambda run: (run.priority, run.last_access)),
    "clock": ClockModel,
    "sieve": SieveModel,
}


@pytest.mark.parametrize("name", MODELS)
@given(steps=STEPS)
@settings(max_examples=max(10, settings().max_examples * 3 // 5), deadline=None)
def test_policy_evicts_in_the_order_of_its_model(name: str, steps: list[tuple[str, int]]) -> None:
    world = World(make_policy(name), MODELS[name]())
    for action, number in steps:
        world.step(action, number)
    world.drain()


@pytest.mark.parametrize("name", ["s3fifo", "2q", "arc", "cost"])
@given(steps=STEPS)
@settings(max_examples=max(10, settings().max_examples * 3 // 5), deadline=None)
def test_policy_without_a_model_never_loses_or_invents_a_candidate(name: str, steps: list[tuple[str, int]]) -> None:
    world = World(make_policy(name))
    for action, number in steps:
        world.step(action, number)
        if isinstance(world.policy, GhostPolicy):
            assert world.policy.num_ghosts <= world.policy.num_ghost_blocks <= world.peak_blocks
    world.drain()


@pytest.mark.parametrize("name", BUILT_IN)
def test_clear_forgets_all_and_the_policy_works_on(name: str) -> None:
    policy = make_policy(name)
    runs = [StandInRun(created=i, last_access=i, fingerprint=i) for i in range(20)]
    for run in runs:
        policy.add(run)
    policy.evicted(runs[0])
    policy.clear()
    assert len(policy) == 0
    assert not any(run in policy for run in runs)
    with pytest.raises(LookupError, match="referenced, pinned or has children"):
        policy.victim()
    for run in runs:
        policy.add(run)
    assert len(policy) == 20
    assert policy.victim() in runs


# --- the lessons of earlier systems ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_victim_that_was_reused_and_released_is_found_again(name: str) -> None:
    policy = make_policy(name)
    only = StandInRun(created=1, last_access=1)
    policy.add(only)
    for tick in range(2, 6):
        run = policy.victim()
        policy.remove(run)
        only.hits, only.last_access = only.hits + 1, tick
        policy.add(only)
        assert policy.victim() is only


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_run_that_left_one_policy_is_new_to_the_next(name: str) -> None:
    device, host = make_policy(name), make_policy(name)
    run = StandInRun(fingerprint=1)
    device.add(run)
    device.evicted(run)
    device.remove(run)
    assert run.entry is None
    device.add(run)
    device.remove(run)  # moved without eviction
    host.add(run)
    assert (len(device), len(host)) == (0, 1)
    assert host.victim() is run


def test_equal_keys_evict_the_deepest_run_then_the_oldest() -> None:
    policy = LRUPolicy()
    shallow, old_deep, new_deep = StandInRun(start=0), StandInRun(start=8, created=1), StandInRun(start=8, created=2)
    for run in (shallow, new_deep, old_deep):
        policy.add(run)
    assert evict_all(policy) == [old_deep, new_deep, shallow]


def test_fifo_ignores_reuse() -> None:
    policy = make_policy("fifo")
    first, second = StandInRun(created=1), StandInRun(created=2)
    policy.add(first)
    policy.add(second)
    policy.remove(first)
    first.hits, first.last_access = 9, 9
    policy.add(first)
    assert policy.victim() is first


def test_priority_goes_on_when_its_lowest_level_is_emptied() -> None:
    policy = make_policy("priority")
    runs = [StandInRun(priority=level, created=level) for level in (0, 0, 35, 100)]
    for run in runs:
        policy.add(run)
    policy.victim()
    policy.remove(runs[0])
    policy.remove(runs[1])
    assert evict_all(policy) == [runs[2], runs[3]]


def test_clock_gives_one_second_chance_for_any_number_of_hits() -> None:
    policy = make_policy("clock")
    popular, other, third = (StandInRun(created=i) for i in (1, 2, 3))
    popular.hits = 50
    for run in (popular, other, third):
        policy.add(run)
    assert evict_all(policy) == [other, third, popular]


def test_keyed_policy_asks_for_the_key_once_per_add_and_never_rescans() -> None:
    calls = []

    class Counting(KeyedPolicy):
        def key(self, run: eviction.Run) -> int:
            calls.append(run)
            return -run.created

    policy = Counting()
    for created in range(500):
        policy.add(StandInRun(created=created))
    evict_all(policy)
    assert len(calls) == 500


def test_a_key_that_raises_leaves_the_policy_as_it_was() -> None:
    class Picky(KeyedPolicy):
        def key(self, run: eviction.Run) -> float:
            return 1 / run.priority

    policy, run = Picky(), StandInRun(priority=1)
    policy.add(run)
    run.priority = 0
    with pytest.raises(ZeroDivisionError):
        policy.add(run)
    assert len(policy) == 1
    assert policy.victim() is run


@pytest.mark.parametrize("step", [1, -1, 7])
def test_garbage_of_runs_that_come_and_go_is_bounded_and_the_order_is_kept(step: int) -> None:
    policy = LRUPolicy()
    runs = [StandInRun(created=i, last_access=i) for i in range(10)]
    for run in runs:
        policy.add(run)
    for tick in range(2000):
        run = runs[tick % 10]
        policy.remove(run)
        run.last_access = tick * step if step < 2 else tick * step % 101
        policy.add(run)
        queue = policy._queue
        assert len(queue._ordered) + len(queue._heap) <= 2 * len(policy) + 66
    assert evict_all(policy) == sorted(runs, key=lambda run: (run.last_access, run.created))


# --- what the scan-resistant policies are for ----------------------------------------------------------------------


class FlatCache:
    """A cache of one-block runs without a tree."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.runs: dict[int, StandInRun] = {}
        self.tick = 0

    def access(self, fingerprint: int) -> bool:
        self.tick += 1
        if hit := fingerprint in self.runs:
            run = self.runs[fingerprint]
            self.policy.remove(run)
            run.hits, run.last_access = run.hits + 1, self.tick
        else:
            if len(self.runs) == self.capacity:
                victim = self.policy.victim()
                self.policy.evicted(victim)
                self.policy.remove(victim)
                del self.runs[victim.fingerprint]
            run = StandInRun(created=self.tick, last_access=self.tick, fingerprint=fingerprint)
            self.runs[fingerprint] = run
        self.policy.add(run)
        return hit


def hot_runs_left_after_a_scan(policy: EvictionPolicy) -> int:
    cache, hot = FlatCache(policy, capacity=100), range(20)
    for fingerprint in (*hot, *range(100, 200), *hot, *hot):  # used, crowded out, used again
        cache.access(fingerprint)
    for fingerprint in range(1000, 3000):
        cache.access(fingerprint)
    assert len(cache.runs) == len(policy) == 100
    return sum(fingerprint in cache.runs for fingerprint in hot)


@pytest.mark.parametrize("name", ["s3fifo", "2q", "arc", "sieve"])
def test_hot_runs_survive_a_long_scan(name: str) -> None:
    assert hot_runs_left_after_a_scan(make_policy(name)) == 20


def test_hot_runs_do_not_survive_a_long_scan_under_lru() -> None:
    assert hot_runs_left_after_a_scan(make_policy("lru")) == 0


@pytest.mark.parametrize("name", ["s3fifo", "2q", "arc"])
def test_ghosts_know_a_run_by_its_content_not_by_its_object(name: str) -> None:
    policy = make_policy(name)
    left = StandInRun(created=1, last_access=1, fingerprint=77)
    others = [StandInRun(created=i, last_access=i, fingerprint=i) for i in range(2, 12)]
    for run in (left, *others):
        policy.add(run)
    assert policy.victim() is left
    policy.evicted(left)
    policy.remove(left)
    again = StandInRun(created=12, last_access=12, fingerprint=77)
    policy.add(again)
    for run in [*others, StandInRun(created=13, last_access=13, fingerprint=13)]:
        policy.add(run)
    order = evict_all(policy)
    assert order.index(again) >= 9, "it is known to be worth more than what was used once"


@pytest.mark.parametrize(("name", "max_ghosts"), [("s3fifo", 100), ("2q", 50), ("arc", 100)])
@pytest.mark.parametrize("uses", [1, 3])
def test_ghosts_are_bounded_by_the_cache(name: str, max_ghosts: int, uses: int) -> None:
    policy = make_policy(name)
    cache = FlatCache(policy, capacity=100)
    assert isinstance(policy, GhostPolicy)
    for fingerprint in range(1000):
        for _ in range(uses):
            cache.access(fingerprint)
        assert policy.num_ghosts == policy.num_ghost_blocks <= max_ghosts


def test_s3fifo_remembers_only_what_left_its_small_queue() -> None:
    policy = S3FIFOPolicy()
    for run in (StandInRun(created=1, hits=2, fingerprint=1), StandInRun(created=2, fingerprint=2)):
        policy.add(run)
    assert [run.fingerprint for run in evict_all(policy)] == [2, 1]
    assert policy.num_ghosts == 1


def test_a_proven_run_of_s3fifo_stays_once_more_for_every_hit() -> None:
    policy = S3FIFOPolicy(promote_hits=2)
    runs = [StandInRun(created=number, hits=2, fingerprint=number) for number in range(3)]
    for run in runs:
        policy.add(run)
    policy.victim()  # moves all of them to the main queue
    runs[0].hits += 2
    runs[1].hits += 1
    assert [run.fingerprint for run in evict_all(policy)] == [2, 1, 0]
    policy.add(StandInRun(created=9, hits=1, fingerprint=9))
    policy.add(StandInRun(created=8, hits=2, fingerprint=8))
    assert [run.fingerprint for run in evict_all(policy)] == [9, 8]  # two hits prove a new one, one does not


@pytest.mark.parametrize("name", ["2q", "arc"])
def test_proven_runs_are_ordered_by_their_last_use(name: str) -> None:
    policy = make_policy(name)
    for fingerprint in (5, 4, 3, 2, 1):
        policy.add(StandInRun(created=9 - fingerprint, fingerprint=fingerprint))
    evict_all(policy)
    first, second = StandInRun(created=11, fingerprint=1), StandInRun(created=12, fingerprint=2, last_access=1)
    for run in (first, second):
        policy.add(run)
    policy.remove(first)
    first.last_access = 2
    policy.add(first)
    assert evict_all(policy) == [second, first]


@pytest.mark.parametrize("name", ["s3fifo", "2q", "arc"])
def test_an_invalidated_run_leaves_no_ghost(name: str) -> None:
    policy = make_policy(name)
    run = StandInRun(fingerprint=5)
    policy.add(run)
    policy.remove(run)
    assert isinstance(policy, GhostPolicy)
    assert policy.num_ghosts == 0


def test_s3fifo_weighs_its_small_queue_in_blocks() -> None:
    policy = S3FIFOPolicy(small_fraction=0.5)
    proven = StandInRun(num_blocks=4, created=1, hits=2)
    policy.add(proven)
    policy.add(StandInRun(num_blocks=2, created=2))
    policy.victim()  # moves `proven` to main
    big = StandInRun(num_blocks=1, created=3)
    policy.add(big)
    assert policy.victim() is proven, "3 small blocks of 7 are below one half"
    policy.remove(big)
    big.num_blocks = 9
    policy.add(big)
    assert policy.victim() is not proven


def test_arc_shifts_room_to_the_list_whose_ghosts_return() -> None:
    policy = ARCPolicy()
    cache = FlatCache(policy, capacity=10)
    for _ in range(3):
        for fingerprint in range(5):
            cache.access(fingerprint)
    for fingerprint in range(100, 112):
        cache.access(fingerprint)
    before = policy._target
    for fingerprint in range(106, 101, -1):  # left the first list a moment ago, the last first
        cache.access(fingerprint)
    learned = policy._target
    assert before == 0 < learned <= 10
    for fingerprint in (*range(200, 203), *range(200, 203), 0):  # 0 was in the second list, and had to leave it
        cache.access(fingerprint)
    assert 0 <= policy._target < learned


def test_s3fifo_keeps_proven_runs_in_the_order_in_which_they_were_proven() -> None:
    policy = S3FIFOPolicy()
    for number in range(4):
        policy.add(StandInRun(created=number, fingerprint=number))
    evict_all(policy)
    for fingerprint in (2, 0, 3, 1):  # they come back
        policy.add(StandInRun(created=10 - fingerprint, fingerprint=fingerprint))
    assert [run.fingerprint for run in evict_all(policy)] == [2, 0, 3, 1]


def test_s3fifo_gives_a_proven_run_one_more_round_for_each_reuse_and_then_lets_it_go() -> None:
    policy = S3FIFOPolicy()
    for number in range(3):
        policy.add(StandInRun(created=number, fingerprint=number))
    evict_all(policy)
    often, once, never = (StandInRun(created=10 + number, fingerprint=number) for number in range(3))
    for run in (often, once, never):  # they come back
        policy.add(run)
    often.hits, once.hits = 2, 1
    assert policy.victim() is never
    policy.remove(never)
    assert policy.victim() is once
    policy.remove(once)
    assert policy.victim() is often


def a_prompt_of_three_turns(created: int) -> list[StandInRun]:
    """Its runs, the first one first: each turn reused those before it, and the last one is over."""
    turns: list[StandInRun] = []
    for turn in range(3):
        above = turns[-1] if turns else None
        turns.append(StandInRun(start=turn, created=created + turn, last_access=created + 2, hits=2, parent=above))
    return turns


@pytest.mark.parametrize("name", ["clock", "s3fifo", "sieve"])
def test_a_prompt_that_is_over_leaves_as_a_whole_when_the_hand_comes_by_again(name: str) -> None:
    """The hand passes over runs that have others behind them too: it does not begin with them when these have left."""
    policy = make_policy(name)
    over, other = a_prompt_of_three_turns(created=1), StandInRun(created=10, last_access=20, hits=2)
    policy.add(over[-1])
    policy.add(other)
    policy.add(end := StandInRun(created=30, last_access=30))
    assert policy.victim() is end, "the hand has passed over those that were reused"
    policy.evicted(end)
    left = []
    while policy.victim() is not other:
        left.append(run := policy.victim())
        policy.evicted(run)
        if run is not over[0]:
            policy.add(run.parent)
    assert left == [*reversed(over)]


@pytest.mark.parametrize("name", ["clock", "s3fifo", "sieve"])
def test_a_run_that_was_used_after_the_one_behind_it_does_not_leave_with_it(name: str) -> None:
    policy = make_policy(name)
    over, other = a_prompt_of_three_turns(created=1), StandInRun(created=10, last_access=20, hits=2)
    shared = over[1]
    shared.last_access, shared.hits = 25, 5  # by another prompt that went on from it
    policy.add(over[-1])
    policy.add(other)
    policy.add(end := StandInRun(created=30, last_access=30))
    assert policy.victim() is end
    policy.evicted(end)
    assert policy.victim() is over[-1]
    policy.evicted(over[-1])
    policy.add(shared)
    assert policy.victim() is other


def test_arc_learns_from_the_blocks_that_came_back_and_not_from_what_is_new_behind_them() -> None:
    policy = ARCPolicy()
    for number in range(9):
        policy.add(StandInRun(num_blocks=2, created=number, fingerprint=number))
    evict_all(policy)
    policy.add(StandInRun(num_blocks=7, created=20, fingerprint=3))
    assert policy._target == 2.0


def test_arc_moves_its_target_by_the_blocks_of_a_run_and_by_how_much_the_other_ghosts_outnumber_its_own() -> None:
    policy = ARCPolicy()
    for number in range(9):  # 2 blocks each, the last three used again
        policy.add(StandInRun(num_blocks=2, created=number, fingerprint=number, hits=int(number >= 6)))
    evict_all(policy)
    once, again = policy._once_ghost, policy._again_ghost
    assert (once.num_blocks, again.num_blocks, policy._target) == (12, 6, 0.0)
    policy.add(StandInRun(num_blocks=2, created=20, fingerprint=0))
    assert policy._target == 2.0  # its ghosts outnumber the others
    policy.add(StandInRun(num_blocks=2, created=21, fingerprint=6))
    assert policy._target == 2.0 - min(2.0, 2 * 10 / 6)
    for number in (1, 2, 3):
        policy.add(StandInRun(num_blocks=2, created=30 + number, fingerprint=number))
    before = policy._target
    assert (once.num_blocks, again.num_blocks) == (4, 4)
    policy.add(StandInRun(num_blocks=2, created=40, fingerprint=4))
    assert (once.num_blocks, policy._target) == (2, before + 2)
    policy.add(StandInRun(num_blocks=2, created=41, fingerprint=5))  # 4 blocks of ghosts against its 2
    assert policy._target == min(before + 2 + 2 * 2.0, policy._capacity)


# --- cost-aware ----------------------------------------------------------------------------------------------------


def test_of_equal_age_the_cheap_shallow_run_goes_before_the_costly_ones() -> None:
    policy = CostAwarePolicy()
    shallow = StandInRun(num_blocks=4, start=0, created=3)
    longer = StandInRun(num_blocks=400, start=0, created=2)
    deep = StandInRun(num_blocks=4, start=1000, created=1)
    for run in (deep, longer, shallow):
        policy.add(run)
    assert policy.recompute_cost(shallow) < policy.recompute_cost(longer) < policy.recompute_cost(deep)
    each = CostAwarePolicy(base_cost=2.0, depth_cost=0.5)  # the average over its blocks
    assert (
        each.recompute_cost(StandInRun(num_blocks=5, start=10)) == sum(2.0 + 0.5 * depth for depth in range(10, 15)) / 5
    )
    assert evict_all(policy) == [shallow, longer, deep]


def test_a_costly_run_that_is_not_used_ages_until_fresh_cheap_ones_overtake_it() -> None:
    policy = CostAwarePolicy(base_cost=1.0, depth_cost=1.0)
    costly = StandInRun(start=20, created=0, last_access=0)
    policy.add(costly)
    for tick in range(1, 100):
        policy.add(StandInRun(created=tick, last_access=tick))
        victim = policy.victim()
        if victim is costly:
            break
        policy.evicted(victim)
        policy.remove(victim)
    assert 15 <= tick <= 25


def test_trimming_a_run_or_freeing_its_parent_does_not_make_it_fresh() -> None:
    policy = CostAwarePolicy()
    parent, child = StandInRun(created=1, last_access=1), StandInRun(num_blocks=3, start=1, created=2, last_access=1)
    fresh = [StandInRun(start=2, created=tick, last_access=tick) for tick in (3, 4)]
    policy.add(child)
    assert policy.victim() is child
    for run in fresh:
        policy.add(run)
    policy.remove(child)
    child.num_blocks = 1
    policy.add(child)
    assert policy.victim() is child
    policy.evicted(child)
    policy.remove(child)
    policy.add(parent)
    assert policy.victim() is parent


def test_the_history_of_the_aging_clock_is_bounded_and_ascending() -> None:
    policy = CostAwarePolicy()
    for tick in range(1, 20_000):
        run = StandInRun(start=tick % 7, created=tick, last_access=tick)
        policy.add(run)
        policy.remove(policy.victim())
    assert len(policy._ticks) == len(policy._clocks) <= 4097
    assert policy._ticks == sorted(set(policy._ticks))
    assert policy._clocks == sorted(policy._clocks)


# --- registry ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_policy_is_made_by_name_in_any_case(name: str) -> None:
    policy = make_policy(f" {name.upper()} ")
    assert policy.name == name
    assert name in policy_names()
    assert make_policy(type(policy)).name == name
    assert make_policy(policy) is policy


@pytest.mark.parametrize("wrong", ["lur", "", 7, None, int])
def test_unknown_policy_names_the_known_ones(wrong: Any) -> None:
    known = "2q, adaptive, arc, clock, cost, fifo, lfu, lru, priority, s3fifo, sieve"
    with pytest.raises(InvalidArgumentError, match=known):
        make_policy(wrong)


def test_given_the_name_of_a_policy_that_replays_compare_then_the_error_says_how_to_serve_with_it() -> None:
    code = (
        "from kvpool import KVCacheConfig, KVCacheManager, LayerSpec\n"
        "config = KVCacheConfig([LayerSpec(1, 16)], gpu_blocks=8)\n"
        "try:\n"
        "    KVCacheManager(config, policy='arc')\n"
        "except Exception as error:\n"
        "    print(error)\n"
        "import kvpool.replay\n"
        "print(KVCacheManager(config, policy=kvpool.replay.ARCPolicy).stats() is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    refused, served = done.stdout.splitlines()
    assert refused.endswith("give its class: KVCacheManager(config, policy=kvpool.replay.ARCPolicy)")
    assert served == "True"


def test_an_instance_that_serves_a_cache_cannot_serve_another() -> None:
    policy = LRUPolicy()
    policy.add(StandInRun())
    with pytest.raises(InvalidArgumentError, match="orders 1 runs already"):
        make_policy(policy)


def test_a_name_is_registered_once_but_its_own_class_may_be_redefined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_POLICIES", dict(eviction._POLICIES))
    for _ in range(2):

        @register_policy("Mine")
        class Mine(LRUPolicy):
            pass

    assert isinstance(make_policy("mine"), Mine)
    assert (Mine.name, LRUPolicy.name) == ("mine", "lru")
    with pytest.raises(InvalidArgumentError, match="'lru' is taken by LRUPolicy"):
        register_policy("LRU")(Mine)
    with pytest.raises(InvalidArgumentError, match="not a subclass of EvictionPolicy"):
        register_policy("other")(int)  # type: ignore[type-var]
    with pytest.raises(InvalidArgumentError, match="above the class"):
        register_policy(Mine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "build",
    [
        lambda: S3FIFOPolicy(small_fraction=1.0),
        lambda: S3FIFOPolicy(small_fraction=0.0),
        lambda: S3FIFOPolicy(promote_hits=4),
        lambda: S3FIFOPolicy(promote_hits=0),
        lambda: TwoQueuePolicy(in_fraction=0),
        lambda: TwoQueuePolicy(out_fraction=0),
        lambda: TwoQueuePolicy(in_fraction=1.01),
        lambda: TwoQueuePolicy(out_fraction=1.01),
        lambda: CostAwarePolicy(base_cost=0),
        lambda: CostAwarePolicy(depth_cost=-1),
    ],
)
def test_parameters_out_of_range_raise(build: Callable[[], EvictionPolicy]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must|counted"):
        build()


def test_parameters_are_taken_up_to_their_limits() -> None:
    for policy in (
        *(S3FIFOPolicy(small_fraction=0.99, promote_hits=hits) for hits in (1, 3)),
        TwoQueuePolicy(in_fraction=1.0, out_fraction=1.0),
        CostAwarePolicy(base_cost=0.1, depth_cost=0.0),
    ):
        policy.add(StandInRun())
        assert len(evict_all(policy)) == 1


def test_a_queue_passes_over_what_left_its_front_once_and_cuts_it_off() -> None:
    queue: Queue = Queue()
    items = [queue.insert(Item(number, StandInRun(created=number))) for number in range(200)]
    for number, item in enumerate(items[:99], start=1):
        queue.discard(item)
        assert queue.head() is items[number].run
        assert queue._front == number
    assert len(queue._ordered) == 200
    for item in items[99:101]:
        queue.discard(item)
    assert queue.head() is items[101].run
    assert (queue._front, len(queue._ordered), queue._stale) == (0, 99, 0)


def test_a_queue_keeps_nothing_of_what_left_its_front() -> None:
    queue: Queue = Queue()
    items = [queue.insert(Item(number, StandInRun(created=number))) for number in range(100)]
    for item in items[:40]:
        queue.discard(item)
    assert queue.head() is items[40].run
    assert queue._ordered == [None] * 40 + items[40:]
    for item in items[40:]:
        queue.discard(item)
    assert queue.first() is None
    assert queue.last() is None
    late = queue.insert(Item(0, StandInRun()))
    assert queue.first() is queue.last() is late


def test_s3fifo_promotes_a_run_after_so_many_hits() -> None:
    for hits in (1, 2, 3):
        policy = S3FIFOPolicy(small_fraction=0.1, promote_hits=hits)
        fewer = StandInRun(created=1, fingerprint=1, hits=hits - 1)
        enough = StandInRun(created=2, fingerprint=2, hits=hits)
        later = StandInRun(created=3, fingerprint=3)
        for run in (fewer, enough, later):
            policy.add(run)
        assert evict_all(policy) == [fewer, later, enough]


def test_the_example_registers_a_policy_that_keeps_reused_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_POLICIES", dict(eviction._POLICIES))
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "custom_policy.py"))
    policy = make_policy("two-class")
    reused, unused = StandInRun(hits=1, last_access=1), StandInRun(last_access=2)
    policy.add(reused)
    policy.add(unused)
    assert evict_all(policy) == [unused, reused]


def evict_all(policy: EvictionPolicy) -> list[Any]:
    order: list[Any] = []
    while len(policy):
        run = policy.victim()
        policy.evicted(run)
        policy.remove(run)
        order.append(run)
    return order


def test_given_a_clock_that_rose_very_often_then_old_accesses_still_see_nearly_what_it_was() -> None:
    policy = CostAwarePolicy()
    rises = 3 * _MAX_CHECKPOINTS
    for tick in range(1, rises + 1):  # after tick t the clock stands at 2 t
        policy._latest = tick
        policy._raise_clock(2.0 * tick)
    policy._raise_clock(2.0 * rises + 1)  # again after the same tick: it stands higher now
    assert len(policy._ticks) == len(policy._clocks) <= _MAX_CHECKPOINTS
    assert (policy._ticks[0], policy._clocks[0]) == (1, 2.0)
    assert (policy._ticks[-1], policy._clocks[-1]) == (rises, 2.0 * rises + 1)
    assert all(clock == 2.0 * tick for tick, clock in zip(policy._ticks[:-1], policy._clocks[:-1], strict=True))
    assert policy._ticks[-_MAX_CHECKPOINTS // 2 :] == list(range(rises - _MAX_CHECKPOINTS // 2 + 1, rises + 1))


def choices(policy: EvictionPolicy, seed: int) -> list[int]:
    """The runs that leave, by number, where pairs of them come, are used and used again."""
    rng, left = Random(seed), list[int]()
    pairs: list[tuple[StandInRun, StandInRun]] = []  # a run, and the one behind it, which leaves first
    gone: set[StandInRun] = set()
    for tick in range(1, 160):
        if rng.random() < 0.6 or not pairs:
            options: dict[str, Any] = {"last_access": tick, "last_access_at": tick / 8}
            number = rng.choice((tick, rng.randrange(1, 20)))  # some come back
            above = StandInRun(rng.randrange(1, 4), created=tick, fingerprint=2 * number, **options)
            behind = StandInRun(2, created=tick, start=above.num_blocks, parent=above, **options)
            behind.fingerprint = 2 * number + 1
            pairs.append((above, behind))
            policy.add(behind)
        else:
            above, behind = rng.choice(pairs)
            leaf = above if behind in gone else behind
            policy.remove(leaf)
            for run in {above, leaf}:
                run.last_access, run.last_access_at, run.hits = tick, tick / 8, run.hits + 1
            policy.add(leaf)
        while len(policy) > 8:
            victim: Any = policy.victim()
            policy.evicted(victim)
            policy.remove(victim)
            gone.add(victim)
            left.append(victim.created * 2 + bool(victim.start))
            if victim.start:
                policy.add(victim.parent)
            else:
                pairs = [pair for pair in pairs if pair[0] is not victim]
    return left


@pytest.mark.parametrize("name", policy_names())
def test_a_policy_that_was_cleared_chooses_like_a_new_one(name: str) -> None:
    used = make_policy(name)
    for seed in range(6):
        expected = choices(make_policy(name), seed)
        assert len(expected) > 60
        assert choices(used, seed) == expected
        used.clear()


def test_sieve_forgets_its_rounds_when_it_is_cleared() -> None:
    policy = SievePolicy()
    for _ in range(2):
        parent = StandInRun(created=1, hits=1, last_access=5)
        child = StandInRun(created=1, start=1, parent=parent, last_access=5)
        other = StandInRun(created=2, last_access=100)
        policy.add(child)
        policy.evicted(child)
        policy.remove(child)
        policy.add(parent)
        policy.add(other)
        assert policy.victim() is other  # the parent was reused since the round began
        policy.remove(other)
        assert policy.victim() is parent  # and in the next round no more
        policy.clear()
