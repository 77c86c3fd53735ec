"""What 0.3 took out: errors name what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")

from kvpool.cli import main
from kvpool.engine.options import EngineOptions
from kvpool.engine.settings import as_settings
from kvpool.errors import ConfigError
from kvpool.removed import INSTEAD, INSTEAD_OF_COMMANDS, instead_of
from kvpool.server.serve_settings import read_serve


@pytest.mark.parametrize("name", INSTEAD)
def test_given_an_option_that_left_then_the_command_line_says_what_to_use_instead(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"--{name.replace('_', '-')}"
    assert main(["serve", option, "2"]) == 2
    assert f"kvpool: {option} left in 0.3: {INSTEAD[name]}" in capsys.readouterr().err


@pytest.mark.parametrize("name", INSTEAD)
def test_given_a_keyword_or_a_key_that_left_then_its_error_says_what_to_use_instead(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name} left in 0.3: "):
        as_settings({name: 2})
    (file := tmp_path / "kvpool.toml").write_text(f"[server]\n{name} = 2\n")
    with pytest.raises(ConfigError, match=f"{name} left in 0.3: "):
        read_serve(EngineOptions(config=file), None, None, {})


@pytest.mark.parametrize("name", INSTEAD_OF_COMMANDS)
def test_given_a_command_that_left_then_the_command_line_says_what_to_use_instead(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split(), "--url", "http://127.0.0.1:8000"]) == 2
    assert f"kvpool: kvpool {name} left in 0.3: {INSTEAD_OF_COMMANDS[name]}" in capsys.readouterr().err


def test_given_other_names_then_nothing_is_said() -> None:
    assert instead_of(["serve", "--disk", "tensors", "DIR"]) is None


def test_given_a_planner_then_its_option_for_other_engines_is_not_one_that_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--tensor-parallel", "2", "--no-such-option"]) == 2
    assert "left in 0.3" not in capsys.readouterr().err
