"""Real traffic on one engine: conversations that come and go, and steps that decode beside new prompts.

    python benchmarks/traffic.py                    an 8B shape on a GPU; elsewhere a tiny one, which only proves that it runs
    python benchmarks/traffic.py --only compiled    see benchmarks/harness.py for the other options
    python benchmarks/traffic.py --defaults         other values of settings instead, one at a time: what chose the defaults
    python benchmarks/traffic.py --defaults order host_write     some of them

96 sessions of three turns begin at once: a shared system prompt of 1,500 tokens, 100 to 1,500 new ones a turn, 100 generated.
The ideal of a step reads every weight once or multiplies it with every token, whichever takes longer, reads the keys and
values of decoding sequences once and multiplies those of prompts, at the rates of a copy and a large product in the same run.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from cases.default_runs import run_choices
from cases.engine_gpu import LARGE, copy_bandwidth, matrix_rate
from cases.engine_runs import open_engine, random_model
from cases.traffic_runs import (
    Conversations,
    Machine,
    StepTimer,
    Traffic,
    describe,
    ideal_seconds,
    mixed_steps,
    run_traffic,
)
from harness import Case, Runner, argument_parser, main, say
from kvpool.engine import Engine, SamplingParams
from kvpool.scheduling import SchedulerConfig

TINY = {**LARGE, "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}


class Setting(NamedTuple):
    """What is measured, and on what."""

    model: Any
    machine: Machine
    traffic: Traffic
    num_decoding: int
    context: int
    sizes: tuple[int, ...]
    repeats: int
    memory: dict[str, Any]
    little_memory: dict[str, Any]


def full_setting() -> Setting:
    """The 8B shape."""
    model = random_model({**LARGE, "max_position_embeddings": 65536}, "cuda", torch.bfloat16)
    machine = Machine(copy_bandwidth(), matrix_rate())
    say(f"measured: {machine.bytes_per_second / 1e12:.2f} TB/s, {machine.operations_per_second / 1e12:.0f} TFLOP/s")
    tiers = {"kv_bytes": 8 << 30, "host_bytes": 60 << 30}
    return Setting(model, machine, Traffic(), 64, 1500, SIZES, 8, {"kv_bytes": 40 << 30}, tiers)


def tiny_setting() -> Setting:
    """The same on a tiny model, to see that it runs; its ideals are those of no machine."""
    model = random_model(TINY, "cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    traffic = Traffic(
        num_sessions=3, num_turns=2, shared=32, new=(4, 40), num_generated=3, vocabulary=TINY["vocab_size"]
    )
    tiers = {"kv_bytes": 1 << 20, "host_bytes": 1 << 22}
    return Setting(model, Machine(1e12, 1e14), traffic, 2, 24, (8, 16), 2, {"kv_bytes": 1 << 24}, tiers)


class Bench:
    """Engines, one at a time, and what was measured on them, once each."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._engine: Engine | None = None
        self._made_with: dict[str, Any] = {}

    def engine(self, **options: Any) -> Engine:
        """An engine with these options, which has served a few requests."""
        if self._engine is None or self._made_with != options:
            began = time.perf_counter()
            self._engine, self._made_with = open_engine(self.setting.model, **options), options
            made = time.perf_counter()
            self._engine.generate([[5] * 200], SamplingParams(max_new_tokens=1, ignore_eos=True))
            graphs, first = self._engine.graphs, time.perf_counter() - made
            say(
                f"    engine made in {made - began:.1f} s, {graphs.seconds:.1f} s and {graphs.num_bytes >> 20} MiB of that "
                f"for {graphs.num_graphs} graphs; its first request took {1e3 * first:.1f} ms"
            )
            small = Traffic(4, 1, 16, (40, 300), 4, self.setting.traffic.vocabulary)
            run_traffic(self._engine, small)
        return self._engine

    @functools.cache  # noqa: B019 - it lives as long as the process
    def mixed(self, compiled: bool, graphs: bool) -> dict[int, float]:
        """Steps of each size over their ideal."""
        setting = self.setting
        engine = self.engine(compile=compiled, scheduler=SchedulerConfig(), **setting.memory)
        runner = engine._loop.runner
        kept = runner.mixed_graphs
        if not graphs:
            runner.mixed_graphs = None
        try:
            shape = (setting.num_decoding, setting.context, setting.sizes, setting.repeats, setting.traffic.vocabulary)
            found = mixed_steps(engine, *shape, seed=graphs)  # what the other run computed is cached
        finally:
            runner.mixed_graphs = kept
        ratios = {}
        for size, steps in found.items():
            seconds = float(np.median([step.seconds for step in steps]))
            best = float(np.median([ideal_seconds(step, engine, setting.machine) for step in steps]))
            say(f"    {setting.num_decoding} decoding + {size} new: {1e3 * seconds:.1f} ms, ideal {1e3 * best:.1f} ms")
            ratios[size] = seconds / best
        return ratios

    @functools.cache  # noqa: B019
    def conversations(
        self, compiled: bool, goal: float | None = None, tiers: bool = False, policy: str = "fcfs"
    ) -> Conversations:
        """The traffic from an empty cache."""
        setting = self.setting
        limits = SchedulerConfig(max_step_seconds=goal, policy=policy)
        memory = setting.little_memory if tiers else setting.memory
        engine = self.engine(compile=compiled, scheduler=limits, **memory)
        engine.manager.cache.reset()
        with StepTimer(engine) as timer:
            seen = run_traffic(engine, setting.traffic)
            steps = timer.steps()
        for line in describe(steps, lambda step: ideal_seconds(step, engine, setting.machine)):
            say(f"    {line}")
        gaps = 1e3 * np.array(seen.between_tokens)
        say(
            f"    {seen.seconds:.2f} s, {sum(ideal_seconds(step, engine, setting.machine) for step in steps):.2f} s at best; "
            f"first token p50 {np.median(seen.first_token):.3f} s, p99 {np.quantile(seen.first_token, 0.99):.3f} s; "
            f"between tokens p50 {np.median(gaps):.1f} ms, p99 {np.quantile(gaps, 0.99):.1f} ms; "
            f"{100 * seen.cached_share:.0f} % cached"
        )
        return seen


