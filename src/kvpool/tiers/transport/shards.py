"""Tiers of a model that is divided between ranks. Read this first.

Every rank has the same tiers, opened by itself, and stores its shard of every block there, under a key of its own. Rank 0
alone decides what is stored, loaded and removed, and tells the others:

    Shards        what rank 0 tells them. To load a prefix, it asks all of them once, while it loads its own shards. A
                  block that one rank lacks is a miss for all.
    ShardKeeper   does it on another rank (`shard_keeper`). What a rank has loaded waits in its staging memory until rank 0
                  says in which blocks it goes.

Stores and writes are in order with steps, because they read and write blocks. Loads are not: they take no block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvpool.pools.arrays import Int32Array
from kvpool.tiers.contract import Worth
from kvpool.tiers.keys import KeyPattern


class ShardPart(NamedTuple):
    """Loaded blocks of one layer group, by their place among those that were asked for, and the blocks they go to."""

    group: int  # among those that tiers have
    begin: int
    end: int
    blocks: Int32Array


class ShardLoad(Protocol):
    """A load that the other ranks were asked for."""

    def wait(self) -> list[bool]:
        """Which of the blocks all ranks have, in the order in which they were asked for. None of them if a rank is late."""

    def write(self, parts: Sequence[ShardPart]) -> None:
        """Has all ranks write what they have loaded into blocks. It is the last call."""

    def release(self) -> None:
        """Nobody needs what was loaded. Does nothing after `write`."""


class Shards(Protocol):
    """The other ranks. Any thread may call all but `store` and `flush`, which the thread of the engine calls."""

    def find(self, keys: Sequence[bytes], due: float) -> list[bool]:
        """Which blocks all other ranks have."""

    def load(self, keys: Sequence[Sequence[bytes]], due: float) -> ShardLoad:
        """Has them load blocks, by layer group, until `due`, by `time.monotonic`."""

    def store(self, group: int, keys: Sequence[bytes], blocks: Sequence[int], worths: Sequence[Worth]) -> None:
        """Has them store full blocks as they are now."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Has them remove values."""

    def purge(self, pattern: KeyPattern) -> None:
        """Has them remove all values with such keys."""

    def flush(self) -> None:
        """Sends what waits for the next step."""
