"""Scattered blocks over the link between a GPU and the host, by the GPU's copy engines: no kernel, no staging.

The driver takes a whole list of copies in one call since CUDA 12.8 (`cuMemcpyBatchAsync`). Where it has no such call, each
run of blocks is one `copy_`.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.errors import TransferError
from kvpool.kernels.layout import widest_view
from kvpool.pools.arrays import Int32Array

Places = npt.NDArray[np.uint64]
_IN_STREAM_ORDER = 1
_thread = threading.local()
_BATCH = 64  # copies in a call: the first ones move while the driver takes the next


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: when sources are read, where both sides are (not said: the driver knows), flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class HostSide(NamedTuple):
    """The host's side of copies: CUDA refuses one that goes beyond `part_blocks` blocks, which were locked together."""

    part_blocks: int
    is_locked: bool  # whether all blocks of the copies are page-locked


def copy_over_link(source: Tensor, target: Tensor, src: Int32Array, dst: Int32Array, host: HostSide) -> None:
    """`target[dst[i]] = source[src[i]]` on the current stream; one of the two, uint8 [block, byte], is on a GPU.

    The driver takes no batches on the default stream: be on another.
    """
    starts, lengths = runs(src, dst, (dst if source.is_cuda else src) // host.part_blocks)
    if host.is_locked and len(starts) > 1:
        row = np.uint64(source.shape[1])
        sources: Places = np.uint64(source.data_ptr()) + src[starts].astype(np.uint64) * row
        targets: Places = np.uint64(target.data_ptr()) + dst[starts].astype(np.uint64) * row
        if copy_places(sources, targets, lengths.astype(np.uint64) * row):
            return
    source, target = widest_view(source), widest_view(target)
    for a, b, n in zip(src[starts].tolist(), dst[starts].tolist(), lengths.tolist(), strict=True):
        target[b : b + n].copy_(source[a : a + n], non_blocking=True)


def copy_places(sources: Places, targets: Places, sizes: Places) -> bool:
    """Copies bytes from addresses to addresses on the current stream, which is not the default one.

    One side is page-locked memory of the host, the other a GPU's. False, and nothing done: the driver is too old for it.
    """
    if (batch := _driver_call()) is None:
        return False
    if not getattr(_thread, "has_context", False):
        # The driver refuses calls of a thread that the runtime has given no context; it does so for the first event.
        torch.cuda.current_stream().record_event()
        _thread.has_context = True
    for at in range(0, len(sizes), _BATCH):
        part = slice(at, at + _BATCH)
        _copy_batch(batch, sources[part], targets[part], sizes[part])
    return True


def runs(
    src: Int32Array, dst: Int32Array, parts: Int32Array | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where runs of blocks start that follow each other on both sides (in the same of `parts`), and how long they are.

    >>> starts, lengths = runs(np.array([4, 5, 6, 9], np.int32), np.array([0, 1, 7, 8], np.int32))
    >>> starts.tolist(), lengths.tolist()
    ([0, 2, 3], [2, 1, 1])
    """
    ends = (np.diff(src) != 1) | (np.diff(dst) != 1)
    if parts is not None:
        ends |= np.diff(parts) != 0
    starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
    return starts, np.diff(np.concatenate([starts, [len(src)]]))


@cache
def _driver_call() -> Any:
    """cuMemcpyBatchAsync, or None where the driver is older. Its first form, with `failIdx`, is in every later driver too."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None


def _copy_batch(call: Any, sources: Places, targets: Places, sizes: Places) -> None:
    attributes, first, failed = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
    status = call(
        _pointer(targets),
        _pointer(sources),
        _pointer(sizes),
        ctypes.c_size_t(len(sizes)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status:
        raise TransferError(f"the CUDA driver refused a batch of {len(sizes)} copies with error {status}")


def _pointer(array: Places) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
