"""The engine's commands, run in this process on a tiny model in a directory."""

from __future__ import annotations

import errno
import io
import json
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("typer")

from kvpool.cli import main  # noqa: E402
from kvpool.engine import text_commands  # noqa: E402


def run(*words: str, model: str) -> int:
    return main([words[0], *words[1:], "--model", model, "--device", "cpu", "--memory", "4MiB"])


def test_given_one_prompt_then_its_text_is_printed_and_the_summary_goes_to_stderr(
    model_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "w5 w6 w7", "--max-tokens", "4", model=model_directory) == 0
    printed = capsys.readouterr()
    assert len(printed.out.split()) == 4
    assert "tok/s" in printed.err


class ClosedPipe(io.StringIO):
    """A stdout whose reader has gone after the first text."""

    def write(self, text: str) -> int:
        if self.tell():
            raise BrokenPipeError
        return super().write(text)


def test_given_a_reader_that_goes_away_then_the_answer_ends_without_a_word(
    model_directory: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", ClosedPipe())
    assert run("generate", "w5 w6 w7", "--max-tokens", "400", "--quiet", model=model_directory) == 1
    assert not caplog.records


def test_given_several_prompts_and_json_then_every_sample_is_in_it(
    model_directory: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("w5 w6\n\nw7 w8 w9\n")
    words = ("generate", "--file", str(file), "--max-tokens", "3", "-n", "2", "--temperature", "1", "--seed", "4")
    assert run(*words, "--json", "-", "--quiet", model=model_directory) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["prompt"] for result in results] == ["w5 w6", "w7 w8 w9"]
    assert all(len(sample["token_ids"]) == 3 for result in results for sample in result["samples"])
    assert all(len(result["samples"]) == 2 for result in results)


def test_given_prompts_on_stdin_then_they_are_read_line_by_line(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\nw3 w4\n"))
    assert run("generate", "--max-tokens", "2", "--quiet", model=model_directory) == 0
    assert capsys.readouterr().out.count("> w") == 2


@pytest.mark.parametrize("words", [("generate", "w1"), ("bench", "--requests", "1")])
def test_given_nowhere_to_write_then_the_command_says_so_before_it_loads_a_model(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(*words, "--json", str(tmp_path / "missing" / "out.json"), model="no such model") == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--record"])
def test_given_a_folder_where_a_file_belongs_then_the_command_says_so_before_it_loads_a_model(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("generate", "w1", option, str(tmp_path), model="no such model") == 2
    assert "is a folder" in capsys.readouterr().err


def test_given_a_terminal_that_cannot_show_a_character_then_the_answer_goes_on(
    model_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert run("generate", "w1 \N{SNOWMAN}", "w2", "--max-tokens", "2", "--quiet", model=model_directory) == 0
    sys.stdout.flush()
    assert b"> w1 ?" in shown.getvalue()


class FullDisk(io.StringIO):
    """A stdout that goes to a file on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_given_no_room_for_the_answer_then_the_error_is_one_line(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", FullDisk())
    assert run("generate", "w1", "--max-tokens", "2", "--quiet", model=model_directory) == 1
    assert capsys.readouterr().err.strip() == "kvpool: [Errno 28] No space left on device"


def test_given_ctrl_c_that_a_library_swallows_while_it_loads_then_the_command_ends_and_the_engine_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    class Loading:
        def __init__(self, model: object, **settings: object) -> None:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

        def close(self) -> None:
            closed.append("engine")

    monkeypatch.setattr("kvpool.engine.engine.Engine", Loading)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
    try:
        assert main(["generate", "w1", "--quiet"]) == 130
        assert closed == ["engine"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_given_no_prompt_then_the_error_is_one_line(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run("generate", model=model_directory) == 2
    assert capsys.readouterr().err.strip().endswith("one per line on stdin")


def test_given_a_file_that_is_no_text_then_the_error_names_it(
    model_directory: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.bin"
    file.write_bytes(b"w1 \xff")
    assert run("generate", "--file", str(file), model=model_directory) == 2
    assert "prompts.bin is no UTF-8 text" in capsys.readouterr().err


def test_given_a_terminal_and_no_prompt_then_it_says_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def read(self, size: int | None = -1) -> str:
            said.append(capsys.readouterr().err)
            return ""

    said: list[str] = []
    monkeypatch.setattr("sys.stdin", Terminal())
    for words in (["generate"], ["generate", "-"], ["generate", "--quiet"]):
        assert main(words) == 2
        capsys.readouterr()
    assert said == ["reading prompts, one per line; Ctrl-D ends them\n"] * 2 + [""]


def test_given_stdin_that_is_no_text_then_the_error_names_it(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for errors, message in (("strict", "stdin is no UTF-8 text"), ("surrogateescape", "no Unicode text")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w1 \xff\n"), encoding="utf-8", errors=errors))
        assert run("generate", model=model_directory) == 2
        assert message in capsys.readouterr().err


def test_given_a_turn_that_is_no_text_then_the_chat_goes_on(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter([b"\xff".decode(errors="surrogateescape"), b"\xff", b"w1", b""])

    def read(prompt: str) -> str:
        words = next(said)
        return words if isinstance(words, str) else words.decode()

    monkeypatch.setattr("builtins.input", read)
    assert run("chat", "--max-tokens", "2", model=model_directory) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert ["no Unicode" in lines[0], "no UTF-8" in lines[1], "from the cache" in lines[2]] == [True] * 3


def test_given_a_model_that_takes_no_system_message_then_the_chat_has_none_unless_one_is_asked_for(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strict = tmp_path / "model"
    shutil.copytree(model_directory, strict)
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    (strict / "chat_template.jinja").write_text(refuse + (strict / "chat_template.jinja").read_text())
    said = iter(["w1", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert run("chat", "--max-tokens", "2", model=str(strict)) == 0
    printed = capsys.readouterr()
    assert "takes no system message" in printed.err
    assert "[0 of " in printed.out
    assert run("chat", "--system", "w9", model=str(strict)) == 2
    assert "System role not supported" in capsys.readouterr().err


def test_given_a_model_without_a_template_then_the_chat_says_so_before_anybody_has_typed(
    model_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("chat", model=str(Path(model_directory) / "config.json")) == 2
    assert "no chat template" in capsys.readouterr().err


def test_given_a_chat_then_later_turns_come_from_the_cache(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(["w1 " * 30, "w2 w3", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert run("chat", "--max-tokens", "20", "--temperature", "0", model=model_directory) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert lines[0].startswith("[0 of ")
    assert int(lines[1].split()[0][1:]) >= 32


def test_given_a_chat_that_gets_too_long_then_its_oldest_turns_are_forgotten_and_it_goes_on(
    model_directory: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(["w1 " * 200, "w2 " * 200, "w3 " * 200, "w4 " * 600, "w5", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert run("chat", "--max-tokens", "4", "--temperature", "0", model=model_directory) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert sum("from the cache" in line for line in lines) == 4  # all but the one that is too long by itself
    assert "forgot the first 1 turns" in lines[2]
    assert "can never run" in lines[3]
    assert "forgot" not in lines[4]  # what was too long by itself cost nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must lie in 1..2147483648, got 0"),
        (["-n", "0"], "-n must lie in 1..65536, got 0"),
        (["--temperature", "-1"], "--temperature must be a number in 0..100, got -1.0"),
        (["--top-p", "2"], "--top-p must be a number in 0..1, got 2.0"),
        (["--dtype", "int3"], "--dtype='int3' is no dtype for weights here"),
        (["--draft-tokens", "-1"], "--draft-tokens=-1 must be at least 0"),
    ],
)
def test_given_a_wrong_option_then_the_error_names_the_option(
    words: list[str], message: str, model_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "w5", "--quiet", *words, model=model_directory) == 2
    assert message in capsys.readouterr().err


def test_given_more_tokens_than_the_context_has_then_the_answer_is_cut_and_the_command_says_so(
    model_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "w5 " * 508, "--max-tokens", "100", "--temperature", "0", model=model_directory) == 0
    assert "--max-tokens=100 was cut to 5: the prompt has 508 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_given_a_benchmark_then_both_runs_and_their_percentiles_are_in_the_json(
    model_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("bench", "--requests", "4", "--prompt-tokens", "40", "--shared-tokens", "32", "--max-tokens", "4")
    assert run(*words, "--json", "-", "--quiet", model=model_directory) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["prefix_cache"] for run in runs] == [True, False]
    assert runs[0]["cached_prompt_share"] > runs[1]["cached_prompt_share"] == 0
    assert all(set(run["first_token_ms"]) == {"p50", "p90", "p99"} for run in runs)


def test_given_more_shared_tokens_than_a_prompt_has_then_the_benchmark_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("bench", "--prompt-tokens", "40", "--shared-tokens", "41", "--model", "nowhere")
    assert main(words) == 2
    assert "--shared-tokens is 41, more than --prompt-tokens 40" in capsys.readouterr().err


@pytest.mark.slow
def test_given_a_benchmark_with_json_then_the_model_is_loaded_once_and_its_costs_can_be_used(
    model_directory: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.engine import engine as module
    from kvpool.scheduling.cost_model import read_costs

    loaded = []
    load = module.load_model
    monkeypatch.setattr(
        module, "load_model", lambda source, **options: loaded.append(source) or load(source, **options)
    )
    path = tmp_path / "costs.json"
    words = ("bench", "--requests", "2", "--prompt-tokens", "20", "--max-tokens", "2")
    assert run(*words, "--json", str(path), model=model_directory) == 0
    assert "a decode step" in capsys.readouterr().out
    assert loaded[0] == model_directory
    assert not isinstance(loaded[1], str), "the second engine takes over the model of the first"
    found = read_costs(path)
    assert found.model == model_directory
    assert found.costs.prefill_seconds_per_token > 0
    assert found.costs.decode_seconds(4, 100) > 0
    assert found.memory_bytes > 2**28


def test_given_a_step_that_is_too_small_for_its_sequences_then_the_benchmark_says_so_instead_of_taking_a_larger_one(
    model_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("bench", "--requests", "1", "--prompt-tokens", "8", "--max-tokens", "2", "--no-compare")
    assert run(*words, "--max-tokens-per-step", "10", model=model_directory) == 2
    assert "--max-tokens-per-step=10 is less than --max-sequences=64" in capsys.readouterr().err
    assert run(*words, "--max-tokens-per-step", "10", "--max-sequences", "10", model=model_directory) == 0
    assert run(*words, "--max-sequences", "4000", model=model_directory) == 0


def test_given_a_cache_too_small_to_time_steps_then_the_benchmark_goes_on_without_costs(
    model_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--requests", "1", "--prompt-tokens", "8", "--max-tokens", "2", "--model", model_directory]
    limits = ["--device", "cpu", "--memory", "20KiB", "--max-sequences", "1", "--no-compare"]
    assert main([*words, *limits, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert "measurement" not in json.loads(printed.out)
    assert "no costs are written" in printed.err
    assert main([*words, *limits, "--costs"]) == 2


def test_given_a_model_that_is_not_there_then_the_error_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("generate", "w5 w6 w7", "--max-tokens", "40"), ("bench", "--requests", "1")])
def test_given_a_configuration_file_then_blocks_go_to_the_disk_that_it_names(
    words: tuple[str, ...], model_directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xxhash")
    file, blocks = tmp_path / "kvpool.toml", tmp_path / "blocks"
    file.write_text(f'[tiers]\ndisk = "{blocks}"\ndisk_bytes = "2MB"\ndisk_compression = "lz4"\ntimeout = 5\n')
    assert run(*words, "--quiet", "--config", str(file), model=model_directory) == 0
    capsys.readouterr()
    assert main(["tier", "stat", "--config", str(file), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] > 0


def test_given_a_wrong_configuration_then_the_command_says_so_before_it_loads_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text("[tiers]\ndisk = 'blocks'\ndisk_bytes = 'much'\n")
    assert run("generate", "w5", "--config", str(file), model="no such model") == 2
    assert f"{file}: tiers.disk_bytes = 'much' must be" in capsys.readouterr().err


def test_given_a_conversation_then_its_oldest_turn_leaves_and_the_system_message_stays() -> None:
    talk = [{"role": role, "content": number} for number, role in enumerate(("user", "assistant") * 2 + ("user",))]
    system = {"role": "system", "content": "be brief"}
    assert text_commands._without_oldest_turn(talk) == talk[2:]
    assert text_commands._without_oldest_turn(talk[4:]) == []
    assert text_commands._without_oldest_turn([system, *talk]) == [system, *talk[2:]]
    assert text_commands._without_oldest_turn([system, talk[4]]) == []
