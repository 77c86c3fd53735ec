"""Waiting for blocks: order, timeouts, cancellation at any moment, threads. Nothing may be left behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec
from kvpool.errors import DuplicateRequestError, InvalidArgumentError, NeverFitsError
from kvpool.manager.aio import AsyncKVCacheManager


def make(gpu_blocks: int = 8, **settings: Any) -> AsyncKVCacheManager:
    """Blocks of 4 tokens; no watermark, so that every block can be given out."""
    layers = [LayerSpec(kv_heads=1, head_dim=8)]
    config = KVCacheConfig(layers, 4, gpu_blocks=gpu_blocks, **{"watermark": 0.0, **settings})
    return AsyncKVCacheManager(KVCacheManager(config))


def run(main: Coroutine[Any, Any, Any], cache: AsyncKVCacheManager, *, expect_live: int = 0) -> Any:
    """Runs a test's coroutine and then proves that no waiter, request, block or callback stayed behind."""
    result = asyncio.run(asyncio.wait_for(main, timeout=60))
    cache.manager.check()
    assert cache.num_waiting == 0
    assert cache.manager._guard.capacity_callbacks == ()
    assert len(cache.manager.handles) == expect_live
    if not expect_live:
        assert cache.stats().pool().referenced == 0
    return result


