"""A cached run of blocks as eviction policies see it, and the keys by which they rank it."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int32]


class Key(Protocol):
    """A rank. Keys of one policy are compared with each other: numbers, or tuples of them."""

    def __lt__(self, other: Any, /) -> bool: ...


def checksum(tokens: memoryview | bytes, before: int) -> int:
    """Continues the checksum of tokens with those that follow them: in pieces it is the same as at once."""
    return crc32(tokens, before)


class Run(Protocol):
    """A cached run of blocks as policies see it. Policies read these attributes and write only the first three."""

    entry: Any  # belongs to the policy that holds the run; None at first
    turn: int  # requests that went the same way alone before the one which published it: its place in a conversation
    fan_out: int  # requests that had reused the run before it by then, that one included

    @property
    def hint(self) -> int:
        """What was said about its continuation when its request ended, as `ReuseHint.code`; 0 if nothing."""

    @property
    def session(self) -> str | None:
        """The session of the request that published it, if it named one."""

    @property
    def tenant(self) -> str:
        """Whose it is; "" for nobody's."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def start(self) -> int:
        """Depth of the first block below the root, in blocks."""

    @property
    def created(self) -> int:
        """Serial of insertion into the cache; both parts of a split run keep it."""

    @property
    def last_access(self) -> int:
        """Logical tick of the last use; never newer than the parent's."""

    @property
    def last_access_at(self) -> float:
        """When that was, in seconds on the manager's clock."""

    @property
    def hits(self) -> int:
        """How many requests reused the run since it was inserted."""

    @property
    def priority(self) -> int:
        """Retention priority, 0 (goes first) to 100."""

    @property
    def fingerprint(self) -> int:
        """Identity of the content by its scope, all that precedes it and its first block: the same when the run was evicted
        and computed again.
        """

    @property
    def tokens(self) -> Tokens:
        """Those of its blocks. A policy may keep the array."""

    @property
    def sum_before(self) -> int:
        """The `checksum` of all tokens that precede it."""

    def fingerprint_of(self, start: int, sum_before: int, key: bytes) -> int:
        """The fingerprint of a run of this scope that begins at this depth, behind tokens of this checksum, with these."""
