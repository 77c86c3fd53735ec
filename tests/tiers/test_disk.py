"""The disk tier: the contract, restarts, which value goes, sizes, who may write, and wrong arguments."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool import KVCacheConfig, LayerSpec
from kvpool.errors import ConfigError
from kvpool.testing import Kept, TierContract, key, load, store, value
from kvpool.tiers import DiskTier, Fingerprint, KeyedTier, KeySpace, Outcome
from kvpool.tiers.disk import slab as slab_module
from kvpool.tiers.disk import storing as growth
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.upkeep import Upkeep, remove_everything
from kvpool.tiers.transport.staging import page_aligned

pytestmark = pytest.mark.usefixtures("patience")

SRC = Path(__file__).resolve().parents[2] / "src"
PAGE = 4096
SLOT = 12_288  # of a value of 5,000 bytes: a page for the header, two for the value


class TestDiskTier(TierContract):
    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return DiskTier(tmp_path / "cache", 10**7)


class TestDiskTierThroughThePageCache(TierContract):
    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return DiskTier(tmp_path / "cache", 10**7, direct=False)


class TestDiskTierWithOneThread(TierContract):
    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return DiskTier(tmp_path / "cache", 10**7, io_threads=1)


def store_one_by_one(tier: KeyedTier, numbers: range, size: int = 5000) -> None:
    for number in numbers:
        assert store(tier, [number], size) == [Outcome.OK]


def files_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


# --- who may look --------------------------------------------------------------------------------------------------------


def test_given_a_directory_that_a_tier_makes_then_no_other_user_may_look_into_it(tmp_path: Path) -> None:
    with DiskTier(tmp_path / "made", 2**22):
        assert (tmp_path / "made").stat().st_mode & 0o077 == 0


def test_given_a_lock_then_others_may_read_who_has_it_and_only_its_user_may_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        DiskTier(tmp_path / "cache", 2**20).close()
    finally:
        os.umask(before)
    assert (tmp_path / "cache" / "lock").stat().st_mode & 0o777 == 0o644


def test_given_a_directory_that_is_there_then_its_permissions_stay(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with DiskTier(tmp_path, 2**22):
        assert tmp_path.stat().st_mode & 0o777 == 0o750


# --- restarts ------------------------------------------------------------------------------------------------------------


def test_given_a_closed_tier_when_it_is_opened_again_then_every_value_is_there(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**22) as tier:
        store(tier, list(range(30)))
        before = tier.stats()
    with DiskTier(tmp_path, 2**22) as tier:
        after = tier.stats()
        assert (after.num_values, after.used_bytes) == (before.num_values, before.used_bytes) == (30, 30 * SLOT)
        assert load(tier, list(range(30))) == ([Outcome.OK] * 30, [value(number) for number in range(30)])
        assert tier.notes == []


def test_given_a_removed_value_when_the_tier_is_opened_again_then_it_stays_away(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**22) as tier:
        store(tier, [1, 2])
        tier.remove([key(1)])
    with DiskTier(tmp_path, 2**22) as tier:
        assert tier.contains([key(1), key(2)]) == [False, True]


def test_given_uses_before_a_restart_then_the_value_used_longest_ago_still_goes_first(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        count = 0
        while (tier.stats().num_values or 0) == count:  # until one goes
            count += 1
            store(tier, [count])
        assert tier.contains([key(1), key(2), key(3)]) == [False, True, True]
        load(tier, [2])
    with DiskTier(tmp_path, 2**20) as tier:
        store(tier, [1000])
        assert tier.contains([key(2), key(3), key(4)]) == [True, False, True]


def test_given_less_capacity_after_a_restart_then_the_coldest_slabs_go(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**22) as tier:
        store(tier, list(range(300)))
        held = tier.stats().num_values
    with DiskTier(tmp_path, 2**20) as tier:
        left = tier.stats().num_values or 0
        assert 0 < left < (held or 0)
        assert files_bytes(tmp_path) <= 2**20 + 64
        assert any("removed: the slabs took more than 1,048,576 bytes" in note for note in tier.notes)
        found = tier.contains([key(number) for number in range(300)])
        kept = [number for number in range(300) if found[number]]
        assert load(tier, kept) == ([Outcome.OK] * left, [value(number) for number in kept])


# --- which value goes ----------------------------------------------------------------------------------------------------


def test_given_a_full_tier_then_the_value_used_longest_ago_goes_and_the_files_do_not_grow(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        store_one_by_one(tier, range(100))
        held = tier.stats().num_values or 0
        assert tier.contains([key(number) for number in range(100)]) == [False] * (100 - held) + [True] * held
        load(tier, [100 - held])
        store(tier, [1000])
        assert tier.contains([key(100 - held), key(101 - held), key(1000)]) == [True, False, True]
        assert tier.stats().num_values == held
        assert files_bytes(tmp_path) <= 2**20 + 64


def test_given_values_used_in_one_call_then_the_last_goes_first_because_it_needs_the_others(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        held = 0
        while (tier.stats().num_values or 0) == held:
            held += 1
            store(tier, [held])
        held -= 1
        load(tier, list(range(2, held + 1)))  # all but the newest, as one prompt
        load(tier, [held + 1])
        store(tier, [1000])
        assert tier.contains([key(2), key(held - 1), key(held)]) == [True, True, False]


def test_given_a_batch_larger_than_the_tier_then_its_beginning_stays(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        store_one_by_one(tier, range(1000, 1100))
        held = tier.stats().num_values or 0
        outcomes = store(tier, list(range(200)))
        assert outcomes == [Outcome.OK] * held + [Outcome.REFUSED] * (200 - held)
        assert tier.contains_prefix([key(i) for i in range(200)]) == held


def test_given_a_clock_that_stands_still_then_a_call_evicts_what_the_last_one_stored_and_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module.time, "time_ns", lambda: 10**18)
    with DiskTier(tmp_path, 2**20) as tier:  # room for one of these values
        for number in (1, 2):
            assert tier.store([key(number)], [value(number, 600_000)]) == [Outcome.OK]
        numbers = [3, 4, 5]
        stored = tier.store([key(n) for n in numbers], [value(n, 600_000) for n in numbers])
        assert stored == [Outcome.OK, Outcome.REFUSED, Outcome.REFUSED]
        assert tier.contains([key(number) for number in range(1, 6)]) == [False, False, True, False, False]


def test_given_a_model_that_nobody_uses_any_more_then_its_slabs_go_to_blocks_of_another_size(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        store_one_by_one(tier, range(200))
        store_one_by_one(tier, range(1000, 1300), 20_000)
        assert (tier.stats().num_values or 0) >= 0.8 * 2**20 / (PAGE + 20_480)
        assert not any(tier.contains([key(number) for number in range(200)]))
        assert files_bytes(tmp_path) <= 2**20 + 64


def test_given_two_sizes_in_use_then_neither_takes_the_slabs_of_the_other(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        store_one_by_one(tier, range(10))
        store_one_by_one(tier, range(1000, 1020), 20_000)
        for number in range(2000, 2100):
            load(tier, list(range(10)))
            store(tier, [number], 20_000)
        assert tier.contains_prefix([key(number) for number in range(10)]) == 10


def test_given_values_of_nearly_one_size_then_they_share_slots(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**24) as tier:
        store(tier, [1], 100_000)
        store(tier, [2], 99_000)
        store(tier, [3], 50_000)
        slabs = Directory(tmp_path, create=False).slab_paths()
        assert len(slabs) == 2
        assert load(tier, [2], 99_000) == ([Outcome.OK], [value(2, 99_000)])


def test_given_a_value_larger_than_the_capacity_then_it_is_refused_and_nothing_leaves(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        store(tier, [1])
        assert tier.store([key(2)], [bytes(2**20)]) == [Outcome.REFUSED]
        assert tier.contains([key(1)]) == [True]


def test_given_an_empty_value_then_it_comes_back(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        assert tier.store([key(1)], [b""]) == [Outcome.OK]
        assert load(tier, [1], 10)[0] == [Outcome.OK]
    with DiskTier(tmp_path, 2**20) as tier:
        assert load(tier, [1], 10)[0] == [Outcome.OK]


def test_given_much_traffic_then_neither_files_nor_handles_grow(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        handles = 0
        for number in range(600):
            store(tier, [number], 3_000 + number % 3 * 6_000)
            if number == 300:
                handles = len(os.listdir("/proc/self/fd"))
        assert files_bytes(tmp_path) <= 2**20 + 64
        assert len(os.listdir("/proc/self/fd")) <= handles + 2 * growth.FEW_SLABS


def test_given_slabs_that_give_way_after_times_of_use_were_written_then_their_files_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "FLUSH_SECONDS", 0.0)  # the times are written with every value
    with DiskTier(tmp_path, 2**20) as tier:
        store_one_by_one(tier, range(100))
        store_one_by_one(tier, range(1000, 1060), 20_000)
        assert not any(tier.contains([key(number) for number in range(100)]))
    kept = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in kept if path.startswith(str(tmp_path))]


def test_given_a_short_value_behind_long_ones_then_nothing_of_theirs_is_written_behind_it(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**21, io_threads=1) as tier:
        for number in range(100):  # through every buffer
            tier.store([key(number)], [b"s" * 4000])
        tier.store([key(1000)], [b"t" * 100])
    content = b"".join(slab.read_bytes() for slab in Directory(tmp_path, create=False).slab_paths())
    behind = content.index(b"t" * 100) + 100
    assert content[behind : behind + PAGE - 100] == bytes(PAGE - 100)


def test_given_just_the_capacity_that_the_slabs_take_then_none_goes(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**22) as tier:
        store(tier, list(range(300)))
        taken, held = tier._state.catalog.allocated_bytes, tier.stats().num_values
    with DiskTier(tmp_path, taken) as tier:
        assert (tier.stats().num_values, tier.notes) == (held, [])
    with DiskTier(tmp_path, taken - 1) as tier:
        assert len(tier.notes) == 1


def test_given_a_record_that_cannot_be_written_then_the_store_fails_at_once_and_the_next_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more records")

    with DiskTier(tmp_path, 2**20, timeout=20.0) as tier:
        store(tier, [1])
        with monkeypatch.context() as patched:
            patched.setattr(slab_module.Slab, "write_record", fail)
            assert store(tier, [2]) == [Outcome.FAILED]
        assert "no more records" in tier.stats().problem
    with DiskTier(tmp_path, 2**20) as tier:
        assert (store(tier, [2]), load(tier, [1, 2])[0]) == ([Outcome.OK], [Outcome.OK] * 2)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_given_a_file_system_that_refuses_aligned_access_then_direct_access_does_not_work_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "refused")

    file = tmp_path / "file"
    file.write_bytes(bytes(PAGE))
    readable = file if call == "preadv" else None
    monkeypatch.setattr(slab_module, "_O_DIRECT", os.O_CLOEXEC)  # any flag that is taken everywhere
    assert slab_module.supports_direct(tmp_path, readable)
    monkeypatch.setattr(os, call, refuse)
    assert not slab_module.supports_direct(tmp_path, readable)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.undo()
    monkeypatch.setattr(slab_module, "_O_DIRECT", 0)  # a system that does not know it
    assert not slab_module.supports_direct(tmp_path, readable)


# --- who may write -------------------------------------------------------------------------------------------------------


def in_another_process(code: str, directory: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    return result.stdout + result.stderr


@pytest.mark.slow
def test_given_a_directory_in_use_when_another_process_wants_to_write_then_it_is_told_who_does(tmp_path: Path) -> None:
    code = "import sys; from kvpool.tiers import DiskTier; DiskTier(sys.argv[1], 2**20)"
    with DiskTier(tmp_path, 2**20) as tier:
        said = in_another_process(code, tmp_path)
        assert f"ConfigError: {tmp_path} belongs to process {os.getpid()}" in said
        assert "read_only=True" in said
        assert store(tier, [1]) == [Outcome.OK]
    assert in_another_process(code, tmp_path) == ""


def test_given_a_directory_in_use_then_the_error_tells_whether_this_process_or_another_writes_to_it(
    tmp_path: Path,
) -> None:
    fcntl = pytest.importorskip("fcntl")
    with DiskTier(tmp_path, 2**20):
        with pytest.raises(ConfigError, match=f"^this process writes to {tmp_path} already: close what has opened it"):
            DiskTier(tmp_path, 2**20)
        assert num_open(tmp_path / "lock") == 1
    assert num_open(tmp_path / "lock") == 0
    with (tmp_path / "lock").open("w") as other:  # as another process has it: not known here
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=f"^{tmp_path} belongs to process unknown, which writes to it"):
            DiskTier(tmp_path, 2**20)
        assert num_open(tmp_path / "lock") == 1


def num_open(path: Path) -> int:
    """How often this process has a file open."""
    files = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(file.exists() and file.samefile(path) for file in files)


def test_given_a_reader_that_misses_then_it_reads_the_files_again_at_most_once_in_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.tiers.disk.disk_tier.REFRESH_SECONDS", 3600.0)
    with DiskTier(tmp_path, 2**20) as writer, DiskTier(tmp_path, 2**20, read_only=True) as reader:
        assert reader.contains([key(1)]) == [False]  # reads them for the first time
        store(writer, [1])
        assert reader.contains([key(1)]) == [False]
        reader._next_refresh = 0.0
        assert reader.contains([key(1), key(2)]) == [True, False]


def test_given_a_writer_when_another_process_reads_then_it_finds_what_is_stored_also_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.tiers.disk.disk_tier.REFRESH_SECONDS", 0.0)
    with DiskTier(tmp_path, 2**20) as writer, DiskTier(tmp_path, 2**20, read_only=True) as reader:
        assert load(reader, [1])[0] == [Outcome.MISS]
        store(writer, [1, 2])
        assert load(reader, [1, 2]) == ([Outcome.OK] * 2, [value(1), value(2)])
        assert store(reader, [3]) == [Outcome.REFUSED]
        assert reader.remove([key(1), key(3)]) == [Outcome.FAILED, Outcome.MISS]
        writer.remove([key(1)])
        assert load(reader, [1, 7])[0] == [Outcome.MISS] * 2
        for number in range(10, 150):  # slots are written again, slabs are given up
            store(writer, [number], 3_000 + number % 3 * 8_000)
        for number in range(150):
            outcomes, found = load(reader, [number], 3_000 + number % 3 * 8_000)
            assert outcomes[0] in (Outcome.OK, Outcome.MISS)
            assert outcomes[0] == Outcome.MISS or found == [value(number, 3_000 + number % 3 * 8_000)]
        held = [number for number in range(150) if writer.contains([key(number)])[0]]
        assert reader.contains([key(number) for number in held]) == [True] * len(held)
        assert reader.stats().num_values == writer.stats().num_values == len(held)
        assert reader.stats().used_bytes == writer.stats().used_bytes


def overwritten(reader: DiskTier, writer: DiskTier) -> list[int]:
    """Values whose slots the writer has given to others, which the reader has not heard of."""
    reader._next_refresh = float("inf")
    count = (writer.stats().num_values or 0) + 10
    for number in range(1000, 1000 + count):
        assert store(writer, [number]) == [Outcome.OK]
    gone = [number for number in range(1, 41) if not writer.contains([key(number)])[0]]
    assert len(gone) >= 10
    return gone


def test_given_a_writer_that_overwrites_slots_when_its_reader_loads_then_they_are_misses_and_not_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskTier(tmp_path, 2**20) as writer:
        store(writer, list(range(1, 41)))
        with DiskTier(tmp_path, 2**20, read_only=True) as reader:
            gone = overwritten(reader, writer)
            assert reader.contains([key(number) for number in gone]) == [True] * len(gone)
            assert load(reader, gone)[0] == [Outcome.MISS] * len(gone)
            assert reader.stats().load_failures == 0
            assert reader.contains([key(number) for number in gone]) == [False] * len(gone)
            out = page_aligned(8192)
            assert reader.load([key(gone[0])], [out], keeper=Kept()) == [Outcome.MISS]
            reader._next_refresh = 0.0
            held = [number for number in range(1000, 1010) if writer.contains([key(number)])[0]]
            assert load(reader, held) == ([Outcome.OK] * len(held), [value(number) for number in held])
            assert held
    assert caplog.records == []


def test_given_a_writer_and_a_damaged_slot_then_its_reader_says_so_and_forgets_the_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskTier(tmp_path, 2**20) as writer:
        store(writer, [1, 2])
        with DiskTier(tmp_path, 2**20, read_only=True) as reader:
            (slab,) = tmp_path.glob("*.kvslab")
            with slab.open("r+b") as stream:
                stream.seek(PAGE + PAGE + 7)
                stream.write(b"?")
            outcomes, _ = load(reader, [1, 2])
            assert sorted(outcomes) == [Outcome.OK, Outcome.FAILED]
            assert reader.stats().load_failures == 1
    assert ["is damaged" in record.getMessage() for record in caplog.records] == [True]


def test_given_a_writer_that_overwrites_slots_while_verify_reads_then_they_are_not_damaged(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as writer:
        store(writer, list(range(1, 41)))
        with DiskTier(tmp_path, 2**20, read_only=True) as reader, Upkeep(tmp_path) as upkeep:
            gone = overwritten(reader, writer)
            found = upkeep.verify(lambda _: None)
            assert (found.num_values, found.damaged) == (40 - len(gone), [])


def test_given_a_tier_that_only_reads_then_the_directory_stays_as_it_was(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**20) as tier:
        store(tier, [1])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with DiskTier(tmp_path, 2**20, read_only=True) as reader:
        assert load(reader, [1])[0] == [Outcome.OK]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- whose values --------------------------------------------------------------------------------------------------------


def test_given_a_fingerprint_then_the_directory_keeps_it_across_restarts(tmp_path: Path) -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8)
    space = KeySpace(Fingerprint.of(config, model="tiny", weights="v1"))
    with DiskTier(tmp_path, 2**20) as tier:
        tier.introduce(space)
        tier.introduce(space)
    with DiskTier(tmp_path, 2**20) as tier:
        assert list(tier.directory.descriptions()) == [space.prefix]
        assert tier.directory.descriptions()[space.prefix]["model"] == "tiny"
        assert tier.notes == []


def test_given_a_tier_that_only_reads_or_is_closed_then_it_keeps_no_fingerprint(tmp_path: Path) -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8)
    space = KeySpace(Fingerprint.of(config, model="tiny", weights="v1"))
    with DiskTier(tmp_path, 2**20) as tier:
        store(tier, [1])
    tier.introduce(space)  # its directory may be another process's by now
    with DiskTier(tmp_path, 2**20, read_only=True) as reader:
        reader.introduce(space)
        assert reader.directory.descriptions() == {}


# --- wrong arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes=0 must be at least 1048576"),
        ({"capacity_bytes": "1GB"}, "capacity_bytes='1GB' must be an integer"),
        ({"io_threads": 0}, "io_threads=0 must be at least 1"),
        ({"direct": 1}, "direct=1 must be True or False"),
        ({"read_only": None}, "read_only=None must be True or False"),
        ({"directory": 7}, "directory is a path, got 7"),
        ({"directory": "a\0b"}, "cannot make the directory"),
    ],
)
def test_given_a_wrong_argument_then_it_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    settings = {"directory": tmp_path, "capacity_bytes": 2**20} | arguments
    with pytest.raises(ConfigError, match=re.escape(message)):
        DiskTier(**settings)  # type: ignore[arg-type]


def test_given_no_library_for_checksums_then_a_tier_is_refused_before_it_makes_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"need xxhash: pip install '\.\[tiers\]' in a checkout"):
        DiskTier(tmp_path / "cache", 2**20)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("count", "shown"), [(5, "a0, a1, a2, a3, a4"), (7, "a0, a1, a2, a3, a4 and 2 more")])
def test_given_foreign_files_then_the_first_five_are_named_and_the_others_counted(
    tmp_path: Path, count: int, shown: str
) -> None:
    for number in range(count):
        (tmp_path / f"a{number}").touch()
    with DiskTier(tmp_path, 2**20) as tier:
        assert tier.notes == [f"not kvpool's and left alone: {shown}"]


def test_given_a_file_in_place_of_the_directory_then_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot make the directory"):
        DiskTier(tmp_path / "file", 2**20)
    with pytest.raises(ConfigError, match="there is no directory"):
        DiskTier(tmp_path / "none", 2**20, read_only=True)


# --- deadlines -----------------------------------------------------------------------------------------------------------


def test_given_a_hanging_disk_then_calls_end_at_their_deadline_and_no_buffer_is_touched_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real_read, real_write = os.preadv, os.pwritev
    tier = DiskTier(tmp_path, 2**20, io_threads=2)
    store(tier, [1, 2, 3, 4])
    monkeypatch.setattr(os, "preadv", lambda *args: (gate.wait(), real_read(*args))[1])
    monkeypatch.setattr(os, "pwritev", lambda *args: (gate.wait(), real_write(*args))[1])
    out = np.zeros((4, 5000), np.uint8)
    assert tier.load([key(i) for i in (1, 2, 3, 4)], list(out), timeout=0.05) == [Outcome.LATE] * 4
    assert tier.store([key(5)], [value(5)], timeout=0.05) == [Outcome.LATE]
    assert tier.contains([key(1), key(9)], timeout=0.05) == [True, False]
    gate.set()
    assert load(tier, [1]) == ([Outcome.OK], [value(1)])
    assert not out.any()
    assert store(tier, [5]) == [Outcome.OK]
    stats = tier.stats()
    assert (stats.late_loads, stats.late_stores) == (4, 1)
    tier.close()


def test_given_a_hanging_disk_and_memory_that_is_kept_then_it_is_shared_until_the_late_reads_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real_read = threading.Event(), os.preadv
    with DiskTier(tmp_path, 2**20, io_threads=2) as tier:
        store(tier, [1, 2, 3], 8192)
        out, kept = [page_aligned(8192) for _ in range(3)], Kept()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *args: (gate.wait(), real_read(*args))[1])
            keys = [key(number) for number in (1, 2, 3)]
            assert tier.load(keys, out, timeout=0.05, keeper=kept) == [Outcome.LATE] * 3
            assert kept.users == 3
            gate.set()
            assert kept.wait_until_unused(60.0)
        assert [each.tobytes() for each in out] == [value(number, 8192) for number in (1, 2, 3)]
        assert tier.load(keys, out, keeper=kept) == [Outcome.OK] * 3
        assert kept.users == 0


def test_given_a_purge_then_progress_counts_every_value_that_is_looked_at(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**21) as tier:
        store(tier, [1, 2, 3])
    seen: list[int] = []
    with Upkeep(tmp_path, writing=True) as upkeep:
        assert upkeep.purge(seen.append, keys={key(2)}) == 1
    assert sum(seen) == 3


def test_given_everything_is_removed_then_the_directory_can_be_used_at_once(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**21) as tier:
        store(tier, [1])
    assert remove_everything(tmp_path) > 0
    with DiskTier(tmp_path, 2**21) as tier:
        assert store(tier, [2]) == [Outcome.OK]


def test_given_a_time_then_what_was_used_at_it_or_later_is_not_purged(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**21) as tier:
        store(tier, [1])
    with Upkeep(tmp_path, writing=True) as upkeep:
        used = max(int(slab.records["used"].max()) for slab in upkeep.slabs)
        assert [upkeep.purge(lambda _: None, used_before=time) for time in (used - 1, used, used + 1)] == [0, 0, 1]


def test_given_a_fingerprint_that_cannot_be_kept_then_a_line_tells_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    space = KeySpace(Fingerprint("model", "weights", 16, ()))
    with DiskTier(tmp_path, 2**21) as tier:
        monkeypatch.setattr(Directory, "describe", fails)
        tier.introduce(space)
    assert f"No space left: the fingerprint of {space.prefix.hex()} was not kept" in caplog.text


def test_given_a_reader_then_it_reads_what_was_stored_since_also_into_memory_that_is_kept(tmp_path: Path) -> None:
    with DiskTier(tmp_path, 2**21) as tier, DiskTier(tmp_path, 2**21, read_only=True) as reader:
        store(tier, [1], 8192)
        out, kept = page_aligned(8192), Kept()
        assert reader.load([key(1)], [out], keeper=kept) == [Outcome.OK]
        assert out.tobytes() == value(1, 8192)
        assert kept.users == 0


def test_given_a_value_that_needs_most_of_the_capacity_then_slabs_of_small_ones_are_given_up_for_it(
    tmp_path: Path,
) -> None:
    with DiskTier(tmp_path, 2**20, timeout=60) as tier:
        for number in range(200):
            assert store(tier, [number]) == [Outcome.OK]
        assert store(tier, [1000], 600_000) == [Outcome.OK]
        assert load(tier, [1000], 600_000)[0] == [Outcome.OK]


def test_given_a_key_of_zeros_then_a_reader_finds_it_as_soon_as_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.tiers.disk.disk_tier.REFRESH_SECONDS", 0.0)
    with DiskTier(tmp_path, 2**20, timeout=60) as writer:
        assert store(writer, [1], 100) == [Outcome.OK]
        with DiskTier(tmp_path, 2**20, read_only=True, timeout=60) as reader:
            assert reader.contains([bytes(32)]) == [False]
            assert writer.store([bytes(32)], [b"keys and values"]) == [Outcome.OK]
            assert reader.contains([bytes(32)]) == [True]
