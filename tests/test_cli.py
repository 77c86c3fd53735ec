"""The command line: fast help, lazy commands, one line for what is refused; trace, replay and plan end to end."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import kvpool
from kvpool.cli import COMMANDS, main

SRC = Path(__file__).resolve().parent.parent / "src"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    lines = []
    for number in range(60):
        ids = [*range(number % 4 * 100, number % 4 * 100 + 3 + number // 4)]
        lines.append({"timestamp": number * 500, "input_length": len(ids) * 16, "output_length": 4, "hash_ids": ids})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_given_no_command_then_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["bench", "serve"]], ids=" ".join)
def test_given_eighty_columns_then_every_help_fits(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if len(line) > 80] == []


def test_given_help_then_no_command_is_imported() -> None:
    script = (
        "import sys; from kvpool.cli import main; main(['--help']); print([m for m in sys.modules if 'replay' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SRC)}
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_given_an_unknown_command_or_file_then_the_status_and_the_line_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["fly"]) == 2
    assert main(["replay", str(tmp_path / "nowhere.jsonl")]) == 2
    assert "cannot open" in capsys.readouterr().err


def test_given_a_trace_when_replayed_then_json_has_one_row_per_run(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace_file), "--policy", "lru,fifo", "--capacity", "20,inf", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("lru", 20),
        ("lru", None),
        ("fifo", 20),
        ("fifo", None),
        ("optimum", 20),
        ("optimum", None),
        ("infinite", None),
    ]
    first = rows[0]
    assert {"trace", "requests", "requested_blocks", "hit_blocks", "hit_ratio"} <= set(first)
    assert first["hit_ratio"] == first["hit_blocks"] / first["requested_blocks"]
    assert first["requests"] == 60


def test_given_one_or_two_workers_then_the_rows_are_the_same(trace_file: Path, tmp_path: Path) -> None:
    for workers in ("1", "2"):
        arguments = ["replay", str(trace_file), "--policy", "lru,s3fifo", "--capacity", "10:50", "--workers", workers]
        assert main([*arguments, "--csv", str(tmp_path / f"{workers}.csv"), "-q"]) == 0
    one, two = ((tmp_path / f"{workers}.csv").read_text() for workers in "12")
    assert one == two
    assert len(list(csv.DictReader(one.splitlines()))) == 13


def test_given_tiers_then_lower_ones_add_hits(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["replay", str(trace_file), "--policy", "lru", "--tiers", "gpu=20,host=100", "--json", "-", "--no-bounds"])
        == 0
    )
    [row] = json.loads(capsys.readouterr().out)
    assert row["hit_blocks_host"] > 0
    assert main(["replay", str(trace_file), "--tiers", "host=100"]) == 2
    assert "no gpu tier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--policy", "magic", "unknown eviction policy"),
        ("--capacity", "lots", "--capacity is 'lots'"),
        ("--capacity", "9k:1k", "is empty"),
        ("--block-size", "24", "no multiple"),
        ("--gpu", "h200", "needs --model"),
    ],
)
def test_given_a_wrong_option_then_the_message_names_it(
    trace_file: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert main(["replay", str(trace_file), option, value, "--workers", "1"]) == 2
    assert message in capsys.readouterr().err


def test_given_a_gpu_and_a_model_then_serving_is_simulated(
    trace_file: Path, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--capacity", "100", "--gpu", "h200", "--model", str(model_file), "--json", "-", "--no-bounds"]
    assert main(["replay", str(trace_file), "--policy", "lru", *options]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["served"] == 60
    assert 0 < row["ttft_p50"] <= row["ttft_p99"]
    assert 0 <= row["goodput"] <= 1


@pytest.mark.slow
def test_given_a_report_and_plots_then_one_page_and_pictures_are_written(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "out.html"
    arguments = ["replay", str(trace_file), "--policy", "lru,adaptive", "--capacity", "10,20,50", "--workers", "1"]
    assert main([*arguments, "--report", str(page), "--plots", str(tmp_path / "plots"), "-q"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") >= 5
    assert "<script" not in text
    assert "src=" not in text
    assert 'name="viewport"' in text
    assert {path.suffix for path in (tmp_path / "plots").iterdir()} == {".png", ".svg"}


def test_given_a_trace_then_info_convert_and_synth_work(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "info", str(trace_file), "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["tokens_per_id"]) == (60, 16)
    assert main(["trace", "convert", str(trace_file), str(tmp_path / "c.jsonl.gz"), "--limit", "10"]) == 0
    assert main(["trace", "info", str(tmp_path / "c.jsonl.gz"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 10
    made = str(tmp_path / "s.jsonl")
    assert main(["trace", "synth", made, "--like", str(trace_file), "--requests", "200", "--rate", "5"]) == 0
    assert main(["trace", "info", made, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 200


def test_given_an_azure_trace_then_info_says_what_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert main(["trace", "info", str(path)]) == 0
    assert "not known" in capsys.readouterr().out
    assert main(["trace", "convert", str(path), str(tmp_path / "x")]) == 2


def test_given_a_model_and_a_gpu_then_plan_explains_every_number(
    model_file: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpu", "h200", "--kv-dtype", "fp8", "--context", "32k", "--concurrency", "200", "--host", "512GB"]
    assert main(["plan", "--model", str(model_file), *options, "--trace", str(trace_file), "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["numbers"]["kv_bytes_per_token"] == 32 * 2 * 8 * 128
    assert made["numbers"]["sequences_that_fit"] == 51
    assert made["numbers"]["host_sequences"] == 256
    assert set(made["why"]) == set(made["numbers"])
    assert made["verdict"].startswith("51 of 200 sequences")
    assert made["trace"]["knee"] in [None, *(point["capacity"] for point in made["trace"]["curve"])]


def test_given_a_recording_then_exact_replay_gives_its_counters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    from kvpool.replay import TraceRecorder

    manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 16)], block_size=4, gpu_blocks=64))
    path = tmp_path / "live.kvtrace"
    with TraceRecorder(path).attach(manager):
        for name in range(3):
            handle = manager.allocate(name, list(range(12)))
            manager.commit(handle)
            manager.free(handle)
    assert main(["replay", str(path), "--exact", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_blocks"] == dict(manager.stats().hit_blocks)
    assert main(["replay", str(path), "--block-size", "4", "--capacity", "64", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["hit_blocks"] == sum(manager.stats().hit_blocks.values())


@pytest.mark.parametrize("word", ["doctor", "--version"])
def test_given_the_core_alone_then_what_is_installed_is_still_said(word: str) -> None:
    script = f"import sys; sys.modules['typer'] = None; from kvpool.cli import main; sys.exit(main(['{word}']))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"kvpool {kvpool.__version__} (")


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("serve", "fastapi", "server"),
        ("serve", "typer", "cli"),
        ("bench", "torch", "hf"),
        ("warm", "torch", "hf"),
        ("chat", "torch", "hf"),
        ("generate", "torch", "hf"),
    ],
)
def test_given_a_package_that_is_missing_then_the_extra_that_brings_it_is_named(
    command: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_app(arguments: list[str]) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("kvpool.cli.build_app", no_app)
    assert main([command, "--help"]) == 2
    said = f"kvpool: the command line needs {missing}: pip install '.[{extra}]' in a checkout of kvpool\n"
    assert capsys.readouterr().err == said


def test_given_no_torch_when_an_engine_is_made_then_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kvpool.engine.engine", None)
    assert main(["generate", "Hello"]) == 2
    assert capsys.readouterr().err.endswith(
        "kvpool: an engine needs kvpool.engine.engine: pip install '.[hf]' in a checkout of kvpool\n"
    )


def test_given_an_interrupt_while_a_command_loads_then_no_traceback_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpool.cli.import_module", interrupted)
    assert main(["replay", "trace.jsonl"]) == 130
    assert capsys.readouterr().err == ""


def test_given_a_terminal_of_eighty_columns_then_help_shows_every_commands_line_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.partition("Commands:\n")[2].splitlines()]
    assert lines == [[name, command.help] for name, command in COMMANDS.items()]
