"""`write_slots` as Triton kernels: one for types that are only converted, one that quantises per token and head."""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.config.layers import DType, ceil_div
from kvpool.kernels.layout import LayerCache, StoredPart, dense_rows
from kvpool.kernels.quantization import TORCH_DTYPES

_TILE = 4096  # elements of a program of the converting kernel
# 1.5 * 2**23: adding and taking it away rounds to the nearest integer, halves to even
_ROUND = tl.constexpr(12582912.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-24)
_LARGEST = tl.constexpr(65504.0)


@triton.jit
def _convert(
    values,
    value_stride,
    target,
    block_stride,
    token_stride,
    slots,
    tokens,
    num_tokens,
    num_slots,
    factor,
    limit,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    element = tl.arange(0, PADDED)
    inside = ((slot >= 0) & (slot < num_slots))[:, None] & (element < WIDTH)[None, :]
    row = tl.load(values + tokens.to(tl.int64)[:, None] * value_stride + element[None, :], mask=inside)
    if IS_FP8:
        row = tl.div_rn(row.to(tl.float32), factor)
        row = tl.minimum(tl.maximum(row, -limit), limit)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    tl.store(target + place[:, None] + element[None, :], row.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _convert_kernel(
    k,
    k_stride,
    k_target,
    k_block,
    k_token,
    k_factor,
    v,
    v_stride,
    v_target,
    v_block,
    v_token,
    v_factor,
    slots,
    num_tokens,
    num_slots,
    limit,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(1) == 0:
        _convert(
            k,
            k_stride,
            k_target,
            k_block,
            k_token,
            slots,
            tokens,
            num_tokens,
            num_slots,
            k_factor,
            limit,
            K_WIDTH,
            K_PADDED,
            BLOCK_SIZE,
            IS_FP8,
        )
    else:
        _convert(
            v,
            v_stride,
            v_target,
            v_block,
            v_token,
            slots,
            tokens,
            num_tokens,
            num_slots,
            v_factor,
            limit,
            V_WIDTH,
            V_PADDED,
            BLOCK_SIZE,
            IS_FP8,
        )


@triton.jit
def _quantize_kernel(
    values,
    value_stride,
    head_stride,
    data,
    data_block,
    data_token,
    data_head,
    scale,
    scale_block,
    scale_token,
    zero,
    slots,
    num_slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_INT4: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        head = tl.arange(0, PADDED_HEADS)
        element = tl.arange(0, PADDED)
        row = values + token * value_stride + head[:, None] * head_stride
        places = data + block * data_block + offset * data_token + head[:, None] * data_head + element[None, :]
        scales = block * scale_block + offset * scale_token + head
        is_head = head < HEADS
        if IS_INT4:  # a byte holds elements 2i and 2i + 1
            has_low = is_head[:, None] & (2 * element < DIM)[None, :]
            has_high = is_head[:, None] & (2 * element + 1 < DIM)[None, :]
            low = tl.load(row + 2 * element[None, :], mask=has_low).to(tl.float32)
            high = tl.load(row + 2 * element[None, :] + 1, mask=has_high).to(tl.float32)
            least = tl.minimum(
                tl.min(tl.where(has_low, low, float("inf")), axis=1),
                tl.min(tl.where(has_high, high, float("inf")), axis=1),
            )
            most = tl.maximum(
                tl.max(tl.where(has_low, low, -float("inf")), axis=1),
                tl.max(tl.where(has_high, high, -float("inf")), axis=1),
            )
            base = tl.minimum(tl.maximum(least, -_LARGEST), _LARGEST).to(tl.float16)
            step = tl.div_rn(most - base.to(tl.float32), 15.0)
            step = tl.minimum(tl.maximum(step, _SMALLEST_SCALE), _LARGEST).to(tl.float16)
            low = tl.div_rn(low - base.to(tl.float32)[:, None], step.to(tl.float32)[:, None])
            high = tl.div_rn(high - base.to(tl.float32)[:, None], step.to(tl.float32)[:, None])
            low = tl.minimum(tl.maximum((low + _ROUND) - _ROUND, 0.0), 15.0).to(tl.int32)
            high = tl.minimum(tl.maximum((high + _ROUND) - _ROUND, 0.0), 15.0).to(tl.int32)
            packed = low | (tl.where(has_high, high, 0) << 4)
            tl.store(places, packed.to(tl.uint8), mask=has_low)
            tl.store(zero + scales, base, mask=is_head)
            tl.store(scale + scales, step, mask=is_head)
        else:
            inside = is_head[:, None] & (element < DIM)[None, :]
            x = tl.load(row + element[None, :], mask=inside, other=0.0).to(tl.float32)
            step = tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0)
            step = tl.minimum(tl.maximum(step, _SMALLEST_SCALE), _LARGEST).to(tl.float16)
            x = tl.div_rn(x, step.to(tl.float32)[:, None])
            x = tl.minimum(tl.maximum((x + _ROUND) - _ROUND, -127.0), 127.0)
            tl.store(places, x.to(tl.int8), mask=inside)
            tl.store(scale + scales, step, mask=is_head)


def write_slots_triton(cache: LayerCache, slots: Tensor, values: Mapping[str, Tensor]) -> None:
    """Stores some parts of all tokens; slots that are -1 or lie outside the store are skipped. May be captured in a graph."""
    if not len(slots):
        return
    plain: dict[DType, list[_Rows]] = {}
    for name, given in values.items():
        part = cache[name]
        if part.scale is not None:
            _quantize(part, slots, given)
        else:
            plain.setdefault(part.dtype, []).append(_Rows(part, dense_rows(given).flatten(1)))
    for alike in plain.values():  # one launch for two parts of a type, as keys and values mostly are
        for at in range(0, len(alike), 2):
            _convert_pair(slots, *alike[at : at + 2])


class _Rows(NamedTuple):
    """Values for a part, [token, head * element]: a view where the heads of a token lie side by side, as in a slice of a
    fused projection.
    """

    part: StoredPart
    values: Tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the kernel."""
        data = self.part.data
        return self.values, self.values.stride(0), data, data.stride(0), data.stride(1), self.part.factor


def _convert_pair(slots: Tensor, k: _Rows, v: _Rows | None = None) -> None:
    """Stores one part, or two of the same type."""
    num_parts = 1 if v is None else 2
    v = v or k
    num_blocks, block_size = k.part.data.shape[:2]
    k_width, v_width = k.values.shape[1], v.values.shape[1]
    padded = triton.next_power_of_2(k_width), triton.next_power_of_2(v_width)
    tokens = max(1, _TILE // max(padded))
    is_fp8 = k.part.dtype in (DType.FP8_E4M3, DType.FP8_E5M2)
    _convert_kernel[triton.cdiv(len(slots), tokens), num_parts](
        *k.arguments,
        *v.arguments,
        slots,
        len(slots),
        num_blocks * block_size,
        torch.finfo(TORCH_DTYPES[k.part.dtype]).max if is_fp8 else 0.0,
        K_WIDTH=k_width,
        V_WIDTH=v_width,
        K_PADDED=padded[0],
        V_PADDED=padded[1],
        TOKENS=tokens,
        BLOCK_SIZE=block_size,
        IS_FP8=is_fp8,
        num_warps=4,
    )


def _quantize(part: StoredPart, slots: Tensor, values: Tensor) -> None:
    """Rows with zero points have 4 bits an element, others 8."""
    data, scale, zero = part.data, part.scale, part.zero
    assert scale is not None
    is_int4 = zero is not None
    values = dense_rows(values)
    heads, dim = values.shape[1:]
    _quantize_kernel[(len(slots),)](
        values,
        values.stride(0),
        values.stride(1),
        data,
        data.stride(0),
        data.stride(1),
        data.stride(2),
        scale,
        scale.stride(0),
        scale.stride(1),
        scale if zero is None else zero,
        slots,
        data.shape[0] * data.shape[1],
        HEADS=heads,
        DIM=dim,
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED=triton.next_power_of_2(ceil_div(dim, 2) if is_int4 else dim),
        BLOCK_SIZE=data.shape[1],
        IS_INT4=is_int4,
        num_warps=4,
    )
