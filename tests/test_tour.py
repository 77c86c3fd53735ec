"""The tour runs to its end, shows every scene, and draws without colours where there is no terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC, DEMOS = ROOT / "src", ROOT / "examples" / "demos"
sys.path.insert(0, str(DEMOS))

import tour  # noqa: E402


def run_demo(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMOS / "tour.py"), *arguments],
        capture_output=True,
        text=True,
        encoding=encoding,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONIOENCODING": encoding},
    )


def test_given_no_terminal_when_the_demo_runs_then_every_scene_is_shown() -> None:
    result = run_demo("--fast")
    assert result.returncode == 0, result.stderr
    assert re.findall(r"^(\d)\. ", result.stdout, re.MULTILINE) == list("12345678")
    assert result.stdout.count("→ ") >= 8
    for fact in ("together 13 instead of 19", "the fork took 0 blocks", "system prompt cached: 96 of 96", "20 back"):
        assert fact in result.stdout
    assert "Every invariant holds" in result.stdout
    assert "\x1b[" not in result.stdout


def test_given_a_stream_without_arrows_when_the_demo_runs_then_it_ends_well() -> None:
    result = run_demo("--fast", encoding="ascii")
    assert result.returncode == 0, result.stderr
    assert "Every invariant holds" in result.stdout


def test_given_help_when_asked_then_it_explains_itself() -> None:
    result = run_demo("--help")
    assert result.returncode == 0
    assert "--fast" in result.stdout


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("1", False)])
def test_given_a_terminal_then_colours_obey_no_color(
    no_color: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert tour.main(["--fast"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) == coloured


def test_given_blocks_in_every_state_when_drawn_then_each_has_its_symbol() -> None:
    shown = tour.Tour(tour.Screen(colour=False, pause_seconds=0.0))
    shown.admit("A", tour.SYSTEM)
    shown.board.symbols()
    shown.manager.free(shown.manager.get("A"))
    shown.manager.cache.pin(tour.SYSTEM[:32])
    shown.admit("B", [9] * 40)
    shown.manager.fork(shown.manager.get("B"), "C")
    assert "".join(shown.board.symbols()[:12]) == "**aaaa###..."


@pytest.mark.parametrize(("arguments", "seconds"), [([], 1.5), (["--fast"], 0.0)])
def test_given_a_terminal_then_the_tour_pauses_unless_it_shall_be_fast(
    arguments: list[str], seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert tour.main(arguments) == 0
    assert {pause for pause in pauses if pause != 0} == ({seconds} if seconds else set())  # a look at a pool waits 0
