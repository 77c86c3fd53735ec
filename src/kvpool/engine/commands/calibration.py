"""Times steps of an engine until their costs are known: prompts of several lengths, batches of several sizes and contexts."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import numpy as np
import torch

from kvpool.config.layers import ceil_div
from kvpool.engine.engine import Engine
from kvpool.engine.sampling.params import SamplingParams
from kvpool.engine.sizing import copy_seconds
from kvpool.scheduling import LinearCostModel
from kvpool.scheduling.measured_costs import MeasuredStep, Measurement, fit_costs
from kvpool.scope import ReuseScope

PROMPTS = (32, 128, 512, 1024)
BATCHES = (1, 4, 16)
CONTEXTS = (16, 256, 768)
DECODE_STEPS = 6
LINK_BYTES = 2**26
SHORTEST_PROMPT = 4


class StepLog(LinearCostModel):
    """A cost model that keeps every step that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[MeasuredStep] = []

    def observe_step(
        self, prefills: Sequence[tuple[int, int]], num_sequences: int, context: int, seconds: float
    ) -> None:
        self.steps.append(MeasuredStep(list(prefills), num_sequences, context, seconds))


def measure_costs(engine: Engine, name: str) -> Measurement:
    """What prefill, decoding and the link cost with this engine's model on this machine."""
    scheduler = engine._loop.scheduler
    usual, log = scheduler.costs, StepLog()
    random = np.random.default_rng(0)
    longest = _longest(engine)
    scheduler.costs = log
    try:
        for length in sorted({min(length, longest) for length in PROMPTS}):
            _run(engine, random, 1, length, 1)
        for context in sorted({min(context, longest - DECODE_STEPS) for context in CONTEXTS}):
            for batch in BATCHES:
                if batch <= scheduler.config.max_sequences and _fits(engine, batch, context + DECODE_STEPS):
                    _run(engine, random, batch, context, DECODE_STEPS)
    finally:
        scheduler.costs = usual
    costs, errors = fit_costs(_medians(log.steps), link_speed(engine.model.device))
    return Measurement(
        machine=machine_name(engine.model.device),
        memory_bytes=memory_bytes(engine.model.device),
        model=name,
        parameters=sum(parameter.numel() for parameter in engine.model.parameters()),
        layers=tuple(engine.config.layers),
        costs=costs,
        errors=errors,
    )


def _longest(engine: Engine) -> int:
    """The longest prompt that fits into one step, the model's positions and the cache."""
    per_step = engine._loop.scheduler.config.max_tokens_per_step
    limits = (per_step, engine.config.longest_sequence(), engine.shape.max_positions)
    return max(SHORTEST_PROMPT + DECODE_STEPS, min(limit for limit in limits if limit) - DECODE_STEPS)


def _fits(engine: Engine, batch: int, num_tokens: int) -> bool:
    blocks = ceil_div(num_tokens, engine.config.block_size) * batch
    return all(blocks <= pool.total // 2 for pool in engine.manager.stats().pools)


def _run(engine: Engine, random: np.random.Generator, batch: int, length: int, num_new: int) -> None:
    """One batch of random prompts that nobody has cached, twice: what is made on first use is made in the first."""
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    for _ in range(2):
        prompts = random.integers(0, engine.shape.vocab_size, (batch, length)).tolist()
        engine.generate(prompts, params, scope=ReuseScope(tenant="kvpool bench"))


def _medians(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """One step for each shape (contexts in steps of 16 tokens a sequence), with the median time of those like it."""
    alike: dict[object, list[MeasuredStep]] = {}
    for step in steps:
        shape = (tuple(step.prefills), step.num_sequences, step.context // (16 * max(1, step.num_sequences)))
        alike.setdefault(shape, []).append(step)
    return [
        group[0]._replace(
            seconds=float(np.median([step.seconds for step in group])),
            context=round(float(np.mean([step.context for step in group]))),
        )
        for group in alike.values()
    ]


def link_speed(device: torch.device, num_bytes: int = LINK_BYTES) -> float:
    """Bytes per second between this device and (pinned) host memory, one way."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return num_bytes / copy_seconds(source.zero_(), target)


def machine_name(device: torch.device) -> str:
    """What people call the machine that a model runs on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} processor with {torch.get_num_threads()} threads"


def memory_bytes(device: torch.device) -> int:
    """All memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
