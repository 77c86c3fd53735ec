"""Channel: messages between rank 0 and another rank. Ranks on one machine share memory for the messages of steps.

A message is a length, a letter, and bytes. The message of a step goes through `StepMemory` where both sides have it, and only
its place over the socket; to other machines the whole message goes over the socket.
"""

from __future__ import annotations

import socket
import struct

from kvpool.engine.step_memory import StepMemory
from kvpool.pools.arrays import Int32Array

_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<qi")  # of a step in shared memory: its number, and how many integers it has
# What a message is, in its first byte
STEP, COPIES, TIERS, ORDER, END, ERROR, OK = b"S", b"C", b"T", b"O", b"E", b"X", b"K"
_STEP_AT = b"A"


class Channel:
    """One side of a socket between rank 0 and another rank. Of `memory`, both sides have the same."""

    def __init__(self, connection: socket.socket, seconds: float | None) -> None:
        self.socket = connection
        self.socket.settimeout(seconds)
        self.memory: StepMemory | None = None

    def send(self, kind: bytes, content: bytes | memoryview = b"") -> None:
        self.socket.sendall(b"".join((_LENGTH.pack(len(content)), kind, content)))

    def send_step(self, message: Int32Array, number: int | None) -> None:
        """Sends the message of a step, which has this number in the shared memory; None: it is not there."""
        if self.memory is None or number is None:
            self.send(STEP, message.view("u1").data)
        else:
            self.send(_STEP_AT, _PLACE.pack(number, len(message)))

    def receive(self) -> tuple[bytes, bytearray]:
        """The next message; raises EOFError if the other side is gone."""
        head = self._read(_LENGTH.size + 1)
        kind, content = bytes(head[-1:]), self._read(_LENGTH.unpack_from(head)[0])
        if kind == _STEP_AT:
            assert self.memory is not None
            return STEP, self.memory.read(*_PLACE.unpack(content))
        return kind, content

    def give_memory(self, memory: StepMemory, rank: int) -> None:
        """Shares memory with that rank, which calls `take_memory`, if it is on this machine."""
        if memory.descriptor < 0 or self.socket.family != socket.AF_UNIX:
            self.socket.sendall(b"-")
            return
        memory.share(rank)
        socket.send_fds(self.socket, [b"+"], [memory.descriptor])
        self.memory = memory

    def take_memory(self, size: int, rank: int) -> None:
        """The other side of `give_memory`, on that rank."""
        descriptors = socket.recv_fds(self.socket, 1, 1)[1]
        self.memory = StepMemory(size, rank, descriptors[0]) if descriptors else None

    def _read(self, count: int) -> bytearray:
        read = bytearray(count)
        view = memoryview(read)
        while len(view):
            got = self.socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return read
