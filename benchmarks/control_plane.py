"""Speed and size of the control plane, beside vLLM in the same run.

    python benchmarks/control_plane.py [--vllm-python PATH] [--json FILE] [--check] [--quick] [--only WORD]

This is what an engine's scheduler thread pays for its KV cache: blocks of 16 tokens, 65,536 of them, random tokens.
`Pool` is the only thing here that knows kvpool's interface; each case below mirrors the case of the same name in
`peers/vllm_peer.py`. `benchmarks/README.md` says what is in each figure.
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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import harness
import kvpool
from harness import Bar, Case, PeerCase, Runner, Times, TimesRecorded, cpu_ms, freeze_heap, random_tokens
from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.events import Stored
from peers import PeerProcess
from peers.recorded_figures import FIGURES

BLOCK_SIZE = 16
NUM_BLOCKS = 65_536
MILLION = 1_048_576
DECODE_STEPS = 16
IMPORT_TIME = "import time; t = time.thread_time(); from kvpool import KVCacheManager; print(time.thread_time() - t)"
TORCH_MODULES = "import sys; from kvpool import KVCacheManager; print(sum(m.startswith('torch') for m in sys.modules))"

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
        self.manager.reset_prefix_cache()

    def fill(self, prompt_length: int, seed: int) -> None:
        """Fills the pool with idle cached blocks: distinct prompts, admitted and freed."""
        for tokens in random_tokens(seed, self.num_blocks * BLOCK_SIZE // prompt_length, prompt_length):
            self.free(self.admit(tokens))
            self.events()


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


def _both(name: str, unit: str, case: Callable[..., Runner], params: Params, **options: Any) -> Case:
    """A case that vLLM's driver has under the same name, with the same parameters."""
    return Case(
        name=name,
        unit=unit,
        better="higher" if unit == "req/s" else "lower",
        kvpool=partial(case, **params),
        peer_case=PeerCase(case.__name__, params, options.pop("max_peer_repeats", None)),
        recorded=FIGURES.get(options.pop("figures"), ()),
        **options,
    )


def _times_best(factor: float) -> tuple[Bar, ...]:
    return Times(factor, "vllm"), TimesRecorded(factor)


def _decode_cases() -> list[Case]:
    name, plain, full = "decode step, {:,} sequences", {"commit": False}, {"commit": True}
    large, small = {"num_sequences": 1024}, {"num_sequences": 64}
    bars = (0.10, Times(125, "vllm"), TimesRecorded(5))
    return [
        _both(name.format(1024), "ms", decode, {**large, **plain}, bars=bars, figures="decode 1024"),
        _both(name.format(64), "ms", decode, {**small, **plain}, bars=_times_best(2), figures="decode 64"),
        _both(name.format(1024) + ", with commit", "ms", decode, {**large, **full}, figures="decode and commit 1024"),
        Case(
            name="CSR export, 1,024 sequences of 50 blocks",
            unit="ms",
            better="lower",
            kvpool=partial(csr, 1024, 49 * BLOCK_SIZE),  # the first export is of the 50th block
            bars=(0.25,),
            repeats=15,
        ),
    ]


def _admission_cases() -> list[Case]:
    params = {
        "1k": {"num_tokens": 1024, "per_repeat": 20},
        "8k": {"num_tokens": 8192, "per_repeat": 5},
        "128k": {"num_tokens": 131_072, "per_repeat": 1},
    }
    kinds = (
        ("cold", cold_admission, {"1k": 6, "8k": 12, "128k": 14}),
        ("full hit", hit_admission, {"1k": 8, "8k": 10, "128k": 4}),
    )
    return [
        _both(f"{kind} admission, {size}", "ms", case, params[size], bars=_times_best(factor), figures=f"{kind} {size}")
        for kind, case, factors in kinds
        for size, factor in factors.items()
    ]


