"""How many bytes the cache may have: what is free once the model is loaded, less what a step needs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpool.config import Tier
from kvpool.engine.graphs import decode_sizes, mixed_sizes
from kvpool.engine.params import SamplingParams
from kvpool.engine.sampling import SamplingRows, TokenCounts, sample
from kvpool.errors import StorageMemoryError
from kvpool.model.forward import forward
from kvpool.model.hook import AttentionCall
from kvpool.model.probing import ModelShape
from kvpool.scheduling import SchedulerConfig
from kvpool.storage import BlockStore, DataPlane, measure_budget

GPU_FRACTION = 0.9
CPU_FRACTION = 0.25  # other programs need memory of the host, too
GRAPH_BYTES = 2**31  # for CUDA graphs and the buffers of attention plans, without the logits

_COSTLIEST = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, logprobs=1)


def kv_budget(
    model: Any,
    shape: ModelShape,
    device: torch.device,
    fraction: float | None,
    limits: SchedulerConfig,
    beside: int = 0,
) -> int:
    """Bytes for keys and values: `fraction` of the free memory, less what steps, their graphs and images need on a GPU."""
    on_gpu = device.type == "cuda"
    chosen = fraction if fraction is not None else GPU_FRACTION if on_gpu else CPU_FRACTION
    reserved = step_bytes(model, shape, device, limits) + beside if on_gpu else 0
    budget = measure_budget(device, chosen, reserved)
    if budget <= 0:
        raise StorageMemoryError(
            f"{chosen:g} of the free memory of {device} is less than the {reserved} bytes that {_described(limits)} needs; "
            f"lower max_tokens_per_step or max_sequences, or raise memory_fraction"
        )
    return budget


def link_bytes_per_second(plane: DataPlane, num_bytes: int = 2**24) -> float:
    """Measures how fast bytes are copied between GPU and host. The scheduler compares swapping with computing by it."""
    moved = seconds = 0.0
    for pool in plane.config.pools:
        gpu, host = (plane.stores[pool.index, tier] for tier in (Tier.GPU, Tier.HOST))
        assert isinstance(gpu, BlockStore)
        assert isinstance(host, BlockStore)
        count = min(gpu.num_blocks, host.num_blocks, max(1, num_bytes // pool.block_bytes))
        host.lock(np.arange(count, dtype=np.int32))
        moved += count * pool.block_bytes
        seconds += copy_seconds(gpu.data[:count], host.data[:count])
    return max(moved, 1.0) / max(seconds, 1e-9)


def copy_seconds(source: Tensor, target: Tensor) -> float:
    """Seconds of the fastest of a few copies. The first one is slower: it wakes the link and touches the pages."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return min(times)


def step_bytes(model: Any, shape: ModelShape, device: torch.device, limits: SchedulerConfig) -> int:
    """Bytes that a GPU needs beside weights and cache: for the largest step, which is measured, and for the graphs."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        logits = run_largest_step(model, shape, device, limits)
    except torch.OutOfMemoryError as error:
        raise StorageMemoryError(
            f"{device} has no memory for {_described(limits)}; lower max_tokens_per_step or max_sequences: {error}"
        ) from None
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_allocated(device) - before
    kept = sum(decode_sizes(limits.max_sequences)) * logits[0].nbytes  # every such graph keeps the memory of its logits
    # Of the largest step
    in_graphs = max(mixed_sizes(limits.max_tokens_per_step), default=0) / limits.max_tokens_per_step
    del logits
    torch.cuda.empty_cache()
    return GRAPH_BYTES + kept + int(1.2 * (1 + in_graphs) * needed)  # allocations are rounded and fragmented


@torch.no_grad()
def run_largest_step(model: Any, shape: ModelShape, device: torch.device, limits: SchedulerConfig) -> Tensor:
    """Runs the largest possible step without attention, samples in the way that takes most memory, returns the logits."""
    positions = torch.arange(limits.max_tokens_per_step, device=device) % (shape.max_positions or 1)
    num_samples = min(limits.max_tokens_per_step, limits.max_sequences * (1 + limits.max_draft_tokens))
    samples = torch.arange(num_samples, device=device)

    def attend(call: AttentionCall) -> Tensor:
        return call.q.new_zeros(*call.q.shape[:2], call.v.shape[-1])

    logits = forward(model, torch.zeros_like(positions), positions, samples, attend)
    rows = SamplingRows([_COSTLIEST] * num_samples, device)
    counts = TokenCounts(limits.max_sequences, shape.vocab_size, device)
    sample(
        logits,
        rows,
        torch.zeros(num_samples, dtype=torch.float32, device=device),
        counts,
        samples % limits.max_sequences,
    )
    return logits


def _described(limits: SchedulerConfig) -> str:
    return f"a step of {limits.max_tokens_per_step} tokens and {limits.max_sequences} sequences"
