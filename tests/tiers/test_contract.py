"""The contract of key-addressed tiers, on the smallest tier, and what the base class adds to a tier that misbehaves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvpool import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.testing import TierContract, key, load, store, value
from kvpool.tiers import KeyedTier, KeyPattern, MemoryTier, Outcome, Purged, Room, TierStats, contract
from kvpool.tiers.contract import CountedKeeper, Loan, Worth


class TestMemoryTier(TierContract):
    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return MemoryTier(10**7)


def test_given_a_full_memory_tier_then_the_value_used_longest_ago_goes() -> None:
    tier = MemoryTier(15_000)
    store(tier, [1, 2, 3])
    load(tier, [1])
    store(tier, [4])
    assert tier.contains([key(i) for i in (1, 2, 3, 4)]) == [True, False, True, True]
    assert tier.stats().used_bytes == 15_000


def test_given_a_value_larger_than_the_tier_then_it_is_refused_and_nothing_leaves() -> None:
    tier = MemoryTier(6_000)
    store(tier, [1])
    assert tier.store([key(2)], [value(2, 7_000)]) == [Outcome.REFUSED]
    assert tier.contains([key(1)]) == [True]
    assert tier.stats().refused == 1


@pytest.mark.parametrize("wrong", [-1, 2**63, "1GB", 1.5, True, None])
def test_given_a_wrong_capacity_then_a_memory_tier_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="capacity_bytes="):
        MemoryTier(wrong)
    assert MemoryTier(0).store([key(1)], [b"a"]) == [Outcome.REFUSED]


def test_given_a_memory_tier_that_is_closed_then_it_holds_no_memory() -> None:
    tier = MemoryTier(6_000)
    store(tier, [1])
    tier.close()
    assert (tier._values, tier._used) == ({}, 0)


class BrokenTier(KeyedTier):
    """Raises in every call."""

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        raise ConnectionError("no route")

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        raise ConnectionError("no route")

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        raise ConnectionError("no route")

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        raise ConnectionError("no route")


def test_given_a_tier_that_raises_then_every_key_failed_and_one_line_tells(caplog: pytest.LogCaptureFixture) -> None:
    tier = BrokenTier("far")
    with caplog.at_level(logging.WARNING, "kvpool"):
        assert tier.contains([key(1)]) == [False]
        assert load(tier, [1, 2])[0] == [Outcome.FAILED] * 2
        assert store(tier, [1]) == [Outcome.FAILED]
        assert tier.remove([key(1)]) == [Outcome.FAILED]
    assert [record.getMessage() for record in caplog.records] == [
        "tier far: ConnectionError: no route; what it cannot bring is computed again"
    ]
    stats = tier.stats()
    assert (stats.load_failures, stats.store_failures, stats.removed) == (2, 1, 0)


def test_given_a_new_tier_then_every_count_is_zero() -> None:
    stats = asdict(MemoryTier(6_000).stats())
    counts = {name: number for name, number in stats.items() if isinstance(number, (int, float))}
    assert {name: number for name, number in counts.items() if number} == {"capacity_bytes": 6_000}


# --- what the base class does with what a tier answers -----------------------------------------------------------------


class Held(Loan):
    def is_held(self) -> bool:
        return True

    def _end(self) -> None:
        pass


class ToldTier(KeyedTier):
    """Answers what it was told, two seconds later, and notes what it was asked and until when."""

    def __init__(self) -> None:
        super().__init__("told", timeout=7.0)
        self.now, self.asked = 100.0, list[Any]()
        self.answer: Any = list(Outcome)

    def _noted(self, verb: str, deadline: float, *more: Any) -> Any:
        self.asked.append((verb, deadline, *more))
        self.now += 2.0
        return self.answer

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._noted("contains", deadline)
        return [True, True, False, True, False]

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        self.left_unfilled(3)
        self.left_unfilled(0)
        return self._noted("load", deadline)  # type: ignore[no-any-return]

    def _lend(self, keys: Sequence[bytes], sizes: Sequence[int], deadline: float) -> Loan | None:
        loan = Held(memoryview(b""), 1)
        loan.outcomes = self._noted("lend", deadline, sizes)
        return loan

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        return self._noted("store", deadline)  # type: ignore[no-any-return]

    def _store_straight(
        self, keys: Sequence[bytes], sizes: Sequence[int], source: Any, deadline: float, worths: Sequence[Worth]
    ) -> list[Outcome]:
        return self._noted("store straight", deadline, source, worths)  # type: ignore[no-any-return]

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        return self._noted("remove", deadline)  # type: ignore[no-any-return]

    def _look(self) -> Room:
        return Room(3, 4, 5, "tired", {"me": 6})


KEYS = [key(number) for number in range(5)]
SIZES = [16, 1, 2, 4, 8]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> ToldTier:
    tier = ToldTier()
    monkeypatch.setattr(contract.time, "monotonic", lambda: tier.now)
    return tier


def test_given_one_of_each_outcome_then_each_is_counted_under_its_name(told: ToldTier) -> None:
    told.load(KEYS, [bytearray(size) for size in SIZES])
    assert told.stats() == TierStats(
        *("told", 1, 1, 2, 1, 0, 0, 0, 0, 0),
        bytes_loaded=13,
        seconds_loading=2.0,
        **{"num_values": 3, "used_bytes": 4, "capacity_bytes": 5, "problem": "tired", "holders": {"me": 6}},
    )
    told.lend(KEYS, SIZES)
    told.store(KEYS, [bytes(size) for size in SIZES])
    told.store_straight(KEYS, SIZES, None)  # type: ignore[arg-type]
    told.answer = [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.LATE]
    told.remove(KEYS)
    told.close()
    assert told.stats() == TierStats(
        *("told", 2, 2, 4, 2, 2, 2, 4, 2, 2, 29, 32, 4.0, 4.0),
        problem="closed",
    )


def test_given_a_time_then_it_is_the_one_of_the_call_or_else_of_the_tier(told: ToldTier) -> None:
    assert told.contains(KEYS) == [True, True, False, True, False]
    assert told.contains_prefix(KEYS, timeout=1) == 2
    told.load(KEYS, [bytearray(1)] * 5, timeout=1)
    told.lend(KEYS, SIZES, timeout=1)
    told.store(KEYS, [b""] * 5, timeout=1)
    told.store_straight(KEYS, SIZES, "source", timeout=1)  # type: ignore[arg-type]
    told.store_straight(KEYS, SIZES, "source", worths=[Worth(1)] * 5)  # type: ignore[arg-type]
    told.remove(KEYS, timeout=1)
    assert told.asked == [
        ("contains", 107.0),
        ("contains", 103.0),
        ("load", 105.0),
        ("lend", 107.0, SIZES),
        ("store", 109.0),
        ("store straight", 111.0, "source", [Worth(35, 0, None)] * 5),
        ("store straight", 119.0, "source", [Worth(1)] * 5),
        ("remove", 115.0),
    ]


@pytest.mark.parametrize("wrong", [bytes(31), bytes(33), "a" * 32])
def test_given_a_wrong_key_then_no_call_reaches_the_tier(told: ToldTier, wrong: Any) -> None:
    keys = [key(1), wrong]
    calls: list[Callable[[], object]] = [
        lambda: told.contains(keys),
        lambda: told.contains_prefix(keys),
        lambda: told.load(keys, [bytearray(1)] * 2),
        lambda: told.lend(keys, [1, 1]),
        lambda: told.store(keys, [b""] * 2),
        lambda: told.store_straight(keys, [1, 1], "source"),  # type: ignore[arg-type]
        lambda: told.remove(keys),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="a key is 32 bytes"):
            call()
    assert told.asked == []


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, True, "1", None])
def test_given_a_wrong_time_then_it_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a number of seconds above 0"):
        BrokenTier("far", timeout=wrong)


def test_given_a_tier_that_can_do_no_more_than_it_must_then_the_rest_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = BrokenTier("far")
    assert tier.lend(KEYS, SIZES) is None
    assert tier.store_straight(KEYS, SIZES, None) == [Outcome.REFUSED] * 5  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "kvpool"):
        assert tier.purge(KeyPattern()) == Purged(0, False)
    assert "it cannot look for the values of a tenant, a scope or a model" in caplog.text
    assert (tier.medium, tier.has_slots, tier.timeout) == (Tier.REMOTE, False, 1.0)
    assert tier.stats() == TierStats("far", refused=5, seconds_storing=tier.stats().seconds_storing)


def test_given_users_of_memory_then_the_last_one_that_releases_it_ends_it() -> None:
    ended = []

    class Counted(CountedKeeper):
        def _end(self) -> None:
            ended.append(1)

    keeper = Counted()
    keeper.share()
    keeper.release()
    assert ended == []
    keeper.release()
    assert ended == [1]
