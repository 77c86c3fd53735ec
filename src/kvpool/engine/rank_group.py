"""How the processes of the ranks become one group of torch.distributed, and its collectives where they share a GPU.

NCCL takes one rank for each GPU. gloo adds up tensors of a GPU, but where DTensor gathers them, it takes their addresses for
those of host memory, and the process dies. So on a shared GPU, each collective copies its tensors to the host, has gloo do
it there, and copies the result back.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpool.errors import ConfigError

HOST_BACKEND = "kvpool_host"
_GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface

_distributed: Any = torch.distributed  # which does not say that it exports some of them


class Hello(NamedTuple):
    """The first message to a rank."""

    rank: int
    size: int
    device: str
    backend: str
    directory: str  # where ranks of one machine find each other
    address: str  # of rank 0 for other machines; "": all ranks are on one machine
    port: int  # where ranks of several machines find each other
    seconds: float
    num_threads: int


def join_ranks(hello: Hello, address: str) -> Any:
    """Makes this process a rank of torch.distributed; returns the mesh that transformers divides models by.

    `address` is that of this machine for ranks on others; "" if all are here.
    """
    device = torch.device(hello.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if hello.backend == HOST_BACKEND and HOST_BACKEND not in _distributed.Backend.backend_list:
        _distributed.Backend.register_backend(HOST_BACKEND, HostGroup, devices=["cpu", "cuda"])
    within = timedelta(seconds=hello.seconds)
    store = (
        _distributed.TCPStore(hello.address, hello.port, is_master=False, timeout=within)
        if hello.port
        else _distributed.FileStore(os.path.join(hello.directory, "store"), hello.size)
    )
    with nullcontext() if hello.backend == "nccl" else gloo_at(address):
        torch.distributed.init_process_group(
            hello.backend, store=store, rank=hello.rank, world_size=hello.size, timeout=within
        )
        return _distributed.init_device_mesh(device.type, (hello.size,))


def leave_ranks() -> None:
    """The opposite of `join_ranks`."""
    with suppress(Exception):  # whatever is left of a group whose ranks are dead
        torch.distributed.destroy_process_group()


@contextmanager
def gloo_at(address: str) -> Iterator[None]:
    """Has gloo listen at an address, or with "" at the loopback interface, unless the environment names an interface."""
    if _GLOO in os.environ:
        yield
        return
    os.environ[_GLOO] = _interface(address) if address else "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO]


def _interface(address: str) -> str:
    """The name of the interface with this address."""
    import fcntl  # which not every system has

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise ConfigError(f"no interface of {socket.gethostname()} has the address {address}; name one in {_GLOO}")


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


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _done(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
    """The end of a collective, with its results in these tensors."""
    for tensor, result in zip(tensors, results, strict=True):
        if tensor is not result:
            tensor.copy_(result)
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
