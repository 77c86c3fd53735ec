"""What adapters add, as two Triton kernels: from inputs to ranks, and from ranks to outputs.

A program owns a group of tokens that share an adapter. The first kernel divides the inputs among programs, which leave
partial sums in float32; the second one adds these up, so that nothing is added atomically and results are the same every
time.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.kernels.layout import LoraWeights, dense_rows

_INPUTS = 128  # of x that a program multiplies at once
_OUTPUTS = 256  # of one program
_RANKS = 64  # of one program, at most
_PROGRAMS = 512  # that the first kernel should have, so that each has few inputs: it is latency that counts
_LEAST_INPUTS = 512  # of a program
_SUMS = 8192  # partial sums that a program of the second kernel loads at once, at most


@triton.jit
def _shrink_kernel(
    x,
    x_row,
    groups,
    a,
    ranks,
    low,
    num_inputs,
    inputs_each,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    group, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(groups + group * (TILE + 1))
    if slot >= 0:
        part, first = block // (RANK // RANKS), block % (RANK // RANKS) * RANKS
        if first < tl.load(ranks + slot * PARTS + part):
            lane = tl.arange(0, TILE)
            token = tl.load(groups + group * (TILE + 1) + 1 + lane)
            rank = first + tl.arange(0, RANKS)
            rows = x + token.to(tl.int64) * x_row
            weights = a + ((slot * PARTS + part).to(tl.int64) * RANK + rank) * num_inputs
            total = tl.zeros([TILE, RANKS], tl.float32)
            end = tl.minimum((split + 1) * inputs_each, num_inputs)
            for start in range(split * inputs_each, end, INPUTS):
                at = start + tl.arange(0, INPUTS)
                inside = at < end
                inputs = tl.load(rows[:, None] + at, mask=(token >= 0)[:, None] & inside, other=0.0)
                factors = tl.load(weights[None, :] + at[:, None], mask=inside[:, None], other=0.0)
                total = tl.dot(inputs, factors, total, input_precision="ieee")
            place = ((split * tl.num_programs(0) + group) * TILE + lane).to(tl.int64) * (PARTS * RANK)
            tl.store(low + place[:, None] + part * RANK + rank, total)


@triton.jit
def _expand_kernel(
    low,
    groups,
    b,
    scales,
    ranks,
    blocks,
    out,
    out_row,
    num_outputs,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    group, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(groups + group * (TILE + 1))
    lane = tl.arange(0, TILE)
    token = tl.load(groups + group * (TILE + 1) + 1 + lane)
    part, first, end = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    if slot >= 0:
        num_ranks, scale = tl.load(ranks + slot * PARTS + part), tl.load(scales + slot * PARTS + part)
        column = first + tl.arange(0, OUTPUTS)
        inside = column < end
        at = out + token.to(tl.int64)[:, None] * out_row + column
        there = (token >= 0)[:, None] & inside
        before = tl.load(at, mask=there, other=0.0).to(tl.float32)
        weights = b + (slot.to(tl.int64) * num_outputs + column) * RANK
        total = tl.zeros([TILE, OUTPUTS], tl.float32)
        split = tl.arange(0, SPLITS)[:, None, None]
        place = ((split * tl.num_programs(0) + group) * TILE + lane[:, None]).to(tl.int64) * (PARTS * RANK)
        for start in tl.static_range(0, RANK, RANKS):
            rank = start + tl.arange(0, RANKS)
            factors = tl.load(weights[None, :] + rank[:, None], mask=inside & (start < num_ranks), other=0.0)
            sums = tl.sum(tl.load(low + place + part * RANK + rank, mask=start < num_ranks, other=0.0), axis=0)
            total = tl.dot(sums.to(factors.dtype), factors, total, input_precision="ieee")
        if num_ranks > 0:
            tl.store(at, (before + total * scale).to(out.dtype.element_ty), mask=there)


def shrink_triton(x: Tensor, weights: LoraWeights, groups: Tensor) -> Tensor:
    """Partial sums [split, token of a group, rank of all parts] of the first product, for `expand_triton`."""
    x = dense_rows(x)
    num_groups, tile = groups.shape[0], groups.shape[1] - 1
    _, parts, rank, num_inputs = weights.a.shape
    ranks = min(rank, _RANKS)
    blocks = parts * (rank // ranks)
    most = _PROGRAMS // max(1, num_groups * blocks)
    wanted = max(1, min(most, num_inputs // _LEAST_INPUTS, _SUMS // (tile * ranks)))
    splits = 1 << (wanted.bit_length() - 1)
    inputs_each = triton.cdiv(triton.cdiv(num_inputs, splits), _INPUTS) * _INPUTS
    low = torch.empty(splits, num_groups * tile, parts * rank, dtype=torch.float32, device=x.device)
    if num_groups:
        _shrink_kernel[(num_groups, blocks, splits)](
            x,
            x.stride(0),
            groups,
            weights.a,
            weights.ranks,
            low,
            num_inputs,
            inputs_each,
            PARTS=parts,
            RANK=rank,
            TILE=tile,
            RANKS=ranks,
            INPUTS=_INPUTS,
            num_warps=4,
        )
    return low


def expand_triton(out: Tensor, low: Tensor, weights: LoraWeights, groups: Tensor) -> None:
    """Adds the second product to `out`."""
    num_groups, tile = groups.shape[0], groups.shape[1] - 1
    _, parts, rank, _ = weights.a.shape
    of_parts = _blocks(weights.sizes, out.device)
    if num_groups:
        _expand_kernel[(num_groups, len(of_parts))](
            low,
            groups,
            weights.b,
            weights.scales,
            weights.ranks,
            of_parts,
            out,
            out.stride(0),
            out.shape[1],
            PARTS=parts,
            RANK=rank,
            TILE=tile,
            RANKS=min(rank, _RANKS),
            OUTPUTS=_OUTPUTS,
            SPLITS=len(low),
            num_warps=8,
        )


def add_lora_triton(out: Tensor, x: Tensor, weights: LoraWeights, groups: Tensor) -> None:
    """What `add_lora_reference` does. May be captured in a graph, which then reads the groups and weights of each replay."""
    expand_triton(out, shrink_triton(x, weights, groups), weights, groups)


@cache
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The outputs of each program: part, first and end; a program has outputs of one part only."""
    found, begin = [], 0
    for part, size in enumerate(sizes):
        found += [(part, first, begin + size) for first in range(begin, begin + size, _OUTPUTS)]
        begin += size
    return torch.tensor(found, dtype=torch.int32).to(device)
