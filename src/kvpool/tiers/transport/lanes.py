"""Threads that do jobs in the background, one after the other, with a limit to how many may wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvpool.tiers.transport.chain import WatchedTier

Job = Callable[[], None]
_log = logging.getLogger("kvpool")


class Lane:
    """Jobs in their order, for `num_threads` threads that start with the first one. What a job raises is logged.

    `tiers` are those that jobs call: a lane is stuck while all its threads are in calls that do not come back.
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
        """Has a job done; False if too many wait. `drop` is called instead of `job` if the lane stops before."""
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
        """Waits until nothing is left to do, for so long at most; whether that is so."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._jobs and not self._running, seconds)

    def stop(self, seconds: float) -> bool:
        """Drops what has not begun, and waits for what has, for so long at most; whether all threads have ended."""
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
            del job  # which may hold much memory until the next one comes
            with self._wake:
                self._running -= 1
                self._wake.notify_all()


def _contained(job: Job, name: str) -> None:
    try:
        job()
    except Exception:
        _log.exception("a job of %s raised", name)
