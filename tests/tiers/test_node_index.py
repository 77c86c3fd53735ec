"""NodeIndex by itself: random operations of several holders against a plain model, and every rule after each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import MEGABYTE, needs_linux, node_folder

from kvpool.eviction import AdaptivePolicy, policy_names
from kvpool.testing import key
from kvpool.tiers.contract import Worth
from kvpool.tiers.node import index as index_module
from kvpool.tiers.node.index import NodeIndex
from kvpool.tiers.node.region import PAGE, Region
from kvpool.tiers.node.values import Holder, Quotas, Slot, Value
from kvpool.tiers.node.wire import ABSENT, place_bytes, rated, unrated

pytestmark = needs_linux
LENGTHS = (0, 1, 3000, 4096, 9000, 40_000, 200_000)
NUMBERS = {key(number): number for number in range(300)}
KEYS = list(NUMBERS)


@pytest.fixture
def folder() -> Iterator[Path]:
    with node_folder() as found:
        yield found


def look(index: NodeIndex, keys: list[bytes]) -> list[Value | None]:
    """What a question for these keys finds, key by key."""
    spans = index.find(b"".join(keys))
    found: list[Value | None] = []
    for span in spans:
        found += [None] * (span.stop - span.start) if span.batch is None else span.batch.values[span.start : span.stop]
    assert found == [index._values.get(key) for key in keys]
    assert b"".join(span.places for span in spans) == b"".join(map(place_of, found))
    return found


def place_of(value: Value | None) -> bytes:
    return place_bytes(ABSENT if value is None else (value.offset, value.length, value.check))


def worth_of(key: bytes) -> Worth:
    return Worth(NUMBERS[key] % 101, 200 * NUMBERS[key])


def check(index: NodeIndex, holders: list[Holder]) -> None:
    """Every page of the region belongs to one slot; each slot is free, written to by one holder, or has one value."""
    region, owned = index.region, {}
    writing = [slot for holder in holders for slots in holder.reservations.values() for slot in slots]
    gone = {value for slab in index._slabs.values() for value in slab.values.values() if value.is_gone}
    for each in (*index._values.values(), *gone, *writing):
        size = index._slabs[each.slab].slot_bytes
        assert each.length <= size
        assert each.offset == each.slab * region.slab_bytes + each.slot * size
        owned[each.slab, each.slot] = size
    assert len(owned) == len(index) + len(gone) + len(writing)
    free = [place for size in index._classes.values() for place in size.free]
    assert len(set(free)) == len(free)
    assert not set(free) & set(owned)
    assert len(free) + len(owned) == sum(slab.num_slots for slab in index._slabs.values())
    assert sorted([*index._slabs, *index._unused]) == list(range(region.num_slabs))
    assert index.used_bytes == sum(owned.values()) == sum(index.used_by_tenant.values())
    assert sum(holder.reserved_bytes for holder in holders) == sum(owned[s.slab, s.slot] for s in writing)
    found = {record.key: (record.worth.priority, record.worth.depth) for record in region.records()}
    assert found == {name: (value.priority, value.start) for name, value in index._values.items()}


class Run:
    """One run of random operations, and what must be where."""

    def __init__(self, region: Region, policy: str, quotas: Quotas | None) -> None:
        self.rng = random.Random(policy)
        self.index = NodeIndex(region, policy, quotas)
        self.holders = [Holder(owner) for owner in (1, 1, 2, 3)]
        self.leased: dict[tuple[int, int], list[tuple[Value, bytes]]] = {}
        self.reserved: dict[tuple[int, int], list[Slot]] = {}

    def step(self) -> None:
        who = self.rng.randrange(len(self.holders))
        verbs = [
            self.reserve,
            self.reserve,
            self.commit,
            self.lease,
            self.release,
            self.release,
            self.remove,
            self.leave,
        ]
        self.rng.choice(verbs)(who)
        self.check_leased()

    def reserve(self, who: int) -> None:
        start, count = self.rng.randrange(len(KEYS)), self.rng.randrange(1, 6)
        chosen = KEYS[start : start + 2 * count] if self.rng.random() < 0.5 else self.rng.sample(KEYS, count)
        keys = [key for key in chosen if look(self.index, [key]) == [None]]
        wanted = [(key, LENGTHS[NUMBERS[key] % len(LENGTHS)], worth_of(key)) for key in keys]
        number, slots = self.index.reserve(self.holders[who], wanted)
        if taken := [slot for slot in slots if slot is not None]:
            self.reserved[who, number] = taken

    def commit(self, who: int) -> None:
        for mine, number in [each for each in self.reserved if each[0] == who][:1]:
            slots = self.reserved.pop((mine, number))
            checks = [None if self.rng.random() < 0.1 else NUMBERS[slot.key] for slot in slots]
            self.index.commit(self.holders[who], number, checks)

    def lease(self, who: int) -> None:
        start = self.rng.randrange(len(KEYS))
        asked = KEYS[start : start + 30] if self.rng.random() < 0.5 else self.rng.sample(KEYS, 20)
        found = look(self.index, asked)
        number, hits = self.index.lease(self.holders[who], self.index.find(b"".join(asked)))
        assert hits == len(found) - found.count(None)
        if hits:
            self.leased[who, number] = [(value, place_of(value)) for value in found if value is not None]

    def release(self, who: int) -> None:
        for mine, number in [each for each in self.leased if each[0] == who][:1]:
            del self.leased[mine, number]
            assert self.index.release(self.holders[who], number)
            assert not self.index.release(self.holders[who], number)

    def remove(self, who: int) -> None:
        chosen = self.rng.choice(KEYS)
        was_there = look(self.index, [chosen]) != [None]
        assert self.index.remove(chosen) == was_there
        assert look(self.index, [chosen]) == [None]

    def leave(self, who: int) -> None:
        if self.rng.random() < 0.2:
            self.index.release_all(self.holders[who])
            self.leased = {each: values for each, values in self.leased.items() if each[0] != who}
            self.reserved = {each: slots for each, slots in self.reserved.items() if each[0] != who}
            assert not self.holders[who]

    def check_leased(self) -> None:
        """No slot under a lease is given to anybody else, or written to."""
        taken = {(s.slab, s.slot) for slots in self.reserved.values() for s in slots}
        for values in self.leased.values():
            for value, place in values:
                assert place_of(value) == place
                assert self.index._slabs[value.slab].values[value.slot] is value
                assert (value.slab, value.slot) not in taken


@pytest.mark.quick("2q-no quotas", "arc-no quotas", "cost-no quotas", "lfu-quotas", "priority-quotas")
@pytest.mark.parametrize("quotas", [None, Quotas(engine=0.4, tenant=0.9)], ids=["no quotas", "quotas"])
@pytest.mark.parametrize("policy", policy_names())
def test_given_random_operations_then_every_slot_has_one_owner_and_leases_hold(
    folder: Path, policy: str, quotas: Quotas | None
) -> None:
    region = Region(folder, 4 * MEGABYTE)
    run = Run(region, policy, quotas)
    for number in range(600):
        run.step()
        if number % 25 == 0:
            check(run.index, run.holders)
            for owner, used in run.index.used_by_engine.items():
                assert quotas is None or used <= quotas.engine * region.num_bytes, owner
    assert run.index.num_evicted > 0
    before = {value.key: (value.length, value.check, value.offset) for value in run.index._values.values()}
    region.close()
    again = NodeIndex(Region(folder, 4 * MEGABYTE), quotas=quotas)
    assert {value.key: (value.length, value.check, value.offset) for value in again._values.values()} == before
    check(again, [])
    again.region.close()


def test_given_a_value_of_whole_pages_then_its_slot_is_no_larger(folder: Path) -> None:
    index, holder = NodeIndex(Region(folder, MEGABYTE)), Holder(1)
    _, (slot,) = index.reserve(holder, [(KEYS[0], 4 * PAGE, Worth())])
    assert slot is not None
    assert index.used_bytes == holder.reserved_bytes == 4 * PAGE
    index.release_all(holder)
    assert (index.used_bytes, holder.reserved_bytes) == (0, 0)
    index.region.close()


@pytest.mark.parametrize(
    ("sizes", "slots"),
    [
        ([16, 17, 16], [16, 17, 16]),
        ([17, 16], [17, 17]),
        ([18, 16], [18, 18]),
        ([19, 16], [19, 16]),
        ([16, 17], [16, 17]),
    ],
)
def test_given_slots_of_other_sizes_then_a_value_takes_one_of_its_own_or_the_smallest_that_wastes_an_eighth_at_most(
    folder: Path, sizes: list[int], slots: list[int]
) -> None:
    index, holder = NodeIndex(Region(folder, 4 * MEGABYTE)), Holder(1)
    for number, size in enumerate(sizes):
        before = index.used_bytes
        _, (slot,) = index.reserve(holder, [(KEYS[number], size * PAGE, Worth())])
        assert slot is not None
        assert index.used_bytes - before == slots[number] * PAGE
    index.region.close()


@pytest.mark.parametrize("policy", ["priority", "adaptive"])
def test_given_worths_then_values_of_low_priority_go_first_also_after_a_restart(folder: Path, policy: str) -> None:
    region, now = Region(folder, MEGABYTE), 0.0
    index, holder = NodeIndex(region, policy, clock=lambda: now), Holder(1)

    def store(index: NodeIndex, number: int, priority: int) -> None:
        reservation, (slot,) = index.reserve(holder, [(KEYS[number], PAGE, Worth(priority, number))])
        assert slot is not None
        index.commit(holder, reservation, [7])

    room = region.num_bytes // PAGE
    for number in range(room):
        now += 1.0
        store(index, number, 90 if number < 10 else 35)
    for number in range(room, room + 20):
        now += 1.0
        store(index, number, 35)
    assert [value is not None for value in look(index, KEYS[:30])] == [True] * 10 + [False] * 20
    again = NodeIndex(region, policy, clock=lambda: now)
    for number in range(room + 20, room + 40):
        now += 1.0
        store(again, number, 35)
    found = look(again, KEYS[:10])
    assert None not in found
    assert [(value.priority, value.start) for value in found if value is not None] == [(90, at) for at in range(10)]


def test_given_many_slabs_when_one_is_divided_then_the_others_stay_as_they_are(folder: Path) -> None:
    region = Region(folder, 20 * MEGABYTE)
    sizes = [PAGE * (slab + 1) for slab in range(region.num_slabs)]
    assert len(sizes) == 20
    for slab, slot_bytes in enumerate(sizes):
        region.divide(slab, slot_bytes)
    assert [region.slot_bytes(slab) for slab in range(20)] == sizes
    region.divide(9, PAGE)
    assert [region.slot_bytes(slab) for slab in range(20)] == [*sizes[:9], PAGE, *sizes[10:]]


def test_given_a_slab_with_a_value_of_high_priority_then_values_of_another_size_do_not_take_it(folder: Path) -> None:
    region = Region(folder, 2 * MEGABYTE)
    index, holder = NodeIndex(region, "priority"), Holder(1)

    def store(number: int, length: int, priority: int) -> None:
        reservation, slots = index.reserve(holder, [(KEYS[number], length, Worth(priority))])
        index.commit(holder, reservation, [7 for slot in slots if slot is not None])

    store(0, 16 * PAGE, 90)
    store(299, 16 * PAGE, 0)  # it lies beside the other, and goes with it or stays
    for number in range(1, 299):
        store(number, PAGE, 35)
    assert look(index, [KEYS[0]]) != [None]


def test_given_a_prompt_that_was_stored_at_once_then_a_prefix_is_found_as_a_whole_also_after_a_restart(
    folder: Path,
) -> None:
    region = Region(folder, MEGABYTE)
    index, holder = NodeIndex(region), Holder(1)
    number, slots = index.reserve(holder, [(key, PAGE, Worth()) for key in KEYS[:20]])
    index.commit(holder, number, [7] * len(slots))
    asked = b"".join(KEYS[5:15])
    for each in (index, NodeIndex(region)):
        (span,) = each.find(asked)
        assert (span.start, span.stop) == (5, 15)
    index.remove(KEYS[9])
    assert [(span.batch is None, span.stop - span.start) for span in index.find(asked)] == [
        (False, 4),
        (True, 1),
        (False, 5),
    ]
    region.close()


def test_given_a_prefix_that_was_used_several_times_then_its_first_value_is_the_newest_and_all_uses_count(
    folder: Path,
) -> None:
    now = 5.0
    index, holder = NodeIndex(Region(folder, MEGABYTE), clock=lambda: now), Holder(1)
    number, slots = index.reserve(holder, [(key, PAGE, Worth()) for key in KEYS[:20]])
    index.commit(holder, number, [7] * len(slots))
    now = 7.5
    for asked in (KEYS[:4], KEYS[10:14], KEYS[:4]):
        lease, _ = index.lease(holder, index.find(b"".join(asked)))
        index.release(holder, lease)
    index.count_uses()
    values = [value for value in look(index, KEYS[:20]) if value is not None]
    for value in values:
        value.read_uses()
    newest = sorted(values, key=lambda value: -value.last_access)
    assert [value.key for value in newest[:8]] == [*KEYS[:4], *KEYS[10:14]]
    assert [value.hits for value in values] == [2] * 4 + [0] * 6 + [1] * 4 + [0] * 6
    assert [value.last_access_at for value in values] == [7.5] * 4 + [5.0] * 6 + [7.5] * 4 + [5.0] * 6
    used = {record.key: record.used for record in index.region.records()}
    assert used == {value.key: value.last_access for value in values}
    index.region.close()


def test_given_values_that_were_stored_one_by_one_then_a_prefix_that_was_used_is_found_as_a_whole(folder: Path) -> None:
    index, holder = NodeIndex(Region(folder, MEGABYTE)), Holder(1)
    for name in KEYS[:40]:
        number, _ = index.reserve(holder, [(name, PAGE, Worth())])
        index.commit(holder, number, [7])
    asked = b"".join(KEYS[:40])
    spans = index.find(asked)
    assert len(spans) == 40
    first, _ = index.lease(holder, spans)
    second, _ = index.lease(holder, spans)
    index.release(holder, first)
    index.count_uses()
    assert len(index.find(asked)) == 1
    index.remove(KEYS[3])
    assert index.used_bytes == 40 * PAGE  # the second lease was taken before values moved, and holds them still
    index.release(holder, second)
    index.count_uses()
    assert index.used_bytes == 39 * PAGE
    assert look(index, KEYS[:5])[3] is None
    check(index, [holder])
    index.region.close()


@pytest.mark.parametrize(
    ("worth", "read"),
    [
        (Worth(), Worth()),
        (Worth(100, 7, 1.0), Worth(100, 7, 1.0)),
        (Worth(0, 65_535, 60.0), Worth(0, 65_535, 64.0)),
        (Worth(90, 70_000, 1e12), Worth(90, 65_535, 2.0**31)),
    ],
)
@pytest.mark.parametrize("length", [0, 1, 2**34 - 1])
def test_given_a_length_and_a_worth_then_one_number_carries_both(length: int, worth: Worth, read: Worth) -> None:
    assert unrated(rated(length, worth)) == (length, read)


def test_given_a_value_longer_than_any_slot_then_its_worth_is_carried_all_the_same() -> None:
    assert unrated(rated(2**34 + 5, Worth(100, 7, 1.0))) == (2**34 - 1, Worth(100, 7, 1.0))


@pytest.mark.parametrize("policy", ["priority", "adaptive"])
def test_given_a_priority_that_holds_for_a_time_then_the_value_goes_like_others_after_it(
    folder: Path, policy: str
) -> None:
    region, now = Region(folder, MEGABYTE), 0.0
    index, holder = NodeIndex(region, policy, clock=lambda: now), Holder(1)

    def store(number: int, worth: Worth) -> None:
        nonlocal now
        now += 1.0
        reservation, (slot,) = index.reserve(holder, [(KEYS[number], PAGE, worth)])
        assert slot is not None
        index.commit(holder, reservation, [7])

    room = region.num_bytes // PAGE
    for number in range(room):
        store(number, Worth(90, seconds=1024.0 if number else None) if number < 4 else Worth())
    held, _ = index.lease(holder, index.find(KEYS[1]))
    store(room, Worth())
    assert None not in look(index, KEYS[:4])
    now += 1024.0
    for number in range(room + 1, room + 4):
        store(number, Worth())
    assert [value is not None for value in look(index, KEYS[:4])] == [True, True, False, False]
    index.release(holder, held)
    check(index, [holder])
    region.close()


def test_given_values_that_leave_before_their_priority_ends_then_they_are_not_kept(folder: Path) -> None:
    index, holder = NodeIndex(Region(folder, MEGABYTE), "priority"), Holder(1)
    for number in range(5000):
        reservation, _ = index.reserve(holder, [(key(number), PAGE, Worth(90, seconds=1e9))])
        index.commit(holder, reservation, [7])
    assert len(index._ranking._terms._ends) < 2000
    index.region.close()


def test_given_many_leases_that_ended_then_only_so_many_uses_wait_to_be_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "MOST_USED", 4)
    index, holder = NodeIndex(Region(folder, MEGABYTE)), Holder(1)
    number, slots = index.reserve(holder, [(key, PAGE, Worth()) for key in KEYS[:2]])
    index.commit(holder, number, [7] * len(slots))
    for _ in range(10):
        lease, _ = index.lease(holder, index.find(KEYS[0]))
        index.release(holder, lease)
        assert len(index._used) < 4
    index.region.close()


@pytest.mark.parametrize("seconds", [None, 5.0], ids=["used", "their priority ends"])
def test_given_values_that_are_ranked_anew_then_their_policy_lets_them_go_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """The adaptive policy learns from a candidate that leaves with more uses than it came with."""
    ranked: list[bytes] = []

    def add(policy: AdaptivePolicy, value: Value) -> None:
        assert value not in policy
        ranked.append(value.key)
        honest(policy, value)

    honest, now = AdaptivePolicy.add, 0.0
    monkeypatch.setattr(AdaptivePolicy, "add", add)
    index, holder = NodeIndex(Region(folder, MEGABYTE), "adaptive", clock=lambda: now), Holder(1)
    room = index.region.num_bytes // PAGE
    for name in KEYS[:room]:
        number, _ = index.reserve(holder, [(name, PAGE, Worth(35, 0, seconds))])
        index.commit(holder, number, [7])
    if seconds is None:
        lease, _ = index.lease(holder, index.find(b"".join(KEYS[:room])))
        index.release(holder, lease)
    now = 10.0
    index.reserve(holder, [(KEYS[room], PAGE, Worth())])
    assert sorted(ranked) == sorted(2 * KEYS[:room])
    index.region.close()


def test_given_a_slab_that_was_used_with_the_value_that_goes_next_then_the_value_goes_and_not_the_slab(
    folder: Path,
) -> None:
    index, holders = NodeIndex(Region(folder, 2 * MEGABYTE)), [Holder(1), Holder(2)]
    for holder, name, pages in zip(holders, KEYS, (256, 200), strict=False):
        number, _ = index.reserve(holder, [(name, pages * PAGE, Worth())])
        index.commit(holder, number, [7])
    lease, hits = index.lease(holders[0], index.find(b"".join(KEYS[:2])))
    index.release(holders[0], lease)
    index.reserve(holders[0], [(KEYS[2], 256 * PAGE, Worth())])
    assert (hits, [value is not None for value in look(index, KEYS[:2])]) == (2, [False, True])
    index.region.close()


def test_given_an_older_slab_of_the_same_priority_then_values_of_another_size_take_it(folder: Path) -> None:
    index, holder = NodeIndex(Region(folder, 2 * MEGABYTE), "priority"), Holder(1)
    for name, pages in zip(KEYS, [256] + [1] * 257, strict=False):
        number, _ = index.reserve(holder, [(name, pages * PAGE, Worth(35))])
        index.commit(holder, number, [7])
    assert [name for name in KEYS[:258] if name not in index._values] == KEYS[:1]
    index.region.close()
