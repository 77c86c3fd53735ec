"""Damaged, truncated, foreign and older files, a lost index, a full disk, a directory that cannot be written to."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import KVCacheConfig, LayerSpec
from kvpool.errors import ConfigError
from kvpool.testing import Kept, key, load, store, value
from kvpool.tiers import DiskTier, Fingerprint, KeySpace, Outcome
from kvpool.tiers.disk.buffers import BUFFERS_PER_THREAD
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.upkeep import Upkeep
from kvpool.tiers.transport.staging import page_aligned

pytestmark = pytest.mark.usefixtures("patience")

CAPACITY = 2**22
PAGE, SLOT = 4096, 12_288


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory with twenty values in one slab and one of another size in a second."""
    with DiskTier(tmp_path, CAPACITY, io_threads=1) as tier:
        store(tier, list(range(1, 5)))
        store(tier, [100], 60_000)
    assert len(list(tmp_path.glob("*.kvslab"))) == 2
    return tmp_path


def slab_of_small_values(directory: Path, suffix: str = ".kvslab") -> Path:
    """The slab whose slots are of 5,000 bytes; the head says so."""
    for path in directory.glob("*.kvslab"):
        if int.from_bytes(path.read_bytes()[16:24], "little") == SLOT:
            return path.with_suffix(suffix)
    raise AssertionError("no such slab")


