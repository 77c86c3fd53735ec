from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kvpool import KVCacheManager, Retention, Tier, TokenRange
from kvpool.errors import InvalidArgumentError
from kvpool.events import Stored, Updated
from kvpool.events.mirror import CacheMirror
from kvpool.prefix.keeping import set_priority
from kvpool.prefix.tree import all_nodes
from managers import Clock, cached, make_manager


def priorities(manager: KVCacheManager) -> dict[int, int]:
    """Priority of every cached block, by depth; one chain is assumed."""
    found = {}
    for node in all_nodes(manager._cache):
        found.update(dict.fromkeys(range(node.start, node.end), node.priority))
    return dict(sorted(found.items()))


def runs(manager: KVCacheManager) -> list[tuple[int, int, int]]:
    """Where every cached run begins and ends, and its priority."""
    nodes = list(all_nodes(manager._cache))
    return sorted((node.start, node.end, node.priority) for node in nodes)


# --- values ----------------------------------------------------------------------------------------------------------


def test_a_position_takes_the_range_that_holds_it() -> None:
    retention = Retention([TokenRange(8, None, 20), TokenRange(0, 4, 90, duration=5.0)], 10, 3.0)
    assert retention.priority_at(0, 12) == (90, 5.0)
    assert retention.priority_at(4, 12) == (None, None)
    assert retention.priority_at(11, 12) == (20, None)
    assert retention.priority_at(12, 12) == (10, 3.0)


def test_cuts_are_the_blocks_where_a_priority_begins() -> None:
    retention = Retention([TokenRange(0, 5, 90), TokenRange(8, None, 20)])
    assert retention.cuts(num_prompt_tokens=14, block_size=4) == [2, 4]
    assert Retention().cuts(num_prompt_tokens=8, block_size=4) == [2]


