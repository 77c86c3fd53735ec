"""Run by test_node_kills.py: engines and a node under load that are killed at random, again and again.

    node_killer.py DIRECTORY KILLS SEED [disk]

Every engine compares every value that it loads. Prints one JSON line: what was done, what was wrong, and what is left.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.testing import key, value
from kvpool.tiers import DiskTier, NodeTier, Outcome, Slots
from kvpool.tiers.node.connection import LostNodeError
from kvpool.tiers.node.server import NodeServer

ENGINES = 4
NODE = ENGINES
REGION = 8 * 2**20
NUMBERS = 400
SIZES = (3_000, 9_000, 70_000)
PATIENCE = 60.0
KEYS = [key(number) for number in range(NUMBERS)]
VALUES = [value(number, SIZES[number % 7 % 3]) for number in range(NUMBERS)]  # made once: the children inherit them
COUNTS = ("calls", "stored", "hits", "wrong")
_shared = mmap.mmap(-1, 4096)
_LINE = struct.Struct(f"<{len(COUNTS)}Q")


def count(engine: int, **more: int) -> None:
    """Adds to the counters of an engine, which outlive it."""
    at = engine * _LINE.size
    found = dict(zip(COUNTS, _LINE.unpack_from(_shared, at), strict=True))
    _LINE.pack_into(_shared, at, *(found[name] + more.get(name, 0) for name in COUNTS))


class Written:
    """Values that an engine writes into slots by itself."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def write(self, slots: Slots) -> None:
        for at, view in zip(slots.numbers, slots.views, strict=True):
            view[:] = VALUES[self._numbers[at]]

    def is_in(self, slots: Slots) -> bool:
        return all(view == VALUES[self._numbers[at]] for at, view in zip(slots.numbers, slots.views, strict=True))


def borrowed(tier: NodeTier, numbers: list[int], buffers: list[bytearray]) -> list[Outcome]:
    """Copies values from where the node keeps them."""
    loan = tier.lend([KEYS[number] for number in numbers], [len(VALUES[number]) for number in numbers])
    if loan is None:
        return [Outcome.FAILED] * len(numbers)
    for number, view in zip(numbers, loan.views, strict=True):
        buffers[number][: len(view)] = view
    outcomes = loan.outcomes if loan.is_held() else [Outcome.FAILED] * len(numbers)
    loan.release()
    return outcomes


def be_engine(directory: Path, engine: int, seed: int) -> None:
    """Loads, stores and removes until it is killed."""
    rng = random.Random(seed)
    tier = NodeTier(f"node:{directory}?engine=engine-{engine}&timeout=5")
    buffers = [bytearray(len(each)) for each in VALUES]
    while True:
        numbers = [rng.randrange(NUMBERS) for _ in range(rng.randrange(1, 20))]
        keys = [KEYS[number] for number in numbers]
        what = rng.random()
        if what < 0.45:
            if what < 0.2:
                outcomes = tier.store(keys, [VALUES[number] for number in numbers])
            else:
                sizes = [len(VALUES[number]) for number in numbers]
                outcomes = tier.store_straight(keys, sizes, Written(numbers))
            count(engine, calls=1, stored=outcomes.count(Outcome.OK))
        elif what < 0.95:
            numbers = sorted(set(numbers))
            for number in numbers:
                buffers[number][:] = bytes(len(buffers[number]))
            if what < 0.7:
                outcomes = tier.load([KEYS[number] for number in numbers], [buffers[number] for number in numbers])
            else:
                outcomes = borrowed(tier, numbers, buffers)
            hits = [number for number, outcome in zip(numbers, outcomes, strict=True) if outcome == Outcome.OK]
            wrong = sum(buffers[number] != VALUES[number] for number in hits)
            count(engine, calls=1, hits=len(hits), wrong=wrong)
        else:
            outcomes = tier.remove(keys)
            count(engine, calls=1)
        if Outcome.FAILED in outcomes:
            time.sleep(0.01)  # the node is away


