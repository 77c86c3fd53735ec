"""S3-FIFO (SOSP '23): a small queue filters what is used once, a main queue keeps the rest, ghosts correct mistakes."""

from __future__ import annotations

from typing import ClassVar

from kvpool.compiling import mypyc_attr
from kvpool.errors import InvalidArgumentError
from kvpool.eviction.queues import GhostList, RunQueue
from kvpool.eviction.remembering import GhostPolicy, Record
from kvpool.eviction.run import Run

_MAX_CREDIT = 3


@mypyc_attr(allow_interpreted_subclasses=True)
class S3FIFOPolicy(GhostPolicy):
    """Sizes are counted in blocks: `small_fraction` of the candidate blocks may stand in the small queue.

    The head of the small queue moves to main when it was reused `promote_hits` times since it came, and is evicted (and
    remembered) otherwise. The head of main goes round again once for each reuse, three times at most. A run that comes
    back while it is remembered goes straight to main.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(self, small_fraction: float = 0.1, promote_hits: int = 2) -> None:
        if not 0.0 < small_fraction < 1.0:
            raise InvalidArgumentError(f"small_fraction is {small_fraction}; it must lie between 0 and 1, e.g. 0.1")
        if not 1 <= promote_hits <= _MAX_CREDIT:
            raise InvalidArgumentError(f"promote_hits is {promote_hits}; reuses are counted from 1 to {_MAX_CREDIT}")
        self._small, self._main, self._ghost = RunQueue(), RunQueue(), GhostList()
        super().__init__(self._small, self._main, self._ghost)
        self._small_fraction = small_fraction
        self._promote_hits = promote_hits
        self._arrivals = 0  # into main

    def _admit(self, run: Run) -> Record:
        if self._ghost.take(run.fingerprint):
            return Record(self, self._main, self._next_place())
        return Record(self, self._small, run.created)

    def victim(self) -> Run:
        while True:
            from_small = self._new_exceeds(self._small_fraction * self._num_blocks())
            run = (self._small if from_small else self._main).head()
            record: Record = run.entry
            record.credit = min(record.credit + run.hits - record.seen_hits, _MAX_CREDIT)
            record.seen_hits = run.hits
            if record.credit < (self._promote_hits if from_small else 1):
                return run
            record.credit = 0 if from_small else record.credit - 1
            self._move(run, record, self._main, self._next_place())

    def _bury(self, run: Run, record: Record, num_blocks: int) -> None:
        if record.queue is self._small:
            self._ghost.add(run.fingerprint, num_blocks)
            self._ghost.trim(self._capacity)

    def _next_place(self) -> int:
        self._arrivals += 1
        return self._arrivals
