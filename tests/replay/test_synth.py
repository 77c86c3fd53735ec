"""Synthetic workloads, statistics of traces, tokens turned into blocks, serving in simulated time."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest

from kvpool import LayerSpec
from kvpool.errors import InvalidArgumentError
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, TraceError, replay, serving
from kvpool.replay.bounds import run_model
from kvpool.replay.serving import ServingConfig, simulate_serving
from kvpool.replay.synth import WorkloadModel, fit, synthesise
from kvpool.replay.trace import footprint, reuses, summary, to_blocks, working_set
from kvpool.scheduling import LinearCostModel


def test_given_a_seed_then_the_trace_is_the_same_every_time() -> None:
    one, two, other = (synthesise(WorkloadModel(), 300, seed=seed) for seed in (1, 1, 2))
    assert one.ids.tolist() == two.ids.tolist()
    assert one.ids.tolist() != other.ids.tolist()
    assert (np.diff(one.timestamps) >= 0).all()


def test_given_a_rate_then_arrivals_follow_it() -> None:
    model = WorkloadModel(gap_seconds=(0.0, 0.1)).with_rate(20.0)
    trace = synthesise(model, 4000)
    assert len(trace) / trace.duration == pytest.approx(20.0, rel=0.25)


def test_given_a_synthetic_trace_when_fitted_then_its_parameters_come_back() -> None:
    model = WorkloadModel(continues=(0.5,), unshared=0.5)
    found = fit(synthesise(model, 6000))
    assert found.continues[0] == pytest.approx(0.5, abs=0.08)
    assert found.gap_seconds[0] == pytest.approx(model.gap_seconds[0], abs=0.4)
    assert found.turn_blocks[0] == pytest.approx(model.turn_blocks[0], abs=0.3)


@pytest.mark.parametrize(
    "bad", [{"rate": 0.0}, {"rate": nan}, {"num_stems": 0}, {"continues": (1.0,)}, {"continues": ()}]
)
def test_given_impossible_parameters_then_they_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        WorkloadModel(**bad)


def test_given_what_no_trace_can_hold_then_none_is_made() -> None:
    with pytest.raises(InvalidArgumentError, match="seed=-1"):
        synthesise(WorkloadModel(), 5, seed=-1)
    with pytest.raises(TraceError, match=r"at rate=1e-300 .* no trace can hold such times"):
        synthesise(WorkloadModel(rate=1e-300), 5)


def test_given_tokens_then_equal_prefixes_of_blocks_get_equal_ids() -> None:
    trace = TraceBuilder("t").add(0, [1, 2, 3, 4, 5], 5, 0).add(1, [1, 2, 3, 9], 4, 0).add(2, [3, 4], 2, 0).build()
    blocks = to_blocks(trace, 2)
    assert [request.ids.tolist() for request in blocks] == [[0, 1, 2], [0, 3], [4]]
    assert [request.ids.tolist() for request in to_blocks(trace, 2, keep_ends=False)] == [[0, 1], [0, 2], [3]]
    assert [request.ids.tolist() for request in to_blocks(blocks, 4)] == [[0, 1], [2], [3]]
    with pytest.raises(InvalidArgumentError, match="block_size=3 is no multiple of the trace's blocks of 2 tokens"):
        to_blocks(blocks, 3)


def test_given_a_trace_then_reuses_and_sets_are_counted() -> None:
    builder = TraceBuilder("t", unit=16)
    for when, ids in ((0, [1, 2]), (1000, [3]), (5000, [1, 2]), (6000, [1, 4])):
        builder.add(when, ids, 16 * len(ids), 0)
    trace = builder.build()
    found = reuses(trace)
    assert sorted(zip(found.seconds.tolist(), found.new_blocks.tolist(), strict=True)) == [(1.0, 0), (5.0, 1), (5.0, 2)]
    assert working_set(trace, 5.0)[1].tolist() == [3, 3]
    assert footprint(trace)[1].tolist() == [2, 3, 3, 4]
    assert summary(trace)["ids_used_once"] == 2


def test_given_times_that_go_back_then_no_gap_between_uses_is_negative() -> None:
    trace = TraceBuilder("back", unit=16).add(5000, [1], 16, 0).add(3000, [1], 16, 0).add(6000, [1], 16, 0).build()
    assert reuses(trace).seconds.tolist() == [0.0, 1.0]


def test_given_tokens_or_ids_that_recur_elsewhere_then_figures_count_prefixes() -> None:
    """An id is reused where all that precedes it is equal, too, as in every cache; a token by itself says nothing."""
    tokens = TraceBuilder("tokens").add(0, [7] * 40, 40, 0, "a").add(1000, [7] * 20, 20, 0).build()
    figures = summary(tokens)
    names = ("tokens_per_id", "ids", "different_ids", "ids_used_once")
    assert [figures[name] for name in names] == [16, 5, 4, 3], "two prompts end inside a block that nobody finds again"
    assert figures["reuse_ratio_infinite_cache"] == run_model(tokens, "infinite", None).hit_ratio == 1 / 5
    assert (figures["sessions"], figures["tenants"]) == (1, 0)
    contents = TraceBuilder("contents", unit=16).add(0, [1, 2, 1], 48, 0).add(0, [2, 1], 32, 0).build()
    assert summary(contents)["reuse_ratio_infinite_cache"] == 0
    assert summary(TraceBuilder("short").add(0, [1, 2], 2, 0).build())["reuse_ratio_infinite_cache"] == 0


def serve(trace: Trace, **options: float) -> dict[str, float]:
    layers = [LayerSpec(kv_heads=2, head_dim=64)] * 4
    config = ServingConfig(ReplayConfig("lru", 400), layers, LinearCostModel(smoothing=1e-9), **options)
    return simulate_serving(trace, config).row()


@pytest.mark.slow
def test_given_a_trace_when_served_in_simulated_time_then_load_shows(chat_trace: Trace) -> None:
    calm, busy = serve(chat_trace), serve(chat_trace, speed=200.0)
    assert calm["served"] == busy["served"] == len(chat_trace)
    assert calm["ttft_p50"] < busy["ttft_p50"]
    assert calm["simulated_seconds"] > busy["simulated_seconds"]
    assert calm["goodput"] == 1.0
    assert serve(chat_trace, slo_ttft=1e-9)["goodput"] == 0.0


@pytest.mark.slow
def test_given_the_same_trace_then_serving_is_deterministic_and_reuses_like_replay(chat_trace: Trace) -> None:
    first, second = serve(chat_trace), serve(chat_trace)
    assert first == second
    sequential = replay(chat_trace, ReplayConfig("lru", 400)).token_hit_ratio
    assert first["serving_token_hit_ratio"] == pytest.approx(sequential, abs=0.05)


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [{}, {"speed": 30.0}, {"speed": 200.0, "max_sequences": 8}])
def test_given_decode_steps_run_as_one_then_every_time_and_hit_is_that_of_single_steps(
    chat_trace: Trace, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    together = serve(chat_trace, **options)
    monkeypatch.setattr(serving, "MAX_AHEAD", 1)
    assert together == pytest.approx(serve(chat_trace, **options), rel=1e-9)


def test_given_a_prompt_larger_than_the_cache_then_it_is_refused_and_counted() -> None:
    trace = TraceBuilder("t", unit=16).add(0, list(range(500)), 8000, 1).add(1, [1], 16, 1).build()
    row = serve(trace)
    assert (row["refused"], row["served"]) == (1, 1)


def test_given_serving_without_a_size_then_it_is_refused(chat_trace: Trace) -> None:
    with pytest.raises(InvalidArgumentError, match="finite"):
        ServingConfig(ReplayConfig("lru"), [LayerSpec(1, 16)], LinearCostModel())


@pytest.mark.parametrize("name", ["first_blocks", "output_tokens"])
def test_given_lengths_that_vary_beyond_reason_then_no_trace_is_made(name: str) -> None:
    model = replace(WorkloadModel(), **{name: (60.0, 1.0)})
    with pytest.raises(TraceError, match=r"was drawn for exp\(60.0"):
        synthesise(model, 10)
