"""Threads that read and write, the aligned memory that they do it with, and the calls that wait for them until a deadline."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kvpool.tiers.contract import Outcome

PAGE = 4096
"""Direct I/O asks for memory, offsets and sizes in multiples of this, on every disk that we know."""

JOIN_SECONDS = 10.0


def pages(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class Buffer:
    """Page-aligned memory of one thread; it grows to the largest value it has met."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, PAGE))

    def view(self, num_bytes: int) -> memoryview:
        """The first so many bytes of it."""
        if num_bytes > self._memory.nbytes:
            self._memory = memoryview(mmap.mmap(-1, pages(num_bytes)))
        return self._memory[:num_bytes]


Job: TypeAlias = Callable[[Buffer], None]


class Batch:
    """The values of one call. Its caller waits until the deadline; after that nobody touches the caller's memory."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        self._change = threading.Condition()
        self._num_expected = 0
        self._num_copying = 0
        self._waited_for = True

    def expect(self) -> None:
        """One job more will settle its outcome."""
        with self._change:
            self._num_expected += 1

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of one value; ignored once the caller has gone."""
        with self._change:
            if self._waited_for:
                self.outcomes[index] = outcome
            self._num_expected -= 1
            if not self._num_expected:
                self._change.notify_all()

    @property
    def is_waited_for(self) -> bool:
        """Whether the caller is still there."""
        return self._waited_for

    def copy(self, target: memoryview, source: memoryview) -> bool:
        """Copies from or to the caller's memory; False, and nothing was touched, if the caller has gone."""
        with self._change:
            if not self._waited_for:
                return False
            self._num_copying += 1
        try:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # lets other threads run
        finally:
            with self._change:
                self._num_copying -= 1
                if not self._num_copying:
                    self._change.notify_all()
        return True

    def wait(self, deadline: float) -> list[Outcome]:
        """Waits for all values until the deadline, and for a copy that is under way."""
        with self._change:
            self._change.wait_for(lambda: not self._num_expected, max(0.0, deadline - time.monotonic()))
            self._waited_for = False
            self._change.wait_for(lambda: not self._num_copying)
            return list(self.outcomes)


class Workers:
    """Threads that take jobs from one queue, in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs that no thread has begun."""
        return self._jobs.qsize()

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
        buffer = Buffer()
        while (job := self._jobs.get()) is not None:
            job(buffer)
