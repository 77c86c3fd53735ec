"""Models whose layers keep a state, through the engine, beside transformers' own generation with its static cache.

    python benchmarks/hybrid_engine.py [--prompt 8192] [--only falcon_h1] [--no-peers] [--drafts 4] [--json FILE]

Random weights, bfloat16, the shapes of `hybrid_gpu.py`. For each: the bytes of a checkpoint; the first token of a prompt,
cold and from the cache; seconds per decode step at batch 1 and 64, ours and transformers'. With `--drafts`: those of steps
with drafts that are all wrong, and all right (random models accept none by themselves). Prints JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hybrid_gpu import FALCON, QWEN, Shape, random_model
from kvpool import Tier
from kvpool.engine import Engine, SamplingParams

GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
STEPS = 64


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(3, 32000, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were found in the cache."""
    (completion,) = engine.generate([prompt], GREEDY)
    assert completion.first_token_seconds is not None
    return completion.first_token_seconds, completion.num_cached_tokens


def step_seconds(engine: Engine, batch: int) -> float:
    """Seconds per decode step of so many sequences: what `STEPS` more tokens take than one."""
    prompts = [random_prompt(64, 1000 * batch + i) for i in range(batch)]
    few, many = (SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in (8, 8 + STEPS))
    engine.generate(prompts, few)
    took = []
    for params in (few, many) * 2:
        start = time.perf_counter()
        engine.generate(prompts, params)
        took.append(time.perf_counter() - start)
    return (min(took[1::2]) - min(took[::2])) / STEPS


def transformers_step_seconds(model: Any, batch: int) -> float:
    """The same by `generate` with transformers' own static cache."""
    ids = torch.randint(3, 32000, (batch, 64), device=model.device)
    took = []
    model.generation_config.eos_token_id = None
    for num_tokens in (8, 24, 8, 24):
        torch.cuda.synchronize()
        start = time.perf_counter()
        options = {"cache_implementation": "static", "disable_compile": True, "pad_token_id": 0}
        model.generate(ids, max_new_tokens=num_tokens, do_sample=False, **options)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return (min(took[1::2]) - min(took[::2])) / 16


def draft_step_seconds(model: Any, num_drafts: int) -> dict[str, float]:
    """Seconds per step and per token of one sequence whose drafts are all wrong, and all right."""
    found: dict[str, float] = {}
    prompt, params = random_prompt(64, 7), SamplingParams(max_new_tokens=8 + STEPS, temperature=0.0, ignore_eos=True)
    with Engine(model, memory_fraction=0.4, draft_tokens=num_drafts) as engine:
        engine.warm_up()
        (plain,) = engine.generate([prompt], params)
        text = np.array(prompt + plain.token_ids, np.int32)
        for name, shift in (("wrong", 1), ("right", 0)):

            def propose(tokens: Any, num: int, shift: int = shift) -> Any:
                return (text[len(tokens) : len(tokens) + num] + shift) % 32000

            took = []
            with patch("kvpool.engine.speculation.propose", propose):
                for _ in range(3):
                    before, start = engine.stats().scheduler.steps, time.perf_counter()
                    engine.generate([prompt], params)
                    took.append((time.perf_counter() - start, engine.stats().scheduler.steps - before))
            seconds, steps = min(took)
            found |= {f"draft_step_ms_{name}": 1e3 * seconds / steps, f"token_ms_{name}": 1e3 * seconds / (8 + STEPS)}
    return found


def measured(shape: Shape, num_prompt_tokens: int, peers: bool, num_drafts: int) -> dict[str, Any]:
    model = random_model(shape)
    found: dict[str, Any] = {}
    for batch in (1, 64) if peers else ():
        try:
            found[f"transformers_step_ms_{batch}"] = 1e3 * transformers_step_seconds(model, batch)
        except Exception as error:  # its static cache does not know every family
            found[f"transformers_step_ms_{batch}"] = f"{type(error).__name__}: {error}"[:200]
    start = time.perf_counter()
    with Engine(model, memory_fraction=0.5) as engine:
        engine.warm_up()
        found["start_seconds"] = time.perf_counter() - start
        group = engine.config.state_group
        assert group is not None
        found["checkpoint_bytes"] = group.block_bytes
        found["pool_bytes"] = engine.config.pool_bytes(Tier.GPU)
        found["blocks"] = [pool.num_blocks[Tier.GPU] for pool in engine.config.pools]
        found["graphs"] = engine.graphs.num_graphs
        cold, warm = [], []
        for seed in range(4):
            prompt = random_prompt(num_prompt_tokens, seed)
            cold.append(first_token(engine, prompt)[0])
            seconds, found["cached_tokens"] = first_token(engine, prompt)
            warm.append(seconds)
        found["first_token_cold_ms"] = 1e3 * statistics.median(cold[1:])
        found["first_token_cached_ms"] = 1e3 * statistics.median(warm[1:])
        found["cached_is_sooner"] = found["first_token_cold_ms"] / found["first_token_cached_ms"]
        for batch in (1, 64):
            found[f"step_ms_{batch}"] = 1e3 * step_seconds(engine, batch)
    if num_drafts:
        found |= draft_step_seconds(model, num_drafts)
    for batch in (1, 64):
        theirs = found.get(f"transformers_step_ms_{batch}")
        if isinstance(theirs, float):
            found[f"step_ratio_{batch}"] = found[f"step_ms_{batch}"] / theirs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--only", default="", help="one shape: qwen3_next or falcon_h1")
    parser.add_argument("--no-peers", action="store_true", help="without transformers' own steps")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of a step, measured too (default: none)")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there, too")
    args = parser.parse_args()
    found = {}
    for shape in (FALCON, QWEN):
        if args.only not in ("", shape[0]):
            continue
        try:
            found[shape[0]] = measured(shape, args.prompt, not args.no_peers, args.drafts)
        except Exception as error:
            found[shape[0]] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({shape[0]: found[shape[0]]}, indent=1), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
