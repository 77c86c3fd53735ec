"""Each call of the operating system that a disk tier makes fails in turn: what a tier said holds, and nothing is lost.

After the failure the same tier works again, and the next one finds the directory as the outcomes said.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.testing import key, load, store, value
from kvpool.tiers import DiskTier, Outcome
from kvpool.tiers.disk.buffers import BUFFERS_PER_THREAD
from kvpool.tiers.disk.slab import is_held

CAPACITY = 2**21
LARGE = 100_000
CALLS = ("open", "pread", "preadv", "pwrite", "pwritev", "posix_fallocate", "replace", "fsync", "unlink")
UNTOUCHED, REMOVED, NEW, IN_A_NEW_SLAB, LATER = 1, 2, 5, 200, 6


class Fault:
    """Counts calls of the operating system, and lets one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int | None) -> None:
        self.count = 0
        self.failed = ""
        self._number = number
        self._lock = threading.Lock()
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                is_chosen = self.count == self._number
                self.count += 1
            if is_chosen:
                self.failed = name
                raise OSError(errno.EIO, "Input/output error")
            return call(*arguments, **options)

        return counted


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with four values, and the files that a killed process leaves."""
    directory = tmp_path_factory.mktemp("filled")
    with DiskTier(directory, CAPACITY, io_threads=1, timeout=60) as tier:
        assert store(tier, [1, 2, 3, 4]) == [Outcome.OK] * 4
    (directory / "slab-0123456789abcdef.kvindex").write_bytes(bytes(64))
    return directory


@contextmanager
def no_file_left(directory: Path) -> Iterator[None]:
    yield
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    kept = [os.readlink(link) for link in links if os.path.islink(link)]
    assert [path for path in kept if path.startswith(f"{directory}/")] == []


def assert_sound(tier: DiskTier) -> None:
    """Every slot is free or found, no job and no write is under way, and every buffer is back."""
    catalog = tier._state.catalog
    held = sum(int(is_held(slab.records).sum()) for slab in catalog.slabs.values())
    free = [place for size in catalog.classes.values() for place in size.free]
    assert held == len(catalog)
    assert held + len(free) == sum(slab.num_slots for slab in catalog.slabs.values())
    assert len(set(free)) == len(free)
    assert catalog.used_bytes == sum(
        int(is_held(slab.records).sum()) * slab.slot_bytes for slab in catalog.slabs.values()
    )
    assert catalog.allocated_bytes == sum(slab.num_bytes for slab in catalog.slabs.values())
    assert all(not slab.num_writing and not slab.num_jobs for slab in catalog.slabs.values())
    assert tier._workers._buffers.qsize() == BUFFERS_PER_THREAD * len(tier._workers._threads)
    assert tier._storing._waiting == {}


def use(tier: DiskTier) -> tuple[dict[int, Outcome], Outcome]:
    """What became of two stores and of a removal. Whatever is loaded is right."""
    stored = {NEW: store(tier, [NEW])[0], IN_A_NEW_SLAB: store(tier, [IN_A_NEW_SLAB], LARGE)[0]}
    removed = tier.remove([key(REMOVED)])[0]
    for number, size in ((UNTOUCHED, 5000), (REMOVED, 5000), (NEW, 5000), (IN_A_NEW_SLAB, LARGE)):
        (outcome,), (found,) = load(tier, [number], size)
        assert outcome in (Outcome.OK, Outcome.MISS, Outcome.FAILED)
        assert outcome != Outcome.OK or found == value(number, size)
    assert_sound(tier)
    return stored, removed


def later(patch: pytest.MonkeyPatch) -> None:
    clock = time.monotonic
    patch.setattr(time, "monotonic", lambda: clock() + 60)


def num_calls(filled: Path, directory: Path) -> int:
    """How many calls there are if none fails."""
    shutil.copytree(filled, directory)
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(patch, None)
        with DiskTier(directory, CAPACITY, io_threads=1, timeout=60) as tier:
            assert use(tier) == ({NEW: Outcome.OK, IN_A_NEW_SLAB: Outcome.OK}, Outcome.OK)
        return fault.count


def test_given_each_call_fails_once_then_what_the_tier_said_holds_and_nothing_is_lost(
    filled: Path, tmp_path: Path
) -> None:
    failed = set()
    for number in range(num_calls(filled, tmp_path / "counted")):
        directory = tmp_path / str(number)
        shutil.copytree(filled, directory)
        stored, removed = dict.fromkeys((NEW, IN_A_NEW_SLAB), Outcome.FAILED), Outcome.FAILED
        with pytest.MonkeyPatch.context() as patch, no_file_left(directory):
            fault = Fault(patch, number)
            try:
                with DiskTier(directory, CAPACITY, io_threads=1, timeout=60) as tier:
                    stored, removed = use(tier)
                    if fault.failed and tier._state.is_writable:  # else closing is what fails
                        later(patch)
                        assert store(tier, [LATER]) == [Outcome.OK]
                        assert load(tier, [LATER]) == ([Outcome.OK], [value(LATER)])
                        assert_sound(tier)
            except ConfigError:
                pass
            failed.add(fault.failed)
        with DiskTier(directory, CAPACITY, io_threads=1, timeout=60) as tier:
            assert tier.notes == []
            assert load(tier, [UNTOUCHED, 3, 4]) == ([Outcome.OK] * 3, [value(UNTOUCHED), value(3), value(4)])
            for each, size in ((NEW, 5000), (IN_A_NEW_SLAB, LARGE)):
                (outcome,), (found,) = load(tier, [each], size)
                assert outcome in ((Outcome.OK,) if stored[each] == Outcome.OK else (Outcome.OK, Outcome.MISS))
                assert outcome == Outcome.MISS or found == value(each, size)
            assert load(tier, [REMOVED])[0] in (
                [[Outcome.MISS]] if removed == Outcome.OK else [[Outcome.MISS], [Outcome.OK]]
            )
            assert_sound(tier)
        assert sorted(path.suffix for path in directory.iterdir()) == sorted(
            ["", *[".kvslab", ".kvindex"] * len(tier._state.catalog.slabs)]
        )
    assert failed == set(CALLS) - {"pread"}
