"""Ranks in plans and replays: bytes of each, what a step adds up, and what other divisions would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import main
from kvpool.errors import InvalidArgumentError
from kvpool.replay.capacity_plan import PlanRequest, make_plan
from kvpool.replay.parallel import Interconnect, RankCosts

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 80 * 2 * 8 * 128 * 2
LINK = Interconnect(100e9, 20e-6, "measured")


def numbers(**request: Any) -> dict[str, float]:
    return make_plan(PlanRequest(**{"model": LLAMA_70B, "gpu": "h200", "link": LINK, **request})).numbers


def test_given_ranks_then_each_has_its_part_and_heads_that_are_too_few_are_copied() -> None:
    four, sixteen = (numbers(tensor_parallel=ranks) for ranks in (4, 16))
    assert four["kv_bytes_per_token"] == TOKEN_BYTES / 4
    assert sixteen["kv_bytes_per_token"] == TOKEN_BYTES / 8  # two ranks keep the same head
    assert four["rank_weights_bytes"] == four["weights_bytes"] / 4
    assert four["kv_budget_bytes"] == pytest.approx(0.9 * 141e9 - four["weights_bytes"] / 4, abs=1)
    usable = 0.99 * four["kv_budget_bytes"]  # above the watermark
    assert four["sequences_that_fit"] == usable // (8192 * four["kv_bytes_per_token"])
    plan = make_plan(PlanRequest(LLAMA_70B, "h200", tensor_parallel=16))
    assert "4 of 64 query heads and 1 of 8 KV heads each; 2 ranks keep the same one" in plan.why["ranks"]
    assert "not measured" in plan.why["all_reduce_seconds"]


def test_given_ranks_then_a_step_takes_its_part_of_reading_and_two_all_reduces_a_layer() -> None:
    found = numbers(tensor_parallel=4, concurrency=10)
    assert (found["all_reduces_per_step"], found["all_reduce_bytes"]) == (160, 10 * 8192 * 2)
    reducing = 160 * (20e-6 + 2 * 3 / 4 * 10 * 8192 * 2 / 100e9)
    assert found["all_reduce_seconds"] == pytest.approx(reducing)
    costs = RankCosts.of(LLAMA_70B, "h200", 4, LINK)
    alone = costs.alone.decode_seconds(10, 10 * 8192)
    assert found["decode_step_seconds"] == pytest.approx(alone / 4 + reducing)
    # Stages read all weights for each part of the sequences, but add nothing up.
    sends = 4 * (20e-6 + 2.5 * 8192 * 2 / 100e9)
    rest = alone - costs.alone.decode_seconds_per_step
    assert found["pipeline_step_seconds"] == pytest.approx(costs.alone.decode_seconds_per_step + rest / 4 + sends)
    moved = 80 * 3 * 20e-6 + 3 / 4 * 8192 * TOKEN_BYTES / 100e9
    assert found["context_prefill_seconds"] == pytest.approx(costs.alone.prefill_seconds(8192, 0) / 4 + moved)


def test_given_a_slow_link_then_a_pipeline_pays_and_with_a_fast_one_it_does_not() -> None:
    slow, fast = (
        numbers(tensor_parallel=8, concurrency=64, link=Interconnect.of("h200", gigabytes, latency))
        for gigabytes, latency in ((1, 500), (360, 10))
    )
    assert slow["pipeline_step_seconds"] < slow["decode_step_seconds"]
    assert fast["pipeline_step_seconds"] > fast["decode_step_seconds"]


def test_given_engines_side_by_side_then_their_room_is_added_up() -> None:
    one, three = (numbers(model={**LLAMA_70B, "num_hidden_layers": 8}, data_parallel=count) for count in (1, 3))
    assert three["all_sequences_that_fit"] == 3 * one["sequences_that_fit"]
    assert "all_sequences_that_fit" not in one


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"tensor_parallel": 7}, "does not divide the 64 attention heads"),
        (
            {
                "model": {**LLAMA_70B, "num_key_value_heads": 4, "num_attention_heads": 60, "head_dim": 128},
                "tensor_parallel": 6,
            },
            "KV heads",
        ),
        ({"tensor_parallel": 2, "num_gpus": 2}, "num_gpus adds up GPUs"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
    ],
)
def test_given_ranks_that_cannot_be_then_the_plan_is_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        numbers(**request_)


def test_given_ranks_then_the_commands_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, trace = tmp_path / "config.json", tmp_path / "trace.jsonl"
    model.write_text(json.dumps({**LLAMA_70B, "num_hidden_layers": 4}))
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [1, number]} for number in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(model), "--gpu", "h200", "--tensor-parallel", "4"]
    given = ["--all-reduce-bandwidth", "50", "--all-reduce-latency", "30"]
    assert main(["plan", *options, *given, "--trace", str(trace), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["numbers"]["all_reduce_seconds"] == pytest.approx(8 * (30e-6 + 1.5 * 8192 * 2 / 50e9))
    assert told["trace"]["curve"][0]["bytes"] == told["trace"]["curve"][0]["capacity"] * 512 * 4 * 2 * 2 * 128 * 2

    def served(*more: str) -> Any:
        assert main(["replay", str(trace), "--capacity", "100", "--policy", "lru", *more, "--json", "-", "-q"]) == 0
        return json.loads(capsys.readouterr().out)[0]

    assert served(*options)["ttft_p50"] < served(*options[:4])["ttft_p50"]
    assert main(["replay", str(trace), "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel 2 needs --model config.json" in capsys.readouterr().err
