from __future__ import annotations

import json

import pytest

from kvpool import MemoryPressure, ReuseScope, Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.stats import Histogram
from managers import Clock, cached, make_manager

# --- histograms ------------------------------------------------------------------------------------------------------


def test_an_empty_histogram_says_zero() -> None:
    assert Histogram().summary() == {"count": 0, "mean": 0.0, "p50": 0.0, "p99": 0.0}


def test_quantiles_are_upper_bounds_within_a_factor_of_two() -> None:
    histogram = Histogram()
    for milliseconds in range(1, 1001):
        histogram.add(milliseconds / 1000)
    for fraction in (0.1, 0.5, 0.9, 0.99):
        exact = fraction * 1000 / 1000
        assert exact <= histogram.quantile(fraction) <= 2 * exact + 0.001
    assert histogram.summary()["mean"] == pytest.approx(0.5005)


def test_a_weight_counts_as_so_many_durations() -> None:
    histogram = Histogram()
    histogram.add(0.0, weight=3)
    histogram.add(100.0)
    assert (histogram.count, histogram.total) == (4, 100.0)
    assert histogram.quantile(0.75) == 0.001


def test_endless_durations_fall_into_the_last_bucket() -> None:
    histogram = Histogram()
    histogram.add(1e30)
    assert histogram.quantile(1.0) == 2 ** (Histogram.NUM_BUCKETS - 1) / 1000


# --- counters --------------------------------------------------------------------------------------------------------


def test_a_fresh_manager_has_counted_nothing() -> None:
    stats = make_manager().stats()
    assert (stats.requests, stats.prompt_tokens, stats.num_sequences, stats.num_cached_runs) == (0, 0, 0, 0)
    assert (stats.token_hit_rate, stats.miss_tokens, stats.miss_blocks) == (0.0, 0, 0)
    assert set(stats.evictions.values()) == {0}
    assert stats.pressure is MemoryPressure.LOW


def test_hits_and_misses_add_up_to_the_prompts() -> None:
    manager = make_manager()
    tokens = cached(manager, 10)
    manager.allocate("a", [*tokens[:6], 99, 98])
    stats = manager.stats()
    assert stats.prompt_tokens == sum(stats.hit_tokens.values()) + stats.miss_tokens == 18
    assert sum(stats.hit_tokens.values()) == 6
    assert stats.partial_hit_tokens == 2
    assert (sum(stats.hit_blocks.values()), stats.miss_blocks) == (1, 3)
    assert stats.token_hit_rate == 6 / 18


def test_a_handle_knows_what_it_got() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    handle = manager.allocate("a", [*tokens, 1, 2])
    assert (handle.stats.prompt_tokens, handle.stats.cached_tokens) == (10, 8)
    (child,) = manager.fork(handle, "b")
    assert child.stats.cached_tokens == 8


def test_failures_are_counted_where_they_happen() -> None:
    manager = make_manager(gpu_blocks=2)
    handle = manager.allocate("a", num_tokens=8)
    for _ in range(2):
        with pytest.raises(OutOfBlocksError):
            manager.allocate("b", num_tokens=4)
    with pytest.raises(OutOfBlocksError):
        manager.extend(handle)
    assert (manager.stats().allocation_failures, manager.stats().extend_failures) == (2, 1)
    assert manager.stats().requests == 1


def test_evictions_are_counted_by_their_reason() -> None:
    clock = Clock()
    manager = make_manager(clock=clock, gpu_blocks=8)
    manager.cache.set_quota("t", maximum=0)
    cached(manager, 4, first=0)
    manager.cache.evict(1)
    cached(manager, 8, first=100)
    manager.cache.invalidate(list(range(100, 108)))
    cached(manager, 8, first=200, ttl=1.0)
    clock.now = 2.0
    manager.cache.gc()
    cached(manager, 4, first=300, scope=ReuseScope(tenant="t"))
    cached(manager, 32, first=400)
    manager.cache.resize(7)
    manager.allocate("a", num_tokens=4)
    manager.cache.reset()
    evictions = manager.stats().evictions
    assert evictions["explicit"] == 1
    assert evictions["invalidated"] == 1
    assert evictions["expired"] == 2
    assert evictions["quota"] == 1
    assert evictions["resize"] == 1
    assert evictions["capacity"] == 1 + 1  # one for the 32 tokens, one for the last request
    assert evictions["reset"] == 6


def test_the_peak_remembers_the_fullest_moment() -> None:
    manager = make_manager()
    manager.free(manager.allocate("a", num_tokens=40))
    manager.allocate("b", num_tokens=4)
    assert manager.stats().pool().peak_referenced == 10
    assert manager.stats().pool().usage == 1 / 16


def test_life_idle_and_reuse_times_are_measured_per_block() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    tokens = cached(manager, 8)
    clock.now = 10.0
    manager.free(manager.allocate("a", [*tokens, 1]))
    clock.now = 14.0
    manager.cache.evict(2)
    stats = manager.stats()
    assert stats.reuse_gap_seconds == {"count": 2, "mean": 10.0, "p50": 16.384, "p99": 16.384}
    assert (stats.lifetime_seconds["count"], stats.lifetime_seconds["mean"]) == (2, 14.0)
    assert (stats.idle_before_eviction_seconds["count"], stats.idle_before_eviction_seconds["mean"]) == (2, 4.0)


def test_tenants_with_a_quota_show_what_they_keep() -> None:
    manager = make_manager()
    manager.cache.set_quota("t", guaranteed=4)
    cached(manager, 8, scope=ReuseScope(tenant="t"))
    cached(manager, 8)
    assert manager.stats().tenants == {"t": (2,)}


# --- the snapshot ----------------------------------------------------------------------------------------------------


def test_a_snapshot_does_not_change_any_more() -> None:
    manager = make_manager()
    before = manager.stats()
    cached(manager, 8)
    assert before.requests == 0
    assert before.pool().free == 16
    assert before != manager.stats()


def test_tiers_without_blocks_are_left_out() -> None:
    stats = make_manager(host_blocks=2).stats()
    assert [(pool.tier, pool.total) for pool in stats.pools] == [(Tier.GPU, 16), (Tier.HOST, 2)]
    assert stats.pool(tier=Tier.HOST).usage == 0.0
    for index, tier in ((0, Tier.DISK), (1, Tier.GPU), (0, Tier.REMOTE)):
        with pytest.raises(InvalidArgumentError, match=f"pool {index}"):
            stats.pool(index, tier)


def test_a_snapshot_becomes_plain_data() -> None:
    manager = make_manager(host_blocks=2)
    cached(manager, 8)
    data = json.loads(json.dumps(manager.stats().to_dict()))
    assert data["pools"][1]["tier"] == "HOST"
    assert data["pressure"] == "LOW"
    assert data["token_hit_rate"] == 0.0
    assert data["requests"] == 1
