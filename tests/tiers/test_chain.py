"""Tiers one after the other: who has a key first, what is asked of whom, and when all threads hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.testing import key, value
from kvpool.tiers import KeyPattern, MemoryTier, Outcome, Purged
from kvpool.tiers.transport import chain as watching
from kvpool.tiers.transport.chain import SHORTEST_CALL, TierChain, WatchedTier, call_seconds
from kvpool.tiers.transport.prefix_options import NOWHERE
from kvpool.tiers.transport.threads import Pending, ThreadPool

SECONDS = 30.0
SIZE = 64


class HangingTier(MemoryTier):
    """Look-ups, stores and purges wait until the test lets them go, whatever their deadline is."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.gate = threading.Event()
        self.waiting = threading.Semaphore(0)

    def _wait(self) -> None:
        self.waiting.release()
        self.gate.wait(SECONDS)

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._wait()
        return super()._contains(keys, deadline)

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        self._wait()
        return super()._store(keys, data, deadline)

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        self._wait()
        return super()._purge(pattern, deadline)


class WrongTier(MemoryTier):
    """Breaks the contract when it is purged."""

    def _purge(self, pattern: KeyPattern, deadline: float) -> Any:
        return 7


def tier_with(*numbers: int) -> MemoryTier:
    tier = MemoryTier(2**20)
    keys = [key(number) for number in numbers]
    assert tier.store(keys, [value(number, SIZE) for number in numbers], timeout=SECONDS) == [Outcome.OK] * len(keys)
    return tier


def due(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def nothing() -> None:
    pass


def test_given_two_tiers_then_each_key_is_found_in_the_first_that_has_it() -> None:
    chain = TierChain([tier_with(0, 3), tier_with(0, 1)])
    keys = [key(number) for number in range(4)]
    assert chain.find(keys, due()) == [0, 1, NOWHERE, 0]
    assert chain.find_prefix(keys, due()) == [0, 1]


def test_given_a_key_that_left_its_tier_then_a_question_forgets_it() -> None:
    watched = WatchedTier(tier_with(1, 2))
    assert watched.contains([key(1), key(2), key(3)], SECONDS) == [True, True, False]
    assert [key(number) in watched.known for number in (1, 2, 3)] == [True, True, False]
    watched.tier.remove([key(1)])
    assert watched.contains([key(1), key(2)], SECONDS) == [False, True]
    assert [key(number) in watched.known for number in (1, 2)] == [False, True]


def test_given_a_removal_that_fails_then_its_keys_are_forgotten_all_the_same() -> None:
    watched = WatchedTier(tier_with(1, 2))
    watched.contains([key(1), key(2)], SECONDS)
    watched.tier.remove = lambda keys, timeout: 7  # type: ignore[method-assign,assignment,return-value,misc]
    assert watched.remove([key(1)], SECONDS) == [Outcome.FAILED]
    assert [key(number) in watched.known for number in (1, 2)] == [False, True]


def test_given_two_tiers_then_the_second_is_asked_only_for_what_the_first_lacks() -> None:
    first, second = tier_with(0, 2), tier_with(0, 1, 2)
    chain = TierChain([first, second])
    rows = [bytearray(SIZE) for _ in range(4)]
    assert chain.load_prefix([key(number) for number in range(4)], rows, due()) == 3
    assert [bytes(row) for row in rows[:3]] == [bytes(value(number, SIZE)) for number in range(3)]
    assert [(stats.hits, stats.misses) for stats in chain.stats()] == [(2, 2), (1, 1)]


def test_given_no_time_then_nothing_is_found_and_a_call_still_gets_the_shortest_time() -> None:
    chain = TierChain([tier_with(0)])
    assert chain.find([key(0)], due(0.0)) == [NOWHERE]
    assert call_seconds(due(-1.0)) == SHORTEST_CALL


def test_given_a_tier_that_hangs_then_it_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "GRACE_SECONDS", -1.0)
    hanging = HangingTier()
    chain = TierChain([hanging, tier_with(0)])
    thread = threading.Thread(target=chain.watched[0].contains, args=([key(0)], 0.01))
    thread.start()
    assert hanging.waiting.acquire(timeout=SECONDS)
    assert chain.find([key(0)], due()) == [1]
    assert chain.num_passed_by == 1
    hanging.gate.set()
    thread.join(SECONDS)


def test_given_a_purge_that_hangs_then_the_tier_is_passed_by_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "GRACE_SECONDS", -1.0)
    hanging = HangingTier()
    chain = TierChain([hanging, tier_with(0)])
    thread = threading.Thread(target=chain.watched[0].purge, args=(KeyPattern(), 0.01))
    thread.start()
    assert hanging.waiting.acquire(timeout=SECONDS)
    assert (chain.watched[0].num_hung, chain.find([key(0)], due())) == (1, [1])
    hanging.gate.set()
    thread.join(SECONDS)
    assert chain.watched[0].num_hung == 0


def test_given_a_purge_that_answers_nonsense_then_it_counts_as_incomplete() -> None:
    (watched,) = TierChain([WrongTier(2**20)]).watched
    assert watched.purge(KeyPattern(), SECONDS) == Purged()


def test_given_calls_that_hang_then_threads_are_stuck_once_all_its_own_threads_are_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "GRACE_SECONDS", -1.0)
    tier = HangingTier()
    (watched,) = TierChain([tier]).watched
    fetching = ThreadPool("fetch", 2, 8, [watched])
    storing = ThreadPool("store", 1, 8, [watched])

    def look_up() -> None:
        watched.contains([key(0)], 0.01)

    def store() -> None:
        watched.store([key(0)], [value(0, SIZE)], 0.01)

    assert not fetching.is_stuck
    assert storing.submit(store, nothing)
    assert fetching.submit(look_up, nothing)
    assert all(tier.waiting.acquire(timeout=SECONDS) for _ in range(2))
    assert (watched.num_hung, fetching.is_stuck, storing.is_stuck) == (2, False, True)
    assert fetching.submit(look_up, nothing)
    assert tier.waiting.acquire(timeout=SECONDS)
    assert fetching.is_stuck
    tier.gate.set()
    assert fetching.flush(SECONDS)
    assert not fetching.is_stuck
    assert fetching.stop(SECONDS)
    assert storing.stop(SECONDS)


# --- waiting for a job -------------------------------------------------------------------------------------------------


def test_given_a_job_that_ends_in_time_then_the_waiter_gets_what_it_brings_and_nothing_is_discarded() -> None:
    discarded: list[int] = []
    pending = Pending(due(), discarded.append)
    thread = threading.Thread(target=pending.end, args=(5,))
    thread.start()
    assert pending.wait() == 5
    assert (pending.has_ended, pending.is_given_up, pending.give_up(), discarded) == (True, False, False, [])
    thread.join(SECONDS)


def test_given_a_job_that_is_overdue_then_the_waiter_goes_on_and_what_comes_later_is_discarded_once() -> None:
    discarded: list[int] = []
    ended = threading.Event()
    pending = Pending(due(-1.0), discarded.append, ended.set)
    assert pending.is_overdue
    assert (pending.wait(), pending.is_given_up, pending.has_ended) == (None, True, False)
    pending.end(5)
    assert (pending.value, pending.has_ended, ended.is_set(), discarded) == (None, True, True, [5])


def test_given_a_job_that_brings_nothing_then_the_waiter_does_not_wait_for_its_deadline() -> None:
    pending: Pending[int] = Pending(due(3600.0))
    pending.end()
    assert (pending.wait(), pending.is_overdue) == (None, False)