def test_nothing_is_cut_behind_the_prompt_where_only_the_priority_of_answers_holds() -> None:
    retention = Retention([TokenRange(0, 6, 90), TokenRange(20, 30, 20), TokenRange(40, None, 50)], decode_priority=10)
    assert retention.cuts(num_prompt_tokens=12, block_size=4) == [2, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenRange(-1, 4, 50),
        lambda: TokenRange(True, 4, 50),
        lambda: TokenRange(4, 4, 50),
        lambda: TokenRange(0, 4.0, 50),
        lambda: TokenRange(0, 4, 101),
        lambda: TokenRange(0, 4, True),
        lambda: TokenRange(0, 4, None),
        lambda: TokenRange(0, 4, 50, duration=0),
        lambda: TokenRange(0, 4, 50, duration=True),
        lambda: TokenRange(0, 4, 50, duration=float("nan")),
        lambda: TokenRange(0, 4, 50, duration="1"),
        lambda: Retention([TokenRange(0, 5, 1), TokenRange(4, 8, 2)]),
        lambda: Retention([TokenRange(0, None, 1), TokenRange(4, 8, 2)]),
        lambda: Retention(decode_priority=-1),
        lambda: Retention(decode_priority=101),
        lambda: Retention(decode_priority=5, decode_duration=0),
        lambda: Retention(decode_duration=1.0),
        lambda: Retention([(0, 4, 50)]),
        lambda: Retention(7),
    ],
)
def test_a_retention_that_contradicts_itself_is_refused(make: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        make()


def test_priorities_and_durations_are_taken_up_to_their_limits_and_ranges_put_in_order() -> None:
    for priority in (0, 100):
        assert Retention([TokenRange(0, 1, priority, duration=1e-9)], priority, 0.5).decode_priority == priority
    late, early = TokenRange(4, None, 1), TokenRange(0, 4, 2)
    assert Retention([late, early]).ranges == (early, late)


# --- effect ----------------------------------------------------------------------------------------------------------


def test_blocks_take_the_priority_of_their_first_token() -> None:
    manager = make_manager()
    handle = manager.allocate(
        "a", list(range(14)), retention=Retention([TokenRange(0, 5, 90), TokenRange(8, None, 20)], decode_priority=5)
    )
    manager.commit(handle, 14)
    manager.extend(handle, 6)
    manager.commit(handle, list(range(50, 56)))
    manager.free(handle)
    assert priorities(manager) == {0: 90, 1: 90, 2: 20, 3: 20, 4: 5}
    manager.check()


def test_tokens_that_no_range_names_keep_their_priority() -> None:
    manager = make_manager()
    cached(manager, 8, retention=Retention([TokenRange(0, 4, 90)]))
    cached(manager, 8, retention=Retention([TokenRange(4, 8, 10)]))
    assert priorities(manager) == {0: 90, 1: 10}


def test_the_priority_policy_evicts_low_priorities_first() -> None:
    manager = make_manager(eviction_policy="priority", gpu_blocks=4)
    keep = cached(manager, 8, retention=Retention([TokenRange(0, None, 90)]))
    cached(manager, 8, first=50)
    manager.cache.evict(2)
    assert manager.match_prefix([*keep, 1]).num_blocks == 2


def test_a_priority_ends_with_its_duration_and_starts_when_the_request_is_freed() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    handle = manager.allocate("a", list(range(8)), retention=Retention([TokenRange(0, None, 90, duration=10.0)]))
    manager.commit(handle, 8)
    clock.now = 100.0
    manager.free(handle)
    clock.now = 109.0
    manager.cache.gc()
    assert priorities(manager) == {0: 90, 1: 90}
    clock.now = 110.0
    manager.cache.gc()
    assert priorities(manager) == {0: 35, 1: 35}


def test_a_change_of_priority_is_announced_once() -> None:
    manager = make_manager()
    subscription = manager.subscribe()
    cached(manager, 8)
    cached(manager, 8, retention=Retention([TokenRange(0, None, 90)]))
    cached(manager, 8, retention=Retention([TokenRange(0, None, 90)]))
    updates = [event for event in subscription.poll().events if isinstance(event, Updated)]
    assert [(event.old_priority, event.new_priority, len(event.digests)) for event in updates] == [(35, 90, 2)]


def test_blocks_are_announced_with_the_priority_that_their_request_gives_them() -> None:
    manager = make_manager()
    subscription = manager.subscribe()
    retention = Retention([TokenRange(0, 4, 90), TokenRange(4, 12, 20, duration=5.0)], decode_priority=10)
    handle = manager.allocate("a", list(range(12)), retention=retention)
    manager.commit(handle, 8)
    manager.commit(handle, 4)
    manager.extend(handle, 8)
    manager.commit(handle, list(range(50, 58)))
    live = subscription.poll().events
    stored = [event for event in live if isinstance(event, Stored)]
    assert [(event.priority, len(event.digests)) for event in stored] == [(90, 1), (20, 1), (20, 1), (10, 2)]
    assert [later.parent for later in stored[1:]] == [event.digests[-1] for event in stored[:-1]]
    manager.check()
    manager.free(handle)
    assert subscription.poll().events == []
    assert priorities(manager) == {0: 90, 1: 20, 2: 20, 3: 10, 4: 10}
    mirror = CacheMirror()
    mirror.apply(live)
    manager.check()


def test_blocks_that_forks_store_together_are_announced_with_their_priority() -> None:
    manager = make_manager()
    subscription = manager.subscribe()
    handle = manager.allocate("a", list(range(14)), retention=Retention([TokenRange(4, None, 80)], decode_priority=10))
    manager.mark_written(handle, 14)
    (fork,) = manager.fork(handle, "b")
    manager.commit(handle, 14)
    manager.commit(fork, 14)
    stored = [event for event in subscription.poll().events if isinstance(event, Stored)]
    assert [(event.priority, len(event.digests)) for event in stored] == [(35, 1), (80, 2)]
    manager.check()
    manager.free(handle)
    manager.free(fork)
    manager.check()


def test_given_a_fork_that_goes_on_alone_then_what_it_stores_is_kept_as_its_parent_said() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    retention = Retention([TokenRange(0, 4, 90)], decode_priority=10, decode_duration=5.0)
    handle = manager.allocate("a", list(range(8)), retention=retention)
    manager.commit(handle, 6)
    (fork,) = manager.fork(handle, "b")
    manager.free(handle)
    manager.commit(fork, 2)
    manager.extend(fork, 8)
    manager.commit(fork, list(range(100, 108)))
    assert priorities(manager) == {0: 90, 1: 35, 2: 10, 3: 10}
    manager.free(fork)
    clock.now = 6.0
    manager.cache.evict(0)  # any operation looks at the clock
    assert priorities(manager) == {0: 90, 1: 35, 2: 35, 3: 35}


def test_a_listener_that_came_late_hears_of_priorities_that_change_for_blocks_it_knows() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(12)), retention=Retention([TokenRange(0, None, 80)]))
    manager.commit(handle, 8)
    subscription = manager.subscribe()
    manager.commit(handle, 4)
    events = subscription.poll().events
    mirror = CacheMirror()
    mirror.apply(events)
    assert {state.priority for state in mirror.blocks[0].values()} == {80}
    manager.check()


