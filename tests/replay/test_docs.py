"""The Python of docs/replay.md runs as it stands, and every command in it exists."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")


def test_given_the_page_when_its_python_runs_then_it_works() -> None:
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    names: dict[str, object] = {}
    exec(compile(block, "docs/replay.md", "exec"), names)
    assert "lru" in names


def test_given_the_page_then_it_names_only_options_that_exist() -> None:
    commands = (Path(__file__).resolve().parents[1] / "defaults" / "commands.txt").read_text(encoding="utf-8")
    exist = set(re.findall(r": (--[a-z-]+)", commands))
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= exist