def change(path: Path, offset: int, flip: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= flip
    path.write_bytes(content)


def found_after(directory: Path, numbers: list[int]) -> tuple[list[Outcome], list[str]]:
    """Outcomes, with every value checked that is returned, and what the tier said when it was opened."""
    with DiskTier(directory, CAPACITY) as tier:
        outcomes, found = load(tier, numbers)
        for number, outcome, content in zip(numbers, outcomes, found, strict=True):
            assert outcome != Outcome.OK or content == value(number)
        return outcomes, tier.notes


# --- flipped bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 8, 40, 48, 4096, 7000, 4096 + 4999], ids=str)
def test_given_a_flipped_bit_in_a_slot_then_its_value_is_never_returned_and_the_others_are(
    filled: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    change(slab_of_small_values(filled), PAGE + SLOT + offset)  # slot 1 holds the second value
    with caplog.at_level(logging.WARNING, "kvpool"), DiskTier(filled, CAPACITY) as tier:
        assert load(tier, [1, 2, 3, 4])[0] == [Outcome.OK, Outcome.FAILED, Outcome.OK, Outcome.OK]
        assert tier.contains([key(2)]) == [False]
        assert tier.stats().load_failures == 1
        assert store(tier, [2]) == [Outcome.OK]
        assert load(tier, [2]) == ([Outcome.OK], [value(2)])
    assert [record.getMessage() for record in caplog.records if "slot 1 of slab-" in record.getMessage()]


def test_given_a_flipped_bit_and_memory_that_is_kept_then_the_value_is_forgotten_and_the_others_come(
    tmp_path: Path,
) -> None:
    with DiskTier(tmp_path, CAPACITY) as tier:
        store(tier, [1, 2], 8192)
    (slab,) = tmp_path.glob("*.kvslab")
    change(slab, PAGE + PAGE + 77)  # in the first value
    out, kept = [page_aligned(8192) for _ in range(2)], Kept()
    with DiskTier(tmp_path, CAPACITY) as tier:
        assert tier.load([key(1), key(2)], out, keeper=kept) == [Outcome.FAILED, Outcome.OK]
        assert out[1].tobytes() == value(2, 8192)
        assert tier.contains([key(1), key(2)]) == [False, True]
    assert kept.users == 0


def test_given_a_file_that_is_cut_off_while_it_is_open_then_what_a_buffer_held_before_is_not_returned(
    tmp_path: Path,
) -> None:
    with DiskTier(tmp_path, CAPACITY, io_threads=1) as tier:
        store(tier, [1])
        for _ in range(BUFFERS_PER_THREAD):  # each of them has it
            assert load(tier, [1]) == ([Outcome.OK], [value(1)])
        (slab,) = tmp_path.glob("*.kvslab")
        os.truncate(slab, PAGE)
        assert load(tier, [1])[0] == [Outcome.FAILED]
        assert tier.contains([key(1)]) == [False]


def test_given_flipped_bits_in_the_index_then_those_records_are_skipped_and_reported(filled: Path) -> None:
    index = slab_of_small_values(filled, ".kvindex")
    for record, byte in ((0, 3), (1, 34), (2, 50)):  # in a key, a length, a check
        change(index, 64 + record * 64 + byte, 0x40)
    outcomes, notes = found_after(filled, [1, 2, 3, 4])
    assert outcomes == [Outcome.MISS, Outcome.MISS, Outcome.MISS, Outcome.OK]
    assert notes == [f"{index.name}: 3 damaged records skipped"]
    assert found_after(filled, [4]) == ([Outcome.OK], [])  # they were mended


def test_given_a_time_of_use_in_the_future_then_the_tier_works_on(filled: Path) -> None:
    change(slab_of_small_values(filled, ".kvindex"), 64 + 47, 0xFF)
    with DiskTier(filled, CAPACITY) as tier:
        assert load(tier, [1, 2])[0] == [Outcome.OK] * 2
        assert store(tier, list(range(200, 400))) == [Outcome.OK] * 200


@pytest.mark.parametrize("seed", range(8))
def test_given_random_damage_anywhere_then_nothing_wrong_is_returned_and_nothing_raises(
    filled: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for path in filled.iterdir():
        content = bytearray(path.read_bytes())
        kind = rng.randrange(4)
        if kind == 0 and content:
            for _ in range(50):
                content[rng.randrange(min(len(content), 80_000))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[rng.randrange(len(content) + 1) :]
        elif kind == 2:
            start = rng.randrange(len(content) + 1)
            content[start : start + 4096] = rng.randbytes(len(content[start : start + 4096]))
        path.write_bytes(content)
    outcomes, _ = found_after(filled, [1, 2, 3, 4, 5])
    assert outcomes[4] == Outcome.MISS
    with DiskTier(filled, CAPACITY) as tier:
        assert store(tier, [9]) == [Outcome.OK]
        assert load(tier, [9]) == ([Outcome.OK], [value(9)])


# --- lost, cut and foreign files -----------------------------------------------------------------------------------------


def test_given_a_deleted_index_then_it_is_made_again_from_the_headers_in_the_slots(filled: Path) -> None:
    with DiskTier(filled, CAPACITY) as tier:
        tier.remove([key(3)])
    index = slab_of_small_values(filled, ".kvindex")
    index.unlink()
    outcomes, notes = found_after(filled, [1, 2, 3, 4])
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.OK]  # what was removed does not come back
    assert notes == [f"{index.name} is missing: 3 values found again by their headers"]
    assert found_after(filled, [1, 2, 4]) == ([Outcome.OK] * 3, [])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: b"", "is cut short"),
        (lambda content: b"not an index" * 100, "is none of kvpool's files"),
        (lambda content: content[:7] + b"\x09" + content[8:], "has format 9; this kvpool reads 1: update kvpool"),
        (lambda content: content[:20] + b"\xff" + content[21:], "has a damaged head"),
    ],
)
def test_given_an_index_that_cannot_be_used_then_it_is_made_again(filled: Path, spoil: Any, said: str) -> None:
    index = slab_of_small_values(filled, ".kvindex")
    index.write_bytes(spoil(index.read_bytes()))
    outcomes, notes = found_after(filled, [1, 2, 3, 4])
    assert outcomes == [Outcome.OK] * 4
    assert notes == [f"{index.name} {said}: 4 values found again by their headers"]


def test_given_the_index_of_another_slab_then_it_is_not_believed(filled: Path) -> None:
    small = slab_of_small_values(filled, ".kvindex")
    (other,) = set(filled.glob("*.kvindex")) - {small}
    small.write_bytes(other.read_bytes())
    outcomes, notes = found_after(filled, [1, 2, 3, 4])
    assert outcomes == [Outcome.OK] * 4
    assert "belongs to another slab" in notes[0]


