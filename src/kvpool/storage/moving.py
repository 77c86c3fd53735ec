"""How bytes get from one store to another: by copies inside a memory, by a GPU's copy engines, through files.

Tiers that find blocks by key work on host memory, so whole blocks also go out of the GPU tier into host memory of the caller,
and back. Neither direction makes the CPU wait: what is read is copied at once inside the device, in the order of its stream,
so that whoever gets the block next may write it; it then crosses the link on a stream of its own. `read_out` and
`write_in` return a function that waits until the caller's memory may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.errors import InvalidArgumentError
from kvpool.kernels.copy import copy_blocks, copy_tokens
from kvpool.kernels.copy import upload as send
from kvpool.pools.arrays import Int32Array
from kvpool.storage.disk import ByteRows, DiskStore
from kvpool.storage.dma import HostSide, Places, copy_over_link, copy_places
from kvpool.storage.layout import BlockLayout
from kvpool.storage.store import BlockStore
from kvpool.storage.transfer_steps import TransferStep

_STAGING_BYTES = 1 << 26  # that a transfer between a GPU and a disk takes at a time


def move(step: TransferStep) -> None:
    """Carries out a step on the current stream. Where a disk is involved, it is over on return."""
    source, target = step.source, step.target
    if isinstance(target, DiskStore):
        _to_disk(source, target, step.src, step.dst)
    elif isinstance(source, DiskStore):
        _from_disk(source, target, step)
    else:
        store, blocks = (source, step.src) if target.device.type != "cpu" else (target, step.dst)
        host = HostSide(store.part_blocks, store.lock(blocks)) if step.is_on_link else None
        _copy(source.data, target.data, step.src, step.dst, step.num_tokens, source.layouts[step.group], host)


def _copy(
    source: Tensor,
    target: Tensor,
    src: Int32Array,
    dst: Int32Array,
    num_tokens: Int32Array | None,
    layout: BlockLayout,
    host: HostSide | None,
) -> None:
    """Copies between two tensors of blocks, on any device; `host` if one is a GPU's and the other not."""
    if source.device.type != target.device.type:
        assert host is not None
        if num_tokens is None:
            copy_over_link(source, target, src, dst, host)
            return
        # The first tokens of a block lie in many places: the whole block crosses the link, then they are picked out.
        landed = torch.empty((len(src), source.shape[1]), dtype=torch.uint8, device=target.device)
        numbers = np.arange(len(src), dtype=np.int32)
        copy_over_link(source, landed, src, numbers, host)
        source, src = landed, numbers
    device = target.device
    if num_tokens is None:
        copy_blocks(source, target, *upload(np.stack([src, dst]), device))
    else:
        assert layout.runs  # a state has no tokens of which a few could be copied
        sources, targets, tokens = upload(np.stack([src, dst, num_tokens]), device)
        copy_tokens(source, target, sources, targets, tokens, layout.runs)


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device, without making the CPU wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    send(tensor.pin_memory(), sent)
    return sent


def _to_disk(source: BlockStore | DiskStore, target: DiskStore, src: Int32Array, dst: Int32Array) -> None:
    if isinstance(source, BlockStore) and source.device.type == "cpu":
        target.write(dst, _rows(source.data, src))
        return
    for chunk in _chunks(len(src), source.block_bytes):
        staging = _staging(len(src[chunk]), source)
        if isinstance(source, DiskStore):
            source.read(src[chunk], _rows(staging))
        else:
            numbers = np.arange(len(staging), dtype=np.int32)
            copy_over_link(source.data, staging, src[chunk], numbers, HostSide(len(staging), staging.is_pinned()))
            torch.cuda.current_stream().synchronize()
        target.write(dst[chunk], _rows(staging))


def _from_disk(source: DiskStore, target: BlockStore, step: TransferStep) -> None:
    if target.device.type == "cpu" and step.num_tokens is None:
        source.read(step.src, _rows(target.data, step.dst))
        return
    for chunk in _chunks(len(step.src), source.block_bytes):
        staging = _staging(len(step.src[chunk]), target)
        source.read(step.src[chunk], _rows(staging))
        tokens = None if step.num_tokens is None else step.num_tokens[chunk]
        numbers = np.arange(len(staging), dtype=np.int32)
        host = HostSide(len(staging), staging.is_pinned())
        _copy(staging, target.data, numbers, step.dst[chunk], tokens, target.layouts[step.group], host)
        if target.device.type != "cpu":
            torch.cuda.current_stream().synchronize()


