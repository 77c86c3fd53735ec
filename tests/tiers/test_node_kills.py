"""kill -9 of engines and of the node, at random and under load: no answer is wrong, and no slot is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nodes import SRC, needs_linux, node_folder

KILLER = Path(__file__).with_name("node_killer.py")
MANY = 2 * int(os.environ.get("KVPOOL_KILLS", "0"))
many = [pytest.mark.slow, pytest.mark.skipif(not MANY, reason="make test-tiers-kill does it")]

pytestmark = needs_linux


def kills(count: int, seed: int, *options: str) -> dict[str, Any]:
    """What was found after so many kills."""
    with node_folder() as folder:
        result = subprocess.run(
            [sys.executable, str(KILLER), str(folder), str(count), str(seed), *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout)
    print(found)
    return found


@pytest.mark.quick("12-1-options0")
@pytest.mark.parametrize(
    ("count", "seed", "options"),
    [
        (12, 1, ()),
        (12, 2, ("disk",)),
        pytest.param(MANY, 3, (), marks=many),
        pytest.param(MANY, 4, ("disk",), marks=many),
    ],
)
def test_given_engines_and_a_node_that_are_killed_under_load_then_every_answer_is_right_and_no_slot_is_lost(
    count: int, seed: int, options: tuple[str, ...]
) -> None:
    found = kills(count, seed, *options)
    assert found["killed"]["engines"] + found["killed"]["node"] == count
    assert min(found["killed"].values()) > 0
    assert (found["wrong"], found["wrong_at_the_end"], found["leaked"]) == (0, 0, [0, 0, 0])
    assert (found["stopped_with"], found["cut_off"]) == (0, 0)
    assert found["hits"] > 100
    assert found["hits_at_the_end"] > 20
