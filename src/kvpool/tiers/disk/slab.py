"""Slab: a preallocated file of slots of one size, and beside it the file of its records.

    DIR/slab-ID.kvslab    a header page | slot 0 | slot 1 | ...      slot: header page, then the value
    DIR/slab-ID.kvindex   a header of 64 bytes | record 0 | record 1 | ...

A record has 64 bytes, and there is one per slot, so that the file of records never grows:

    key (32) | number of bytes (8) | last use (8) | check of key, number, slab and slot (8) | zeros (8)

A record of zeros is a free slot. The check detects damaged records. It does not cover the last use, which is written later
and may be old. A record is only a hint: a value counts if the header in its slot agrees (`tiers/envelope.py`).

Values are written before their record. A process that is killed in between leaves a slot without a record, or a record whose
slot holds something else; both are misses. If the file of records is lost, it is rebuilt from the headers in the slots.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.files import open_plain, other_format, read_plain, write_plain
from kvpool.tiers.contract import KEY_BYTES
from kvpool.tiers.disk.buffers import PAGE, Buffer, pages
from kvpool.tiers.envelope import HEADER_BYTES, checksum, num_bytes

Records: TypeAlias = npt.NDArray[Any]
"""A structured array, one record per slot."""

RECORD = np.dtype([("key", "V32"), ("length", "<u8"), ("used", "<u8"), ("check", "<u8"), ("spare", "<u8")])
RECORD_BYTES = RECORD.itemsize

_FACTORS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
    ],
    np.uint64,
)  # odd, so that a change of any one word changes the sum


def empty_records(num_slots: int) -> Records:
    """Records of free slots."""
    return np.zeros(num_slots, RECORD)


def is_held(records: Records) -> npt.NDArray[np.bool_]:
    """Which slots have a record that is not all zeros."""
    held: npt.NDArray[np.bool_] = records["check"] != 0
    return held


def made_record(slab_id: int, slot: int, key: bytes, length: int, used: int) -> Records:
    """The record of one slot, as an array of one."""
    row = empty_records(1)
    row[0] = (key, length, used, 0, 0)
    row["check"] = _checks(row, slab_id, slot)
    return row


def fill_record(records: Records, slab_id: int, slot: int, key: bytes, length: int, used: int) -> None:
    """Fills in the record of one slot."""
    records[slot] = made_record(slab_id, slot, key, length, used)[0]


def microseconds() -> int:
    """The time of a use, as records hold it."""
    return time.time_ns() // 1000


def take_damaged(records: Records, slab_id: int, max_length: int) -> int:
    """Empties damaged records, and sets times of use that lie in the future to now; returns how many were damaged."""
    records["used"] = np.minimum(records["used"], np.uint64(microseconds()))
    words = records.view(np.uint64).reshape(len(records), -1)
    wrong = (records["check"] != _checks(records, slab_id, 0)) | (records["length"] > max_length)
    wrong &= words.any(axis=1)
    records[wrong] = np.zeros((), RECORD)
    return int(wrong.sum())


def _checks(records: Records, slab_id: int, first_slot: int) -> npt.NDArray[np.uint64]:
    """The correct check of each record; never 0."""
    words = records.view(np.uint64).reshape(len(records), -1)[:, :5]
    slots = np.arange(first_slot + 1, first_slot + 1 + len(records), dtype=np.uint64)
    sums = (words * _FACTORS[:5]).sum(axis=1, dtype=np.uint64) + slots * _FACTORS[5] + np.uint64(slab_id)
    checks: npt.NDArray[np.uint64] = (sums ^ (sums >> np.uint64(29))) | np.uint64(1)
    return checks


SLAB_SUFFIX, INDEX_SUFFIX, NEW_SUFFIX = ".kvslab", ".kvindex", ".new"
VERSION = 1
_MAGIC, _INDEX_MAGIC = b"kvslab\0", b"kvindx\0"
_FIELDS = struct.Struct("<7sBQQQQ")  # magic, version, slab id, bytes of a slot, slots, XXH3 of what stands before
_HEAD_BYTES = 64
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class UnreadableSlabError(Exception):
    """A file with the name of a slab that cannot be used; the message says why."""


class Slab:
    """One open slab. `records` is what this process uses; `write_record` copies it to the file."""

    def __init__(
        self, path: Path, slab_id: int, slot_bytes: int, num_slots: int, *, writable: bool, direct: bool
    ) -> None:
        self.path = path
        self.slab_id = slab_id
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.notes: list[str] = []
        """What was wrong with its files, one sentence each."""
        self.records = empty_records(num_slots)
        self.newest_use: int  # the catalog knows it
        self.num_jobs = 0  # reads and writes in flight; until they end, the files stay open
        self.num_writing = 0
        self.retired = False
        self._is_synced = True
        self._index_lock = threading.Lock()
        self.data_fd = _open(path, writable, direct)
        self.index_fd = -1

    # --- making and recognising --------------------------------------------------------------------------------------

    @classmethod
    def create(cls, directory: Path, slot_bytes: int, num_slots: int, *, direct: bool) -> Slab:
        """Makes and preallocates the files. If the disk refuses, raises OSError and leaves no file."""
        slab_id = int.from_bytes(os.urandom(8), "little")
        path = directory / f"slab-{slab_id:016x}{SLAB_SUFFIX}"
        new = path.with_name(path.name + NEW_SUFFIX)
        try:
            with open(new, "xb") as stream:
                stream.write(_head(_MAGIC, slab_id, slot_bytes, num_slots).ljust(PAGE, b"\0"))
                stream.flush()
                _allocate(stream.fileno(), file_bytes(slot_bytes, num_slots))
            slab = cls(new, slab_id, slot_bytes, num_slots, writable=True, direct=direct)
            slab.path = path
            try:
                slab._write_index()
                os.replace(new, path)
            except BaseException:
                slab.close()
                raise
        except BaseException:
            for leftover in (new, path.with_suffix(INDEX_SUFFIX)):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            raise
        return slab

    @classmethod
    def open(cls, path: Path, *, writable: bool, direct: bool) -> Slab:
        """Opens a slab that an earlier process made; `UnreadableSlabError` if it is none of this format."""
        try:
            slab_id, slot_bytes, num_slots = read_head(read_plain(path, _HEAD_BYTES), _MAGIC)
            slab = cls(path, slab_id, slot_bytes, num_slots, writable=writable, direct=direct)
        except OSError as error:
            raise UnreadableSlabError(f"cannot be opened ({error.strerror or error})") from None
        try:
            slab._read_records(writable)
            slab._mend_size(os.fstat(slab.data_fd).st_size, writable)
        except OSError as error:
            slab.close()
            raise UnreadableSlabError(f"cannot be used with its records ({error.strerror or error})") from None
        return slab

    def _read_records(self, writable: bool) -> None:
        """Reads the file of records. If it is missing or belongs to another slab, uses the headers in the slots."""
        path = self.path.with_suffix(INDEX_SUFFIX)
        try:
            found = read_plain(path)
            ours = read_head(found[:_HEAD_BYTES], _INDEX_MAGIC) == (self.slab_id, self.slot_bytes, self.num_slots)
            problem = "" if ours else "belongs to another slab"
        except FileNotFoundError:
            problem = "is missing"
        except UnreadableSlabError as error:
            problem = str(error)
        if problem:
            self._rebuild()
            count = int(is_held(self.records).sum())
            self.notes.append(f"{path.name} {problem}: {count} values found again by their headers")
            if writable:
                self._write_index()
            return
        self.records, damaged = self._parsed(found)
        if damaged:
            self.notes.append(f"{path.name}: {damaged} damaged records skipped")
        if writable:
            self.index_fd = open_plain(path, os.O_RDWR)

    def _parsed(self, found: bytes) -> tuple[Records, int]:
        """The records in a file and how many were damaged. If the file is too short, the other slots are free."""
        records = empty_records(self.num_slots)
        whole = min(self.num_slots, max(0, len(found) - _HEAD_BYTES) // RECORD_BYTES)
        body = found[_HEAD_BYTES : _HEAD_BYTES + whole * RECORD_BYTES]
        records[:whole] = np.frombuffer(body, RECORD)
        return records, take_damaged(records, self.slab_id, self.max_length) + self.num_slots - whole

    def reread(self) -> Records:
        """The records as they are in the file now, for a process that only reads."""
        return self._parsed(read_plain(self.path.with_suffix(INDEX_SUFFIX)))[0]

    def is_replaced(self, slot: int) -> bool:
        """Whether the writing process has since given the slot to another value, or deleted the slab.

        The writer empties the record before it touches the slot. So a reader that finds another value there asks this.
        """
        path = self.path.with_suffix(INDEX_SUFFIX)
        try:
            fd = open_plain(path)
        except FileNotFoundError:
            return not self.path.exists()
        except OSError:
            return False
        try:
            ours = read_head(os.pread(fd, _HEAD_BYTES, 0), _INDEX_MAGIC) == (
                self.slab_id,
                self.slot_bytes,
                self.num_slots,
            )
            found = os.pread(fd, RECORD_BYTES, _HEAD_BYTES + slot * RECORD_BYTES)
        except (OSError, UnreadableSlabError):
            return False
        finally:
            os.close(fd)
        record, known = np.frombuffer(found.ljust(RECORD_BYTES, b"\0"), RECORD)[0], self.records[slot]
        return ours and bool(record["key"] != known["key"] or record["check"] != known["check"])

    def _rebuild(self) -> None:
        """Rebuilds records from the headers in the slots. Their times of use are lost, so they count as the oldest."""
        fd = open_plain(self.path)
        try:
            for slot in range(self.num_slots):
                header = os.pread(fd, HEADER_BYTES, self.offset(slot))
                key = header[8 : 8 + KEY_BYTES]
                length = num_bytes(header, key)
                if length is not None and length <= self.max_length:
                    fill_record(self.records, self.slab_id, slot, key, length, 0)
        finally:
            os.close(fd)

    def _mend_size(self, size: int, writable: bool) -> None:
        """Extends a truncated slab to its full size; values behind the old end are lost."""
        whole = max(0, size - PAGE) // self.slot_bytes
        if whole >= self.num_slots:
            return
        self.records[whole:] = empty_records(self.num_slots - whole)
        self.notes.append(f"{self.path.name} is truncated: {whole} of {self.num_slots} slots are left")
        if writable:
            _allocate(self.data_fd, file_bytes(self.slot_bytes, self.num_slots))
            self.write_records()

    def _write_index(self) -> None:
        """Writes a new file of records, completely or not at all."""
        path = self.path.with_suffix(INDEX_SUFFIX)
        new = path.with_name(path.name + NEW_SUFFIX)
        write_plain(new, _head(_INDEX_MAGIC, self.slab_id, self.slot_bytes, self.num_slots) + self.records.tobytes())
        os.replace(new, path)
        self.index_fd = open_plain(path, os.O_RDWR)

    # --- using -------------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of its files on the disk."""
        return slab_bytes(self.slot_bytes, self.num_slots)

    @property
    def max_length(self) -> int:
        """The longest value that fits into a slot."""
        return self.slot_bytes - PAGE

    def offset(self, slot: int) -> int:
        """Where a slot begins in the file."""
        return PAGE + slot * self.slot_bytes

    def write_record(self, slot: int) -> None:
        """Copies one record to the file."""
        with self._index_lock:
            self._is_synced = False
            os.pwrite(self.index_fd, self.records[slot].tobytes(), _HEAD_BYTES + slot * RECORD_BYTES)

    def write_records(self) -> None:
        """Copies all records to the file, with the times of last use."""
        with self._index_lock:
            os.pwrite(self.index_fd, self.records.tobytes(), _HEAD_BYTES)

    def sync(self) -> None:
        """Waits until the disk has every value; times of last use may be lost."""
        if not self._is_synced:
            for fd in (self.data_fd, self.index_fd):
                os.fsync(fd)
            self._is_synced = True

    def delete(self) -> None:
        """Takes its files out of the directory; readers that have it open go on."""
        for path in (self.path, self.path.with_suffix(INDEX_SUFFIX)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def close(self) -> None:
        """Closes its files."""
        for fd in (self.data_fd, self.index_fd):
            if fd != -1:
                os.close(fd)
        self.data_fd = self.index_fd = -1


def slot_bytes_for(length: int) -> int:
    """The slot of a value: a page for its header, then whole pages."""
    return PAGE + max(PAGE, pages(length))


def file_bytes(slot_bytes: int, num_slots: int) -> int:
    """The size of a slab's file."""
    return PAGE + slot_bytes * num_slots


def slab_bytes(slot_bytes: int, num_slots: int) -> int:
    """Bytes that a slab of `num_slots` slots takes on the disk, with its records."""
    return file_bytes(slot_bytes, num_slots) + _HEAD_BYTES + num_slots * RECORD_BYTES


def read_head(head: bytes, magic: bytes = _MAGIC) -> tuple[int, int, int]:
    """Slab id, bytes per slot and number of slots from the header; raises `UnreadableSlabError` if it is none."""
    if len(head) < _FIELDS.size:
        raise UnreadableSlabError("is cut short")
    found, version, slab_id, slot_bytes, num_slots, check = _FIELDS.unpack(head[: _FIELDS.size])
    if found != magic:
        raise UnreadableSlabError("is none of kvpool's files")
    if problem := other_format(version, VERSION, VERSION, "`kvpool tier purge --all` removes it"):
        raise UnreadableSlabError(problem)
    sound = slot_bytes % PAGE == 0 and slot_bytes >= 2 * PAGE and num_slots > 0
    if check != _head_check(head[: _FIELDS.size - 8]) or not sound:
        raise UnreadableSlabError("has a damaged head")
    return slab_id, slot_bytes, num_slots


def _head(magic: bytes, slab_id: int, slot_bytes: int, num_slots: int) -> bytes:
    start = _FIELDS.pack(magic, VERSION, slab_id, slot_bytes, num_slots, 0)[:-8]
    return (start + _head_check(start).to_bytes(8, "little")).ljust(_HEAD_BYTES, b"\0")


def _head_check(start: bytes) -> int:
    return checksum(bytes(KEY_BYTES), memoryview(start))


def _open(path: Path, writable: bool, direct: bool) -> int:
    flags = os.O_RDWR if writable else os.O_RDONLY
    return open_plain(path, flags | _O_DIRECT if direct else flags)


def _allocate(fd: int, size: int) -> None:
    """Gives the file its size and, if the file system can, allocates its blocks. So a full disk fails now, not later."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # not on this system
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)


def supports_direct(directory: Path, readable: Path | None) -> bool:
    """Whether direct I/O works: for writing in this directory, or for reading the given file."""
    if not _O_DIRECT:
        return False
    probe = readable or directory / f"probe-{os.getpid()}{NEW_SUFFIX}"
    flags = os.O_RDONLY if readable else os.O_RDWR | os.O_CREAT
    try:
        fd = open_plain(probe, flags | _O_DIRECT, 0o600)
        try:
            memory = Buffer().view(PAGE)
            os.preadv(fd, [memory], 0) if readable else os.pwritev(fd, [memory], 0)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno not in (errno.EINVAL, errno.EOPNOTSUPP)  # a full disk says nothing about direct I/O
    finally:
        if not readable:
            with contextlib.suppress(OSError):
                probe.unlink()
    return True
