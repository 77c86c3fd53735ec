"""Two ranks with a shard each of every block: rank 0 decides, and both have the same blocks afterwards, or neither has."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from sides import FULL, PROMPT, SECONDS, SIZE, SLIDING, Side

from kvpool import ReuseScope, Tier
from kvpool.scheduling import Request
from kvpool.tiers import KeyPattern, MemoryTier
from kvpool.tiers.contract import Worth
from kvpool.tiers.keys import Shard
from kvpool.tiers.transport.shard_keeper import ShardKeeper
from kvpool.tiers.transport.shards import ShardPart


class Asked:
    """What rank 1 was asked for, and its answer."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self._number = ranks, number
        self.there: list[bool] = []
        self.has_answered = threading.Event()
        self.is_over = False

    def answer(self, there: list[bool]) -> None:
        self.there = there
        self.has_answered.set()

    def wait(self) -> list[bool]:
        assert self.has_answered.wait(SECONDS)
        return self.there

    def write(self, parts: Sequence[ShardPart]) -> None:
        self.is_over = True
        self._ranks.keeper.write(self._number, parts)

    def release(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._ranks.keeper.release(self._number)


class Ranks:
    """The `Shards` of rank 0: calls rank 1 at once, and notes what it is told."""

    def __init__(self) -> None:
        self.keeper: ShardKeeper
        self.told: list[tuple[Any, ...]] = []
        self.asked: list[Asked] = []

    def _question(self) -> tuple[int, Asked]:
        self.asked.append(Asked(self, len(self.asked)))
        return len(self.asked) - 1, self.asked[-1]

    def find(self, keys: Sequence[bytes], due: float) -> list[bool]:
        _, asked = self._question()
        self.keeper.find(keys, due - time.monotonic(), asked.answer)
        return asked.wait()

    def load(self, keys: Sequence[Sequence[bytes]], due: float) -> Asked:
        number, asked = self._question()
        self.keeper.load(number, keys, due - time.monotonic(), asked.answer)
        return asked

    def store(self, group: int, keys: Sequence[bytes], blocks: Sequence[int], worths: Sequence[Worth]) -> None:
        self.told.append(("store", group, list(worths)))
        self.keeper.store(group, keys, blocks, worths)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.keeper.remove(keys)

    def purge(self, pattern: KeyPattern) -> None:
        self.told.append(("purge", pattern))
        self.keeper.purge(pattern)

    def flush(self) -> None:
        self.told.append(("flush",))


class Pair:
    """Both ranks of an engine. Rank 1 has the blocks of rank 0, so the handles of rank 0 read its data, too."""

    def __init__(self, *tiers: MemoryTier, layers: Any = (FULL,)) -> None:
        self.ranks = Ranks()
        self.first = Side(tiers[0], layers=layers, shard=Shard(0, 2), shards=self.ranks)
        self.second = Side(tiers[1], layers=layers, shard=Shard(1, 2))
        self.ranks.keeper = ShardKeeper(self.second.transport, self.second.plane)
        self.second.plane.check_writes = False  # its manager has given no block to anybody

    def compute(self, tokens: list[int]) -> Any:
        handle = self.first.compute(tokens)
        for place, store in self.first.plane.stores.items():
            if place[1] == Tier.GPU:
                self.second.plane.stores[place].data.copy_(store.data + 1)  # type: ignore[union-attr]  # another shard
        return handle

    def flush(self) -> None:
        for side in (self.first, self.second):
            assert side.transport.storer.flush(SECONDS)
            assert side.transport.fetch_threads.flush(SECONDS)

    def assert_right(self, tokens: list[int], num_cached: int) -> None:
        """Rank 0 has its shard of every block that it reads for a prompt, and rank 1 its own in the same blocks."""
        self.first.assert_right(tokens, num_cached)
        handle = self.first.manager.allocate("reader", tokens)
        for number, group in enumerate(self.first.manager.config.groups):
            ids = handle.block_ids(number)[: handle.num_cached_blocks]
            ids = ids[ids >= 0].copy()
            mine, theirs = (torch.empty((len(ids), group.block_bytes), dtype=torch.uint8) for _ in range(2))
            self.first.plane.read_blocks(ids, number, mine)()
            self.second.plane.read_blocks(ids, number, theirs)()
            assert torch.equal(theirs, mine + 1)
        self.first.manager.free(handle)


@contextmanager
def pairs(*tiers: MemoryTier, **options: Any) -> Iterator[list[Pair]]:
    """Two engines of two ranks, one after the other, that share a tier for each rank."""
    made = [Pair(*tiers, **options) for _ in range(2)]
    yield made
    for pair in made:
        pair.flush()
        assert pair.ranks.keeper._fetches == {}
        for side in (pair.first, pair.second):
            assert side.transport.stats().staging_bytes == 0
            side.transport.close()
        pair.ranks.keeper.close()


def tiers() -> tuple[MemoryTier, MemoryTier]:
    return MemoryTier(2**20), MemoryTier(2**20)


def keys_of(side: Side, tokens: list[int]) -> list[list[bytes]]:
    prompt = torch.tensor(tokens, dtype=torch.int32).numpy()
    return list(side.transport.keys.of_prompt(prompt, ReuseScope()).keys)


def test_given_a_prefix_that_two_ranks_stored_then_two_others_get_each_their_own_shard_of_it() -> None:
    first, second = tiers()
    with pairs(first, second, layers=(FULL, SLIDING)) as (one, other):
        one.first.store(one.compute(PROMPT))
        one.flush()
        assert first.stats().num_values == second.stats().num_values == 7 + 2  # of the window what a query reads
        assert [told[:2] for told in one.ranks.told] == [("store", 0), ("store", 0), ("store", 1)]
        assert one.ranks.told[0][2] == [Worth(depth=depth) for depth in range(3)]
        fetch = other.first.fetch(PROMPT)
        assert (fetch.num_blocks, fetch.elsewhere is not None) == (7, True)
        assert other.first.take_in(PROMPT, fetch) == 28
        assert other.ranks.told == [("flush",)]
        other.assert_right(PROMPT, 28)


def test_given_a_block_that_one_rank_lacks_then_the_prefix_ends_before_it_for_all_and_it_is_stored_again() -> None:
    first, second = tiers()
    with pairs(first, second) as (one, other):
        handle = one.compute(PROMPT)
        one.first.store(handle)
        one.flush()
        lost = keys_of(one.second, PROMPT)[0][4]
        assert second.remove([lost])[0].name == "OK"
        assert sorted(other.first.transport.find(other_prompt(other), 0)) == [0, 1, 2, 3]
        fetch = other.first.fetch(PROMPT)
        assert (fetch.num_blocks, other.first.transport.stats().fetches.incomplete) == (4, 1)
        assert other.first.take_in(PROMPT, fetch) == 16
        other.assert_right(PROMPT, 16)
        assert other.first.transport.storer.wants(keys_of(other.first, PROMPT)[0][4])
        assert not other.first.transport.storer.wants(keys_of(other.first, PROMPT)[0][3])


def other_prompt(pair: Pair) -> Any:
    return pair.first.transport.keys.of_prompt(
        torch.tensor(PROMPT, dtype=torch.int32).numpy(), Request("r", PROMPT, 1).scope
    )


def test_given_everything_is_there_then_a_look_finds_it_on_all_ranks() -> None:
    first, second = tiers()
    with pairs(first, second) as (one, other):
        one.first.store(one.compute(PROMPT))
        one.flush()
        assert sorted(other.first.transport.find(other_prompt(other), 2)) == [2, 3, 4, 5, 6]
        second.purge(KeyPattern())
        assert other.first.transport.find(other_prompt(other), 2) == {}


def test_given_a_fetch_that_nobody_uses_then_the_other_rank_gives_its_memory_back() -> None:
    with pairs(*tiers()) as (one, other):
        one.first.store(one.compute(PROMPT))
        one.flush()
        fetch = other.first.fetch(PROMPT)
        assert other.second.transport.stats().staging_bytes > 0
        fetch.release()
        assert other.second.transport.stats().staging_bytes == 0


def test_given_content_that_is_invalidated_then_both_ranks_remove_their_shards() -> None:
    first, second = tiers()
    with pairs(first, second) as (one, _):
        one.first.store(one.compute(PROMPT))
        one.flush()
        prefix = torch.tensor(PROMPT[:12], dtype=torch.int32).numpy()
        one.first.transport.invalidator.content(lambda: 5, prefix, None, None)
        one.flush()
        assert first.stats().num_values == second.stats().num_values == 2
        one.first.transport.invalidator.of_tenant(lambda: 0, "")
        one.flush()
        assert first.stats().num_values == second.stats().num_values == 0


def test_given_a_purge_then_each_rank_takes_it_for_its_own_shard_unless_it_is_for_all_models() -> None:
    with pairs(*tiers()) as (one, _):
        seen: list[KeyPattern] = []
        one.second.transport.storer.purge = seen.append  # type: ignore[method-assign]
        for space in (None, one.first.transport.keys.space.prefix):
            one.first.transport.storer.purge(KeyPattern(space, b"ab"))
        assert seen == [KeyPattern(None, b"ab"), KeyPattern(one.second.transport.keys.space.prefix, b"ab")]


@pytest.mark.parametrize("is_full", [False, True])
def test_given_a_rank_that_can_do_nothing_more_then_it_answers_that_it_has_nothing(is_full: bool) -> None:
    side = Side(MemoryTier(2**20), shard=Shard(1, 2))
    keeper, answers = ShardKeeper(side.transport, side.plane), list[list[bool]]()
    threads, begun, gate = side.transport.fetch_threads, threading.Semaphore(0), threading.Event()

    def hang() -> None:
        begun.release()
        gate.wait(SECONDS)

    for _ in range(2):
        assert threads.submit(hang, hang)
        assert begun.acquire(timeout=SECONDS)
    if is_full:
        threads.max_waiting = 0
    keys = [bytes([number]) * 32 for number in range(3)]
    keeper.find(keys, SECONDS, answers.append)
    keeper.load(7, [keys, keys[:1]], SECONDS, answers.append)
    assert keeper._fetches == {7: None}
    if not is_full:
        assert answers == []
        assert not threads.stop(0.0)  # what waits is dropped
    assert answers == [[False] * 3, [False] * 4]
    gate.set()
    keeper.release(7)
    assert keeper._fetches == {}
    side.transport.close()


def test_given_a_tier_that_raises_then_a_rank_answers_that_it_has_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side(MemoryTier(2**20), shard=Shard(1, 2))
    keeper, answers = ShardKeeper(side.transport, side.plane), list[list[bool]]()

    def fails(*_: Any) -> Any:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(side.transport.chain, "find", fails)
    keeper.find([bytes(32)] * SIZE, SECONDS, answers.append)
    keeper.load(1, [[bytes(32)] * 2, [bytes(32)]], SECONDS, answers.append)
    assert side.transport.fetch_threads.flush(SECONDS)
    assert sorted(answers) == [[False] * 3, [False] * SIZE]
    assert caplog.text.count("RuntimeError: a mistake") == 2
    keeper.close()
    assert keeper._fetches == {}
    side.transport.close()
