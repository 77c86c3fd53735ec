"""Several threads with requests of their own on one cache of each earlier system: everybody reads what he wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from kvpool import LayerSpec
from kvpool.compat import (
    AllocationRequest,
    BlockManager,
    CacheEngine,
    KVCacheConfig,
    KVCacheManager,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    TrtLlmKVCacheManager,
)
from kvpool.compat.adapter import Adapter
from kvpool.errors import OutOfBlocksError, SequenceStateError

torch = pytest.importorskip("torch")

from kvpool import storage  # noqa: E402

LAYERS, HEADS, DIM = 2, 1, 4
TOKENS = 7
Live = Callable[[Any, str, int], None]
"""A request's life: the cache, its name, and a number that is a part of everything it writes."""


def made(name: str) -> Any:
    if name == "PyAgent":
        shape = dict(num_layers=LAYERS, num_heads=HEADS, head_dim=DIM, block_size=4, device="cpu")
        return KVCacheManager(KVCacheConfig(num_gpu_blocks=6, num_cpu_blocks=12, dtype="float32", **shape))
    if name == "ferrum":
        sizes = dict(block_size=4, max_gpu_blocks=6, max_cpu_blocks=12, min_prefix_length=0)
        shape = dict(num_layers=LAYERS, num_heads=HEADS, head_dim=DIM)
        return PagedKvCacheManager("cpu", PagedKvCacheConfig(dtype="float32", **sizes, **shape))
    if name == "V0":
        layers = [LayerSpec(HEADS, DIM, "float32")] * LAYERS
        return BlockManager(4, 12, 12, layers=layers, device="cpu")
    return TrtLlmKVCacheManager([HEADS] * LAYERS, DIM, 4, 6, 12, dtype="float32", device="cpu")


def values(number: int, num_tokens: int = TOKENS) -> Any:
    """Keys or values of tokens, all different, also from those of other numbers."""
    return torch.arange(num_tokens * DIM).reshape(num_tokens, HEADS, DIM) + 1000.0 * number


def write(cache: Adapter, name: str, number: int) -> None:
    for layer in range(LAYERS):
        cache.write(name, layer, 0, values(number), -values(number))


def expect(cache: Adapter, name: str, number: int) -> None:
    for layer in range(LAYERS):
        for found, expected in zip(cache.read(name, layer), (values(number), -values(number)), strict=True):
            assert torch.equal(found, expected), (name, number)


def swap(cache: Any, name: str, number: int) -> None:
    """Writes, moves to the host, reads, moves back, reads."""
    if isinstance(cache, PagedKvCacheManager):
        cache.allocate(AllocationRequest(name, TOKENS))
    else:
        cache.allocate(name, TOKENS)
    write(cache, name, number)
    expect(cache, name, number)
    with suppress(OutOfBlocksError):
        cache.swap_out(name)
    expect(cache, name, number)
    with suppress(OutOfBlocksError, SequenceStateError):
        cache.swap_in(name)
    expect(cache, name, number)


def offload(cache: TrtLlmKVCacheManager, name: str, number: int) -> None:
    """Stores a prompt, whose blocks others drive to the host, and reads it again there and back."""
    tokens = [number * 100 + token for token in range(TOKENS)]
    for _ in range(3):
        cached = cache.add_sequence(name, tokens)
        for layer in range(LAYERS):
            if cached:
                assert torch.equal(cache.read(name, layer, 0, cached)[0], values(number)[:cached]), (name, number)
            cache.write(name, layer, cached, values(number)[cached:], -values(number)[cached:])
        expect(cache, name, number)
        cache.remove_sequence(name, [*tokens, 0])


def append(cache: BlockManager, name: str, number: int) -> None:
    """Lives without copies: one thread makes the calls that return pairs."""
    cache.allocate(name, [number] * TOKENS)
    write(cache, name, number)
    cache.mark_blocks_as_computed(name, TOKENS)
    cache.append_slots(name)
    expect(cache, name, number)


LIVES: dict[str, Live] = {"PyAgent": swap, "ferrum": swap, "V0": append, "TRT": offload}


def end(cache: Any, name: str) -> None:
    with suppress(Exception):  # it ended by itself, or never began
        cache.manager.free(cache.manager.get(name))


@pytest.mark.quick("V0")
@pytest.mark.parametrize("system", LIVES)
def test_given_threads_with_requests_of_their_own_then_each_reads_what_it_wrote(
    system: str, eager_thread_switches: None
) -> None:
    cache = made(system)

    def run(thread: int) -> None:
        for turn in range(25):
            name = f"{thread} {turn}"
            try:
                LIVES[system](cache, name, thread * 100 + turn)
            except OutOfBlocksError:
                pass
            finally:
                end(cache, name)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run, thread) for thread in range(4)]:
            done.result()
    cache.manager.check()
    assert not cache.manager.handles
    cache.close()


