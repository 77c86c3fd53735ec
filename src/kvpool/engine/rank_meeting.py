"""How processes that torchrun or Ray has started become the ranks of an engine, on one machine or on several.

Rank 0 listens at a socket in a private directory and, where ranks may be on other machines, at an address. It has the others
told where: its `Place`. Each comes by the way that it can: those on rank 0's machine by the socket, by which they get shared
memory, too. Both sides prove that they know the secret of the place, because rank 0 sends settings as a pickle.
"""

from __future__ import annotations

import hmac
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
from typing import Any, NamedTuple

import torch

from kvpool.engine.interfaces import this_machine
from kvpool.engine.rank_channel import ERROR, OK, Channel
from kvpool.engine.ranks import START_SECONDS, Ranks
from kvpool.errors import ConfigError, KVPoolError, RankError

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
