"""Which run leaves first, whatever the policy."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import Retention, Tier, TokenRange
from kvpool.errors import OutOfBlocksError
from kvpool.eviction import LRUPolicy, policy_names
from managers import cached, computed, make_manager, manager_of_pairs, num_cached


class Listening(LRUPolicy):
    """Notes which runs it was told to have lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[int] = []

    def evicted(self, run: Any) -> None:
        self.lost.append(run.num_blocks)
        super().evicted(run)


def test_given_runs_that_change_their_tier_then_a_policy_is_told_of_those_that_it_lost_only() -> None:
    made: list[Listening] = []

    def make() -> Listening:
        made.append(Listening())
        return made[-1]

    manager = manager_of_pairs(host_blocks=16, policy=make)
    manager.free(computed(manager, "a", range(6)))
    assert manager.cache.offload(3) == 3
    assert [lost for policy in made for lost in policy.lost] == [3]
    manager.cache.onboard(range(6))
    assert num_cached(manager) == 3
    assert [lost for policy in made for lost in policy.lost] == [3]


def test_recency_is_logical_and_not_the_wall_clock() -> None:
    clock = [100.0]
    manager = make_manager(gpu_blocks=4, clock=lambda: clock[0])
    old = cached(manager, 8)
    clock[0] = 0.0  # the clock jumps back; the second prompt is newer all the same
    new = cached(manager, 8, first=50)
    manager.cache.evict(2)
    assert manager.match_prefix([*old, 1]).num_blocks == 0
    assert manager.match_prefix([*new, 1]).num_blocks == 2


def test_blocks_of_live_requests_are_never_evicted() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    assert manager.cache.evict(100) == 0
    assert manager.match_prefix([*range(8), 1]).num_blocks == 2


def test_arc_knows_content_that_comes_back() -> None:
    manager = make_manager(gpu_blocks=4, eviction_policy="arc")
    tokens = cached(manager, 8)
    manager.cache.evict(2)
    for first in (100, 200, 300):
        cached(manager, 4, first)
    cached(manager, 8)  # a ghost hit: it was evicted and is back, so it is worth more than what came once
    manager.cache.evict(1)
    assert manager.match_prefix([*tokens, 1]).num_blocks == 2


def test_fifo_ignores_use_and_lru_does_not() -> None:
    for policy, survivor in (("fifo", 50), ("lru", 0)):
        manager = make_manager(gpu_blocks=8, eviction_policy=policy)
        cached(manager, 8)
        cached(manager, 8, first=50)
        cached(manager, 8)  # used again
        manager.cache.evict(2)
        assert manager.match_prefix([*range(survivor, survivor + 8), 1]).num_blocks == 2, policy


def test_an_eviction_that_cannot_free_enough_is_not_begun() -> None:
    manager = make_manager(gpu_blocks=4)
    tokens = cached(manager, 8)
    manager.allocate("live", num_tokens=8)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("b", num_tokens=12)
    assert manager.match_prefix([*tokens, 1]).num_blocks == 2


def test_touching_a_block_keeps_it_evictable() -> None:
    manager = make_manager(gpu_blocks=4)
    for _ in range(5):
        cached(manager, 16)
    assert manager.cache.evict(4) == 4


def test_a_parent_is_never_evicted_before_its_child() -> None:
    manager = make_manager(gpu_blocks=6)
    cached(manager, 8)
    long = manager.allocate("a", [*range(8), 50, 51, 52, 53])
    manager.commit(long, 4)
    short = manager.allocate("b", [*range(8), 60])
    manager.free(long)  # the child is idle first, the parent is still read
    manager.free(short)
    manager.cache.evict(1)
    assert manager.match_prefix([*range(8), 50, 51, 52, 53, 1]).num_blocks == 2


def test_clock_never_names_a_victim_twice() -> None:
    manager = make_manager(gpu_blocks=8, eviction_policy="clock")
    for first in range(0, 80, 10):
        cached(manager, 4, first)
    assert manager.cache.evict(100) == 8
    assert manager.inspect.num_free_blocks() == 8
    manager.check()


def test_a_parent_on_the_gpu_may_leave_while_its_children_are_on_the_host() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=2, offload_on_evict=False)
    tokens = cached(manager, 16)
    manager.cache.offload(2)  # the last two blocks
    assert manager.cache.evict(2) == 2  # drops their parents: nothing may stay below a hole
    assert manager.match_prefix([*tokens, 1]).num_blocks == 0
    assert manager.stats().pool(tier=Tier.HOST).free == 2
    manager.check()


def test_a_commit_under_memory_pressure_never_detaches_its_own_blocks() -> None:
    manager = make_manager(gpu_blocks=4)
    handle = manager.allocate("a", list(range(4)))
    manager.commit(handle, 4)
    cached(manager, 8, first=50)
    for token in range(4, 15):
        manager.extend(handle)
        manager.commit_batch([handle], [token])
    assert manager.match_prefix([*range(16), 1]).num_tokens == 12
    manager.check()


def test_a_priority_level_that_ran_empty_is_passed_over() -> None:
    manager = make_manager(gpu_blocks=8, eviction_policy="priority")
    for first, priority in ((0, 10), (50, 50), (100, 90)):
        cached(manager, 4, first, retention=Retention([TokenRange(0, None, priority)]))
    assert [manager.cache.evict(1) for _ in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_deadlocks_or_loops_on_its_first_eviction(policy: str) -> None:
    manager = make_manager(gpu_blocks=4, eviction_policy=policy)
    for first in range(0, 100, 10):
        cached(manager, 8, first)
    manager.check()
