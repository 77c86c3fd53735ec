"""An engine whose prefixes come from a disk, beside the same engine that computes them. Cases of benchmarks/tiers.py.

SmolLM2-135M on the CPU with one thread. "bare" is the engine without tiers. A restart is a new engine and a newly opened
directory, with the weights still in memory: what is timed is the first token, before which both must load them.
"""

from __future__ import annotations

import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from cases.tiers_disk import BARE, folder
from harness import Case, PeerAbsentError, PeerCase, Runner, Times

PROMPT_TOKENS = 400
NUM_BLOCKS = 512


@cache
def model() -> tuple[Any, Any]:
    """The model and its tokenizer, loaded once."""
    try:
        import torch

        from kvpool.model.loading import load_model

        torch.set_num_threads(1)
        loaded = load_model(None, device="cpu")
    except ImportError as error:
        raise PeerAbsentError(f"the engine or its model is not installed: {error}") from None
    return loaded.model, loaded.tokenizer


def engine(directory: Path | None, **options: Any) -> Any:
    from kvpool.engine import Engine

    disk: dict[str, Any] = {} if directory is None else {"disk": directory, "disk_bytes": 2**30, "tier_timeout": 60.0}
    return Engine(model()[0], tokenizer=model()[1], kv_blocks=NUM_BLOCKS, **disk, **options)


def prompts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    tokens: list[list[int]] = np.random.default_rng(seed).integers(3, 40_000, (count, num_tokens)).tolist()
    return tokens


def first_token(disk: bool) -> Runner:
    """Milliseconds to the first token of a prompt that an earlier engine stored, or that has to be computed."""
    from kvpool.engine import SamplingParams

    directory = folder() / "engine" if disk else None
    once, (prompt,) = SamplingParams(max_new_tokens=1), prompts(1, PROMPT_TOKENS, 0)
    if disk:
        with engine(directory) as earlier:
            earlier.generate([prompt], once)

    def repeat() -> list[float]:
        with engine(directory) as restarted:
            (result,) = restarted.generate([prompt], once)
            assert bool(result.num_cached_tokens) == disk
            return [1e3 * (result.first_token_seconds or 0.0)]

    return repeat


def throughput(disk: bool) -> Runner:
    """Tokens per second of CPU time, new prompts all the time: every block that is computed goes to the disk, or none."""
    from kvpool.engine import SamplingParams

    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    running = engine(folder() / "storing" if disk else None)
    seeds = iter(range(1, 10**6))

    def repeat() -> list[float]:
        batch = prompts(4, 96, next(seeds))
        start = time.process_time()
        running.generate(batch, params)
        return [4 * (96 + 48) / (time.process_time() - start)]

    return repeat


ENGINE_RUNS = {"first_token": partial(first_token, False), "throughput": partial(throughput, False)}


def engine_cases() -> list[Case]:
    """The rows of an engine with a disk."""
    return [
        Case(
            f"SmolLM2, first token of {PROMPT_TOKENS} after a restart, from disk",
            "ms",
            "lower",
            partial(first_token, True),
            (Times(5.0, BARE),),
            PeerCase("first_token"),
            repeats=3,
        ),
        Case(
            "SmolLM2, 4 new prompts of 96, 48 new, all blocks stored on disk",
            "tok/CPU-s",
            "higher",
            partial(throughput, True),
            (Times(0.95, BARE),),
            PeerCase("throughput"),
            repeats=3,
        ),
    ]
