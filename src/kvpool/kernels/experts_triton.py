"""The products of a mixture of experts, as a Triton kernel for steps of few tokens.

A step that decodes reads the weights of the chosen experts once, and hardly computes. So nothing is sorted beforehand, which
takes ten small kernels: a program looks by itself for the choices of its expert among all of them.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.kernels.layout import MOST_CHOICES, dense_rows

_INPUTS = 128  # that a program multiplies at once
_FEW_CHOICES = 128  # steps with so few have narrower programs, which look at fewer choices


@triton.jit
def _experts_kernel(
    x,
    x_row,
    weights,
    of_expert,
    of_output,
    of_input,
    bias,
    experts,
    scales,
    out,
    num_choices,
    num_inputs,
    num_outputs,
    CHOICES: tl.constexpr,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile, block, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    choice = tl.arange(0, CHOICES)
    is_mine = tl.load(experts + choice, mask=choice < num_choices, other=-1) == expert
    if tl.sum(is_mine.to(tl.int32)) > tile * TILE:
        number = tl.cumsum(is_mine.to(tl.int32), axis=0) - 1  # of a choice, among those of this expert
        lane = tl.arange(0, TILE)
        in_lane = is_mine[None, :] & (number[None, :] == (tile * TILE + lane)[:, None])
        there = tl.sum(in_lane.to(tl.int32), axis=1) > 0
        mine = tl.sum(tl.where(in_lane, choice[None, :], 0), axis=1)
        rows = x + (mine // PER_ROW).to(tl.int64) * x_row
        output = block * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < num_outputs
        columns = weights + expert.to(tl.int64) * of_expert + output.to(tl.int64) * of_output
        total = tl.zeros([TILE, OUTPUTS], tl.float32)
        for start in range(0, num_inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            inside = at < num_inputs
            inputs = tl.load(rows[:, None] + at, mask=there[:, None] & inside, other=0.0)
            factors = tl.load(
                columns[None, :] + at[:, None].to(tl.int64) * of_input, mask=inside[:, None] & is_output, other=0.0
            )
            total = tl.dot(inputs, factors, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert * num_outputs + output, mask=is_output, other=0.0).to(tl.float32)
        if HAS_SCALES:
            total *= tl.load(scales + mine, mask=there, other=0.0).to(tl.float32)[:, None]
        place = out + mine.to(tl.int64)[:, None] * num_outputs + output
        tl.store(place, total.to(out.dtype.element_ty), mask=there[:, None] & is_output)


def expert_product_triton(
    x: Tensor, weights: Tensor, bias: Tensor | None, experts: Tensor, scales: Tensor | None = None
) -> Tensor:
    """What `expert_product_reference` does, of at most `MOST_CHOICES` choices, no two of which have one token and expert."""
    num_tokens, num_choices = len(experts), experts.numel()
    num_experts, num_outputs, num_inputs = weights.shape
    out = torch.empty(num_choices, num_outputs, dtype=x.dtype, device=x.device)
    if not num_choices:
        return out
    x, experts = dense_rows(x), experts.contiguous()
    are_few = num_choices <= _FEW_CHOICES
    tile = 16 if num_choices < 16 * num_experts else 32  # choices of one expert that a program multiplies
    outputs = 64 if are_few else 128  # of one program
    _experts_kernel[(triton.cdiv(num_tokens, tile), triton.cdiv(num_outputs, outputs), num_experts)](
        x,
        x.stride(0),
        weights,
        *weights.stride(),
        weights if bias is None else bias.contiguous(),
        experts,
        experts if scales is None else scales.contiguous(),
        out,
        num_choices,
        num_inputs,
        num_outputs,
        CHOICES=_FEW_CHOICES if are_few else MOST_CHOICES,
        PER_ROW=num_choices // len(x),
        HAS_BIAS=bias is not None,
        HAS_SCALES=scales is not None,
        TILE=tile,
        OUTPUTS=outputs,
        INPUTS=_INPUTS,
        num_warps=4 if are_few else 8,
        num_stages=4 if are_few else 3,
    )
    return out
