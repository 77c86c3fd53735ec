"""Ranks that torchrun has started: `torchrun --nproc-per-node 2 script.py`, and the script makes an engine of two ranks.

Every process runs the script up to its first `Engine(..., tensor_parallel=2)`. Rank 0 leads, and goes on with the script. In
the other processes the call does not return: they serve the engines that rank 0 makes, and end with it. With `--nnodes` they
are on several machines; torchrun's store tells them where rank 0 listens.
"""

from __future__ import annotations

import atexit
import ipaddress
import json
import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from kvpool.engine.interfaces import address_towards
from kvpool.engine.rank_channel import Channel
from kvpool.engine.rank_meeting import MetRanks, Place, arrive
from kvpool.engine.ranks import START_SECONDS, Ranks, check_ranks, rank_devices
from kvpool.errors import ConfigError

_KEY = "kvpool/ranks"  # in the store of torchrun: where rank 0 listens


class Launch(NamedTuple):
    """This process, as torchrun has started it."""

    rank: int
    size: int
    local_rank: int  # among those of its machine
    num_here: int


def launched(size: int) -> Launch | None:
    """How torchrun started this process; None if it did not. Raises if it has not started `size` processes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = Launch(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    if found.size != size:
        raise ConfigError(
            f"tensor_parallel={size}, but torchrun has started {found.size} processes; --nproc-per-node (times --nnodes) "
            f"must be {size}"
        )
    return found


def devices_for(asked: int, device: Any) -> list[torch.device]:
    """The devices of so many ranks, which torchrun has started or nobody yet."""
    launch = launched(asked)
    return rank_devices(device, asked, asked if launch is None else launch.num_here)


class LaunchedRanks(MetRanks):
    """The processes of torchrun, for all engines of the process with rank 0. Nobody can start them again."""

    outlive_engines = True

    def _num_here(self) -> int:
        launch = launched(self.size)
        assert launch is not None
        return launch.num_here

    def _host(self) -> str:
        if self._num_here() == self.size:
            return ""
        master = os.environ["MASTER_ADDR"]
        own = address_towards(master)
        return master if ipaddress.ip_address(own).is_loopback else own

    def _call(self, place: Place) -> None:
        self._torchruns = _store()  # which ranks may ask for a while
        self._torchruns.set(_KEY, json.dumps(place))
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


def connect(launch: Launch, device: Any) -> list[Channel]:
    """The two channels of a process with another rank to rank 0."""
    place = Place(*json.loads(_store().get(_KEY)))
    if launch.num_here == launch.size:
        place = place._replace(host="")  # whatever the store says, which others may write to
    return arrive(place, launch.rank, lambda: rank_devices(device, launch.size, launch.num_here)[launch.local_rank])


def _store() -> Any:
    """What the processes of torchrun find each other by."""
    distributed: Any = torch.distributed
    return next(distributed.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))[0]
