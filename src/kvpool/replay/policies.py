"""Policies from the literature, which replays compare: FIFO, LFU, greedy-dual, Clock, SIEVE, S3-FIFO, 2Q, ARC.

Importing this module makes them known by name. A cache that serves is given the class: `KVCacheManager(config,
policy=kvpool.replay.ARCPolicy)`.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from typing import Any, ClassVar

from kvpool.errors import InvalidArgumentError
from kvpool.eviction import register_policy
from kvpool.eviction.policy import EvictionPolicy, Item, Key, KeyedPolicy, Queue, Run


class LFUPolicy(KeyedPolicy):
    """The run that the fewest requests reused goes first; of equals the least recently used."""

    name: ClassVar[str] = "lfu"

    def key(self, run: Run) -> tuple[int, int]:
        return run.hits, run.last_access


class FIFOPolicy(KeyedPolicy):
    """The run that was inserted first goes first, however often it was used since."""

    name: ClassVar[str] = "fifo"

    def key(self, run: Run) -> int:
        return run.created


_MAX_CHECKPOINTS = 4096


class CostAwarePolicy(KeyedPolicy):
    """Greedy-dual: value = the aging clock when the run was last used + the cost per block of computing it again.

    A block at depth d (in blocks) costs `base_cost + depth_cost * d`: the projections and the MLP cost the same at any
    position, attention reads everything before it. The n blocks of a run that starts at depth s thus cost
    `base_cost + depth_cost * (s + (n - 1) / 2)` each on average: more with position and with length. The least valuable
    run is the victim and the clock rises to its value, so an expensive run that is not used any more is overtaken by
    the fresh ones in the end. Of equal values the least recently used goes.

    The defaults are the ratio of a dense 8B model with blocks of 16 tokens: 4 * layers * hidden FLOPs of attention for
    each token before it against 2 * parameters, about 5e-4 per block of depth.

    The clock is looked up by `last_access`, not taken when the run is added: a parent that becomes a candidate because
    its last child left, or a run that was trimmed, is as old as its last use.
    """

    name: ClassVar[str] = "cost"
    weighs: ClassVar[bool] = True

    def __init__(self, base_cost: float = 1.0, depth_cost: float = 5e-4) -> None:
        if not base_cost > 0.0 or not depth_cost >= 0.0:
            raise InvalidArgumentError(
                f"base_cost is {base_cost} and depth_cost is {depth_cost}; the first must be > 0, the second >= 0"
            )
        super().__init__()
        self._base_cost = base_cost
        self._depth_cost = depth_cost
        self._latest = 0  # newest access seen
        # The clock rose to _clocks[i] after tick _ticks[i]; accesses after it see that value.
        self._ticks: list[int] = []
        self._clocks: list[float] = []

    def weigh(self, depth_cost: float) -> None:
        self._depth_cost = self._base_cost * depth_cost

    def recompute_cost(self, run: Run) -> float:
        """Average cost of computing one block of `run` again, in units of a block at depth 0."""
        return self._base_cost + self._depth_cost * (run.start + (run.num_blocks - 1) / 2)

    def key(self, run: Run) -> tuple[float, int]:
        last_access = run.last_access
        self._latest = max(self._latest, last_access)
        rises_before = bisect_left(self._ticks, last_access)
        clock = self._clocks[rises_before - 1] if rises_before else 0.0
        return clock + self.recompute_cost(run), last_access

    def victim(self) -> Run:
        run = super().victim()
        value: float = run.entry.key[0]
        if not self._clocks or value > self._clocks[-1]:
            self._raise_clock(value)
        return run

    def clear(self) -> None:
        super().clear()
        self._latest = 0
        self._ticks.clear()
        self._clocks.clear()

    def _raise_clock(self, value: float) -> None:
        if self._ticks and self._ticks[-1] == self._latest:
            self._clocks[-1] = value
            return
        self._ticks.append(self._latest)
        self._clocks.append(value)
        if len(self._ticks) > _MAX_CHECKPOINTS:  # the older half is kept at half the resolution
            del self._ticks[1 : _MAX_CHECKPOINTS // 2 : 2]
            del self._clocks[1 : _MAX_CHECKPOINTS // 2 : 2]


# --- policies that remember runs while they are no candidates ---


class GhostList:
    """Fingerprints of runs that were evicted, oldest first, with the number of blocks each one had."""

    __slots__ = ("_blocks_of", "num_blocks")

    def __init__(self) -> None:
        self._blocks_of: OrderedDict[int, int] = OrderedDict()
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks_of)

    def add(self, fingerprint: int, num_blocks: int) -> None:
        """Remember a run as the youngest ghost. Each weighs a block at least, so `trim` bounds their number too."""
        self.take(fingerprint)
        self._blocks_of[fingerprint] = max(num_blocks, 1)
        self.num_blocks += max(num_blocks, 1)

    def take(self, fingerprint: int) -> int:
        """Forget a ghost; returns how many blocks it had, 0 if it was not there."""
        num_blocks = self._blocks_of.pop(fingerprint, 0)
        self.num_blocks -= num_blocks
        return num_blocks

    def trim(self, max_blocks: float) -> None:
        """Forget the oldest ghosts until at most `max_blocks` blocks are remembered."""
        while self._blocks_of and self.num_blocks > max_blocks:
            _, num_blocks = self._blocks_of.popitem(last=False)
            self.num_blocks -= num_blocks

    def clear(self) -> None:
        self._blocks_of.clear()
        self.num_blocks = 0


class Record:
    """What one policy knows about one run. It lies in `run.entry` for as long as the run is in the cache."""

    __slots__ = ("credit", "item", "owner", "place", "queue", "seen_hits")

    def __init__(self, owner: EvictionPolicy, queue: Queue[Item], place: Key) -> None:
        self.owner = owner
        self.queue = queue
        self.place = place
        self.item: Item | None = None  # not None while the run is a candidate
        self.seen_hits = 0  # hits that the policy has already acted on
        self.credit = 0  # S3-FIFO: further rounds that the run has earned


class RememberingPolicy(EvictionPolicy):
    """Keeps candidates in one or more queues; a run that was away comes back to its queue and its place in it."""

    def __init__(self, *queues: Queue[Item]) -> None:
        self._queues = queues
        self._above: Run | None = None  # the run before the one that was evicted last
        self._left: Record | None = None  # of that one
        self._left_at = 0  # when it was last used

    @abstractmethod
    def _admit(self, run: Run) -> Record:
        """Choose queue and place of a run that the policy has not seen before."""

    def _readmit(self, run: Run, record: Record) -> None:
        """Revise queue and place of a run that comes back; both stay by default."""

    def _succeed(self, run: Run, record: Record, left: Record) -> None:
        """The run behind this one was evicted, and neither was used since the other was; nothing follows by default."""

    def add(self, run: Run) -> None:
        record: Record | None = run.entry
        if record is None or record.owner is not self:
            record = run.entry = self._admit(run)
        else:
            self.remove(run)
            self._readmit(run, record)
        if self._left is not None and run is self._above and run.last_access == self._left_at:
            self._succeed(run, record, self._left)
        record.item = record.queue.insert(Item(record.place, run))

    def remove(self, run: Run) -> None:
        record: Record | None = run.entry
        if record is not None and record.item is not None:
            record.queue.discard(record.item)
            record.item = None

    def evicted(self, run: Run) -> None:
        self.remove(run)
        self._above, self._left, self._left_at = run.above, run.entry, run.last_access
        run.entry = None  # when the same object comes back (from another tier) it is new

    def clear(self) -> None:
        for queue in self._queues:
            for run in queue.clear():
                run.entry = None
        self._above = self._left = None

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, run: object) -> bool:
        record: Any = getattr(run, "entry", None)
        return record is not None and record.owner is self and record.item is not None

    def _move(self, run: Run, record: Record, queue: Queue[Item], place: Key) -> None:
        self.remove(run)
        record.queue, record.place = queue, place
        record.item = queue.insert(Item(place, run))


def _stand_in(run: Run, record: Record, left: Record) -> None:
    """Gives a run the place of the one behind it that was evicted: the hand that passed over that one passed over both.

    What it was hit before counts no more, so a prompt that is over leaves run by run in one round of the hand, as it would
    if its blocks stood in the queue one by one.
    """
    record.queue, record.place = left.queue, left.place
    record.seen_hits, record.credit = run.hits, 0


class GhostPolicy(RememberingPolicy):
    """Two queues, and a memory of evicted runs by fingerprint: a run that is computed again is recognised.

    The policy sees candidates only, not the size of the pool, and there are few of them while most of the cache is in
    use; `_capacity` therefore is the largest number of blocks that were candidates at one time since `clear()`.
    It never exceeds the pool, and no policy remembers more ghost blocks than that.
    """

    def __init__(self, new: Queue[Item], proven: Queue[Item], *ghosts: GhostList) -> None:
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
            self._bury(run, record, item.blocks)

    def clear(self) -> None:
        super().clear()
        for ghosts in self._ghosts:
            ghosts.clear()
        self._capacity = 0

    @abstractmethod
    def _bury(self, run: Run, record: Record, num_blocks: int) -> None:
        """Remember, or not, a run that has left `record.queue` and had `num_blocks` when it was last added."""

    def _new_exceeds(self, num_blocks: float) -> bool:
        return self._new.num_blocks > num_blocks or not self._proven

    def _num_blocks(self) -> int:
        return self._new.num_blocks + self._proven.num_blocks


class ClockPolicy(RememberingPolicy):
    """Second chance: a visited run is sent to the end of the queue once, then it must be visited again.

    A run counts as visited when `run.hits` has grown since the hand last passed over it. Its place follows from `created`,
    not from the time of `add`, so a run keeps it while it is away; the hand passes over absent runs without a trace.
    """

    name: ClassVar[str] = "clock"

    def __init__(self) -> None:
        self._queue = Queue[Item]()
        super().__init__(self._queue)
        self._newest = 0
        self._moves = 0

    def _admit(self, run: Run) -> Record:
        return Record(self, self._queue, (run.created, 0))

    def _succeed(self, run: Run, record: Record, left: Record) -> None:
        _stand_in(run, record, left)

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

    def clear(self) -> None:
        super().clear()
        self._newest = self._moves = 0


class SievePolicy(RememberingPolicy):
    """SIEVE (NSDI '24): visited runs keep their place while the hand moves from old to new, then starts over.

    New runs are inserted ahead of the hand, so what is never reused leaves soon after the hand has reached it.
    """

    name: ClassVar[str] = "sieve"

    def __init__(self) -> None:
        self._ahead, self._behind = Queue[Item](), Queue[Item]()
        super().__init__(self._ahead, self._behind)
        self._hand: tuple[int, int] | None = None  # the last place passed; None at the start of a round
        self._latest = self._round_began = 0  # the newest use seen, by now and when the round began

    def add(self, run: Run) -> None:
        super().add(run)
        self._latest = max(self._latest, run.last_access)

    def _admit(self, run: Run) -> Record:
        record = Record(self, self._ahead, run.created)
        self._readmit(run, record)
        return record

    def _readmit(self, run: Run, record: Record) -> None:
        passed = self._hand is not None and (run.created, -run.start) <= self._hand
        record.queue = self._behind if passed else self._ahead

    def _succeed(self, run: Run, record: Record, left: Record) -> None:
        if run.last_access <= self._round_began:  # the hand came by while another run stood behind this one
            record.seen_hits = run.hits

    def victim(self) -> Run:
        while True:
            if self._behind and not self._ahead:
                self._ahead, self._behind = self._behind, self._ahead
                self._hand = None
                self._round_began = self._latest
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
        self._latest = self._round_began = 0


_MAX_CREDIT = 3


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
        self._small, self._main, self._ghost = Queue[Item](), Queue[Item](), GhostList()
        super().__init__(self._small, self._main, self._ghost)
        self._small_fraction = small_fraction
        self._promote_hits = promote_hits
        self._arrivals = 0  # into main

    def _admit(self, run: Run) -> Record:
        if self._ghost.take(run.fingerprint):
            return Record(self, self._main, self._next_place())
        return Record(self, self._small, run.created)

    def _succeed(self, run: Run, record: Record, left: Record) -> None:
        if left.queue is self._main:
            _stand_in(run, record, left)

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
        super().__init__(Queue[Item](), Queue[Item](), self._out)
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


class ARCPolicy(GhostPolicy):
    """ARC (FAST '03): an LRU of runs used once and an LRU of runs used again, with a boundary that learns.

    A run that comes back shortly after it left the first list says that this list is too short, one that left the
    second says the opposite; the target for the first list moves by the blocks that came back, times how much shorter
    the list of its ghosts is than the other one.
    """

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        self._once, self._again = Queue[Item](), Queue[Item]()
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
        if known := min(self._once_ghost.take(run.fingerprint), run.num_blocks):
            self._target = min(self._target + known * max(1.0, again / once), float(self._capacity))
        elif known := min(self._again_ghost.take(run.fingerprint), run.num_blocks):
            self._target = max(self._target - known * max(1.0, once / again), 0.0)
        return known > 0

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


for _policy in (
    FIFOPolicy,
    LFUPolicy,
    CostAwarePolicy,
    ClockPolicy,
    SievePolicy,
    S3FIFOPolicy,
    TwoQueuePolicy,
    ARCPolicy,
):
    register_policy(_policy.name)(_policy)
