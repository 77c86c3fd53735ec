"""kill -9 of an engine in the middle of its writes: the next one answers right, and what it finds on the disk is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")

PROGRAM = Path(__file__).with_name("killed_engine.py")
SRC = Path(__file__).resolve().parents[2] / "src"
KILLS = int(os.environ.get("KVPOOL_KILLS", "8"))  # `make test-tiers-kill` has 100: one takes about two seconds


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_given_engines_that_are_killed_while_they_write_then_the_next_one_answers_right(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path / "blocks"), str(KILLS), "1"]
    found: list[dict[str, Any]] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))
            print({name: value for name, value in found[-1].items() if name != "answers"}, flush=True)
    assert len(found) == KILLS
    for number, after in enumerate(found):
        assert after["signal"] == 9, number
        assert after["right"], number
        assert (after["load_failures"], after["damaged"]) == (0, []), number
    assert sum(after["cached"] for after in found) > 0
