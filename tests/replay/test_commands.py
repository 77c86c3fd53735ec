"""What people type: mistakes are found before anything runs for long, and every oddity of a file is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.cli import main
from kvpool.recording.playback import play_recording
from kvpool.replay import Trace, TraceBuilder, TraceRecorder, read_trace, write_trace
from kvpool.replay.replay_command import _remarks

LINES = [
    '{"timestamp": 5000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}',
    '{"timestamp": 1000, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 2]}',
    "not json",
    '{"timestamp": 2000, "input_length": 0, "output_length": 5, "hash_ids": []}',
    '{"timestamp": 2000, "input_length": -3, "output_length": 5, "hash_ids": [4]}',
    '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": ["a", [1]]}',
]


@pytest.fixture
def odd_trace(tmp_path: Path) -> Path:
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path


def test_given_an_odd_file_then_each_oddity_is_told_with_its_line(
    odd_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "info", str(odd_trace), "--json", "-"]) == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert problems[:3] == [
        "line 3 is skipped: it is not JSON (Expecting value at column 1)",
        "line 5 is skipped: input_length=-3 must be at least 0",
        "line 6 is skipped: ids must be integers or strings",
    ]
    assert [sentence.split()[0] for sentence in problems[3:]] == ["1", "1", "1"]
    assert main(["replay", str(odd_trace), "--max-errors", "2"]) == 2
    assert "more than 2 broken lines" in capsys.readouterr().err


def test_given_the_same_file_compressed_under_a_wrong_name_then_it_is_read(odd_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_bytes(gzip.compress(odd_trace.read_bytes()))
    assert read_trace(tmp_path / "odd.txt").ids.tolist() == read_trace(odd_trace).ids.tolist()


@pytest.mark.parametrize("content", [b"", b"no\nrequest\n", bytes(range(128, 250))])
def test_given_a_file_without_requests_then_every_command_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "none.jsonl"
    path.write_bytes(content)
    for words in (["replay", str(path)], ["trace", "info", str(path)], ["trace", "synth", "x", "--like", str(path)]):
        assert main(words) == 2
        assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "best"], "unknown eviction policy 'best'"),
        (["--capacity", "5k:1k"], "is empty"),
        (["--tiers", "host=5"], "has no gpu tier"),
        (["--tiers", "gpu=many"], "write a number above 0"),
        (["--host-write", "through"], "does nothing without a host"),
        (["--policy", "lru,lfu", "--objective", "seconds"], "needs a policy that knows what blocks cost"),
        (["--tiers", "gpu=5,host=5", "--host-write", "around"], "must be 'back' or 'through'"),
        (["--report", "nowhere/out.html"], "there is no folder nowhere"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["--json", "."], "that is a folder"),
        (["--costs", "nowhere.json"], "kvpool bench"),
        (["--max-errors", "-1"], "--max-errors"),
        (["--limit", "0"], "--limit"),
        (["--tiers", "gpu=5,gpu=6"], "names gpu twice"),
        (["--tiers", "gpu=5", "--capacity", "6"], "--capacity would do nothing with --tiers"),
        (["--kv-dtype", "fp8"], "--kv-dtype would do nothing without --model"),
        (["--speed", "2", "--slo-ttft", "1"], "--speed, --slo-ttft would do nothing without --gpu or --costs"),
        (["--all-reduce-latency", "9"], "--all-reduce-latency would do nothing without --tensor-parallel"),
        (["--exact", "--capacity", "9", "--report", "out.html"], "--capacity, --report would do nothing with --exact"),
        (["--csv", "-", "--json", "-"], "both go to stdout"),
        (["--csv", "rows", "--json", "./rows"], "rows and ./rows are one file"),
    ],
)
def test_given_a_wrong_option_then_it_is_refused_before_the_trace_is_read(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["replay", "a-trace-that-is-not-there.jsonl", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "not-there" not in error


def test_given_tokens_then_bounds_count_their_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.jsonl"
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [9, 9], [1, 2, 3, 4, 6, 7, 8, 8, 8], [1, 2, 3, 4, 6, 7]]
    path.write_text("\n".join(json.dumps({"timestamp": n, "tokens": p}) for n, p in enumerate(prompts)) + "\n")
    words = ["replay", str(path), "--block-size", "2", "--capacity", "4,inf", "--json", "-", "--workers", "1"]
    assert main(words) == 0
    rows = {(row["policy"], row["capacity"]): row for row in json.loads(capsys.readouterr().out)}
    assert {row["requested_blocks"] for row in rows.values()} == {3 + 3 + 1 + 5 + 3}
    assert rows["lru", None]["hit_blocks"] == rows["infinite", None]["hit_blocks"] == 2 + 3 + 3
    assert rows["lru", 4]["hit_blocks"] <= rows["optimum", 4]["hit_blocks"] <= 8
    assert rows["infinite", None]["requested_tokens"] == sum(map(len, prompts))


def test_given_tiers_then_each_stands_beside_its_optimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "turns.jsonl"
    ids = [[1, 2], [3, 4], [5, 6], [1, 2], [3, 4], [5, 6], [1, 2]]
    lines = [{"timestamp": n, "input_length": 32, "output_length": 1, "hash_ids": each} for n, each in enumerate(ids)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert (
        main(["replay", str(path), "--policy", "lru", "--tiers", "gpu=2,host=2", "--json", "-", "--workers", "1"]) == 0
    )
    shown = capsys.readouterr()
    lru, optimum, _ = json.loads(shown.out)
    assert (lru["hit_blocks_gpu"], lru["hit_blocks_host"]) == (0, 0)
    assert (optimum["policy"], optimum["hit_blocks_gpu"], optimum["hit_blocks_host"]) == ("optimum", 0, 4)
    assert optimum["hit_blocks"] == 4
    assert main(["replay", str(path), "--tiers", "gpu=2,host=4", "--workers", "1"]) == 0
    assert "GPU hits host hits" in " ".join(capsys.readouterr().out.split())


HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.mark.slow
def test_given_a_model_whose_layers_keep_a_state_then_rules_for_checkpoints_stand_beside_attention_alone(
    chat_trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "chat.jsonl", tmp_path / "config.json"
    write_trace(chat_trace, path)
    model.write_text(json.dumps(HYBRID))
    command = ["replay", str(path), "--policy", "lru", "--capacity", "200", "--model", str(model), "--workers", "1"]
    command.append("--no-bounds")
    assert main([*command, "--checkpoint-every", "none,64", "--gpu", "h200", "--json", "-"]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert [(row["checkpoints"] is None, row["checkpoint_every"]) for row in rows] == [
        (False, None),
        (False, 64),
        (True, None),
    ]
    assert ["ttft_p50" in row for row in rows] == [True, True, False]
    assert 0 < rows[0]["hit_blocks"] < rows[2]["hit_blocks"]
    assert "A capacity is the memory of so many blocks" in shown.err
    assert f"{rows[1]['hit_ratio']:.4f}" in shown.err  # numbers are whole beside the longest label
    plan = ["plan", "--model", str(model), "--gpu", "h200", "--trace", str(path), "--policy", "lru", "--json", "-"]
    assert main(plan) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["numbers"]["checkpoint_bytes"] == 3 * (2 * 64 * 4 + 4 * 4 * 8 * 8)
    assert made["trace"]["curve"][-1]["hit_ratio"] > 0


def test_given_a_rule_for_checkpoints_without_states_then_it_is_refused(
    odd_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(odd_trace), "--checkpoint-every", "1k"]) != 0
    assert "--checkpoint-every needs a --model of which some layers keep a state" in capsys.readouterr().err


def test_given_ids_that_repeat_then_an_infinite_cache_evicts_nothing(
    odd_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(odd_trace), "--capacity", "inf", "--json", "-", "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["evicted_blocks"] == 0


def test_given_lengths_only_then_synth_keeps_arrivals_and_lengths_and_says_that_nothing_is_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = tmp_path / "azure.csv", tmp_path / "made.jsonl"
    lines = [f"2023-11-16 18:15:{second:02}.000000,{600 + second},{second + 1}" for second in range(60)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    assert main(["trace", "synth", str(made), "--like", str(path), "--requests", "200"]) == 0
    assert "share nothing" in capsys.readouterr().err
    trace = read_trace(made)
    assert trace.num_unique == trace.num_ids
    assert trace.unit == 16
    assert trace.input_lengths.mean() == pytest.approx(630, rel=0.1)
    assert len(trace) / trace.duration == pytest.approx(1.0, rel=0.2)


def test_given_a_recording_that_lacks_something_then_exact_replay_says_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 16)], block_size=4, gpu_blocks=64), policy="s3fifo")
    warm = manager.allocate("warm", range(9))
    manager.commit(warm)
    manager.free(warm)
    path = tmp_path / "live.kvtrace"
    with TraceRecorder(path, max_bytes=600).attach(manager):
        for number in range(50):
            manager.free(manager.allocate(number, range(100, 120)))
    _, notes = play_recording(path)
    assert notes[0].startswith("1 cached runs are older than the recording")
    assert notes[1] == "the recording stopped early: max_bytes is reached"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert main(["replay", str(path), "--exact", "--csv", str(tmp_path / "row.csv")]) == 0
    assert "has no end" in " ".join(capsys.readouterr().out.split())
    header = (tmp_path / "row.csv").read_text().splitlines()[0]
    assert header.startswith("requests,") or ",requests," in header


def test_given_a_policy_given_as_an_object_then_its_name_is_recorded(tmp_path: Path) -> None:
    manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 16)], block_size=4, gpu_blocks=8), policy="s3fifo")
    TraceRecorder(tmp_path / "t").attach(manager).close()
    assert json.loads((tmp_path / "t").read_bytes().splitlines()[0])["policy"] == "s3fifo"


@pytest.mark.parametrize(
    ("seconds", "ttft", "is_told"), [(110.0, 99.0, False), (111.0, 10.0, False), (111.0, 11.0, True)]
)
def test_given_more_than_can_be_served_in_its_time_and_long_waits_then_the_overload_is_told(
    seconds: float, ttft: float, is_told: bool
) -> None:
    trace = TraceBuilder("slow", unit=16).add(0, [1], 16, 1).add(200_000, [2], 16, 1).build()
    row = {"simulated_seconds": seconds, "ttft_p50": 1.0, "ttft_p90": ttft}
    told = _remarks(trace, [], [{}, {**row, "simulated_seconds": 90.0}, row], speed=2.0)
    sentence = f"Overload in 1 of 2 runs: requests arrive in 100 s and take up to {seconds:.0f} s to serve"
    assert [each.partition(", so")[0] for each in told] == [sentence] * is_told
