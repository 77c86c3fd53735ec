"""A prefix on its way from tiers into staging memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from kvpool import DType, KVCacheConfig, LayerSpec, StatePart, StateSpec
from kvpool.testing import key, value
from kvpool.tiers import MemoryTier, Outcome
from kvpool.tiers.contract import Loan
from kvpool.tiers.transport.block_keys import PromptKeys, cached_groups
from kvpool.tiers.transport.chain import TierChain
from kvpool.tiers.transport.deciding import PROBE_SECONDS, Decider, LoadDecision
from kvpool.tiers.transport.fetching import Fetch, Fetcher, _load_marked
from kvpool.tiers.transport.staging import SharedStage, StagingMemory
from kvpool.tiers.transport.storing import Storer
from managers import Clock

SECONDS = 30.0
SIZE = 4


def test_given_staging_memory_that_others_use_then_a_fetch_is_given_up_and_counted_until_they_give_it_back() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=SIZE, gpu_blocks=8))
    keys, values = [key(0), key(1)], [value(number, groups[0].spec.block_bytes) for number in range(2)]
    tier, memory = MemoryTier(2**20), StagingMemory(2**20)
    tier.store(keys, values)
    chain = TierChain([tier])
    storer = Storer(chain.watched, memory)
    fetcher = Fetcher(chain, groups, SIZE, Decider(1), memory, storer)

    def fetched() -> Fetch:
        now, done = time.monotonic(), []
        fetcher.run(Fetch(PromptKeys(2 * SIZE + 1, (keys,)), 0, now, now + SECONDS), done.append)
        return done[0]

    others = memory.take(memory.max_bytes)
    assert others is not None
    assert (fetched().num_blocks, fetcher.stats().no_memory) == (0, 1)
    memory.give(others)
    fetch = fetched()
    assert (fetch.num_blocks, fetcher.stats().no_memory) == (2, 1)
    assert np.array_equal(fetch.groups[0].rows, [np.frombuffer(each, np.uint8) for each in values])
    fetch.release()
    assert memory.lent_bytes == 0
    storer.close(SECONDS)


def test_given_prefixes_that_are_there_or_not_then_what_was_found_and_how_fast_is_counted() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=SIZE, gpu_blocks=8))
    tier, memory, decider = MemoryTier(2**20), StagingMemory(2**20), Decider(1)
    tier.store([key(0)], [value(0, groups[0].spec.block_bytes)])
    chain = TierChain([tier])
    storer = Storer(chain.watched, memory)
    fetcher = Fetcher(chain, groups, SIZE, decider, memory, storer)
    lookups: list[bool] = []
    decider.observe_lookup = lambda seconds, found: lookups.append(found)  # type: ignore[method-assign]
    for number, found in ((0, 1), (1, 1), (0, 2)):
        now, done = time.monotonic(), []
        fetcher.run(Fetch(PromptKeys(SIZE + 1, ([key(number)],)), 0, now, now + SECONDS), done.append)
        done[0].release()
        assert (fetcher.stats().found, lookups[-1]) == (found, number == 0)
    assert fetcher.stats().lookups == 3
    storer.close(SECONDS)


def test_given_blocks_that_are_gone_when_they_are_loaded_then_the_time_counts_as_latency() -> None:
    class Forgetful(MemoryTier):
        def _load(self, keys: Any, out: Any, deadline: float) -> list[Outcome]:
            return [Outcome.MISS] * len(keys)

    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=SIZE, gpu_blocks=8))
    tier, memory, decider, done = Forgetful(2**20), StagingMemory(2**20), Decider(1), []
    tier.store([key(0)], [value(0, groups[0].spec.block_bytes)])
    chain = TierChain([tier])
    storer = Storer(chain.watched, memory)
    now = time.monotonic()
    Fetcher(chain, groups, SIZE, decider, memory, storer).run(
        Fetch(PromptKeys(SIZE + 1, ([key(0)],)), 0, now, now + SECONDS), done.append
    )
    assert done[0].num_blocks == 0
    speed = decider.speeds[0]
    assert (speed.count, speed.predict(10**9)) == (1, speed.latency)
    assert 0 < speed.latency <= SECONDS
    done[0].release()
    storer.close(SECONDS)


@pytest.mark.parametrize(("room", "fetched"), [(0, 0), (3, 0), (4, 1), (8, 2), (11, 2), (12, 3), (64, 3)])
def test_given_staging_memory_then_one_prompt_takes_at_most_a_quarter_of_it(room: int, fetched: int) -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=8, head_dim=64)], block_size=SIZE, gpu_blocks=8))
    block_bytes = groups[0].spec.block_bytes
    assert block_bytes % 4096 == 0
    keys, tier, memory = [key(number) for number in range(3)], MemoryTier(2**24), StagingMemory(room * block_bytes)
    tier.store(keys, [value(number, block_bytes) for number in range(3)])
    chain = TierChain([tier])
    storer = Storer(chain.watched, memory)
    fetcher, done = Fetcher(chain, groups, SIZE, Decider(1), memory, storer), []
    now = time.monotonic()
    fetcher.run(Fetch(PromptKeys(3 * SIZE + 1, (keys,)), 0, now, now + SECONDS), done.append)
    assert (done[0].num_blocks, done[0].is_part) == (fetched, 0 < fetched < 3)
    assert fetcher.stats().no_memory == (fetched == 0)
    assert done[0].decision.option.num_blocks == (fetched or 3)
    done[0].release()
    storer.close(SECONDS)


def test_given_staging_memory_for_a_part_then_it_goes_up_to_the_last_state_that_fits() -> None:
    state = StateSpec((StatePart("state", (1024,), DType.FLOAT32),))
    config = KVCacheConfig([LayerSpec(kv_heads=8, head_dim=64), state], block_size=SIZE, gpu_blocks=8)
    groups = cached_groups(config)
    per_block = sum(group.spec.block_bytes for group in groups)
    assert all(group.spec.block_bytes % 4096 == 0 for group in groups)
    tier, memory = MemoryTier(2**24), StagingMemory(4 * 2 * per_block)
    keys = tuple([key(10 * number + column) for column in range(3)] for number in range(2))
    for group, of_group in zip(groups, keys, strict=True):
        tier.store(of_group, [value(column, group.spec.block_bytes) for column in range(3)])
    chain = TierChain([tier])
    storer, done = Storer(chain.watched, memory), []
    now = time.monotonic()
    Fetcher(chain, groups, SIZE, Decider(1), memory, storer).run(
        Fetch(PromptKeys(3 * SIZE + 1, keys), 0, now, now + SECONDS), done.append
    )
    assert (done[0].num_blocks, done[0].is_part) == (2, True)
    done[0].release()
    storer.close(SECONDS)


def test_given_a_second_tier_that_was_too_slow_then_it_is_measured_with_a_few_blocks_and_the_first_is_not() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=SIZE, gpu_blocks=8))
    keys, tiers, memory, clock = [key(0), key(1)], [MemoryTier(2**20), MemoryTier(2**20)], StagingMemory(2**20), Clock()
    block_bytes = groups[0].spec.block_bytes
    tiers[1].store(keys, [value(number, block_bytes) for number in range(2)])
    decider = Decider(2, clock)
    decider.observe_prompt(SIZE, 1e-6)
    for index in range(2):
        decider.observe_load(index, block_bytes, 10.0)
    clock.now = PROBE_SECONDS
    chain, loaded = TierChain(tiers), []
    load = chain.watched[1].load
    chain.watched[1].load = lambda keys, rows, *rest: loaded.extend(rows) or load(keys, rows, *rest)  # type: ignore
    storer, done = Storer(chain.watched, memory), []
    now = time.monotonic()
    Fetcher(chain, groups, SIZE, decider, memory, storer).run(
        Fetch(PromptKeys(2 * SIZE + 1, (keys,)), 0, now, now + SECONDS), done.append
    )
    assert (done[0].num_blocks, decider.stats().probes, memory.lent_bytes) == (0, 1, 0)
    assert [row.tobytes() for row in loaded] == [value(number, block_bytes) for number in range(2)]
    assert [speed.count for speed in decider.speeds] == [1, 2]
    storer.close(SECONDS)


def test_given_a_part_of_a_prefix_then_its_times_are_its_share_of_those_of_the_whole() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=8, head_dim=64)], block_size=SIZE, gpu_blocks=8))
    block_bytes = groups[0].spec.block_bytes
    keys, tier = [key(number) for number in range(5)], MemoryTier(2**24)
    memory, decider, done = StagingMemory(4 * 2 * block_bytes), Decider(1), []
    tier.store(keys, [value(number, block_bytes) for number in range(5)])
    chain = TierChain([tier])
    storer = Storer(chain.watched, memory)
    decider.decide = lambda options, *_: LoadDecision(options[-1], "because", 8.0, 16.0)  # type: ignore[method-assign]
    now = time.monotonic()
    Fetcher(chain, groups, SIZE, decider, memory, storer).run(
        Fetch(PromptKeys(5 * SIZE + 1, (keys,)), 1, now, now + SECONDS), done.append
    )
    (fetch,) = done
    assert (fetch.num_blocks, fetch.is_part) == (3, True)  # two of the four that the cache lacks
    assert fetch.decision[1:] == ("because", 4.0, 8.0, False)
    assert fetch.decision.option.num_blocks == 3
    fetch.release()
    storer.close(SECONDS)


class Lent(Loan):
    """Values of a tier that a caller reads where they lie."""

    def __init__(self, values: list[bytes]) -> None:
        super().__init__(memoryview(b""), 1)
        self.outcomes, self.views = [Outcome.OK] * len(values), [memoryview(each) for each in values]
        self.has_ended = False

    def is_held(self) -> bool:
        return not self.has_ended

    def _end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("may_borrow", [True, False])
def test_given_a_tier_that_lends_then_a_prefix_is_loaded_only_if_the_device_cannot_read_it_there(
    may_borrow: bool,
) -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=SIZE, gpu_blocks=8))
    keys, values = [key(0), key(1)], [value(number, groups[0].spec.block_bytes) for number in range(2)]
    tier, memory, lent, done = MemoryTier(2**20), StagingMemory(2**20), Lent(values), []
    tier.store(keys, values)
    tier._lend = lambda *_: lent  # type: ignore[method-assign]
    chain = TierChain([tier])
    storer, now = Storer(chain.watched, memory), time.monotonic()
    fetcher = Fetcher(chain, groups, SIZE, decider := Decider(1), memory, storer, lambda loan: may_borrow)
    fetcher.run(Fetch(PromptKeys(2 * SIZE + 1, (keys,)), 0, now, now + SECONDS), done.append)
    (fetch,) = done
    assert (fetch.num_blocks, fetch.is_lent, lent.has_ended) == (2, may_borrow, not may_borrow)
    assert (fetch.num_bytes, fetch.loading_seconds > 0) == (sum(map(len, values)), True)
    assert (decider.speeds[0].count, decider.speeds[0]._bytes) == (1, fetch.num_bytes)
    assert [bytes(row) for row in fetch.groups[0].rows] == values
    assert (memory.lent_bytes > 0, fetch.is_held()) == (not may_borrow, True)
    fetch.release()
    assert (lent.has_ended, memory.lent_bytes) == (True, 0)
    storer.close(SECONDS)


def test_given_an_error_then_it_is_raised_after_the_request_was_told_that_nothing_came() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=SIZE, gpu_blocks=8))
    chain, memory, decider = TierChain([MemoryTier(2**20)]), StagingMemory(2**20), Decider(1)
    storer, done = Storer(chain.watched, memory), []
    decider.decide = lambda *_: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        Fetcher(chain, groups, SIZE, decider, memory, storer).run(
            Fetch(PromptKeys(3 * SIZE + 1, ([key(0), key(1), key(2)],)), 1, 0.0, SECONDS), done.append
        )
    assert [fetch.num_blocks for fetch in done] == [1]
    storer.close(SECONDS)


@pytest.mark.parametrize("size", [1, 5, 15, 16, 17, 100])
def test_given_a_row_of_any_size_then_a_value_that_leaves_its_end_as_it_was_has_not_come(size: int) -> None:
    tier, memory = MemoryTier(2**20), StagingMemory(2**20)
    tier.store([key(0), key(1)], [value(0, size), value(1, max(0, size - 16))])
    staged = memory.take(2 * size)
    assert staged is not None
    stage = SharedStage(memory, staged)
    rows = [staged.data[:size], staged.data[size:]]
    found = _load_marked(TierChain([tier]).watched[0], [key(0), key(1)], rows, SECONDS, stage)
    assert found == [Outcome.OK, Outcome.FAILED]
    assert rows[0].tobytes() == value(0, size)
    stage.release()


def test_given_staging_memory_for_a_part_of_what_two_tiers_have_then_the_part_is_as_long_as_it_can_be() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=8, head_dim=64)], block_size=SIZE, gpu_blocks=8))
    block_bytes = groups[0].spec.block_bytes
    keys, tiers, memory = (
        [key(0), key(1), key(2)],
        [MemoryTier(2**24) for _ in range(2)],
        StagingMemory(8 * block_bytes),
    )
    for number, tier in enumerate((0, 1, 1)):
        tiers[tier].store([key(number)], [value(number, block_bytes)])
    chain = TierChain(tiers)
    storer, done, now = Storer(chain.watched, memory), [], time.monotonic()
    Fetcher(chain, groups, SIZE, Decider(2), memory, storer).run(
        Fetch(PromptKeys(3 * SIZE + 1, (keys,)), 0, now, now + SECONDS), done.append
    )
    assert (done[0].num_blocks, done[0].is_part) == (2, True)
    done[0].release()
    storer.close(SECONDS)


def test_given_values_of_a_second_tier_then_their_memory_stays_until_the_first_has_them() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=SIZE, gpu_blocks=8))
    tiers, memory, gate, done = [MemoryTier(2**20), MemoryTier(2**20)], StagingMemory(2**20), threading.Event(), []
    tiers[1].store([key(0)], [value(0, groups[0].spec.block_bytes)])
    put = tiers[0]._store
    tiers[0]._store = lambda *given: (gate.wait(SECONDS), put(*given))[1]  # type: ignore[method-assign]
    chain = TierChain(tiers)
    storer, now = Storer(chain.watched, memory), time.monotonic()
    Fetcher(chain, groups, SIZE, Decider(2), memory, storer).run(
        Fetch(PromptKeys(SIZE + 1, ([key(0)],)), 0, now, now + SECONDS), done.append
    )
    done[0].release()
    assert memory.lent_bytes > 0
    gate.set()
    assert storer.flush(SECONDS)
    assert (memory.lent_bytes, tiers[0].contains([key(0)])) == (0, [True])
    storer.close(SECONDS)
