"""Which request computes which block next, so that another one with the same prompt can wait instead of computing it too."""

from __future__ import annotations

from kvpool.pools.arrays import Int32Array
from kvpool.prefix.node import Node
from kvpool.prefix.tree import Match
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.state import CacheState


class InFlight:
    """The next block of every live request with a known prompt, found by where it hangs in the tree and what it holds."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.cache = state.cache
        self.context = state.context
        self.rows = state.rows
        self.block_size = state.block_size
        self.rows_by_block: dict[tuple[Node, bytes], int] = {}  # (tip, next block) -> the row that computes it
        state.publisher.on_follow = self.track

    def row_computing(self, match: Match, tokens: Int32Array | None) -> int | None:
        """The row that is computing the first block of `tokens` that is not cached yet, if any."""
        if match.root is None or tokens is None or not self.rows_by_block:
            return None
        size = self.block_size
        start = match.num_blocks * size
        if len(tokens) - start < size:
            return None
        tip: Node = match.path[-1] if match.path else match.root
        if tip.end != match.num_blocks:
            return None
        return self.rows_by_block.get((tip, tokens[start : start + size].tobytes()))

    def track(self, row: int) -> None:
        """Remembers which block a row with a known prompt computes next."""
        rows, size = self.rows, self.block_size
        handle = rows.handles[row]
        assert handle is not None
        self.untrack(handle)
        start = rows.committed.item(row) // size * size
        if rows.known.item(row) - start < size:
            return
        tip = rows.tips[row]
        assert tip is not None
        if tip.open_row != row:  # otherwise it ends with what is committed
            self.context.sync(tip)
            start = tip.end * size
        if handle.publishes and rows.known.item(row) - start >= size:
            self.track_block(handle, tip, rows.ids_between(row, start, start + size).tobytes())

    def track_block(self, handle: KVCacheHandle, tip: Node, key: bytes) -> None:
        """Remembers that a request computes the block `key` behind `tip`."""
        place = (tip, key)
        if self.rows_by_block.setdefault(place, handle.row) == handle.row:
            handle.inflight = place

    def untrack(self, handle: KVCacheHandle) -> None:
        """Forgets what a request computes next."""
        if handle.inflight is not None:
            self.rows_by_block.pop(handle.inflight, None)
            handle.inflight = None

    def hand_over(self, handle: KVCacheHandle) -> None:
        """A request ends before its next block was computed. If another one computes the same block, that one is tracked."""
        place = handle.inflight
        self.untrack(handle)
        tips = self.rows.tips
        for other in self.state.requests.values():
            if other.inflight is None and other.swapped is None and tips[other.row] is place[0]:
                self.track(other.row)
