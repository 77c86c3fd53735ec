"""How processes that torchrun or Ray has started become the ranks of an engine, on one machine or on several.

Rank 0 listens at a socket in a private directory and, where ranks may be on other machines, at an address. It has the others
told where: its `Place`. Each comes by the way that it can: those on rank 0's machine by the socket, by which they get shared
memory, too. Both sides prove that they know the secret of the place, because rank 0 sends settings as a pickle.
"""

from __future__ import annotations

import atexit
import hmac
import ipaddress
import json
import logging
import os
import secrets
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvpool.checks import show
from kvpool.engine.rank_channel import ERROR, OK, Channel
from kvpool.engine.ranks import START_SECONDS, Ranks, rank_devices
from kvpool.errors import ConfigError, KVPoolError, RankError, SequenceStateError
from kvpool.model.loading import torch_device

_NAME = struct.Struct("<2i")  # which rank a connection is of, and which of its two channels
_PROOF_BYTES = 32
_GREETING_SECONDS = 10.0
_LOOK_SECONDS = 0.5  # how often rank 0 looks whether those that it waits for are still starting
log = logging.getLogger("kvpool")


class Place(NamedTuple):
    """Where rank 0 listens. It travels as JSON."""

    machine: str
    path: str  # of a socket for ranks on the same machine
    host: str  # for ranks on others; "": none may come from others
    port: int
    secret: str


class _Arrival(NamedTuple):
    """A rank that has come."""

    channels: dict[int, Channel]
    machine: str
    device: str


class MetRanks(Ranks, ABC):
    """Ranks that others start and that come to rank 0. A subclass says how they hear of its place."""

    @abstractmethod
    def _host(self) -> str:
        """The address at which ranks of other machines find this one; "": all are on this machine."""

    @abstractmethod
    def _call(self, place: Place) -> None:
        """Has the other ranks call `arrive` with the place."""

    def _look(self) -> None:
        """Raises if a rank cannot come any more."""

    def _start_all(self) -> None:
        with ExitStack() as listening:
            path, host = os.path.join(self._directory, "socket"), self._host()
            listeners = [listening.enter_context(closing(socket.socket(socket.AF_UNIX)))]
            listeners[0].bind(path)
            listeners[0].listen(2 * self.size)
            if host:
                listeners.append(listening.enter_context(closing(listener_at(host))))
            place = Place(
                this_machine(), path, host, listeners[-1].getsockname()[1] if host else 0, secrets.token_hex()
            )
            self._call(place)
            found = self._arrivals(listeners, bytes.fromhex(place.secret))
        others = [
            each.channels[0].socket for each in found.values() if each.channels[0].socket.family != socket.AF_UNIX
        ]
        if others:
            self.machines = [socket.gethostname(), *(found[rank].machine for rank in range(1, self.size))]
            self._address = others[0].getsockname()[0]
            self._store, self._port = _make_store(self._address)
        for rank in range(1, self.size):
            said = torch.device(found[rank].device)
            if said.type != self.devices[rank].type:
                raise ConfigError(f"{self.name(rank)} computes on {said.type}, but rank 0 on {self.devices[0].type}")
            self.devices[rank] = said
            steps, tiers = found[rank].channels[0], found[rank].channels[1]
            steps.socket.settimeout(START_SECONDS)
            tiers.socket.settimeout(self.seconds)
            watch_link(steps.socket, self.seconds)
            self._add(rank, steps, tiers)

    def _arrivals(self, listeners: list[socket.socket], secret: bytes) -> dict[int, _Arrival]:
        """Waits until every rank has come with both of its channels."""
        found: dict[int, _Arrival] = {}
        due = time.monotonic() + START_SECONDS
        try:
            while len(found) < self.size - 1 or any(len(each.channels) < 2 for each in found.values()):
                for listener in select.select(listeners, [], [], _LOOK_SECONDS)[0]:
                    connection, where = listener.accept()
                    try:
                        self._admit(connection, secret, found)
                    except (EOFError, OSError, ValueError) as error:
                        log.warning("a connection from %s is of no rank of this engine: %s", where or "here", error)
                        connection.close()
                self._look()
                if time.monotonic() > due:
                    absent = sorted(set(range(1, self.size)) - found.keys())
                    raise RankError(f"ranks {absent} did not come within {START_SECONDS:g} s")
        except BaseException:
            for each in found.values():
                for channel in each.channels.values():
                    channel.socket.close()
            raise
        return found

    def _admit(self, connection: socket.socket, secret: bytes, found: dict[int, _Arrival]) -> None:
        """Takes a connection of a rank. Raises EOFError, OSError or ValueError if it is of nobody who belongs here."""
        channel = Channel(connection, _GREETING_SECONDS)
        rank, number = _NAME.unpack(_prove(connection, secret, None))
        if not 0 < rank < self.size or number not in (0, 1):
            raise ValueError(f"there is no channel {number} of rank {rank}")
        kind, content = channel.receive()
        if kind == ERROR:
            raise RankError(f"rank {rank} failed: {content.decode(errors='replace')}")
        arrival = found.setdefault(rank, _Arrival({}, *json.loads(content)))
        if number in arrival.channels:
            raise ValueError(f"rank {rank} is there already")
        arrival.channels[number] = channel


