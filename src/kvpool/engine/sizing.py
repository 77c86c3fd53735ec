"""How many bytes the cache may have: what is free once the model is loaded, less what a step needs beside it."""

from __future__ import annotations

import time
from typing import Any

import torch

from kvpool.config import Tier
from kvpool.engine.hook import AttentionCall
from kvpool.engine.inspection import ModelShape, forward
from kvpool.errors import StorageMemoryError
from kvpool.storage import BlockStore, DataPlane, measure_budget

GPU_FRACTION = 0.9
CPU_FRACTION = 0.25  # a host has other things to do with its memory
GRAPH_BYTES = 2**31  # for CUDA graphs and the buffers of attention plans


def kv_budget(model: Any, shape: ModelShape, device: torch.device, fraction: float | None, step_tokens: int) -> int:
    """Bytes for keys and values: `fraction` of the free memory, less the activations of the largest step on a GPU."""
    on_gpu = device.type == "cuda"
    chosen = fraction if fraction is not None else GPU_FRACTION if on_gpu else CPU_FRACTION
    activations = GRAPH_BYTES + _activation_bytes(model, shape, device, step_tokens) if on_gpu else 0
    budget = measure_budget(device, chosen, activations)
    if budget <= 0:
        raise StorageMemoryError(
            f"{chosen:g} of the free memory of {device} is less than the {activations} bytes that a step of {step_tokens} "
            f"tokens needs; lower max_tokens_per_step or raise memory_fraction"
        )
    return budget


def link_bytes_per_second(plane: DataPlane, num_bytes: int = 2**24) -> float:
    """How fast GPU and host memory are copied to each other, measured: swapping is weighed against computing by it."""
    moved = seconds = 0.0
    for pool in plane.config.pools:
        gpu, host = (plane.stores[pool.index, tier] for tier in (Tier.GPU, Tier.HOST))
        assert isinstance(gpu, BlockStore)
        assert isinstance(host, BlockStore)
        count = min(gpu.num_blocks, host.num_blocks, max(1, num_bytes // pool.block_bytes))
        times = []
        for _ in range(5):  # the first one also wakes the link
            start = time.perf_counter()
            host.data[:count].copy_(gpu.data[:count])
            times.append(time.perf_counter() - start)
        moved += count * pool.block_bytes
        seconds += min(times)
    return max(moved, 1.0) / max(seconds, 1e-9)


def _activation_bytes(model: Any, shape: ModelShape, device: torch.device, num_tokens: int) -> int:
    """The most memory that one forward pass of `num_tokens` takes beside the weights, measured."""
    tokens = torch.zeros(min(num_tokens, shape.max_positions or num_tokens), dtype=torch.int64, device=device)
    last = torch.zeros(1, dtype=torch.int64, device=device)

    def attend(call: AttentionCall) -> torch.Tensor:
        return call.q.new_zeros(*call.q.shape[:2], call.v.shape[-1])

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    forward(model, tokens, torch.arange(len(tokens), device=device), last, attend)
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return int(1.2 * needed)  # allocations are rounded and fragmented
