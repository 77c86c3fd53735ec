"""The memory of a node: one file of values that engines map, and one of records that only the node maps.

The region holds nothing but values, each in a slot of whole pages, so that a device can copy them straight. The records say
what is in which slot. A client writes to the region and never to the records: what it spoils is found by a checksum. Both
files lie in a file system of memory (/dev/shm), so they outlive the process and not the machine.

    slots:  magic and version (8) | bytes of a slab (8) | number of slabs (8) | inode of the region (8)
            slot size of each slab (8 each), up to a whole page
            records, as many for each slab as it has pages:
            key (32) | length and worth (8, `wire.rated`) | checksum (8) | owner (8) | last use (8)

A record counts as soon as its last use is not 0, which is written last.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvpool.errors import ConfigError
from kvpool.files import NotPlainError, open_plain
from kvpool.pools.arrays import Int64Array
from kvpool.tiers.contract import KEY_BYTES, Worth
from kvpool.tiers.node.wire import REGION, SLOTS, rated, unrated

PAGE = 4096
MIN_BYTES = 2**20
_MOST_SLABS = 128
_MIN_SLAB = 2**20
_MAGIC = b"kvnode\0\1"
_HEADER = struct.Struct("<8sQQQ")
_RECORD = struct.Struct("<32sQQQQ")
_USED = struct.Struct("<Q")
_USED_AT = _RECORD.size - _USED.size
_FIELDS = np.dtype([("key", "V32"), ("length", "<u8"), ("check", "<u8"), ("owner", "<u8"), ("used", "<u8")])


class Record(NamedTuple):
    """What is in a slot."""

    slab: int
    slot: int
    key: bytes
    length: int
    check: int
    owner: int
    used: int
    worth: Worth = Worth()


def slab_size(num_bytes: int) -> int:
    """How large the parts are that a region is divided into: each holds slots of one size. No value can be larger."""
    size = _MIN_SLAB
    while size * _MOST_SLABS < num_bytes:
        size *= 2
    return min(size, num_bytes // PAGE * PAGE)


def map_region(fd: int, num_bytes: int) -> memoryview:
    """The region in this process, with huge pages where the system allows them."""
    mapped = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them, or a file system
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


class Region:
    """The two files of a node, which this process owns: it holds the lock of their directory."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self.slab_bytes = slab_size(num_bytes)
        self.num_slabs = num_bytes // self.slab_bytes
        self.num_bytes = self.num_slabs * self.slab_bytes
        self._table = _HEADER.size
        self._first = PAGE  # of the records: there are 128 slabs at most
        self._per_slab = self.slab_bytes // PAGE
        records_bytes = self._first + self.num_slabs * self._per_slab * _RECORD.size
        self.fd, is_new = _opened(directory / REGION, self.num_bytes)
        try:
            _allocate(self.fd, directory, self.num_bytes)
            records, _ = _opened(directory / SLOTS, records_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = map_region(self.fd, self.num_bytes)
        self._records = mmap.mmap(records, records_bytes)
        os.close(records)
        words = np.frombuffer(self._records, np.uint64, offset=self._first).reshape(-1, _RECORD.size // 8)
        self._uses = words[:, _USED_AT // 8]
        self.is_warm = self._take_over(is_new)

    @property
    def is_whole(self) -> bool:
        """Whether nobody has cut off the file: to touch what is behind its end would end a process."""
        return os.fstat(self.fd).st_size >= self.num_bytes

    def _take_over(self, is_new: bool) -> bool:
        """Whether the records are of this region, which is not new, and this format; otherwise they begin anew."""
        header = _HEADER.pack(_MAGIC, self.slab_bytes, self.num_slabs, os.fstat(self.fd).st_ino)
        if self._records[: _HEADER.size] == header and not is_new:
            return True
        self._records[: self._first] = bytes(self._first)
        self._records[: _HEADER.size] = header
        return False

    def slot_bytes(self, slab: int) -> int:
        """The size of a slab's slots; 0 while it has none."""
        return int(_USED.unpack_from(self._records, self._table + 8 * slab)[0])

    def divide(self, slab: int, slot_bytes: int) -> None:
        """Gives a slab slots of this size, all of them empty. A node that is killed meanwhile finds none."""
        _USED.pack_into(self._records, self._table + 8 * slab, 0)
        start, end = self._at(slab, 0), self._at(slab, self._per_slab)
        self._records[start:end] = bytes(end - start)
        _USED.pack_into(self._records, self._table + 8 * slab, slot_bytes)

    def write(self, record: Record) -> None:
        """From now on the value is there, also after a restart."""
        at = self._at(record.slab, record.slot)
        length = rated(record.length, record.worth)
        _RECORD.pack_into(self._records, at, record.key, length, record.check, record.owner, 0)
        _USED.pack_into(self._records, at + _USED_AT, record.used)

    def rate(self, slab: int, slot: int, length: int, worth: Worth) -> None:
        """What is known of a value has changed."""
        _USED.pack_into(self._records, self._at(slab, slot) + KEY_BYTES, rated(length, worth))

    def row(self, slab: int, slot: int) -> int:
        """The number of a slot's record."""
        return slab * self._per_slab + slot

    def touch(self, rows: Int64Array, used: Int64Array) -> None:
        """The values of these records were used."""
        self._uses[rows] = used

    def wipe(self, slab: int, slot: int) -> None:
        """The slot holds nothing."""
        _USED.pack_into(self._records, self._at(slab, slot) + _USED_AT, 0)

    def records(self) -> Iterator[Record]:
        """What the records say, as far as it can be."""
        for slab in range(self.num_slabs):
            size = self.slot_bytes(slab)
            if not size or size % PAGE or size > self.slab_bytes:
                continue
            rows = np.frombuffer(self._records, _FIELDS, self.slab_bytes // size, self._at(slab, 0))
            for slot in np.flatnonzero(rows["used"]).tolist():
                key, number, check, owner, used = rows[slot].tolist()
                length, worth = unrated(number)
                if length <= size:
                    yield Record(slab, slot, key, length, check, owner, used, worth)

    def offset(self, slab: int, slot: int, slot_bytes: int) -> int:
        """Where a slot begins."""
        return slab * self.slab_bytes + slot * slot_bytes

    def close(self) -> None:
        """Lets go of the files; they stay as they are."""
        os.close(self.fd)

    def _at(self, slab: int, slot: int) -> int:
        return self._first + self.row(slab, slot) * _RECORD.size


def _opened(path: Path, num_bytes: int) -> tuple[int, bool]:
    """A file of exactly this size that only this user may read, and whether it was empty.

    One of another size is replaced: others may map it.
    """
    try:
        fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(fd).st_size not in (0, num_bytes):
            os.close(fd)
            path.unlink()
            fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        is_new = not os.fstat(fd).st_size
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
    except NotPlainError as error:
        raise ConfigError(f"{path} is {error.strerror}; remove it, and the node makes its own") from None
    except OSError as error:
        raise ConfigError(f"cannot make {path} ({error.strerror}); name a directory that you can write to") from None
    return fd, is_new


def _allocate(fd: int, directory: Path, num_bytes: int) -> None:
    """Takes the memory of a region now: a page that cannot be had later would kill an engine."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"{directory} has no room for {num_bytes:,} bytes ({error.strerror}); take a smaller --bytes"
        ) from None


def available_memory() -> int:
    """Bytes that the machine, and the control group of this process, can still give."""
    found = [2**62]
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        found.append(next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        found.append(max(0, int(Path("/sys/fs/cgroup/memory.max").read_text()) - used))
    return min(found)


def check_room(directory: Path, num_bytes: int) -> None:
    """Refuses a region that the machine cannot hold beside everything else; what an earlier one holds counts as free."""
    held = 0
    with contextlib.suppress(OSError):
        held = os.stat(directory / REGION).st_blocks * 512
    memory, space = available_memory() + held, os.statvfs(directory)
    room = min(memory, space.f_bavail * space.f_frsize + held)
    if num_bytes > room:
        raise ConfigError(
            f"--bytes {num_bytes:,} is more than this machine can give: {memory:,} bytes of memory are free, and "
            f"{directory} has room for {space.f_bavail * space.f_frsize + held:,}; take a smaller one"
        )
