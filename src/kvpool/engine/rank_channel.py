"""Channel: messages between rank 0 and another rank. Ranks on one machine share memory for the messages of steps.

A message is a length, a letter, and bytes. The message of a step goes through `StepMemory` where both sides have it, and only
its place over the socket; to other machines the whole message goes over the socket.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct

import numpy as np

from kvpool.pools.arrays import Int32Array

_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<qi")  # of a step in shared memory: its number, and how many integers it has
# What a message is, in its first byte
STEP, COPIES, TIERS, ORDER, END, ERROR, OK = b"S", b"C", b"T", b"O", b"E", b"X", b"K"
_STEP_AT = b"A"

SLOTS = 4  # rank 0 is never more than two steps ahead
SLOT_BYTES = 4 << 20  # pages that no message needs are never allocated
_HEAD_BYTES = 4096
_NEVER = 1 << 62  # read by a rank that does not share the memory: nobody waits for it


class StepMemory:
    """Shared memory of `size` ranks for the messages of steps, on this one. Rank 0 makes it and shares its `descriptor`.

    A step of 256 sequences has a message of 90 kB. Writing it once for all ranks takes a fraction of the time of sending it
    to each. The memory has a few slots, which are used in turn. A rank copies a message as soon as it hears of it, and notes
    that. If a slot is not free yet, or too small, the message goes over the sockets, as it does to ranks on other machines.
    No file holds the memory: it is gone with the last process that has it.
    """

    def __init__(self, size: int, rank: int = 0, descriptor: int | None = None) -> None:
        self.descriptor = -1  # there is none
        self._rank = rank
        is_new = descriptor is None
        if is_new and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("kvpool-steps")
            os.truncate(descriptor, _HEAD_BYTES + SLOTS * SLOT_BYTES)
        if descriptor is None:
            return
        self.descriptor = descriptor
        memory = mmap.mmap(descriptor, _HEAD_BYTES + SLOTS * SLOT_BYTES)
        # By rank: how many messages it has read
        self._read = memoryview(memory)[: 8 * (size - 1)].cast("q")
        data = np.frombuffer(memory, np.int32, offset=_HEAD_BYTES)
        self._slots: list[Int32Array] = list(data.reshape(SLOTS, SLOT_BYTES // 4))
        self._number = 0
        for each in range(size - 1) if is_new else ():
            self._read[each] = _NEVER

    def share(self, rank: int) -> None:
        """From now on, a slot is free once this rank has read it."""
        self._read[rank - 1] = self._number

    def take(self, count: int) -> tuple[int, Int32Array] | None:
        """The number of the next message and `count` integers for it; None: send it over the sockets."""
        number = self._number
        if self.descriptor < 0 or 4 * count > SLOT_BYTES or number - min(self._read) >= SLOTS:
            return None
        self._number = number + 1
        return number, self._slots[number % SLOTS][:count]

    def read(self, number: int, count: int) -> bytearray:
        """A copy of a message, on another rank; its slot is free for this rank then."""
        found = bytearray(self._slots[number % SLOTS][:count].data)
        self._read[self._rank - 1] = number + 1
        return found

    def close(self) -> None:
        """Gives the memory back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self._read, self._slots


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
