"""Real threads on one manager: each drives its own requests, all share prefixes, and the books must always balance."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from reference import mirror_for

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, PinBudgetError, SequenceStateError
from managers import FULL

NUM_THREADS = 6
SECONDS = 2.0
SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=6)
SYSTEM_PROMPTS = [[s] * 9 for s in range(3)]
CONFIGS: dict[str, KVCacheConfig] = {
    "full": KVCacheConfig([FULL], block_size=4, gpu_blocks=48),
    "host": KVCacheConfig([FULL], block_size=2, gpu_blocks=48, host_blocks=32, disk_blocks=16),
    "sliding": KVCacheConfig([FULL, SLIDING], block_size=2, gpu_blocks=96, host_blocks=48),
}


class Worker:
    """Random operations on requests that no other thread touches, and on the cache that all share."""

    def __init__(self, manager: KVCacheManager, number: int) -> None:
        self.manager = manager
        self.number = number
        self.random = random.Random(number)
        self.serial = 0
        self.mine: list[KVCacheHandle] = []
        self.pins: list[Any] = []
        self.scope = ReuseScope(tenant=("", "a")[number % 2])
        self.num_done = 0
        self.operations: list[Callable[[], None]] = [
            self.admit,
            self.admit,
            self.admit,
            self.decode,
            self.decode,
            self.decode,
            self.end,
            self.fork,
            self.rewind,
            self.swap,
            self.swap,
            self.pin,
            self.look,
            self.maintain,
        ]

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                self.random.choice(self.operations)()
            except (OutOfBlocksError, PinBudgetError, SequenceStateError):
                if self.mine:
                    self.end()
            self.num_done += 1
        for pin in self.pins:
            self.unpin(pin)
        self.manager.free_batch(self.mine)

    def new_id(self) -> tuple[int, int]:
        self.serial += 1
        return self.number, self.serial

    def admit(self) -> None:
        question = [self.random.randrange(3) for _ in range(self.random.randrange(8))]
        prompt = [*self.random.choice(SYSTEM_PROMPTS), *question]
        self.manager.can_allocate(prompt, scope=self.scope)
        handle = self.manager.allocate(self.new_id(), prompt, scope=self.scope, session=f"s{self.number}")
        self.mine.append(handle)
        assert handle.num_cached_tokens < len(prompt)
        assert handle.token_ids.tolist() == prompt
        self.manager.commit(handle, len(prompt) - handle.num_committed)

    def resident(self) -> list[KVCacheHandle]:
        return [handle for handle in self.mine if not handle.is_swapped]

    def decode(self) -> None:
        handles = self.resident()
        batch = self.manager.batch(handles)
        for _ in range(self.random.randrange(1, 6)):
            lengths = [handle.num_committed for handle in handles]
            slots = self.manager.extend_batch(batch)
            assert slots.shape == (len(self.manager.config.groups), len(handles))
            assert len(set(slots[0].tolist())) == len(handles), "two sequences write the same slot"
            self.manager.commit_batch(batch, [self.random.randrange(3) for _ in handles])
            assert [handle.num_committed for handle in handles] == [length + 1 for length in lengths]

    def end(self) -> None:
        if self.mine:
            handle = self.mine.pop(self.random.randrange(len(self.mine)))
            self.manager.free(handle, keep=self.random.random() < 0.8)
            assert not handle.is_live

    def fork(self) -> None:
        if self.resident() and len(self.mine) < 8:
            self.mine += self.manager.fork(self.random.choice(self.resident()), self.new_id(), self.new_id())

    def rewind(self) -> None:
        if self.resident():
            handle = self.random.choice(self.resident())
            self.manager.rewind(handle, self.random.randrange(min(5, handle.num_reserved)))

    def swap(self) -> None:
        swapped = [handle for handle in self.mine if handle.is_swapped]
        if swapped:
            self.manager.swap_in(*swapped)
        elif self.mine and self.manager.config.num_blocks(Tier.HOST):
            self.manager.swap_out(*self.random.sample(self.mine, min(2, len(self.mine))))

    def pin(self) -> None:
        if self.pins:
            self.unpin(self.pins.pop())
            return
        try:
            self.pins.append(self.manager.cache.pin(self.random.choice(SYSTEM_PROMPTS), self.scope, ttl=60.0))
        except InvalidArgumentError:
            return  # nothing of this prompt is cached at the moment

    def unpin(self, pin: Any) -> None:
        try:
            self.manager.cache.unpin(pin)
        except InvalidArgumentError:
            return  # another thread invalidated the prefix

    def look(self) -> None:
        prompt = self.random.choice(SYSTEM_PROMPTS)
        assert self.manager.match_prefix(prompt, self.scope).num_tokens < len(prompt)
        for pool in self.manager.stats().pools:
            assert pool.free + pool.referenced + pool.cached == pool.total
        for handle in self.mine:
            assert self.manager.get(handle.request_id) is handle

    def maintain(self) -> None:
        kind = self.random.randrange(8)
        if kind == 0:
            self.manager.cache.evict(self.random.randrange(4))
        elif kind == 1:
            self.manager.cache.defragment()
        elif kind == 2:
            self.manager.cache.invalidate(session=f"s{self.random.randrange(NUM_THREADS)}")
        elif kind == 3:
            self.manager.cache.gc()
        elif kind == 4:
            self.manager.cache.onboard(self.random.choice(SYSTEM_PROMPTS), self.scope)
        elif kind == 5:
            self.manager.take_copies()
        elif kind == 6:
            self.manager.check()
        elif self.random.random() < 0.1:
            self.manager.cache.reset()


@pytest.mark.quick("full")
@pytest.mark.parametrize("name", CONFIGS)
def test_threads_share_one_manager(name: str) -> None:
    manager = KVCacheManager(CONFIGS[name])
    subscription, mirror = manager.subscribe(), mirror_for(manager.config)
    workers = [Worker(manager, number) for number in range(NUM_THREADS)]
    failures: list[BaseException] = []

    def work(worker: Worker, until: float) -> None:
        try:
            worker.run(until)
        except BaseException as error:
            failures.append(error)

    until = time.monotonic() + SECONDS
    threads = [threading.Thread(target=work, args=(worker, until), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    while time.monotonic() < until and not failures:
        manager.check()
        batch = subscription.poll()
        if batch.missed:
            mirror.clear()
            batch = subscription.resync()
        mirror.apply(batch.events)
        time.sleep(0.02)
    for thread in threads:
        thread.join(timeout=30)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    assert all(worker.num_done > 10 for worker in workers)
    manager.check()
    mirror.apply(subscription.poll().events)
    assert manager.handles == []
    manager.cache.reset()
    mirror.apply(subscription.poll().events)
    assert not any(mirror.blocks.values())
    assert all(pool.free == pool.total for pool in manager.stats().pools)
