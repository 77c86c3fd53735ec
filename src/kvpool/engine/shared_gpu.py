"""Collectives between ranks that share one GPU: through host memory, by gloo.

NCCL takes one rank for each GPU. gloo adds up tensors of a GPU, but where DTensor gathers them, it takes their addresses for
those of host memory, and the process dies. So each collective copies its tensors to the host and the result back.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

HOST_BACKEND = "kvpool_host"

_distributed: Any = torch.distributed  # which does not say that it exports some of them
_c10d: Any = torch._C._distributed_c10d


class HostGroup(_distributed.ProcessGroup):  # type: ignore[misc]  # of type Any
    """A process group of torch.distributed with the collectives that a divided model uses. They are over on return."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._gloo = _distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # the name is of torch
        return HOST_BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Adds up, or what `opts` say."""
        held = _on_host(tensors)
        self._gloo.allreduce(held, opts or _distributed.AllreduceOptions()).wait()
        return _done(tensors, held)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """Gives all ranks what one has."""
        held = _on_host(tensors)
        self._gloo.broadcast(held, opts).wait()
        return _done(tensors, held)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Puts the tensors of all ranks one behind the other. Older torch asks for it by this name, newer takes it, too."""
        for output, own in zip(outputs, _on_host(inputs), strict=True):
            parts = [torch.empty_like(own) for _ in range(self.size())]
            self._gloo.allgather([parts], [own]).wait()
            output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))
        return _done(outputs, outputs)

    def barrier(self, opts: Any = None) -> Any:
        """Waits for all ranks."""
        self._gloo.barrier().wait()
        return _done([], [])


def register() -> None:
    """Lets `init_process_group` make such groups."""
    if HOST_BACKEND not in _distributed.Backend.backend_list:
        _distributed.Backend.register_backend(HOST_BACKEND, HostGroup, devices=["cpu", "cuda"])


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _done(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
    """The end of a collective, with its results in these tensors."""
    for tensor, result in zip(tensors, results, strict=True):
        if tensor is not result:
            tensor.copy_(result)
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return _c10d._create_work_from_future(future)
