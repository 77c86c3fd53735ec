"""What these tests share. The toy engine is beside them: they are collected with --import-mode=importlib."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from toy import ToyEngine


@pytest.fixture
def engine() -> Iterator[Callable[..., ToyEngine]]:
    """Makes toy engines, and closes them at the end."""
    from toy import ToyEngine  # which needs torch; not all of these tests do

    opened: list[ToyEngine] = []

    def make(**options: Any) -> ToyEngine:
        opened.append(ToyEngine(**options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