def arrive(place: Place, rank: int, choose: Callable[[], torch.device]) -> list[Channel]:
    """Comes to rank 0 as this rank, with the device that it chooses, or says why it has none. Returns its two channels."""
    channels = []
    with ExitStack() as opened:
        for number in range(2):
            connection = _reach(place)
            opened.callback(connection.close)
            _prove(connection, bytes.fromhex(place.secret), _NAME.pack(rank, number))
            channels.append(Channel(connection, None))
            try:
                said = json.dumps([socket.gethostname(), str(choose())])
            except KVPoolError as error:
                channels[0].send(ERROR, f"{type(error).__name__} on {socket.gethostname()}: {error}".encode())
                raise
            channels[number].send(OK, said.encode())
        opened.pop_all()
    return channels


def _reach(place: Place) -> socket.socket:
    """A connection to rank 0."""
    if place.machine == this_machine() and (os.path.exists(place.path) or not place.host):
        folder = os.stat(os.path.dirname(place.path))
        if folder.st_uid != os.getuid() or folder.st_mode & 0o077:  # rank 0 sends a pickle
            raise ConfigError(f"rank 0 is said to listen at {place.path}, which others than this user can write to")
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place.path)
        return connection
    if not place.host:
        name = place.machine.partition(" ")[0]
        raise ConfigError(
            f"rank 0 is on {name} and takes ranks of its own machine only; this is {socket.gethostname()}"
        )
    try:
        connection = socket.create_connection((place.host, place.port), START_SECONDS)
    except OSError as error:
        raise ConfigError(f"rank 0 cannot be reached at {place.host}:{place.port}: {error}") from None
    connection.settimeout(START_SECONDS)  # it greets one after the other
    return connection


def _prove(connection: socket.socket, secret: bytes, name: bytes | None) -> bytes:
    """Proves to the other side that this one knows the secret, and has it do so. A rank says its name; rank 0 returns it."""
    own = secrets.token_bytes(_PROOF_BYTES)
    if name is None:
        connection.sendall(own)
        theirs, proof = _read(connection, _PROOF_BYTES), _read(connection, _PROOF_BYTES)
        name = _read(connection, _NAME.size)
        expected = hmac.digest(secret, b"rank" + own + theirs + name, "sha256")
        if not hmac.compare_digest(proof, expected):
            raise ValueError("it does not know the secret")
        connection.sendall(hmac.digest(secret, b"lead" + own + theirs, "sha256"))
        return name
    theirs = _read(connection, _PROOF_BYTES)
    connection.sendall(own + hmac.digest(secret, b"rank" + theirs + own + name, "sha256") + name)
    proof = _read(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(secret, b"lead" + theirs + own, "sha256")):
        raise ConfigError("what listens at the place of rank 0 does not know the secret")
    return name


def _read(connection: socket.socket, count: int) -> bytes:
    found = connection.recv(count, socket.MSG_WAITALL)
    if len(found) < count:
        raise EOFError("it hung up")
    return found


def this_machine() -> str:
    """Processes for which this is the same have one loopback interface. It begins with the name of the machine."""
    said = [socket.gethostname()]
    with suppress(OSError):  # elsewhere than on Linux
        said += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(said)


def address_towards(host: str) -> str:
    """The address of this machine on the way to `host`."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(there)  # which sends nothing
            return str(asked.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"this machine has no way to {host}: {error}") from None


def listener_at(host: str) -> socket.socket:
    """A socket that listens at a free port of an address."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"rank 0 cannot listen at {host}: {error}") from None


def _make_store(address: str) -> tuple[Any, int]:
    """What torch.distributed finds ranks of several machines by, and its port."""
    distributed: Any = torch.distributed
    listener = listener_at(address)
    port = listener.getsockname()[1]
    within = timedelta(seconds=START_SECONDS)
    store = distributed.TCPStore(
        address, port, None, True, within, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def watch_link(connection: socket.socket, seconds: float) -> None:
    """Has the system notice within so many seconds that the machine on the other side is gone, also while nothing is sent."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    each = max(1, int(seconds / 8))
    for name, value in (
        ("TCP_KEEPIDLE", each),
        ("TCP_KEEPINTVL", each),
        ("TCP_KEEPCNT", 6),
        ("TCP_USER_TIMEOUT", int(750 * seconds)),  # milliseconds: before a collective gives up, which knows less
    ):
        with suppress(AttributeError):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- ranks of torchrun ---------------------------------------------------------------------------------------------------

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
    """The processes of torchrun, for all engines of the process with rank 0. Nobody can start them again.

    Every process runs the script up to its first `Engine(..., tensor_parallel=2)`. Rank 0 leads, and goes on with the
    script. In the other processes the call does not return: they serve the engines that rank 0 makes, and end with it. With
    `--nnodes` they are on several machines; torchrun's store tells them where rank 0 listens.
    """

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
    if isinstance(asked, Ranks):
        found = asked
    elif launched(asked) is None:
        return Ranks(asked, device=device)
    else:
        if not _ranks:
            _ranks.append(LaunchedRanks(asked, device=device))
        found = _ranks[0]
    if found.failure is not None:
        raise found.failure
    if found.in_use:
        raise SequenceStateError("these ranks compute for another engine; close it first")
    if device is not None and torch_device(device).type != found.devices[0].type:
        raise ConfigError(f"device={show(str(device))}, but the ranks are on {found.devices[0].type}")
    return found


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