def _chunks(num_blocks: int, block_bytes: int) -> list[slice]:
    size = max(1, _STAGING_BYTES // block_bytes)
    return [slice(start, start + size) for start in range(0, num_blocks, size)]


def _staging(num_blocks: int, store: BlockStore | DiskStore) -> Tensor:
    pinned = isinstance(store, BlockStore) and store.device.type != "cpu"
    return torch.empty((num_blocks, store.block_bytes), dtype=torch.uint8, pin_memory=pinned)


def _rows(data: Tensor, blocks: Int32Array | None = None) -> list[ByteRows]:
    """The bytes of these blocks (None: of all), one array each, in place."""
    array = data.numpy()
    return [array[block] for block in (range(len(array)) if blocks is None else blocks.tolist())]


# --- whole blocks ----------------------------------------------------------------------------------------------------


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


class TakenBlocks:
    """Blocks as they were when they were taken, uint8 [block, byte] on their own device, until somebody has room for them."""

    def __init__(self, store: BlockStore, blocks: Int32Array, data: Tensor, link: torch.cuda.Stream | None) -> None:
        numbers = np.arange(len(blocks), dtype=np.int32)
        copy_blocks(store.data, data, *upload(np.stack([blocks, numbers]), store.device))
        self._data, self._link = data, link
        self.wait: Wait = _nothing if link is None else _reached(torch.cuda.current_stream(store.device))
        """Waits until they are taken."""

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return int(self._data.shape[1])

    def copy_to(self, rows: Sequence[ByteRows], numbers: Sequence[int]) -> None:
        """Copies some of them, by number, to rows of the host: page-locked ones for a GPU. They are there on return."""
        self.wait()
        if self._link is None:
            data = self._data.numpy()
            for row, number in zip(rows, numbers, strict=True):
                np.copyto(row, data[number])
            return
        with torch.cuda.stream(self._link):
            try:
                _copy_rows(self._data, np.array(numbers, np.int32), rows, to_rows=True)
            finally:  # also after an error: then some copies may be under way
                _reached(self._link)()

    def are_in(self, rows: Sequence[ByteRows], numbers: Sequence[int]) -> bool:
        """Whether rows hold just these blocks, by number."""
        if self._link is None:
            data = self._data.numpy()
            return all(np.array_equal(row, data[number]) for row, number in zip(rows, numbers, strict=True))
        with torch.cuda.stream(self._link):
            back = torch.empty((len(rows), self.block_bytes), dtype=torch.uint8, device=self._data.device)
            try:
                _copy_rows(back, np.arange(len(rows), dtype=np.int32), rows, to_rows=False)
                return all(torch.equal(back[at], self._data[number]) for at, number in enumerate(numbers))
            finally:
                _reached(self._link)()


def _copy_rows(data: Tensor, blocks: Int32Array, rows: Sequence[ByteRows], *, to_rows: bool) -> None:
    """Copies blocks of a GPU from or to page-locked rows of the host, wherever these lie, on the current stream."""
    size = np.uint64(data.shape[1])
    here: Places = np.uint64(data.data_ptr()) + blocks.astype(np.uint64) * size
    there: Places = np.array([row.ctypes.data for row in rows], np.uint64)
    if copy_places(*((here, there) if to_rows else (there, here)), np.full(len(rows), size)):
        return
    for block, row in zip(blocks.tolist(), rows, strict=True):
        source, target = data[block], torch.from_numpy(row)
        if to_rows:
            target.copy_(source, non_blocking=True)
        else:
            source.copy_(target, non_blocking=True)


def write_in(
    store: BlockStore, blocks: Int32Array, rows: Tensor | Sequence[ByteRows], link: torch.cuda.Stream | None
) -> Wait:
    """Copies rows of the host, page-locked where the store is on a GPU, into blocks.

    They are uint8 [block, byte], or an array for each block. These may lie anywhere: a GPU's copy engines take them on
    `link`, and what follows on the current stream comes after that.
    """
    if isinstance(rows, Tensor):
        numbers = np.arange(len(blocks), dtype=np.int32)
        copy_blocks(rows, store.data, *upload(np.stack([numbers, blocks]), store.device))
        return _nothing if link is None else _reached(torch.cuda.current_stream(store.device))
    if link is None:
        data = store.data.numpy()
        for block, row in zip(blocks.tolist(), rows, strict=True):
            np.copyto(data[block], row)
        return _nothing
    current = torch.cuda.current_stream(store.device)
    link.wait_stream(current)
    with torch.cuda.stream(link):
        _copy_rows(store.data, blocks, rows, to_rows=False)
        wait = _reached(link)
    current.wait_stream(link)
    return wait


def check_rows(rows: Tensor | Sequence[ByteRows], num_blocks: int, store: BlockStore) -> None:
    """Refuses memory that cannot hold these blocks."""
    if not isinstance(rows, Tensor):
        if len(rows) != num_blocks or any(row.nbytes != store.block_bytes for row in rows):
            raise InvalidArgumentError(
                f"{num_blocks} blocks are written from as many rows of {store.block_bytes} bytes, got "
                f"{[row.nbytes for row in rows][:8]}"
            )
        return
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
