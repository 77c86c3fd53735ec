"""DiskTier: values on a local disk, there again after a restart. How to use it: docs/tiers.md; why it is so: decision 9."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial

from kvpool.config.layers import MAX_BYTES, check_int
from kvpool.errors import ConfigError
from kvpool.tiers.contract import DEFAULT_TIMEOUT, KeyedTier, Outcome, Room
from kvpool.tiers.disk.buffers import PAGE, Batch, Buffer, Workers, pages
from kvpool.tiers.disk.catalog import Catalog
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.growth import Growth, retire
from kvpool.tiers.disk.slab import Slab, slot_bytes_for, supports_direct
from kvpool.tiers.envelope import HEADER_BYTES, checksum, is_whole, seal
from kvpool.tiers.keys import KeySpace

MIN_CAPACITY_BYTES = 2**20
MAX_VALUE_BYTES = 2**30
MAX_THREADS = 64
MAX_WAITING = 4096
"""Jobs in the queue beyond which a call gives up at once: the disk hangs."""

FLUSH_SECONDS = 30.0
REFRESH_SECONDS = 1.0
PAUSE_SECONDS = 5.0
"""After a write failed, stores are refused for so long."""

_log = logging.getLogger("kvpool")


class DiskTier(KeyedTier):
    """Values in preallocated slab files below `directory`, up to `capacity_bytes`; the one used longest ago goes first.

    One process writes to a directory. Another one that wants to gets a `ConfigError` that names the first, or passes
    `read_only=True` and finds what the first one stores. A directory that cannot be written to is only read from, and
    `stats()` says so.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with DiskTier(directory, 2**20) as tier:
    ...         stored = tier.store([bytes(32)], [b"keys and values"])
    ...     with DiskTier(directory, 2**20) as tier:  # another day
    ...         print(stored, tier.contains([bytes(32)]))
    [<Outcome.OK: 0>] [True]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        io_threads: int = 4,
        direct: bool = True,
        read_only: bool = False,
        name: str = "disk",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(name, timeout=timeout)
        self._capacity = check_int("capacity_bytes", capacity_bytes, MIN_CAPACITY_BYTES, MAX_BYTES)
        check_int("io_threads", io_threads, 1, MAX_THREADS)
        for option, value in (("direct", direct), ("read_only", read_only)):
            if not isinstance(value, bool):
                raise ConfigError(f"{option}={value!r} must be True or False")
        checksum(bytes(32), memoryview(b""))  # says now which package is missing
        self.directory = Directory(directory, create=not read_only)
        self._writable = not read_only and self.directory.lock()
        self._write_problem = "" if read_only or self._writable else f"{self.directory.path} cannot be written to"
        self._lock = threading.Lock()  # the catalog and what is being written
        self._catalog = Catalog()
        self._writing: dict[bytes, list[tuple[Batch, int]]] = {}
        self._next_refresh = self._paused_until = 0.0
        self._next_flush = time.monotonic() + FLUSH_SECONDS
        try:
            self._open(direct)
        except OSError as error:
            self.directory.unlock()
            raise ConfigError(f"cannot read the directory {self.directory.path}: {error.strerror or error}") from None
        self._growth = Growth(
            self.directory.path, self._catalog, self._lock, self._capacity, direct=self._direct, refuse=self._refuse
        )
        self._workers = Workers(io_threads, f"kvpool-{name}")

    def _open(self, direct: bool) -> None:
        """Takes over what earlier processes left, and says in one line what is not as it should be."""
        first = None if self._writable else next(iter(self.directory.slab_paths()), None)
        self._direct = direct and (self._writable or first is not None) and supports_direct(self.directory.path, first)
        slabs, notes = self.directory.open_slabs(writable=self._writable, direct=self._direct)
        for slab in slabs:
            self._catalog.add(slab)
        if self._writable:
            while (
                self._catalog.allocated_bytes > self._capacity and (number := self._catalog.coldest_slab()) is not None
            ):
                slab = self._catalog.retire(number)
                notes.append(f"{slab.path.name} removed: the slabs took more than {self._capacity:,} bytes")
                slab.delete()
                slab.close()
            if direct and not self._direct:
                notes.append("the file system refuses direct I/O: values go through the page cache")
        elif self._write_problem:
            notes.append("cannot be written to: nothing is stored")
        self.notes = notes
        if notes:
            _log.warning("tier %s, %s: %s", self.name, self.directory.path, "; ".join(notes))

    def introduce(self, space: KeySpace) -> None:
        """Keeps the fingerprint behind the keys that will come, for `kvpool tier ls`."""
        if self._writable and not self._closed:
            try:
                self.directory.describe(space)
            except OSError as error:
                self.report(f"{error.strerror or error}: the fingerprint of {space.prefix.hex()} was not kept")

    # --- look-ups ----------------------------------------------------------------------------------------------------

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        with self._lock:
            found = self._catalog.contains(keys)
            if not self._writable and False in found and self._refreshed():
                found = self._catalog.contains(keys)
        return found

    def _look(self) -> Room:
        with self._lock:
            return Room(len(self._catalog), self._catalog.used_bytes, self._capacity, self._write_problem)

    def _refreshed(self) -> bool:
        """Takes over what the writing process has changed since; at most once a second. Called under the lock."""
        now = time.monotonic()
        if now < self._next_refresh:
            return False
        self._next_refresh = now + REFRESH_SECONDS
        paths = set(self.directory.slab_paths())
        known = {slab.path: number for number, slab in self._catalog.slabs.items()}
        for path in known.keys() - paths:
            retire(self._catalog, known[path])
        for path in paths & known.keys():
            number = known[path]
            try:
                self._catalog.update(number, self._catalog.slabs[number].reread())
            except OSError:  # given up by the writer between the two looks
                retire(self._catalog, number)
        for slab in self.directory.open_slabs(writable=False, direct=self._direct, known=set(known))[0]:
            self._catalog.add(slab)
        return True

    # --- loading -----------------------------------------------------------------------------------------------------

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        if self._workers.num_waiting > MAX_WAITING:
            return [Outcome.LATE] * len(keys)
        batch = Batch([Outcome.LATE] * len(keys))
        used = []
        with self._lock:
            if not self._writable and not all(self._catalog.contains(keys)):
                self._refreshed()
            for index, (key, view) in enumerate(zip(keys, out, strict=True)):
                place = self._catalog.find(key)
                if place is None:
                    batch.outcomes[index] = Outcome.MISS
                    continue
                slab, slot = self._catalog.at(place)
                length = int(slab.records["length"][slot])
                if length > view.nbytes:
                    batch.outcomes[index] = Outcome.FAILED
                    continue
                used.append(place)
                slab.num_jobs += 1
                batch.expect()
                self._workers.submit(partial(self._read_job, batch, index, key, place, slab, slot, view[:length]))
            self._catalog.touch(used)
        return batch.wait(deadline)

    def _read_job(
        self, batch: Batch, index: int, key: bytes, place: int, slab: Slab, slot: int, view: memoryview, buffer: Buffer
    ) -> None:
        """In a thread of ours: one value to its caller."""
        outcome = Outcome.FAILED
        try:
            outcome = self._read(batch, key, place, slab, slot, view, buffer)
        except Exception as error:
            self.report(f"{slab.path.name}: {error}")
        finally:
            self._job_done(slab)
            batch.settle(index, outcome)

    def _read(
        self, batch: Batch, key: bytes, place: int, slab: Slab, slot: int, view: memoryview, buffer: Buffer
    ) -> Outcome:
        size = PAGE + pages(view.nbytes)
        memory = buffer.view(size)
        data = memory[PAGE : PAGE + view.nbytes]
        for _ in range(2):
            if not batch.is_waited_for:
                return Outcome.LATE
            got = os.preadv(slab.data_fd, [memory], slab.offset(slot))
            if got == size and is_whole(memory[:HEADER_BYTES], key, data):
                return Outcome.OK if batch.copy(view, data) else Outcome.LATE
            with (
                self._lock
            ):  # evicted meanwhile, and its slot written again? Or evicted and stored in it anew: look twice
                if slab.retired or self._catalog.find(key) != place:
                    return Outcome.MISS
        with self._lock:
            if slab.retired or self._catalog.find(key) != place:
                return Outcome.MISS
            self._catalog.withdraw(key)
        try:
            if self._writable:
                slab.write_record(slot)
        finally:
            with self._lock:
                self._catalog.give_back(place)
        self.report(f"slot {slot} of {slab.path.name} is damaged: its value is forgotten")
        return Outcome.FAILED

    def _job_done(self, slab: Slab) -> None:
        with self._lock:
            slab.num_jobs -= 1
            if slab.retired and not slab.num_jobs:
                slab.close()

    # --- storing -----------------------------------------------------------------------------------------------------

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        batch = Batch([Outcome.REFUSED] * len(keys))
        if not self._writable or self._workers.num_waiting > MAX_WAITING or time.monotonic() < self._paused_until:
            return batch.outcomes
        with self._lock:
            used = self._catalog.stamp(len(keys))
        before = used - len(keys) + 1  # a call does not push out what it has stored itself
        for index, (key, view) in enumerate(zip(keys, data, strict=True)):
            if view.nbytes <= MAX_VALUE_BYTES and not self._begin_write(batch, index, key, view, used - index):
                self._growth.make_room(slot_bytes_for(view.nbytes))
                self._begin_write(batch, index, key, view, used - index, before)
        outcomes = batch.wait(deadline)
        self._flush_if_due()
        return outcomes

    def _begin_write(
        self, batch: Batch, index: int, key: bytes, view: memoryview, used: int, evict_before: int = 0
    ) -> bool:
        """Hands a value to the threads, if it is not there or on its way; False without a slot for it."""
        with self._lock:
            if (place := self._catalog.find(key)) is not None:
                self._catalog.touch_at(place, used)
                batch.outcomes[index] = Outcome.OK
                return True
            if key not in self._writing:
                size = self._catalog.class_for(slot_bytes_for(view.nbytes))
                place = self._catalog.take_free(size)
                if place is None and evict_before:
                    place = self._catalog.take_oldest(size, evict_before)
                if place is None:
                    return False
                slab, slot = self._catalog.at(place)
                slab.num_jobs += 1
                self._writing[key] = []
                self._workers.submit(partial(self._write_job, batch, key, place, slab, slot, view, used))
            batch.outcomes[index] = Outcome.LATE
            batch.expect()
            self._writing[key].append((batch, index))
            return True

    def _write_job(
        self, batch: Batch, key: bytes, place: int, slab: Slab, slot: int, view: memoryview, used: int, buffer: Buffer
    ) -> None:
        """In a thread of ours: one value to its slot, then its record to the index, then it is found."""
        outcome = Outcome.FAILED
        try:
            outcome = self._write(batch, key, place, slab, slot, view, used, buffer)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            outcome = Outcome.REFUSED if full else Outcome.FAILED
            self._paused_until = time.monotonic() + PAUSE_SECONDS  # each further try would cost a value that is there
            self._refuse(f"{slab.path.name}: {error.strerror or error}")
        except Exception as error:
            self.report(f"{slab.path.name}: {error}")
        finally:
            with self._lock:
                if outcome == Outcome.OK:
                    self._catalog.publish(place, key)
                    self._write_problem = ""
                else:
                    self._catalog.give_back(place)
                waiting = self._writing.pop(key)
            self._job_done(slab)
            for other, index in waiting:
                other.settle(index, outcome)

    def _write(
        self, batch: Batch, key: bytes, place: int, slab: Slab, slot: int, view: memoryview, used: int, buffer: Buffer
    ) -> Outcome:
        length = view.nbytes
        size = PAGE + pages(length)
        memory = buffer.view(size)
        data = memory[PAGE : PAGE + length]
        if not batch.copy(data, view):
            return Outcome.LATE
        memory[:PAGE] = seal(key, data).ljust(PAGE, b"\0")
        memory[PAGE + length :] = bytes(size - PAGE - length)
        slab.write_record(slot)  # empty: whoever is killed from here on leaves no record of what was in the slot
        if os.pwritev(slab.data_fd, [memory], slab.offset(slot)) != size:
            raise OSError(errno.ENOSPC, "only a part of the value was written")
        with self._lock:
            self._catalog.fill(place, key, length, used)
        slab.write_record(slot)
        return Outcome.OK

    def _refuse(self, problem: str) -> None:
        with self._lock:
            self._write_problem = problem
        self.report(problem)

    # --- removing and ending -----------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        batch = Batch([Outcome.MISS] * len(keys))
        with self._lock:
            for index, key in enumerate(keys):
                if not self._writable:
                    batch.outcomes[index] = Outcome.FAILED if self._catalog.find(key) is not None else Outcome.MISS
                elif (place := self._catalog.withdraw(key)) is not None:
                    slab, slot = self._catalog.at(place)
                    slab.num_jobs += 1
                    batch.outcomes[index] = Outcome.LATE
                    batch.expect()
                    self._workers.submit(partial(self._wipe_job, batch, index, place, slab, slot))
        return batch.wait(deadline)

    def _wipe_job(self, batch: Batch, index: int, place: int, slab: Slab, slot: int, buffer: Buffer) -> None:
        """In a thread of ours: a value must not come back when the records are made again from the headers in the slots."""
        outcome = Outcome.FAILED
        try:
            slab.write_record(slot)
            memory = buffer.view(PAGE)
            memory[:] = bytes(PAGE)
            os.pwritev(slab.data_fd, [memory], slab.offset(slot))
            outcome = Outcome.OK
        except Exception as error:
            self.report(f"{slab.path.name}: {error}")
        finally:
            with self._lock:
                self._catalog.give_back(place)
            self._job_done(slab)
            batch.settle(index, outcome)

    def _flush_if_due(self) -> None:
        """Writes the times of last use now and then: after a crash, some are older than they were."""
        if time.monotonic() < self._next_flush:
            return
        self._next_flush = time.monotonic() + FLUSH_SECONDS
        with self._lock:
            for slab in self._catalog.slabs.values():
                slab.num_jobs += 1
                self._workers.submit(partial(self._flush_job, slab))

    def _flush_job(self, slab: Slab, _: Buffer) -> None:
        try:
            slab.write_records()
        except Exception as error:
            self.report(f"{slab.path.name}: {error}")
        finally:
            self._job_done(slab)

    def _close(self) -> None:
        if not self._workers.close():  # a thread hangs in a call: if its file were closed, it might reach another one
            self.report("a read or write hangs: files stay open")
            return
        with self._lock:
            for slab in self._catalog.slabs.values():
                if self._writable:
                    try:
                        slab.write_records()
                        slab.sync()
                    except OSError as error:
                        self.report(f"{slab.path.name}: {error.strerror or error}")
                slab.close()
        self.directory.unlock()