def test_given_a_listener_then_runs_and_priorities_are_at_any_time_those_without_one() -> None:
    retention = Retention([TokenRange(0, 4, 90), TokenRange(4, 13, 20, duration=5.0)], decode_priority=10)

    def states(listens: bool) -> Iterator[list[tuple[int, int, int]]]:
        manager = make_manager()
        subscription = manager.subscribe() if listens else None
        handle = manager.allocate("a", list(range(13)), retention=retention)
        for count in (3, 5, 5):
            manager.commit(handle, count)
            yield runs(manager)
        batch = manager.batch([handle])
        for token in range(50, 60):
            manager.extend_batch(batch)
            manager.commit_batch(batch, [token])
            yield runs(manager)
        manager.check()
        manager.free(handle)
        yield runs(manager)
        if subscription is not None:
            subscription.close()

    without = list(states(False))
    assert list(states(True)) == without
    assert without[-2] == without[-1] == [(0, 1, 90), (1, 4, 20), (4, 5, 10)]


def test_an_idle_candidate_moves_in_the_order_when_its_priority_changes() -> None:
    manager = make_manager(eviction_policy="priority")
    first, second = cached(manager, 4), cached(manager, 4, first=50)
    nodes = {node.tokens[0]: node for node in all_nodes(manager._cache)}
    set_priority(manager._cache, nodes[0], 90, float("inf"))
    manager.cache.evict(1)
    assert manager.match_prefix([*first, 1]).num_blocks == 1
    assert manager.match_prefix([*second, 1]).num_blocks == 0


# --- time to live ----------------------------------------------------------------------------------------------------


def test_a_time_to_live_starts_with_the_last_use() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    tokens = cached(manager, 8, ttl=10.0)
    clock.now = 9.0
    manager.free(manager.allocate("again", [*tokens, 1]))
    clock.now = 18.0
    assert manager.cache.gc() == 0
    clock.now = 19.0
    assert manager.cache.gc() == 2
    assert manager.stats().evictions["expired"] == 2
    manager.check()


def test_the_configured_time_to_live_is_the_default() -> None:
    clock = Clock()
    manager = make_manager(clock=clock, default_ttl=5.0)
    cached(manager, 4)
    cached(manager, 4, first=50, ttl=100.0)
    clock.now = 5.0
    assert manager.cache.gc() == 1


def test_an_expired_parent_goes_with_its_last_child() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    cached(manager, 8, ttl=5.0)
    cached(manager, 16, ttl=20.0)  # hits the first, which is used again and expires later than it was
    clock.now = 5.0
    manager.cache.gc()
    assert manager.match_prefix([*range(16), 1]).num_blocks == 4
    clock.now = 30.0
    assert manager.cache.gc() == 4
    assert manager.inspect.num_free_blocks() == 16


def test_what_is_read_or_pinned_does_not_expire_until_it_is_let_go() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    tokens = cached(manager, 8, ttl=5.0)
    pin = manager.cache.pin(tokens)
    clock.now = 6.0
    assert manager.cache.gc() == 0
    manager.cache.unpin(pin)
    assert manager.cache.gc() == 2


def test_expired_runs_are_evicted_before_anything_else() -> None:
    clock = Clock()
    manager = make_manager(clock=clock, gpu_blocks=4)
    older = cached(manager, 8)
    newer = cached(manager, 8, first=50, ttl=5.0)
    clock.now = 5.0
    manager.allocate("a", num_tokens=8)
    assert manager.match_prefix([*older, 1]).num_blocks == 2
    assert manager.match_prefix([*newer, 1]).num_blocks == 0


# --- keep=False ------------------------------------------------------------------------------------------------------


def test_what_only_the_request_used_is_dropped_when_it_is_not_kept() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    handle = manager.allocate("secret", [*tokens, *range(50, 58)])
    manager.commit(handle, 8)
    manager.free(handle, keep=False)
    assert manager.match_prefix([*tokens, *range(50, 58), 1]).num_blocks == 2
    assert manager.stats().evictions["explicit"] == 2
    manager.check()


