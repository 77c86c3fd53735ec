"""kill -9 in the middle of writes: what comes back afterwards is whole and right, and everything else is a miss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WRITER = Path(__file__).with_name("killed_writer.py")
SRC = Path(__file__).resolve().parents[2] / "src"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")


def rounds(directory: Path, capacity: int, count: int, seed: int) -> list[dict[str, Any]]:
    """What was found after each of so many killed writers, one after another in one directory."""
    result = subprocess.run(
        [sys.executable, str(WRITER), str(directory), str(capacity), str(count), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == count, result.stderr
    return found


def check(found: list[dict[str, Any]]) -> None:
    for number, after in enumerate(found):
        assert after["signal"] == 9, number
        assert (after["wrong"], after["broken"], after["missing"]) == ([], [], []), number
        # One was cut in half
        assert all(note.endswith(" 1 damaged records skipped") for note in after["notes"]), number


@pytest.mark.parametrize(
    ("count", "seed"),
    [(10, 1), pytest.param(int(os.environ.get("KVPOOL_KILLS", "100")), 2, marks=pytest.mark.slow)],
)
def test_given_writers_killed_at_random_points_then_values_that_were_stored_are_there_and_whole(
    tmp_path: Path, count: int, seed: int
) -> None:
    found = rounds(tmp_path, 2**26, count, seed)  # room for everything: nothing may leave but by remove
    check(found)
    expected: set[int] = set()
    for after in found:
        for word in after["acknowledged"]:
            (expected.add if word[0] == "+" else expected.discard)(int(word[1:]))
        assert expected <= set(after["hits"])
    assert max(len(after["hits"]) for after in found) > 50


@pytest.mark.parametrize(
    ("count", "seed"),
    [(10, 3), pytest.param(int(os.environ.get("KVPOOL_KILLS", "100")), 4, marks=pytest.mark.slow)],
)
def test_given_a_full_directory_and_writers_killed_at_random_points_then_what_is_found_is_whole(
    tmp_path: Path, count: int, seed: int
) -> None:
    # Room for some fifty values: slots are overwritten, slabs change their size
    found = rounds(tmp_path, 2**20, count, seed)
    check(found)
    assert max(len(after["hits"]) for after in found) > 20
