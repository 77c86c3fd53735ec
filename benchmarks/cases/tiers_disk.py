"""The disk tier beside the same reads and writes without it. Cases of benchmarks/tiers.py."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
import time
import tracemalloc
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import Case, PeerCase, Runner, Times
from kvpool.testing import Kept
from kvpool.tiers import DiskTier, Outcome
from kvpool.tiers.disk.buffers import PAGE
from kvpool.tiers.transport.staging import page_aligned

BARE = "bare"
BLOCK_BYTES = 2**21
NUM_BLOCKS = 128
CAPACITY = 2**31
THREADS = 4
INDEXED = 100_000
NUM_ASKED = 1_000


def key(*numbers: int) -> bytes:
    """A key like those of a model."""
    return hashlib.sha256(repr(numbers).encode()).digest()


@cache
def folder() -> Path:
    """Where the files lie: below TMPDIR, until this process ends."""
    path = Path(tempfile.mkdtemp(prefix="kvpool-bench-"))
    atexit.register(shutil.rmtree, path)
    return path


def blocks() -> list[Any]:
    """Contents that do not compress, one buffer each."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8) for _ in range(NUM_BLOCKS)]


def gigabytes_per_second(start: float) -> list[float]:
    return [NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - start) / 1e9]


@cache
def block_tier(store: bool) -> DiskTier:
    """A tier with room for 2 GiB that holds all blocks."""
    directory = folder() / ("store" if store else "load")
    tier = DiskTier(directory, CAPACITY, io_threads=THREADS, timeout=600)
    tier.store([key(number) for number in range(NUM_BLOCKS)], blocks())
    return tier


def through_the_tier(store: bool) -> Runner:
    """A call with all blocks. Stores replace older values, as in a tier that has been full for days; loads go into memory
    that is kept, as in an engine.
    """
    tier, rounds = block_tier(store), 0
    buffers = blocks() if store else [page_aligned(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]

    def repeat() -> list[float]:
        nonlocal rounds
        rounds += 1
        keys = [key(rounds, number) if store else key(number) for number in range(NUM_BLOCKS)]
        start = time.perf_counter()
        outcomes = tier.store(keys, buffers) if store else tier.load(keys, buffers, keeper=Kept())
        speed = gigabytes_per_second(start)
        assert set(outcomes) == {Outcome.OK}, outcomes
        return speed

    return repeat


def raw_disk(store: bool) -> Runner:
    """`pwritev` or `preadv` by as many threads as the tier has, and nothing else.

    It uses the files and the buffers of the tier itself, which are idle then: how fast a virtual machine reads and writes
    depends on where its memory and its files happen to lie, by a factor of two from process to process on ours.
    """
    tier = block_tier(store)
    call, rounds = os.pwritev if store else os.preadv, 0

    def work(thread: int, places: list[tuple[int, int]], memory: memoryview) -> None:
        for fd, offset in places[thread::THREADS]:
            call(fd, [memory], offset)

    def repeat() -> list[float]:
        nonlocal rounds
        rounds += 1
        slabs = tier._state.catalog.slabs.values()
        places = [(slab.data_fd, slab.offset(slot)) for slab in slabs for slot in range(slab.num_slots)]
        first = rounds * NUM_BLOCKS % (len(places) - NUM_BLOCKS) if store else 0
        chosen = places[first : first + NUM_BLOCKS]
        buffers = [tier._workers.take_buffer(0.0) for _ in range(THREADS)]
        memory = [buffer.view(BLOCK_BYTES + PAGE) for buffer in buffers if buffer is not None]
        threads = [threading.Thread(target=work, args=(number, chosen, memory[number])) for number in range(THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        speed = gigabytes_per_second(start)
        for buffer in buffers:
            if buffer is not None:
                tier._workers.give_buffer(buffer)
        return speed

    return repeat


@cache
def indexed() -> Path:
    """A directory with 100,000 values of a page each."""
    directory = folder() / "indexed"
    with DiskTier(directory, INDEXED * 8400, direct=False, timeout=600) as tier:
        page = bytes(4096)
        for first in range(0, INDEXED, 1000):
            tier.store([key(number) for number in range(first, first + 1000)], [page] * 1000)
        assert tier.stats().num_values == INDEXED, tier.stats()
    return directory


def look_ups() -> Runner:
    """CPU time per key of `contains` with 1,000 keys, half of them there."""
    tier = DiskTier(indexed(), INDEXED * 8400, read_only=True)
    rng = np.random.default_rng(1)

    def repeat() -> list[float]:
        keys = [key(number) for number in rng.integers(0, 2 * INDEXED, NUM_ASKED).tolist()]
        start = time.thread_time_ns()
        found = tier.contains(keys)
        taken = time.thread_time_ns() - start
        assert 0.4 < sum(found) / NUM_ASKED < 0.6
        return [taken / NUM_ASKED / 1000]

    return repeat


def restart() -> Runner:
    """Seconds from opening the directory to the first value from it."""
    directory = indexed()

    def repeat() -> list[float]:
        buffer = bytearray(4096)
        start = time.perf_counter()
        with DiskTier(directory, INDEXED * 8400) as tier:
            assert tier.load([key(77)], [buffer]) == [Outcome.OK]
            return [time.perf_counter() - start]

    return repeat


def memory() -> Runner:
    """Bytes of memory per block that an open tier takes."""

    def repeat() -> list[float]:
        tracemalloc.start()
        with DiskTier(indexed(), INDEXED * 8400):
            taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return [taken / INDEXED]

    return repeat


BARE_RUNS = {"raw_disk": raw_disk}
"""What the peer `bare` runs, by the name that a case gives."""


def disk_cases() -> list[Case]:
    """The rows of the disk tier."""

    def beside(name: str, store: bool) -> Case:
        peer = PeerCase("raw_disk", {"store": store})
        run = partial(through_the_tier, store)
        return Case(name, "GB/s", "higher", run, (Times(0.9, BARE),), peer, repeats=10, warmups=8)

    return [
        beside("disk, store 128 blocks of 2 MiB", True),
        beside("disk, load 128 blocks of 2 MiB", False),
        Case("disk, look up a key among 100,000", "us", "lower", look_ups, (5.0,), repeats=50),
        Case("disk, restart with 100,000 blocks to first hit", "s", "lower", restart, (2.0,), repeats=5),
        Case("disk, memory per indexed block", "bytes", "lower", memory, repeats=2, warmups=0),
    ]
