"""MemoryTier: values in the memory of this process. It is the smallest tier: read it, test with it, copy it for your own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvpool.checks import check_int
from kvpool.config.layers import MAX_BYTES, Tier
from kvpool.errors import InvalidArgumentError
from kvpool.tiers.contract import KeyedTier, Outcome, Purged, Room
from kvpool.tiers.keys import KeyPattern


class MemoryTier(KeyedTier):
    """Keeps up to `capacity_bytes` of values, and evicts the one that was used longest ago.

    >>> tier = MemoryTier(1024)
    >>> tier.store([bytes(32)], [b"keys and values"])
    [<Outcome.OK: 0>]
    >>> buffer = bytearray(15)
    >>> tier.load([bytes(32)], [buffer]), bytes(buffer)
    ([<Outcome.OK: 0>], b'keys and values')
    """

    medium = Tier.HOST

    def __init__(self, capacity_bytes: int, *, name: str = "memory") -> None:
        super().__init__(name)
        check_int(capacity_bytes, "capacity_bytes", 0, MAX_BYTES, InvalidArgumentError)
        self._capacity = capacity_bytes
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        with self._lock:
            return [key in self._values for key in keys]

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        with self._lock:
            return [self._load_one(key, view) for key, view in zip(keys, out, strict=True)]

    def _load_one(self, key: bytes, view: memoryview) -> Outcome:
        value = self._values.get(key)
        if value is None:
            return Outcome.MISS
        if len(value) > len(view):
            return Outcome.FAILED
        self._values.move_to_end(key)
        view[: len(value)] = value
        self.left_unfilled(len(view) - len(value))
        return Outcome.OK

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        with self._lock:
            return [self._store_one(key, view) for key, view in zip(keys, data, strict=True)]

    def _store_one(self, key: bytes, view: memoryview) -> Outcome:
        if key in self._values:
            self._values.move_to_end(key)
            return Outcome.OK
        if view.nbytes > self._capacity:
            return Outcome.REFUSED
        while self._used + view.nbytes > self._capacity:
            self._used -= len(self._values.popitem(last=False)[1])
        self._values[key] = bytes(view)
        self._used += view.nbytes
        return Outcome.OK

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        with self._lock:
            return [self._remove_one(key) for key in keys]

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        with self._lock:
            found = [key for key in self._values if pattern.matches(key)]
            return Purged(sum(self._remove_one(key) == Outcome.OK for key in found), is_complete=True)

    def _remove_one(self, key: bytes) -> Outcome:
        value = self._values.pop(key, None)
        if value is None:
            return Outcome.MISS
        self._used -= len(value)
        return Outcome.OK

    def _look(self) -> Room:
        with self._lock:
            return Room(len(self._values), self._used, self._capacity)

    def _close(self) -> None:
        with self._lock:
            self._values.clear()
            self._used = 0
