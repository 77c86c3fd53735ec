"""The machinery behind tiers: memory on loan, threads that do jobs, calls that hang, what is stored once."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import re
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import eventually

from kvpool import MultimodalItem
from kvpool.testing import key, value
from kvpool.tiers import Fingerprint, KeyedTier, KeySpace, MemoryTier, Outcome
from kvpool.tiers.contract import Keeper
from kvpool.tiers.keys import KeyPattern
from kvpool.tiers.transport.block_keys import BlockKeys
from kvpool.tiers.transport.cache_blocks import Offers, PrefixLeases
from kvpool.tiers.transport.chain import KnownKeys, WatchedTier
from kvpool.tiers.transport.deciding import DecisionStats
from kvpool.tiers.transport.fetching import FetchStats
from kvpool.tiers.transport.staging import StagingMemory, page_aligned
from kvpool.tiers.transport.storing import Storer, StoreStats
from kvpool.tiers.transport.threads import Pending, ThreadPool
from kvpool.tiers.transport.tier_transport import HandoverStats
from managers import make_manager

SECONDS = 30.0


class GatedTier(MemoryTier):
    """A tier whose calls wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        self.begun.set()
        self.gate.wait(SECONDS)
        return super()._store(keys, data, deadline)


@pytest.mark.parametrize("kind", [DecisionStats, FetchStats, HandoverStats, StoreStats])
def test_given_nothing_happened_then_every_count_is_zero(kind: type[Any]) -> None:
    assert set(dataclasses.asdict(kind()).values()) == {0}


def nothing() -> None:
    pass


def test_given_memory_on_loan_then_no_more_than_the_limit_is_out_and_what_came_back_is_used_again() -> None:
    made: list[int] = []

    def allocate(num_bytes: int) -> np.ndarray:
        made.append(num_bytes)
        return np.empty(num_bytes, np.uint8)

    memory = StagingMemory(100_000, allocate)
    first = memory.take(60_000)
    assert first is not None
    assert memory.take(60_000) is None
    memory.give(first)
    again = memory.take(50_000)
    assert again is not None
    assert (len(again.data), made, memory.lent_bytes) == (50_000, [60_000], 60_000)
    memory.give(again)
    large = memory.take(100_000)
    assert large is not None
    assert made == [60_000, 100_000]
    memory.give(large)
    assert memory.lent_bytes == 0


@pytest.mark.parametrize(("idle", "is_used"), [(999, False), (1000, True), (2000 + 4096, True), (2001 + 4096, False)])
def test_given_memory_that_came_back_then_it_is_lent_again_unless_it_is_too_short_or_far_too_long(
    idle: int, is_used: bool
) -> None:
    memory = StagingMemory(10**6)
    first = memory.take(idle)
    assert first is not None
    memory.give(first)
    again = memory.take(1000)
    assert again is not None
    assert (again.whole is first.whole) == is_used


def test_given_room_for_exactly_what_is_asked_then_idle_memory_is_kept() -> None:
    memory = StagingMemory(100_000)
    idle = memory.take(40_000)
    assert idle is not None
    memory.give(idle)
    assert memory.take(10_000) is not None  # the idle memory is far too long for it
    assert memory.take(50_000) is not None
    again = memory.take(40_000)
    assert again is not None
    assert again.whole is idle.whole
    assert memory.take(1) is None


def test_given_memory_that_cannot_be_had_then_nothing_counts_as_lent() -> None:
    def allocate(num_bytes: int) -> np.ndarray:
        raise MemoryError

    memory = StagingMemory(100, allocate)
    with pytest.raises(MemoryError):
        memory.take(100)
    assert memory.lent_bytes == 0


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs a Linux with huge pages")
def test_given_fresh_memory_then_it_is_private_and_asks_for_huge_pages() -> None:
    memory = page_aligned(8 * 2**20)
    address, flags = memory.ctypes.data, ""
    assert address % mmap.PAGESIZE == 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif line.startswith("VmFlags:") and inside:
            flags = line
    assert "hg" in flags.split()
    assert "sh" not in flags.split()


