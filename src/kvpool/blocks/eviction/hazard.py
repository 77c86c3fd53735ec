"""The adaptive policy: learns when runs like this one are reused, and evicts what earns the least for its place.

Reuse of a prompt depends on its age in a way that differs by kind: the next turn of a chat comes after a while or never, a
system prompt comes again and again. For each kind of run the policy counts reuses and exposure by age, also of runs that
have left (ghosts), and derives from them the best rate of hits per block and time that keeping a run can still achieve
(its Gittins index). The candidate with the smallest index is the victim, unless the oldest one is hardly worth more. Age is
counted in blocks inserted since the last use, in units of the cache: under load it runs faster, and no clock is needed.
How it was found, and what it gains and loses, is in docs/decisions/0005-eviction-policy.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.blocks.eviction.base import EvictionPolicy, Run
from kvpool.blocks.eviction.queues import Item, RunQueue

Floats = npt.NDArray[np.float64]

EPOCHS_PER_CACHE = 32  # the cache turns over once in so many epochs
MAX_AGE = 256  # epochs; what is older counts as this old
_DEPTHS, _SIZES, _REUSES = 6, 5, 2
NUM_KINDS = _DEPTHS * _SIZES * _REUSES
_HISTORY = 0.999  # weight of what was counted an epoch ago
_KIND_PRIOR = 1.0  # exposure, in caches x epochs, that a kind borrows from all kinds together
_PRIOR = 4.0  # the same, that all kinds borrow from the assumption that reuse gets rarer with age
GHOSTS_PER_CACHE = 4  # blocks remembered of runs that have left, in caches
_MIN_CAPACITY = 64
MARGIN = 0.5  # a younger run goes instead of the oldest only if its value is below this part of the oldest's


def _age_bins() -> tuple[list[int], list[int]]:
    """First epochs of bins that widen with age, and the bin of every age."""
    starts, width, at = [], 1.0, 0
    while at < MAX_AGE:
        starts.append(at)
        at += round(width)
        if len(starts) >= 4:
            width *= 1.25
    bins = np.searchsorted(starts, np.arange(MAX_AGE), side="right") - 1
    return starts, bins.tolist()


_STARTS, _BIN_OF_AGE = _age_bins()
_WIDTHS: Floats = np.diff([*_STARTS, MAX_AGE]).astype(np.float64)
_MIDDLES: Floats = np.array(_STARTS) + _WIDTHS / 2
_BINS = len(_STARTS)


class _Record:
    """What the policy knows about one run. It lies in `run.entry` for as long as the run is in the cache."""

    __slots__ = ("blocks", "epoch", "hits", "item", "kind", "last_access", "owner", "queue", "start", "trimmed")

    def __init__(self, owner: AdaptivePolicy) -> None:
        self.owner = owner
        self.item: Item | None = None  # not None while the run is a candidate
        self.queue: RunQueue | None = None
        self.kind = self.epoch = self.hits = self.start = self.blocks = self.trimmed = 0
        self.last_access = -1


class _Ghost(NamedTuple):
    """What is remembered of a run that has left."""

    kind: int
    epoch: int  # of its last use
    blocks: int
    parent: int  # fingerprint of the run before it


class AdaptivePolicy(EvictionPolicy):
    """Evicts the candidate whose kind and age promise the fewest hits per block and time; retention priorities come first.

    Kinds are told apart by how deep a run starts, how long it is and whether it was reused: powers of four, so that they
    mean the same for any block size. With nothing learned the order is that of LRU.
    """

    name: ClassVar[str] = "adaptive"

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        for queue in getattr(self, "_cells", {}).values():
            for run in queue.clear():
                run.entry = None
        self._cells: dict[tuple[int, int, int], RunQueue] = {}  # by priority, kind, epoch of the last use
        self._order: list[tuple[int, float, int, int]] = []  # heap of cells: priority, value, epoch, kind
        self._by_age: list[tuple[int, float, int, int]] = []  # the same cells, oldest first
        self._len = 0
        self._num_blocks = 0
        self._capacity = _MIN_CAPACITY
        self._epoch = 0
        self._inserted = 0.0  # blocks since the epoch began
        self._epoch_ticks = [0]  # the first tick of each epoch, the current one last
        self._newest = 0
        self._hits: Floats = np.zeros((NUM_KINDS, _BINS))
        self._exposure: Floats = np.zeros((NUM_KINDS, _BINS))
        self._alive = np.zeros((NUM_KINDS, MAX_AGE), np.float32)  # blocks by kind and epoch of last use (as a ring)
        self._kinds: list[int] = []  # those that any run has had
        self._learned = (self._hits, self._exposure, self._capacity)  # as they were when the epoch began
        self._values = self._indices()
        self._is_ordered = True  # whether the cells stand in the order of this epoch's values
        self._ghosts: OrderedDict[int, _Ghost] = OrderedDict()  # by fingerprint
        self._followers: dict[int, int] = {}  # fingerprint of a run -> of the ghost that followed it
        self._ghost_blocks = 0

    # --- candidates --------------------------------------------------------------------------------------------------

    def add(self, run: Run) -> None:
        record: _Record | None = run.entry
        if record is None or record.owner is not self:
            record = run.entry = _Record(self)
            self._admit(run)
        else:
            if record.item is not None:
                self._take_out(record)
            if run.start > record.start and record.last_access == run.last_access:
                self._count(record.kind, record.epoch, run.start - record.start)  # its head was reused: it was split
            elif record.last_access == run.last_access:
                record.trimmed += max(0, record.blocks - run.num_blocks)
        if record.last_access != run.last_access:
            record.trimmed = 0
            record.last_access = run.last_access
            record.kind = _kind(run)
            record.epoch = self._epoch_of(run.last_access)
            if record.kind not in self._kinds:
                self._kinds.append(record.kind)
        record.hits, record.start, record.blocks = run.hits, run.start, run.num_blocks
        record.epoch = max(record.epoch, self._epoch - MAX_AGE + 1)
        self._alive[record.kind, record.epoch % MAX_AGE] += record.blocks + record.trimmed
        self._put_in(run, record)
        if self._num_blocks > self._capacity:
            self._capacity = self._num_blocks

    def remove(self, run: Run) -> None:
        record: _Record | None = run.entry
        if record is None or record.owner is not self or record.item is None:
            return
        self._take_out(record)
        if run.hits > record.hits:
            self._count(record.kind, record.epoch, record.blocks + record.trimmed)
            if record.trimmed:
                self._count_ghosts(self._followers.get(run.fingerprint), record.trimmed)

    def evicted(self, run: Run) -> None:
        record: _Record | None = run.entry
        if record is None or record.owner is not self or record.item is None:
            return
        self._take_out(record)
        run.entry = None
        if run.fingerprint in self._ghosts:
            self._forget(run.fingerprint)
        blocks = record.blocks + record.trimmed
        above = getattr(run, "parent", None)
        parent = 0 if above is None else above.fingerprint
        self._ghosts[run.fingerprint] = _Ghost(record.kind, record.epoch, blocks, parent)
        self._followers[parent] = run.fingerprint
        self._alive[record.kind, record.epoch % MAX_AGE] += blocks
        self._ghost_blocks += blocks
        while self._ghost_blocks > GHOSTS_PER_CACHE * self._capacity:
            self._forget(next(iter(self._ghosts)))

    def victim(self) -> Run:
        if not self._is_ordered:
            self._reorder()
        least = self._first(self._order)
        oldest = self._first(self._by_age)
        if least[0] == oldest[0] and least[1] > MARGIN * self._value(oldest[3], oldest[2]):
            least = oldest
        return self._cells[least[0], least[3], least[2]].head()

    def _first(self, heap: list[tuple[int, float, int, int]]) -> tuple[int, float, int, int]:
        """The first cell of a heap that still has candidates; it stays."""
        while heap:
            priority, _, epoch, kind = heap[0]
            if self._cells.get((priority, kind, epoch)):
                return heap[0]
            heappop(heap)
        raise LookupError("no run can be evicted: every cached run is referenced, pinned or has children")

    def _value(self, kind: int, epoch: int) -> float:
        return self._values[kind][_BIN_OF_AGE[self._epoch - epoch]]

    @property
    def num_ghost_blocks(self) -> int:
        """Number of blocks of the evicted runs remembered."""
        return self._ghost_blocks

    def __len__(self) -> int:
        return self._len

    def __contains__(self, run: object) -> bool:
        record: Any = getattr(run, "entry", None)
        return isinstance(record, _Record) and record.owner is self and record.item is not None

    def _put_in(self, run: Run, record: _Record) -> None:
        key = (run.priority, record.kind, record.epoch)
        queue = self._cells.get(key)
        if queue is None:
            queue = self._cells[key] = RunQueue()
        if not queue:
            value = self._value(record.kind, record.epoch)
            heappush(self._order, (run.priority, value, record.epoch, record.kind))
            heappush(self._by_age, (run.priority, float(record.epoch), record.epoch, record.kind))
        record.queue = queue
        record.item = queue.push(run.last_access, run)
        self._len += 1
        self._num_blocks += record.blocks

    def _take_out(self, record: _Record) -> None:
        assert record.queue is not None and record.item is not None
        record.queue.discard(record.item)
        record.item = None
        self._len -= 1
        self._num_blocks -= record.blocks
        self._alive[record.kind, record.epoch % MAX_AGE] -= record.blocks + record.trimmed

    # --- learning ----------------------------------------------------------------------------------------------------

    def _admit(self, run: Run) -> None:
        """A run that is new here: it was computed now, perhaps not for the first time."""
        if run.fingerprint in self._ghosts:
            self._count_ghosts(run.fingerprint, run.num_blocks)
        if run.last_access > self._newest:
            self._newest = run.last_access
        if not run.hits:
            self._inserted += run.num_blocks
            if self._inserted * EPOCHS_PER_CACHE >= self._capacity:
                self._next_epoch()

    def _count_ghosts(self, fingerprint: int | None, num_blocks: int) -> None:
        """Content that had left was computed again: its ghost, and those that followed it, as far as it reaches."""
        while num_blocks > 0 and fingerprint is not None and fingerprint in self._ghosts:
            kind, epoch, blocks, _ = self._ghosts[fingerprint]
            self._forget(fingerprint)
            self._count(kind, epoch, min(blocks, num_blocks))
            num_blocks -= blocks
            fingerprint = self._followers.get(fingerprint)

    def _forget(self, fingerprint: int) -> None:
        kind, epoch, blocks, parent = self._ghosts.pop(fingerprint)
        if self._followers.get(parent) == fingerprint:
            del self._followers[parent]
        self._ghost_blocks -= blocks
        if self._epoch - epoch < MAX_AGE:
            self._alive[kind, epoch % MAX_AGE] -= blocks

    def _count(self, kind: int, epoch: int, blocks: int) -> None:
        age = self._epoch - epoch
        if age < MAX_AGE:
            self._hits[kind, _BIN_OF_AGE[age]] += blocks

    def _epoch_of(self, tick: int) -> int:
        """The epoch of a tick, the oldest one that is told apart at least."""
        later = len(self._epoch_ticks) - max(1, bisect_right(self._epoch_ticks, tick))
        return self._epoch - later

    def _next_epoch(self) -> None:
        """Exposure is added up and what was counted fades. What follows for the order is worked out for the next victim."""
        # Slots of the ring from the youngest age to the oldest: down from the present one, then from the end.
        slot = self._epoch % MAX_AGE
        alive = self._alive[self._kinds]
        by_age = np.concatenate([alive[:, slot::-1], alive[:, :slot:-1]], axis=1)
        self._exposure[self._kinds] += np.add.reduceat(np.maximum(by_age, 0.0), _STARTS, axis=1)
        self._exposure *= _HISTORY
        self._hits *= _HISTORY
        self._inserted = 0.0
        self._epoch += 1
        self._epoch_ticks.append(self._newest)
        del self._epoch_ticks[:-MAX_AGE]
        self._merge_oldest()
        self._learned = (self._hits.copy(), self._exposure.copy(), self._capacity)
        self._is_ordered = False

    def _reorder(self) -> None:
        """The values of all cells are worked out anew from what was known when the epoch began."""
        self._is_ordered = True
        self._values = self._indices()
        self._cells = {key: queue for key, queue in self._cells.items() if queue}
        self._order = [(priority, self._value(kind, epoch), epoch, kind) for priority, kind, epoch in self._cells]
        heapify(self._order)
        self._by_age = [(priority, float(epoch), epoch, kind) for priority, _, epoch, kind in self._order]
        heapify(self._by_age)

    def _merge_oldest(self) -> None:
        """The slot of the ring that comes round again: its runs join those that are one epoch younger."""
        old, slot = self._epoch - MAX_AGE, self._epoch % MAX_AGE
        for key in [key for key in self._cells if key[2] <= old]:
            for run in self._cells.pop(key).clear():
                record: _Record = run.entry
                record.item = None
                self._len -= 1
                self._num_blocks -= record.blocks
                record.epoch = old + 1
                self._alive[record.kind, (old + 1) % MAX_AGE] += record.blocks + record.trimmed
                self._put_in(run, record)
        self._alive[:, slot] = 0.0

    def _indices(self) -> list[list[float]]:
        """For every kind and age bin: the most hits per block and epoch that keeping a run for some time can bring.

        With G the chance to be unused up to an age and T the time spent unused up to it, keeping a run from bin i to
        bin j brings (G[i] - G[j]) hits for (T[j] - T[i]).
        """
        all_hits, all_exposure, capacity = self._learned
        hits, exposure = all_hits.sum(axis=0), all_exposure.sum(axis=0)
        usual = (hits.sum() + 1.0) / (exposure.sum() + 100.0)
        prior, kind_prior = _PRIOR * capacity, _KIND_PRIOR * capacity
        overall = (hits + prior * usual * 8 / (_MIDDLES + 4)) / (exposure + prior)
        hazard = np.empty((len(self._kinds) + 1, _BINS))
        hazard[:-1] = (all_hits[self._kinds] + kind_prior * overall) / (all_exposure[self._kinds] + kind_prior)
        hazard[-1] = overall
        *best, unseen = _best_rates(hazard)
        values = [unseen] * NUM_KINDS  # kinds of which nothing is known are all alike
        for kind, rates in zip(self._kinds, best, strict=True):
            values[kind] = rates
        return values


def _best_rates(hazard: Floats) -> list[list[float]]:
    """Of every row of hazards by age bin: the best rate of hits from each bin on."""
    np.clip(hazard, 1e-12, 0.9, out=hazard)
    fading = np.exp(_WIDTHS * np.log1p(-hazard))
    unused = np.ones((len(hazard), _BINS + 1))
    np.cumprod(fading, axis=1, out=unused[:, 1:])
    time = np.zeros((len(hazard), _BINS + 1))
    np.cumsum(unused[:, :-1] * (1 - fading) / hazard, axis=1, out=time[:, 1:])
    gained = unused[:, :-1, None] - unused[:, None, 1:]
    spent = time[:, None, 1:] - time[:, :-1, None]
    rates = np.where(spent > 0, gained / np.where(spent > 0, spent, 1.0), 0.0)
    best: list[list[float]] = rates.max(axis=2).tolist()
    return best


def _kind(run: Run) -> int:
    depth = min((run.start.bit_length() + 1) // 2, _DEPTHS - 1)
    size = min(max(run.num_blocks.bit_length() - 1, 0) // 2, _SIZES - 1)
    return (depth * _SIZES + size) * _REUSES + (run.hits > 0)
