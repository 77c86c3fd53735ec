"""Which value of a disk tier goes, and which slab: always what was used longest ago."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvpool.testing import key
from kvpool.tiers.disk.catalog import Catalog, State
from kvpool.tiers.disk.slab import RECORD, Slab, is_held, made_record, microseconds

SMALL, LARGE = 8192, 16384
MakeCatalog = Callable[[Sequence[tuple[int, Sequence[int]]]], Catalog]


@pytest.fixture
def make_catalog(tmp_path: Path) -> Iterator[MakeCatalog]:
    """A catalog of slabs, each with the size of its slots and when its values were used; small ones are numbered by that."""
    slabs: list[Slab] = []

    def make(contents: Sequence[tuple[int, Sequence[int]]]) -> Catalog:
        catalog = Catalog()
        for slot_bytes, uses in contents:
            slab = Slab.create(tmp_path, slot_bytes, max(1, len(uses)), direct=False)
            for slot, used in enumerate(uses):
                slab.records[slot] = made_record(slab.slab_id, slot, key(used + slot_bytes - SMALL), 100, used)[0]
            slabs.append(slab)
            catalog.add(slab)
        return catalog

    yield make
    for slab in slabs:
        slab.close()


def held(catalog: Catalog, numbers: Sequence[int]) -> list[int]:
    return [number for number, there in zip(numbers, catalog.contains(map(key, numbers)), strict=True) if there]


@pytest.mark.parametrize("uses", list(permutations([(5, 30), (1, 20), (12, 13)])))
def test_the_coldest_slab_is_the_one_whose_last_use_lies_furthest_back(
    make_catalog: MakeCatalog, uses: Sequence[tuple[int, int]]
) -> None:
    catalog = make_catalog([(SMALL, of_slab) for of_slab in uses])
    assert catalog.coldest_slab() == list(uses).index((12, 13))


def test_a_slab_that_somebody_writes_to_is_never_the_coldest(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [1, 2]), (SMALL, [3, 4])])
    place = catalog.withdraw(key(1))
    assert catalog.coldest_slab() == 1
    assert place is not None
    catalog.give_back(place)
    assert catalog.coldest_slab() == 0


@pytest.mark.parametrize(("newest_of_other", "gives_way"), [(14, True), (15, False), (16, False)])
def test_a_class_takes_a_slab_of_another_only_if_all_of_it_is_older_than_its_own_oldest_value(
    make_catalog: MakeCatalog, newest_of_other: int, gives_way: bool
) -> None:
    catalog = make_catalog([(SMALL, [40, 15, 50]), (LARGE, [1, newest_of_other])])
    for _ in range(2):  # asking changes nothing
        assert catalog.coldest_slab(catalog.classes[SMALL]) == (1 if gives_way else None)


def test_a_class_without_slabs_takes_the_coldest_of_any_other(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [40, 15, 50]), (SMALL, [3])])
    assert catalog.coldest_slab(catalog.class_for(LARGE)) == 1


def test_values_go_in_the_order_of_their_last_use_across_slabs(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [4, 1, 6]), (SMALL, [3, 5, 2])])
    size = catalog.classes[SMALL]
    for number in range(1, 6):
        place = catalog.take_oldest(size, before=6)
        assert place is not None
        catalog.give_back(place)
        assert held(catalog, range(1, 7)) == list(range(number + 1, 7))
    assert catalog.take_oldest(size, before=6) is None
    assert held(catalog, range(1, 7)) == [6]


def test_a_value_that_is_used_after_the_oldest_were_collected_stays(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [1, 2, 3, 4])])
    size, later = catalog.classes[SMALL], 2**62
    catalog.take_oldest(size, later)
    second = catalog.find(key(2))
    assert second is not None
    catalog.touch([second])
    catalog.take_oldest(size, later)
    assert held(catalog, [1, 2, 3, 4]) == [2, 4]


def test_a_value_that_was_removed_after_the_oldest_were_collected_is_no_victim(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [1, 2, 3, 4])])
    size, later = catalog.classes[SMALL], 2**62
    catalog.take_oldest(size, later)
    place = catalog.withdraw(key(2))
    assert place is not None
    catalog.give_back(place)
    third = catalog.find(key(3))
    assert catalog.take_oldest(size, later) == third
    assert held(catalog, [1, 2, 3, 4]) == [4]


def test_a_slot_that_is_given_back_after_its_write_failed_holds_nothing(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [1])])
    place = catalog.withdraw(key(1))
    assert place is not None
    slab, slot = catalog.at(place)
    catalog.fill(place, made_record(slab.slab_id, slot, key(2), 100, 5))
    catalog.give_back(place)
    assert not is_held(slab.records).any()
    assert catalog.take_free(catalog.class_for(SMALL)) == place


def test_a_slab_that_goes_takes_its_free_slots_along_and_leaves_those_of_others(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [1, 2]), (SMALL, [3, 4])])
    for number in (1, 3):
        place = catalog.withdraw(key(number))
        assert place is not None
        catalog.give_back(place)
    catalog.retire(0)
    size = catalog.class_for(SMALL)
    place = catalog.take_free(size)
    assert place is not None
    assert catalog.at(place) == (catalog.slabs[1], 0)
    assert catalog.take_free(size) is None


def test_records_of_another_process_are_counted(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, [1, 2])])
    slab, records = catalog.slabs[0], catalog.slabs[0].records.copy()
    records[0] = made_record(slab.slab_id, 0, key(7), 100, 5)[0]
    records[1] = np.zeros((), RECORD)
    catalog.update(0, records)
    assert (catalog.used_bytes, held(catalog, [1, 2, 7])) == (SMALL, [7])
    catalog.update(0, slab.records.copy())
    assert catalog.used_bytes == SMALL


class Books:
    """A catalog beside a plain dictionary of what it must hold: key -> (size of its slot, last use)."""

    def __init__(self, seed: int) -> None:
        self.catalog = Catalog()
        self.random = Random(seed)
        self.values: dict[bytes, tuple[int, int]] = {}
        self.next_key = 1000

    def store(self) -> None:
        size = self.catalog.class_for(self.random.choice((SMALL, LARGE)))
        of_class = {name: used for name, (slot_bytes, used) in self.values.items() if slot_bytes == size.slot_bytes}
        place = self.catalog.take_free(size)
        if place is None:
            oldest = min(of_class, key=lambda name: of_class[name], default=None)
            assert self.catalog.take_oldest(size, of_class.get(oldest, 0)) is None
            place = self.catalog.take_oldest(size, of_class.get(oldest, 0) + 1)
            if place is None:
                return
            del self.values[oldest]
        name, used = key(self.next_key), self.catalog.stamp(1)
        self.next_key += 1
        slab, slot = self.catalog.at(place)
        assert slab.num_writing == 1
        self.catalog.fill(place, made_record(slab.slab_id, slot, name, 100, used))
        assert self.catalog.find(name) is None
        self.catalog.publish(place, name)
        self.values[name] = size.slot_bytes, used

    def use(self) -> None:
        chosen = self.random.sample(sorted(self.values), min(3, len(self.values)))
        self.catalog.touch([self.catalog.find(name) for name in chosen])  # type: ignore[misc]
        latest = self.catalog._newest
        for distance, name in enumerate(chosen):
            self.values[name] = self.values[name][0], latest - distance

    def remove(self) -> None:
        for name in self.random.sample(sorted(self.values), min(2, len(self.values))):
            place = self.catalog.withdraw(name)
            assert place is not None
            self.catalog.give_back(place)
            del self.values[name]
        assert self.catalog.withdraw(b"nothing") is None

    def retire(self) -> None:
        number = self.catalog.coldest_slab()
        if number is not None and len(self.catalog.slabs) > 2:
            slab = self.catalog.retire(number)
            assert slab.retired
            for name in slab.records["key"][is_held(slab.records)].tolist():
                del self.values[name]

    def check(self) -> None:
        catalog, slabs = self.catalog, self.catalog.slabs
        assert len(catalog) == len(self.values)
        assert catalog.used_bytes == sum(slot_bytes for slot_bytes, _ in self.values.values())
        assert catalog.allocated_bytes == sum(slab.num_bytes for slab in slabs.values())
        for name, (slot_bytes, used) in self.values.items():
            slab, slot = catalog.at(catalog.find(name))  # type: ignore[arg-type]
            assert (slab.slot_bytes, int(slab.records["used"][slot])) == (slot_bytes, used)
            assert slab.records["key"][slot].tobytes() == name
            assert slab.newest_use >= used
        assert {size.slot_bytes for size in catalog.classes.values()} == {slab.slot_bytes for slab in slabs.values()}
        for size in catalog.classes.values():
            free = {(number, slot) for number in size.slabs for slot in np.flatnonzero(~is_held(slabs[number].records))}
            assert {(place >> 32, place & (2**32 - 1)) for place in size.free} == free
            assert len(size.free) == len(free)
        assert not any(slab.num_writing for slab in slabs.values())


@pytest.mark.parametrize("seed", range(3))
def test_given_any_order_of_operations_then_the_books_of_a_catalog_are_right(
    make_catalog: MakeCatalog, seed: int
) -> None:
    books = Books(seed)
    for slot_bytes, slots in ((SMALL, 5), (SMALL, 3), (LARGE, 4), (SMALL, 2)):
        slab = make_catalog([(slot_bytes, range(slots))]).retire(0)
        slab.records[:] = np.zeros(slots, RECORD)
        slab.retired = False
        books.catalog.add(slab)
        books.check()
    for _ in range(60):
        books.random.choice((books.store, books.store, books.store, books.use, books.remove))()
        books.check()
    while len(books.catalog.slabs) > 2:
        books.retire()
        books.check()


def test_free_slots_are_taken_from_the_first_on(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog([(SMALL, (5, 6, 7, 8))])
    for used in (7, 5, 8):
        catalog.give_back(catalog.withdraw(key(used)))  # type: ignore[arg-type]
    fresh = Catalog()
    fresh.add(catalog.retire(0))
    assert [fresh.take_free(fresh.classes[SMALL]) for _ in range(4)] == [0, 2, 3, None]


@pytest.mark.parametrize(
    ("wanted", "found"), [(SMALL, SMALL), (SMALL - 1, SMALL), (7282, SMALL), (7281, 7281), (8193, 8193)]
)
def test_a_value_goes_into_slots_that_waste_little(make_catalog: MakeCatalog, wanted: int, found: int) -> None:
    catalog = make_catalog([(9000, (1,)), (SMALL, (2,))])
    assert catalog.class_for(wanted).slot_bytes == (9000 if wanted == 8193 else found)


def test_a_value_that_two_slabs_hold_is_found_in_the_second_and_its_first_slot_is_free(
    make_catalog: MakeCatalog,
) -> None:
    catalog = make_catalog([(SMALL, (1, 2, 3)), (SMALL, (2, 9))])
    assert (len(catalog), catalog.used_bytes) == (4, 4 * SMALL)
    assert catalog.find(key(2)) == 1 << 32
    assert catalog.classes[SMALL].free == [1]


def test_times_of_use_grow_even_if_the_clock_goes_back(make_catalog: MakeCatalog) -> None:
    late = microseconds() + 10**9
    catalog = make_catalog([(SMALL, (late,))])
    assert [catalog.stamp(1), catalog.stamp(3)] == [late + 1, late + 4]
    catalog.touch([0])
    assert catalog.slabs[0].newest_use == late + 5


def test_the_files_of_a_slab_close_with_its_last_job(make_catalog: MakeCatalog) -> None:
    said: list[str] = []
    state = State(said.append)
    state.catalog = make_catalog([(SMALL, (1,)), (SMALL, (2,))])
    slab, closed = state.catalog.slabs[0], []
    slab.close = lambda: closed.append(True)  # type: ignore[method-assign]
    assert state.begin_job(slab)
    state.end_job(slab)
    assert (closed, slab.num_jobs) == ([], 0)
    assert state.begin_job(slab)
    assert state.retire(0) is slab
    assert not state.begin_job(slab)
    state.end_job(slab)
    assert closed == []
    state.end_job(slab)
    assert closed == [True]
    del slab.close  # type: ignore[method-assign]
    state.refuse("no room")
    assert (said, state.problem) == (["no room"], "no room")


def test_given_records_that_another_process_wrote_then_each_value_is_found_where_it_says(
    make_catalog: MakeCatalog,
) -> None:
    catalog = make_catalog([(SMALL, (1, 2, 3, 4))])
    slab = catalog.slabs[0]
    records = slab.records.copy()
    records[1] = made_record(slab.slab_id, 1, key(7), 100, 50)[0]  # another value
    records[2] = np.zeros((), RECORD)  # emptied
    records[3] = made_record(slab.slab_id, 3, key(4), 200, 60)[0]  # the same key, written again
    catalog.update(0, records)
    assert {number: catalog.find(key(number)) for number in (1, 2, 3, 4, 7)} == {1: 0, 2: None, 3: None, 4: 3, 7: 1}
    assert (len(catalog), catalog.used_bytes) == (3, 3 * SMALL)
    assert slab.records["used"].tolist() == [1, 50, 0, 60]