def test_given_a_truncated_index_then_the_records_behind_its_end_are_misses(filled: Path) -> None:
    index = slab_of_small_values(filled, ".kvindex")
    os.truncate(index, 64 + 2 * 64 + 10)
    outcomes, notes = found_after(filled, [1, 2, 3, 4])
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.MISS]
    assert len(notes) == 1


def test_given_a_truncated_slab_then_the_values_behind_its_end_are_misses_and_it_is_whole_again(filled: Path) -> None:
    slab = slab_of_small_values(filled)
    size = slab.stat().st_size
    os.truncate(slab, PAGE + 2 * SLOT + 100)
    outcomes, notes = found_after(filled, [1, 2, 3, 4])
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.MISS]
    assert f"{slab.name} is truncated: 2 of" in notes[0]
    assert slab.stat().st_size == size


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda content: content[:7] + b"\x00" + content[8:],
            "has format 0; this kvpool reads 1: `kvpool tier purge --all` removes it: skipped",
        ),
        (lambda content: b"#!/bin/sh\n" * 1000, "is none of kvpool's files: skipped"),
        (lambda content: b"", "is cut short: skipped"),
        (lambda content: content[:16] + b"\x01" + content[17:], "has a damaged head: skipped"),
    ],
)
def test_given_a_slab_of_an_older_format_or_none_at_all_then_it_is_skipped_reported_and_kept(
    filled: Path, spoil: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    slab = slab_of_small_values(filled)
    content = spoil(slab.read_bytes())
    slab.write_bytes(content)
    with caplog.at_level(logging.WARNING, "kvpool"):
        outcomes, notes = found_after(filled, [1, 2])
    assert outcomes == [Outcome.MISS, Outcome.MISS]
    assert notes == [f"{slab.name} {said}"]
    assert [record.getMessage() for record in caplog.records] == [f"tier disk, {filled}: {notes[0]}"]
    assert slab.read_bytes() == content
    with DiskTier(filled, CAPACITY) as tier:
        assert load(tier, [100], 60_000)[0] == [Outcome.OK]


def test_given_foreign_files_then_they_are_named_once_and_left_alone(filled: Path) -> None:
    (filled / "notes.txt").write_text("mine")
    (filled / "folder").mkdir()
    outcomes, notes = found_after(filled, [1])
    assert outcomes == [Outcome.OK]
    assert notes == ["not kvpool's and left alone: folder, notes.txt"]
    assert (filled / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["space-x.txt", "other.json", "slab-x.txt", "x.kvindex", "probe-x", "lock.txt"])
def test_given_a_foreign_file_whose_name_is_half_like_ours_then_it_is_left_alone(filled: Path, name: str) -> None:
    (filled / name).write_text("mine")
    assert found_after(filled, [1]) == ([Outcome.OK], [f"not kvpool's and left alone: {name}"])
    assert (filled / name).read_text() == "mine"


def test_given_what_a_killed_process_was_making_then_it_is_swept_away(filled: Path) -> None:
    (filled / "slab-0123456789abcdef.kvslab.new").write_bytes(bytes(5000))
    (filled / "slab-0123456789abcdef.kvindex").write_bytes(bytes(64))
    assert found_after(filled, [1]) == ([Outcome.OK], [])
    assert not list(filled.glob("slab-0123456789abcdef*"))


def test_given_files_that_vanish_while_the_tier_is_open_then_it_works_on(filled: Path) -> None:
    with DiskTier(filled, CAPACITY) as tier:
        for path in filled.iterdir():
            path.unlink()
        assert load(tier, [1])[0] == [Outcome.OK]  # the file is open
        assert store(tier, [2000]) == [Outcome.OK]
    assert found_after(filled, [1])[0] == [Outcome.MISS]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("suffix", [".kvslab", ".kvindex"])
@pytest.mark.usefixtures("no_waiting")
def test_given_a_fifo_in_place_of_a_file_then_that_slab_is_skipped_and_the_other_is_read(
    filled: Path, suffix: str, read_only: bool
) -> None:
    replaced = slab_of_small_values(filled, suffix)
    replaced.unlink()
    os.mkfifo(replaced)
    with DiskTier(filled, CAPACITY, read_only=read_only) as tier:
        assert load(tier, [1])[0] == [Outcome.MISS]
        assert load(tier, [100], 60_000)[0] == [Outcome.OK]
        how = "opened" if suffix == ".kvslab" else "used with its records"
        slab = replaced.with_suffix(".kvslab").name
        assert tier.notes == [f"{slab} cannot be {how} (not a plain file but a FIFO): skipped"]
    with Upkeep(filled) as upkeep:
        assert upkeep.verify(lambda _: None).num_values == 1
    assert replaced.is_fifo()


@pytest.mark.usefixtures("no_waiting")
def test_given_a_fifo_that_comes_while_a_reader_has_the_directory_open_then_its_slab_is_given_up(filled: Path) -> None:
    with DiskTier(filled, CAPACITY, read_only=True) as tier:
        index = slab_of_small_values(filled, ".kvindex")
        index.unlink()
        os.mkfifo(index)
        assert load(tier, [1, 9])[0] == [Outcome.MISS] * 2
        assert load(tier, [100], 60_000)[0] == [Outcome.OK]


@pytest.mark.usefixtures("no_waiting")
def test_given_a_fifo_in_place_of_the_lock_then_nobody_writes_and_readers_read(filled: Path) -> None:
    (filled / "lock").unlink()
    os.mkfifo(filled / "lock")
    with pytest.raises(ConfigError, match="lock is not a plain file but a FIFO; remove it"):
        DiskTier(filled, CAPACITY)
    with DiskTier(filled, CAPACITY, read_only=True) as tier:
        assert load(tier, [1])[0] == [Outcome.OK]
    assert Directory(filled, create=False).owner() == ""


@pytest.mark.usefixtures("no_waiting")
def test_given_fifos_under_the_names_of_files_to_be_made_then_they_do_not_stop_the_tier(filled: Path) -> None:
    index = slab_of_small_values(filled, ".kvindex")
    index.unlink()
    space = KeySpace(
        Fingerprint.of(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8), "tiny", "v1")
    )
    with DiskTier(filled, CAPACITY) as tier:
        os.mkfifo(filled / f"space-{space.prefix.hex()}.json.new")
        tier.introduce(space)
        assert tier.directory.descriptions() == {}
    os.mkfifo(index.with_name(index.name + ".new"))
    assert found_after(filled, [1]) == ([Outcome.OK], [])


