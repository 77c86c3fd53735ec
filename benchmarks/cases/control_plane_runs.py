"""What the cases of `control_plane.py` time: a pool of the manager, and one runner per thing that an engine asks of it.

`Pool` is the only thing here that knows kvpool's interface; each case mirrors the one of the same name in
`peers/vllm_peer.py`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from harness import Runner, cpu_ms, freeze_heap, random_tokens
from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.events import Stored

BLOCK_SIZE = 16
NUM_BLOCKS = 65_536
DECODE_STEPS = 16
IMPORT_TIME = "import time; t = time.thread_time(); from kvpool import KVCacheManager; print(time.thread_time() - t)"

Tokens: TypeAlias = npt.NDArray[np.int32]
Params: TypeAlias = Mapping[str, Any]


class Pool:
    """A manager of one full-attention group, and the few calls that the cases need."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, events: bool = False, freeze: bool = True) -> None:
        layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
        self.manager = KVCacheManager(KVCacheConfig(layers=layers, block_size=BLOCK_SIZE, gpu_blocks=num_blocks))
        self.num_blocks = num_blocks
        self._ids = itertools.count()
        self._subscription = self.manager.subscribe() if events else None
        self.events()
        if freeze:
            freeze_heap()

    def admit(self, tokens: Tokens) -> Any:
        """Match, allocate, read the table row, make the prompt matchable: all that a prompt costs before it decodes."""
        handle = self.manager.allocate(str(next(self._ids)), tokens)
        handle.block_ids(0)
        self.manager.commit(handle)
        return handle

    def free(self, handle: Any) -> None:
        self.manager.free(handle)

    def batch(self, prompts: list[Tokens]) -> Any:
        """A batch of live sequences."""
        return self.manager.batch([self.admit(tokens) for tokens in prompts])

    def extend(self, batch: Any) -> Any:
        """One token more for each sequence, the slot mapping and the padded table ready for the kernels."""
        return self.manager.extend_batch(batch, 1), batch.padded_table()

    def commit(self, batch: Any, tokens: Tokens) -> None:
        """The token that was sampled for each sequence."""
        self.manager.commit_batch(batch, tokens)

    def free_batch(self, batch: Any) -> None:
        self.manager.free_batch(batch)

    def events(self) -> list[Any]:
        """The events since the last call, all of them."""
        if self._subscription is None:
            return []
        batch = self._subscription.poll()
        assert batch.missed == 0, f"{batch.missed} events were dropped before they were read"
        return list(batch.events)

    def reset(self) -> None:
        """Empties the prefix cache."""
        self.manager.cache.reset()

    def fill(self, prompt_length: int, seed: int) -> None:
        """Fills the pool with idle cached blocks: distinct prompts, admitted and freed."""
        for tokens in random_tokens(seed, self.num_blocks * BLOCK_SIZE // prompt_length, prompt_length):
            self.free(self.admit(tokens))
            self.events()
            self.take_copies()

    def take_copies(self) -> None:
        """Takes the copies of partly matching blocks, as an engine does before each step."""
        self.manager.take_copies()


def num_stored_blocks(events: list[Any]) -> int:
    """How many blocks these events announce."""
    return sum(len(event.digests) for event in events if isinstance(event, Stored))


def decode(num_sequences: int, commit: bool, num_blocks: int = NUM_BLOCKS) -> Runner:
    """One token more for every sequence. With `commit` also the sampled token."""
    pool = Pool(num_blocks)
    prompts = random_tokens(1, num_sequences, 512 + BLOCK_SIZE)
    batch = pool.batch([prompt[: 512 + index % BLOCK_SIZE] for index, prompt in enumerate(prompts)])
    sampled = np.full(num_sequences, 7, np.int32)

    def step() -> float:
        start = time.thread_time_ns()
        pool.extend(batch)
        if commit:
            pool.commit(batch, sampled)
            return cpu_ms(start)
        elapsed = cpu_ms(start)
        pool.commit(batch, sampled)
        return elapsed

    return lambda: [step() for _ in range(DECODE_STEPS)]


def csr(num_sequences: int, num_tokens: int) -> Runner:
    """The CSR form of all tables. The sequences grow between two exports, so nothing can be kept from before."""
    pool = Pool()
    batch = pool.batch(list(random_tokens(1, num_sequences, num_tokens)))
    sampled = np.full(num_sequences, 7, np.int32)

    def repeat() -> list[float]:
        pool.extend(batch)
        pool.commit(batch, sampled)
        start = time.thread_time_ns()
        batch.csr()
        return [cpu_ms(start)]

    return repeat


def cold_admission(num_tokens: int, per_repeat: int) -> Runner:
    """Prompts nobody has seen, on an empty cache."""
    pool = Pool()
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        samples, handles = [], []
        for tokens in random_tokens(next(seeds), per_repeat, num_tokens):
            start = time.thread_time_ns()
            handle = pool.admit(tokens)
            samples.append(cpu_ms(start))
            assert handle.num_cached_tokens == 0
            handles.append(handle)
        for handle in handles:
            pool.free(handle)
        pool.reset()
        return samples

    return repeat


def hit_admission(
    num_tokens: int, per_repeat: int, num_blocks: int = NUM_BLOCKS, fill_length: int | None = None
) -> Runner:
    """The same prompt again and again, its blocks idle in the cache between two requests."""
    pool = Pool(num_blocks)
    if fill_length is not None:
        pool.fill(fill_length, seed=1)
    prompt = random_tokens(2, num_tokens)
    pool.free(pool.admit(prompt))

    def once() -> float:
        tokens = prompt.copy()
        start = time.thread_time_ns()
        handle = pool.admit(tokens)
        elapsed = cpu_ms(start)
        assert handle.num_cached_tokens >= num_tokens - BLOCK_SIZE
        pool.free(handle)
        return elapsed

    return lambda: [once() for _ in range(per_repeat)]


def free_all(num_sequences: int, prompt_length: int, num_decoded: int) -> Runner:
    """All sequences end at once; their decoded tokens are cached as well."""
    pool = Pool()
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        tokens = random_tokens(next(seeds), num_sequences, prompt_length + num_decoded)
        batch = pool.batch(list(tokens[:, :prompt_length]))
        for position in range(prompt_length, prompt_length + num_decoded):
            pool.extend(batch)
            pool.commit(batch, np.ascontiguousarray(tokens[:, position]))
        start = time.thread_time_ns()
        pool.free_batch(batch)
        elapsed = cpu_ms(start)
        num_cached_tokens = pool.manager.match_prefix(tokens[-1]).num_tokens
        assert num_cached_tokens >= prompt_length + num_decoded - BLOCK_SIZE, "decoded tokens are not cached"
        pool.reset()
        return [elapsed]

    return repeat


def churn(
    prompt_length: int,
    per_repeat: int,
    events: bool = False,
    num_blocks: int = NUM_BLOCKS,
    fill_length: int | None = None,
) -> Runner:
    """Distinct prompts through a pool full of idle cache: every block they take evicts one. Requests per second."""
    pool = Pool(num_blocks, events)
    pool.fill(fill_length or prompt_length, seed=1)
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        prompts = list(random_tokens(next(seeds), per_repeat, prompt_length))
        received: list[Any] = []
        start = time.thread_time_ns()
        for tokens in prompts:
            pool.free(pool.admit(tokens))
            pool.take_copies()
            if events:
                received += pool.events()
        rate = per_repeat / cpu_ms(start) * 1000
        assert not events or num_stored_blocks(received) == per_repeat * prompt_length // BLOCK_SIZE
        return [rate]

    return repeat


def announce(num_tokens: int) -> Runner:
    """A cold prompt with events on, until its events are in hand."""
    pool = Pool(events=True)
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        tokens = random_tokens(next(seeds), num_tokens)
        start = time.thread_time_ns()
        handle = pool.admit(tokens)
        events = pool.events()
        elapsed = cpu_ms(start)
        assert num_stored_blocks(events) == num_tokens // BLOCK_SIZE
        pool.free(handle)
        pool.reset()
        pool.events()
        return [elapsed]

    return repeat


def metadata(num_blocks: int, prompt_length: int) -> Runner:
    """Bytes of bookkeeping per block of a pool full of cached blocks."""

    def repeat() -> list[float]:
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        pool = Pool(num_blocks, freeze=False)
        pool.fill(prompt_length, seed=1)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return [(after - before) / num_blocks]

    return repeat


def construction(num_blocks: int) -> Runner:
    """Building the pool."""

    def repeat() -> list[float]:
        start = time.thread_time_ns()
        Pool(num_blocks, freeze=False)
        return [cpu_ms(start)]

    return repeat


def import_time(statement: str = IMPORT_TIME) -> Runner:
    """Importing the manager in a fresh process, in seconds, with its bytecode there as after an installation."""
    command = [sys.executable, "-c", statement]
    cache = tempfile.mkdtemp(prefix="kvpool-bytecode-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache

    def repeat() -> list[float]:
        finished = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return [float(finished.stdout)]

    repeat()
    return repeat


def growth(case: Callable[..., Runner], common: Params, small: Params, large: Params) -> Runner:
    """How many times slower the large variant of a timed case is than the small one, repeat by repeat."""
    run_small, run_large = case(**common, **small), case(**common, **large)
    if case is churn:  # a rate
        return lambda: [median(run_small()) / median(run_large())]
    return lambda: [median(run_large()) / median(run_small())]
