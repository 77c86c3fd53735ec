"""Clock and SIEVE: a hand passes over the runs in the order of their insertion and spares those that were reused.

A run counts as visited when `run.hits` has grown since the hand last passed over it. Its place follows from `created`,
not from the time of `add`, so a run keeps it while it is away; the hand passes over absent runs without a trace.
"""

from __future__ import annotations

from typing import ClassVar

from kvpool.compiling import mypyc_attr
from kvpool.eviction.queues import RunQueue
from kvpool.eviction.remembering import Record, RememberingPolicy
from kvpool.eviction.run import Run


@mypyc_attr(allow_interpreted_subclasses=True)
class ClockPolicy(RememberingPolicy):
    """Second chance: a visited run is sent to the end of the queue once, then it must be visited again."""

    name: ClassVar[str] = "clock"

    def __init__(self) -> None:
        self._queue = RunQueue()
        super().__init__(self._queue)
        self._newest = 0
        self._moves = 0

    def _admit(self, run: Run) -> Record:
        return Record(self, self._queue, (run.created, 0))

    def add(self, run: Run) -> None:
        super().add(run)
        self._newest = max(self._newest, run.created)

    def victim(self) -> Run:
        while True:
            run = self._queue.head()
            record: Record = run.entry
            if run.hits <= record.seen_hits:
                return run
            record.seen_hits = run.hits
            self._moves += 1  # behind everything that was inserted up to now, before everything that will be
            self._move(run, record, self._queue, (self._newest, self._moves))


@mypyc_attr(allow_interpreted_subclasses=True)
class SievePolicy(RememberingPolicy):
    """SIEVE (NSDI '24): visited runs keep their place while the hand moves from old to new, then starts over.

    New runs are inserted ahead of the hand, so what is never reused leaves soon after the hand has reached it.
    """

    name: ClassVar[str] = "sieve"

    def __init__(self) -> None:
        self._ahead, self._behind = RunQueue(), RunQueue()
        super().__init__(self._ahead, self._behind)
        self._hand: tuple[int, int] | None = None  # the last place passed; None at the start of a round

    def _admit(self, run: Run) -> Record:
        record = Record(self, self._ahead, run.created)
        self._readmit(run, record)
        return record

    def _readmit(self, run: Run, record: Record) -> None:
        passed = self._hand is not None and (run.created, -run.start) <= self._hand
        record.queue = self._behind if passed else self._ahead

    def victim(self) -> Run:
        while True:
            if self._behind and not self._ahead:
                self._ahead, self._behind = self._behind, self._ahead
                self._hand = None
            run = self._ahead.head()
            record: Record = run.entry
            if run.hits <= record.seen_hits:
                return run
            record.seen_hits = run.hits
            self._hand = (run.created, -run.start)
            self._move(run, record, self._behind, run.created)

    def clear(self) -> None:
        super().clear()
        self._hand = None
