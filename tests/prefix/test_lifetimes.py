"""Priorities, times to live, pins and guarantees end when they should, and nothing piles up behind them."""

from __future__ import annotations

import threading

import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Retention, ReuseScope, TokenRange
from kvpool.errors import OutOfBlocksError
from kvpool.prefix.tree import all_nodes
from managers import FULL, cached, commit_all, computed, make_manager, manager_of_pairs, manager_with

WINDOW_OF_8 = LayerSpec(kv_heads=1, head_dim=8, window=8)


def test_given_a_range_of_tokens_then_the_priority_ends_with_it() -> None:
    retention = Retention([TokenRange(0, 4, priority=90)])
    assert retention.cuts(num_prompt_tokens=12, block_size=2) == [2, 6]
    manager = manager_of_pairs(gpu_blocks=8, policy="priority")
    manager.free(computed(manager, "a", range(12), retention=retention))
    manager.free(computed(manager, "b", range(50, 54)))
    manager.cache.evict(6)
    assert manager.match_prefix([*range(12), 99]).num_blocks == 2  # what the range holds, and nothing behind it


def test_a_pin_survives_eviction_and_a_free_and_ends_with_unpin() -> None:
    manager = make_manager(FULL, WINDOW_OF_8, gpu_blocks=32)
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 12)
    pin = manager.cache.pin(handle)
    manager.free(handle)
    manager.cache.evict(100)
    assert manager.match_prefix([*range(12), 1]).num_blocks == 3  # every layer group kept what it needs
    manager.cache.unpin(pin)
    manager.cache.evict(100)
    assert manager.stats().pool().free == 32


def test_gc_frees_what_expired_and_says_how_much() -> None:
    clock = [0.0]
    manager = make_manager(clock=lambda: clock[0])
    cached(manager, 8, ttl=5.0)
    cached(manager, 4, first=50)
    assert manager.cache.gc() == 0
    clock[0] = 5.0
    assert manager.cache.gc() == 2
    assert manager.inspect.num_free_blocks() == 15


def test_a_retention_ends_with_its_duration_also_for_runs_that_were_split_since() -> None:
    clock = [0.0]
    manager = make_manager(clock=lambda: clock[0])
    cached(manager, 16, retention=Retention([TokenRange(0, None, 90, duration=10.0)]))
    splitter = manager.allocate("b", [*range(8), 99])
    manager.free(splitter)
    clock[0] = 10.0
    manager.cache.gc()
    assert {node.priority for node in all_nodes(manager._cache)} == {35}


def test_what_has_expired_is_neither_matched_nor_evicted_again() -> None:
    now = [0.0]
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4), clock=lambda: now[0])
    manager.free(commit_all(manager, manager.allocate("a", [0, 0], ttl=5.0)))
    now[0] = 6.0
    assert manager.match_prefix([0, 0, 1]).num_tokens == 0
    assert (manager.cache.evict(1), manager.inspect.num_free_blocks()) == (0, 4)
    assert manager.stats().evictions["expired"] == 1


def test_a_pin_whose_time_is_over_does_not_block_an_admission() -> None:
    now = [0.0]
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4), clock=lambda: now[0])
    manager.free(commit_all(manager, manager.allocate("a", [0] * 4)))
    manager.cache.pin([0] * 4, ttl=5.0)
    now[0] = 6.0
    manager.allocate("b", [1] * 8)
    manager.check()


def test_deadlines_do_not_pile_up_with_requests() -> None:
    now = [0.0]
    manager = KVCacheManager(
        KVCacheConfig([FULL], block_size=2, gpu_blocks=8, default_ttl=1000.0), clock=lambda: now[0]
    )
    for number in range(500):
        now[0] = number
        manager.free(commit_all(manager, manager.allocate(number, [number % 3] * 4)))
    assert len(manager._cache.calendar._heap) < 200


def test_a_batch_of_several_tenants_does_not_use_the_guarantee_of_one() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8, watermark=0.0))
    manager.cache.set_quota("a", guaranteed=4)
    manager.free(commit_all(manager, manager.allocate("old", [0] * 8, scope=ReuseScope(tenant="a"))))
    first = commit_all(manager, manager.allocate("a", [1] * 4, scope=ReuseScope(tenant="a")))
    second = commit_all(manager, manager.allocate("b", [2] * 4, scope=ReuseScope(tenant="b")))
    with pytest.raises(OutOfBlocksError):
        manager.extend_batch([first, second])
    manager.extend(first)
    manager.check()


def test_a_quota_can_be_removed_after_the_pool_shrank_below_the_guarantees() -> None:
    manager = manager_with(gpu_blocks=8)
    manager.cache.set_quota("a", guaranteed=4)
    manager.cache.set_quota("b", guaranteed=4)
    manager.cache.resize(3)
    manager.cache.set_quota("a")
    manager.cache.set_quota("b")
    assert manager.stats().tenants == {}


def test_a_clock_that_raises_leaves_the_lock_free() -> None:
    broken = []

    def clock() -> float:
        if broken:
            raise RuntimeError("no time")
        return 0.0

    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4), clock=clock)
    broken.append(True)
    with pytest.raises(RuntimeError):
        manager.stats()
    broken.clear()
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(manager.stats().num_sequences))
    thread.start()
    thread.join(timeout=10)
    assert seen == [0]


def test_what_is_pinned_and_guaranteed_is_protected_once() -> None:
    manager = manager_with(gpu_blocks=12, block_size=1)
    scope = ReuseScope(tenant="a")
    manager.cache.set_quota("a", guaranteed=4)
    manager.free(commit_all(manager, manager.allocate("old", [0] * 12, scope=scope)))
    manager.cache.pin([0] * 4, scope=scope)
    assert manager.can_allocate([1] * 8)
    manager.allocate("new", [1] * 8)
    manager.check()
