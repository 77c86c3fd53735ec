"""docs/scheduling.md runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "scheduling.md"


def test_given_the_page_when_its_recipes_run_in_order_then_they_work(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S))
    exec(compile(recipes, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert "r1 length [7 7 7 7 7 7 7 7]" in printed
    assert "[5 6 7]" in printed
    assert "done after" in printed
