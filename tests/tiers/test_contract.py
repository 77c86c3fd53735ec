"""The contract of key-addressed tiers, on the smallest tier, and what the base class adds to a tier that misbehaves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from kvpool.testing import TierContract, key, load, store, value
from kvpool.tiers import KeyedTier, MemoryTier, Outcome


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
