"""Eviction saves blocks, or the seconds that computing them takes: deep blocks of long prompts take longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in import StandInRun

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.eviction import AdaptivePolicy, make_policy, policy_names
from kvpool.recording import TraceRecorder
from kvpool.recording.playback import replay_recording
from kvpool.replay import CostAwarePolicy, ReplayConfig, Trace, TraceBuilder, replay
from kvpool.replay.bounds import run_model
from kvpool.replay.simulate import PrefillTime
from kvpool.scheduling import LinearCostModel

STEEP = PrefillTime(seconds_per_token=1e-4, seconds_per_pair=1e-6)


def config(**options: Any) -> KVCacheConfig:
    return KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], 4, **{"gpu_blocks": 16, **options})


def short_and_long(num_rounds: int = 200) -> Trace:
    """Short questions and long documents come again equally often, and the cache has no room for all of them."""
    rng = np.random.default_rng(3)
    prompts = [list(range(1000 * i, 1000 * i + length)) for i, length in enumerate([4] * 48 + [96] * 4)]
    builder = TraceBuilder("short and long", unit=16)
    for number in range(num_rounds * 8):
        prompt = prompts[int(rng.integers(len(prompts)))]
        builder.add(number * 500.0, prompt, 16 * len(prompt), 0)
    return builder.build()


def order(policy: AdaptivePolicy, *runs: StandInRun) -> list[int]:
    """The fingerprints of candidates in the order in which they leave."""
    for run in runs:
        policy.add(run)
    left = []
    while len(policy):
        victim: Any = policy.victim()
        policy.evicted(victim)
        policy.remove(victim)
        left.append(victim.fingerprint)
    return left


def test_given_runs_of_one_kind_then_the_deep_one_stays_longer_where_seconds_count() -> None:
    def runs() -> list[StandInRun]:
        deep = StandInRun(num_blocks=8, start=800, fan_out=1, last_access=1, last_access_at=1.0, fingerprint=1)
        flat = StandInRun(num_blocks=8, start=8, fan_out=1, last_access=2, last_access_at=1.0, fingerprint=2)
        return [deep, flat]

    assert order(AdaptivePolicy(), *runs()) == [1, 2]  # the older first
    by_seconds = AdaptivePolicy()
    by_seconds.weigh(0.05)
    assert order(by_seconds, *runs()) == [2, 1]


def test_given_long_prompts_that_come_again_as_often_then_seconds_saves_more_time_and_fewer_blocks_may_be_found() -> (
    None
):
    trace = short_and_long()
    blocks, seconds = (
        replay(trace, ReplayConfig("adaptive", 200, objective=objective, time=STEEP))
        for objective in ("blocks", "seconds")
    )
    assert seconds.saved_seconds > 1.02 * blocks.saved_seconds
    assert (blocks.label, seconds.label) == ("adaptive", "adaptive, seconds")


def test_saved_seconds_are_what_computing_takes_less_what_loading_takes() -> None:
    time = PrefillTime(1.0, 0.5, host_seconds_per_token=0.25, disk_seconds_per_token=0.5)
    trace = TraceBuilder("twice", unit=16).add(0, [1, 2], 40, 0).add(1, [3, 4], 32, 0).add(2, [1, 2], 40, 0).build()
    plain = replay(trace, ReplayConfig("lru", 4, time=time))
    assert plain.saved_seconds == 32 * 1.0 + 32 * 33 / 2 * 0.5
    assert plain.saved_ratio == plain.saved_seconds / sum(n + n * (n + 1) / 4 for n in (40, 32, 40))
    with_host = replay(trace, ReplayConfig("lru", 2, host=2, time=time))
    assert with_host.saved_seconds == plain.saved_seconds - 32 * 0.25
    assert run_model(trace, "optimum", 2, host=2, time=time).saved_seconds == plain.saved_seconds - 32 * 0.25
    assert run_model(trace, "infinite", None, time=time).saved_seconds == plain.saved_seconds


def test_given_a_machine_then_its_costs_count() -> None:
    costs = LinearCostModel(prefill_seconds_per_token=2e-4, seconds_per_token_pair=1e-8, transfer_bytes_per_second=1e10)
    time = PrefillTime.of(costs, 1000)
    assert (time.depth_cost, time.host_seconds_per_token) == pytest.approx((5e-5, 1e-7))
    assert time.computing(np.array([300]))[0] == pytest.approx(costs.prefill_seconds(300, 0))


@pytest.mark.parametrize(
    ("tiers", "weighed"),
    [
        ({}, [0]),
        ({"host_blocks": 8}, [1]),
        ({"host_blocks": 8, "disk_blocks": 8}, [2]),
        ({"host_blocks": 8, "offload_on_evict": False}, [0, 1]),
    ],
)
def test_only_what_must_be_computed_again_is_weighed_by_its_depth(tiers: dict[str, Any], weighed: list[int]) -> None:
    manager = KVCacheManager(config(objective="seconds", depth_cost=0.01, **tiers))
    made: list[Any] = manager._cache.orders.policies
    used = [tier for tier in range(len(made)) if manager.inspect.num_blocks(0, Tier(tier))]
    assert [tier for tier in used if made[tier]._depth_cost] == weighed
    assert made[weighed[0]]._depth_cost == pytest.approx(0.04)  # of a block


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "joy"}, "objective='joy' is unknown"),
        ({"objective": 3}, "objective=3 is unknown"),
        ({"depth_cost": 0.1}, "depth_cost=0.1 does nothing"),
        ({"objective": "seconds", "depth_cost": -1}, "depth_cost=-1"),
        ({"objective": "seconds", "depth_cost": "much"}, "depth_cost='much'"),
    ],
)
def test_given_a_wrong_objective_then_the_config_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_given_a_policy_that_does_not_know_costs_then_seconds_are_refused() -> None:
    assert [name for name in policy_names() if make_policy(name).weighs] == ["adaptive", "cost"]
    with pytest.raises(ConfigError, match="'lru' does not know what blocks cost"):
        KVCacheManager(config(objective="seconds", eviction_policy="lru"))
    with pytest.raises(ConfigError, match="'lru' does not know what blocks cost"):
        KVCacheManager(config(objective="seconds", depth_cost=0, eviction_policy="lru"))
    with pytest.raises(InvalidArgumentError, match="objective"):
        ReplayConfig("adaptive", objective="joy")
    cost: Any = KVCacheManager(config(objective="seconds", eviction_policy="cost"))._cache.orders.policies[0]
    assert isinstance(cost, CostAwarePolicy)
    assert cost.recompute_cost(StandInRun(num_blocks=1, start=1000)) == pytest.approx(1 + 1000 * 4 * 2.5e-5)


def test_given_blocks_that_cost_the_same_at_any_depth_then_cost_weighs_them_so() -> None:
    options = {"objective": "seconds", "depth_cost": 0, "eviction_policy": "cost"}
    policy: Any = KVCacheManager(config(**options))._cache.orders.policies[0]
    assert policy.recompute_cost(StandInRun(num_blocks=1, start=1000)) == 1


def test_given_a_recording_then_its_objective_is_replayed_and_old_ones_save_blocks(tmp_path: Path) -> None:
    clock = iter(np.arange(1, 10**6) / 8)
    manager = KVCacheManager(
        config(objective="seconds", depth_cost=0.2, gpu_blocks=64), clock=lambda: float(next(clock))
    )
    recorder = TraceRecorder(tmp_path / "r.kvtrace")
    recorder.attach(manager)
    rng = np.random.default_rng(7)
    for number in range(300):
        first = int(rng.integers(12))
        handle = manager.allocate(number, range(1000 * first, 1000 * first + (160 if first < 2 else 16)))
        manager.commit(handle)
        manager.free(handle)
    recorder.close()
    assert replay_recording(tmp_path / "r.kvtrace").hit_blocks == manager.stats().hit_blocks
    old = (tmp_path / "r.kvtrace").read_text().replace('"objective":"seconds","depth_cost":0.2,', "")
    assert "objective" not in old
    (tmp_path / "old.kvtrace").write_text(old)
    assert replay_recording(tmp_path / "old.kvtrace").requests == 300
    assert replay_recording(tmp_path / "r.kvtrace", policy="lru").requests == 300
