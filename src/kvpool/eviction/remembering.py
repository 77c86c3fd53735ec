"""Base of the policies that remember something about a run between two times that it is a candidate."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from kvpool.compiling import mypyc_attr
from kvpool.eviction.policy import EvictionPolicy
from kvpool.eviction.queues import BLOCKS, GhostList, Item, RunQueue
from kvpool.eviction.run import Key, Run


class Record:
    """What one policy knows about one run. It lies in `run.entry` for as long as the run is in the cache."""

    __slots__ = ("credit", "item", "owner", "place", "queue", "seen_hits")

    def __init__(self, owner: EvictionPolicy, queue: RunQueue, place: Key) -> None:
        self.owner = owner
        self.queue = queue
        self.place = place
        self.item: Item | None = None  # not None while the run is a candidate
        self.seen_hits = 0  # hits that the policy has already acted on
        self.credit = 0  # S3-FIFO: further rounds that the run has earned


@mypyc_attr(allow_interpreted_subclasses=True)
class RememberingPolicy(EvictionPolicy):
    """Keeps candidates in one or more queues; a run that was away comes back to its queue and its place in it."""

    def __init__(self, *queues: RunQueue) -> None:
        self._queues = queues

    @abstractmethod
    def _admit(self, run: Run) -> Record:
        """Choose queue and place of a run that the policy has not seen before."""

    def _readmit(self, run: Run, record: Record) -> None:
        """Revise queue and place of a run that comes back; both stay by default."""

    def add(self, run: Run) -> None:
        record: Record | None = run.entry
        if record is None or record.owner is not self:
            record = run.entry = self._admit(run)
        else:
            self.remove(run)
            self._readmit(run, record)
        record.item = record.queue.push(record.place, run)

    def remove(self, run: Run) -> None:
        record: Record | None = run.entry
        if record is not None and record.item is not None:
            record.queue.discard(record.item)
            record.item = None

    def evicted(self, run: Run) -> None:
        self.remove(run)
        run.entry = None  # when the same object comes back (from another tier) it is new

    def clear(self) -> None:
        for queue in self._queues:
            for run in queue.clear():
                run.entry = None

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, run: object) -> bool:
        record: Any = getattr(run, "entry", None)
        return record is not None and record.owner is self and record.item is not None

    def _move(self, run: Run, record: Record, queue: RunQueue, place: Key) -> None:
        self.remove(run)
        record.queue, record.place = queue, place
        record.item = queue.push(place, run)


@mypyc_attr(allow_interpreted_subclasses=True)
class GhostPolicy(RememberingPolicy):
    """Two queues, and a memory of evicted runs by fingerprint: a run that is computed again is recognised.

    The policy sees candidates only, not the size of the pool, and there are few of them while most of the cache is in
    use; `_capacity` therefore is the largest number of blocks that were candidates at one time since `clear()`.
    It never exceeds the pool, and no policy remembers more ghost blocks than that.
    """

    def __init__(self, new: RunQueue, proven: RunQueue, *ghosts: GhostList) -> None:
        super().__init__(new, proven)
        self._new, self._proven = new, proven
        self._ghosts = ghosts
        self._capacity = 0

    @property
    def num_ghosts(self) -> int:
        """Number of evicted runs remembered."""
        return sum(map(len, self._ghosts))

    @property
    def num_ghost_blocks(self) -> int:
        """Number of blocks of the evicted runs remembered."""
        return sum(ghosts.num_blocks for ghosts in self._ghosts)

    def add(self, run: Run) -> None:
        super().add(run)
        num_blocks = self._num_blocks()
        if num_blocks > self._capacity:
            self._capacity = num_blocks

    def evicted(self, run: Run) -> None:
        record: Record | None = run.entry
        item = record.item if record is not None else None
        super().evicted(run)
        if record is not None and item is not None:
            self._bury(run, record, item[BLOCKS])

    def clear(self) -> None:
        super().clear()
        for ghosts in self._ghosts:
            ghosts.clear()
        self._capacity = 0

    @abstractmethod
    def _bury(self, run: Run, record: Record, num_blocks: int) -> None:
        """Remember, or not, a run that has left `record.queue` and had `num_blocks` when it was last added."""

    def _new_exceeds(self, num_blocks: float) -> bool:
        return len(self._new) > 0 and (self._new.num_blocks > num_blocks or not self._proven)

    def _num_blocks(self) -> int:
        return self._new.num_blocks + self._proven.num_blocks
