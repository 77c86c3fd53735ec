"""Which node of a Redis or Valkey cluster has a key: 16,384 hash slots, divided among the nodes."""

from __future__ import annotations

from binascii import crc_hqx
from bisect import bisect_left
from typing import Any

NUM_SLOTS = 16384


def slot_of(tag: bytes) -> int:
    """The slot of a key whose hash tag is `tag`.

    >>> slot_of(b"123456789")  # CRC-16/XMODEM, 0x31C3
    12739
    """
    return crc_hqx(tag, 0) % NUM_SLOTS


class SlotMap:
    """Slots to addresses, from the answer to CLUSTER SLOTS."""

    def __init__(self, answer: list[list[Any]], asked: str) -> None:
        """`asked` is the host that answered: a node that does not know its own address means itself."""
        ranges = sorted((int(last), int(first), master) for first, last, master, *_ in answer)
        self._lasts = [last for last, _, _ in ranges]
        self._firsts = [first for _, first, _ in ranges]
        self._addresses = [((master[0] or b"").decode() or asked, int(master[1])) for _, _, master in ranges]

    @property
    def addresses(self) -> set[tuple[str, int]]:
        """All masters."""
        return set(self._addresses)

    def address(self, slot: int) -> tuple[str, int] | None:
        """The master of a slot; None if nobody serves it."""
        at = bisect_left(self._lasts, slot)
        return self._addresses[at] if at < len(self._lasts) and self._firsts[at] <= slot else None
