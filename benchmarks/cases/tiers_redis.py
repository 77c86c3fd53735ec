"""The Redis tier beside the plain client with the same bytes. Cases of benchmarks/tiers.py.

The peer does with `valkey-glide` what it does best: two connections with a thread each, values straight from and into memory.
The tier seals and verifies every value on top of that. Both talk to a redis-server that this process starts on loopback.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from cases.tiers_disk import BARE, BLOCK_BYTES, key
from harness import Case, PeerCase, Runner, Times
from kvpool.tiers import Outcome, RedisTier

NUM_BATCHES = 4
BATCH = 16
THREADS = 2
NUM_ASKED = 512


@cache
def server() -> tuple[int, int]:
    """Port and process id of a server that this process starts and ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen = int(probe.getsockname()[1])
    folder = tempfile.TemporaryDirectory(prefix="kvpool-bench-redis-")
    words = ["redis-server", "--port", str(chosen), "--bind", "127.0.0.1", "--save", "", "--dir", folder.name]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    atexit.register(folder.cleanup)
    atexit.register(process.wait)
    atexit.register(process.kill)
    for _ in range(1000):
        try:
            socket.create_connection(("127.0.0.1", chosen), timeout=1).close()
            return chosen, process.pid
        except OSError:
            time.sleep(0.01)
    raise SystemExit("redis-server does not start")


@cache
def clients() -> list[Any]:
    """Plain clients, one for each thread."""
    from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

    configuration = GlideClientConfiguration([NodeAddress("127.0.0.1", server()[0])], request_timeout=60_000)
    return [GlideClient.create(configuration) for _ in range(THREADS)]


@cache
def tier() -> RedisTier:
    return RedisTier(f"redis://127.0.0.1:{server()[0]}?timeout=60&connections={THREADS}")


@cache
def blocks() -> list[memoryview]:
    """Contents that do not compress."""
    rng = np.random.default_rng(0)
    return [memoryview(rng.bytes(BLOCK_BYTES)) for _ in range(NUM_BATCHES * BATCH)]


@cache
def buffers() -> list[memoryview]:
    """Memory for what is loaded."""
    return [np.zeros(BLOCK_BYTES, np.uint8).data for _ in range(NUM_BATCHES * BATCH)]


@cache
def keys() -> list[bytes]:
    return [key(number) for number in range(NUM_BATCHES * BATCH)]


def forget() -> None:
    """Empties the server, and waits until its memory is free again."""
    clients()[0].custom_command(["FLUSHALL", "SYNC"])


def cpu_seconds() -> float:
    """CPU time of this process and of the server."""
    threads = Path(f"/proc/{server()[1]}/task").glob("*/schedstat")
    return time.process_time() + sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def in_batches(run: Callable[[range], None], before: Callable[[], None], cpu: bool) -> Runner:
    """GB/s of batches of 16 blocks, one after the other, or the CPU time of a GB."""
    clock = cpu_seconds if cpu else time.perf_counter
    gigabytes = NUM_BATCHES * BATCH * BLOCK_BYTES / 1e9

    def repeat() -> list[float]:
        before()
        start = clock()
        for batch in range(NUM_BATCHES):
            run(range(batch * BATCH, (batch + 1) * BATCH))
        taken = clock() - start
        return [taken / gigabytes if cpu else gigabytes / taken]

    return repeat


def tier_call(store: bool, places: range) -> None:
    data = blocks() if store else buffers()
    call = tier().store if store else tier().load
    outcomes = call([keys()[place] for place in places], [data[place] for place in places])
    assert set(outcomes) == {Outcome.OK}, outcomes


def store_all() -> None:
    """Every value as the tier stores it, and as the plain client does."""
    forget()
    for batch in range(NUM_BATCHES):
        tier_call(True, range(batch * BATCH, (batch + 1) * BATCH))
    for name, data in zip(keys(), blocks(), strict=True):
        clients()[0].set(name, data)


def through_the_tier(store: bool, cpu: bool) -> Runner:
    """The tier's calls with 16 blocks each."""
    store_all()
    return in_batches(partial(tier_call, store), forget if store else lambda: None, cpu)


def plain_client(store: bool, cpu: bool) -> Runner:
    """The same with two threads, each with a client of its own."""
    store_all()
    threads = ThreadPoolExecutor(THREADS)

    def work(places: range, thread: int) -> None:
        client = clients()[thread]
        for place in places[thread::THREADS]:
            if store:
                client.set(keys()[place], blocks()[place])
            else:
                client.get(keys()[place], buffer=buffers()[place])

    def run(places: range) -> None:
        list(threads.map(partial(work, places), range(THREADS)))

    return in_batches(run, forget if store else lambda: None, cpu)


def look_ups() -> Runner:
    """Wall-clock time per key of `contains` with 512 keys, a few of them there."""
    store_all()
    asked = [key(number) for number in range(NUM_ASKED)]

    def repeat() -> list[float]:
        start = time.perf_counter()
        found = tier().contains(asked)
        taken = time.perf_counter() - start
        assert sum(found) == NUM_BATCHES * BATCH
        return [taken / NUM_ASKED * 1e6]

    return repeat


PLAIN_RUNS = {"plain_client": plain_client}
"""What the peer `bare` runs, by the name that a case gives."""


def redis_cases() -> list[Case]:
    """The rows of the Redis tier; none where there is no redis-server."""
    if shutil.which("redis-server") is None:
        print("no redis-server here: rows of the Redis tier are left out")
        return []

    def beside(name: str, store: bool, cpu: bool = False) -> Case:
        peer = PeerCase("plain_client", {"store": store, "cpu": cpu})
        run = partial(through_the_tier, store, cpu)
        if cpu:
            return Case(name, "s", "lower", run, (), peer, repeats=20, warmups=2)
        return Case(name, "GB/s", "higher", run, (Times(0.9, BARE),), peer, repeats=20, warmups=2)

    return [
        beside("redis, store 16 blocks of 2 MiB", True),
        beside("redis, load 16 blocks of 2 MiB", False),
        beside("redis, CPU to store a GB", True, cpu=True),
        beside("redis, CPU to load a GB", False, cpu=True),
        Case("redis, look up a key in a batch of 512", "us", "lower", look_ups, repeats=20),
    ]
