"""Whole blocks as bytes: out of the GPU tier into host memory of the caller, and back into blocks.

Tiers that find blocks by key work on host memory. Neither direction makes the CPU wait: what is read is copied at once
inside the device, in the order of its stream, so that whoever gets the block next may write it; it then crosses the link
on a stream of its own. Each function returns a function that waits until the caller's memory may be used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvpool.errors import InvalidArgumentError
from kvpool.kernels.copy import copy_blocks
from kvpool.pools.arrays import Int32Array
from kvpool.storage.moving import upload
from kvpool.storage.store import BlockStore

Wait = Callable[[], None]


def read_out(store: BlockStore, blocks: Int32Array, out: Tensor, link: torch.cuda.Stream | None) -> Wait:
    """Copies blocks into `out`, uint8 [block, byte] on the host; pinned where `link`, the stream to use, is given."""
    numbers = np.arange(len(blocks), dtype=np.int32)
    if link is None:
        copy_blocks(store.data, out, torch.from_numpy(blocks), torch.from_numpy(numbers))
        return _nothing
    device = store.device
    taken = torch.empty((len(blocks), store.block_bytes), dtype=torch.uint8, device=device)
    copy_blocks(store.data, taken, *upload(np.stack([blocks, numbers]), device))
    link.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(link):
        out.copy_(taken, non_blocking=True)
        taken.record_stream(link)
        return _reached(link)


def write_in(store: BlockStore, blocks: Int32Array, rows: Tensor) -> Wait:
    """Copies `rows`, uint8 [block, byte] on the host, pinned where the store is on a GPU, into blocks."""
    numbers = np.arange(len(blocks), dtype=np.int32)
    copy_blocks(rows, store.data, *upload(np.stack([numbers, blocks]), store.device))
    if store.device.type == "cpu":
        return _nothing
    return _reached(torch.cuda.current_stream(store.device))


def check_rows(rows: Tensor, num_blocks: int, store: BlockStore) -> None:
    """Refuses memory that cannot hold these blocks."""
    shape = (num_blocks, store.block_bytes)
    if tuple(rows.shape) != shape or rows.dtype != torch.uint8 or rows.is_cuda or not rows.is_contiguous():
        raise InvalidArgumentError(
            f"blocks are read and written as contiguous uint8 {shape} on the host, got {rows.dtype} {tuple(rows.shape)} "
            f"on {rows.device}"
        )


def _reached(stream: torch.cuda.Stream) -> Wait:
    """Waits for what the stream was given so far."""
    event = stream.record_event()
    return lambda: event.synchronize()


def _nothing() -> None:
    """There is nothing to wait for."""
