"""Threads that only read and write, the aligned memory that they do it with, and the calls that wait for them.

The calling thread copies and compares checksums, while the threads keep the disk busy. Only the caller touches its own
memory: a read that ends after the deadline ends in a buffer of ours, not in memory that meanwhile holds something else.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from kvpool.config.layers import ceil_div
from kvpool.tiers.contract import Outcome

PAGE = 4096
"""Direct I/O asks for memory, offsets and sizes in multiples of this, on every disk that we know."""

HUGE_PAGE = 2**21
BUFFERS_PER_THREAD = 2
JOIN_SECONDS = 10.0


def pages(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return ceil_div(num_bytes, PAGE) * PAGE


class Buffer:
    """Page-aligned memory; it grows to the largest value it has met.

    The second page lies at the beginning of a huge page: behind the header, a value of 2 MiB is one piece for the disk's
    driver instead of 512, which makes reads and writes up to twice as fast.
    """

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, PAGE))

    def view(self, num_bytes: int) -> memoryview:
        """Its first `num_bytes` bytes."""
        if num_bytes > self._memory.nbytes:
            self._memory = _allocated(num_bytes)
        return self._memory[:num_bytes]


def _allocated(num_bytes: int) -> memoryview:
    mapped = mmap.mmap(-1, pages(num_bytes) + 2 * HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -(np.frombuffer(mapped, np.uint8).ctypes.data + PAGE) % HUGE_PAGE
    return memoryview(mapped)[start : start + pages(num_bytes)]


ZEROS = Buffer().view(PAGE)
"""A page that nobody writes to."""

Job: TypeAlias = Callable[[], None]


class Workers:
    """Threads that take jobs from one queue, in order, and the buffers for those jobs: they bound what is in flight."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._buffers: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(BUFFERS_PER_THREAD * num_threads):
            self._buffers.put(Buffer())
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def take_buffer(self, deadline: float) -> Buffer | None:
        """A buffer for a job; None if all are in use until the deadline (0: now)."""
        seconds = deadline - time.monotonic()
        try:
            return self._buffers.get_nowait() if seconds <= 0 else self._buffers.get(timeout=seconds)
        except queue.Empty:
            return None

    def give_buffer(self, buffer: Buffer) -> None:
        """Gives a buffer back."""
        self._buffers.put(buffer)

    def submit(self, job: Job) -> None:
        """Runs a job, which catches its own errors, when a thread is free."""
        self._jobs.put(job)

    def close(self) -> bool:
        """Lets the threads finish what waits; False if one of them hangs."""
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class FinishedJob(NamedTuple):
    """The job for one key of a call has ended; the caller gives the buffer back."""

    number: int
    outcome: Outcome
    buffer: Buffer | None


class Call:
    """What the threads finish for one call, until its caller leaves."""

    def __init__(self, workers: Workers, deadline: float) -> None:
        self.num_pending = 0
        self._workers = workers
        self._deadline = deadline
        self._finished: queue.SimpleQueue[FinishedJob] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_left = False

    def expect(self) -> None:
        """One job more will end."""
        self.num_pending += 1

    def finish(self, index: int, outcome: Outcome, buffer: Buffer | None = None) -> None:
        """A job has ended, in whichever thread."""
        with self._lock:
            if not self._has_left:
                self._finished.put(FinishedJob(index, outcome, buffer))
            elif buffer is not None:
                self._workers.give_buffer(buffer)

    def next(self) -> FinishedJob | None:
        """The next job that has ended; None at the deadline."""
        seconds = self._deadline - time.monotonic()
        try:
            finished = self._finished.get(timeout=seconds) if seconds > 0 else self._finished.get_nowait()
        except queue.Empty:
            return None
        self.num_pending -= 1
        return finished

    def take_buffer(self) -> Buffer | None:
        """A buffer if one is free, or, with nothing of this call in flight, when one is."""
        return self._workers.take_buffer(0.0 if self.num_pending else self._deadline)

    def leave(self) -> None:
        """The caller goes; what ends later gives its buffer back itself."""
        with self._lock:
            self._has_left = True
        while not self._finished.empty():
            if (buffer := self._finished.get_nowait().buffer) is not None:
                self._workers.give_buffer(buffer)
