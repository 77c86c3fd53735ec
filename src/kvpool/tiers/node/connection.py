"""Connection: a client's end of the socket to a node, and the node's region in this process."""

from __future__ import annotations

import math
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from kvpool.tiers.node import wire
from kvpool.tiers.node.region import map_region
from kvpool.tiers.node.wire import Message, Place, Verb, WireError
from kvpool.tiers.remote.remote_tier import seconds_left


class _Mapping:
    """A region in this process, for as long as somebody uses it."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory


YIELDS = 20
"""So often a client lets others run before it sleeps: an answer takes microseconds, and to be woken takes longer."""
_T = TypeVar("_T")
_regions: weakref.WeakValueDictionary[tuple[int, int], _Mapping] = weakref.WeakValueDictionary()


class LostNodeError(Exception):
    """The node is not there, or does not speak as it should; the text says why."""


class Connection:
    """One socket; one thread at a time uses it. `TimeoutError` and `LostNodeError` end it: close it then."""

    def __init__(self, directory: Path, engine: str, spaces: Iterable[bytes], timeout: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.poll()
        self._buffer = memoryview(bytearray(wire.MAX_MESSAGE))
        deadline = time.monotonic() + timeout
        try:
            self._mapping = self._greeted(directory, engine, deadline)
            for space in spaces:
                self.tell(wire.message(Verb.INTRODUCE, 0, 0, space), deadline)
        except BaseException:
            self.close()
            raise
        self.region = self._mapping.memory
        self.num_bytes = self.region.nbytes

    def _greeted(self, directory: Path, engine: str, deadline: float) -> _Mapping:
        try:
            self._socket.settimeout(seconds_left(deadline))
            self._socket.connect(str(directory / wire.SOCKET))
            if wire.peer_of(self._socket)[1] != os.getuid():
                raise LostNodeError(f"the node in {directory} belongs to another user")
            self._socket.send(wire.message(Verb.HELLO, 0, 0, engine.encode()))
            packet, fds, _, _ = socket.recv_fds(self._socket, wire.MAX_MESSAGE, 1)
            self._socket.setblocking(False)  # `_wait` knows the deadline: that saves half of the system calls
        except TimeoutError:
            raise
        except OSError as error:
            raise LostNodeError(f"no node answers in {directory} ({error.strerror or error})") from None
        try:
            answer = self._parsed(memoryview(packet), Verb.HELLO)
            if len(fds) != 1:
                raise LostNodeError("the node sent no memory")
            return _mapped(fds[0], answer.number)
        finally:
            for fd in fds:
                os.close(fd)

    def ask(self, packet: bytes, deadline: float) -> Message:
        """The answer to a message; its body is valid until the next call."""
        self.tell(packet, deadline)
        size = self._retried(lambda: self._socket.recv_into(self._buffer), select.POLLIN, deadline)
        return self._parsed(self._buffer[:size], packet[1])

    def tell(self, packet: bytes, deadline: float) -> None:
        """Sends a message."""
        seconds_left(deadline)
        self._retried(lambda: self._socket.send(packet), select.POLLOUT, deadline)

    def _retried(self, call: Callable[[], _T], event: int, deadline: float) -> _T:
        """What a call of the socket returns, as soon as it need not wait."""
        yields = 0
        while True:
            try:
                return call()
            except BlockingIOError:
                if yields < YIELDS:
                    yields += 1
                    os.sched_yield()
                else:
                    self._wait(event, deadline)
            except OSError as error:
                raise LostNodeError(f"the node left ({error.strerror or error})") from None

    def _wait(self, event: int, deadline: float) -> None:
        self._poll.register(self._socket, event)
        if not self._poll.poll(math.ceil(1000 * seconds_left(deadline))):
            raise TimeoutError

    def is_quiet(self) -> bool:
        """Whether the node is still there and has said nothing that was not asked for: then it keeps what it leased."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def slot(self, place: Place) -> memoryview:
        """The bytes of a place in the region."""
        offset, length, _ = place
        if offset + length > self.num_bytes:
            raise LostNodeError("the node named a place outside its memory")
        return self.region[offset : offset + length]

    def close(self) -> None:
        """Ends it, and with it all that it holds."""
        self._socket.close()

    @staticmethod
    def _parsed(packet: memoryview, verb: int) -> Message:
        if not packet:
            raise LostNodeError("the node ended the connection")
        try:
            answer = wire.parse(packet)
        except WireError as error:
            raise LostNodeError(str(error)) from None
        if answer.verb == Verb.REFUSED:
            raise LostNodeError(f"the node refused: {bytes(answer.body).decode(errors='replace')}")
        if answer.verb != verb:
            raise LostNodeError(f"the node answered {answer.verb} to {verb}")
        return answer


def _mapped(fd: int, num_bytes: int) -> _Mapping:
    """The region, mapped once in a process for all connections and tiers."""
    status = os.fstat(fd)
    if status.st_size < num_bytes or not num_bytes:
        raise LostNodeError(f"the node promised {num_bytes} bytes of memory and sent {status.st_size}")
    name = status.st_dev, status.st_ino
    found = _regions.get(name)
    if found is None or found.memory.nbytes != num_bytes:
        found = _regions[name] = _Mapping(map_region(fd, num_bytes))
    return found