# --- a disk that refuses -------------------------------------------------------------------------------------------------


def refusing(call: Any, number: int, when: Any = lambda *args: True) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise OSError(number, os.strerror(number))
        return call(*args, **kwargs)

    return refuse


def a_minute_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 60)


def test_given_a_disk_without_room_for_a_slab_then_stores_are_refused_and_the_statistics_say_why(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskTier(filled, CAPACITY) as tier:
        monkeypatch.setattr(os, "posix_fallocate", refusing(os.posix_fallocate, errno.ENOSPC))
        assert store(tier, [7], 200_000) == [Outcome.REFUSED]
        assert "No space left" in tier.stats().problem
        assert tier.stats().refused == 1
        assert load(tier, [1])[0] == [Outcome.OK]
        for number in range(1000, 1020):
            assert store(tier, [number]) == [Outcome.OK]  # in slots that are there, older values go
        assert tier.stats().problem == ""
        assert not list(filled.glob("*.new"))
        monkeypatch.undo()
        a_minute_later(monkeypatch)
        assert store(tier, [7], 200_000) == [Outcome.OK]


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.ENOSPC, Outcome.REFUSED), (errno.EIO, Outcome.FAILED), (errno.EROFS, Outcome.FAILED)],
)
def test_given_writes_that_fail_then_stores_pause_and_what_is_there_stays(
    filled: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Outcome
) -> None:
    with DiskTier(filled, CAPACITY) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refusing(os.pwritev, number))
            assert store(tier, [500]) == [outcome]
            assert os.strerror(number) in tier.stats().problem
            for other in range(501, 600):  # they would take the slots of values that are there, for nothing
                assert store(tier, [other]) == [Outcome.REFUSED]
        assert load(tier, [1, 2, 3, 4])[0] == [Outcome.OK] * 4
        a_minute_later(monkeypatch)
        assert store(tier, [500]) == [Outcome.OK]
        assert load(tier, [500]) == ([Outcome.OK], [value(500)])
        assert tier.stats().problem == ""


