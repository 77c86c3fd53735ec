"""In which type attention is computed: that of the queries, or float32 where a CPU multiplies the narrow type slowly."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def computing_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What K, V and queries of type `dtype` are computed in; results are rounded to `dtype` either way."""
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    return torch.float32 if _seconds(dtype) > _seconds(torch.float32) else dtype


@cache
def _seconds(dtype: torch.dtype) -> float:
    """A little attention, measured once a process: CPUs without instructions for bfloat16 take a hundred times as long."""
    q, k = (torch.ones(1, 2, rows, 64, dtype=dtype) for rows in (16, 256))

    def once() -> float:
        start = time.thread_time()
        _attend(q, k)
        return time.thread_time() - start

    _attend(q, k)
    return min(once() for _ in range(5))


@torch.inference_mode()
def _attend(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k)
