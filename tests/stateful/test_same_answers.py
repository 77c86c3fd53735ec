"""The same calls do the same as ever: which blocks the manager takes, evicts and moves, and what it counts and answers.

`same_answers.txt` has a line for each run and a letter for every other operation of it. A change that is meant to do
something else writes it again, and says in its commit what is else: `python tests/stateful/test_same_answers.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from wild_runs import LOOK_EVERY, Seen, run

import kvpool.replay.policies  # noqa: F401  # known by name, also where this file is run

ANSWERS = Path(__file__).with_name("same_answers.txt")
NUM_OPERATIONS = 80
SEEDS = range(1000, 1060)


def letters(seed: int) -> str:
    seen = Seen()
    failure = run(seed, range(NUM_OPERATIONS), check_every=NUM_OPERATIONS, seen=seen)
    assert failure is None, failure.trace
    return seen.letters


@pytest.mark.quick("0")
@pytest.mark.parametrize("first", range(0, len(SEEDS), 10))
def test_given_the_same_operations_then_the_manager_does_and_says_the_same_as_ever(first: int) -> None:
    lines = ANSWERS.read_text().splitlines()
    for seed, before in list(zip(SEEDS, lines, strict=True))[first : first + 10]:
        now = letters(seed)
        changed = next((at for at, letter in enumerate(now) if letter != before[at]), None)
        assert now == before, f"run {seed} differs from operation {(changed or 0) * LOOK_EVERY} on; is that meant?"


if __name__ == "__main__":
    ANSWERS.write_text("".join(f"{letters(seed)}\n" for seed in SEEDS))
