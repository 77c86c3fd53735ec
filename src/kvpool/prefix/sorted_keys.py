"""Sorted strings: the children of a prefix-tree node that begin with the same token. A list by itself, to stay small."""

from __future__ import annotations

from bisect import bisect_left, insort


class SortedKeys(list[list[bytes]]):
    """Sorted strings in chunks of bounded length."""

    __slots__ = ()

    CHUNK = 512

    def _chunk_of(self, key: bytes) -> int:
        """The index of the chunk that holds `key` or would hold it."""
        if len(self) == 1:
            return 0
        return min(bisect_left(self, key, key=_last), len(self) - 1)

    def add(self, key: bytes) -> None:
        at = self._chunk_of(key)
        chunk = self[at]
        insort(chunk, key)
        if len(chunk) > self.CHUNK:
            half = len(chunk) // 2
            self[at : at + 1] = [chunk[:half], chunk[half:]]

    def remove(self, key: bytes) -> None:  # type: ignore[override]
        at = self._chunk_of(key)
        chunk = self[at]
        del chunk[bisect_left(chunk, key)]
        if not chunk:
            del self[at]

    def neighbours(self, query: bytes) -> list[bytes]:
        """The keys just before and just after the place of `query`."""
        at = self._chunk_of(query)
        chunk = self[at]
        place = bisect_left(chunk, query)
        found = chunk[max(0, place - 1) : place + 1]
        if place == 0 and at > 0:
            found.append(self[at - 1][-1])
        return found


def _last(chunk: list[bytes]) -> bytes:
    return chunk[-1]
