"""The sequential model of a prefix cache, block by block and without any part of kvpool: the judge of exact replay.

Requests come one at a time. Hits are the leading resident blocks. Then the request holds all its blocks, missing ones are
inserted, and victims are taken among the others in the order of the policy, the deepest of equals first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class SlowCache:
    """`leaf_first`: a block leaves only when no resident block follows it. Without, parents may go before children."""

    def __init__(self, capacity: float, policy: str, leaf_first: bool = True) -> None:
        self.capacity, self.policy, self.leaf_first = capacity, policy, leaf_first
        self.resident: set[int] = set()
        self.inserted: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.reuses: dict[int, int] = {}
        self.depth: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}
        self.children: dict[int, int] = {}
        self.heap: list[tuple[tuple[int, ...], int]] = []

    def rank(self, block: int) -> tuple[int, ...]:
        if self.policy == "lru":
            return self.used[block], -self.depth[block]
        if self.policy == "fifo":
            return self.inserted[block], -self.depth[block]
        assert self.policy == "lfu"
        return self.reuses[block], self.used[block], -self.depth[block]

    def offer(self, block: int) -> None:
        heapq.heappush(self.heap, (self.rank(block), block))

    def evict_one(self, held: set[int]) -> bool:
        postponed = []
        victim = None
        while self.heap and victim is None:
            rank, block = heapq.heappop(self.heap)
            if block not in self.resident or rank != self.rank(block):
                continue
            if block in held:
                postponed.append(block)
            elif not self.leaf_first or not self.children[block]:
                victim = block
        for block in postponed:
            self.offer(block)
        if victim is None:
            return False
        self.resident.remove(victim)
        parent = self.parent[victim]
        if parent is not None:
            self.children[parent] -= 1
            if not self.children[parent] and parent in self.resident:
                self.offer(parent)
        return True

    def request(self, blocks: Sequence[int], now: int) -> int:
        hits = next((at for at, block in enumerate(blocks) if block not in self.resident), len(blocks))
        missing = {block for block in blocks if block not in self.resident}
        held = set(blocks)
        while len(self.resident) + len(missing) > self.capacity and self.evict_one(held):
            pass
        for depth, block in enumerate(blocks):
            if block in missing:
                self.resident.add(block)
                self.inserted[block], self.reuses[block], self.depth[block] = now, 0, depth
                self.children[block] = 0
                self.parent[block] = blocks[depth - 1] if depth else None
                if depth:
                    self.children[blocks[depth - 1]] += 1
            elif depth < hits:
                self.reuses[block] += 1
            self.used[block] = now
        for block in blocks:
            if not self.leaf_first or not self.children[block]:
                self.offer(block)
        return hits


def slow_hits(requests: Iterable[Sequence[int]], capacity: float, policy: str, leaf_first: bool = True) -> list[int]:
    """The hits of each request."""
    cache = SlowCache(capacity, policy, leaf_first)
    return [cache.request(blocks, now) for now, blocks in enumerate(requests)]
