"""A disk tier whose files, slabs and values change while a call is under way, and calls that end after their caller left."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.testing import Kept, key, load, store, value
from kvpool.tiers import DiskTier, Outcome
from kvpool.tiers.disk import disk_tier, storing
from kvpool.tiers.disk import slab as slab_module
from kvpool.tiers.disk.buffers import BUFFERS_PER_THREAD, Buffer, Call, Workers
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.upkeep import Upkeep
from kvpool.tiers.envelope import seal
from kvpool.tiers.transport.staging import page_aligned

CAPACITY = 2**21
PAGE = 4096
SECONDS = 60.0


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier(tmp_path, CAPACITY, io_threads=1, timeout=SECONDS) as made:
        yield made


# --- buffers and calls ---------------------------------------------------------------------------------------------------


@contextmanager
def workers(num_threads: int) -> Iterator[Workers]:
    made = Workers(num_threads, "test")
    yield made
    assert made.close()
    assert made._buffers.qsize() == BUFFERS_PER_THREAD * num_threads


def taken(found: Workers, deadline: float) -> Buffer:
    buffer = found.take_buffer(deadline)
    assert buffer is not None
    return buffer


def test_given_a_caller_that_leaves_then_what_ended_before_and_after_gives_its_buffers_back() -> None:
    with workers(2) as found:
        call = Call(found, time.monotonic() + SECONDS)
        buffers = [taken(found, 0.0) for _ in range(4)]
        assert found.take_buffer(0.0) is None
        for number, buffer in enumerate(buffers[:3]):
            call.expect()
            call.finish(number, Outcome.OK, buffer)
        call.finish(3, Outcome.OK)
        first = call.next()
        assert first is not None
        assert (first.number, first.outcome, first.buffer is buffers[0], call.num_pending) == (0, Outcome.OK, True, 2)
        found.give_buffer(buffers[0])
        call.leave()
        assert found._buffers.qsize() == 3
        call.finish(4, Outcome.OK, buffers[3])
        call.finish(5, Outcome.OK)


def test_given_all_buffers_in_use_then_a_call_with_jobs_in_flight_does_not_wait_for_one() -> None:
    with workers(1) as found:
        buffers = [taken(found, time.monotonic() + SECONDS) for _ in range(2)]
        call = Call(found, time.monotonic() + 3600.0)
        call.expect()
        assert call.take_buffer() is None  # at once, for one of its own will come back
        waiting = Call(found, time.monotonic() + 3600.0)
        threading.Timer(0.01, found.give_buffer, [buffers[0]]).start()
        assert waiting.take_buffer() is buffers[0]
        late = Call(found, time.monotonic() + 0.01)
        assert (late.take_buffer(), late.next()) == (None, None)
        for buffer in buffers:
            found.give_buffer(buffer)


def test_given_larger_values_then_a_buffer_grows_and_its_second_page_begins_a_huge_page() -> None:
    import numpy as np

    buffer = Buffer()
    assert [buffer.view(size).nbytes for size in (1, PAGE, PAGE + 1, 3 * 2**21, 5)] == [1, PAGE, PAGE + 1, 3 * 2**21, 5]
    whole = buffer._memory
    assert whole.nbytes == 3 * 2**21
    assert (np.frombuffer(whole, np.uint8).ctypes.data + PAGE) % 2**21 == 0
    assert buffer.view(100) is not None
    assert buffer._memory is whole


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="as on Linux")
def test_given_a_buffer_then_it_asks_for_huge_pages_and_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Small(mmap.mmap):
        def madvise(self, advice: int) -> None:  # type: ignore[override]
            asked.append(advice)
            raise OSError(errno.EINVAL, "no huge pages")

    monkeypatch.setattr(mmap, "mmap", Small)
    assert Buffer().view(PAGE + 1).nbytes == PAGE + 1
    assert asked == [mmap.MADV_HUGEPAGE]


def test_given_a_write_that_ends_after_its_caller_left_then_the_value_is_there(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), os.pwritev
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *given: (gate.wait(SECONDS), real(*given))[1])
        assert tier.store([key(1)], [value(1)], timeout=0.02) == [Outcome.LATE]
        assert tier.store([key(1)], [value(1)], timeout=0.02) == [Outcome.LATE]  # its write is in flight already
        assert tier.remove([key(1)], timeout=0.02) == [Outcome.MISS]  # nobody finds it yet
        gate.set()
        assert store(tier, [1]) == [Outcome.OK]
    assert load(tier, [1]) == ([Outcome.OK], [value(1)])
    assert tier.stats().num_values == 1


def test_given_no_buffer_until_the_deadline_then_that_value_and_all_behind_it_are_late(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store(tier, [1]) == [Outcome.OK]
    with monkeypatch.context() as patch:
        patch.setattr(tier._workers, "take_buffer", lambda deadline: None)
        keys, data = [key(number) for number in (1, 2, 3, 1)], [value(number) for number in (1, 2, 3, 1)]
        assert tier.store(keys, data, timeout=0.02) == [Outcome.OK, Outcome.LATE, Outcome.LATE, Outcome.LATE]
        assert load(tier, [1, 9])[0] == [Outcome.LATE, Outcome.MISS]
    assert all(not slab.num_writing and not slab.num_jobs for slab in tier._state.catalog.slabs.values())
    assert store(tier, [2, 3]) == [Outcome.OK] * 2


def test_given_no_buffer_when_one_comes_back_then_a_store_goes_on_at_once(tier: DiskTier) -> None:
    buffers = [taken(tier._workers, 0.0) for _ in range(BUFFERS_PER_THREAD)]
    take, asked, outcomes = tier._workers.take_buffer, threading.Event(), list[Outcome]()

    def watched(deadline: float) -> Buffer | None:
        if deadline > time.monotonic():
            asked.set()  # it waits
            return take(deadline)
        found = take(deadline)
        asked.set()
        return found

    tier._workers.take_buffer = watched  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: outcomes.extend(store(tier, [1])))
    thread.start()
    assert asked.wait(SECONDS)
    for buffer in buffers:
        tier._workers.give_buffer(buffer)
    thread.join(SECONDS / 2)
    assert outcomes == [Outcome.OK]


# --- while a value is read -----------------------------------------------------------------------------------------------


def before_reading(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Does something once, just before the first value is read."""
    real, left = os.preadv, [change]

    def preadv(*given: Any) -> int:
        if left:
            left.pop()()
        return real(*given)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("is_kept", [False, True])
