"""Replay through the real manager is exact: request by request, against a simulator that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_simulator import slow_hits

from kvpool import DType, LayerSpec, StatePart, StateSpec
from kvpool.errors import InvalidArgumentError
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, TraceError, read_trace, replay
from kvpool.replay.bounds import OPTIMUM, run_model
from kvpool.replay.runs import run_all, run_one

TRACES = (
    "mooncake_conversation_trace.jsonl",
    "mooncake_arxiv_first1000.jsonl",
    "wekacc_dev.jsonl.gz",
    "lmcache_magagent_b16.jsonl",
)
LAYERS = (LayerSpec(kv_heads=1, head_dim=5, dtype=DType.FP8_E4M3),)  # 10 bytes per token
CAPACITIES = (1_000, 30_000, 100_000, None)  # and 10_000, in a test of its own
FEWER_CAPACITIES = (1_000, 10_000)
FEWER_REQUESTS = 2_000  # for the policies that are not compared on whole traces


def hits_of(trace: Trace, policy: str, capacity: int | None) -> list[int]:
    hits = replay(trace, ReplayConfig(policy, capacity)).hits
    assert hits is not None
    return hits.tolist()


def prompts_of(trace: Trace) -> list[list[int]]:
    return [request.ids.tolist() for request in trace]


@pytest.mark.quick("30-lru", "60-lru", "100-lru", "300-lru", "None-lru")
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("capacity", [30, 60, 100, 300, None])
def test_given_conversations_when_replayed_then_every_request_hits_as_in_the_slow_simulator(
    chat_trace: Trace, policy: str, capacity: int | None
) -> None:
    assert hits_of(chat_trace, policy, capacity) == slow_hits(prompts_of(chat_trace), capacity or float("inf"), policy)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30),
    st.integers(1, 12),
    st.sampled_from(["lru", "fifo", "lfu"]),
)
def test_given_any_small_tree_of_prompts_then_replay_is_exact(
    paths: list[list[int]], capacity: int, policy: str
) -> None:
    numbers: dict[tuple[int, ...], int] = {}
    prompts = [[numbers.setdefault(tuple(path[: end + 1]), len(numbers)) for end in range(len(path))] for path in paths]
    builder = TraceBuilder("small", unit=16)
    for prompt in prompts:
        builder.add(0, prompt, 16 * len(prompt), 0)
    assert hits_of(builder.build(), policy, capacity) == slow_hits(prompts, capacity, policy)


@pytest.mark.parametrize("name", TRACES)
def test_given_a_real_trace_when_replayed_at_10k_then_every_request_is_exact(traces_dir: Path, name: str) -> None:
    trace = read_trace(traces_dir / name)
    assert hits_of(trace, "lru", 10_000) == slow_hits(prompts_of(trace), 10_000, "lru")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_given_a_real_trace_when_replayed_at_any_capacity_then_every_request_is_exact(
    traces_dir: Path, name: str
) -> None:
    trace = read_trace(traces_dir / name)
    prompts = prompts_of(trace)
    for capacity in CAPACITIES:
        if capacity is None or capacity < trace.num_unique:  # larger ones evict as little as one without a limit
            assert hits_of(trace, "lru", capacity) == slow_hits(prompts, capacity or float("inf"), "lru"), capacity


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("policy", ["fifo", "lfu"])
def test_given_a_real_trace_and_another_policy_then_every_request_is_exact(
    traces_dir: Path, name: str, policy: str
) -> None:
    trace = read_trace(traces_dir / name).head(FEWER_REQUESTS)
    prompts = prompts_of(trace)
    for capacity in FEWER_CAPACITIES:
        assert hits_of(trace, policy, capacity) == slow_hits(prompts, capacity, policy), capacity


def test_given_the_conversation_trace_then_the_published_figures_come_out(traces_dir: Path) -> None:
    trace = read_trace(traces_dir / TRACES[0])
    result = replay(trace, ReplayConfig("lru", 10_000))
    assert (result.hit_blocks, result.requested_blocks, result.requests) == (61_046, 288_500, 12_031)
    assert trace.num_unique == 182_790
    assert [round(run_model(trace, name, 10_000).hit_ratio, 4) for name in ("optimum", "fifo-flat")] == [0.3664, 0.1816]


def test_given_a_prompt_larger_than_the_cache_then_it_is_served_and_counted(chat_trace: Trace) -> None:
    builder = TraceBuilder("large", unit=16)
    prompts = [[1, 2], [*range(10, 30)], [1, 2, 3], [*range(10, 30)], [1, 2]]
    for prompt in prompts:
        builder.add(0, prompt, 16 * len(prompt), 0)
    result = replay(builder.build(), ReplayConfig("lru", 8))
    assert result.oversized == 2
    assert result.hits is not None
    assert result.hits.tolist() == slow_hits(prompts, 8, "lru")


@pytest.mark.parametrize("policy", ["adaptive", "priority"])
def test_given_a_full_cache_and_a_policy_that_reads_priorities_then_partial_last_blocks_are_not_kept(
    policy: str,
) -> None:
    builder = TraceBuilder("twice", unit=16)
    for prompt in ([1, 2, 3], [4, 5, 6], [4, 5, 6]):
        builder.add(0, prompt, 40, 0)
    trace = builder.build()
    assert hits_of(trace, policy, 9) == hits_of(trace, "lru", 3) == [0, 0, 3]
    assert hits_of(trace, policy, 3) == [0, 0, 2]


def test_given_an_empty_prompt_then_it_counts_as_a_request_without_blocks() -> None:
    trace = TraceBuilder("t", unit=16).add(0, [], 0, 3).add(1, [5], 16, 3).add(2, [5], 16, 3).build()
    result = replay(trace, ReplayConfig("lru", 4))
    assert (result.requests, result.requested_blocks, result.hit_blocks, result.hit_tokens) == (3, 2, 1, 15)


def test_given_a_lower_tier_then_what_leaves_the_gpu_hits_there(chat_trace: Trace) -> None:
    alone = replay(chat_trace, ReplayConfig("lru", 60, layers=LAYERS))
    both = replay(chat_trace, ReplayConfig("lru", 60, host=5_000, layers=LAYERS))
    everything = replay(chat_trace, ReplayConfig("lru", None))
    assert both.hit_blocks == everything.hit_blocks > alone.hit_blocks
    assert both.hit_blocks_by_tier["HOST"] == both.onboarded_blocks > 0
    assert both.onboarded_bytes == both.onboarded_blocks * 160
    assert sum(both.hit_blocks_by_tier.values()) == both.hit_blocks


@pytest.mark.slow
def test_given_a_host_that_is_written_through_then_nobody_waits_for_a_copy_and_as_much_is_found(
    chat_trace: Trace,
) -> None:
    back, through = (
        replay(chat_trace, ReplayConfig("lru", 60, host=5_000, host_write=way)) for way in ("back", "through")
    )
    assert through.hit_blocks == back.hit_blocks
    assert back.awaited_blocks == back.copied_down_blocks > 0
    assert through.awaited_blocks < 0.1 * through.copied_down_blocks


@pytest.mark.slow
def test_given_tiers_then_the_optimum_says_what_each_of_them_could_find(chat_trace: Trace) -> None:
    optimum = run_one(chat_trace, ReplayConfig(OPTIMUM, 60, host=200, disk=300))
    alone, two, three = (run_model(chat_trace, OPTIMUM, size).hit_blocks for size in (60, 260, 560))
    assert optimum.hit_blocks_by_tier == {"GPU": alone, "HOST": two - alone, "DISK": three - two}
    assert optimum.hit_blocks == three > two > alone
    for policy in ("lru", "adaptive"):
        found = replay(chat_trace, ReplayConfig(policy, 60, host=200, disk=300)).hit_blocks_by_tier
        assert found["GPU"] <= alone
        assert found["GPU"] + found["HOST"] <= two
        assert sum(found.values()) <= three


def test_given_prompts_larger_than_the_gpu_then_lower_tiers_keep_their_blocks_in_the_optimum() -> None:
    builder = TraceBuilder("large", unit=16)
    for ids in ([1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 4], [5, 6, 7]):
        builder.add(0, ids, 16 * len(ids), 0)
    trace, sizes = builder.build(), {"capacity": 1, "host": 4, "disk": 0}
    optimum = run_one(trace, ReplayConfig(OPTIMUM, **sizes))
    assert optimum.hit_blocks_by_tier == {"GPU": 0, "HOST": 7}
    assert replay(trace, ReplayConfig("lru", **sizes)).hit_blocks == 7, (
        "the GPU is enlarged to four: eight places for seven"
    )


def test_given_larger_blocks_then_only_whole_ones_hit() -> None:
    trace = TraceBuilder("t", unit=16).add(0, [1, 2, 3], 48, 0).add(1, [1, 2, 3], 48, 0).build()
    result = replay(trace, ReplayConfig("lru", 8, block_size=32))
    assert (result.requested_blocks, result.hit_blocks, result.hit_tokens) == (4, 1, 32)


def test_given_a_block_size_inside_the_blocks_of_the_trace_then_it_is_refused(chat_trace: Trace) -> None:
    with pytest.raises(InvalidArgumentError, match="no multiple of the trace's blocks of 16"):
        replay(chat_trace, ReplayConfig("lru", 8, block_size=8))


def test_given_a_trace_without_reuse_information_then_replay_says_so() -> None:
    trace = TraceBuilder("azure", reuse_known=False).add(0, (), 100, 3).build()
    with pytest.raises(TraceError, match="lengths only"):
        replay(trace, ReplayConfig("lru", 8))


@pytest.mark.parametrize("bad", [{"capacity": 0}, {"host": -1}, {"block_size": 0}, {"capacity": 2.5}])
def test_given_a_wrong_size_then_it_is_named(chat_trace: Trace, bad: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        ReplayConfig("lru", **bad)
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        run_model(chat_trace, OPTIMUM, **{"capacity": 8, **bad})


def test_given_a_number_from_the_end_then_a_trace_has_that_request() -> None:
    trace = TraceBuilder("t", unit=16).add(0, [1], 16, 0).add(9, [1, 2], 32, 0).build()
    assert (trace[-1].ids.tolist(), trace.ids_of(-2).tolist()) == ([1, 2], [1])
    with pytest.raises(IndexError):
        trace[2]
    with pytest.raises(InvalidArgumentError, match="num_requests"):
        trace.head(-1)


def test_given_the_same_trace_twice_then_the_results_are_the_same(chat_trace: Trace) -> None:
    first, second = (replay(chat_trace, ReplayConfig("s3fifo", 60)) for _ in range(2))
    assert first.row() == second.row()


def test_given_any_policy_then_the_optimum_is_above_it_and_the_infinite_cache_above_both(chat_trace: Trace) -> None:
    for capacity in (20, 60, 150):
        optimum = run_model(chat_trace, "optimum", capacity)
        infinite = run_model(chat_trace, "infinite", capacity)
        for policy in ("lru", "fifo", "lfu", "s3fifo", "arc"):
            result = replay(chat_trace, ReplayConfig(policy, capacity))
            assert result.hit_blocks <= optimum.hit_blocks <= infinite.hit_blocks


@pytest.mark.parametrize(("unit", "block_size"), [(1, 1), (1, 4), (16, 16), (16, 48)])
def test_given_ids_of_any_kind_then_the_bounds_are_those_of_the_manager(unit: int, block_size: int) -> None:
    """Ids that recur at other places, prompts that end inside a block, are empty, or are larger than the cache."""
    random = np.random.default_rng(unit + block_size)
    for _ in range(12):
        builder = TraceBuilder("drawn", unit=unit)
        for _ in range(10):
            ids = random.integers(0, 2, int(random.integers(0, 14))).tolist()
            builder.add(0, ids, unit * len(ids), 0)
        trace, capacity = builder.build(), int(random.integers(1, 12))
        unlimited = replay(trace, ReplayConfig("lru", None, block_size=block_size))
        bound = run_model(trace, "infinite", None, block_size=block_size)
        assert (bound.hit_blocks, bound.hit_ratio) == (unlimited.hit_blocks, unlimited.hit_ratio)
        optimum = run_model(trace, "optimum", capacity, block_size=block_size)
        for policy in ("lru", "lfu"):
            found = replay(trace, ReplayConfig(policy, capacity, block_size=block_size))
            assert found.hit_blocks <= optimum.hit_blocks <= bound.hit_blocks


def test_given_a_tiny_trace_then_no_sequence_of_evictions_beats_the_optimum() -> None:
    """All choices, by brute force: the optimum is exact, not a bound that is merely high enough."""
    random = np.random.default_rng(3)
    for _ in range(20):
        prompts, numbers = [], {}
        for _ in range(7):
            path = random.integers(0, 2, int(random.integers(1, 4))).tolist()
            prompts.append([numbers.setdefault(tuple(path[: n + 1]), len(numbers)) for n in range(len(path))])
        builder = TraceBuilder("tiny", unit=16)
        for prompt in prompts:
            builder.add(0, prompt, 16 * len(prompt), 0)
        assert run_model(builder.build(), "optimum", 4).hit_blocks == best_possible(prompts, 4)


def best_possible(prompts: list[list[int]], capacity: int) -> int:
    from itertools import combinations

    states: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for resident, score in states.items():
            hits = next((at for at, block in enumerate(prompt) if block not in resident), len(prompt))
            others = resident - set(prompt)
            excess = max(0, len(others | set(prompt)) - capacity)
            for leaving in combinations(sorted(others), min(excess, len(others))):
                kept = (others - set(leaving)) | set(prompt)
                after[kept] = max(after.get(kept, -1), score + hits)
        states = after
    return max(states.values())


def test_given_the_flat_fifo_then_it_is_the_flat_slow_simulator(chat_trace: Trace) -> None:
    hits = run_model(chat_trace, "fifo-flat", 60).hits
    assert hits is not None
    assert hits.tolist() == slow_hits(prompts_of(chat_trace), 60, "fifo", leaf_first=False)


def test_given_unlimited_capacity_then_all_policies_share_one_run_and_keep_their_names(chat_trace: Trace) -> None:
    configs = [ReplayConfig(policy, None) for policy in ("arc", "adaptive")]
    found = run_all(chat_trace, configs, workers=1)
    assert [result.policy for result in found] == ["arc", "adaptive"]
    assert [result.hit_blocks for result in found] == [replay(chat_trace, config).hit_blocks for config in configs]


STATE = StateSpec((StatePart("recurrent", (10, 8), DType.FLOAT32),))  # 320 bytes: as many as two blocks of 16 tokens


def hybrid(capacity: int | None, every: int | None = None) -> ReplayConfig:
    return ReplayConfig("lru", capacity, layers=(*LAYERS, STATE), checkpoint_every=every)


def test_given_layers_with_a_state_then_hits_end_where_a_checkpoint_is() -> None:
    builder = TraceBuilder("t", unit=16).add(
        0, [1, 2, 3, 4], 60, 3
    )  # ends inside its last block: a checkpoint behind 3
    trace = builder.add(1, [1, 2, 3, 5, 6], 76, 3).add(2, [1, 2, 7, 8], 60, 3).add(3, [1, 2, 9], 48, 3).build()
    hits = replay(trace, hybrid(None)).hits
    assert hits is not None
    assert hits.tolist() == [0, 3, 0, 2]  # where the third parted, it left one for the fourth
    more = replay(trace, hybrid(None, every=32)).hits
    assert more is not None
    assert more.tolist() == [0, 3, 2, 2]


@pytest.mark.slow
def test_given_layers_with_a_state_then_their_checkpoints_take_memory_from_blocks(chat_trace: Trace) -> None:
    alone, both = replay(chat_trace, ReplayConfig("lru", 200, layers=LAYERS)), replay(chat_trace, hybrid(200))
    assert both.checkpoints is not None
    assert 2 <= both.checkpoints <= 200 // 4 // 2  # a quarter of the memory at most
    assert 0 < both.hit_blocks < alone.hit_blocks
    assert (alone.label, both.label, replay(chat_trace, hybrid(200, 32)).label) == (
        "lru",
        "lru, checkpoints",
        "lru, checkpoints every 32",
    )
    unlimited = replay(chat_trace, hybrid(None))
    assert both.hit_blocks < unlimited.hit_blocks <= replay(chat_trace, ReplayConfig("lru", None)).hit_blocks


@pytest.mark.slow
def test_given_a_lower_tier_then_checkpoints_come_back_from_it(chat_trace: Trace) -> None:
    alone = replay(chat_trace, hybrid(200))
    both = replay(chat_trace, ReplayConfig("lru", 200, host=5_000, layers=(*LAYERS, STATE)))
    assert both.hit_blocks > alone.hit_blocks
    assert both.hit_blocks_by_tier["HOST"] > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: hybrid(4), "capacity is 4 blocks; one block and 2 checkpoints take 5"),
        (lambda: hybrid(100, every=24), "no multiple of the blocks of 16 tokens"),
        (lambda: ReplayConfig("lru", 100, layers=LAYERS, checkpoint_every=32), "no layer keeps a state"),
        (lambda: ReplayConfig("lru", 100, layers=(STATE,)), "no layer of this model attends"),
    ],
)
def test_given_checkpoints_that_cannot_be_then_the_reason_is_told(
    chat_trace: Trace, config: Callable[[], ReplayConfig], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replay(chat_trace, config())
