"""A hash table from 64-bit keys to small numbers, in numpy arrays: vector operations find, add or remove many keys.

Every key has two buckets of eight cells. It is in the first one unless that was full, so a lookup seldom reads more than one
cache line per key. Removing needs no tombstone. The table doubles when both buckets of a new key are full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int32]

_WAYS = 8
_NONE = np.int32(-1)
_MASK_64 = (1 << 64) - 1


class HashTable:
    """Keys with a number >= 0 each. Keys must be spread evenly over 64 bits; `seed` helps if not. Not thread-safe."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._multipliers = rng.integers(1, 1 << 63, 2, np.uint64) * np.uint64(2) + np.uint64(1)
        self._no_key = rng.integers(
            0, 1 << 64, dtype=np.uint64
        )  # marks empty cells; a real key equals it only by chance
        self._allocate(4)
        self.num_keys = 0

    def _allocate(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._plain = [(multiplier, 64 - bits) for multiplier in self._multipliers.tolist()]  # for `find_one`
        self._keys = np.full((1 << bits, _WAYS), self._no_key)
        self._slots = np.full((1 << bits, _WAYS), _NONE)

    @property
    def num_bytes(self) -> int:
        """Bytes that the table takes."""
        return self._keys.nbytes + self._slots.nbytes

    def find(self, keys: Keys) -> Slots:
        """The number of each key, -1 where it has none."""
        found = self._find_in(keys, self._multipliers[0])
        missing = np.flatnonzero(found < 0)
        if len(missing):
            found[missing] = self._find_in(keys[missing], self._multipliers[1])
        return found

    def _find_in(self, keys: Keys, multiplier: np.uint64) -> Slots:
        """The same for keys in the buckets that this multiplier gives."""
        buckets = (keys * multiplier >> self._shift).view(np.int64)
        cells = (self._keys.take(buckets, axis=0) == keys[:, None]).argmax(axis=1)
        cells += buckets * _WAYS
        found: Slots = self._slots.take(cells)
        found[self._keys.take(cells) != keys] = _NONE
        return found

    def find_one(self, key: int) -> int:
        """The same for a single key, without the cost of vector operations."""
        for multiplier, shift in self._plain:
            bucket = (key * multiplier & _MASK_64) >> shift
            row = self._keys[bucket].tolist()
            if key in row and (slot := self._slots.item(bucket, row.index(key))) >= 0:
                return slot
        return -1

    def add(self, keys: Keys, slots: Slots) -> None:
        """Gives keys their numbers. None of them is in the table, and none is named twice."""
        self.num_keys += len(keys)
        while len(keys):
            buckets = self._buckets(keys)
            is_full: npt.NDArray[np.bool_] = np.all(self._slots[buckets] >= 0, axis=2)
            if is_full.all(axis=1).any():
                self._grow()
                continue
            chosen = np.where(is_full[:, 0], buckets[:, 1], buckets[:, 0])
            targets, first = np.unique(chosen, return_index=True)  # one key per bucket; the others in the next round
            cells = (self._slots[targets] < 0).argmax(axis=1)
            self._keys[targets, cells] = keys[first]
            self._slots[targets, cells] = slots[first]
            keys, slots = np.delete(keys, first), np.delete(slots, first)

    def remove(self, keys: Keys) -> None:
        """Takes out keys that are in the table."""
        buckets = self._buckets(keys)
        matches = (self._keys[buckets] == keys[:, None, None]) & (self._slots[buckets] >= 0)
        at = matches.reshape(len(keys), 2 * _WAYS).argmax(axis=1)
        cells = buckets[np.arange(len(keys)), at // _WAYS], at % _WAYS
        self._slots[cells] = _NONE
        self._keys[cells] = self._no_key  # so that a key that is added again in another cell is found there
        self.num_keys -= len(keys)

    def _buckets(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The two buckets of each key."""
        return ((keys[:, None] * self._multipliers) >> self._shift).astype(np.int64)

    def _grow(self) -> None:
        used = self._slots >= 0
        keys, slots = self._keys[used], self._slots[used]
        self._allocate(65 - int(self._shift))
        self.num_keys -= len(keys)
        self.add(keys, slots)
