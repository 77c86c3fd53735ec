"""Blocks that go from the device straight into the memory of a tier, and who waits for what is stored."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from sides import FULL, PROMPT, SECONDS, SIZE, Side, sides

from kvpool import ReuseScope
from kvpool.scheduling import Request
from kvpool.testing import key, value
from kvpool.tiers import MemoryTier, Outcome
from kvpool.tiers.contract import Loan, Slots, Source, Worth
from kvpool.tiers.transport import tier_transport
from kvpool.tiers.transport.chain import WatchedTier
from kvpool.tiers.transport.staging import StagingMemory
from kvpool.tiers.transport.storing import Storer


class SlotTier(MemoryTier):
    """Gives callers slots, the last value first, and asks whether its values are in them."""

    has_slots = True

    def __init__(self) -> None:
        super().__init__(2**20)
        self.were_in: list[bool] = []
        self.worths: list[Worth] = []

    def _store_straight(
        self, keys: Sequence[bytes], sizes: Sequence[int], source: Source, deadline: float, worths: Sequence[Worth]
    ) -> list[Outcome]:
        self.worths += worths
        memory = memoryview(bytearray(sum(sizes)))
        numbers = list(range(len(keys)))[::-1]
        views, at = [], 0
        for number in numbers:
            views.append(memory[at : at + sizes[number]])
            at += sizes[number]
        slots = Slots(numbers, views, memory, len(memory))
        source.write(slots)
        self.were_in.append(source.is_in(slots))
        other = slots._replace(views=views[::-1])
        assert len(keys) < 2 or not source.is_in(other)
        return self._store([keys[number] for number in numbers], views, deadline)


def test_given_a_tier_with_slots_then_blocks_go_straight_there_and_come_back_byte_for_byte() -> None:
    tier = SlotTier()
    with sides((tier,), (tier,), layers=(FULL,)) as (one, other):
        one.transport.chain.watched[0].known.add(
            one.transport.keys.of_prompt(np.array(PROMPT, np.int32), ReuseScope()).keys[0][4:5]
        )
        one.store(one.compute(PROMPT))
        assert tier.were_in == [True, True]
        assert tier.worths == [Worth(depth=depth) for depth in (0, 1, 2, 3, 5, 6)]
        assert one.transport.storer.stats().bytes_stored == 6 * one.manager.config.block_bytes
        assert one.transport._near.lent_bytes == one.transport.memory.lent_bytes == 0
        assert other.take_in(PROMPT, other.fetch(PROMPT)) == 16
        other.assert_right(PROMPT, 16)


@pytest.mark.parametrize("why", ["not locked yet", "later not locked", "no memory", "too much waits", "two tiers"])
def test_given_a_device_that_cannot_write_there_then_blocks_go_through_staging_memory_or_fail(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SlotTier()
    tiers = (tier, MemoryTier(2**20)) if why == "two tiers" else (tier,)
    with sides(tiers, tiers, layers=(FULL,)) as (one, other):
        offers = one.transport.offers
        if why == "not locked yet":
            monkeypatch.setattr(offers, "_may_write", lambda slots: False)
        elif why == "later not locked":
            monkeypatch.setattr(offers, "_may_write", lambda slots: slots is None)
        elif why == "no memory":
            monkeypatch.setattr(offers, "_near", StagingMemory(2**20, fails))
        elif why == "too much waits":
            monkeypatch.setattr(offers, "_near", StagingMemory(0))
        one.store(one.compute(PROMPT))
        stats = one.transport.storer.stats()
        if why == "later not locked":
            assert (stats.failed, stats.stored, tier.were_in) == (7, 0, [])
            assert one.transport.storer.wants(key(1))
        else:
            assert (stats.failed, stats.stored, tier.were_in) == (0, 7 * len(tiers), [])
            assert other.take_in(PROMPT, other.fetch(PROMPT)) == 28


def fails(num_bytes: int) -> torch.Tensor:
    raise torch.OutOfMemoryError


def test_given_listeners_then_they_hear_of_stores_that_ended_or_were_dropped_until_they_leave() -> None:
    gate, begun = threading.Event(), threading.Event()
    heard: list[tuple[int, Sequence[bytes]]] = []

    class Gated(MemoryTier):
        def _store(self, keys: Any, data: Any, deadline: float) -> list[Outcome]:
            begun.set()
            assert gate.wait(SECONDS)
            return super()._store(keys, data, deadline)

    storer = Storer([WatchedTier(MemoryTier(2**20)), WatchedTier(Gated(2**20))], StagingMemory(2**20))

    def store(number: int) -> None:
        stage = storer.take_memory(100, 1)
        assert stage is not None
        storer.store([key(number)], [np.frombuffer(value(number), np.uint8)], stage, lambda: None, only=[1])

    def listener(index: int, keys: Sequence[bytes]) -> None:
        heard.append((index, keys))

    storer.listen(listener)
    store(1)
    assert begun.wait(SECONDS)
    assert (storer.is_storing(1, [key(9), key(1)]), storer.is_storing(0, [key(1)])) == (True, False)
    assert not storer.is_storing(1, [key(9)])
    assert heard == []
    gate.set()
    assert storer.flush(SECONDS)
    assert heard == [(1, [key(1)])]
    assert not storer.is_storing(1, [key(1)])
    storer.close(SECONDS)
    store(2)  # dropped
    assert heard == [(1, [key(1)]), (1, [key(2)])]
    storer.leave(listener)
    store(3)
    assert (len(heard), storer.memory.lent_bytes, storer.stats().dropped) == (2, 0, 2)


def test_given_measured_speeds_then_a_request_waits_no_longer_than_computing_takes() -> None:
    side = Side(MemoryTier(2**20))
    transport = side.transport
    computing: list[float | None] = [None, 1e-6, 7.0, 2 * SECONDS]
    transport.decider.compute_seconds = lambda num_tokens: computing.pop(0)  # type: ignore[method-assign]
    waits = [transport.patience(100) for _ in range(4)]
    assert waits == [SECONDS, tier_transport.SHORTEST_WAIT, 7.0, SECONDS]
    transport.close()


@pytest.mark.parametrize(("looks", "is_time", "fetches"), [(True, True, 0), (False, True, 1), (False, False, 0)])
def test_given_a_prefix_that_is_not_worth_waiting_for_then_tiers_may_be_measured_again_without_a_waiter(
    looks: bool, is_time: bool, fetches: int
) -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,), layers=(FULL,)) as (one, side):
        one.store(one.compute(PROMPT))
        made: list[Any] = []
        decider = side.transport.decider
        decider.is_worth_looking = lambda num_tokens: looks  # type: ignore[method-assign]
        decider.is_time_to_look = lambda: is_time  # type: ignore[method-assign]

        def make() -> Any:
            from kvpool.tiers.transport.fetching import Fetch

            prompt = side.transport.keys.of_prompt(np.array(PROMPT, np.int32), ReuseScope())
            made.append(Fetch(prompt, 0, 0.0, float("inf")))
            return made[-1]

        assert side.transport.is_worth_waiting(28, make) == looks
        assert side.transport.fetch_threads.flush(SECONDS)
        assert (len(made), side.transport.stats().fetches.lookups) == (fetches, fetches)
        assert all(fetch.memory is None for fetch in made)


class Lent(Loan):
    """All memory of a tier, which nobody uses yet."""

    def __init__(self) -> None:
        super().__init__(memoryview(b"12345678"), 4)
        self.has_ended = False

    def is_held(self) -> bool:
        return not self.has_ended

    def _end(self) -> None:
        self.has_ended = True


def test_given_a_gpu_then_the_memory_of_the_tier_is_locked_before_anything_is_stored() -> None:
    tier, loan, asked = SlotTier(), Lent(), list[Any]()
    side = Side(tier)
    tier._lend = lambda keys, sizes, deadline: asked.append((keys, sizes)) or loan  # type: ignore[method-assign,func-returns-value]

    class Linked:
        def has(self, *place: Any) -> bool:
            asked.append(place)
            return False

        def close(self) -> None:
            asked.append("closed")

    side.transport._linked = Linked()  # type: ignore[assignment]
    side.transport._link()
    assert asked == [([], []), (loan.memory, 4, [])]
    assert loan.has_ended
    tier._lend = lambda keys, sizes, deadline: None  # type: ignore[method-assign]
    side.transport._link()
    side.transport.close()
    assert asked[2:] == ["closed"]


def test_given_a_tenant_that_is_forgotten_then_tiers_lose_what_it_stored_in_any_scope_and_keep_the_rest() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), layers=(FULL,)) as (side,):
        for name, scope in (("a", ReuseScope("acme")), ("b", ReuseScope("acme", salt="s")), ("c", ReuseScope("other"))):
            handle = side.manager.allocate(name, PROMPT[: 2 * SIZE], scope=scope)
            side.manager.slot_mapping([handle], 0, 2 * SIZE)
            side.manager.commit(handle)
            side.store(handle)
        assert (tier.stats().num_values, len(side.transport.offers.lineage)) == (6, 6)
        version = side.transport.keys.forgotten.version
        assert side.transport.invalidator.of_tenant(lambda: 5, "acme") == 5
        assert side.transport.storer.flush(SECONDS)
        assert (tier.stats().num_values, len(side.transport.offers.lineage)) == (2, 2)
        assert side.transport.keys.forgotten.version == version + 1
        old = side.transport.keys.plain(np.array(PROMPT[:8], np.int32), ReuseScope("acme"))
        assert not any(map(side.transport.storer.tiers[0].known.__contains__, old[0]))
        new = side.transport.keys.of_prompt(np.array(PROMPT[:8], np.int32), ReuseScope("acme")).keys
        assert old != new
        kept = side.transport.keys.of_prompt(np.array(PROMPT[:8], np.int32), ReuseScope("other")).keys[0]
        assert tier.contains(kept) == [True, True]


def test_given_another_prompt_than_was_fetched_then_it_is_not_taken_in_and_a_line_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,), layers=(FULL,)) as (one, other):
        one.store(one.compute(PROMPT))
        fetch = other.fetch(PROMPT)
        fetch.groups[0] = fetch.groups[0]._replace(columns=fetch.groups[0].columns[1:])
        assert other.transport.import_prefix(Request("r", PROMPT, 1), fetch)[0] is None
        assert "what was loaded for layer group 0 is not what its window reads" in caplog.text
        assert other.manager.stats().num_sequences == 0
        fetch.release()