@pytest.mark.parametrize("system", LIVES)
def test_given_two_threads_that_write_first_then_both_write_into_the_same_memory(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    class SlowPlane(storage.DataPlane):
        """Is being made until another thread makes one, too, or until nobody does."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            with suppress(threading.BrokenBarrierError):
                both.wait(timeout=0.3)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(storage, "DataPlane", SlowPlane)
    cache = made(system)
    for name in ("0", "1"):
        cache.manager.allocate(name, num_tokens=TOKENS)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: write(cache, str(number), number), range(2)))
    for number in range(2):
        expect(cache, str(number), number)


@pytest.mark.parametrize("system", ["PyAgent", "ferrum", "TRT"])
def test_given_copies_that_a_thread_has_taken_when_another_writes_the_freed_blocks_then_they_are_copied_first(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = made(system)
    prompt = list(range(TOKENS))
    if system == "TRT":  # what is stored goes to the host when others need its blocks
        cache.add_sequence("first", prompt)
        write(cache, "first", 1)
        cache.remove_sequence("first", [*prompt, 0])
    else:
        cache.manager.allocate("first", num_tokens=TOKENS)
        write(cache, "first", 1)
        cache.swap_out("first")
    cache.manager.allocate("second", num_tokens=24)
    submit, others = cache.plane.transfers.submit, []

    def late(*arguments: Any, **options: Any) -> Any:
        if not others:
            others.append(
                threading.Thread(target=cache.write, args=("second", 0, 0, *[torch.ones(24, HEADS, DIM)] * 2))
            )
            others[0].start()
            others[0].join(timeout=0.3)
        return submit(*arguments, **options)

    monkeypatch.setattr(cache.plane.transfers, "submit", late)
    cache.plane.run_copies()
    others[0].join()
    cache.manager.free(cache.manager.get("second"))
    if system == "TRT":
        assert cache.add_sequence("first", prompt) == TOKENS - 1
        assert torch.equal(cache.read("first", 1, 0, TOKENS - 1)[0], values(1)[:-1])
    else:
        expect(cache, "first", 1)


def test_given_v0s_worker_in_a_thread_of_its_own_then_it_moves_the_bytes_of_every_step() -> None:
    blocks = made("V0")
    worker, tokens = CacheEngine(blocks), list(range(TOKENS))
    with ThreadPoolExecutor(1) as thread:
        for turn in range(8):
            blocks.allocate("away", tokens)
            thread.submit(write, blocks, "away", turn).result()
            blocks.mark_blocks_as_computed("away", TOKENS)
            out = thread.submit(worker.swap_out, blocks.swap_out(["away"]))
            blocks.allocate("here", [9] * 40)
            out.result()
            thread.submit(blocks.write, "here", 0, 0, torch.full((40, HEADS, DIM), -1.0), torch.zeros(40, DIM)).result()
            blocks.free("here")
            thread.submit(worker.swap_in, blocks.swap_in(["away"])).result()
            thread.submit(expect, blocks, "away", turn).result()
            blocks.free("away")
            blocks.reset_prefix_cache()


@pytest.mark.slow
def test_given_defragmentation_in_another_thread_then_every_token_is_read_as_it_was_written(
    eager_thread_switches: None,
) -> None:
    cache = made("PyAgent")
    done = threading.Event()

    def defragment() -> None:
        while not done.is_set():
            cache.manager.cache.defragment()

    def run(thread: int) -> None:
        for turn in range(40):
            name, number = f"{thread} {turn}", thread * 100 + turn
            cache.allocate(name, TOKENS)
            write(cache, name, number)
            expect(cache, name, number)
            cache.free(name)

    with ThreadPoolExecutor(4) as pool:
        mover = pool.submit(defragment)
        try:
            for life in [pool.submit(run, thread) for thread in range(3)]:
                life.result()
        finally:
            done.set()
        mover.result()
    cache.manager.check()


def test_given_threads_that_store_find_and_evict_prefixes_then_ferrums_books_hold(eager_thread_switches: None) -> None:
    shape = dict(num_layers=LAYERS, num_heads=HEADS, head_dim=DIM)
    limits = dict(block_size=4, max_gpu_blocks=40, max_prefixes=5, min_prefix_length=0)
    cache = PagedKvCacheManager("cpu", PagedKvCacheConfig(**limits, **shape))

    def num_stored() -> int:
        stats = cache.prefix_cache_stats()
        assert stats is not None
        return stats.active_prefixes

    def run(thread: int) -> None:
        for turn in range(60):
            name, tokens = f"{thread} {turn}", [thread, turn % 7, *range(thread + 6)]
            handle = cache.allocate(AllocationRequest(name, len(tokens), tokens=tokens))
            cache.store_prefix(tokens, handle)
            cache.find_prefix([*tokens, 1])
            assert num_stored() <= 5 + 4  # each thread may be between adding and evicting
            (cache.gc, lambda: cache.evict_prefixes(1), cache.list_handles)[turn % 3]()
            cache.deallocate(name)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run, thread) for thread in range(4)]:
            done.result()
    cache.manager.check()
    assert cache.evict_prefixes(100) <= 5
    assert num_stored() == 0
