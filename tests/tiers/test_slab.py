"""One slab of the disk tier: its records, when a reader is behind its writer, and when the disk is waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.testing import key
from kvpool.tiers.disk.catalog import SizeClass
from kvpool.tiers.disk.slab import (
    _MAGIC,
    INDEX_SUFFIX,
    Slab,
    UnreadableSlabError,
    _head,
    fill_record,
    is_held,
    made_record,
    microseconds,
    read_head,
    slab_bytes,
    take_damaged,
)
from kvpool.tiers.disk.storing import SlabMaker

PAGE = 4096


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    made = Slab.create(tmp_path, 2 * PAGE, 3, direct=False)
    yield made
    made.close()


def hold(slab: Slab, slot: int, number: int) -> None:
    fill_record(slab.records, slab.slab_id, slot, key(number), 100, 7)
    slab.write_record(slot)


def test_given_a_slab_then_its_slots_lie_behind_the_first_page(slab: Slab) -> None:
    assert [slab.offset(slot) for slot in range(3)] == [PAGE, 3 * PAGE, 5 * PAGE]
    assert slab.max_length == PAGE
    assert slab.path.stat().st_size == 7 * PAGE
    assert not is_held(slab.records).any()


def test_given_records_then_another_process_reads_them(slab: Slab) -> None:
    hold(slab, 1, 5)
    reader = Slab.open(slab.path, writable=False, direct=False)
    try:
        assert is_held(reader.records).tolist() == [False, True, False]
        assert (reader.records["key"][1].tobytes(), reader.records["length"][1]) == (key(5), 100)
        hold(slab, 2, 6)
        assert is_held(reader.records).tolist() == [False, True, False]
        assert is_held(reader.reread()).tolist() == [False, True, True]
    finally:
        reader.close()


# --- a reader beside its writer ------------------------------------------------------------------------------------------


@pytest.fixture
def reader(slab: Slab) -> Iterator[Slab]:
    """It has seen value 5 in slot 1."""
    hold(slab, 1, 5)
    opened = Slab.open(slab.path, writable=False, direct=False)
    yield opened
    opened.close()


def test_given_a_slot_with_the_same_value_then_it_is_not_replaced(slab: Slab, reader: Slab) -> None:
    hold(slab, 0, 4)
    assert not reader.is_replaced(1)


def test_given_a_slot_that_was_emptied_or_has_another_value_then_it_is_replaced(slab: Slab, reader: Slab) -> None:
    slab.records[1] = np.zeros((), slab.records.dtype)
    slab.write_record(1)
    assert reader.is_replaced(1)
    hold(slab, 1, 6)
    assert reader.is_replaced(1)


def test_given_the_same_key_stored_again_then_it_is_replaced(slab: Slab, reader: Slab) -> None:
    fill_record(slab.records, slab.slab_id, 1, key(5), 101, 7)
    slab.write_record(1)
    assert reader.is_replaced(1)


def test_given_a_slab_that_was_deleted_then_it_is_replaced(slab: Slab, reader: Slab) -> None:
    slab.delete()
    assert reader.is_replaced(1)


def test_given_records_that_are_lost_damaged_or_of_another_slab_then_nothing_says_that_it_is_replaced(
    slab: Slab, reader: Slab, tmp_path: Path
) -> None:
    index = slab.path.with_suffix(INDEX_SUFFIX)
    whole = index.read_bytes()
    index.write_bytes(whole[:10])
    assert not reader.is_replaced(1)
    index.write_bytes(b"x" + whole[1:])
    assert not reader.is_replaced(1)
    (tmp_path / "other").mkdir()
    other = Slab.create(tmp_path / "other", 2 * PAGE, 3, direct=False)
    other.close()
    index.write_bytes(other.path.with_suffix(INDEX_SUFFIX).read_bytes())
    assert not reader.is_replaced(1)
    index.unlink()
    assert not reader.is_replaced(1)
    index.mkdir()
    assert not reader.is_replaced(1)
    index.rmdir()


# --- records -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["key", "length", "check"])
def test_given_a_record_of_which_one_bit_changed_then_it_is_emptied_and_the_others_stay(slab: Slab, field: str) -> None:
    for slot in range(3):
        fill_record(slab.records, slab.slab_id, slot, key(slot), 100, 7)
    raw = slab.records[1:2].view(np.uint8).reshape(-1)
    raw[slab.records.dtype.fields[field][1]] ^= 1  # type: ignore[index]
    assert take_damaged(slab.records, slab.slab_id, slab.max_length) == 1
    assert is_held(slab.records).tolist() == [True, False, True]


def test_given_a_record_in_another_slot_or_slab_then_it_is_damaged(slab: Slab) -> None:
    slab.records[0] = made_record(slab.slab_id, 1, key(1), 100, 7)[0]
    slab.records[1] = made_record(slab.slab_id, 1, key(1), 100, 7)[0]
    slab.records[2] = made_record(slab.slab_id ^ 1, 2, key(1), 100, 7)[0]
    assert take_damaged(slab.records, slab.slab_id, slab.max_length) == 2
    assert is_held(slab.records).tolist() == [False, True, False]


@pytest.mark.parametrize(("length", "damaged"), [(PAGE, 0), (PAGE + 1, 1)])
def test_given_a_value_that_is_longer_than_its_slot_then_its_record_is_damaged(
    slab: Slab, length: int, damaged: int
) -> None:
    fill_record(slab.records, slab.slab_id, 0, key(1), length, 7)
    assert take_damaged(slab.records, slab.slab_id, slab.max_length) == damaged


def test_given_a_use_that_lies_in_the_future_then_it_was_no_later_than_now(slab: Slab) -> None:
    fill_record(slab.records, slab.slab_id, 0, key(0), 100, 1)
    fill_record(slab.records, slab.slab_id, 1, key(1), 100, microseconds() + 10**12)
    before = microseconds()
    assert take_damaged(slab.records, slab.slab_id, slab.max_length) == 0
    assert slab.records["used"][0] == 1
    assert before <= slab.records["used"][1] <= microseconds()


# --- the disk ------------------------------------------------------------------------------------------------------------


def test_given_nothing_new_then_the_disk_is_not_waited_for(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    slab.sync()
    assert synced == []
    hold(slab, 0, 1)
    slab.sync()
    assert sorted(synced) == sorted([slab.data_fd, slab.index_fd])
    slab.sync()
    assert len(synced) == 2
    hold(slab, 0, 2)
    slab.sync()
    assert len(synced) == 4


@pytest.mark.parametrize(
    ("slot_bytes", "num_slots", "is_sound"),
    [(2 * PAGE, 1, True), (PAGE, 1, False), (0, 1, False), (2 * PAGE + 1, 1, False), (2 * PAGE, 0, False)],
)
def test_given_a_head_of_slots_that_cannot_be_then_it_counts_as_damaged(
    slot_bytes: int, num_slots: int, is_sound: bool
) -> None:
    head = _head(_MAGIC, 7, slot_bytes, num_slots)
    if is_sound:
        assert read_head(head) == (7, slot_bytes, num_slots)
    else:
        with pytest.raises(UnreadableSlabError, match="has a damaged head"):
            read_head(head)


def test_given_a_head_that_is_cut_short_then_it_is_read_if_all_its_fields_are_there() -> None:
    head = _head(_MAGIC, 7, 2 * PAGE, 3)
    fields = len(head.rstrip(b"\0"))
    assert read_head(head[:fields]) == (7, 2 * PAGE, 3)
    for size in (0, fields - 1):
        with pytest.raises(UnreadableSlabError, match="is cut short"):
            read_head(head[:size])


@pytest.mark.parametrize(
    ("capacity", "slab_bytes_at_most"),
    [(2**28, 2**24), (2**32, 2**28), (2**36, 2**30), (2**40, 2**34), (2**44, 2**34)],
)
def test_given_a_capacity_then_a_slab_is_a_part_of_it_between_two_limits(
    tmp_path: Path, capacity: int, slab_bytes_at_most: int
) -> None:
    maker = SlabMaker(tmp_path, None, capacity, direct=False)  # type: ignore[arg-type]
    size = SizeClass(8192)
    num_slots = maker._slots_of_a_new_slab(size, capacity)
    assert slab_bytes(8192, num_slots) <= slab_bytes_at_most < slab_bytes(8192, num_slots + 1)
    assert maker._slots_of_a_new_slab(size, slab_bytes(8192, 3)) == 3
    assert maker._slots_of_a_new_slab(size, slab_bytes(8192, 1) - 1) == 0
