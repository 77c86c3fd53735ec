"""What a node and its clients say to each other: one message is one packet of a Unix socket (SOCK_SEQPACKET).

    version (1) | verb (1) | how many keys (2) | number (8) | body

A client asks one thing at a time and waits for the answer, which has the same verb. `RELEASE`, `DOUBT` and `INTRODUCE` have
no answer. `REFUSED` answers a message that is wrong: its body says why, and the connection ends.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import struct
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvpool.errors import InvalidArgumentError
from kvpool.tiers.contract import KEY_BYTES, Worth
from kvpool.tiers.keys import SPACE_BYTES, TAG_BYTES, KeyPattern
from kvpool.tiers.options import NAMESPACE

VERSION = 1
MAX_KEYS = 1024
"""In one message; a client divides longer lists."""
MAX_MESSAGE = 64 << 10
MAX_NAME = 64
ANSWERED_LATE = 10.0
"""Seconds: the longest time that a question may take at tiers behind the node."""

SOCKET, REGION, SLOTS, LOCK = "socket", "region", "slots", "lock"
"""The files of a node, all in one directory."""
DEFAULT_NAME = "default"
_LONGEST_PATH = 107
_LENGTH_BITS, _SECONDS_BITS, _PRIORITY_BITS = 34, 6, 8
_HEAD = struct.Struct("<BBHQ")
_PATTERN = struct.Struct(f"<?{SPACE_BYTES}sB{TAG_BYTES}s")
_PEER = struct.Struct("iII")


class Verb(IntEnum):
    """What a message is about. `number` and `body` of the question -> of the answer."""

    REFUSED = 0
    HELLO = 1
    """The engine's name -> the region's size, and its file descriptor."""
    INTRODUCE = 2
    """A fingerprint as JSON; no answer."""
    FIND = 3
    """Milliseconds, keys -> a byte for each: 1 if it is there."""
    LEASE = 4
    """Milliseconds, keys and sizes of buffers -> a lease, and a place for each key. Until `RELEASE` the values stay."""
    RESERVE = 5
    """Keys and `rated` lengths -> a reservation, and a place for each key."""
    COMMIT = 6
    """A reservation, checksums of all its places -> a byte for each: 1 if the value is there. Before, nobody finds it."""
    RELEASE = 7
    """A lease; no answer."""
    DOUBT = 8
    """Keys whose bytes did not match; the node looks itself. No answer."""
    REMOVE = 9
    """Milliseconds, keys -> a byte for each: 1 if it was there."""
    PURGE = 10
    """Milliseconds, a pattern -> how many left; a byte: 1 if nothing is left."""
    LIST = 11
    """Where to go on -> where to go on (0: the end), keys and lengths."""
    STATS = 12
    """-> JSON."""


class Message(NamedTuple):
    """A message that has come; `body` is valid until the next one is read."""

    verb: int
    num: int
    number: int
    body: memoryview


Place: TypeAlias = tuple[int, int, int]
"""Where in the region a value lies, how long it is, and its checksum (`envelope.checksum`)."""

ABSENT: Place = (2**64 - 1, 0, 0)
"""The place of a value that is not there, or of one that gets no slot."""
PRESENT: Place = (2**64 - 1, 1, 0)
"""Answers a reservation of a key that is there already."""
_PLACE = struct.Struct("<QQQ")
PLACE_BYTES = _PLACE.size


class WireError(Exception):
    """A message is not as it must be; the text says why."""


def message(verb: Verb, count: int = 0, number: int = 0, body: bytes = b"") -> bytes:
    """A message as it is sent."""
    return _HEAD.pack(VERSION, verb, count, number) + body


def parse(packet: memoryview) -> Message:
    """Takes a packet apart."""
    if len(packet) < _HEAD.size:
        raise WireError(f"a message has at least {_HEAD.size} bytes, and this one {len(packet)}")
    version, verb, count, number = _HEAD.unpack_from(packet)
    if version != VERSION:
        raise WireError(f"it speaks version {version} of the protocol, and this kvpool version {VERSION}")
    return Message(verb, count, number, packet[_HEAD.size :])


def keys_in(found: Message, *, with_numbers: bool = False) -> bytes:
    """The keys of a message, side by side. It holds nothing else, or a number for each: `numbers_behind` reads those."""
    size = KEY_BYTES * _checked_count(found.num)
    _check_size(found, size + 8 * found.num * with_numbers)
    return bytes(found.body[:size])


def unpacked(keys: bytes) -> tuple[bytes, ...]:
    """Keys that lie side by side, one by one."""
    return _keys_of(len(keys) // KEY_BYTES).unpack(keys)


@functools.lru_cache(2 * MAX_KEYS)
def _keys_of(count: int) -> struct.Struct:
    return struct.Struct("<" + f"{KEY_BYTES}s" * count)


def numbers_behind(found: Message) -> tuple[int, ...]:
    """The numbers behind the keys of a message."""
    return struct.unpack_from(f"<{found.num}Q", found.body, KEY_BYTES * found.num)


def with_numbers(keys: Sequence[bytes], numbers: Iterable[int]) -> bytes:
    """Keys and a number for each, as a body."""
    return b"".join(keys) + array("Q", numbers).tobytes()


def rated(length: int, worth: Worth) -> int:
    """The length of a value and what is known of it as one number: depth (16 bits) | priority (8) | time (6) | length (34).

    The time is 0 where a priority holds always, or N for 2 ** ((N - 1) / 2) seconds, rounded up.
    """
    number = min(worth.depth, 0xFFFF) << _PRIORITY_BITS | min(worth.priority, 255)
    time = 0 if worth.seconds is None else 1 + math.ceil(2 * math.log2(max(1.0, worth.seconds)))
    number = number << _SECONDS_BITS | min(time, (1 << _SECONDS_BITS) - 1)
    return number << _LENGTH_BITS | min(length, (1 << _LENGTH_BITS) - 1)  # a longer one is larger than any slot


def unrated(number: int) -> tuple[int, Worth]:
    """What `rated` made a number of."""
    number, length = divmod(number, 1 << _LENGTH_BITS)
    number, time = divmod(number, 1 << _SECONDS_BITS)
    depth, priority = divmod(number, 1 << _PRIORITY_BITS)
    return length, Worth(priority, depth, 2 ** ((time - 1) / 2) if time else None)


def numbers_in(found: Message) -> tuple[int, ...]:
    """The numbers of a message that holds nothing else."""
    _check_size(found, 8 * _checked_count(found.num))
    return struct.unpack(f"<{found.num}Q", found.body)


def numbers(values: Sequence[int]) -> bytes:
    """Numbers as a body."""
    return array("Q", values).tobytes()


def place_bytes(place: Place) -> bytes:
    """A place as it is sent."""
    return _PLACE.pack(*place)


def places_in(found: Message) -> list[Place]:
    """The places of an answer, one for each key."""
    _check_size(found, _PLACE.size * found.num)
    return list(_PLACE.iter_unpack(found.body))


def flags_in(found: Message) -> list[bool]:
    """The bytes of an answer, one for each key."""
    _check_size(found, found.num)
    return [bool(flag) for flag in found.body]


def flags(values: Iterable[object]) -> bytes:
    """One byte for each."""
    return bytes(map(bool, values))


def pattern_bytes(pattern: KeyPattern) -> bytes:
    """A pattern as it is sent."""
    has_space = pattern.space is not None
    return _PATTERN.pack(has_space, pattern.space or bytes(SPACE_BYTES), len(pattern.tag), pattern.tag)


def pattern_in(found: Message) -> KeyPattern:
    """The pattern of a message."""
    _check_size(found, _PATTERN.size)
    has_space, space, length, tag = _PATTERN.unpack(found.body)
    return KeyPattern(space if has_space else None, tag[:length])


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The number of the process at the other end, and its user."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def node_directory(name: str) -> Path:
    """Where the files of a node lie: a path as it is, and a name below a directory of this user in /dev/shm."""
    if "/" in name:
        path = Path(name).expanduser().absolute()
    else:
        path = Path(f"/dev/shm/kvpool-{os.getuid()}") / _checked_name(name or DEFAULT_NAME)
    if len(os.fsencode(path / SOCKET)) > _LONGEST_PATH:
        raise InvalidArgumentError(f"the path {path} is too long for a socket; take one of {_LONGEST_PATH - 8} bytes")
    return path


def _checked_name(name: str) -> str:
    try:
        return str(NAMESPACE.check(name))
    except ValueError:
        raise InvalidArgumentError(f"the name {name!r} of a node {NAMESPACE.rule}; a path has a slash") from None


def _checked_count(count: int) -> int:
    if count > MAX_KEYS:
        raise WireError(f"a message names at most {MAX_KEYS} keys, and this one {count}")
    return count


def _check_size(found: Message, size: int) -> None:
    if len(found.body) != size:
        raise WireError(f"a message of verb {found.verb} for {found.num} keys has {size} bytes, not {len(found.body)}")