def test_given_a_slab_that_is_given_up_before_or_while_it_is_read_then_its_values_are_misses(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    store(tier, [1], 8192)
    ((number, slab),) = tier._state.catalog.slabs.items()
    out, kept = [page_aligned(8192)], Kept()
    keeper = kept if is_kept else None
    with monkeypatch.context() as patch:
        patch.setattr(tier._state, "begin_job", lambda _: False)
        assert tier.load([key(1)], out, keeper=keeper) == [Outcome.MISS]

    def retire() -> None:
        with tier._state.lock:
            tier._state.retire(number)
        overwrite(slab, 0, b"somebody else's")  # a new slab may have its place on the disk

    before_reading(monkeypatch, retire)
    assert tier.load([key(1)], out, keeper=keeper) == [Outcome.MISS]
    assert (kept.users, slab.num_jobs, tier.stats().misses) == (0, 1, 2)
    tier._state.end_job(slab)
    assert (slab.data_fd, slab.index_fd) == (-1, -1)


def test_given_a_slot_that_gets_another_value_while_it_is_read_then_it_is_a_miss_and_the_other_value_stays(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, [1])
    ((_, slab),) = tier._state.catalog.slabs.items()

    def replace() -> None:
        with tier._state.lock:
            catalog = tier._state.catalog
            place = catalog.withdraw(key(1))
            assert place is not None
            catalog.fill(place, slab_module.made_record(slab.slab_id, 0, key(2), 5000, catalog.stamp(1)))
            catalog.publish(place, key(2))
        overwrite(slab, 0, seal(key(2), memoryview(value(2))), at=0)
        overwrite(slab, 0, value(2))

    before_reading(monkeypatch, replace)
    assert load(tier, [1])[0] == [Outcome.MISS]
    assert load(tier, [2]) == ([Outcome.OK], [value(2)])
    assert (slab.num_jobs, slab.num_writing, len(tier._state.catalog)) == (0, 0, 1)


def overwrite(slab: slab_module.Slab, slot: int, content: bytes, at: int = PAGE) -> None:
    with open(slab.path, "r+b") as stream:
        stream.seek(slab.offset(slot) + at)
        stream.write(content)


def test_given_a_value_that_is_stored_anew_while_it_is_read_then_the_second_read_finds_it(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, [1])
    ((_, slab),) = tier._state.catalog.slabs.items()
    with open(slab.path, "rb") as stream:
        stream.seek(slab.offset(0))
        whole = stream.read(slab.slot_bytes)
    overwrite(slab, 0, b"torn")
    real, reads = os.preadv, list[int]()

    def preadv(*given: Any) -> int:
        reads.append(1)
        if len(reads) == 2:
            overwrite(slab, 0, whole, at=0)
        return real(*given)

    monkeypatch.setattr(os, "preadv", preadv)
    assert load(tier, [1]) == ([Outcome.OK], [value(1)])
    assert (len(reads), tier.stats().load_failures) == (2, 0)


def test_given_a_file_that_was_cut_while_it_is_open_then_its_value_is_damaged_whatever_the_buffer_held(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tier, [1, 2])
    assert load(tier, [1, 2])[0] == [Outcome.OK] * 2  # every buffer holds a value that is right
    ((_, slab),) = tier._state.catalog.slabs.items()
    os.truncate(slab.path, slab.offset(1) + PAGE)
    assert load(tier, [2, 1])[0] == [Outcome.FAILED, Outcome.OK]
    assert f"slot 1 of {slab.path.name} is damaged: its value is forgotten" in caplog.text
    assert tier.contains([key(1), key(2)]) == [True, False]


def test_given_a_damaged_value_whose_record_cannot_be_written_then_it_is_forgotten_all_the_same(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, [1])
    ((_, slab),) = tier._state.catalog.slabs.items()
    overwrite(slab, 0, b"?")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(slab_module.Slab, "write_record", fail)
        assert load(tier, [1])[0] == [Outcome.FAILED]
    assert (tier.contains([key(1)]), slab.num_jobs, slab.num_writing) == ([False], 0, 0)
    assert store(tier, [1]) == [Outcome.OK]


# --- while it is written -------------------------------------------------------------------------------------------------


def test_given_a_write_of_a_part_then_the_value_is_refused_as_on_a_full_disk(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: PAGE)
        assert store(tier, [1]) == [Outcome.REFUSED]
    assert tier.stats().problem.endswith("only a part of the value was written")
    assert tier.contains([key(1)]) == [False]


def test_given_a_value_that_is_too_large_then_only_it_is_refused(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "MAX_VALUE_BYTES", 5000)
    data = [value(1), value(2, 5001), value(3)]
    assert tier.store([key(1), key(2), key(3)], data) == [Outcome.OK, Outcome.REFUSED, Outcome.OK]


def test_given_times_of_use_that_cannot_be_written_then_a_line_says_so_and_the_value_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storing, "FLUSH_SECONDS", 0.0)

    def fail(*_: Any) -> None:
        raise OSError("no more records")

    with DiskTier(tmp_path, CAPACITY, io_threads=1, timeout=SECONDS) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(slab_module.Slab, "write_records", fail)
            assert store(tier, [1]) == [Outcome.OK]
            assert tier.remove([key(1)]) == [Outcome.OK]  # by the same thread, after that
        assert all(not slab.num_jobs for slab in tier._state.catalog.slabs.values())
    assert "no more records" in caplog.text


