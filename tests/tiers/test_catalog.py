"""Which value of a disk tier goes, and which slab: always what was used longest ago."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from kvpool.testing import key
from kvpool.tiers.disk.catalog import Catalog
from kvpool.tiers.disk.slab import RECORD, Slab, is_held, made_record

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