def test_given_reads_that_fail_then_they_are_failures_and_the_values_are_there_when_the_disk_is_well_again(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskTier(filled, CAPACITY) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refusing(os.preadv, errno.EIO))
            assert load(tier, [1, 99])[0] == [Outcome.FAILED, Outcome.MISS]
        assert load(tier, [1])[0] == [Outcome.OK]


def test_given_a_directory_that_cannot_be_written_to_then_it_is_read_and_stores_are_refused(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    monkeypatch.setattr(
        os, "open", refusing(real, errno.EROFS, lambda path, flags, *_: flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT))
    )
    with DiskTier(filled, CAPACITY) as tier:
        assert load(tier, [1])[0] == [Outcome.OK]
        assert store(tier, [7]) == [Outcome.REFUSED]
        assert tier.remove([key(1)]) == [Outcome.FAILED]
        assert tier.stats().problem == f"{filled} cannot be written to"
        assert tier.notes == ["cannot be written to: nothing is stored"]


def test_given_a_file_system_without_direct_io_then_values_go_through_the_page_cache_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    direct = os.O_DIRECT
    monkeypatch.setattr(os, "open", refusing(os.open, errno.EINVAL, lambda path, flags, *_: flags & direct))
    with caplog.at_level(logging.WARNING, "kvpool"), DiskTier(tmp_path, CAPACITY) as tier:
        store(tier, [1, 2])
        assert load(tier, [1, 2]) == ([Outcome.OK] * 2, [value(1), value(2)])
        assert tier.notes == ["the file system refuses direct I/O: values go through the page cache"]
    assert len(caplog.records) == 1


# --- a real small file system --------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "kvpool-test", str(tmp_path)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        pytest.skip("this user may not mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_given_a_disk_smaller_than_the_capacity_then_it_is_used_as_far_as_it_goes(small_disk: Path) -> None:
    with DiskTier(small_disk, 2**27) as tier:  # slabs of 2 MiB: the first one does not fit
        assert store(tier, [1]) == [Outcome.REFUSED]
        assert "No space left" in tier.stats().problem
    with DiskTier(small_disk, 2**21) as tier:
        outcomes = [store(tier, [number])[0] for number in range(300)]
        assert outcomes == [Outcome.OK] * 300
        held = tier.stats().num_values or 0
        assert 40 < held < 86
        assert load(tier, list(range(300 - held, 300)))[0] == [Outcome.OK] * held


def test_given_a_read_only_file_system_then_it_is_read_and_stores_are_refused(small_disk: Path) -> None:
    with DiskTier(small_disk, 2**20) as tier:
        store(tier, [1])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with DiskTier(small_disk, 2**20) as tier:
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])
        assert store(tier, [2]) == [Outcome.REFUSED]
        assert "cannot be written to" in tier.stats().problem


def test_given_a_disk_that_makes_no_slab_then_it_is_not_asked_again_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def refuse(*_: Any, **__: Any) -> Any:
        tried.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvpool.tiers.disk.storing.RETRY_SECONDS", 3600.0)
    monkeypatch.setattr("kvpool.tiers.disk.storing.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("kvpool.tiers.disk.storing.Slab.create", refuse)
    with DiskTier(tmp_path, CAPACITY, io_threads=1) as tier:
        for number in range(3):
            assert store(tier, [number]) != [Outcome.OK]
    assert len(tried) == 1


def test_given_a_disk_that_refuses_a_removal_then_the_outcome_and_the_log_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with DiskTier(tmp_path, CAPACITY, io_threads=1) as tier:
        store(tier, [1])
        monkeypatch.setattr("kvpool.tiers.disk.storing.Slab.write_record", refuse)
        assert tier.remove([key(1)]) == [Outcome.FAILED]
    assert [record.getMessage() for record in caplog.records if "Input/output error" in record.getMessage()]
