"""ferrum's manager on random calls beside a slow, obvious model: every byte of every request, after every call.

The model keeps, for each live request, the numbers of its written tokens in a list, and knows nothing of blocks. What a pool
has left and how great pressure is it counts from the tables that the handles show.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from kvpool.compat.ferrum import (
    AllocationRequest,
    Device,
    MemoryPressure,
    PagedKvCacheConfig,
    PagedKvCacheHandle,
    PagedKvCacheManager,
)
from kvpool.errors import KVPoolError, OutOfBlocksError, SequenceStateError, SharedBlockError, UnknownRequestError

torch = pytest.importorskip("torch")

LAYERS, HEADS, WIDTH, SIZE, LONGEST, MOST = 2, 2, 4, 4, 28, 5
CONFIG = PagedKvCacheConfig(
    block_size=SIZE,
    max_gpu_blocks=16,
    max_cpu_blocks=10,
    low_watermark=0.5,
    high_watermark=0.25,
    num_layers=LAYERS,
    num_heads=HEADS,
    head_dim=WIDTH,
    max_prefixes=3,
    min_prefix_length=SIZE,
    dtype="float32",
)
Number = tuple[int, ...]  # what a written token has in each layer


@dataclass
class Request:
    """A live request as the model sees it."""

    handle: PagedKvCacheHandle
    tokens: int  # that were counted
    written: list[Number] = field(default_factory=list)
    prompt: list[int] | None = None  # if its numbers follow from its tokens
    limit: int | None = LONGEST
    swapped: bool = False


def number_of(tokens: list[int]) -> Number:
    """What a model would compute for the last of these tokens: it depends on all of them."""
    base = sum((i + 1) * (token + 1) for i, token in enumerate(tokens)) % 100_000
    return tuple(base + 1000 * layer for layer in range(LAYERS))


def vector(number: int, sign: int = 1) -> list[float]:
    return [float(sign * (number + i)) for i in range(HEADS * WIDTH)]


class Run:
    """One random run. Every step asks for one thing, and then everything is compared."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.manager = PagedKvCacheManager(Device.CPU, CONFIG)
        self.live: dict[str, Request] = {}
        self.names = iter(range(10**6))
        self.heard: list[MemoryPressure] = []
        self.calls = 0  # of the callback that are due
        self.done: set[str] = set()  # what really happened
        self.manager.set_pressure_callback(self.heard.append)

    # --- what the model knows ----------------------------------------------------------------------------------------

    def used_blocks(self) -> int:
        tables = [request.handle.get_physical_blocks() for request in self.live.values()]
        return len({block for table in tables for block in table})

    def pressure(self) -> MemoryPressure:
        free = (CONFIG.max_gpu_blocks - self.used_blocks()) / CONFIG.max_gpu_blocks
        if free < CONFIG.high_watermark:
            return MemoryPressure.CRITICAL
        return MemoryPressure.HIGH if free < CONFIG.low_watermark else MemoryPressure.LOW

    def compare(self) -> None:
        manager = self.manager
        manager.manager.check()
        assert dict(manager.list_handles()) == {name: request.handle for name, request in self.live.items()}
        assert manager.check_pressure() is self.pressure()
        assert manager.free_block_count() == CONFIG.max_gpu_blocks - self.used_blocks()
        assert manager.stats().active_caches == len(self.live)
        assert self.heard == [MemoryPressure.CRITICAL] * self.calls
        for request in self.live.values():
            assert request.handle.num_tokens() == request.tokens
            assert request.handle.num_blocks() * SIZE >= max(request.tokens, len(request.written))
            for layer in range(LAYERS):
                keys, values = manager.read_kv(request.handle, layer, 0, len(request.written))
                expected = list(chain.from_iterable(vector(number[layer]) for number in request.written))
                assert keys.tolist() == expected
                assert values is not None
                assert values.tolist() == [-number for number in expected]
        request = self.pick()
        if request is not None:
            with pytest.raises(KVPoolError):
                manager.read_kv(request.handle, 0, 0, len(request.written) + 1)

    def attempt(self, call: Callable[[], Any], *refusals: type[KVPoolError]) -> Any:
        """What a call returns; None where it is refused, and then nothing may have changed."""
        try:
            return call()
        except refusals:
            return None

    def pick(self, accept: Callable[[Request], bool] = lambda request: True) -> Request | None:
        found = [request for request in self.live.values() if accept(request)]
        return self.rng.choice(found) if found else None

    def note(self, handle: PagedKvCacheHandle | None, **what: Any) -> bool:
        if handle is not None:
            self.live[str(handle.request_id)] = Request(handle, **what)
        return handle is not None

    # --- steps: each says whether anything happened ------------------------------------------------------------------

    def allocate(self) -> bool:
        count, name = self.rng.choice((0, 1, 5, 8, 12, 24)), f"r{next(self.names)}"
        limit = self.rng.choice((None, LONGEST))
        request = AllocationRequest(name, count, limit, LAYERS, HEADS, WIDTH, Device.CPU, "fp32")
        fits = self.manager.can_allocate(request)
        assert fits == (-(-count // SIZE) <= CONFIG.max_gpu_blocks - self.used_blocks())
        self.calls += self.pressure() is MemoryPressure.CRITICAL
        handle = self.attempt(lambda: self.manager.allocate(request), OutOfBlocksError)
        assert (handle is not None) == fits
        return self.note(handle, tokens=count, limit=limit)

    def allocate_prompt(self) -> bool:
        prompt, name = self.draw_prompt(), f"p{next(self.names)}"
        self.calls += self.pressure() is MemoryPressure.CRITICAL
        request = AllocationRequest(name, len(prompt), tokens=prompt)
        handle = self.attempt(lambda: self.manager.allocate(request), OutOfBlocksError)
        if handle is None:
            return False
        cached = [number_of(prompt[: i + 1]) for i in range(handle.handle.num_written)]
        self.note(handle, tokens=len(prompt), written=cached, prompt=prompt, limit=None)
        if self.rng.random() < 0.7:  # the usual prefill
            self.write_next(self.live[name], len(prompt) - len(cached))
        return bool(cached)

    def draw_prompt(self) -> list[int]:
        first = self.rng.randrange(2)
        return [first] * self.rng.choice((4, 8, 8)) + [self.rng.randrange(9) for _ in range(self.rng.randrange(1, 8))]

    def begin_alone(self) -> bool:
        handle = PagedKvCacheHandle(f"a{next(self.names)}", "cpu", SIZE, LAYERS, HEADS, WIDTH)
        if self.rng.random() < 0.5:
            given = self.attempt(lambda: self.manager.allocate_blocks(handle, 2), OutOfBlocksError)
            tokens = 0
        else:
            given, tokens = self.attempt(lambda: self.manager.extend(handle, 6), OutOfBlocksError), 6
        assert handle.is_attached == (given is not None)
        return self.note(handle if given else None, tokens=tokens, limit=None)

    def extend(self) -> bool:
        request = self.pick(lambda request: not request.swapped)
        if request is None:
            return False
        count = self.rng.randrange(6)
        too_long = request.limit is not None and request.tokens + count > request.limit
        done = self.attempt(lambda: self.manager.extend(request.handle, count), OutOfBlocksError, SequenceStateError)
        assert not (done and too_long)
        request.tokens += count if done else 0
        return bool(done)

    def allocate_blocks(self) -> bool:
        request = self.pick(lambda request: not request.swapped and request.handle.num_blocks() < 6)
        if request is None:
            return False
        count, before = self.rng.randrange(3), request.handle.num_blocks()
        ids = self.attempt(
            lambda: self.manager.allocate_blocks(request.handle, count), OutOfBlocksError, SequenceStateError
        )
        assert request.handle.num_blocks() == before + (0 if ids is None else count)
        return bool(ids)

    def set_num_tokens(self) -> bool:
        request = self.pick(lambda request: not request.swapped)
        if request is None:
            return False
        count = self.rng.randrange(min(LONGEST, request.handle.num_blocks() * SIZE) + 1)
        done = self.attempt(lambda: [request.handle.set_num_tokens(count)], OutOfBlocksError)
        if done:
            request.tokens = count
        return bool(done)

    def write(self) -> bool:
        """The next tokens, wherever there are blocks; those of a prompt as they follow from it."""
        request = self.pick(lambda request: not request.swapped and request.handle.num_blocks() > 0)
        return request is not None and self.write_next(request, self.rng.randrange(1, 9))

    def write_next(self, request: Request, count: int) -> bool:
        for done in range(count):
            position = len(request.written)
            if request.prompt is not None and position < len(request.prompt):
                number = number_of(request.prompt[: position + 1])
            else:
                number = tuple(self.rng.randrange(10**5) for _ in range(LAYERS))
            if not self.write_one(request, position, number):
                return done > 0
            request.written.append(number)
        return True

    def write_one(self, request: Request, position: int, number: Number) -> bool:
        for layer in self.rng.sample(range(LAYERS), LAYERS):
            key, value = vector(number[layer]), vector(number[layer], -1)
            try:
                self.manager.write_kv(request.handle, layer, position, key, value)
            except SequenceStateError:  # no block, or over its limit
                limit = 10**6 if request.limit is None else request.limit
                assert position >= min(limit, request.handle.num_blocks() * SIZE)
                return False
            except (OutOfBlocksError, SharedBlockError):  # a copy of the shared block has no place; or it is published
                return False
        return True

    def overwrite(self) -> bool:
        """A written token again: only where nobody else reads its block, which the comparison finds out."""
        request = self.pick(lambda request: not request.swapped and len(request.written) > 0)
        if request is None:
            return False
        position = self.rng.randrange(len(request.written))
        number = tuple(self.rng.randrange(10**5) for _ in range(LAYERS))
        block = request.handle.get_physical_block(position // SIZE)
        holders = sum(block in other.handle.get_physical_blocks() for other in self.live.values())
        if not self.write_one(request, position, number):
            return False
        assert holders == 1
        request.written[position] = number
        if request.prompt is not None and position < len(request.prompt):
            request.prompt = None
        return True

    def clone(self) -> bool:
        request = self.pick(lambda request: not request.swapped)
        if request is None:
            return False
        if self.rng.random() < 0.5:
            child, tokens, limit = request.handle.clone_handle(), request.tokens, request.limit
        else:
            name = f"kid{next(self.names)}"
            [kid] = self.manager.manager.fork(request.handle.handle, name)
            found = self.manager.get_handle(name)
            assert found is not None
            child, tokens, limit = found, kid.num_reserved, None
        return self.note(child, tokens=tokens, written=request.written[:], prompt=request.prompt, limit=limit)

    def share(self) -> bool:
        """Into a new request."""
        source = self.pick(lambda request: not request.swapped and len(request.written) >= SIZE)
        if source is None:
            return False
        blocks = self.rng.randrange(1, len(source.written) // SIZE + 2)
        shared = min(blocks, len(source.written) // SIZE) * SIZE
        handle = self.manager.share_prefix_blocks(source.handle, f"s{next(self.names)}", blocks)
        return self.note(handle, tokens=shared, written=source.written[:shared], limit=source.limit)

    def share_into(self) -> bool:
        """Into one that has written nothing."""
        source = self.pick(lambda request: not request.swapped and len(request.written) >= SIZE)
        target = self.pick(lambda request: not request.swapped and not request.written)
        if source is None or target is None:
            return False
        blocks = len(source.written) // SIZE
        share = self.manager.share_prefix_blocks
        done = self.attempt(lambda: share(source.handle, target.handle, blocks), SequenceStateError, OutOfBlocksError)
        if done is None:
            return False
        ids = source.handle.get_physical_blocks()[:blocks]
        assert target.handle.get_physical_blocks()[:blocks] == ids
        target.tokens, target.prompt = max(target.tokens, blocks * SIZE), None
        target.written = source.written[: blocks * SIZE]
        return True

    def store(self) -> bool:
        request = self.pick(lambda r: not r.swapped and r.prompt is not None and len(r.written) >= len(r.prompt))
        if request is None or request.prompt is None:
            return False
        if not self.manager.store_prefix(request.prompt, request.handle):
            assert self.done & {
                "evict",
                "store",
            }  # what it held was forgotten while it was live: it publishes nothing more
            return False
        found = self.manager.find_prefix([*request.prompt, 0])
        assert found is not None
        assert found.matched_length >= len(request.prompt) // SIZE * SIZE
        return True

    def find(self) -> bool:
        prompt = self.draw_prompt()
        found = self.manager.find_prefix(prompt)
        if found is None:
            return False
        name, blocks = f"f{next(self.names)}", found.matched_length // SIZE
        handle = self.attempt(lambda: self.manager.share_prefix_blocks(found.kv_handle, name, blocks), OutOfBlocksError)
        written = [number_of(prompt[: i + 1]) for i in range(blocks * SIZE)]
        return self.note(handle, tokens=blocks * SIZE, written=written, limit=None)

    def swap_out(self) -> bool:
        request = self.pick(lambda request: not request.swapped)
        if request is None or self.attempt(lambda: [self.manager.swap_out(request.handle)], OutOfBlocksError) is None:
            return False
        request.swapped = True
        assert request.handle.get_physical_blocks() == []
        return True

    def swap_in(self) -> bool:
        request = self.pick(lambda request: request.swapped)
        if request is None or self.attempt(lambda: [self.manager.swap_in(request.handle)], OutOfBlocksError) is None:
            return False
        request.swapped = False
        return True

    def deallocate(self) -> bool:
        request = self.pick()
        if request is None:
            return False
        del self.live[str(request.handle.request_id)]
        self.manager.deallocate(self.rng.choice((request.handle, request.handle.request_id)))
        assert not request.handle.is_valid()
        with pytest.raises(UnknownRequestError):
            self.manager.deallocate(request.handle)
        return True

    def gc(self) -> bool:
        free = self.manager.manager.inspect.num_free_blocks()
        freed = self.manager.gc().memory_freed // self.manager.manager.config.block_bytes
        assert self.manager.manager.inspect.num_free_blocks() - free == freed <= 10
        return freed > 0

    def evict(self) -> bool:
        return self.manager.evict_prefixes(self.rng.randrange(3)) > 0

    def step(self) -> None:
        begin = {
            self.allocate: 4,
            self.allocate_prompt: 6,
            self.begin_alone: 1,
            self.clone: 3,
            self.share: 2,
            self.find: 4,
        }
        go_on = {
            self.extend: 6,
            self.allocate_blocks: 3,
            self.set_num_tokens: 2,
            self.write: 16,
            self.overwrite: 4,
            self.share_into: 3,
            self.store: 8,
            self.swap_out: 3,
            self.swap_in: 4,
            self.gc: 4,
            self.evict: 2,
        }
        steps = {**go_on, self.deallocate: 4, **begin} if len(self.live) < MOST else {**go_on, self.deallocate: 16}
        [chosen] = self.rng.choices(list(steps), list(steps.values()))
        if chosen():
            self.done.add(chosen.__name__)
        self.compare()


STEPS = 120


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [Run(seed) for seed in range(4)]


@pytest.mark.quick("1", "2")
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_leave_every_byte_where_the_model_has_it(seed: int, runs: list[Run]) -> None:
    run = runs[seed]
    for _ in range(STEPS):
        run.step()
    for name in list(run.live):
        run.manager.deallocate(name)
    run.manager.clear_prefix_cache()
    assert all(pool.free == pool.total for pool in run.manager.manager.stats().pools)


def test_the_random_calls_do_all_there_is_to_do(runs: list[Run]) -> None:
    """After the runs above, or by itself."""
    if not any(run.done for run in runs):
        for run in runs:
            for _ in range(STEPS):
                run.step()
    assert len(set.union(*(run.done for run in runs))) == 18
    assert sum(run.calls for run in runs) > 0
