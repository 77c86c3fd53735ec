"""2Q and ARC: new runs and proven runs stand in separate queues, and runs that were evicted too early are recognised.

Both count in blocks, and both know a run that comes back by its content (`fingerprint`), never by a block id.
"""

from __future__ import annotations

from typing import ClassVar

from kvpool.compiling import mypyc_attr
from kvpool.errors import InvalidArgumentError
from kvpool.eviction.queues import GhostList, RunQueue
from kvpool.eviction.remembering import GhostPolicy, Record
from kvpool.eviction.run import Run


@mypyc_attr(allow_interpreted_subclasses=True)
class TwoQueuePolicy(GhostPolicy):
    """2Q (VLDB '94): first-time runs are a FIFO, runs that came back after leaving it are an LRU.

    Reuse while a run is still in the FIFO proves nothing (the turns of one conversation are close together). The FIFO
    gives the victim while it holds more than `in_fraction` of the candidate blocks; what left it is remembered, up to
    `out_fraction` of the capacity.
    """

    name: ClassVar[str] = "2q"

    def __init__(self, in_fraction: float = 0.25, out_fraction: float = 0.5) -> None:
        for label, fraction in (("in_fraction", in_fraction), ("out_fraction", out_fraction)):
            if not 0.0 < fraction <= 1.0:
                raise InvalidArgumentError(f"{label} is {fraction}; it must lie above 0 and not above 1")
        self._out = GhostList()
        super().__init__(RunQueue(), RunQueue(), self._out)
        self._in_fraction = in_fraction
        self._out_fraction = out_fraction

    def _admit(self, run: Run) -> Record:
        if self._out.take(run.fingerprint):
            return Record(self, self._proven, run.last_access)
        return Record(self, self._new, run.created)

    def _readmit(self, run: Run, record: Record) -> None:
        if record.queue is self._proven:
            record.place = run.last_access

    def victim(self) -> Run:
        return (self._new if self._new_exceeds(self._in_fraction * self._num_blocks()) else self._proven).head()

    def _bury(self, run: Run, record: Record, num_blocks: int) -> None:
        if record.queue is self._new:
            self._out.add(run.fingerprint, num_blocks)
            self._out.trim(self._out_fraction * self._capacity)


@mypyc_attr(allow_interpreted_subclasses=True)
class ARCPolicy(GhostPolicy):
    """ARC (FAST '03): an LRU of runs used once and an LRU of runs used again, with a boundary that learns.

    A run that comes back shortly after it left the first list says that this list is too short, one that left the
    second says the opposite; the target for the first list moves by the blocks of the run, times how much shorter
    the list of its ghosts is than the other one.
    """

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        self._once, self._again = RunQueue(), RunQueue()
        self._once_ghost, self._again_ghost = GhostList(), GhostList()
        super().__init__(self._once, self._again, self._once_ghost, self._again_ghost)
        self._target = 0.0  # blocks that the first list should hold

    def _admit(self, run: Run) -> Record:
        came_back = self._learn(run)
        record = Record(self, self._again if came_back or run.hits > 0 else self._once, run.last_access)
        record.seen_hits = run.hits
        return record

    def _readmit(self, run: Run, record: Record) -> None:
        if run.hits > record.seen_hits:
            record.queue = self._again
            record.seen_hits = run.hits
        record.place = run.last_access

    def _learn(self, run: Run) -> bool:
        once, again = self._once_ghost.num_blocks, self._again_ghost.num_blocks
        if self._once_ghost.take(run.fingerprint):
            self._target = min(self._target + run.num_blocks * max(1.0, again / once), float(self._capacity))
            return True
        if self._again_ghost.take(run.fingerprint):
            self._target = max(self._target - run.num_blocks * max(1.0, once / again), 0.0)
            return True
        return False

    def victim(self) -> Run:
        return (self._once if self._new_exceeds(self._target) else self._again).head()

    def _bury(self, run: Run, record: Record, num_blocks: int) -> None:
        ghosts = self._once_ghost if record.queue is self._once else self._again_ghost
        ghosts.add(run.fingerprint, num_blocks)
        self._once_ghost.trim(self._capacity - self._once.num_blocks)
        self._again_ghost.trim(self._capacity - self._once_ghost.num_blocks)

    def clear(self) -> None:
        super().clear()
        self._target = 0.0
