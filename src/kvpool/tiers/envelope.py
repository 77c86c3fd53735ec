"""The header of a stored value: it says to which key the value belongs, and lets a reader check that it is intact.

    magic and version (8) | key (32) | number of bytes (8) | XXH3 of key and bytes (8) | zeros (8)

XXH3 detects flipped bits, torn writes and mixed-up values at 14 GB/s; CRC-32 takes six times as long. Neither protects
against somebody who forges values.
"""

from __future__ import annotations

import struct
from typing import Any

from kvpool.errors import ConfigError

HEADER_BYTES = 64
_MAGIC = b"kvpool\0\1"
_FIELDS = struct.Struct("<8s32sQQ8x")


def seal(key: bytes, data: memoryview) -> bytes:
    """The header for a value."""
    return _FIELDS.pack(_MAGIC, key, data.nbytes, checksum(key, data))


def num_bytes(header: memoryview | bytes, key: bytes) -> int | None:
    """The length of the value after a header; None if it is no header of ours or belongs to another key."""
    if len(header) < HEADER_BYTES:
        return None
    magic, owner, length, _ = _FIELDS.unpack(header[:HEADER_BYTES])
    return int(length) if magic == _MAGIC and owner == key else None


def is_whole(header: memoryview | bytes, key: bytes, data: memoryview) -> bool:
    """Whether these bytes are exactly those that were sealed for this key."""
    return num_bytes(header, key) == data.nbytes and _FIELDS.unpack(header[:HEADER_BYTES])[3] == checksum(key, data)


def checksum(key: bytes, data: memoryview) -> int:
    """XXH3 (64 bits) of a value, seeded by its key."""
    return int(_xxhash().xxh3_64_intdigest(data, int.from_bytes(key[-8:], "little")))


def _xxhash() -> Any:
    try:
        import xxhash
    except ImportError:
        raise ConfigError(
            "tiers that outlive a process need xxhash: pip install '.[tiers]' in a checkout of kvpool"
        ) from None
    return xxhash
