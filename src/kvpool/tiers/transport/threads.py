"""Threads for calls to tiers, and the wait for what a call brings.

A `ThreadPool` does jobs in the background, in order; only so many may wait. `Pending` is the result of a job: an engine, a
`CachePool` or a connector waits for it, but never longer than its deadline, whatever the job does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvpool.tiers.transport.chain import GRACE_SECONDS, WatchedTier

Job = Callable[[], None]
_T = TypeVar("_T")
_log = logging.getLogger("kvpool")


class Pending(Generic[_T]):
    """The result of a job, for which a waiter waits until `due`, by `time.monotonic`.

    The job calls `end` once, with the result. A waiter that goes on before that calls `give_up`; then `discard` gets the
    result. `on_end` is called when the job has ended, in its thread.
    """

    def __init__(
        self, due: float, discard: Callable[[_T], None] | None = None, on_end: Callable[[], None] | None = None
    ) -> None:
        self.due = due
        self.value: _T | None = None
        self._discard, self._on_end = discard, on_end
        self._changed = threading.Condition()
        self._has_ended = self._is_given_up = False

    @property
    def has_ended(self) -> bool:
        """Whether the job is over; it may use memory of the waiter until then."""
        return self._has_ended

    @property
    def is_given_up(self) -> bool:
        """Whether the waiter has gone on without it."""
        return self._is_given_up

    @property
    def seconds_left(self) -> float:
        """How long the waiter still waits: calls to tiers may be late by `GRACE_SECONDS`."""
        return max(0.0, self.due + GRACE_SECONDS - time.monotonic())

    @property
    def is_overdue(self) -> bool:
        """Whether the waiter should give up."""
        return not self.seconds_left

    def end(self, value: _T | None = None) -> None:
        """The job is over, in whichever thread."""
        with self._changed:
            if not self._is_given_up:
                self.value = value
            self._has_ended = True
            self._changed.notify_all()
        if self._is_given_up and value is not None and self._discard is not None:
            self._discard(value)
        if self._on_end is not None:
            self._on_end()

    def give_up(self) -> bool:
        """The waiter goes on; False if the job has ended already."""
        with self._changed:
            self._is_given_up = not self._has_ended
            return self._is_given_up

    def wait(self) -> _T | None:
        """Waits for the result. None if there is none, or if the job is overdue: then it is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, self.seconds_left)
        self.give_up()
        return self.value


class ThreadPool:
    """Up to `num_threads` threads that do jobs in order. Threads start when they are needed. What a job raises is logged.

    `tiers` are those that the jobs call. The pool is stuck while all its threads are in calls that do not come back.
    """

    def __init__(
        self, name: str, num_threads: int = 1, max_waiting: int = 64, tiers: Sequence[WatchedTier] = ()
    ) -> None:
        self.name = name
        self.max_waiting = max_waiting
        self._num_threads = num_threads
        self._tiers = tiers
        self._threads: list[threading.Thread] = []
        self._jobs: deque[tuple[Job, Job]] = deque()
        self._wake = threading.Condition()
        self._running = 0
        self._stopped = False

    @property
    def num_waiting(self) -> int:
        """Jobs that no thread has begun."""
        return len(self._jobs)

    @property
    def is_stuck(self) -> bool:
        """Whether no thread is left to begin a job."""
        hung = {thread for watched in self._tiers for thread in watched.hung_threads()}
        return sum(thread.ident in hung for thread in self._threads) >= self._num_threads

    def submit(self, job: Job, drop: Job) -> bool:
        """Has a job done; False if too many wait. `drop` is called instead of `job` if the pool stops before."""
        with self._wake:
            if self._stopped or len(self._jobs) >= self.max_waiting:
                return False
            self._jobs.append((job, drop))
            if len(self._threads) < self._num_threads and self._running + len(self._jobs) > len(self._threads):
                thread = threading.Thread(target=self._serve, name=f"kvpool-{self.name}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._wake.notify()
            return True

    def flush(self, seconds: float) -> bool:
        """Waits until no job is left, for `seconds` at most; returns whether none is."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._jobs and not self._running, seconds)

    def stop(self, seconds: float) -> bool:
        """Drops jobs that have not begun, waits `seconds` at most for the others; returns whether all threads have ended."""
        with self._wake:
            self._stopped = True
            dropped = list(self._jobs)
            self._jobs.clear()
            self._wake.notify_all()
        for _, drop in dropped:
            _contained(drop, self.name)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._jobs or self._stopped)
                if not self._jobs:
                    return
                job, _ = self._jobs.popleft()
                self._running += 1
            _contained(job, self.name)
            del job  # it may hold much memory, and the next one may come late
            with self._wake:
                self._running -= 1
                self._wake.notify_all()


def _contained(job: Job, name: str) -> None:
    try:
        job()
    except Exception:
        _log.exception("a job of %s raised", name)
