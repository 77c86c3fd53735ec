"""Who calls a tier passes on the time that is left, and whatever else it was given. The clock stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.testing import Kept, key
from kvpool.tiers import CompressedTier, KeyedTier, KeyPattern, Outcome, Purged
from kvpool.tiers.contract import CALL_TIMEOUT, PURGE_TIMEOUT, Keeper, Loan, Source, Worth
from kvpool.tiers.node.behind import STORE_SECONDS, Behind
from kvpool.tiers.transport.chain import GRACE_SECONDS, SHORTEST_CALL, TierChain, WatchedTier
from kvpool.tiers.transport.prefix_options import NOWHERE
from kvpool.tiers.transport.staging import StagingMemory
from kvpool.tiers.transport.storing import STORE_TIMEOUT, Storer

NOW = 1000.0
KEYS = [key(1), key(2)]
DATA = [memoryview(bytes(64)), memoryview(bytes(32))]
PATTERN = KeyPattern(bytes(8))
WORTHS = [Worth(3, 4, 5.0), Worth(6)]
SOURCE: Any = SimpleNamespace()


class Asked(KeyedTier):
    """Notes every call with the seconds until its deadline, and has what it was told to have."""

    has_slots = True

    def __init__(self, *, has: bool = False) -> None:
        super().__init__("asked")
        self.calls: list[tuple[Any, ...]] = []
        self.has = has

    def _note(self, name: str, keys: Any, deadline: float, *more: Any) -> None:
        self.calls.append((name, keys, deadline - NOW, *more))

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._note("contains", keys, deadline)
        return [self.has] * len(keys)

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        self._note("load", keys, deadline)
        return [Outcome.OK if self.has else Outcome.MISS] * len(keys)

    def _load_kept(
        self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float, *, keeper: Keeper
    ) -> list[Outcome]:
        self._note("load", keys, deadline, keeper)
        return [Outcome.MISS] * len(keys)

    def _lend(self, keys: Sequence[bytes], sizes: Sequence[int], deadline: float) -> Loan | None:
        self._note("lend", keys, deadline, sizes)
        return None

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        self._note("store", keys, deadline)
        return [Outcome.OK] * len(keys)

    def _store_rated(
        self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float, *, worths: Sequence[Worth]
    ) -> list[Outcome]:
        self._note("store", keys, deadline, worths)
        return [Outcome.OK] * len(keys)

    def _store_straight(
        self, keys: Sequence[bytes], sizes: Sequence[int], source: Source, deadline: float, worths: Sequence[Worth]
    ) -> list[Outcome]:
        self._note("store straight", keys, deadline, sizes, worths)
        return [Outcome.OK] * len(keys)

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        self._note("remove", keys, deadline)
        return [Outcome.OK] * len(keys)

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        self._note("purge", pattern, deadline)
        return Purged(3, is_complete=True)


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: NOW)


OUT = [bytearray(64), bytearray(32)]
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda tier, **time: tier.contains(KEYS, **time), ("contains", KEYS)),
    (lambda tier, **time: tier.contains_prefix(KEYS, **time), ("contains", KEYS)),
    (lambda tier, **time: tier.load(KEYS, OUT, **time), ("load", KEYS)),
    (lambda tier, **time: tier.lend(KEYS, [64, 32], **time), ("lend", KEYS, [64, 32])),
    (lambda tier, **time: tier.store(KEYS, DATA, **time), ("store", KEYS)),
    (lambda tier, **time: tier.store(KEYS, DATA, worths=WORTHS, **time), ("store", KEYS, WORTHS)),
    (
        lambda tier, **time: tier.store_straight(KEYS, [64, 32], SOURCE, worths=WORTHS, **time),
        ("store straight", KEYS, [64, 32], WORTHS),
    ),
    (
        lambda tier, **time: tier.store_straight(KEYS, [64, 32], SOURCE, **time),
        ("store straight", KEYS, [64, 32], [Worth()] * 2),
    ),
    (lambda tier, **time: tier.remove(KEYS, **time), ("remove", KEYS)),
]


@pytest.mark.parametrize(("call", "noted"), CALLS)
@pytest.mark.parametrize("seconds", [None, 7.0])
def test_given_a_call_of_a_tier_then_its_deadline_is_the_timeout_of_the_call_or_of_the_tier(
    call: Callable[..., Any], noted: tuple[Any, ...], seconds: float | None
) -> None:
    tier = Asked()
    call(tier, **{} if seconds is None else {"timeout": seconds})
    name, keys, *more = noted
    assert tier.calls == [(name, keys, seconds or CALL_TIMEOUT, *more)]
    stats = tier.stats()
    assert (stats.seconds_loading, stats.seconds_storing) == (0.0, 0.0)  # the clock stands


def test_given_a_purge_then_it_has_a_minute_or_what_it_is_given() -> None:
    tier = Asked()
    assert tier.purge(PATTERN) == tier.purge(PATTERN, timeout=7.0) == Purged(3, is_complete=True)
    assert tier.calls == [("purge", PATTERN, PURGE_TIMEOUT), ("purge", PATTERN, 7.0)]
    assert (PURGE_TIMEOUT, tier.stats().removed) == (60.0, 6)


def test_given_compression_then_the_inner_tier_gets_its_own_keys_and_all_the_time() -> None:
    for has in (True, False):
        inner = Asked(has=has)
        tier = CompressedTier(inner, "zstd")
        own = tier._own(KEYS)
        tier.contains(KEYS, timeout=7.0)
        tier.store(KEYS, DATA, timeout=8.0)
        tier.load(KEYS, OUT, timeout=9.0)
        tier.remove(KEYS, timeout=10.0)
        tier.purge(PATTERN, timeout=11.0)
        stored = [] if has else [("store", own, 8.0)]
        assert inner.calls == [
            ("contains", own, 7.0),
            ("contains", own, 8.0),
            *stored,
            ("load", own, 9.0),
            ("remove", own, 10.0),
            ("purge", PATTERN, 11.0),
        ]
        tier._contains(KEYS, NOW - 1.0)
        assert inner.calls[-1] == ("contains", own, pytest.approx(0.001))  # the inner tier refuses a time that is none


def test_given_a_watched_tier_then_every_call_has_the_time_that_it_was_given_and_is_overdue_only_after_it() -> None:
    tier, kept = Asked(), Kept()
    watched = WatchedTier(tier)
    due: list[float] = []
    note = tier._note

    def noting(*call: Any) -> None:
        due.extend(watched._calls.values())
        note(*call)

    tier._note = noting  # type: ignore[method-assign]
    watched.contains(KEYS, 1.0)
    watched.load(KEYS, OUT, 2.0)
    watched.load(KEYS, OUT, 3.0, kept)
    watched.lend(KEYS, [64, 32], 4.0)
    watched.store(KEYS, DATA, 5.0)
    watched.store(KEYS, DATA, 6.0, WORTHS)
    watched.store_straight(KEYS, [64, 32], SOURCE, 7.0, WORTHS)
    watched.remove(KEYS, 8.0)
    watched.purge(PATTERN, 9.0)
    assert tier.calls == [
        ("contains", KEYS, 1.0),
        ("load", KEYS, 2.0),
        ("load", KEYS, 3.0, kept),
        ("lend", KEYS, 4.0, [64, 32]),
        ("store", KEYS, 5.0),
        ("store", KEYS, 6.0, WORTHS),
        ("store straight", KEYS, 7.0, [64, 32], WORTHS),
        ("remove", KEYS, 8.0),
        ("purge", PATTERN, 9.0),
    ]
    assert due == [NOW + seconds + GRACE_SECONDS for seconds in range(1, 10)]
    assert (watched._calls, watched.num_hung) == ({}, 0)


@pytest.mark.parametrize(("left", "is_asked"), [(5.0, True), (SHORTEST_CALL, True), (SHORTEST_CALL / 2, False)])
def test_given_a_chain_then_each_tier_is_asked_for_what_is_lacking_with_the_time_that_is_left(
    left: float, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: -left)  # exactly so much is left until 0
    tiers = [Asked(), Asked(has=True), Asked(has=True)]
    chain = TierChain(tiers)
    assert chain.find(KEYS, 0.0) == ([1, 1] if is_asked else [NOWHERE] * 2)
    assert chain.load(KEYS, OUT, 0.0) == ([1, 1] if is_asked else [NOWHERE] * 2)
    found = [("contains", KEYS, 0.0 - NOW), ("load", KEYS, 0.0 - NOW)] if is_asked else []
    assert [tier.calls for tier in tiers] == [found, found, []]


def test_given_background_stores_and_removals_then_tiers_have_ten_seconds_and_a_minute_for_a_purge() -> None:
    tier, kept = Asked(), Kept()
    kept.users = 2
    chain = TierChain([tier])
    storer = Storer(chain.watched, StagingMemory(2**20))
    rows = [np.zeros(64, np.uint8), np.zeros(32, np.uint8)]
    waited: list[str] = []
    storer.store([key(1), key(2)], rows, kept, lambda: waited.append("stored"), worths=WORTHS)
    assert storer.flush(30.0)
    chain.watched[0].known.add([key(3)])
    keys = [key(3), key(4), key(5)]
    storer.store_straight(keys, 64, kept, lambda: waited.append("straight"), SOURCE, [Worth(1), Worth(2), Worth(3)])
    storer.remove(KEYS)
    storer.purge(PATTERN)
    assert storer.flush(30.0)
    assert tier.calls == [
        ("store", KEYS, STORE_TIMEOUT, WORTHS),
        ("store straight", keys[1:], STORE_TIMEOUT, [64] * 2, [Worth(2), Worth(3)]),
        ("remove", KEYS, STORE_TIMEOUT),
        ("purge", PATTERN, PURGE_TIMEOUT),
    ]
    assert (waited, kept.users) == (["stored", "straight"], 0)
    stats = storer.stats()
    assert (stats.stored, stats.bytes_stored, stats.removed, stats.failed) == (4, 96 + 128, 2 + 3, 0)
    storer.close(30.0)


def test_given_tiers_behind_a_node_then_they_have_until_its_engine_stops_waiting() -> None:
    tier = Asked()
    behind = Behind([tier], lambda job: job())
    answers: list[Any] = []
    behind.find(KEYS, NOW + 1.0, answers.append)
    behind.load(KEYS, [memoryview(out) for out in OUT], NOW + 2.0, answers.append)
    assert behind._fetching.flush(30.0)
    behind.store(KEYS, DATA, lambda: answers.append("stored"))
    behind.remove(KEYS, NOW + 3.0, answers.append)
    behind.remove(KEYS, NOW - 3.0, answers.append)
    behind.purge(PATTERN, lambda *purged: answers.append(purged))
    assert behind._storing.flush(30.0)
    calls = sorted(tier.calls[:2])
    assert calls == [("contains", KEYS, 1.0), ("load", KEYS, 2.0)]
    assert tier.calls[2:] == [
        ("store", KEYS, STORE_SECONDS),
        ("remove", KEYS, 3.0),
        ("remove", KEYS, pytest.approx(0.001)),
        ("purge", PATTERN, PURGE_TIMEOUT),
    ]
    assert sorted(answers[:2], key=str) == [[False] * 2, [None] * 2]
    assert answers[2:] == ["stored", [True] * 2, [True] * 2, (3, True)]
    behind.close()
