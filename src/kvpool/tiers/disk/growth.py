"""Growth: makes slabs while the capacity allows, and gives one up when slots of another size are worth more."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvpool.tiers.disk.catalog import SizeClass
from kvpool.tiers.disk.disk_state import State
from kvpool.tiers.disk.slab import Slab, slab_bytes

MAX_SLABS, FEW_SLABS = 64, 16
SMALL_SLAB_BYTES, MAX_SLAB_BYTES = 2**28, 16 * 2**30
"""A directory has 64 slabs of one size at most, unless they would be very large, and 16 if they would be small otherwise:
values that lie together are read faster, and more slabs can change their size more often."""

RETRY_SECONDS = 5.0
"""After a disk refused to hold a new slab, it is not asked again for so long."""


class Growth:
    """Sees to free slots. The files are made outside of the catalog's lock, so that look-ups never wait for them."""

    def __init__(self, directory: Path, state: State, capacity_bytes: int, *, direct: bool) -> None:
        self._directory = directory
        self._state = state
        self._capacity = capacity_bytes
        self._direct = direct
        self._growing = threading.Lock()
        self._next_try = 0.0

    def make_room(self, slot_bytes: int) -> None:
        """Sees to a free slot by making a slab, unless none may be made: then the value used longest ago has to go."""
        with self._growing:
            while True:
                with self._state.lock:
                    size = self._state.catalog.class_for(slot_bytes)
                    if size.free:
                        return
                    num_slots = self._slots_of_a_new_slab(size, self._capacity - self._state.catalog.allocated_bytes)
                    given_up = None if num_slots else self._given_up(size)
                if given_up is None:
                    if num_slots:
                        self._add_slab(size, num_slots)
                    return
                given_up.delete()
                self._state.end_job(given_up)

    def _slots_of_a_new_slab(self, size: SizeClass, room: int) -> int:
        """How many slots a new slab of this class has; 0 if the capacity is used up."""
        fixed = slab_bytes(size.slot_bytes, 0)
        per_slot = slab_bytes(size.slot_bytes, 1) - fixed
        small = min(self._capacity // FEW_SLABS, SMALL_SLAB_BYTES)
        goal = min(max(self._capacity // MAX_SLABS, small), MAX_SLAB_BYTES)
        return max(0, min(max(1, (goal - fixed) // per_slot), (room - fixed) // per_slot))

    def _given_up(self, size: SizeClass) -> Slab | None:
        """A slab whose slots of another size give way, if all in them is older than what would go otherwise."""
        number = self._state.catalog.coldest_slab(size)
        if number is None or slab_bytes(size.slot_bytes, 1) > self._capacity:
            return None
        return self._state.retire(number)

    def _add_slab(self, size: SizeClass, num_slots: int) -> None:
        if time.monotonic() < self._next_try:
            return
        try:
            slab = Slab.create(self._directory, size.slot_bytes, num_slots, direct=self._direct)
        except OSError as error:
            self._next_try = time.monotonic() + RETRY_SECONDS
            self._state.refuse(f"no new slab: {error.strerror or error}")
            return
        with self._state.lock:
            self._state.catalog.add(slab)
