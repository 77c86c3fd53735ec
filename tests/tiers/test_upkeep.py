"""Upkeep of a directory against a dictionary: what is listed, verified, purged and moved together, and what is then left."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import node_folder

from kvpool.errors import ConfigError
from kvpool.testing import key, load, value
from kvpool.tiers import DiskTier, KeyPattern, NodeTier, Outcome
from kvpool.tiers.contract import Listing, TierStats
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.slab import is_held
from kvpool.tiers.disk.upkeep import Upkeep, remove_everything
from kvpool.tiers.keys import SPACE_BYTES
from kvpool.tiers.upkeep import shown_bytes, store_figures, store_spaces

CAPACITY = 2**21
SIZES = (100, 5_000, 30_000)
NUMBERS = range(60)


def size_of(number: int) -> int:
    return SIZES[number % 3]


def fill(directory: Path) -> None:
    with DiskTier(directory, CAPACITY, timeout=60) as tier:
        for number in NUMBERS:
            assert tier.store([key(number)], [value(number, size_of(number))]) == [Outcome.OK]


def contents(directory: Path) -> dict[int, bytes]:
    """What a tier that opens the directory finds."""
    with DiskTier(directory, CAPACITY, timeout=60) as tier:
        assert tier.notes == []
        found = [number for number in NUMBERS if tier.contains([key(number)]) == [True]]
        return {number: load(tier, [number], size_of(number))[1][0] for number in found}


def nobody(_: int) -> None:
    pass


@pytest.mark.parametrize("seed", range(4))
def test_given_random_purges_then_exactly_those_values_are_gone_and_stay_gone_after_the_index_is_lost(
    tmp_path: Path, seed: int
) -> None:
    fill(tmp_path)
    rng = random.Random(seed)
    kept = {number: value(number, size_of(number)) for number in NUMBERS}
    with Upkeep(tmp_path, writing=True) as upkeep:
        assert upkeep.num_values == len(kept)
        uses = {
            row["key"].tobytes(): int(row["used"])
            for slab in upkeep.slabs
            for row in slab.records[is_held(slab.records)]
        }
        for _ in range(3):
            chosen = {key(number) for number in rng.sample(NUMBERS, 20)}
            before = rng.choice([None, *uses.values()])
            gone = [n for n in kept if key(n) in chosen and (before is None or uses[key(n)] < before)]
            assert upkeep.purge(nobody, keys=chosen, used_before=before) == len(gone)
            for number in gone:
                del kept[number]
        chosen_key = key(next(iter(kept)))
        assert upkeep.purge(nobody, pattern=KeyPattern(chosen_key[:SPACE_BYTES])) == 1
        del kept[next(iter(kept))]
        assert upkeep.num_values == len(kept)
    assert contents(tmp_path) == kept
    for index in tmp_path.glob("*.kvindex"):
        index.unlink()
    with DiskTier(tmp_path, CAPACITY, timeout=60) as tier:
        assert tier.contains([key(number) for number in NUMBERS]) == [number in kept for number in NUMBERS]


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_given_slabs_with_holes_then_compacting_keeps_every_value_and_gives_whole_slabs_back(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.tiers.disk.storing.FEW_SLABS", 64)  # several slabs of each size
    monkeypatch.setattr("kvpool.tiers.disk.storing.MAX_SLABS", 64)
    fill(tmp_path)
    kept = {n: value(n, size_of(n)) for n in NUMBERS if random.Random(n).random() < share}
    moved: list[int] = []
    with Upkeep(tmp_path, writing=True) as upkeep:
        upkeep.purge(nobody, keys={key(n) for n in NUMBERS if n not in kept})
        uses = sorted(int(row["used"]) for slab in upkeep.slabs for row in slab.records[is_held(slab.records)])
        sizes = {
            slab.path: os.path.getsize(slab.path) + os.path.getsize(slab.path.with_suffix(".kvindex"))
            for slab in upkeep.slabs
        }
        held = {slab.path: int(is_held(slab.records).sum()) for slab in upkeep.slabs}
        given_back = upkeep.compact(moved.append)
        left = {slab.path for slab in upkeep.slabs}
        num_moved = sum(count for path, count in held.items() if path not in left)
        assert given_back == sum(size for path, size in sizes.items() if path not in left)
        assert {path for path in tmp_path.iterdir() if path.suffix == ".kvslab"} == left
        assert upkeep.num_values == len(kept)
        assert uses == sorted(int(row["used"]) for slab in upkeep.slabs for row in slab.records[is_held(slab.records)])
        for slot_bytes in {slab.slot_bytes for slab in upkeep.slabs}:  # the emptiest does not fit into the others
            found = [(int(is_held(s.records).sum()), s.num_slots) for s in upkeep.slabs if s.slot_bytes == slot_bytes]
            fewest, *others = sorted(found)
            assert fewest[0] > sum(slots - held for held, slots in others)
        assert upkeep.compact(nobody) == 0
    assert set(moved) <= {1}
    assert len(moved) >= num_moved  # a slab may be emptied into which some were moved
    assert moved or share != 0.5
    assert contents(tmp_path) == kept


def test_given_a_damaged_value_when_slabs_are_compacted_then_it_alone_is_lost(tmp_path: Path) -> None:
    with DiskTier(tmp_path, CAPACITY, timeout=60) as tier:
        for number in range(0, 12, 3):
            tier.store([key(number)], [value(number, 30_000)])
            tier.store([key(number + 1)], [value(number + 1, 30_000)])
    with Upkeep(tmp_path, writing=True) as upkeep:
        assert len(upkeep.slabs) > 2
        upkeep.purge(nobody, keys={key(number) for number in range(1, 12, 3)})
        slab = min(upkeep.slabs, key=lambda slab: int(is_held(slab.records).sum()))
        (slot,) = np.flatnonzero(is_held(slab.records))[:1].tolist()
        name = slab.records["key"][slot].tobytes()
        os.pwrite(slab.data_fd, b"damage", slab.offset(slot) + 4096)
        upkeep.compact(nobody)
    with DiskTier(tmp_path, CAPACITY, timeout=60) as tier:
        assert tier.contains([key(number) for number in range(0, 12, 3)]) == [
            key(number) != name for number in range(0, 12, 3)
        ]


def test_given_damaged_values_then_verify_counts_them_and_repair_removes_only_them(tmp_path: Path) -> None:
    fill(tmp_path)
    with Upkeep(tmp_path, writing=True) as upkeep:
        slab = next(slab for slab in upkeep.slabs if slab.slot_bytes < 10_000)
        slots = np.flatnonzero(is_held(slab.records))[2:4].tolist()
        for slot in slots:
            os.pwrite(slab.data_fd, b"damage", slab.offset(slot) + 4096)
        seen: list[int] = []
        found = upkeep.verify(seen.append)
        assert (found.num_values, sum(seen), found.removed) == (60, 60, 0)
        assert found.num_bytes == 20 * sum(SIZES) - 2 * 100
        assert found.damaged == [f"slot {slot} of {slab.path.name}" for slot in slots]
        assert upkeep.verify(nobody, repair=True).removed == 2
        assert upkeep.verify(nobody).damaged == []
        assert upkeep.num_values == 58
        whole = list(upkeep.values(nobody))
        assert len(whole) == 58
        assert [each.last_use for each in whole] == sorted((each.last_use for each in whole), reverse=True)
        for each in list(upkeep.values(nobody, key(7)[:3])):
            assert each.key == key(7)


def test_given_values_of_two_models_then_each_is_counted_and_the_one_used_last_is_first(tmp_path: Path) -> None:
    names = [bytes([model]) * 8 + bytes([number]) + bytes(23) for model in (1, 2) for number in range(model)]
    with DiskTier(tmp_path, CAPACITY, timeout=60) as tier:
        for name in names:
            tier.store([name], [bytes(5_000)])
    with Upkeep(tmp_path) as upkeep:
        spaces = upkeep.spaces()
        slot = upkeep.slabs[0].slot_bytes
        assert [(s.prefix[0], s.num_values, s.value_bytes, s.slot_bytes) for s in spaces] == [
            (2, 2, 10_000, 2 * slot),
            (1, 1, 5_000, slot),
        ]
        assert spaces[0].last_use > spaces[1].last_use


def test_given_a_tier_that_writes_then_upkeep_that_writes_is_refused_and_one_that_looks_is_not(tmp_path: Path) -> None:
    with DiskTier(tmp_path, CAPACITY, timeout=60) as tier:
        tier.store([key(1)], [value(1)])
        with pytest.raises(ConfigError, match="writes to"):
            Upkeep(tmp_path, writing=True)
        with pytest.raises(ConfigError, match="writes to"):
            remove_everything(tmp_path)
        with Upkeep(tmp_path) as upkeep:
            assert upkeep.num_values == 1
    with Upkeep(tmp_path, writing=True), pytest.raises(ConfigError, match="writes to"):
        DiskTier(tmp_path, CAPACITY)
    with DiskTier(tmp_path, CAPACITY):
        pass


def test_given_a_directory_then_removing_everything_leaves_what_is_not_kvpools(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "folder.kvslab").mkdir()
    total = sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
    assert remove_everything(tmp_path) == total - 4
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "lock") == ["folder.kvslab", "mine.txt"]
    directory = Directory(tmp_path, create=False)
    assert directory.lock()
    directory.unlock()


def test_given_a_directory_that_cannot_be_locked_or_read_then_upkeep_says_so_and_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "lock", lambda self: False)
        with pytest.raises(ConfigError, match="cannot be written to"):
            Upkeep(tmp_path, writing=True)
        with pytest.raises(ConfigError, match="cannot be written to"):
            remove_everything(tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "open_slabs", fails)
        with pytest.raises(ConfigError, match=r"cannot read the directory .*: Input/output error"):
            Upkeep(tmp_path, writing=True)
    with Upkeep(tmp_path, writing=True) as upkeep:
        assert upkeep.num_values == 60


def test_given_a_value_that_an_engine_replaced_while_it_was_verified_then_it_is_not_counted(tmp_path: Path) -> None:
    fill(tmp_path)
    with Upkeep(tmp_path) as upkeep, DiskTier(tmp_path, CAPACITY, timeout=60) as tier:
        assert tier.remove([key(3), key(4)]) == [Outcome.OK] * 2
        found = upkeep.verify(nobody)
        assert (found.num_values, found.damaged) == (58, [])


def test_given_listings_of_stores_then_the_largest_model_is_first() -> None:
    listing = Listing({bytes([1]) * 32: 5, bytes([2]) * 32: 3, bytes([2]) * 8 + bytes(24): 4, bytes([0]) * 32: 5}, "")
    assert [(s.prefix[0], s.num_values, s.value_bytes) for s in store_spaces(listing)] == [
        (2, 2, 7),
        (0, 1, 5),
        (1, 1, 5),
    ]


def test_given_the_statistics_of_a_node_then_people_can_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {
        "values": 7,
        "slots": [{"slots": 5000, "free": 1000, "bytes": 2048}, {"slots": 3, "free": 3, "bytes": 5}],
        "clients": [{"engine": "one", "pid": 11, "leased": 2}, {"engine": "two", "pid": 12, "leased": 0}],
        "engines": {"one": 1024, "two": 3},
        "tenants": {"ab": 2**20},
        "behind": [{"name": "disk", "hits": 1234, "problem": ""}, {"name": "far", "hits": 0, "problem": "down"}],
    }
    node = object.__new__(NodeTier)
    node.name = "node:x"
    monkeypatch.setattr(NodeTier, "node_stats", lambda node: stats)
    assert store_figures(node) == {
        "store": "node:x",
        "values": 7,
        "slots": "4,000 of 5,000 of 2.0 KiB, 0 of 3 of 5 B",
        "connected": "one (11): 2 leased, two (12): 0 leased",
        "engines": "one: 1.0 KiB, two: 3 B",
        "tenants": "ab: 1.0 MiB",
        "behind": "disk: 1,234 hits, far: 0 hits down",
        "problem": "",
    }


class Silent:
    """A store that cannot list, and whose first answer takes some seconds."""

    name, can_list, timeout = "far", False, 3.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, well_at: float) -> None:
        self.now, self.well_at, self.asked = 10.0, well_at, list[list[bytes]]()
        monkeypatch.setattr("kvpool.tiers.upkeep.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)

    def stats(self) -> TierStats:
        return TierStats("far", problem="connecting" if self.now < self.well_at else "")

    def contains(self, keys: list[bytes]) -> None:
        self.asked.append(keys)


@pytest.mark.parametrize(
    ("well_at", "until", "problem"), [(0.0, 10.0, ""), (15.0, 15.0, ""), (99.0, 16.0, "connecting")]
)
def test_given_a_store_that_cannot_list_then_it_is_asked_once_it_answers_and_waited_for_twice_its_time(
    monkeypatch: pytest.MonkeyPatch, well_at: float, until: float, problem: str
) -> None:
    stored: Any = Silent(monkeypatch, well_at)
    assert store_figures(stored) == {
        **{"store": "far", "values": None, "value_bytes": None, "spaces": None, "problem": problem},
        "notes": ["it cannot list what it holds; the metrics of its master count it"],
    }
    assert (stored.now, stored.asked) == (until, [] if problem else [[bytes(32)]])


def test_given_a_node_that_is_not_there_then_its_figures_say_why() -> None:
    with node_folder() as folder, NodeTier(f"node:{folder / 'n'}") as tier:
        figures = store_figures(tier)
    assert figures["store"] == tier.name
    assert figures["problem"] not in ("", "no answer in time")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 2**10, "1023.0 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (2**30 * 5, "5.0 GiB"),
        (2**40, "1.0 TiB"),
        (2**51, "2048.0 TiB"),
        (5 * 2**50, "5120.0 TiB"),
    ],
)
def test_given_a_number_of_bytes_then_people_can_read_it(count: int, shown: str) -> None:
    assert shown_bytes(count) == shown
