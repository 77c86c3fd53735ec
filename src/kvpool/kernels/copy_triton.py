"""`copy_blocks`, `copy_tokens` and `upload_by_kernel` as Triton kernels. The signatures are those of their references."""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpool.kernels.layout import Runs, widest_view

_CHUNK = 1024  # words of one program


@triton.jit(do_not_specialize=["num_words"])
def _copy_words_kernel(source, target, num_words, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_words
    tl.store(target + at, tl.load(source + at, mask=inside, cache_modifier=".cv"), mask=inside)


def copy_words(source: Tensor, target: Tensor) -> None:
    """`target[:] = source` for int32 words."""
    count = source.numel()
    _copy_words_kernel[(triton.cdiv(count, _CHUNK),)](source, target, count, CHUNK=_CHUNK, num_warps=4)


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHUNK_BYTES = 4096  # of one program; measured on an H200: 94 % of a plain copy, larger ones 91 %
_STRETCH_CHUNK = 512  # words


@triton.jit
def _copy_blocks_kernel(source, target, src, dst, row_words, CHUNK: tl.constexpr):
    pair = tl.program_id(0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < row_words
    first = tl.load(src + pair).to(tl.int64) * row_words
    second = tl.load(dst + pair).to(tl.int64) * row_words
    tl.store(target + second + at, tl.load(source + first + at, mask=inside), mask=inside)


def copy_blocks_triton(source: Tensor, target: Tensor, src: Tensor, dst: Tensor) -> None:
    """`target[dst[i]] = source[src[i]]` for every i."""
    source, target = widest_view(source), widest_view(target)
    row_words = source.shape[1]
    chunk = min(_CHUNK_BYTES // source.element_size(), triton.next_power_of_2(row_words))
    grid = (len(src), triton.cdiv(row_words, chunk))
    if len(src):
        _copy_blocks_kernel[grid](source, target, src, dst, row_words, CHUNK=chunk, num_warps=4)


@triton.jit
def _copy_tokens_kernel(source, target, src, dst, num_tokens, starts, token_words, row_words, CHUNK: tl.constexpr):
    pair, stretch = tl.program_id(0), tl.program_id(1)
    count = tl.load(num_tokens + pair) * tl.load(token_words + stretch)
    start = tl.load(starts + stretch)
    first = tl.load(src + pair).to(tl.int64) * row_words + start
    second = tl.load(dst + pair).to(tl.int64) * row_words + start
    for chunk in range(0, count, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        inside = at < count
        tl.store(target + second + at, tl.load(source + first + at, mask=inside), mask=inside)


def copy_tokens_triton(
    source: Tensor, target: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor, runs: Sequence[Runs]
) -> None:
    """The first `num_tokens[i]` tokens of block `src[i]` to block `dst[i]`."""
    width, starts, token_words = _stretches(tuple(runs), source.shape[1], src.device)
    if len(src):
        _copy_tokens_kernel[(len(src), len(starts))](
            source.view(_WORDS[width]),
            target.view(_WORDS[width]),
            src,
            dst,
            num_tokens,
            starts,
            token_words,
            source.shape[1] // width,
            CHUNK=_STRETCH_CHUNK,
            num_warps=4,
        )


@cache
def _stretches(runs: tuple[Runs, ...], block_bytes: int, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """The widest word that divides everything; where each stretch starts and how long a token is in it, in words."""
    sizes = [size for run in runs for size in (run.offset, run.stride, run.token_bytes)]
    width = math.gcd(8, block_bytes, *sizes)
    starts = [(run.offset + i * run.stride) // width for run in runs for i in range(run.num_stretches)]
    tokens = [run.token_bytes // width for run in runs for _ in range(run.num_stretches)]
    pinned = device.type == "cuda"  # so that the first copy of a store does not wait for the device either
    start_words = torch.tensor(starts, dtype=torch.int64, pin_memory=pinned)
    token_words = torch.tensor(tokens, dtype=torch.int32, pin_memory=pinned)
    return width, start_words.to(device, non_blocking=True), token_words.to(device, non_blocking=True)
