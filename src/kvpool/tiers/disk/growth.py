"""Growth: makes slabs while the capacity allows, and gives one up when slots of another size are worth more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.tiers.disk.catalog import Catalog, SizeClass
from kvpool.tiers.disk.slab import Slab, slab_bytes

SLABS_PER_DIRECTORY = 64
MAX_SLAB_BYTES = 16 * 2**30
RETRY_SECONDS = 5.0
"""After a disk refused to hold a new slab, it is not asked again for so long."""


class Growth:
    """Sees to free slots. The files are made outside of the catalog's lock, so that look-ups never wait for them."""

    def __init__(
        self,
        directory: Path,
        catalog: Catalog,
        lock: threading.Lock,
        capacity_bytes: int,
        *,
        direct: bool,
        refuse: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._lock = lock
        self._capacity = capacity_bytes
        self._direct = direct
        self._refuse = refuse
        self._growing = threading.Lock()
        self._next_try = 0.0

    def make_room(self, slot_bytes: int) -> None:
        """Sees to a free slot by making a slab, unless none may be made: then the value used longest ago has to go."""
        with self._growing:
            while True:
                with self._lock:
                    size = self._catalog.class_for(slot_bytes)
                    if size.free:
                        return
                    num_slots = self._slots_of_a_new_slab(size, self._capacity - self._catalog.allocated_bytes)
                    if not num_slots and not self._give_up_a_slab(size):
                        return
                if num_slots:
                    self._add_slab(size, num_slots)
                    return

    def _slots_of_a_new_slab(self, size: SizeClass, room: int) -> int:
        """How many slots a new slab of this class has; 0 if the capacity is used up."""
        fixed = slab_bytes(size.slot_bytes, 0)
        per_slot = slab_bytes(size.slot_bytes, 1) - fixed
        goal = min(self._capacity // SLABS_PER_DIRECTORY, MAX_SLAB_BYTES)
        return max(0, min(max(1, (goal - fixed) // per_slot), (room - fixed) // per_slot))

    def _give_up_a_slab(self, size: SizeClass) -> bool:
        """Frees capacity that slots of another size hold, if all in them is older than what would go otherwise."""
        number = self._catalog.coldest_slab(size)
        if number is None or slab_bytes(size.slot_bytes, 1) > self._capacity:
            return False
        retire(self._catalog, number).delete()
        return True

    def _add_slab(self, size: SizeClass, num_slots: int) -> None:
        if time.monotonic() < self._next_try:
            return
        try:
            slab = Slab.create(self._directory, size.slot_bytes, num_slots, direct=self._direct)
        except OSError as error:
            self._next_try = time.monotonic() + RETRY_SECONDS
            self._refuse(f"no new slab: {error.strerror or error}")
            return
        with self._lock:
            self._catalog.add(slab)


def retire(catalog: Catalog, number: int) -> Slab:
    """Takes a slab out of the catalog; its files are closed when nobody reads them any more."""
    slab = catalog.retire(number)
    if not slab.num_jobs:
        slab.close()
    return slab