async def settle() -> None:
    """Lets everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_given_room_when_allocating_then_it_does_not_wait() -> None:
    cache = make()

    async def main() -> None:
        handle = await cache.allocate("a", [1, 2, 3, 4, 5])
        assert handle.num_blocks == 2
        assert cache.get("a") is handle  # other verbs are the manager's own
        cache.free(handle)

    run(main(), cache)


def test_given_a_full_pool_when_a_request_is_freed_then_the_waiter_gets_its_blocks() -> None:
    cache = make()

    async def main() -> None:
        first = await cache.allocate("a", num_tokens=32)
        waiting = asyncio.create_task(cache.allocate("b", num_tokens=32))
        await settle()
        assert not waiting.done()
        assert cache.num_waiting == 1
        cache.free(first)
        cache.free(await waiting)

    run(main(), cache)


def test_given_a_large_request_at_the_head_when_a_small_one_would_fit_then_it_still_waits_its_turn() -> None:
    cache = make()

    async def main() -> None:
        order: list[str] = []

        async def request(name: str, num_tokens: int) -> None:
            handle = await cache.allocate(name, num_tokens=num_tokens)
            order.append(name)
            await asyncio.sleep(0)
            cache.free(handle)

        held = [await cache.allocate(i, num_tokens=8) for i in range(3)]  # 2 blocks stay free
        tasks = [asyncio.create_task(request(name, n)) for name, n in (("big", 32), ("small", 4), ("tiny", 1))]
        await settle()
        assert order == []
        for handle in held:
            cache.free(handle)
        await asyncio.gather(*tasks)
        assert order == ["big", "small", "tiny"]

    run(main(), cache)


def test_given_many_waiters_when_blocks_come_back_one_by_one_then_they_are_served_in_order_of_arrival() -> None:
    cache = make()

    async def main() -> None:
        served: list[int] = []

        async def request(number: int) -> None:
            async with cache.sequence(number, num_tokens=1 + number * 7 % 32):
                served.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(request(number) for number in range(200)))
        assert served == list(range(200))

    run(main(), cache)


def test_given_a_waiter_when_its_head_gives_up_then_the_next_one_is_served_at_once() -> None:
    cache = make()

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=16)
        big = asyncio.create_task(cache.allocate("big", num_tokens=32))
        small = asyncio.create_task(cache.allocate("small", num_tokens=16))
        await settle()
        big.cancel()
        cache.free(await small)
        with pytest.raises(asyncio.CancelledError):
            await big
        cache.free(held)

    run(main(), cache)


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_given_a_full_pool_when_the_timeout_passes_then_it_raises_and_leaves_nothing(timeout: float) -> None:
    cache = make()

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        with pytest.raises(asyncio.TimeoutError, match="'late' did not fit within"):
            await cache.allocate("late", num_tokens=4, timeout=timeout)
        assert cache.num_waiting == 0
        cache.free(held)
        cache.free(await cache.allocate("late", num_tokens=4, timeout=timeout))

    run(main(), cache)


def test_given_a_request_larger_than_the_pool_when_allocating_then_it_raises_at_once_even_behind_others() -> None:
    cache = make(max_seq_len=1000)

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        waiting = asyncio.create_task(cache.allocate("waiting", num_tokens=32))
        await settle()
        with pytest.raises(NeverFitsError, match="'huge' needs 9 blocks of pool 0"):
            await cache.allocate("huge", num_tokens=33)
        with pytest.raises(NeverFitsError, match="over max_seq_len=1000"):
            await cache.allocate("long", num_tokens=1001)
        cache.free(held)
        cache.free(await waiting)

    run(main(), cache)


def test_given_a_pool_that_shrinks_when_a_waiter_can_never_fit_any_more_then_it_is_told() -> None:
    cache = make()

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=4)
        waiting = asyncio.create_task(cache.allocate("waiting", num_tokens=32))
        await settle()
        cache.cache.resize(4)
        with pytest.raises(NeverFitsError):
            await waiting
        cache.free(held)

    run(main(), cache)


def test_given_mistakes_when_allocating_then_they_raise_at_once() -> None:
    cache = make()

    async def main() -> None:
        held = await cache.allocate("a", num_tokens=32)
        with pytest.raises(DuplicateRequestError):
            await cache.allocate("a", num_tokens=1)
        with pytest.raises(InvalidArgumentError):
            await cache.allocate("b", [1, -2])
        with pytest.raises(InvalidArgumentError, match="timeout must be"):
            await cache.allocate("b", [1], timeout=-1)
        cache.free(held)

    run(main(), cache)
    with pytest.raises(InvalidArgumentError, match="wraps a KVCacheManager"):
        AsyncKVCacheManager("manager")  # type: ignore[arg-type]


def test_given_two_waiters_with_one_id_when_the_first_is_served_then_the_second_is_refused() -> None:
    cache = make()

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        twins = [asyncio.create_task(cache.allocate("twin", num_tokens=4)) for _ in range(2)]
        await settle()
        cache.free(held)
        cache.free(await twins[0])
        with pytest.raises(DuplicateRequestError):
            await twins[1]

    run(main(), cache)


def test_given_a_prefix_in_flight_when_asked_to_wait_for_it_then_others_pass_and_the_prefix_is_reused() -> None:
    cache = make(gpu_blocks=16)
    prompt = list(range(16))

    async def main() -> None:
        producer = await cache.allocate("producer", prompt)
        follower = asyncio.create_task(cache.allocate("follower", [*prompt, 99], wait_for_prefix=True))
        await settle()
        assert not follower.done()
        async with cache.sequence("other", num_tokens=4, timeout=5):
            assert not follower.done()
        cache.commit(producer, len(prompt))
        handle = await follower
        assert handle.num_cached_tokens == 16
        for one in (producer, handle):
            cache.free(one)

    run(main(), cache)


@pytest.mark.parametrize("windowed", [False, True])
def test_given_an_idle_near_match_when_a_request_needs_all_but_the_watermark_then_it_does_not_wait_for_ever(
    windowed: bool,
) -> None:
    """The idle source of a partly matching block must not keep the watermark from being reached."""
    layers = [LayerSpec(1, 8), LayerSpec(1, 8, window=8)] if windowed else [LayerSpec(1, 8)]
    cache = AsyncKVCacheManager(KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=16, watermark=0.05)))
    num_tokens = 28 if windowed else 60  # all that fits above the watermark

    async def main() -> None:
        async with cache.sequence("short", [1, 2, 3, 4]) as handle:
            cache.commit(handle)
        async with cache.sequence("long", [1, 2, 3] + [9] * (num_tokens - 3), timeout=5):
            pass

    run(main(), cache)


def test_given_a_grant_in_the_same_tick_as_the_cancellation_then_the_blocks_are_free_again() -> None:
    cache = make()

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        waiting = asyncio.create_task(cache.allocate("waiting", num_tokens=32))
        await settle()
        cache.free(held)
        cache._serve()  # the grant happens now; the task has not seen it
        assert cache.get("waiting").num_blocks == 8
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert cache.inspect.num_free_blocks() == 8

    run(main(), cache)


def test_given_a_sequence_block_when_it_ends_in_any_way_then_the_request_is_freed() -> None:
    cache = make()

    async def fail() -> None:
        async with cache.sequence("a", [1, 2, 3, 4]) as handle:
            cache.commit(handle, 4)
            raise RuntimeError("the forward pass failed")

    async def main() -> None:
        with pytest.raises(RuntimeError):
            await fail()
        assert cache.stats().pool().cached == 1
        async with cache.sequence("b", [5] * 4, keep=False) as handle:
            cache.commit(handle, 4)
        assert cache.stats().pool().cached == 1
        async with cache.sequence("c", [6]) as handle:
            cache.free(handle)  # freed inside: nothing more to do

    run(main(), cache)


def test_given_a_pressure_callback_that_frees_when_waiters_queue_then_they_are_served() -> None:
    cache = make()
    held: list[KVCacheHandle] = []

    def shed(change: Any) -> None:
        if change.usage > 0.9 and held:
            cache.free(held.pop())

    async def main() -> None:
        held.append(await cache.allocate("held", num_tokens=16))
        cache.on_memory_pressure(shed)
        handles = await asyncio.gather(*(cache.allocate(name, num_tokens=16) for name in ("a", "b")))
        for handle in handles:
            cache.free(handle)

    run(main(), cache)


def test_given_a_pressure_callback_that_cancels_the_call_when_it_is_served_then_its_blocks_are_free_again() -> None:
    cache = make()

    def cancel(change: Any) -> None:
        if change.usage > 0.9:
            for waiter in tuple(cache._waiters):
                waiter.future.cancel()

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        waiting = asyncio.create_task(cache.allocate("waiting", num_tokens=32))
        await settle()
        cache.on_memory_pressure(cancel)
        cache.free(held)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert cache.inspect.num_free_blocks() == 8

    run(main(), cache)


def test_given_waiters_in_another_loop_when_allocating_then_it_is_refused() -> None:
    cache = make()

    def other_loop() -> None:
        with pytest.raises(InvalidArgumentError, match="another event loop"):
            asyncio.run(cache.allocate("other", num_tokens=32))

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        waiting = asyncio.create_task(cache.allocate("waiting", num_tokens=32))
        await settle()
        await asyncio.to_thread(other_loop)
        cache.free(held)
        cache.free(await waiting)

    run(main(), cache)


def test_given_a_loop_that_ends_with_waiters_then_the_next_loop_starts_clean() -> None:
    cache = make()

    async def abandon() -> None:
        await cache.allocate("held", num_tokens=32)
        asyncio.create_task(cache.allocate("waiting", num_tokens=32)).add_done_callback(lambda task: task.cancelled())
        await settle()

    async def later() -> None:
        cache.free(cache.get("held"))
        cache.free(await cache.allocate("later", num_tokens=32))

    run(abandon(), cache, expect_live=1)
    run(later(), cache)


@pytest.mark.quick("0", "4", "8")
@pytest.mark.parametrize("seed", range(12))
def test_given_a_storm_of_cancellations_at_random_moments_then_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    cache = make(gpu_blocks=12)
    outcomes = {"served": 0, "cancelled": 0, "timed out": 0}

    async def request(number: int) -> None:
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        timeout = rng.choice([None, None, 0.0, 0.001])
        try:
            async with cache.sequence(
                number, prompt, timeout=timeout, wait_for_prefix=rng.random() < 0.3, keep=rng.random() < 0.5
            ) as handle:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                cache.commit(handle, len(prompt) - handle.num_committed)
            outcomes["served"] += 1
        except asyncio.TimeoutError:
            outcomes["timed out"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
            raise

    async def main() -> None:
        tasks = []
        for number in range(150):
            tasks.append(asyncio.create_task(request(number)))
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
            if rng.random() < 0.05:
                cache.manager.check()
        while pending := [task for task in tasks if not task.done()]:
            if rng.random() < 0.3:
                rng.choice(pending).cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    run(main(), cache)
    assert outcomes["served"]
    assert outcomes["cancelled"]


def test_given_threads_that_take_and_free_blocks_then_waiters_are_woken_and_all_are_served() -> None:
    cache = make(gpu_blocks=16)
    stop = threading.Event()
    errors: list[BaseException] = []

    def churn(worker: int) -> None:
        rng, number = random.Random(worker), 0
        try:
            while not stop.is_set():
                number += 1
                if cache.can_allocate(num_tokens=12):
                    try:
                        handle = cache.manager.allocate((worker, number), num_tokens=12)
                    except Exception as error:
                        if type(error).__name__ != "OutOfBlocksError":
                            raise
                        continue
                    if rng.random() < 0.5:
                        cache.extend(handle, 0)
                    cache.free(handle)
        except BaseException as error:
            errors.append(error)

    async def main() -> None:
        threads = [threading.Thread(target=churn, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()

        async def request(number: int) -> None:
            async with cache.sequence(("async", number), num_tokens=8 + number % 50):
                await asyncio.sleep(0)

        try:
            await asyncio.gather(*(request(number) for number in range(300)))
        finally:
            stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)

    run(main(), cache)
    assert errors == []


def test_given_only_threads_that_free_when_the_loop_sleeps_then_the_waiter_still_wakes() -> None:
    cache = make()

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        timer = threading.Timer(0.02, cache.free, args=(held,))
        timer.start()
        cache.free(await cache.allocate("waiting", num_tokens=32, timeout=30))
        await asyncio.to_thread(timer.join)

    run(main(), cache)


def test_given_a_pin_that_runs_out_when_somebody_waits_then_time_alone_serves_it() -> None:
    async def run() -> None:
        manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 8)], 4, gpu_blocks=4, watermark=0.0))
        handle = manager.allocate("a", list(range(8)))
        manager.commit(handle)
        manager.free(handle)
        manager.cache.pin(list(range(8)), ttl=0.05)
        cache = AsyncKVCacheManager(manager)
        await cache.allocate("b", [99] * 16, timeout=30)
        manager.check()

    asyncio.run(run())


def test_given_a_thread_that_is_faster_then_nobody_overtakes_the_first_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make()
    honest = cache.manager.allocate

    def after_another(name: Any, *arguments: Any, **options: Any) -> KVCacheHandle:
        monkeypatch.undo()
        honest("other", num_tokens=8)
        return honest(name, *arguments, **options)

    async def main() -> None:
        held = await cache.allocate("held", num_tokens=32)
        tasks = [asyncio.create_task(cache.allocate(name, num_tokens=n)) for name, n in (("first", 32), ("small", 4))]
        await settle()
        monkeypatch.setattr(cache.manager, "allocate", after_another)
        cache.free(held)
        await settle()
        assert [task.done() for task in tasks] == [False, False]
        cache.free(cache.get("other"))
        cache.free(await tasks[0])
        cache.free(await tasks[1])

    run(main(), cache)


def test_private_attributes_of_the_manager_are_not_those_of_the_asynchronous_one() -> None:
    manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 8)], 4, gpu_blocks=8))
    assert hasattr(manager, "_guard")
    assert not hasattr(AsyncKVCacheManager(manager), "_guard")
