"""Copying blocks inside one kind of memory: whole, or the first tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpool.kernels.copying.block_bytes import Runs, widest_view
from kvpool.kernels.copying.current_device import current

_SMALL_BLOCK = 1 << 14  # bytes below which indexing a batch beats a copy per block


def copy_blocks(source: Tensor, target: Tensor, src: Tensor, dst: Tensor) -> None:
    """`target[dst[i]] = source[src[i]]` for every i; both are uint8 [block, byte] and may be the same tensor.

    No block stands in both `src` and `dst` of one tensor. On CUDA, `source` or `target` may also be pinned host memory.
    """
    if source.is_cuda or target.is_cuda:
        from kvpool.kernels.copying.copy_blocks_triton import copy_blocks_triton

        with current(src.device):
            copy_blocks_triton(source, target, src, dst)
        return
    if source.shape[1] < _SMALL_BLOCK:
        copy_blocks_reference(source, target, src, dst)
        return
    source, target = widest_view(source), widest_view(target)
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        target[b].copy_(source[a])


def copy_blocks_reference(source: Tensor, target: Tensor, src: Tensor, dst: Tensor) -> None:
    """What `copy_blocks` does, in two tensor operations."""
    source, target = widest_view(source), widest_view(target)
    target.index_copy_(0, dst.long(), source.index_select(0, src.long()))


def copy_tokens(
    source: Tensor, target: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor, runs: Sequence[Runs]
) -> None:
    """Copies the first `num_tokens[i]` tokens of block `src[i]` to block `dst[i]`; the rest of the target is left alone."""
    if source.is_cuda or target.is_cuda:
        from kvpool.kernels.copying.copy_blocks_triton import copy_tokens_triton

        with current(src.device):
            copy_tokens_triton(source, target, src, dst, num_tokens, runs)
    else:
        copy_tokens_reference(source, target, src, dst, num_tokens, runs)


def copy_tokens_reference(
    source: Tensor, target: Tensor, src: Tensor, dst: Tensor, num_tokens: Tensor, runs: Sequence[Runs]
) -> None:
    """What `copy_tokens` does, with a tensor operation per kind of run and distinct number of tokens."""
    for tokens in torch.unique(num_tokens).tolist():
        chosen = num_tokens == tokens
        pick, place = src[chosen].long(), dst[chosen].long()
        for run in runs:
            size = tokens * run.token_bytes
            _stretch(target, run, size)[place] = _stretch(source, run, size)[pick]


def _stretch(data: Tensor, run: Runs, size: int) -> Tensor:
    """The first `size` bytes of every stretch, [block, stretch, byte]."""
    offset = data.storage_offset() + run.offset
    return data.as_strided((data.shape[0], run.num_stretches, size), (data.shape[1], run.stride, 1), offset)
