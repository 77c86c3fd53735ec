"""StepMemory: shared memory in which rank 0 writes the messages of steps, so that only their places go over sockets.

A step of 256 sequences has a message of 90 kB. Writing it once for all ranks takes a fraction of the time of sending it to
each. The memory has a few slots, which are used in turn. A rank copies a message as soon as it hears of it, and notes that.
If a slot is not free yet, or too small, the message goes over the sockets, as it does to ranks on other machines. No file
holds the memory: it is gone with the last process that has it.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from kvpool.pools.arrays import Int32Array

SLOTS = 4  # rank 0 is never more than two steps ahead
SLOT_BYTES = 4 << 20  # pages that no message needs are never allocated
_HEAD_BYTES = 4096
_NEVER = 1 << 62  # read by a rank that does not share the memory: nobody waits for it


class StepMemory:
    """The memory of `size` ranks, on this one. Rank 0 makes it and gives its `descriptor` to those that it shares it with."""

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
