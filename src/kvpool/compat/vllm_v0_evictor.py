"""vLLM V0's evictor of single blocks."""

from __future__ import annotations

import heapq

from kvpool.checks import as_count, check_number, show
from kvpool.errors import InvalidArgumentError


class Evictor:
    """V0's `LRUEvictor`: the block used longest ago goes first, of equally old ones the one deepest in its prefix.

    An object of it stands alone; `BlockManager(eviction_policy=Evictor)` evicts in that order.

    >>> evictor = Evictor()
    >>> for block, time in ((0, 2.0), (1, 1.0)):
    ...     evictor.add(block, content_hash=100 + block, num_hashed_tokens=16, last_accessed=time)
    >>> evictor.update(1, last_accessed=3.0)
    >>> evictor.evict(), 0 in evictor, evictor.num_blocks
    ((0, 100), False, 1)
    """

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[float, int, int]] = {}  # last access, -tokens up to its end, hash
        self._order: list[tuple[float, int, int]] = []  # last access, -tokens, block; old entries are passed over

    def __contains__(self, block_id: object) -> bool:
        return type(block_id) is int and block_id in self._blocks

    def add(self, block_id: int, content_hash: int, num_hashed_tokens: int, last_accessed: float) -> None:
        """A block that nobody uses any more."""
        if as_count(block_id, "block_id") in self._blocks:
            raise InvalidArgumentError(f"block {block_id} is in the evictor already")
        when = check_number(last_accessed, "last_accessed", "a time", InvalidArgumentError)
        depth = as_count(num_hashed_tokens, "num_hashed_tokens")
        if type(content_hash) is not int:
            raise InvalidArgumentError(f"content_hash must be an int, got {show(content_hash)}")
        self._put(int(block_id), (when, -depth, content_hash))

    def update(self, block_id: int, last_accessed: float) -> None:
        """It was used at another time."""
        _, depth, content_hash = self._known(block_id)
        when = check_number(last_accessed, "last_accessed", "a time", InvalidArgumentError)
        self._put(int(block_id), (when, depth, content_hash))

    def _put(self, block_id: int, entry: tuple[float, int, int]) -> None:
        self._blocks[block_id] = entry
        heapq.heappush(self._order, (*entry[:2], block_id))

    def _known(self, block_id: int) -> tuple[float, int, int]:
        if as_count(block_id, "block_id") not in self._blocks:
            raise InvalidArgumentError(f"block {block_id} is not in the evictor")
        return self._blocks[block_id]

    def remove(self, block_id: int) -> None:
        """Somebody uses it again."""
        self._known(block_id)
        del self._blocks[block_id]

    def evict(self) -> tuple[int, int]:
        """Takes out the block to give up: its id and the hash of its content."""
        while self._order:
            when, depth, block_id = heapq.heappop(self._order)
            found = self._blocks.get(block_id)
            if found is not None and found[:2] == (when, depth):
                del self._blocks[block_id]
                return block_id, found[2]
        raise InvalidArgumentError("evict: no block is in the evictor")

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)
