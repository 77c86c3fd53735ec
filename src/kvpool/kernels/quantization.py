"""Quantising K and V per token and head, and back: the reference that stores and kernels agree with."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvpool.config.layers import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.FP8_E5M2: torch.float8_e5m2,
    DType.INT8: torch.int8,
    DType.INT4: torch.uint8,  # two elements a byte
}
_SMALLEST_SCALE = 2.0**-24  # of float16, so that a row of zeros divides by something


@cache
def rotation(dim: int) -> Tensor:
    """An orthogonal matrix [dim, dim], of Hadamard's form. Rows times it have no element that is much larger than others.

    Keys and values that are multiplied with it lose less when they are rounded. Products of keys and queries stay the same if
    queries are multiplied with it, too. Results of attention, times its transpose, are those over the values as they were.

    >>> (rotation(12) @ rotation(12).T).round().equal(torch.eye(12))
    True
    """
    part = torch.ones(1, 1)
    while dim % (2 * len(part)) == 0:
        part = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), part)
    return torch.kron(torch.eye(dim // len(part)), part / len(part) ** 0.5)


class Quantized(NamedTuple):
    """Elements as stored, with the float16 scale and zero of each row where the type has them."""

    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None


def quantize(values: Tensor, dtype: DType, factor: float = 1.0) -> Quantized:
    """Rows of `values` (the last dimension is one head of one token) in the stored type. Values beyond it saturate.

    >>> data, scale, _ = quantize(torch.tensor([[1.0, -2.0, 0.5]]), DType.INT8)
    >>> data.tolist(), round(scale.item(), 5)
    ([[64, -127, 32]], 0.01575)
    """
    target = TORCH_DTYPES[dtype]
    if dtype is DType.INT8:
        values = values.float()
        scale = (values.abs().amax(-1) / 127).clamp(_SMALLEST_SCALE, 65504.0).half()
        steps = values / scale.float().unsqueeze(-1)
        return Quantized(steps.round().clamp(-127, 127).to(target), scale)
    if dtype is DType.INT4:
        values = values.float()
        low, high = values.aminmax(dim=-1)
        zero = low.clamp(-65504.0, 65504.0).half()
        scale = ((high - zero.float()) / 15).clamp(_SMALLEST_SCALE, 65504.0).half()
        steps = (values - zero.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
        return Quantized(pack_nibbles(steps.round().clamp(0, 15).to(target)), scale, zero)
    if dtype in (DType.FP8_E4M3, DType.FP8_E5M2):
        limit = torch.finfo(target).max
        return Quantized((values.float() / factor).clamp(-limit, limit).to(target))
    return Quantized(values.to(target))


def dequantize(stored: Quantized, dtype: DType, dim: int, factor: float = 1.0) -> Tensor:
    """The values that stored rows of `dim` elements are worth: float32, or the stored type where that is a plain float."""
    data, scale, zero = stored
    if dtype is DType.INT8:
        assert scale is not None
        return data.float() * scale.float().unsqueeze(-1)
    if dtype is DType.INT4:
        assert scale is not None and zero is not None
        return unpack_nibbles(data, dim).float() * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
    if dtype in (DType.FP8_E4M3, DType.FP8_E5M2):
        return data.float() * factor
    return data


def pack_nibbles(steps: Tensor) -> Tensor:
    """Bytes holding elements 2i (low half) and 2i + 1 (high half); an odd row ends with an empty half."""
    if steps.shape[-1] % 2:
        steps = torch.nn.functional.pad(steps, (0, 1))
    return steps[..., ::2] | steps[..., 1::2] << 4


def unpack_nibbles(data: Tensor, dim: int) -> Tensor:
    """The inverse of `pack_nibbles` for rows of `dim` elements."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)[..., :dim]
