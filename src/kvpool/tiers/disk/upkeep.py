"""What `kvpool tier` does to a directory: list, check and remove values, give space back. Simple rather than fast."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.errors import ConfigError
from kvpool.tiers.disk.buffers import PAGE, ZEROS, Buffer, pages
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.slab import RECORD, Slab, fill_record, is_held
from kvpool.tiers.envelope import HEADER_BYTES, is_whole
from kvpool.tiers.keys import SPACE_BYTES, KeyPattern

Progress = Callable[[int], None]
"""Is called with how many more values are done."""
EVERY_KEY = KeyPattern()


@dataclass
class Space:
    """The values of one fingerprint in a directory."""

    prefix: bytes
    description: dict[str, Any] | None
    num_values: int = 0
    value_bytes: int = 0
    slot_bytes: int = 0
    last_use: int = 0
    """Microseconds since 1970."""


@dataclass
class Checked:
    """What `verify` found."""

    num_values: int = 0
    num_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    """Where: a slot of a slab."""
    removed: int = 0


@dataclass(frozen=True)
class StoredValue:
    """A value that was read from a directory."""

    key: bytes
    data: memoryview
    last_use: int


class Upkeep:
    """A directory opened for `kvpool tier`. With `writing`, no tier may use it; without, a tier may write meanwhile."""

    def __init__(self, path: Path, *, writing: bool = False) -> None:
        self.directory = Directory(path, create=False)
        if writing and not self.directory.lock():
            raise ConfigError(f"{path} cannot be written to")
        self._writing = writing
        try:
            self.slabs, self.notes = self.directory.open_slabs(writable=writing, direct=False)
        except OSError as error:
            self.directory.unlock()
            raise ConfigError(f"cannot read the directory {path}: {error.strerror or error}") from None
        self._buffer = Buffer()

    def __enter__(self) -> Upkeep:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for slab in self.slabs:
            with contextlib.suppress(OSError):
                if self._writing:
                    slab.sync()
            slab.close()
        self.directory.unlock()

    @property
    def num_values(self) -> int:
        """Values that have a record."""
        return sum(int(is_held(slab.records).sum()) for slab in self.slabs)

    def spaces(self) -> list[Space]:
        """The models whose values are here, the most recently used first."""
        known = self.directory.descriptions()
        found: dict[bytes, Space] = {}
        for slab in self.slabs:
            for row in slab.records[is_held(slab.records)]:
                prefix = row["key"].tobytes()[:SPACE_BYTES]
                space = found.setdefault(prefix, Space(prefix, known.get(prefix)))
                space.num_values += 1
                space.value_bytes += int(row["length"])
                space.slot_bytes += slab.slot_bytes
                space.last_use = max(space.last_use, int(row["used"]))
        return sorted(found.values(), key=lambda space: -space.last_use)

    def verify(self, progress: Progress, *, repair: bool = False) -> Checked:
        """Reads and checks every value; with `repair`, removes damaged ones."""
        result = Checked()
        for slab in self.slabs:
            for slot in np.flatnonzero(is_held(slab.records)).tolist():
                progress(1)
                data = self._read(slab, slot)
                if data is None and not self._writing and slab.is_replaced(slot):
                    continue  # an engine evicted it meanwhile
                result.num_values += 1
                if data is not None:
                    result.num_bytes += data.nbytes
                    continue
                result.damaged.append(f"slot {slot} of {slab.path.name}")
                if repair:
                    self._wipe(slab, slot)
                    result.removed += 1
        return result

    def values(self, progress: Progress, space: bytes = b"") -> Iterator[StoredValue]:
        """The intact values, of one fingerprint or all, the most recently used first."""
        places = [
            (int(slab.records["used"][slot]), number, slot)
            for number, slab in enumerate(self.slabs)
            for slot in np.flatnonzero(is_held(slab.records)).tolist()
            if slab.records["key"][slot].tobytes().startswith(space)
        ]
        for used, number, slot in sorted(places, reverse=True):
            progress(1)
            slab = self.slabs[number]
            data = self._read(slab, slot)
            if data is not None:
                yield StoredValue(slab.records["key"][slot].tobytes(), data, used)

    def purge(
        self,
        progress: Progress,
        *,
        pattern: KeyPattern = EVERY_KEY,
        keys: Collection[bytes] | None = None,
        used_before: int | None = None,
    ) -> int:
        """Removes values by a pattern or a list of keys, if they were last used before a time; returns how many."""
        removed = 0
        for slab in self.slabs:
            for slot in np.flatnonzero(is_held(slab.records)).tolist():
                progress(1)
                row = slab.records[slot]
                key = row["key"].tobytes()
                if not pattern.matches(key) or (keys is not None and key not in keys):
                    continue
                if used_before is not None and row["used"] >= used_before:
                    continue
                self._wipe(slab, slot)
                removed += 1
        return removed

    def compact(self, progress: Progress) -> int:
        """Moves values together and removes the slabs that become empty; returns the bytes given back to the disk."""
        given_back = 0
        for slot_bytes in {slab.slot_bytes for slab in self.slabs}:
            slabs = [slab for slab in self.slabs if slab.slot_bytes == slot_bytes]
            slabs.sort(key=lambda slab: int(is_held(slab.records).sum()))
            while slabs and self._emptied(slabs[0], slabs[1:], progress):
                slab = slabs.pop(0)
                given_back += slab.num_bytes
                self.slabs.remove(slab)
                slab.delete()
                slab.close()
        return given_back

    def _emptied(self, slab: Slab, others: list[Slab], progress: Progress) -> bool:
        """Copies all values of a slab into free slots of other slabs, if there are enough. Then it can be deleted."""
        free = [(other, slot) for other in others for slot in np.flatnonzero(~is_held(other.records)).tolist()]
        held = np.flatnonzero(is_held(slab.records)).tolist()
        if len(held) > len(free):
            return False
        for slot, (other, target) in zip(held, free, strict=False):
            progress(1)
            row = slab.records[slot]
            data = self._read(slab, slot)
            if data is not None:
                size = PAGE + pages(data.nbytes)
                os.pwritev(other.data_fd, [self._buffer.view(size)], other.offset(target))
                fill_record(other.records, other.slab_id, target, row["key"].tobytes(), data.nbytes, int(row["used"]))
                other.write_record(target)
        return True

    def _read(self, slab: Slab, slot: int) -> memoryview | None:
        """A value, valid until the next read; None if it is not the one that was stored."""
        length = int(slab.records["length"][slot])
        memory = self._buffer.view(PAGE + pages(length))
        try:
            if os.preadv(slab.data_fd, [memory], slab.offset(slot)) < memory.nbytes:
                return None
        except OSError:
            return None
        data = memory[PAGE : PAGE + length]
        return data if is_whole(memory[:HEADER_BYTES], slab.records["key"][slot].tobytes(), data) else None

    def _wipe(self, slab: Slab, slot: int) -> None:
        slab.records[slot] = np.zeros((), RECORD)
        slab.write_record(slot)
        os.pwritev(slab.data_fd, [ZEROS], slab.offset(slot))


def remove_everything(path: Path) -> int:
    """Deletes all files of disk tiers, also of older formats, and no others. Returns the bytes given back."""
    directory = Directory(path, create=False)
    if not directory.lock():
        raise ConfigError(f"{path} cannot be written to")
    try:
        strangers, given_back = set(directory.strangers()), 0
        for entry in path.iterdir():
            if entry.name not in strangers and entry.is_file():
                given_back += entry.stat().st_size
                entry.unlink()
        return given_back
    finally:
        directory.unlock()
