"""The engine against transformers' own ways to generate, in one run; on a GPU also against the machine's limits.

    python benchmarks/engine.py                     what this machine can measure (a GPU's cases only where there is one)
    python benchmarks/engine.py --only SmolLM2      one part; see benchmarks/harness.py for the other options

On a CPU the figure is tokens per second of CPU time, with one thread. The 15M and 8B models have random weights: they
measure speed and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from cases.engine_gpu import gpu_cases
from cases.engine_runs import (
    CONTINUOUS,
    ONE_BY_ONE,
    STATIC,
    Prompts,
    Transformers,
    engine_throughput,
    open_engine,
    random_model,
    random_prompts,
)
from harness import Case, PeerCase, Recorded, Runner, Times, argument_parser, main
from kvpool.engine import SamplingParams
from kvpool.model.loading import load_model
from kvpool.scheduling import SchedulerConfig

SMALL: dict[str, Any] = dict(
    vocab_size=32000,
    hidden_size=288,
    intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=6,
    max_position_embeddings=1024,
)


def live_memory(make: Callable[[], Any], prompts: Prompts, num_new: int) -> Runner:
    """The share of the referenced KV memory that holds tokens, averaged over the steps at full load, in percent."""
    engine = open_engine(make(), kv_bytes=2**26, scheduler=SchedulerConfig(max_tokens_per_step=512, max_sequences=128))
    shares: list[float] = []

    def look() -> None:
        pool = engine.manager.stats().pool()
        if pool.referenced > 0.9 * pool.total:
            tokens = sum(handle.num_written for handle in engine.manager.handles)
            shares.append(100 * tokens / (pool.referenced * engine.config.block_size))

    def repeat() -> list[float]:
        engine.manager.cache.reset()
        shares.clear()
        engine.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True), on_chunk=lambda *_: look())
        return [float(np.mean(shares))]

    return repeat


def cpu_cases(quick: bool) -> list[Case]:
    count, num_new = (6, 8) if quick else (32, 128)

    def small() -> Any:
        return random_model(SMALL, "cpu", torch.float32)

    mixed = random_prompts(count, 64, 512, 0, SMALL["vocab_size"])
    limits = SchedulerConfig(max_tokens_per_step=512, max_sequences=64)
    params = {"make": small, "prompts": mixed, "num_new": num_new, "cpu": True, "peers": (STATIC, CONTINUOUS)}
    cases = [
        Case(
            f"15M Llama, {count} requests of 64-512, {num_new} new",
            "tok/CPU-s",
            "higher",
            lambda: engine_throughput(small, mixed, num_new, True, kv_bytes=2**29, scheduler=limits),
            bars=(Times(1.3, STATIC),),
            peer_case=PeerCase("mixed", params, 2),
            recorded=(Recorded(CONTINUOUS, 85, "tuned", "Neoverse-N1, 1 thread", "2026-11"),),
            repeats=3,
            warmups=0,
        ),
        Case(
            "KV memory that holds live tokens at full load",
            "%",
            "higher",
            lambda: live_memory(small, random_prompts(24, 300, 512, 0, SMALL["vocab_size"]), 64),
            bars=(97.0,),
            repeats=1,
            warmups=0,
        ),
    ]
    return cases + real_model_cases(quick)


def real_model_cases(quick: bool) -> list[Case]:
    """SmolLM2 with a shared system prompt: what prefix reuse is for."""
    count, num_new, shared = (3, 4, 64) if quick else (16, 64, 512)

    def real() -> Any:
        return load_model(None, device="cpu", dtype="float32").model

    def own_attention() -> Any:
        model = real()
        model.set_attn_implementation("sdpa")
        return model

    prompts = random_prompts(count, 16, 48, shared, 40000)
    peers = (ONE_BY_ONE, STATIC, CONTINUOUS)
    params = {"make": own_attention, "prompts": prompts, "num_new": num_new, "cpu": True, "peers": peers}
    return [
        Case(
            f"SmolLM2, {count} requests behind {shared} shared tokens, {num_new} new",
            "tok/CPU-s",
            "higher",
            lambda: engine_throughput(real, prompts, num_new, True, kv_bytes=2**30),
            bars=(Times(3.0, ONE_BY_ONE), Times(1.5, STATIC), Times(3.0, CONTINUOUS)),
            peer_case=PeerCase("shared", params, 1),
            repeats=2,
            warmups=0,
        )
    ]


if __name__ == "__main__":
    options = argument_parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    chosen = gpu_cases(options.quick) if on_gpu else cpu_cases(options.quick)
    batch_size = 256 if on_gpu else 8
    rivals = [Transformers(ONE_BY_ONE, 1), Transformers(STATIC, batch_size), Transformers(CONTINUOUS, None)]
    sys.exit(main(chosen, rivals, options, {"torch": torch.__version__, "transformers": transformers.__version__}))