def test_what_another_request_reads_stays_although_it_is_not_kept() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    manager.allocate("b", [*range(8), 1])
    manager.free(handle, keep=False)
    assert manager.match_prefix([*range(8), 1]).num_blocks == 2
    manager.check()


def keeping(priority: int) -> Retention:
    return Retention([TokenRange(0, None, priority)])


@pytest.mark.parametrize("policy", ["priority", "adaptive"])
@pytest.mark.parametrize("lower", [{"host_blocks": 4}, {"disk_blocks": 4}, {"host_blocks": 4, "disk_blocks": 4}])
def test_an_unimportant_run_pushes_no_important_one_out_of_a_lower_tier(policy: str, lower: dict[str, int]) -> None:
    manager = make_manager(gpu_blocks=4, eviction_policy=policy, **lower)
    important = cached(manager, 16, retention=keeping(90))
    for first in (100, 200, 300):
        cached(manager, 16, first, retention=keeping(0))
        manager.check()
    assert manager.match_prefix([*important, 1]).num_tokens == 16
    newest = manager.match_prefix(list(range(300, 317)))
    assert newest.tokens_by_tier == {Tier.GPU: 16}


@pytest.mark.parametrize("policy", ["priority", "adaptive"])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_lost_was_no_more_important_than_all_that_the_lower_tier_keeps(policy: str, seed: int) -> None:
    random = Random(seed)
    manager = make_manager(gpu_blocks=4, host_blocks=6, eviction_policy=policy)
    there: dict[int, int] = {}
    lost_any = False
    for first in range(0, 6000, 100):
        priority = random.choice((0, 20, 35, 60, 90))
        cached(manager, random.choice((4, 8)), first, retention=keeping(priority))
        manager.check()
        there[first] = priority
        on_host = [node.priority for node in all_nodes(manager._cache) if node.tier is Tier.HOST]
        for key in [k for k in there if not manager.match_prefix(range(k, k + 5)).num_tokens]:
            lost_any = True
            assert there.pop(key) <= min(on_host)
    assert lost_any


def test_a_policy_that_ignores_priorities_ignores_them_on_lower_tiers_too() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=4, eviction_policy="lru")
    important = cached(manager, 16, retention=keeping(90))
    for first in (100, 200):
        cached(manager, 16, first, retention=keeping(0))
    assert manager.match_prefix([*important, 1]).num_tokens == 0


def test_a_run_is_as_important_as_what_follows_it_on_a_lower_tier() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=8, eviction_policy="priority")
    tokens = list(range(16))
    cached(manager, 16, retention=Retention([TokenRange(0, 8, 0), TokenRange(8, 16, 90)]))
    manager.cache.offload(2)
    other = cached(manager, 8, 100, retention=keeping(50))
    cached(manager, 16, 200, retention=keeping(60))
    cached(manager, 16, 300, retention=keeping(60))
    manager.check()
    assert manager.match_prefix([*tokens, 1]).num_tokens == 16
    assert manager.match_prefix([*other, 1]).num_tokens == 0


def test_runs_below_the_least_priority_for_offloading_are_dropped() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=16, offload_min_priority=35)
    low = cached(manager, 16, retention=keeping(34))
    usual = cached(manager, 16, 100)
    cached(manager, 16, 200)
    manager.check()
    assert manager.match_prefix([*low, 1]).num_tokens == 0
    assert manager.match_prefix([*usual, 1]).tokens_by_tier == {Tier.HOST: 16}


@pytest.mark.parametrize(("priority", "goes_first"), [(34, "with"), (36, "without")])
@pytest.mark.parametrize("is_newer", [True, False])
def test_content_without_a_priority_has_that_of_35(priority: int, goes_first: str, is_newer: bool) -> None:
    manager = make_manager(gpu_blocks=4, clock=(clock := Clock()))
    both = [("without", 0, None), ("with", 50, Retention([TokenRange(0, None, priority)]))]
    for name, first, retention in both if is_newer else both[::-1]:
        clock.now += 1
        handle = manager.allocate(name, list(range(first, first + 8)), retention=retention)
        manager.commit(handle, 8)
        manager.free(handle)
    manager.allocate("other", list(range(100, 108)))
    kept = {"without": manager.match_prefix([*range(8), 99]), "with": manager.match_prefix([*range(50, 58), 99])}
    assert [name for name, match in kept.items() if not match.num_tokens] == [goes_first]
