"""Catalog: which value is in which slot of which slab, which slots are free, and which value is evicted next. No I/O.

Callers hold the lock of `State` around every call. `State` also keeps slabs open while jobs use them. A place is one integer
that holds the number of a slab and a slot in it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvpool.tiers.disk.slab import RECORD, Records, Slab, is_held, microseconds
from kvpool.tiers.keys import KeyPattern

WASTE = 8
"""A value goes into larger slots that exist already if it leaves less than one part in so many unused."""

_SLOT_BITS = 32
_MIN_VICTIMS = 64


class SizeClass:
    """Slots of one size, of any number of slabs."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slabs: list[int] = []
        self.free: list[int] = []
        # Places and last uses, the oldest of the class when it was filled
        self.victims: deque[tuple[int, int]] = deque()


class Catalog:
    """All slots of a directory. Of the values used in one call, the last is evicted first, because it needs the others."""

    def __init__(self) -> None:
        self.slabs: dict[int, Slab] = {}
        self.classes: dict[int, SizeClass] = {}
        self.used_bytes = 0
        self.allocated_bytes = 0
        """What the files of all slabs take."""
        self._places: dict[bytes, int] = {}
        self._next_number = 0
        self._newest = 0

    def __len__(self) -> int:
        return len(self._places)

    # --- slabs -------------------------------------------------------------------------------------------------------

    def add(self, slab: Slab) -> None:
        """Adds a slab with its values. If another slot holds one of these values already, that slot becomes free."""
        number, self._next_number = self._next_number, self._next_number + 1
        self.slabs[number] = slab
        self.allocated_bytes += slab.num_bytes
        size = self.classes.setdefault(slab.slot_bytes, SizeClass(slab.slot_bytes))
        size.slabs.append(number)
        slab.newest_use = int(slab.records["used"].max())
        self._newest = max(self._newest, slab.newest_use)
        held = np.flatnonzero(is_held(slab.records))
        keys = slab.records["key"][held].tolist()
        expected = len(self._places) + len(keys)
        self._places.update(zip(keys, ((number << _SLOT_BITS) + held).tolist(), strict=True))
        if len(self._places) < expected:
            self._drop_unfound(number)
        self.used_bytes += int(is_held(slab.records).sum()) * slab.slot_bytes
        free = np.flatnonzero(~is_held(slab.records))[::-1]
        size.free.extend(((number << _SLOT_BITS) + free).tolist())

    def _drop_unfound(self, number: int) -> None:
        """Empties slots whose key is found in another slot. Both hold the same bytes."""
        for other_number, other in self.slabs.items():
            for slot in np.flatnonzero(is_held(other.records)).tolist():
                if self._places[other.records["key"][slot].tobytes()] != (other_number << _SLOT_BITS) + slot:
                    other.records[slot] = np.zeros((), RECORD)
                    if other_number != number:
                        self.used_bytes -= other.slot_bytes
                        self.classes[other.slot_bytes].free.append((other_number << _SLOT_BITS) + slot)

    def update(self, number: int, records: Records) -> None:
        """Takes records that another process has written to a slab."""
        slab = self.slabs[number]
        changed = np.flatnonzero((slab.records["key"] != records["key"]) | (slab.records["check"] != records["check"]))
        for slot in changed.tolist():
            place = (number << _SLOT_BITS) + slot
            if self._places.get(key := slab.records["key"][slot].tobytes()) == place:
                del self._places[key]
                self.used_bytes -= slab.slot_bytes
        slab.records = records
        for slot in changed.tolist():
            if records["check"][slot]:
                self.used_bytes += slab.slot_bytes * (records["key"][slot].tobytes() not in self._places)
                self._places[records["key"][slot].tobytes()] = (number << _SLOT_BITS) + slot

    def retire(self, number: int) -> Slab:
        """Forgets a slab and all its values; nobody may be writing to it."""
        slab = self.slabs.pop(number)
        self.allocated_bytes -= slab.num_bytes
        slab.retired = True
        held = np.flatnonzero(is_held(slab.records))
        for key in slab.records["key"][held].tolist():
            self._places.pop(key, None)
        self.used_bytes -= len(held) * slab.slot_bytes
        size = self.classes[slab.slot_bytes]
        size.slabs.remove(number)
        size.free = [place for place in size.free if place >> _SLOT_BITS != number]
        size.victims.clear()
        if not size.slabs:
            del self.classes[slab.slot_bytes]
        return slab

    def coldest_slab(self, size: SizeClass | None = None) -> int | None:
        """The slab of another class that was not used for the longest time; None if all are being written to.

        If the class has slabs itself, all values of the slab must be older than the value that it would evict otherwise.
        """
        limit = None
        if size is not None and size.slabs and (oldest := self._next_victim(size)) is not None:
            size.victims.appendleft(oldest)
            limit = oldest[1]
        best, best_used = None, None
        for number, slab in self.slabs.items():
            if slab.num_writing or (size is not None and slab.slot_bytes == size.slot_bytes):
                continue
            used = slab.newest_use
            if (limit is None or used < limit) and (best_used is None or used < best_used):
                best, best_used = number, used
        return best

    # --- values ------------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The place of a value."""
        return self._places.get(key)

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """Whether each value is there."""
        places = self._places
        return [key in places for key in keys]

    def matching(self, pattern: KeyPattern) -> list[bytes]:
        """The keys of all values that match a pattern."""
        return [key for key in self._places if pattern.matches(key)]

    def at(self, place: int) -> tuple[Slab, int]:
        """The slab and the slot of a place."""
        return self.slabs[place >> _SLOT_BITS], place & ((1 << _SLOT_BITS) - 1)

    def touch(self, places: Sequence[int]) -> None:
        """These values, in the order of a prompt, are used now. The first counts as used last, so it stays longest."""
        now = self.stamp(len(places))
        for distance, place in enumerate(places):
            self.touch_at(place, now - distance)

    def touch_at(self, place: int, used: int) -> None:
        """This value is used at this time."""
        slab, slot = self.at(place)
        slab.records["used"][slot] = used
        slab.newest_use = max(slab.newest_use, used)

    def stamp(self, count: int) -> int:
        """Makes `count` new times of use, in microseconds; returns the latest. They grow even if the clock goes back."""
        self._newest = max(self._newest + count, microseconds())
        return self._newest

    def class_for(self, slot_bytes: int) -> SizeClass:
        """The class for a value of this slot size: an existing one that wastes little, or a new one."""
        fitting = [size for size in self.classes if slot_bytes <= size <= slot_bytes + slot_bytes // WASTE]
        chosen = min(fitting, default=slot_bytes)
        return self.classes.get(chosen) or SizeClass(chosen)

    def take_free(self, size: SizeClass) -> int | None:
        """A free slot to write to."""
        return self._reserved(size.free.pop()) if size.free else None

    def take_oldest(self, size: SizeClass, before: int) -> int | None:
        """Evicts the value used longest ago and returns its slot. None if all are newer than `before` or being written."""
        victim = self._next_victim(size)
        if victim is None:
            return None
        if victim[1] >= before:
            size.victims.appendleft(victim)
            return None
        self._empty(*self.at(victim[0]))
        return self._reserved(victim[0])

    def withdraw(self, key: bytes) -> int | None:
        """Takes a value out; returns its slot, which the caller must give back."""
        place = self._places.get(key)
        if place is None:
            return None
        self._empty(*self.at(place))
        return self._reserved(place)

    def forget(self, key: bytes) -> None:
        """Takes a value out. Its slot does not become free, because another process may write to it."""
        self._empty(*self.at(self._places[key]))

    def _reserved(self, place: int) -> int:
        self.at(place)[0].num_writing += 1
        return place

    def fill(self, place: int, record: Records) -> None:
        """Gives a reserved slot its record. `find` does not see the value yet."""
        slab, slot = self.at(place)
        slab.records[slot] = record[0]
        slab.newest_use = max(slab.newest_use, int(record["used"][0]))

    def publish(self, place: int, key: bytes) -> None:
        """Lets `find` see the value."""
        slab, _ = self.at(place)
        slab.num_writing -= 1
        self._places[key] = place
        self.used_bytes += slab.slot_bytes

    def give_back(self, place: int) -> None:
        """Frees a reserved slot to which nothing was written."""
        slab, slot = self.at(place)
        slab.num_writing -= 1
        slab.records[slot] = np.zeros((), RECORD)
        self.classes[slab.slot_bytes].free.append(place)

    def _empty(self, slab: Slab, slot: int) -> None:
        del self._places[slab.records["key"][slot].tobytes()]
        slab.records[slot] = np.zeros((), RECORD)
        self.used_bytes -= slab.slot_bytes

    def _next_victim(self, size: SizeClass) -> tuple[int, int] | None:
        """The value used longest ago. Values that were not among the collected ones are all younger."""
        for _ in range(2):
            while size.victims:
                place, used = size.victims.popleft()
                slab, slot = self.at(place)
                row = slab.records[slot]
                if int(row["used"]) == used and self._places.get(row["key"].tobytes()) == place:
                    return place, used
            self._collect_victims(size)
        return None

    def _collect_victims(self, size: SizeClass) -> None:
        places, uses = [], []
        for number in size.slabs:
            records = self.slabs[number].records
            held = np.flatnonzero(is_held(records))
            places.append((number << _SLOT_BITS) + held)
            uses.append(records["used"][held].astype(np.int64))
        if not places:
            return
        place, used = np.concatenate(places), np.concatenate(uses)
        count = min(len(used), max(_MIN_VICTIMS, len(used) // _MIN_VICTIMS))
        if count:
            oldest = np.argpartition(used, count - 1)[:count]
            oldest = oldest[np.argsort(used[oldest], kind="stable")]
            size.victims.extend(zip(place[oldest].tolist(), used[oldest].tolist(), strict=True))


# --- one directory ---------------------------------------------------------------------------------------------------


class State:
    """One directory as this process sees it. Users of the catalog hold `lock`, but never during I/O."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.lock = threading.Lock()
        self.catalog = Catalog()
        self.is_writable = False
        self.problem = ""
        """Why nothing is stored at the moment."""
        self.report = report

    def refuse(self, problem: str) -> None:
        """Remembers and reports why a value was not stored."""
        with self.lock:
            self.problem = problem
        self.report(problem)

    def begin_job(self, slab: Slab) -> bool:
        """Keeps the files of a slab open for a job; False if the slab was retired."""
        with self.lock:
            if slab.retired:
                return False
            slab.num_jobs += 1
            return True

    def end_job(self, slab: Slab) -> None:
        """Ends a job. The last job of a retired slab closes its files."""
        with self.lock:
            slab.num_jobs -= 1
            is_last = slab.retired and not slab.num_jobs
        if is_last:
            slab.close()

    def retire(self, number: int) -> Slab:
        """Takes a slab out of the catalog. The caller holds the lock, and calls `end_job` after it has released it."""
        slab = self.catalog.retire(number)
        slab.num_jobs += 1
        return slab
