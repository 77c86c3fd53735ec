"""Speed and size of replay: one capacity, a whole sweep, a large trace, and what recording costs an engine.

    python benchmarks/replay.py [--traces DIR] [--json FILE] [--check] [--quick] [--only WORD]

The conversation trace is the public one of Mooncake (12,031 requests, 288,500 blocks); without it those cases are absent.
Sweeps are CPU seconds of all processes divided by two, so that a busy machine does not change them much.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import harness
import kvpool
from harness import Case, PeerAbsentError, Runner, freeze_heap
from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.replay import ReplayConfig, TraceRecorder, read_trace, replay
from kvpool.replay.runs import run_all

CONVERSATION = "mooncake_conversation_trace.jsonl"
CAPACITIES = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000, None)
POLICIES = ("lru", "lfu", "fifo", "clock", "s3fifo", "2q", "arc", "adaptive")
BATCH = 256
LARGE_BLOCKS = 10_000_000

# Runs in a fresh process: streams a synthetic trace through the manager and prints its peak memory in MiB.
LARGE = """
import resource, sys
from kvpool.replay import ReplayConfig, read_trace, replay
trace = read_trace(sys.argv[1])
assert trace.num_ids >= int(sys.argv[2]), trace.num_ids
replay(trace, ReplayConfig("lru", 10_000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def conversation(traces: Path) -> Path:
    path = traces / CONVERSATION
    if not path.exists():
        raise PeerAbsentError(f"{CONVERSATION} is not in {traces}; give --traces")
    return path


def one_capacity(traces: Path, policy: str) -> Runner:
    path = conversation(traces)
    freeze_heap()

    def run() -> list[float]:
        start = time.thread_time()
        replay(read_trace(path), ReplayConfig(policy, 10_000))
        return [time.thread_time() - start]

    return run


def sweep(traces: Path) -> Runner:
    path = conversation(traces)

    def run() -> list[float]:
        start = _cpu_seconds()
        configs = [ReplayConfig(policy, capacity) for policy in POLICIES for capacity in CAPACITIES]
        run_all(read_trace(path), configs, workers=2)
        return [(_cpu_seconds() - start) / 2]

    return run


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def large_trace(num_blocks: int) -> Runner:
    """Peak memory of a process that replays a synthetic trace; the file is made once, by another process."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "large.jsonl"
    maker = (
        "import sys; from kvpool.replay import write_trace; from kvpool.replay.synth import WorkloadModel, synthesise;"
        "write_trace(synthesise(WorkloadModel(), int(sys.argv[2]) // 14), sys.argv[1])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", maker, str(path), str(num_blocks)], check=True, env=environment)

    def run() -> list[float]:
        command = [sys.executable, "-c", LARGE, str(path), str(num_blocks)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        assert folder.name
        return [float(done.stdout)]

    return run


def recording() -> Runner:
    """Microseconds that a recorder adds to the engine's thread in a decode step of 256 sequences."""

    def steps(record: bool) -> float:
        layers = [LayerSpec(kv_heads=8, head_dim=128)] * 32
        manager = KVCacheManager(KVCacheConfig(layers, 16, gpu_blocks=65_536))
        recorder = TraceRecorder(os.devnull).attach(manager) if record else None
        random = np.random.default_rng(0)
        handles = [manager.allocate(n, random.integers(0, 1000, 512, dtype=np.int32)) for n in range(BATCH)]
        for handle in handles:
            manager.commit(handle)
        batch = manager.batch(handles)
        tokens = random.integers(0, 1000, BATCH, dtype=np.int32)
        start = time.thread_time()
        for _ in range(64):
            manager.extend_batch(batch)
            manager.commit_batch(batch, tokens)
        taken = time.thread_time() - start
        if recorder is not None:
            recorder.close()
        return taken / 64 * 1e6

    return lambda: [steps(True) - steps(False)]


def evicting_admission(gap_seconds: float) -> Runner:
    """Admissions of prompts that never repeat into a full pool, the default policy over LRU; requests come so far apart."""
    now = [0.0]
    config = KVCacheConfig([LayerSpec(kv_heads=8, head_dim=128)] * 32, 16, gpu_blocks=4_096)
    managers = [KVCacheManager(config, policy=policy, clock=lambda: now[0]) for policy in ("lru", "adaptive")]
    random, names = np.random.default_rng(0), itertools.count()

    def taken(manager: KVCacheManager, prompts: list[Any], begun: float) -> int:
        now[0] = begun
        start = time.thread_time_ns()
        for tokens in prompts:
            now[0] += gap_seconds
            handle = manager.allocate(next(names), tokens)
            manager.commit(handle)
            manager.free(handle)
        return time.thread_time_ns() - start

    def run() -> list[float]:
        prompts = [random.integers(0, 50_000, 1_212, dtype=np.int32) for _ in range(200)]
        begun = now[0]
        lru, adaptive = (taken(manager, prompts, begun) for manager in managers)
        return [adaptive / lru]

    freeze_heap()
    return run


def cases(traces: Path, quick: bool) -> list[Case]:
    """All cases, in the order of the table."""
    num_blocks = LARGE_BLOCKS // 100 if quick else LARGE_BLOCKS
    once: dict[str, Any] = {"repeats": 1, "warmups": 0}
    few: dict[str, Any] = {"repeats": 5}
    return [
        Case("conversation, lru at 10k, with load", "s", "lower", partial(one_capacity, traces, "lru"), (1.5,), **few),
        Case("conversation, adaptive at 10k", "s", "lower", partial(one_capacity, traces, "adaptive"), **few),
        Case("8 policies x 7 capacities, two cores", "s", "lower", partial(sweep, traces), (30.0,), **once),
        Case(f"peak memory, {num_blocks:,} blocks", "MiB", "lower", partial(large_trace, num_blocks), (1024,), **once),
        Case("recording, per decode step of 256", "µs", "lower", recording, (100.0,), **few),
        Case("evicting admission, over lru", "x", "lower", partial(evicting_admission, 1e-4), (1.15,), repeats=15),
        Case("the same, 50 requests a second", "x", "lower", partial(evicting_admission, 0.02), repeats=15),
    ]


if __name__ == "__main__":
    parser = harness.argument_parser(__doc__.splitlines()[0])
    default = os.environ.get("KVPOOL_TRACES") or str(Path(__file__).resolve().parents[2] / "shared" / "traces")
    parser.add_argument("--traces", metavar="DIR", default=default, help="folder of the real traces ($KVPOOL_TRACES)")
    options = parser.parse_args()
    chosen = cases(Path(options.traces), options.quick)
    sys.exit(harness.main(chosen, [], options, {"kvpool": getattr(kvpool, "__version__", "from source")}))
