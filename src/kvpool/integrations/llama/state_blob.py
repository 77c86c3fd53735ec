"""A state of llama.cpp on its way: the tokens that it holds, a checksum, and the bytes that llama.cpp wrote, cut into pieces.

    magic and version (8) | number of tokens (8) | bytes of the state (8) | XXH3 of what follows (8) | tokens | state | zeros

A state has megabytes, and tiers are at their best with values of one size: all pieces have the same, and the last one is
filled up with zeros. A *signpost* is a small value under the key of a block of tokens. It names the pieces, so that a state
is there when somebody finds a signpost to it; signposts are written last.
"""

from __future__ import annotations

import struct
import uuid
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config.layers import ceil_div
from kvpool.tiers.envelope import checksum
from kvpool.tiers.transport.staging import Bytes

PIECE_BYTES = 2**20
SIGNPOST_BYTES = 64
_MAGIC, _SIGN = b"kvllama\1", b"kvsign\0\1"
_HEAD = struct.Struct("<8sQQQ")
_SIGNPOST = struct.Struct(f"<8s16sQQ{SIGNPOST_BYTES - 40}x")


class Signpost(NamedTuple):
    """Where a state is: the name of its pieces, and how large it is."""

    name: bytes
    num_tokens: int
    num_state_bytes: int

    @classmethod
    def read(cls, data: bytes | bytearray) -> Signpost | None:
        """What was packed; None if this is nothing of ours."""
        magic, name, num_tokens, num_state_bytes = _SIGNPOST.unpack(data)
        return cls(name, num_tokens, num_state_bytes) if magic == _SIGN else None

    def packed(self) -> bytes:
        """As it lies in a tier."""
        return _SIGNPOST.pack(_SIGN, *self)

    @property
    def num_bytes(self) -> int:
        """Of all pieces together."""
        return ceil_div(_HEAD.size + 4 * self.num_tokens + self.num_state_bytes, PIECE_BYTES) * PIECE_BYTES


class StateBlob:
    """The memory of one state: `state` is for llama.cpp to write or read, `pieces` are for tiers."""

    def __init__(self, signpost: Signpost) -> None:
        self.signpost = signpost
        self._buffer = np.zeros(signpost.num_bytes, np.uint8)
        begin = _HEAD.size + 4 * signpost.num_tokens
        self._content = self._buffer[_HEAD.size : begin + signpost.num_state_bytes]
        self.tokens: npt.NDArray[np.int32] = self._buffer[_HEAD.size : begin].view("<i4")
        self.state: Bytes = self._buffer[begin : begin + signpost.num_state_bytes]

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int32], num_state_bytes: int) -> StateBlob:
        """For a new state of these tokens, under a name that nobody else has: pieces of two states never mix."""
        blob = cls(Signpost(uuid.uuid4().bytes, len(tokens), num_state_bytes))
        blob.tokens[:] = tokens
        return blob

    @property
    def pieces(self) -> list[Bytes]:
        """All of it, in values of one size."""
        return [self._buffer[start : start + PIECE_BYTES] for start in range(0, len(self._buffer), PIECE_BYTES)]

    def seal(self) -> None:
        """Says what is in it, once `state` is filled."""
        self._buffer[: _HEAD.size] = np.frombuffer(self._head(), np.uint8)

    def is_whole(self) -> bool:
        """Whether this is what was sealed."""
        return self._buffer[: _HEAD.size].tobytes() == self._head()

    def _head(self) -> bytes:
        _, num_tokens, num_state_bytes = self.signpost
        return _HEAD.pack(_MAGIC, num_tokens, num_state_bytes, checksum(self.signpost.name, self._content.data))


def num_common(tokens: npt.NDArray[np.int32], others: npt.NDArray[np.int32]) -> int:
    """How many tokens two texts have in common from the first on."""
    shorter = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:shorter] != others[:shorter])
    return int(differ[0]) if len(differ) else shorter
