"""Copies by index: blocks whole, the first tokens of each, and small arrays uploaded to a GPU."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kvpool.kernels.layout import Runs, current, widest_view

_SMALL_BLOCK = 1 << 14  # bytes below which indexing a batch beats a copy per block
_BATCH = 64  # uploads by kernels, after which an event tells whether those before them are done


def copy_blocks(source: Tensor, target: Tensor, src: Tensor, dst: Tensor) -> None:
    """`target[dst[i]] = source[src[i]]` for every i; both are uint8 [block, byte] and may be the same tensor.

    No block stands in both `src` and `dst` of one tensor. On CUDA, `source` or `target` may also be pinned host memory.
    """
    if source.is_cuda or target.is_cuda:
        from kvpool.kernels.copy_triton import copy_blocks_triton

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
        from kvpool.kernels.copy_triton import copy_tokens_triton

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


class _Used(threading.local):
    """Page-locked memory that kernels of this thread may still read, by stream. Torch does not know of them."""

    def __init__(self) -> None:
        self.newest: dict[int, list[Tensor]] = {}
        self.older: dict[int, tuple[torch.cuda.Event, list[Tensor]]] = {}


_used = _Used()
_transferring: dict[torch.device, set[Hashable]] = {}


def note_transfers(device: torch.device, owner: Hashable, under_way: bool) -> None:
    """Whether transfers of `owner` occupy the copy engines of a GPU."""
    owners = _transferring.setdefault(device, set())
    if under_way:
        owners.add(owner)
    else:
        owners.discard(owner)


def upload(host: Tensor, target: Tensor) -> None:
    """`target.copy_(host)` on the current stream, without waiting; `host` is page-locked and not written again."""
    if _transferring.get(target.device) and host.nbytes and not host.nbytes % 4:
        upload_by_kernel(host, target)
    else:
        target.copy_(host, non_blocking=True)


def upload_by_kernel(host: Tensor, target: Tensor) -> None:
    """The same without a copy engine; both are contiguous and have a multiple of four bytes."""
    from kvpool.kernels.copy_triton import copy_words

    with current(target.device):
        copy_words(host.reshape(-1).view(torch.int32), target.view(-1).view(torch.int32))
        _keep(host, torch.cuda.current_stream(target.device))


def _keep(host: Tensor, stream: torch.cuda.Stream) -> None:
    newest = _used.newest.setdefault(stream.cuda_stream, [])
    newest.append(host)
    if len(newest) < _BATCH:
        return
    before = _used.older.get(stream.cuda_stream)
    if before is not None:
        before[0].synchronize()  # long past
    _used.older[stream.cuda_stream] = (stream.record_event(), newest)
    _used.newest[stream.cuda_stream] = []
