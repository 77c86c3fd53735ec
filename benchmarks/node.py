"""Speed of a node: its index with four clients, copies beside memcpy, and a restarted engine beside the disk tier.

    python benchmarks/node.py [--json FILE] [--check] [--quick] [--only WORD]

A prefix of 2,048 tokens has 128 blocks of 16. Clients are processes of their own; each asks for the whole prefix, gets the
places of all values under a lease, and releases it. "paced" clients do so a hundred times a second, others without a pause.
An empty question shows what the sockets and the machine's scheduler take of that: most of it, where processors sleep in
between. Times are wall-clock times. Values are 2 MiB: 32 layers, 8 KV heads of 128, bfloat16.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import harness
import kvpool
from cases.node_process import VALUE_BYTES, keys, node
from cases.tiers_engine import PROMPT_TOKENS, engine, first_token, prompts
from harness import Case, NoPartError, PeerCase, Runner, Times
from kvpool.tiers import DiskTier
from kvpool.tiers.envelope import checksum
from kvpool.tiers.node import wire
from kvpool.tiers.node.connection import Connection
from kvpool.tiers.node.node_tier import NodeTier
from kvpool.tiers.node.wire import Verb

PREFIX_BLOCKS = 128
CLIENTS = 4
ASKS = 400
WARM_ASKS = 50
COPIED = 64
REGION = 1 << 30
ENGINES = 8
MEMCPY, DISK, COMPUTED = "memcpy", "disk tier", "computed"

_closing = ExitStack()
atexit.register(_closing.close)


@cache
def running() -> Path:
    """A node with the values of one prefix in it."""
    directory = _closing.enter_context(node(REGION))
    with NodeTier(f"node:{directory}?timeout=60") as tier:
        names, data = keys(PREFIX_BLOCKS), np.random.default_rng(0).integers(0, 256, VALUE_BYTES, dtype=np.uint8)
        assert not any(tier.store(names, [data] * len(names), timeout=120))
    return directory


# --- the index -------------------------------------------------------------------------------------------------------


def asker(count: int) -> Callable[[Connection], float]:
    """Asks for a prefix of so many blocks and releases it; returns the microseconds until all places are known."""
    names = keys(count)
    sizes = [VALUE_BYTES] * count

    def ask(connection: Connection) -> float:
        began, deadline = time.perf_counter(), time.monotonic() + 30
        body = wire.with_numbers(names, sizes)
        answer = connection.ask(wire.message(Verb.LEASE, count, 1000, body), deadline)
        lease, places = answer.number, wire.places_in(answer)
        seconds = time.perf_counter() - began
        assert wire.ABSENT not in places
        if lease:
            connection.tell(wire.message(Verb.RELEASE, 0, lease), deadline)
        return 1e6 * seconds

    return ask


def ask_for_prefix(directory: str, blocks: int, pause: float) -> None:
    """In a process of its own: prints the microseconds of each question."""
    connection, ask = Connection(Path(directory), "bench", (), 30.0), asker(blocks)
    print("up", flush=True)
    sys.stdin.readline()
    found = []
    for _ in range(WARM_ASKS + ASKS):
        found.append(ask(connection))
        if pause:
            time.sleep(pause)
    print(json.dumps(found[WARM_ASKS:]), flush=True)


def cpu_of(whom: str) -> Runner:
    """Microseconds of CPU time that a question and its release take: what other processes of the machine do does not
    change it much."""
    with closing(NodeTier(f"node:{running()}?timeout=60")) as tier:
        schedule = Path(f"/proc/{tier.node_stats()['pid']}/schedstat")
    connection, ask = Connection(running(), "bench", (), 30.0), asker(PREFIX_BLOCKS)
    _closing.callback(connection.close)

    def repeat() -> list[float]:
        node_began, began = int(schedule.read_text().split()[0]), time.thread_time_ns()
        for _ in range(ASKS):
            ask(connection)
        here, there = time.thread_time_ns() - began, int(schedule.read_text().split()[0]) - node_began
        return [(there if whom == "node" else here) / 1e3 / ASKS]

    return repeat


def questions(blocks: int, clients: int, pause: float) -> Runner:
    directory = running()

    def repeat() -> list[float]:
        command = [sys.executable, __file__, "--client", str(directory), str(blocks), str(pause)]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(clients)
        ]
        found: list[float] = []
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            out, _ = process.communicate()
            found += json.loads(out)
        return found

    return repeat


# --- bytes -----------------------------------------------------------------------------------------------------------


@cache
def memory() -> Any:
    """[value, byte] of this process, touched before."""
    return np.ones((COPIED, VALUE_BYTES), np.uint8)


def gb_per_s(began: float) -> list[float]:
    return [COPIED * VALUE_BYTES / (time.perf_counter() - began) / 1e9]


def leased() -> list[Any]:
    """Slots of the region, kept for this process."""
    connection, names = Connection(running(), "bench", (), 30.0), keys(COPIED)
    _closing.callback(connection.close)
    packet = wire.message(Verb.LEASE, len(names), 1000, wire.with_numbers(names, [VALUE_BYTES] * len(names)))
    places = wire.places_in(connection.ask(packet, time.monotonic() + 30))
    return [np.frombuffer(connection.slot(place), np.uint8) for place in places]


def copies(sources: Any, targets: Any) -> Runner:
    def repeat() -> list[float]:
        began = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)
        return gb_per_s(began)

    return repeat


def from_region() -> Runner:
    return copies(leased(), memory())


def to_region() -> Runner:
    return copies(np.ones_like(memory()), _slots())


def _slots() -> list[Any]:
    """Slots that this process may write to."""
    connection, names = Connection(running(), "bench", (), 30.0), keys(COPIED, "written")
    _closing.callback(connection.close)
    packet = wire.message(Verb.RESERVE, len(names), 0, wire.with_numbers(names, [VALUE_BYTES] * len(names)))
    places = wire.places_in(connection.ask(packet, time.monotonic() + 30))
    return [np.frombuffer(connection.slot(place), np.uint8) for place in places]


def memcpy() -> Runner:
    return copies(np.ones_like(memory()), memory())


def load() -> Runner:
    tier, names, rows = NodeTier(f"node:{running()}?timeout=60"), keys(COPIED), list(memory())
    _closing.callback(tier.close)

    def repeat() -> list[float]:
        began = time.perf_counter()
        assert not any(tier.load(names, rows))
        return gb_per_s(began)

    return repeat


def memcpy_and_checksum() -> Runner:
    source, names, rows = np.ones_like(memory()), keys(COPIED), list(memory())

    def repeat() -> list[float]:
        began = time.perf_counter()
        for name, row, target in zip(names, source, rows, strict=True):
            np.copyto(target, row)
            checksum(name, memoryview(target))
        return gb_per_s(began)

    return repeat


def disk_load() -> Runner:
    directory = running() / "disk"
    tier = _closing.enter_context(DiskTier(directory, 2 * COPIED * VALUE_BYTES, timeout=60))
    names, rows = keys(COPIED), list(memory())
    assert not any(tier.store(names, rows))

    def repeat() -> list[float]:
        began = time.perf_counter()
        assert not any(tier.load(names, rows))
        return gb_per_s(began)

    return repeat


def held() -> Runner:
    """How often a system prompt is in memory behind eight engines that all store it."""

    def repeat() -> list[float]:
        with closing(NodeTier(f"node:{running()}?timeout=60")) as looking:
            before, names = looking.node_stats()["used_bytes"], keys(16, f"prompt {time.perf_counter()}")
            for number in range(ENGINES):
                with NodeTier(f"node:{running()}?timeout=60&engine=engine-{number}") as tier:
                    assert not any(tier.store(names, list(memory()[:16])))
            return [(looking.node_stats()["used_bytes"] - before) / (16 * VALUE_BYTES)]

    return repeat


# --- an engine -------------------------------------------------------------------------------------------------------


def first_token_from_node() -> Runner:
    """Milliseconds to the first token of a prompt that an earlier engine stored."""
    from kvpool.engine import SamplingParams

    once, (prompt,), address = SamplingParams(max_new_tokens=1), prompts(1, PROMPT_TOKENS, 0), f"node:{running()}"
    with engine(None, remote=address, tier_timeout=60.0) as earlier:
        earlier.generate([prompt], once)

    def repeat() -> list[float]:
        with engine(None, remote=address, tier_timeout=60.0) as restarted:
            (result,) = restarted.generate([prompt], once)
            assert result.num_cached_tokens
            return [1e3 * (result.first_token_seconds or 0.0)]

    return repeat


class Beside:
    """The same without a node."""

    def __init__(self, name: str, runs: Mapping[str, Any]) -> None:
        self.name = name
        self._runs = runs

    def start(self) -> str:
        return "this machine"

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        if case not in self._runs:
            raise NoPartError(f"{case} has no counterpart")
        self._run: Runner = self._runs[case](**params)

    def repeat(self) -> Sequence[float]:
        return self._run()

    def close(self) -> None:
        return None


PEERS = [
    Beside(MEMCPY, {"copies": memcpy, "load": memcpy_and_checksum}),
    Beside(DISK, {"load": disk_load, "first_token": partial(first_token, True)}),
    Beside(COMPUTED, {"first_token": partial(first_token, False)}),
]


def asking(who: str, clients: int, pause: float, *bars: float) -> list[Case]:
    """A question for the prefix, and an empty one."""
    case = partial(Case, unit="us", better="lower", repeats=2, warmups=0)
    prefix, nothing = (partial(questions, blocks, clients, pause) for blocks in (PREFIX_BLOCKS, 0))
    return [
        case(f"find + lease of 2,048 tokens, {who}", kvpool=prefix, bars=bars),
        case(f"find nothing, {who}", kvpool=nothing),
    ]


def cases() -> list[Case]:
    """The rows of the table."""
    return [
        *asking("one client, paced", 1, 0.01),
        *asking("one client without a pause", 1, 0.0),
        *asking(f"{CLIENTS} clients, paced", CLIENTS, 0.01),
        *asking(f"{CLIENTS} clients without a pause", CLIENTS, 0.0, 100.0),
        *(
            Case(f"find, lease and release of 2,048 tokens, CPU of the {whom}", "us", "lower", partial(cpu_of, whom))
            for whom in ("node", "client")
        ),
        Case("copies out of the region", "GB/s", "higher", from_region, (Times(0.9, MEMCPY),), PeerCase("copies")),
        Case("copies into the region", "GB/s", "higher", to_region, (Times(0.9, MEMCPY),), PeerCase("copies")),
        Case("load with checksums", "GB/s", "higher", load, (Times(0.9, MEMCPY),), PeerCase("load")),
        Case(f"a prompt behind {ENGINES} engines is held", "times", "lower", held, (1.0,), repeats=3),
        Case(
            f"SmolLM2, first token of {PROMPT_TOKENS} after a restart",
            "ms",
            "lower",
            first_token_from_node,
            (Times(1.0, DISK), Times(5.0, COMPUTED)),
            PeerCase("first_token"),
            repeats=5,
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        ask_for_prefix(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
        sys.exit()
    options = harness.argument_parser(__doc__.splitlines()[0]).parse_args()
    sys.exit(harness.main(cases(), PEERS, options, {"kvpool": kvpool.__version__}, clock="wall clock"))
