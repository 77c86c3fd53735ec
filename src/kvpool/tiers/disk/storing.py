"""Storing on a disk: takes a slot, writes the value, then its record, then lets loads find it. Also removes values, writes
times of use, and makes new slabs while the capacity allows.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvpool.tiers.contract import Outcome
from kvpool.tiers.disk.buffers import PAGE, ZEROS, Buffer, Call, Workers, pages
from kvpool.tiers.disk.catalog import SizeClass, State
from kvpool.tiers.disk.slab import Records, Slab, made_record, slab_bytes, slot_bytes_for
from kvpool.tiers.envelope import seal

MAX_VALUE_BYTES = 2**30
FLUSH_SECONDS = 30.0
PAUSE_SECONDS = 5.0
"""After a write failed, stores are refused for so long: each try would cost a value that is there."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Write(NamedTuple):
    """One value that is being written to its slot."""

    key: bytes
    place: int
    slab: Slab
    slot: int
    length: int
    record: Records


class Storing:
    """The stores of a tier; any number of threads may call at a time."""

    def __init__(self, state: State, workers: Workers, slab_maker: SlabMaker) -> None:
        self._state = state
        self._workers = workers
        self._slab_maker = slab_maker
        self._waiting: dict[bytes, list[tuple[Call, int]]] = {}  # who waits for each value that is being written
        self._paused_until = 0.0
        self._next_flush = time.monotonic() + FLUSH_SECONDS

    def store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        """One outcome per key, at the deadline at the latest. Writes in flight are still finished after that."""
        outcomes = [Outcome.REFUSED] * len(keys)
        if not self._state.is_writable or time.monotonic() < self._paused_until:
            return outcomes
        call = Call(self._workers, deadline)
        with self._state.lock:
            used = self._state.catalog.stamp(len(keys))
        for index, (key, view) in enumerate(zip(keys, data, strict=True)):
            if view.nbytes > MAX_VALUE_BYTES:
                continue
            found = self._reserve(call, index, key, view.nbytes, used - index, before=used - len(keys) + 1)
            if isinstance(found, Outcome):
                outcomes[index] = found
                continue
            outcomes[index] = Outcome.LATE
            buffer = self._workers.take_buffer(deadline)
            if buffer is None:
                self._end(found, Outcome.LATE)
                outcomes[index + 1 :] = [Outcome.LATE] * (len(keys) - index - 1)
                break
            if self._prepared(found, view, buffer):
                self._workers.submit(partial(self._write, found, buffer))
        _collect(call, outcomes)
        self._flush_if_due()
        return outcomes

    def _reserve(self, call: Call, index: int, key: bytes, length: int, used: int, before: int) -> _Write | Outcome:
        """A slot for a value; `OK` if it is there, `LATE` if its write is in flight, `REFUSED` if there is no room."""
        slot_bytes = slot_bytes_for(length)
        for last in (False, True):
            with self._state.lock:
                catalog = self._state.catalog
                if (place := catalog.find(key)) is not None:
                    catalog.touch_at(place, used)
                    return Outcome.OK
                if key in self._waiting:
                    call.expect()
                    self._waiting[key].append((call, index))
                    return Outcome.LATE
                size = catalog.class_for(slot_bytes)
                place = catalog.take_free(size)
                if place is None and last:  # a call does not evict what it has stored itself
                    place = catalog.take_oldest(size, before)
                if place is not None:
                    slab, slot = catalog.at(place)
                    slab.num_jobs += 1
                    call.expect()
                    self._waiting[key] = [(call, index)]
                    record = made_record(slab.slab_id, slot, key, length, used)
                    return _Write(key, place, slab, slot, length, record)
            if not last:
                self._slab_maker.make_room(slot_bytes)
        return Outcome.REFUSED

    def _prepared(self, write: _Write, view: memoryview, buffer: Buffer) -> bool:
        """Fills the buffer and empties the record in the file, so that a killed process leaves no record of the old value."""
        try:
            _fill(write, view, buffer)
            write.slab.write_record(write.slot)
        except OSError as error:
            self._workers.give_buffer(buffer)
            self._end(write, self._failed(write, error))
            return False
        return True

    def _write(self, write: _Write, buffer: Buffer) -> None:
        """In a thread of ours."""
        outcome, slab = Outcome.FAILED, write.slab
        try:
            size = PAGE + pages(write.length)
            if os.pwritev(slab.data_fd, [buffer.view(size)], slab.offset(write.slot)) != size:
                raise OSError(errno.ENOSPC, "only a part of the value was written")
            with self._state.lock:
                self._state.catalog.fill(write.place, write.record)
            slab.write_record(write.slot)
            outcome = Outcome.OK
        except Exception as error:
            outcome = self._failed(write, error)
        finally:
            self._workers.give_buffer(buffer)
            self._end(write, outcome)

    def _failed(self, write: _Write, error: Exception) -> Outcome:
        """Pauses stores, and reports why."""
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        self._state.refuse(f"{write.slab.path.name}: {getattr(error, 'strerror', None) or error}")
        return Outcome.REFUSED if isinstance(error, OSError) and error.errno in _FULL else Outcome.FAILED

    def _end(self, write: _Write, outcome: Outcome) -> None:
        """Lets loads find the value, or frees its slot if the write failed."""
        with self._state.lock:
            if outcome == Outcome.OK:
                self._state.catalog.publish(write.place, write.key)
                self._state.problem = ""
            else:
                self._state.catalog.give_back(write.place)
            waiting = self._waiting.pop(write.key)
        self._state.end_job(write.slab)
        for call, index in waiting:
            call.finish(index, outcome)

    # --- removing ----------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        """Removes values and their headers, so that they do not come back when records are rebuilt."""
        outcomes = [Outcome.MISS] * len(keys)
        call = Call(self._workers, deadline)
        with self._state.lock:
            for index, key in enumerate(keys):
                if not self._state.is_writable:
                    if self._state.catalog.find(key) is not None:
                        outcomes[index] = Outcome.FAILED
                elif (place := self._state.catalog.withdraw(key)) is not None:
                    slab, slot = self._state.catalog.at(place)
                    slab.num_jobs += 1
                    outcomes[index] = Outcome.LATE
                    call.expect()
                    self._workers.submit(partial(self._wipe, call, index, place, slab, slot))
        _collect(call, outcomes)
        return outcomes

    def _wipe(self, call: Call, index: int, place: int, slab: Slab, slot: int) -> None:
        """In a thread of ours."""
        outcome = Outcome.FAILED
        try:
            slab.write_record(slot)
            os.pwritev(slab.data_fd, [ZEROS], slab.offset(slot))
            outcome = Outcome.OK
        except Exception as error:
            self._state.report(f"{slab.path.name}: {error}")
        finally:
            with self._state.lock:
                self._state.catalog.give_back(place)
            self._state.end_job(slab)
            call.finish(index, outcome)

    # --- times of use ------------------------------------------------------------------------------------------------

    def _flush_if_due(self) -> None:
        """Writes the times of last use now and then. After a crash, some in the file are outdated."""
        if time.monotonic() < self._next_flush:
            return
        self._next_flush = time.monotonic() + FLUSH_SECONDS
        with self._state.lock:
            for slab in self._state.catalog.slabs.values():
                slab.num_jobs += 1
                self._workers.submit(partial(self._flush, slab))

    def _flush(self, slab: Slab) -> None:
        """In a thread of ours."""
        try:
            slab.write_records()
        except Exception as error:
            self._state.report(f"{slab.path.name}: {error}")
        finally:
            self._state.end_job(slab)


