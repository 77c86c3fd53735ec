"""Threads that read and write files, their aligned buffers, and the calls that wait for them.

The calling thread copies bytes and compares checksums, while the threads keep the disk busy. Only the caller writes to its
own memory. A read that ends after the deadline ends in a buffer of ours, because the caller may use its memory again.
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
    """A number of bytes, rounded up to whole pages."""
    return ceil_div(num_bytes, PAGE) * PAGE


class Buffer:
    """Page-aligned memory that grows to the largest value so far.

    Its second page begins a huge page. So a value of 2 MiB behind its header is one piece for the driver of the disk instead
    of 512 pieces, which makes reads and writes up to twice as fast.
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
    """Threads that take jobs from one queue, in order. The number of buffers limits how many are in flight."""

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
        """A buffer for a job; None if all are in use until the deadline (0: do not wait)."""
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
    """The finished jobs of one call, until its caller leaves."""

    def __init__(self, workers: Workers, deadline: float) -> None:
        self.num_pending = 0
        self._workers = workers
        self._deadline = deadline
        self._finished: queue.SimpleQueue[FinishedJob] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_left = False

    def expect(self) -> None:
        """One more job is in flight."""
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
        try:
            finished = self._finished.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            return None
        self.num_pending -= 1
        return finished

    def take_buffer(self) -> Buffer | None:
        """A buffer if one is free. If no job of this call is in flight, waits for one."""
        return self._workers.take_buffer(0.0 if self.num_pending else self._deadline)

    def leave(self) -> None:
        """The caller leaves. Jobs that end later give their buffers back themselves."""
        with self._lock:
            self._has_left = True
        while not self._finished.empty():
            if (buffer := self._finished.get_nowait().buffer) is not None:
                self._workers.give_buffer(buffer)