def test_given_a_while_then_times_of_use_are_written_again_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written, real = [1000.0], list[float](), slab_module.Slab.write_records

    def noting(slab: slab_module.Slab) -> None:
        written.append(now[0])
        real(slab)

    monkeypatch.setattr(storing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(slab_module.Slab, "write_records", noting)
    with DiskTier(tmp_path, CAPACITY, io_threads=1, timeout=SECONDS) as tier:
        for number, after in enumerate((0.0, 29.9, 30.0, 30.1, 59.9, 60.0)):
            now[0] = 1000.0 + after
            assert store(tier, [number]) == [Outcome.OK]
            assert tier.remove([key(number)]) == [Outcome.OK]  # by the same thread, after that
        assert written == [1030.0, 1060.0]


@pytest.mark.parametrize(("number", "is_made"), [(errno.EOPNOTSUPP, True), (errno.EINVAL, True), (errno.EIO, False)])
def test_given_a_file_system_that_allocates_nothing_then_a_slab_has_its_size_all_the_same(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_made: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert store(tier, [1]) == [Outcome.OK if is_made else Outcome.REFUSED]
    sizes = [path.stat().st_size for path in tmp_path.glob("*.kvslab")]
    assert sizes == ([PAGE + slab.num_slots * slab.slot_bytes for slab in tier._state.catalog.slabs.values()])
    assert bool(sizes) == is_made


def test_given_a_system_without_a_call_that_allocates_then_a_slab_has_its_size_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    slab = slab_module.Slab.create(tmp_path, 3 * PAGE, 5, direct=False)
    assert slab.path.stat().st_size == PAGE + 5 * 3 * PAGE
    slab.close()


# --- opening and closing -------------------------------------------------------------------------------------------------


def test_given_a_directory_that_cannot_be_listed_then_it_is_refused_and_free_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "slab_paths", fail)
        with pytest.raises(ConfigError, match=f"cannot read the directory {tmp_path}: Input/output error"):
            DiskTier(tmp_path, CAPACITY)
    with DiskTier(tmp_path, CAPACITY) as tier:
        assert store(tier, [1]) == [Outcome.OK]


def test_given_a_thread_that_hangs_when_a_tier_is_closed_then_its_files_stay_open_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, CAPACITY, io_threads=1)
    store(tier, [1])
    ((_, slab),) = tier._state.catalog.slabs.items()
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "close", lambda _: False)
        tier.close()
    assert "a read or write hangs: files stay open" in caplog.text
    assert os.fstat(slab.data_fd).st_size > 0
    assert tier.directory.owner() == str(os.getpid())
    tier._close()
    assert (slab.data_fd, tier.directory.owner()) == (-1, "")