def test_given_a_full_lane_then_more_is_refused_and_stopping_drops_what_waits() -> None:
    threads, gate, begun = ThreadPool("test", 1, 2), threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        begun.set()
        gate.wait(SECONDS)
        done.append("first")

    assert threads.submit(first, nothing)
    assert begun.wait(SECONDS)
    assert threads.submit(lambda: done.append("second"), lambda: done.append("dropped"))
    assert threads.submit(lambda: done.append("third"), lambda: done.append("dropped"))
    assert not threads.submit(nothing, nothing)
    assert threads.num_waiting == 2
    assert not threads.flush(0.0)
    assert not threads.stop(0.0)
    gate.set()
    assert threads.stop(SECONDS)
    assert done == ["dropped", "dropped", "first"]
    assert not threads.submit(nothing, nothing)


def test_given_a_job_that_raises_then_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    threads, done = ThreadPool("test"), threading.Event()
    threads.submit(lambda: 1 // 0, nothing)  # type: ignore[arg-type, return-value]
    threads.submit(done.set, nothing)
    assert done.wait(SECONDS)
    assert threads.stop(SECONDS)
    assert "ZeroDivisionError" in caplog.text


def test_given_more_keys_than_are_remembered_then_the_oldest_are_forgotten() -> None:
    known = KnownKeys(3)
    known.add(key(number) for number in range(3))
    known.add([key(0)])
    known.add([key(3)])
    assert [key(number) in known for number in range(4)] == [True, False, True, True]
    known.discard([key(3), key(9)])
    assert len(known) == 2


def test_given_a_call_that_does_not_come_back_then_its_tier_counts_as_hung_until_it_does() -> None:
    tier = GatedTier()
    watched = WatchedTier(tier)
    thread = threading.Thread(target=lambda: watched.store([key(1)], [value(1)], 0.001))
    thread.start()
    assert tier.begun.wait(SECONDS)
    while not watched.num_hung:
        pass
    tier.gate.set()
    thread.join(SECONDS)
    assert watched.num_hung == 0
    assert key(1) in watched.known


class Answers(KeyedTier):
    """A tier that answers with whatever it is given."""

    def __init__(self, answer: object) -> None:
        super().__init__("answers")
        self.answer = answer

    def contains(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        return self._given()

    def load(
        self,
        keys: Sequence[bytes],
        out: Sequence[object],
        *,
        timeout: float | None = None,
        keeper: Keeper | None = None,
    ) -> list[Outcome]:
        return self._given()

    def store(self, keys: Sequence[bytes], data: Sequence[object], *, timeout: float | None = None) -> list[Outcome]:
        return self._given()

    def _given(self) -> list:  # type: ignore[type-arg]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]

    def _contains(self, keys: object, deadline: float) -> list[bool]:
        raise NotImplementedError

    _load = _store = _remove = _contains  # type: ignore[assignment]


@pytest.mark.parametrize(
    "answer", [RuntimeError("on fire"), [], [Outcome.OK], None, 3, ["yes", "no"], [Outcome.OK, "no"], [True, "no"]]
)
def test_given_a_tier_that_breaks_the_contract_then_it_has_nothing_and_nobody_hears_of_it(answer: object) -> None:
    watched = WatchedTier(Answers(answer))
    keys = [key(1), key(2)]
    assert watched.contains(keys, 1.0) == [False, False]
    assert watched.load(keys, [bytearray(4), bytearray(4)], 1.0) == [Outcome.FAILED] * 2
    assert watched.store(keys, [b"1", b"2"], 1.0) == [Outcome.FAILED] * 2
    assert watched.num_hung == 0


def rows(*numbers: int) -> list[np.ndarray]:
    return [np.frombuffer(value(number), np.uint8) for number in numbers]


def test_given_blocks_on_their_way_then_they_are_not_stored_twice_and_their_memory_comes_back() -> None:
    tier, memory = GatedTier(), StagingMemory(2**20)
    storer = Storer([WatchedTier(tier)], memory)
    for numbers in ((1, 2), (2, 3)):
        stage = storer.take_memory(100, 2)
        assert stage is not None
        storer.store([key(number) for number in numbers], rows(*numbers), stage, nothing)
    assert not storer.wants(key(2))
    assert storer.num_waiting == 3
    tier.gate.set()
    assert storer.flush(SECONDS)
    assert tier.contains([key(1), key(2), key(3)]) == [True] * 3
    stats = storer.stats()
    assert (stats.stored, stats.failed, stats.dropped) == (3, 0, 0)
    assert (memory.lent_bytes, storer.num_waiting) == (0, 0)
    assert not storer.wants(key(3))
    storer.close(SECONDS)


def test_given_no_memory_left_then_blocks_are_dropped_and_counted() -> None:
    storer = Storer([WatchedTier(MemoryTier(2**20))], StagingMemory(10))
    assert storer.take_memory(11, 3) is None
    assert storer.stats().dropped == 3


def test_given_a_tier_that_hangs_when_the_storer_is_closed_then_what_waits_is_dropped_and_counted() -> None:
    tier, memory = GatedTier(), StagingMemory(2**20)
    storer = Storer([WatchedTier(tier)], memory)
    one: list[int] = []
    for number in range(3):
        stage = storer.take_memory(10, 1)
        assert stage is not None
        one.append(memory.lent_bytes)
        storer.store([key(number)], rows(number), stage, nothing)
    assert tier.begun.wait(SECONDS)
    storer.close(0.0)
    assert storer.stats().dropped == 2
    assert memory.lent_bytes == one[0]  # of the value that hangs; what was dropped is given back
    tier.gate.set()


def test_given_two_tiers_then_each_gets_what_it_lacks() -> None:
    fast, slow = MemoryTier(2**20, name="fast"), MemoryTier(2**20, name="slow")
    watched = [WatchedTier(fast), WatchedTier(slow)]
    storer = Storer(watched, StagingMemory(2**20))
    watched[1].known.add([key(1)])
    stage = storer.take_memory(10, 2)
    assert stage is not None
    storer.store([key(1), key(2)], rows(1, 2), stage, nothing)
    assert storer.flush(SECONDS)
    assert fast.contains([key(1), key(2)]) == [True, True]
    assert slow.contains([key(1), key(2)]) == [False, True]
    storer.close(SECONDS)


def test_given_a_block_that_one_of_two_tiers_lacks_then_it_is_wanted() -> None:
    watched = [WatchedTier(MemoryTier(2**20)) for _ in range(2)]
    storer = Storer(watched, StagingMemory(2**20))
    watched[0].known.add([key(1)])
    assert storer.wants(key(1))
    watched[1].known.add([key(1)])
    assert not storer.wants(key(1))
    storer.close(SECONDS)


def test_given_values_in_two_tiers_when_they_are_purged_then_both_lose_them_and_all_count_as_removed() -> None:
    tiers = [MemoryTier(2**20), MemoryTier(2**20)]
    storer = Storer([WatchedTier(tier) for tier in tiers], StagingMemory(2**20))
    stage = storer.take_memory(100, 2)
    assert stage is not None
    storer.store([key(1), key(2)], rows(1, 2), stage, nothing)
    storer.purge(KeyPattern())
    assert storer.flush(SECONDS)
    assert [tier.contains([key(1), key(2)]) for tier in tiers] == [[False, False]] * 2
    stats = storer.stats()
    assert (stats.removed, stats.not_removed) == (4, 0)
    assert storer.wants(key(1))
    storer.close(SECONDS)


def test_given_a_storer_that_is_closed_then_what_it_is_told_to_take_out_counts_as_left_once_for_each_tier() -> None:
    storer = Storer([WatchedTier(MemoryTier(2**20)) for _ in range(2)], StagingMemory(2**20))
    storer.close(SECONDS)
    storer.purge(KeyPattern())
    assert (storer.stats().removed, storer.stats().not_removed) == (0, 2)
    storer.remove([key(1), key(2), key(3)])
    assert (storer.stats().removed, storer.stats().not_removed) == (0, 2 + 2 * 3)


def test_given_two_tiers_of_which_one_hangs_then_not_everything_is_stored_yet() -> None:
    gate, tiers = threading.Event(), [MemoryTier(2**20), MemoryTier(2**20)]
    purge = tiers[1]._purge
    tiers[1]._purge = lambda *given: (gate.wait(SECONDS), purge(*given))[1]  # type: ignore[method-assign]
    storer = Storer([WatchedTier(tier) for tier in tiers], StagingMemory(2**20))
    storer.purge(KeyPattern())
    assert not storer.flush(0.0)
    gate.set()
    assert storer.flush(SECONDS)
    storer.close(SECONDS)


def test_given_a_job_that_is_over_then_what_it_held_is_free_before_the_next_one_comes() -> None:
    pool, held = ThreadPool("test", 1, 4), MemoryTier(2**20)
    seen = weakref.ref(held)
    assert pool.submit(partial(bool, held), nothing)
    assert pool.flush(SECONDS)
    del held
    gc.collect()
    assert seen() is None
    assert pool.stop(SECONDS)


def test_given_values_that_are_taken_out_then_those_that_may_still_be_there_are_counted() -> None:
    outcomes = [Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.LATE, Outcome.OK, Outcome.OK]
    tier = MemoryTier(2**20)
    tier._remove = lambda keys, deadline: outcomes  # type: ignore[method-assign]
    storer = Storer([WatchedTier(tier)], StagingMemory(2**20))
    storer.remove([key(number) for number in range(6)])
    assert storer.flush(SECONDS)
    stats = storer.stats()
    assert (stats.removed, stats.not_removed) == (3, 2)
    storer.close(SECONDS)


def test_given_leases_on_more_than_half_of_a_pool_then_the_oldest_end() -> None:
    manager = make_manager(gpu_blocks=16)
    leases = PrefixLeases(manager)
    for name in "abc":
        leases.keep(name, manager.allocate(name, num_tokens=16))
        if name == "b":
            assert [lease.owner for lease in leases.view()] == ["a", "b"]  # just half
    assert [(lease.owner, lease.num_blocks) for lease in leases.view()] == [("b", 4), ("c", 4)]
    leases.end_all()
    assert (len(leases), manager.stats().num_sequences) == (0, 0)


class Asked:
    """Stands for a storer, and wants nothing."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def wants(self, key: bytes) -> bool:
        self.keys.append(key)
        return False


def test_given_a_prompt_with_images_that_is_offered_in_parts_then_its_keys_are_those_of_the_whole() -> None:
    manager = make_manager()
    tokens, items = np.arange(24, dtype=np.int32), [MultimodalItem(1, 2, "cat"), MultimodalItem(13, 6, "dog")]
    keys = BlockKeys(KeySpace(Fingerprint.of(manager.config, "model", "weights")), manager.config)
    handle = manager.allocate("a", tokens, multimodal=items)
    manager.commit(handle)
    asked, unused = Asked(), None
    made: Any = Offers
    offers = made(plane=unused, keys=keys, storer=asked, near=unused, may_write=unused)
    progress = offers.begin(handle.scope)
    for stop in (9, 10, 24):
        offers.offer(handle, tokens[:stop], progress, items)
    assert asked.keys == keys.of_prompt(tokens, handle.scope, items).keys[0]
    manager.free(handle)


class Hung:
    """A thread that never ends, and notes how long others wait for it."""

    def __init__(self, now: list[float]) -> None:
        self.now, self.waits = now, list[float]()

    def join(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now[0] += seconds

    def is_alive(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "waits"), [(0.0, [0.0, 0.0]), (4.0, [4.0, 0.0])])
def test_given_threads_that_hang_then_stopping_waits_for_all_of_them_together_only_so_long(
    seconds: float, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    threads: Any = [Hung(now), Hung(now)]
    pool = ThreadPool("test", 2)
    pool._threads = threads
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now[0])
        assert not pool.stop(seconds)
    assert [thread.waits for thread in threads] == [[wait] for wait in waits]


def test_given_jobs_one_after_the_other_then_one_thread_does_them_all() -> None:
    threads = ThreadPool("test", 4)
    for _ in range(3):
        assert threads.submit(nothing, nothing)
        assert threads.flush(SECONDS)
    assert len(threads._threads) == 1
    assert threads.stop(SECONDS)


def test_given_a_job_that_ends_then_who_waits_for_it_goes_on_at_once() -> None:
    pending: Pending[int] = Pending(time.monotonic() + 3600.0)
    found: list[int | None] = []
    waiter = threading.Thread(target=lambda: found.append(pending.wait()), daemon=True)
    waiter.start()
    eventually(lambda: len(pending._changed._waiters) == 1, "it waits")
    pending.end(5)
    waiter.join(SECONDS)
    assert found == [5]
