"""Layers that read a window of the latest tokens, or the chunk that a token lies in, and perhaps sinks at the beginning."""

from __future__ import annotations

from abc import abstractmethod

from kvpool.kinds.by_block import BlockwiseGroup


class WindowedGroup(BlockwiseGroup):
    """Blocks that left the window are given up while the sequence runs; published ones stay cached until needed."""

    @abstractmethod
    def first_position(self, num_tokens: int) -> int:
        """The first position, sinks apart, that the query at position `num_tokens` reads."""

    def first_read(self, num_tokens: int) -> int:
        return max(self.first_position(num_tokens) // self.block_size, self.sinks)

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        given_up = min(self.first_read(num_reused_tokens), num_reused) - self.sinks
        return num_blocks - max(0, given_up)


class SlidingGroup(WindowedGroup):
    """A window of W covers the query itself, so it reaches back to position `num_tokens - W + 1`."""

    def first_position(self, num_tokens: int) -> int:
        assert self.spec.window is not None
        return max(0, num_tokens - self.spec.window + 1)


class ChunkedGroup(WindowedGroup):
    """A chunk of C starts at a multiple of C."""

    def first_position(self, num_tokens: int) -> int:
        assert self.spec.window is not None
        return num_tokens // self.spec.window * self.spec.window
