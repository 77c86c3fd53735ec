"""The header that travels with a value: it says which key it belongs to, and whether all of it is there and right.

    magic and version (8) | key (32) | number of bytes (8) | XXH3 of key and bytes (8) | zeros (8)

XXH3 finds every flipped bit, torn write and mixed-up value at 14 GB/s, where CRC-32 takes six times as long; neither is
meant to stop somebody who forges values.
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
    """How long the value behind a header is; None if it is no header of ours or belongs to another key."""
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
        raise ConfigError("tiers that outlive a process need xxhash: pip install 'kvpool[tiers]'") from None
    return xxhash
