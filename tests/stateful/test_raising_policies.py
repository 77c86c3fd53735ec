"""A user's policy that raises, at any call of it, harms no operation: runs leave in the order of their last use instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import wild_runs
from wild_configs import Setting, draw_setting

from kvpool import eviction
from kvpool.eviction import LRUPolicy

SLOW = pytest.mark.slow


class Raising(LRUPolicy):
    """Evicts as `lru` does. Its call number `fails_at` raises: an odd one before it does anything, an even one after."""

    num_calls = 0
    fails_at = 0

    @classmethod
    def call(cls, method: Callable[..., Any], *arguments: Any) -> Any:
        cls.num_calls += 1
        if cls.num_calls != cls.fails_at:
            return method(*arguments)
        if cls.fails_at % 2 == 0:
            method(*arguments)
        raise KeyError(f"call {cls.fails_at}")

    def key(self, run: Any) -> Any:
        return self.call(super().key, run)

    def add(self, run: Any) -> None:
        self.call(super().add, run)

    def remove(self, run: Any) -> None:
        self.call(super().remove, run)

    def victim(self) -> Any:
        return self.call(super().victim)

    def trimmed(self, run: Any) -> None:
        self.call(super().trimmed, run)

    def evicted(self, run: Any) -> None:
        self.call(super().evicted, run)


def answers(seed: int, num_operations: int) -> str:
    """What a manager does and says in a drawn run, with all checks after each operation."""
    seen = wild_runs.Seen()
    failure = wild_runs.run(seed, range(num_operations), seen=seen)
    assert failure is None, failure.trace
    return seen.letters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "num_operations"), [(23, 24), *(pytest.param(seed, 60, marks=SLOW) for seed in (23, 28, 44, 62))]
)
def test_given_a_policy_that_raises_at_any_call_then_all_goes_on_as_if_it_had_not(
    seed: int, num_operations: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def setting(rng: Random) -> Setting:
        drawn = draw_setting(rng)
        return replace(drawn, config=replace(drawn.config, eviction_policy="lru"), records=False)

    monkeypatch.setattr(wild_runs, "draw_setting", setting)
    monkeypatch.setattr(wild_runs, "LOOK_EVERY", 10)
    expected = answers(seed, num_operations)
    monkeypatch.setitem(eviction._POLICIES, "lru", Raising)
    monkeypatch.setattr(Raising, "num_calls", 0)
    assert answers(seed, num_operations) == expected
    num_calls = Raising.num_calls
    assert num_calls > 10
    for fails_at in range(1, num_calls + 1):
        monkeypatch.setattr(Raising, "num_calls", 0)
        monkeypatch.setattr(Raising, "fails_at", fails_at)
        caplog.clear()
        assert answers(seed, num_operations) == expected, f"call {fails_at} raised"
        assert {record.levelno for record in caplog.records} == {logging.ERROR}, f"call {fails_at} raised"
