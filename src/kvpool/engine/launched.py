"""Ranks that torchrun has started: `torchrun --nproc-per-node 2 script.py`, and the script makes an engine of two ranks.

Every process runs the script up to its first `Engine(..., tensor_parallel=2)`. Rank 0 leads, and goes on with the script. In
the other processes the call does not return: they serve the engines that rank 0 makes, and end with it.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from kvpool.engine.ranks import START_SECONDS, Channel, Ranks, check_ranks
from kvpool.errors import ConfigError

_KEY = "kvpool/ranks"  # in the store of torchrun: where rank 0 listens
_NAME = struct.Struct("<2i")  # the first bytes of a connection: which rank, and which of its channels


class Launch(NamedTuple):
    """This process, as torchrun has started it."""

    rank: int
    size: int


def launched(size: int) -> Launch | None:
    """How torchrun started this process; None if it did not. Raises if it has not started `size` processes, all here."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    found = Launch(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    if found.size != size:
        raise ConfigError(
            f"tensor_parallel={size}, but torchrun has started {found.size} processes; use --nproc-per-node {size}"
        )
    if environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        raise ConfigError("torchrun has started processes on several machines; all ranks must be on one machine")
    return found


class LaunchedRanks(Ranks):
    """The processes of torchrun, for all engines of the process with rank 0. Nobody can start them again."""

    outlive_engines = True

    def _start_all(self) -> None:
        path = os.path.join(self._directory, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(2 * self.size)
            listener.settimeout(START_SECONDS)
            self._store = _store()  # which ranks may ask for a while
            self._store.set(_KEY, path)
            found: dict[tuple[int, int], Channel] = {}
            while len(found) < 2 * (self.size - 1):
                connection = listener.accept()[0]
                connection.settimeout(START_SECONDS)
                found[_NAME.unpack(connection.recv(_NAME.size, socket.MSG_WAITALL))] = Channel(
                    connection, START_SECONDS
                )
        for rank in range(1, self.size):
            self._add(rank, found[rank, 0], found[rank, 1])
        atexit.register(self.close)


_ranks: list[LaunchedRanks] = []  # the only ones of this process


def as_ranks(asked: Any, device: Any) -> Ranks:
    """What `tensor_parallel` means: ranks that are there, those of torchrun, or a number of ranks, which are started."""
    if not isinstance(asked, Ranks):
        if launched(asked) is None:
            return Ranks(asked, device=device)
        if not _ranks:
            _ranks.append(LaunchedRanks(asked, device=device))
        asked = _ranks[0]
    return check_ranks(asked, device)


def connect(launch: Launch) -> list[Channel]:
    """The two channels of a process with another rank to rank 0."""
    path = _store().get(_KEY).decode()
    folder = os.stat(os.path.dirname(path))
    if folder.st_uid != os.getuid() or folder.st_mode & 0o077:  # rank 0 sends a pickle
        raise ConfigError(f"rank 0 is said to listen at {path}, which others than this user can write to")
    channels = []
    for number in range(2):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.sendall(_NAME.pack(launch.rank, number))
        channels.append(Channel(connection, None))
    return channels


def _store() -> Any:
    """What the processes of torchrun find each other by."""
    distributed: Any = torch.distributed
    return next(distributed.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))[0]