def test_given_threads_that_hang_then_closing_gives_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.tiers.disk.buffers.JOIN_SECONDS", 0.01)
    found, gate = Workers(2, "test"), threading.Event()
    found.submit(lambda: gate.wait(SECONDS) and None)
    assert not found.close()
    gate.set()
    for thread in found._threads:
        thread.join(SECONDS)
    assert [thread.name for thread in found._threads] == ["test-0", "test-1"]
    assert all(thread.daemon for thread in found._threads)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("is_empty", [False, True])
def test_given_a_directory_then_direct_access_is_tried_with_its_files_or_with_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, works: bool, read_only: bool, is_empty: bool
) -> None:
    with DiskTier(tmp_path, CAPACITY, direct=False) as tier:
        assert is_empty or store(tier, [1, 2]) == [Outcome.OK] * 2
        assert is_empty or store(tier, [3], 100_000) == [Outcome.OK]
    tried: list[Any] = []
    opened: list[bool] = []
    real = slab_module._open

    def tries(directory: Path, readable: Path | None) -> bool:
        tried.append((directory, readable))
        return works

    def opens(path: Path, writable: bool, is_direct: bool) -> int:
        opened.append(is_direct)
        return real(path, writable, False)

    monkeypatch.setattr(disk_tier, "supports_direct", tries)
    monkeypatch.setattr(slab_module, "_open", opens)
    with DiskTier(tmp_path, CAPACITY, direct=direct, read_only=read_only) as tier:
        slabs = sorted(tmp_path.glob("*.kvslab"))
        if read_only:
            assert tried == ([] if is_empty else [(tmp_path, slabs[0])])
        else:
            assert tried == [(tmp_path, None)]
        uses = direct and works and not (read_only and is_empty)
        assert opened == [uses] * len(slabs)
        assert bool(tier.notes) == (direct and not works and not read_only)
        if not read_only:
            assert store(tier, [9], 300_000) == [Outcome.OK]
            assert opened[-1] == uses  # of the slab that it makes


def test_given_a_file_that_cannot_be_read_then_upkeep_counts_its_values_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskTier(tmp_path, CAPACITY) as tier:
        store(tier, [1, 2])

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with Upkeep(tmp_path) as upkeep:
        for broken in (fail, lambda *_: PAGE):
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", broken)
                found = upkeep.verify(lambda _: None)
                assert (found.num_values, found.num_bytes, len(found.damaged)) == (2, 0, 2)
                assert list(upkeep.values(lambda _: None)) == []
        assert [len(each.data) for each in upkeep.values(lambda _: None)] == [5000, 5000]
