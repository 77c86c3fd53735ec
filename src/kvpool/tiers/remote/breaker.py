"""Breaker: after a node did not answer, nobody asks it until a probe succeeds. So a dead node costs callers one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
FAIR_SECONDS = 0.02  # a node that had less time to answer, in all since its last answer, does not count as failed


class Breaker:
    """Says whether a node may be asked.

    It is *closed* while the node works. A failure opens it: nobody asks the node until a pause is over. Then it is *half
    open*: exactly one caller may probe, and the outcome closes it or opens it for twice as long, at most `longest` seconds.
    A node that is not `proven` must be probed before anybody else asks it.

    >>> now = 0.0
    >>> breaker = Breaker(pause=1.0, clock=lambda: now)
    >>> breaker.failed("no answer"), breaker.allows(), breaker.claim_probe()
    (None, False, False)
    >>> now = 1.0
    >>> breaker.claim_probe(), breaker.claim_probe()
    (True, False)
    >>> breaker.succeeded(), breaker.allows()
    (None, True)
    """

    def __init__(
        self,
        *,
        pause: float = FIRST_PAUSE,
        longest: float = LONGEST_PAUSE,
        proven: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_pause = pause
        self._longest = max(pause, longest)
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = pause
        self._open_until = None if proven else clock()
        self._probing = False
        self._last_success = -float("inf")
        self._waited = 0.0  # seconds spent waiting since the last answer
        self._problem = "" if proven else "not asked yet"

    def allows(self) -> bool:
        """Whether the node may be asked now."""
        return self._open_until is None

    def claim_probe(self) -> bool:
        """Whether the caller shall probe; it must say `succeeded` or `failed` afterwards."""
        with self._lock:
            if self._open_until is None or self._probing or self._clock() < self._open_until:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        """The node answered."""
        with self._lock:
            self._last_success = self._clock()
            self._waited = 0.0
            if self._open_until is None:
                return
            if not self._probing:
                return  # it answers a request from before the failure: only a probe shows that the node is back
            self._open_until = None
            self._probing = False
            self._pause = self._first_pause
            self._problem = ""

    def failed(self, problem: str, *, asked_at: float | None = None) -> None:
        """The node did not answer a request of `asked_at`. If it has answered another one since, it is busy and not dead.

        A node also does not count as failed if it had hardly any time to answer (`FAIR_SECONDS`).
        """
        with self._lock:
            if not self._probing:
                if self._open_until is not None:
                    return  # several requests failed at the same time: they count as one failure
                if asked_at is not None:
                    if self._last_success > asked_at:
                        return
                    self._waited += self._clock() - asked_at
                    if self._waited < FAIR_SECONDS:
                        return
            else:
                self._pause = min(self._pause * 2, self._longest)
            self._probing = False
            self._problem = problem
            self._open_until = self._clock() + self._pause

    @property
    def problem(self) -> str:
        """Why the node is not asked; empty while it is."""
        with self._lock:
            if self._open_until is None:
                return ""
            seconds = max(0.0, self._open_until - self._clock())
            return f"{self._problem} (asked again in {seconds:.0f} s)"
