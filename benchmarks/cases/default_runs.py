"""What chooses a default: the conversations of traffic.py with one setting changed at a time, a line for each value."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cases.engine_runs import open_engine
from cases.traffic_runs import StepTimer, Traffic, run_traffic
from kvpool.config import Tier
from kvpool.engine import Engine
from kvpool.scheduling import SchedulerConfig, SoonestFirstToken
from kvpool.scheduling.policies import make_scheduling_policy
from kvpool.storage import BlockStore

Options = Mapping[str, Any]
NOTHING: Options = {}
QUANTILES = (0.5, 0.9, 0.99, 1.0)
MOST_SECONDS_TO_LOCK = 60.0
ORDERS: dict[str, str | Callable[[], SoonestFirstToken]] = {
    "fcfs": "fcfs",
    "default": SchedulerConfig.policy,  # type: ignore[dict-item]
    "patience=1": lambda: SoonestFirstToken(patience=1.0),
}


class Choice(NamedTuple):
    """A value of a setting, and what it takes to run it."""

    setting: str
    value: object
    engine: Options
    limits: Options = NOTHING  # fields of SchedulerConfig that an engine takes between two runs
    seed: int = 0  # of the traffic

    @property
    def name(self) -> str:
        """As it is printed, and chosen with --only."""
        return f"{self.setting}={self.value}" + f", traffic {self.seed}" * bool(self.seed)


def choices(ample: Options, little: Options) -> Iterator[Choice]:
    """All of them. Those that share an engine follow each other."""
    for seed in (0, 1):
        for name, order in ORDERS.items():
            yield Choice("order", name, little, {"policy": order}, seed)
    for prefetch in (0, 8):
        yield Choice("prefetch_requests", prefetch, little, {"prefetch_requests": prefetch})
    yield Choice("host_write", "through", {**little, "cache": {"host_write": "through"}})
    for goal in (None, 0.05, 0.035, 0.025):
        yield Choice("max_step_seconds", goal, ample, {"max_step_seconds": goal})
    yield Choice("wait_for_prefix", False, ample, {"wait_for_prefix": False})
    for size in (8, 32, 64, 128):
        yield Choice("block_size", size, {**ample, "block_size": size})
    yield Choice("partial_match", False, {**ample, "cache": {"partial_match": False}})
    yield Choice("cache_unfilled_blocks", True, {**ample, "cache": {"cache_unfilled_blocks": True}})
    for most in (1024, 4096):
        yield Choice("max_tokens_per_step", most, {**ample, "scheduler": SchedulerConfig(max_tokens_per_step=most)})


class DefaultRuns:
    """Runs choices on engines, one at a time. An engine is made only where a choice needs another one."""

    def __init__(self, model: Any, traffic: Traffic) -> None:
        self._model = model
        self._traffic = traffic
        self._engine: Engine | None = None
        self._made_with = NOTHING

    def measured(self, choice: Choice) -> dict[str, Any]:
        """The traffic from an empty cache."""
        engine = self._engine_for(choice.engine)
        scheduler = engine._loop.scheduler
        for name, value in {"policy": SchedulerConfig.policy, **DEFAULT_LIMITS, **choice.limits}.items():
            object.__setattr__(scheduler.config, name, value)  # all parts of an idle scheduler read this one object
        scheduler._queues.policy = make_scheduling_policy(scheduler.config.policy)
        engine.manager.cache.reset()
        with StepTimer(engine) as timer:
            seen = run_traffic(engine, replace(self._traffic, seed=choice.seed))
            steps = timer.steps()
        first = np.quantile(seen.first_token, QUANTILES).round(3).tolist()
        gaps = (1e3 * np.quantile(seen.between_tokens, QUANTILES)).round(1).tolist()
        decoding = [1e3 * step.seconds for step in steps if not step.num_prompt_tokens]
        return {
            "name": choice.name,
            "whole run, s": round(seen.seconds, 2),
            "first token p50 p90 p99 most, s": first,
            "between tokens p50 p90 p99 most, ms": gaps,
            "decoding step, ms": round(float(np.mean(decoding)), 2) if decoding else None,
            "steps": len(steps),
            "cached": round(seen.cached_share, 4),
        }

    def _engine_for(self, options: Options) -> Engine:
        if self._engine is None or self._made_with != options:
            self._engine, self._made_with = open_engine(self._model, **options), options
            host = self._engine.plane.stores[0, Tier.HOST]
            until = time.monotonic() + MOST_SECONDS_TO_LOCK
            while on_gpu(self._engine) and not locked(host) and time.monotonic() < until:
                time.sleep(0.1)  # requests are slower meanwhile
            run_traffic(self._engine, Traffic(4, 1, 16, (40, 300), 4, self._traffic.vocabulary))
        return self._engine


DEFAULT_LIMITS = {
    name: getattr(SchedulerConfig, name) for name in ("max_step_seconds", "prefetch_requests", "wait_for_prefix")
}


def on_gpu(engine: Engine) -> bool:
    """Whether its host memory is to be locked."""
    return bool(engine._loop.runner.device.type == "cuda")


def locked(host: Any) -> bool:
    """Whether a store on the host has its memory locked, or needs none."""
    return not isinstance(host, BlockStore) or not host.num_blocks or host.pinned


def run_choices(
    model: Any, traffic: Traffic, ample: Options, little: Options, words: list[str], most_seconds: float
) -> None:
    """A line for every choice whose name contains one of the words; none begins after so many seconds."""
    began, runs, found = time.monotonic(), DefaultRuns(model, traffic), []
    for choice in choices(ample, little):
        if words and not any(word in choice.name for word in words):
            continue
        if time.monotonic() - began > most_seconds:
            print(f"{choice.name}: no time left", flush=True)
            continue
        try:
            seen = runs.measured(choice)
        except Exception as error:  # the others are still worth their time
            seen = {"name": choice.name, "failed": repr(error)[:300]}
        found.append(seen)
        print(
            ", ".join(f"{key} {value}" for key, value in seen.items()),
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        if folder := os.environ.get("OUT"):
            (Path(folder) / "defaults.json").write_text(json.dumps(found, indent=1))
