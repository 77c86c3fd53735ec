"""Run by test_disk_crash.py: children that write to one directory and kill themselves in the middle of a system call.

    killed_writer.py DIRECTORY CAPACITY ROUNDS SEED

Each child counts its writes, file creations and renames, does the n-th one halfway or not at all, and sends itself SIGKILL.
After each, this process opens the directory and prints what it found, as one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

from deadly_writes import die_in_a_write

from kvpool.testing import key, value
from kvpool.tiers import DiskTier, Outcome

NUMBERS = 400
SIZES = (3_000, 9_000, 20_000)


def size_of(number: int) -> int:
    return SIZES[number % 7 % 3]


KEYS = [key(number) for number in range(NUMBERS)]
VALUES = [value(number, size_of(number)) for number in range(NUMBERS)]  # made once: the children inherit them


def write_and_die(directory: str, capacity: int, seed: int, acknowledged: int) -> None:
    """Stores until the chosen system call, in which the process ends."""
    rng = random.Random(seed)
    die_in_a_write(rng, rng.randrange(1, 120))
    tier = DiskTier(directory, capacity, timeout=60)
    while True:
        numbers = [rng.randrange(NUMBERS) for _ in range(rng.randrange(1, 6))]
        if rng.random() < 0.2:
            os.write(acknowledged, b"".join(b"-%d\n" % number for number in numbers))
            tier.remove([KEYS[number] for number in numbers])
            continue
        outcomes = tier.store([KEYS[number] for number in numbers], [VALUES[number] for number in numbers])
        stored = [number for number, outcome in zip(numbers, outcomes, strict=True) if outcome == Outcome.OK]
        os.write(acknowledged, b"".join(b"+%d\n" % number for number in stored))


def look(directory: str, capacity: int) -> dict[str, Any]:
    """What is there, and whether all of it is right."""
    with DiskTier(directory, capacity, timeout=60) as tier:
        out = [bytearray(size_of(number)) for number in range(NUMBERS)]
        promised = tier.contains(KEYS)
        outcomes = tier.load(KEYS, out)
        wrong = [
            number for number in range(NUMBERS) if outcomes[number] == Outcome.OK and out[number] != VALUES[number]
        ]
        hits = [number for number in range(NUMBERS) if outcomes[number] == Outcome.OK]
        broken = [number for number in range(NUMBERS) if outcomes[number] not in (Outcome.OK, Outcome.MISS)]
        missing = [number for number in range(NUMBERS) if promised[number] and outcomes[number] != Outcome.OK]
        return {"hits": hits, "wrong": wrong, "broken": broken, "missing": missing, "notes": tier.notes}


def main(directory: str, capacity: int, rounds: int, seed: int) -> None:
    for number in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            write_and_die(directory, capacity, seed * 100_000 + number, writing)
        os.close(writing)
        with os.fdopen(reading) as stream:
            acknowledged = stream.read().split()
        _, status = os.waitpid(child, 0)
        found = look(directory, capacity)
        print(json.dumps({**found, "acknowledged": acknowledged, "signal": os.WTERMSIG(status)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
