"""The engine on a GPU: whole runs and single steps of an 8B model with random weights, against the machine's own limits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from cases.engine_runs import CONTINUOUS, STATIC, Prompts, engine_throughput, open_engine, random_model, random_prompts
from harness import Case, PeerCase, Recorded, Runner, Times, TimesRecorded
from kvpool.engine import SamplingParams
from kvpool.scheduling import SchedulerConfig

LARGE: dict[str, Any] = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=16384,
    rope_theta=500000.0,
)


# --- the machine's limits ----------------------------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source))


def matrix_rate() -> float:
    """Floating-point operations per second of a large bf16 matrix product on random data."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return float(2 * 8192**3 / gpu_seconds(lambda: left @ right))


def gpu_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """The median time of one call on the GPU."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all but the embedding table, of which it reads a few rows."""
    embedding = model.get_input_embeddings().weight
    total: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return total - int(embedding.numel() * embedding.element_size())


def roofline(model: Any, bytes_per_token: int, prompts: Prompts, num_new: int) -> float:
    """Tokens per second of a whole run at the measured limits: prefill at the matrix rate, decode at the bandwidth."""
    flops = 2 * weight_bytes(model) / 2
    prefill = sum(map(len, prompts)) * flops / matrix_rate()
    context = sum(len(prompt) + num_new / 2 for prompt in prompts) * bytes_per_token
    decode = num_new * (weight_bytes(model) + context) / copy_bandwidth()
    return len(prompts) * num_new / (prefill + decode)


class Steady(NamedTuple):
    """A decoding step in the middle of a long run, in seconds."""

    step: float
    replay: float  # of its CUDA graph by itself: all of the model's work, and nothing that the host does
    ideal: float  # weights and KV of the step, read once at the measured bandwidth


def steady_decode(model: Any, batch: int, context: int = 1024, num_steps: int = 96) -> Steady:
    """Measures steps of `batch` sequences around this context."""
    limits = SchedulerConfig(max_tokens_per_step=8192, max_sequences=batch)
    engine = open_engine(
        model, scheduler=limits, memory_fraction=0.6, compile=True, cache={"enable_prefix_caching": False}
    )
    loop = engine._loop
    launch = loop._launch
    ends: list[Any] = []  # of the steps that decode the whole batch
    replays: list[float] = []

    def timed(plan: Any) -> Any:
        launched = launch(plan)
        if plan.num_tokens == plan.num_decode == batch:
            ends.append(_mark())
            if len(ends) == num_steps // 4:
                graphs = loop.runner.graphs
                assert graphs is not None
                replays.append(gpu_seconds(graphs._captured[batch, False].recorded.replay))
        return launched

    loop._launch = timed  # type: ignore[method-assign]
    length = context - num_steps // 2
    prompts = random_prompts(batch, length, length, 0, LARGE["vocab_size"])
    engine.generate(prompts, SamplingParams(max_new_tokens=num_steps, ignore_eos=True))
    torch.cuda.synchronize()
    # Replayed again in between, a graph writes what it wrote before; the steps beside it are left out.
    steps = [i for i in range(4, len(ends) - 1) if abs(i - num_steps // 4) > 2]
    step = np.median([ends[i].elapsed_time(ends[i + 1]) for i in steps])
    num_bytes = weight_bytes(model) + batch * context * engine.config.bytes_per_token
    return Steady(float(step) / 1e3, replays[0], num_bytes / copy_bandwidth())


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def decode_over_ideal(steady: Callable[[], Steady]) -> Runner:
    return lambda: [steady().step / steady().ideal]


def exposed_host_ms(steady: Callable[[], Steady]) -> Runner:
    """What a step takes beyond its graph: copies of its inputs, sampling, and the time that the GPU waits for the host."""
    return lambda: [1e3 * (steady().step - steady().replay)]


def first_token_ratio(model: Any, num_tokens: int) -> Runner:
    """Time to first token of a cold prompt over that of the same prompt when it is cached."""
    limits = SchedulerConfig(max_tokens_per_step=8192, max_sequences=8)
    engine = open_engine(model, scheduler=limits, memory_fraction=0.3, compile=True)
    once = SamplingParams(max_new_tokens=1, ignore_eos=True)

    def repeat() -> list[float]:
        engine.manager.cache.reset()
        prompts = random_prompts(1, num_tokens, num_tokens, 0, LARGE["vocab_size"])
        cold = engine.generate(prompts, once)[0].seconds
        warm = engine.generate(prompts, once)[0].seconds
        return [cold / warm]

    return repeat


# --- cases -------------------------------------------------------------------------------------------------------------


def gpu_cases(quick: bool) -> list[Case]:
    """The 8B shape of the issue; `quick` uses two layers, to see that it runs."""
    shape = {**LARGE, "num_hidden_layers": 2} if quick else LARGE
    model = random_model(shape, "cuda", torch.bfloat16)
    count, length, num_new = (8, 64, 16) if quick else (256, 512, 256)
    prompts = random_prompts(count, length, length, 0, LARGE["vocab_size"])
    limits = SchedulerConfig(max_tokens_per_step=8192, max_sequences=256)
    kv_bytes_per_token = shape["num_hidden_layers"] * 2 * 8 * 128 * 2
    limit = roofline(model, kv_bytes_per_token, prompts, num_new)

    def own_model() -> Any:
        return random_model(shape, "cuda", torch.bfloat16)

    params = {"make": own_model, "prompts": prompts, "num_new": num_new, "cpu": False, "peers": (STATIC,)}
    small_batch, large_batch = (functools.cache(functools.partial(steady_decode, model, batch)) for batch in (64, 256))
    once: dict[str, Any] = dict(repeats=1)
    cold: dict[str, Any] = dict(warmups=0, **once)
    step, first_token = "decode step over its ideal, batch", "time to first token of 8k tokens, cold over cached"
    host_time = "host time per decode step outside the GPU's shadow, batch 256"
    return [
        Case(f"{step} 64, context 1,024", "x", "lower", lambda: decode_over_ideal(small_batch), (1.35,), **cold),
        Case(f"{step} 256, context 1,024", "x", "lower", lambda: decode_over_ideal(large_batch), (1.35,), **cold),
        Case(host_time, "ms", "lower", lambda: exposed_host_ms(large_batch), (0.3,), **cold),
        Case(first_token, "x", "higher", lambda: first_token_ratio(model, 8192), (10.0,), warmups=1, **once),
        Case(
            f"8B shape, {count} requests of {length}, {num_new} new",
            "tok/s",
            "higher",
            lambda: engine_throughput(
                lambda: model, prompts, num_new, False, scheduler=limits, compile=True, memory_fraction=0.5
            ),
            bars=(0.7 * limit, TimesRecorded(14.0), Times(3.5, STATIC)),
            peer_case=PeerCase("whole", params, 1),
            recorded=(Recorded(CONTINUOUS, 555, "sdpa", "H200", "2026-11"),),
            ceiling=limit,
            warmups=1,
            repeats=3,
        ),
    ]
