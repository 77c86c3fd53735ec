"""Where a start goes, who is told what takes long, and `kvpool warm`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import tiny_model

from kvpool.cli import main
from kvpool.engine import Engine, starting
from kvpool.engine.starting import Start
from kvpool.model.compiled_layers import compile_each_layer, layers_folder

TORCHS_OWN = str(Path(tempfile.gettempdir(), "torchinductor_somebody"))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told, at once instead of after two seconds."""
    lines: list[str] = []
    monkeypatch.setattr(starting, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(starting, "_tell", lines.append)
    return lines


def test_given_a_stage_that_takes_long_then_it_is_told_when_it_does_and_when_it_is_over(told: list[str]) -> None:
    with Start() as start:
        start.stage("waiting")
        done = threading.Event()
        while not told:
            assert not done.wait(0.001)
        assert told == ["waiting ..."]
        start.stage("working")
        assert told[1].startswith("waiting: ")
    assert list(start.seconds) == ["waiting", "working"]


def test_given_a_stage_that_comes_twice_then_its_times_are_added() -> None:
    start = Start()
    start.seconds["loading"] = 7.0
    start.stage("loading")
    start.end()
    start.end()  # nothing is left to end
    assert start.seconds["loading"] >= 7.0


def test_given_a_short_stage_then_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(starting, "_tell", lines.append)
    with Start() as start:
        start.stage("short")
    assert lines == []


@pytest.mark.parametrize("case", ["shown", "quiet", "log", "terminal", "file"])
def test_given_a_command_a_log_or_a_terminal_then_progress_goes_there(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Start, "shown", {"shown": True, "quiet": False}.get(case))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: case == "terminal", raising=False)
    if case == "log":
        caplog.set_level(logging.INFO, "kvpool")
    starting._tell("working ...")
    error = capsys.readouterr().err
    assert error == {"shown": "working ...\n", "terminal": "kvpool: working ...\n"}.get(case, "")
    assert ("working ..." in caplog.text) == (case == "log")


def test_given_an_engine_then_it_says_where_its_start_went() -> None:
    with Engine(tiny_model("llama"), kv_blocks=16) as engine:
        assert [name.split()[0] for name in engine.start_seconds] == [
            "loading",
            "checking",
            "allocating",
            "compiling",
            "opening",
        ]


def test_given_a_model_then_warm_says_how_long_it_took_and_where_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "layers"))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one").write_bytes(bytes(2**20))
    tiny_model("llama").save_pretrained(tmp_path / "model")
    assert main(["warm", "--model", str(tmp_path / "model"), "--memory", "1MiB", "--device", "cpu", "-q"]) == 0
    out = capsys.readouterr().out
    assert "checking the model" in out
    assert f"1.0 MiB of kernels: {tmp_path / 'kernels'}" in out
    assert f"0.0 MiB of layers: {tmp_path / 'layers'}" in out


def folder_of_torch() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # seconds

    return cache_dir()


def test_given_no_folder_then_the_one_that_torch_chooses_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path))
    own = folder_of_torch()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == own
    assert layers_folder() == tmp_path / "layers"


@pytest.mark.parametrize("given", ["", TORCHS_OWN])  # torch writes its own into the variable, too
def test_given_no_folder_for_layers_then_they_are_kept_beside_converted_models(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path))

    compile_each_layer(tiny_model("llama"), num_layers=2)

    assert folder_of_torch() == str(layers_folder()) == str(tmp_path / "layers")


def test_given_a_folder_for_layers_then_torch_keeps_them_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))

    compile_each_layer(tiny_model("llama"), num_layers=2)

    assert folder_of_torch() == str(tmp_path / "mine")


def test_given_no_directory_that_can_be_written_then_layers_stay_in_torchs_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", TORCHS_OWN)
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "file"))

    assert layers_folder() == Path(TORCHS_OWN)