SIZES = (128, 256, 512, 900, 1900)
MIXED_BARS = {128: 1.5, 256: 1.5, 512: 1.5, 1900: 1.35}
GOAL = 0.035  # seconds of a step
SOONEST = "soonest_first_token"


def cases(bench: Bench) -> list[Case]:
    """Steps and runs of engines with and without compiled layers, with a goal for steps, and with little memory."""
    once: dict[str, Any] = dict(repeats=1, warmups=0)
    found = []

    def add(name: str, unit: str, measure: Callable[[], float], *bars: float) -> None:
        def runner() -> Runner:
            return lambda: [measure()]

        found.append(Case(name, unit, "lower", runner, bars, **once))

    def add_mixed(name: str, compiled: bool, graphs: bool, bars: dict[int, float]) -> None:
        for size in bench.setting.sizes:
            steps = f"{name}: {bench.setting.num_decoding} decoding + {size} new, over the ideal"
            limits = (bars[size],) if size in bars else ()
            add(steps, "x", lambda size=size: bench.mixed(compiled, graphs)[size], *limits)  # type: ignore[misc]

    def add_traffic(name: str, whole: float | None, gap: float | None, first: float | None, **how: Any) -> None:
        def seen() -> Conversations:
            return bench.conversations(**how)

        add(f"{name}: whole run", "s", lambda: seen().seconds, *_bars(whole))
        add(
            f"{name}: p99 between tokens",
            "ms",
            lambda: 1e3 * float(np.quantile(seen().between_tokens, 0.99)),
            *_bars(gap),
        )
        add(f"{name}: p50 to the first token", "s", lambda: float(np.median(seen().first_token)), *_bars(first))

    add_mixed("one by one", False, False, {})
    add_mixed("plain", False, True, MIXED_BARS)
    add_traffic("plain", 12.0, None, None, compiled=False)
    add_mixed("compiled", True, True, MIXED_BARS)
    add_traffic("compiled", 10.5, None, None, compiled=True)
    add_traffic(f"compiled, steps of {1e3 * GOAL:.0f} ms", 10.5, 45.0, None, compiled=True, goal=GOAL)
    little = "compiled, 8 GiB and a host tier"
    add_traffic(little, None, None, None, compiled=True, tiers=True)
    add_traffic(f"{little}, {SOONEST}", None, None, 1.2, compiled=True, tiers=True, policy=SOONEST)
    return found


def _bars(limit: float | None) -> tuple[float, ...]:
    return () if limit is None else (limit,)


if __name__ == "__main__":
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--defaults", metavar="WORDS", nargs="*", help="other values of settings, of those with a word")
    parser.add_argument("--seconds", type=float, default=420.0, help="of --defaults: no run begins later")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = full_setting() if torch.cuda.is_available() and not options.quick else tiny_setting()
    if options.defaults is not None:
        memory = chosen.memory, chosen.little_memory
        run_choices(chosen.model, chosen.traffic, *memory, options.defaults, options.seconds)
        sys.exit()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    sys.exit(main(cases(Bench(chosen)), [], options, versions, clock="time on the device"))
