"""Small arrays from the host to a GPU. Copy engines work in order: behind a long transfer, a step would wait for its inputs.

While such a transfer is under way, a kernel reads the page-locked memory instead.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor

from kvpool.kernels.copying.current_device import current

_BATCH = 64  # uploads by kernels, after which an event tells whether those before them are done


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
    from kvpool.kernels.copying.upload_triton import copy_words

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
