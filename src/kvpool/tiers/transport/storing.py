"""Stores blocks in tiers, in the background. If too many wait, further blocks are dropped and counted.

A dropped block is offered again when the next request uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

from kvpool.tiers.contract import PURGE_TIMEOUT, Keeper, Outcome, Slots, Source, Worth
from kvpool.tiers.keys import KeyPattern
from kvpool.tiers.transport.chain import WatchedTier
from kvpool.tiers.transport.staging import Bytes, SharedStage, StagingMemory
from kvpool.tiers.transport.threads import ThreadPool

STORE_TIMEOUT = 10.0  # nobody waits for it
_MAX_BATCHES = 256
_REMOVE_AT_ONCE = 1024

Listener: TypeAlias = Callable[[int, Sequence[bytes]], None]
"""Called with the number of a tier and keys when their stores have ended; `known` of the tier says which are there."""

_Stored: TypeAlias = Callable[[int, Sequence[int]], list[Outcome]]


@dataclass
class StoreStats:
    """Blocks that were offered to tiers since the engine was made, each once for every tier that lacked it."""

    stored: int = 0
    failed: int = 0  # the tier refused, failed or was late
    dropped: int = 0  # too much waited already, or the engine was closed before
    bytes_stored: int = 0
    removed: int = 0  # values that were taken out because they were invalidated
    # Values that may still be there: the tier failed, was late, or too much waited. A whole scope counts as 1.
    not_removed: int = 0


class _Part(NamedTuple):
    """Some values of a source, by number."""

    whole: Source
    chosen: Sequence[int]

    def write(self, slots: Slots) -> None:
        self.whole.write(self._of_whole(slots))

    def is_in(self, slots: Slots) -> bool:
        return self.whole.is_in(self._of_whole(slots))

    def _of_whole(self, slots: Slots) -> Slots:
        return slots._replace(numbers=[self.chosen[number] for number in slots.numbers])


class Storer:
    """Stores in tiers, each with a thread of its own, so that a slow tier does not hold up a fast one."""

    def __init__(self, tiers: Sequence[WatchedTier], memory: StagingMemory[Bytes]) -> None:
        self.tiers = tiers
        self.memory = memory
        self._threads = [ThreadPool(f"store-{watched.tier.name}", max_waiting=_MAX_BATCHES) for watched in tiers]
        self._in_flight: list[set[bytes]] = [set() for _ in tiers]
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        self._stats = StoreStats()

    def listen(self, listener: Listener) -> None:
        """From now on, calls this in the thread of a tier whenever stores have ended."""
        with self._lock:
            self._listeners.append(listener)

    def leave(self, listener: Listener) -> None:
        """Does not call this any more."""
        with self._lock:
            self._listeners.remove(listener)

    def _tell(self, index: int, keys: Sequence[bytes]) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener(index, keys)

    def is_storing(self, index: int, keys: Collection[bytes]) -> bool:
        """Whether a store of one of these keys is in flight to a tier."""
        with self._lock:
            return not self._in_flight[index].isdisjoint(keys)

    def wants(self, key: bytes) -> bool:
        """Whether some tier may lack this block, and no store of it is in flight."""
        return any(
            key not in watched.known and key not in pending
            for watched, pending in zip(self.tiers, self._in_flight, strict=True)
        )

    def take_memory(self, num_bytes: int, num_blocks: int) -> SharedStage[Bytes] | None:
        """Memory for blocks to be stored; None if too much waits already, and then they count as dropped."""
        staged = self.memory.take(num_bytes)
        if staged is None:
            self.drop(num_blocks)
            return None
        return SharedStage(self.memory, staged)

    @property
    def has_slots(self) -> bool:
        """Whether all that is stored goes to one tier, and straight into its memory: `store_straight`."""
        return len(self.tiers) == 1 and self.tiers[0].tier.has_slots

    def store(
        self,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        stage: Keeper,
        wait: Callable[[], None],
        only: Sequence[int] | None = None,
        worths: Sequence[Worth] | None = None,
    ) -> None:
        """Stores blocks in all tiers (or those of `only`) that lack them, once `wait` has returned.

        `stage` holds the rows. This call takes over one use of it from the caller.
        """

        def stored(index: int, chosen: Sequence[int]) -> list[Outcome]:
            wait()
            rated = None if worths is None else [worths[i] for i in chosen]
            return self.tiers[index].store([keys[i] for i in chosen], [rows[i] for i in chosen], STORE_TIMEOUT, rated)

        sizes = [row.nbytes for row in rows]
        for index in range(len(self.tiers)) if only is None else only:
            self._begin(index, keys, sizes, stage, stored)
        stage.release()

    def store_straight(
        self,
        keys: Sequence[bytes],
        size: int,
        memory: Keeper,
        wait: Callable[[], None],
        source: Source,
        worths: Sequence[Worth],
    ) -> None:
        """Has `source` write those blocks that the one tier lacks, all of one size, into its memory, if it `has_slots`.

        `memory` holds the blocks once `wait` has returned. This call takes over one use of it from the caller.
        """

        def stored(index: int, chosen: Sequence[int]) -> list[Outcome]:
            wait()  # before slots are reserved: they are free again the sooner
            rated, sizes = [worths[i] for i in chosen], [size] * len(chosen)
            asked = [keys[i] for i in chosen]
            return self.tiers[index].store_straight(asked, sizes, _Part(source, chosen), STORE_TIMEOUT, rated)

        self._begin(0, keys, [size] * len(keys), memory, stored)
        memory.release()

    def _begin(self, index: int, keys: Sequence[bytes], sizes: Sequence[int], memory: Keeper, stored: _Stored) -> None:
        """Has what a tier lacks stored in its thread; `stored` does that for those keys, by number."""
        known = self.tiers[index].known
        with self._lock:
            lacking = [i for i, key in enumerate(keys) if key not in known and key not in self._in_flight[index]]
            chosen = [keys[i] for i in lacking]
            self._in_flight[index].update(chosen)
        if not chosen:
            return
        memory.share()
        job = partial(self._store, index, chosen, [sizes[i] for i in lacking], memory, partial(stored, index, lacking))
        drop = partial(self._drop, index, chosen, memory)
        if not self._threads[index].submit(job, drop):
            drop()

    def _store(
        self,
        index: int,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        memory: Keeper,
        stored: Callable[[], list[Outcome]],
    ) -> None:
        """In the thread of the tier."""
        outcomes: list[Outcome] = []
        try:
            outcomes = stored()
        finally:
            num_stored = outcomes.count(Outcome.OK)
            with self._lock:
                self._in_flight[index].difference_update(keys)
                self._stats.stored += num_stored
                self._stats.failed += len(keys) - num_stored
                self._stats.bytes_stored += sum(
                    size for size, outcome in zip(sizes, outcomes, strict=False) if outcome == Outcome.OK
                )
            memory.release()
            self._tell(index, keys)

    def _drop(self, index: int, keys: Sequence[bytes], memory: Keeper) -> None:
        with self._lock:
            self._in_flight[index].difference_update(keys)
        self.drop(len(keys))
        memory.release()
        self._tell(index, keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Removes values from all tiers, after the stores that are in flight."""
        for index, threads in enumerate(self._threads):
            for at in range(0, len(keys), _REMOVE_AT_ONCE):
                part = keys[at : at + _REMOVE_AT_ONCE]
                drop = partial(self._count_removed, 0, len(part))
                if not threads.submit(partial(self._remove, index, part), drop):
                    drop()

    def _remove(self, index: int, keys: Sequence[bytes]) -> None:
        """In the thread of the tier."""
        outcomes = self.tiers[index].remove(keys, STORE_TIMEOUT)
        left = sum(outcome not in (Outcome.OK, Outcome.MISS) for outcome in outcomes)
        self._count_removed(outcomes.count(Outcome.OK), left)

    def purge(self, pattern: KeyPattern) -> None:
        """Removes all values with such keys from all tiers, after the stores that are in flight."""
        for index, threads in enumerate(self._threads):
            drop = partial(self._count_removed, 0, 1)
            if not threads.submit(partial(self._purge, index, pattern), drop):
                drop()

    def _purge(self, index: int, pattern: KeyPattern) -> None:
        """In the thread of the tier."""
        purged = self.tiers[index].purge(pattern, PURGE_TIMEOUT)
        self._count_removed(purged.removed, not purged.is_complete)

    def _count_removed(self, removed: int, left: int) -> None:
        with self._lock:
            self._stats.removed += removed
            self._stats.not_removed += left

    def drop(self, num_blocks: int) -> None:
        """Counts blocks that were not stored because too much waited."""
        with self._lock:
            self._stats.dropped += num_blocks

    @property
    def num_waiting(self) -> int:
        """Blocks in flight."""
        with self._lock:
            return sum(map(len, self._in_flight))

    def stats(self) -> StoreStats:
        """A copy of the counters."""
        with self._lock:
            return replace(self._stats)

    def flush(self, seconds: float) -> bool:
        """Waits until no store is in flight, for `seconds` at most; returns whether that is so."""
        deadline = time.monotonic() + seconds
        flushed = [threads.flush(max(0.0, deadline - time.monotonic())) for threads in self._threads]
        return all(flushed)

    def close(self, seconds: float) -> None:
        """Stores what waits, takes at most `seconds` for that, and drops the rest."""
        deadline = time.monotonic() + seconds
        self.flush(seconds)
        for threads in self._threads:
            threads.stop(max(0.0, deadline - time.monotonic()))
