"""Makes the helpers of this folder importable, and a browser for the tests of pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chromium import Chromium, find_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """Chromium, for tests that are skipped where there is none."""
    program = find_chromium()
    assert program is not None
    with Chromium(program) as made:
        if not made.runs():
            pytest.skip(f"{program} is there and does not start: name another in KVPOOL_CHROMIUM")
        yield made
