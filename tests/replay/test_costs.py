"""Costs of a machine: written by `kvpool bench`, read by replay and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool import DType, LayerSpec, StatePart, StateSpec
from kvpool.cli import main
from kvpool.errors import InvalidArgumentError
from kvpool.replay import TraceBuilder, write_trace
from kvpool.replay.capacity_plan import PlanRequest, make_plan
from kvpool.replay.costs import costs_for
from kvpool.scheduling import LinearCostModel
from kvpool.scheduling.cost_model import Measurement, read_costs

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "torch_dtype": "float32",
}
TRUE = LinearCostModel(
    prefill_seconds_per_token=2e-4,
    seconds_per_token_pair=3e-8,
    decode_seconds_per_step=4e-3,
    decode_seconds_per_sequence=5e-4,
    decode_seconds_per_context_token=6e-7,
)


def measurement(**changes: Any) -> Measurement:
    found = {"machine": "a lab machine", "memory_bytes": 8 * 10**9, "model": "tiny", "parameters": 3_000_000}
    layers = (LayerSpec(2, 64, DType.FLOAT32),) * 4
    return Measurement(
        **{**found, "layers": layers, "costs": TRUE, "errors": {"prefill": 0.1, "decode": 0.2}, **changes}
    )


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"runs": [], "measurement": measurement().to_dict()}))
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    builder = TraceBuilder("t", unit=16)
    for number in range(12):
        builder.add(number * 100, [1, 2, 3, 10 + number % 3, 100 + number], 75, 5)
    write_trace(builder.build(), tmp_path / "trace.jsonl")
    return tmp_path / "trace.jsonl"


def test_given_a_measurement_when_written_and_read_then_it_is_the_same(costs_file: Path) -> None:
    found = read_costs(costs_file)
    assert found.to_dict() == measurement().to_dict()
    assert found.layers == measurement().layers


def test_given_layers_that_keep_a_state_then_a_measurement_has_them(tmp_path: Path) -> None:
    state = StateSpec((StatePart("conv", (8, 4), DType.BFLOAT16), StatePart("recurrent", (2, 8), DType.FLOAT32)))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"measurement": measurement(layers=(LayerSpec(2, 64), state)).to_dict()}))
    assert read_costs(path).layers == (LayerSpec(2, 64), state)
    path.write_text(json.dumps({"measurement": measurement().to_dict() | {"layers": [{"parts": [{"name": "conv"}]}]}}))
    with pytest.raises(InvalidArgumentError, match="is broken"):
        read_costs(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is not JSON"),
        ('{"runs": []}', "holds no measurement"),
        ("[1]", "holds no measurement"),
        ('{"measurement": {"machine": "x"}}', "lacks 'memory_bytes'"),
        (json.dumps({"measurement": {**measurement().to_dict(), "costs": {}}}), "lacks 'prefill_seconds_per_token'"),
        (json.dumps({"measurement": {**measurement().to_dict(), "layers": [{"heads": 2}]}}), "is broken"),
    ],
)
def test_given_another_file_then_it_is_refused_with_the_command_that_makes_one(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=f"{message}.*kvpool bench --model MODEL --json costs.json"):
        read_costs(tmp_path / "f.json")


@pytest.mark.parametrize("field", ["memory_bytes", "parameters"])
def test_given_a_measurement_of_nothing_then_it_is_refused_and_of_little_it_is_read(tmp_path: Path, field: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"measurement": measurement().to_dict() | {field: 0}}))
    with pytest.raises(InvalidArgumentError, match=f"is broken .*{field}"):
        read_costs(path)
    path.write_text(json.dumps({"measurement": measurement().to_dict() | {field: 1}}))
    assert getattr(read_costs(path), field) == 1


@pytest.mark.parametrize("field", ["machine", "model"])
def test_given_a_measurement_without_a_name_then_it_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"measurement": measurement().to_dict() | {field: 5}}))
    with pytest.raises(InvalidArgumentError, match=f"is broken .*{field}=5 must be a name"):
        read_costs(path)


def test_given_a_model_of_another_size_then_its_costs_are_not_the_measured_ones() -> None:
    for nearly in (2_860_000, 3_000_000, 3_140_000):
        measurement().check_model(nearly)
    for other in (2_840_000, 3_160_000):
        with pytest.raises(InvalidArgumentError, match="run `kvpool bench` with that model"):
            measurement().check_model(other)


def test_given_no_file_then_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot read .*nowhere\.json"):
        read_costs(tmp_path / "nowhere.json")


def test_given_a_measured_machine_then_the_plan_uses_its_memory_and_speeds() -> None:
    plan = make_plan(PlanRequest(CONFIG, measured=measurement(), context=1000))
    assert plan.numbers["recompute_seconds"] == pytest.approx(TRUE.prefill_seconds(1000, 0))
    assert plan.numbers["kv_budget_bytes"] < 8e9 * 0.9
    assert "a lab machine" in plan.why["recompute_seconds_per_token"]


def test_given_costs_of_another_model_then_they_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"measured with tiny of 9.00 B .* model with 0.00 B"):
        make_plan(PlanRequest(CONFIG, measured=measurement(parameters=9 * 10**9)))


def test_given_both_or_neither_of_gpu_and_costs_then_a_plan_is_refused() -> None:
    for gpu, measured in ((None, None), ("h200", measurement())):
        with pytest.raises(InvalidArgumentError, match="either the name of a GPU or the costs"):
            PlanRequest(CONFIG, gpu, measured=measured)
    with pytest.raises(InvalidArgumentError, match="measured on one"):
        PlanRequest(CONFIG, measured=measurement(), num_gpus=2)


def test_given_two_gpus_then_everything_takes_half_the_time() -> None:
    one, two = (costs_for(CONFIG, "a100", num_gpus=count)[0] for count in (1, 2))
    assert two.prefill_seconds(100, 0) == pytest.approx(one.prefill_seconds(100, 0) / 2)
    assert two.decode_seconds(4, 100) == pytest.approx(one.decode_seconds(4, 100) / 2)


def test_given_costs_then_replay_serves_with_them_and_leaves_out_the_infinite_cache(
    trace_file: Path, costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "replay",
        str(trace_file),
        "--costs",
        str(costs_file),
        "--capacity",
        "30,inf",
        "--policy",
        "lru",
        "--no-bounds",
        "--workers",
        "1",
    ]
    assert main([*words, "--json", "-", "--quiet"]) == 0
    finite, infinite = json.loads(capsys.readouterr().out)
    # A cold prompt of 75 tokens, alone; those after it reuse three blocks, so the median is below it.
    assert 0 < finite["ttft_p50"] < TRUE.prefill_seconds(75, 0) + 1e-6
    assert finite["offloaded_bytes"] == 0
    assert "ttft_p50" not in infinite
    assert main(words) == 0
    assert "served in simulated time" in capsys.readouterr().out


def test_given_gpu_and_costs_or_a_gpu_without_a_model_then_the_error_says_what_to_give(
    trace_file: Path, costs_file: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replaying, planning = ["replay", str(trace_file)], ["plan", "--model", str(model_file)]
    for words, message in (
        ([*replaying, "--gpu", "h200"], "--gpu needs --model"),
        ([*replaying, "--gpu", "h200", "--costs", str(costs_file)], "not both"),
        (planning, "give --gpu NAME, or --costs FILE"),
        ([*planning, "--gpu", "voodoo2"], "kvpool bench"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_given_costs_then_the_plan_command_explains_where_they_come_from(
    model_file: Path, costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model_file), "--costs", str(costs_file), "--json", "-"]) == 0
    why = json.loads(capsys.readouterr().out)["why"]
    assert "measured on a lab machine with tiny" in why["recompute_seconds_per_token"]


def test_given_a_trace_and_tiers_then_the_plan_marks_what_each_tier_finds_and_the_knees(
    model_file: Path, costs_file: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json.loads(costs_file.read_text())
    plain["measurement"]["memory_bytes"] = 13_400_000  # leaves room for a few blocks behind the weights
    costs_file.write_text(json.dumps(plain))
    words = [
        "plan",
        "--model",
        str(model_file),
        "--costs",
        str(costs_file),
        "--trace",
        str(trace_file),
        "--policy",
        "lru",
    ]
    assert main([*words, "--host", "1MiB", "--context", "64", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["trace"]
    gpu, both = found["tiers"]["GPU"], found["tiers"]["GPU + host"]
    assert gpu["capacity"] < both["capacity"]
    assert gpu["hit_ratio"] <= both["hit_ratio"]
    assert set(found["knees"]) == {"on the GPU", "with lower tiers"}
    on_gpu, behind = found["knees"].values()
    assert on_gpu is None or on_gpu <= gpu["capacity"]
    assert behind is None or behind >= gpu["capacity"]


def test_given_weights_that_do_not_fit_then_the_plan_says_so_with_and_without_a_trace(
    model_file: Path, costs_file: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json.loads(costs_file.read_text())
    plain["measurement"]["memory_bytes"] = 1_000_000
    costs_file.write_text(json.dumps(plain))
    words = ["plan", "--model", str(model_file), "--costs", str(costs_file)]
    for more in ([], ["--trace", str(trace_file)]):
        assert main([*words, *more]) == 0
        printed = capsys.readouterr().out
        assert "The weights alone do not fit" in printed
    assert "There is no hit curve" in printed
