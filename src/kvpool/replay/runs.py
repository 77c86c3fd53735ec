"""Many configurations of one trace: policies times capacities, side by side, on several processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import TypeVar

from kvpool.replay.bounds import MODELS, run_model
from kvpool.replay.simulate import READS_PRIORITIES, ReplayConfig, ReplayResult, replay
from kvpool.replay.trace import Trace

Item = TypeVar("Item")
Result = TypeVar("Result")

_trace: Trace | None = None  # of a worker process, set once when it starts


def run_one(trace: Trace, config: ReplayConfig) -> ReplayResult:
    """One row: a policy through the manager, or a bound (`infinite`, `optimum`) or model (`fifo-flat`) without it."""
    if config.policy not in MODELS:
        return replay(trace, config)
    return run_model(
        trace, config.policy, config.capacity, config.host, config.disk, config.time, block_size=config.block_size
    )


def run_all(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[ReplayResult]:
    """Runs every configuration; results come in the given order. `workers` are processes (default: one per processor).

    If nothing is ever evicted, all policies give the same result, so only one of them runs.
    """
    distinct = sorted(dict.fromkeys(map(_representative, configs)), key=_haste)
    results = dict(zip(distinct, map_over(trace, run_one, distinct, workers=workers, progress=progress), strict=True))
    if progress is not None:
        progress(len(configs) - len(distinct))
    return [
        replace(results[_representative(config)], policy=config.policy, objective=config.objective)
        for config in configs
    ]


def _representative(config: ReplayConfig) -> ReplayConfig:
    unlimited = config.capacity is None and config.policy not in MODELS
    return replace(config, policy="lru", objective="blocks") if unlimited else config


def _haste(config: ReplayConfig) -> tuple[bool, float]:
    """A sort key that is small for slow runs (learning policies, many evictions), so that they begin first."""
    return config.policy not in READS_PRIORITIES, config.capacity or math.inf


def map_over(
    trace: Trace,
    run: Callable[[Trace, Item], Result],
    items: Sequence[Item],
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """`run(trace, item)` for every item, in the order given, on several processes; `run` is a function of a module."""
    count = min(workers or os.cpu_count() or 1, len(items))
    if count <= 1:
        results = []
        for item in items:
            results.append(run(trace, item))
            if progress is not None:
                progress(1)
        return results
    # A forked worker has the trace at once, but forking is only safe while no other thread runs.
    can_fork = "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1
    context = multiprocessing.get_context("fork" if can_fork else "spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, context, _start_worker, (trace,)) as pool:
        try:
            futures = [pool.submit(_run_in_worker, run, item) for item in items]
            for future in as_completed(futures):
                future.result()
                if progress is not None:
                    progress(1)
            return [future.result() for future in futures]
        except BaseException:  # a run failed, or Ctrl-C: now, not after the other runs
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _start_worker(trace: Trace) -> None:
    global _trace
    _trace = trace
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller ends the workers


def _run_in_worker(run: Callable[[Trace, Item], Result], item: Item) -> Result:
    assert _trace is not None
    return run(_trace, item)