def be_node(directory: Path, *, has_disk: bool) -> None:
    """Serves until it is killed, or told to stop."""
    tiers = [DiskTier(directory / "disk", 4 * REGION, timeout=30)] if has_disk else []
    server = NodeServer(directory, REGION, tiers=tiers)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.serve()
    server.close()


def forked(job: Callable[[], None]) -> int:
    """The number of a process that does a job."""
    child = os.fork()
    if not child:
        status = 1
        try:
            job()
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child: int, number: int) -> int:
    """Sends a signal, and returns how the process ended."""
    os.kill(child, number)
    return os.waitpid(child, 0)[1]


def settled(tier: NodeTier) -> dict[str, object]:
    """Statistics of the node once no engine holds anything, and no fetch from the disk for one that is gone does.

    What is lost stays lost: it is still there when the patience ends.
    """
    until = time.monotonic() + PATIENCE
    while True:
        try:
            stats = tier.node_stats()
            is_late = time.monotonic() > until
            if stats["num_clients"] == 1 and not stats["waiting_bytes"] and (is_late or not leaked(stats)):
                return stats
        except (OSError, LostNodeError):
            pass
        if time.monotonic() > until + 1.0:
            raise TimeoutError("the node does not come to rest")
        time.sleep(0.01)


def sums() -> list[int]:
    """The counters of all engines together."""
    lines = [_LINE.unpack_from(_shared, engine * _LINE.size) for engine in range(ENGINES)]
    return [sum(column) for column in zip(*lines, strict=True)]


def work_for(calls: int) -> None:
    """Returns when the engines have made so many calls more, however busy the machine is."""
    enough, until = sums()[0] + calls, time.monotonic() + PATIENCE
    while sums()[0] < enough:
        if time.monotonic() > until:
            raise TimeoutError("the engines do nothing")
        time.sleep(0.001)


def leaked(stats: dict[str, object]) -> int:
    """Slots that are neither free nor hold a value that is found."""
    slots: list[dict[str, int]] = stats["slots"]  # type: ignore[assignment]
    return sum(size["slots"] - size["free"] for size in slots) - int(stats["num_values"])  # type: ignore[call-overload]


def main(directory: Path, kills: int, seed: int, *, has_disk: bool) -> None:
    rng = random.Random(seed)
    lives = 0

    def start(who: int) -> int:
        nonlocal lives
        lives += 1
        if who == NODE:
            return forked(lambda: be_node(directory, has_disk=has_disk))
        return forked(lambda: be_engine(directory, who, seed * 100_000 + lives))

    children = {who: start(who) for who in (NODE, *range(ENGINES))}
    killed = {"engines": 0, "node": 0}
    for _ in range(kills):
        work_for(rng.randrange(20, 200))
        time.sleep(rng.uniform(0.0, 0.02))
        who = NODE if rng.random() < 0.2 else rng.randrange(ENGINES)
        if os.WTERMSIG(ended(children[who], signal.SIGKILL)) != signal.SIGKILL:
            raise RuntimeError(f"process {who} ended by itself")
        killed["node" if who == NODE else "engines"] += 1
        children[who] = start(who)
    work_for(500)
    for who in range(ENGINES):
        ended(children[who], signal.SIGKILL)
    tier = NodeTier(f"node:{directory}?timeout=30")
    left = [leaked(settled(tier))]
    status = ended(children[NODE], signal.SIGTERM)
    children[NODE] = start(NODE)
    left.append(leaked(settled(tier)))
    out = [bytearray(len(each)) for each in VALUES]
    outcomes = tier.load(KEYS, out)
    wrong = sum(out[n] != VALUES[n] for n, outcome in enumerate(outcomes) if outcome == Outcome.OK)
    left.append(leaked(settled(tier)))
    stats = tier.node_stats()
    tier.close()
    ended(children[NODE], signal.SIGKILL)
    found = {**dict(zip(COUNTS, sums(), strict=True)), "killed": killed, "leaked": left, "stopped_with": status}
    found |= {"hits_at_the_end": outcomes.count(Outcome.OK), "wrong_at_the_end": wrong, "cut_off": stats["cut_off"]}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), has_disk="disk" in sys.argv[4:])
