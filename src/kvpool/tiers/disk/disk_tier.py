"""DiskTier: values on a local disk that survive a restart. How to use it: docs/tiers.md; why it is built so: decision 9."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.checks import check_int
from kvpool.config.layers import MAX_BYTES, Tier
from kvpool.errors import ConfigError
from kvpool.tiers.contract import CALL_TIMEOUT, Keeper, KeyedTier, Outcome, Purged, Room
from kvpool.tiers.disk.buffers import Workers
from kvpool.tiers.disk.catalog import State
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.loading import Loading
from kvpool.tiers.disk.slab import Records, supports_direct
from kvpool.tiers.disk.storing import SlabMaker, Storing
from kvpool.tiers.envelope import checksum
from kvpool.tiers.keys import KeyPattern, KeySpace
from kvpool.tiers.options import FLAG, SECONDS, count, option, size

MIN_CAPACITY_BYTES = 2**20
MAX_THREADS = 64
REFRESH_SECONDS = 1.0

_log = logging.getLogger("kvpool")


@dataclass(frozen=True)
class DiskOptions:
    """The options of `disk:DIRECTORY?option=value`."""

    bytes: int = option(size(1), 0)
    threads: int = option(count(1, MAX_THREADS), 4)
    direct: bool = option(FLAG, True)
    read_only: bool = option(FLAG, False)
    timeout: float = option(SECONDS, CALL_TIMEOUT)


class DiskTier(KeyedTier):
    """Values in preallocated slab files in `directory`, up to `capacity_bytes`. It evicts the value used longest ago.

    One process writes to a directory. A second one gets a `ConfigError` that names the first. With `read_only=True` it
    opens the directory and finds what the first one stores. A directory that cannot be written to is only read, and
    `stats()` says so.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with DiskTier(directory, 2**20) as tier:
    ...         stored = tier.store([bytes(32)], [b"keys and values"])
    ...     with DiskTier(directory, 2**20) as tier:  # another day
    ...         print(stored, tier.contains([bytes(32)]))
    [<Outcome.OK: 0>] [True]
    """

    medium = Tier.DISK

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        io_threads: int = 4,
        direct: bool = True,
        read_only: bool = False,
        name: str = "disk",
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        super().__init__(name, timeout=timeout)
        self._capacity = check_int(capacity_bytes, "capacity_bytes", MIN_CAPACITY_BYTES, MAX_BYTES)
        check_int(io_threads, "io_threads", 1, MAX_THREADS)
        for name_of, value in (("direct", direct), ("read_only", read_only)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name_of}={value!r} must be True or False")
        checksum(bytes(32), memoryview(b""))  # raises now if the package is missing
        self.directory = Directory(directory, create=not read_only)
        self._state = State(self.report)
        self._state.is_writable = not read_only and self.directory.lock()
        if not read_only and not self._state.is_writable:
            self._state.problem = f"{self.directory.path} cannot be written to"
        self._next_refresh = 0.0
        try:
            self._direct = self._open(direct)
        except OSError as error:
            self.directory.unlock()
            raise ConfigError(f"cannot read the directory {self.directory.path}: {error.strerror or error}") from None
        self._workers = Workers(io_threads, f"kvpool-{name}")
        self._loading = Loading(self._state, self._workers, self.left_unfilled)
        slab_maker = SlabMaker(self.directory.path, self._state, self._capacity, direct=self._direct)
        self._storing = Storing(self._state, self._workers, slab_maker)

    def _open(self, direct: bool) -> bool:
        """Opens the slabs of earlier processes, and logs all problems in one line."""
        state, catalog = self._state, self._state.catalog
        first = None if state.is_writable else next(iter(self.directory.slab_paths()), None)
        possible = (state.is_writable or first is not None) and supports_direct(self.directory.path, first)
        slabs, notes = self.directory.open_slabs(writable=state.is_writable, direct=direct and possible)
        for slab in slabs:
            catalog.add(slab)
        if state.is_writable:
            while catalog.allocated_bytes > self._capacity and (number := catalog.coldest_slab()) is not None:
                slab = state.retire(number)
                slab.delete()
                state.end_job(slab)
                notes.append(f"{slab.path.name} removed: the slabs took more than {self._capacity:,} bytes")
            if direct and not possible:
                notes.append("the file system refuses direct I/O: values go through the page cache")
        elif state.problem:
            notes.append("cannot be written to: nothing is stored")
        self.notes = notes
        if notes:
            _log.warning("tier %s, %s: %s", self.name, self.directory.path, "; ".join(notes))
        return direct and possible

    def introduce(self, space: KeySpace) -> None:
        """Writes the fingerprint of the next keys to a file, for `kvpool tier ls`."""
        if self._state.is_writable and not self._closed:
            try:
                self.directory.describe(space)
            except OSError as error:
                self.report(f"{error.strerror or error}: the fingerprint of {space.prefix.hex()} was not kept")

    # --- calls -------------------------------------------------------------------------------------------------------

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        with self._state.lock:
            found = self._state.catalog.contains(keys)
            is_stale = not self._state.is_writable and False in found and time.monotonic() >= self._next_refresh
            if is_stale:
                self._next_refresh = math.inf  # until it is done: one thread reads the files
        if is_stale:
            self._refresh()
            with self._state.lock:
                found = self._state.catalog.contains(keys)
        return found

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        if not self._state.is_writable:
            self._contains(keys, deadline)  # reads what the writing process has stored
        return self._loading.load(keys, out, deadline)

    def _load_kept(
        self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float, *, keeper: Keeper
    ) -> list[Outcome]:
        if not self._state.is_writable:
            self._contains(keys, deadline)
        return self._loading.load(keys, out, deadline, keeper)

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        return self._storing.store(keys, data, deadline)

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        return self._storing.remove(keys, deadline)

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        with self._state.lock:
            found = self._state.catalog.matching(pattern)
        removed = self._remove(found, deadline).count(Outcome.OK)
        return Purged(removed, removed == len(found))

    def _look(self) -> Room:
        with self._state.lock:
            catalog = self._state.catalog
            return Room(len(catalog), catalog.used_bytes, self._capacity, self._state.problem)

    def _refresh(self) -> None:
        """Reads what the writing process has changed since; at most once a second."""
        try:
            self._read_again()
        finally:
            self._next_refresh = time.monotonic() + REFRESH_SECONDS

    def _read_again(self) -> None:
        catalog = self._state.catalog
        paths = set(self.directory.slab_paths())
        with self._state.lock:
            known = {slab.path: (number, slab) for number, slab in catalog.slabs.items()}
        changed: list[tuple[int, Records]] = []
        gone: list[int] = []
        for path, (number, slab) in known.items():
            try:
                if path in paths:
                    changed.append((number, slab.reread()))
                    continue
            except OSError:  # the writer deleted it meanwhile
                pass
            gone.append(number)
        opened, _ = self.directory.open_slabs(writable=False, direct=self._direct, known=set(known))
        with self._state.lock:
            for number, records in changed:
                catalog.update(number, records)
            retired = [self._state.retire(number) for number in gone]
            for slab in opened:
                catalog.add(slab)
        for slab in retired:
            self._state.end_job(slab)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if not self._workers.close():  # a thread hangs in a call: a closed descriptor might become another file
            self.report("a read or write hangs: files stay open")
            return
        with self._state.lock:
            slabs = list(self._state.catalog.slabs.values())
        for slab in slabs:
            if self._state.is_writable:
                try:
                    slab.write_records()
                    slab.sync()
                except OSError as error:
                    self.report(f"{slab.path.name}: {error.strerror or error}")
            slab.close()
        self.directory.unlock()