def _throughput_cases() -> list[Case]:
    released = {"num_sequences": 1024, "prompt_length": 512, "num_decoded": 208}
    long, short = {"prompt_length": 2048, "per_repeat": 100}, {"prompt_length": 128, "per_repeat": 400}
    quiet, loud = {"events": False}, {"events": True}
    few: dict[str, Any] = {"repeats": 5, "quick_repeats": 2}
    return [
        _both(
            "free 1,024 sequences of 45 blocks",
            "ms",
            free_all,
            released,
            bars=_times_best(3),
            figures="free 1024",
            **few,
        ),
        _both("churn of 2k prompts", "req/s", churn, {**long, **quiet}, bars=(25_000,), figures="churn 2k"),
        _both(
            "churn of 2k prompts, events on",
            "req/s",
            churn,
            {**long, **loud},
            bars=(Times(10, "vllm"),),
            figures="churn 2k with events",
        ),
        _both(
            "churn of 128-token prompts, 8,192 leaves",
            "req/s",
            churn,
            {**short, **quiet},
            bars=(30_000,),
            figures="churn 128",
        ),
        _both(
            "128k prompt announced as events",
            "ms",
            announce,
            {"num_tokens": 131_072},
            bars=(10,),
            figures="announce 128k",
        ),
    ]


def _size_cases() -> list[Case]:
    once: dict[str, Any] = {"repeats": 1, "quick_repeats": 1, "warmups": 0}
    filled = {"num_blocks": NUM_BLOCKS, "prompt_length": 2048}
    return [
        _both("metadata per cached block", "B", metadata, filled, bars=(140,), figures="metadata", **once),
        _both(
            "build 1,048,576 blocks",
            "ms",
            construction,
            {"num_blocks": MILLION},
            bars=(50,),
            figures="construction 1M",
            repeats=5,
            max_peer_repeats=2,
        ),
        _both(
            "import in a fresh process",
            "s",
            import_time,
            {},
            bars=(0.25,),
            figures="import",
            repeats=5,
            max_peer_repeats=1,
            warmups=0,
        ),
        Case("torch modules after the import", "modules", "lower", partial(import_time, TORCH_MODULES), (0,), **once),
    ]


def _growth_cases() -> list[Case]:
    blocks = {"num_blocks": NUM_BLOCKS}, {"num_blocks": MILLION}
    leaves = {"fill_length": 800 * BLOCK_SIZE}, {"fill_length": 8 * BLOCK_SIZE}
    step = {"num_sequences": 256, "commit": False}
    hit = {"num_tokens": 8192, "per_repeat": 10}
    long, short = {"prompt_length": 2048, "per_repeat": 100}, {"prompt_length": 128, "per_repeat": 100}
    same_pool = {"num_blocks": 819_200}  # 102,400 leaves of 8 blocks, or 1,024 of 800
    grown = {
        "1M over 64k blocks, decode step": partial(growth, decode, step, *blocks),
        "1M over 64k blocks, full hit of 8k": partial(growth, hit_admission, {**hit, "fill_length": 2048}, *blocks),
        "1M over 64k blocks, churn of 2k": partial(growth, churn, long, *blocks),
        "100k over 1k leaves, full hit of 8k": partial(growth, hit_admission, {**hit, **same_pool}, *leaves),
        "100k over 1k leaves, churn of 128": partial(growth, churn, {**short, **same_pool}, *leaves),
    }
    return [Case(f"growth, {name}", "x", "lower", runner, (1.3,), repeats=10) for name, runner in grown.items()]


def cases() -> list[Case]:
    """All cases, in the order of the table."""
    return [*_decode_cases(), *_admission_cases(), *_throughput_cases(), *_size_cases(), *_growth_cases()]


if __name__ == "__main__":
    parser = harness.argument_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--vllm-python",
        metavar="PATH",
        default=os.environ.get("KVPOOL_VLLM_PYTHON"),
        help="an interpreter that has vLLM (default: $KVPOOL_VLLM_PYTHON); see benchmarks/README.md",
    )
    options = parser.parse_args()
    driver = Path(__file__).parent / "peers" / "vllm_peer.py"
    vllm = PeerProcess("vllm", driver, options.vllm_python, "no --vllm-python or KVPOOL_VLLM_PYTHON was given")
    sys.exit(harness.main(cases(), [vllm], options, {"kvpool": getattr(kvpool, "__version__", "from source")}))