def _fill(write: _Write, view: memoryview, buffer: Buffer) -> None:
    """The header page, the value, and zeros to the end of the last page."""
    memory = buffer.view(PAGE + pages(write.length))
    data = memory[PAGE : PAGE + write.length]
    np.copyto(np.frombuffer(data, np.uint8), np.frombuffer(view, np.uint8))  # lets other threads run
    memory[:PAGE] = seal(write.key, data).ljust(PAGE, b"\0")
    memory[PAGE + write.length :] = bytes(memory.nbytes - PAGE - write.length)


def _collect(call: Call, outcomes: list[Outcome]) -> None:
    """Waits for writes in flight, until the deadline."""
    while call.num_pending and (finished := call.next()) is not None:
        outcomes[finished.number] = finished.outcome
    call.leave()


# --- room for values -------------------------------------------------------------------------------------------------


MAX_SLABS, FEW_SLABS = 64, 16
SMALL_SLAB_BYTES, MAX_SLAB_BYTES = 2**28, 16 * 2**30
"""A directory has 64 slabs of one size at most, unless they would be very large, and 16 if they would be small otherwise:
values that lie together are read faster, and more slabs can change their size more often."""

RETRY_SECONDS = 5.0
"""After a disk refused to hold a new slab, it is not asked again for so long."""


class SlabMaker:
    """Makes slabs for free slots. It makes files without the catalog's lock, so that look-ups never wait for them."""

    def __init__(self, directory: Path, state: State, capacity_bytes: int, *, direct: bool) -> None:
        self._directory = directory
        self._state = state
        self._capacity = capacity_bytes
        self._direct = direct
        self._growing = threading.Lock()
        self._next_try = 0.0

    def make_room(self, slot_bytes: int) -> None:
        """Makes a slab if there is no free slot. If the capacity is used up, the caller must evict a value."""
        with self._growing:
            while True:
                with self._state.lock:
                    size = self._state.catalog.class_for(slot_bytes)
                    if size.free:
                        return
                    num_slots = self._slots_of_a_new_slab(size, self._capacity - self._state.catalog.allocated_bytes)
                    given_up = None if num_slots else self._given_up(size)
                if given_up is None:
                    if num_slots:
                        self._add_slab(size, num_slots)
                    return
                given_up.delete()
                self._state.end_job(given_up)

    def _slots_of_a_new_slab(self, size: SizeClass, room: int) -> int:
        """How many slots a new slab of this class has; 0 if the capacity is used up."""
        fixed = slab_bytes(size.slot_bytes, 0)
        per_slot = slab_bytes(size.slot_bytes, 1) - fixed
        small = min(self._capacity // FEW_SLABS, SMALL_SLAB_BYTES)
        goal = min(max(self._capacity // MAX_SLABS, small), MAX_SLAB_BYTES)
        return max(0, min(max(1, (goal - fixed) // per_slot), (room - fixed) // per_slot))

    def _given_up(self, size: SizeClass) -> Slab | None:
        """Retires a slab with slots of another size, if all its values are older than the value to be evicted otherwise."""
        number = self._state.catalog.coldest_slab(size)
        if number is None or slab_bytes(size.slot_bytes, 1) > self._capacity:
            return None
        return self._state.retire(number)

    def _add_slab(self, size: SizeClass, num_slots: int) -> None:
        if time.monotonic() < self._next_try:
            return
        try:
            slab = Slab.create(self._directory, size.slot_bytes, num_slots, direct=self._direct)
        except OSError as error:
            self._next_try = time.monotonic() + RETRY_SECONDS
            self._state.refuse(f"no new slab: {error.strerror or error}")
            return
        with self._state.lock:
            self._state.catalog.add(slab)
