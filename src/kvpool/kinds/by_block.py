"""Kinds whose published blocks are read one by one: what windows and states have in common.

A row keeps in `first_held` where the blocks begin that it still reads, sinks apart. `prefix/blocks.py` counts the readers of
published blocks, and lets those go that nobody reads any more.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from kvpool.config.layers import ceil_div
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle, Rows
from kvpool.core.kind import ByBlock
from kvpool.core.node import Node, path_ids
from kvpool.core.prompt import AdmissionPlan
from kvpool.errors import SequenceStateError
from kvpool.pools.arrays import BoolArray, Int64Array
from kvpool.prefix.announcer import announce_blocks
from kvpool.prefix.blocks import ref_blocks, unref_blocks
from kvpool.prefix.tree import tip_of

Reopened = list[tuple[ByBlock, int, int]]


class BlockwiseGroup(ByBlock):
    """A later query reads the blocks from `first_read` on, and the sinks."""

    def longest_valid(self, present: BoolArray, num_tokens: int) -> int:
        missing = np.flatnonzero(~present)
        size, sinks = self.block_size, self.sinks
        length = num_tokens
        while length > 0:
            start = self.first_read(length)
            gaps = missing[(missing < ceil_div(length, size)) & ((missing >= start) | (missing < sinks))]
            if not len(gaps):
                return length
            length = int(gaps[-1]) * size if int(gaps[-1]) >= start else int(gaps[0]) * size
        return 0

    # --- the life of a sequence --------------------------------------------------------------------------------------

    def begin(self, cache: Cache, row: int, tip: Node, plan: AdmissionPlan, first: int) -> int:
        taken = super().begin(cache, row, tip, plan, first)
        cache.rows.first_held[self.index, row] = self.first_read(plan.num_hit_tokens)
        self.enter(cache, row, tip, plan.match.num_blocks)
        return taken

    def enter(self, cache: Cache, row: int, tip: Node, num_blocks: int) -> None:
        table, start = cache.rows.tables[self.index], int(cache.rows.first_held[self.index, row])
        ref_blocks(cache, tip.root, self, table[row, : min(self.sinks, num_blocks)])
        ref_blocks(cache, tip.root, self, table[row, start:num_blocks])

    def leave(self, cache: Cache, row: int, tip: Node, first: int, end: int) -> None:
        table = cache.rows.tables[self.index]
        sinks = min(self.sinks, end)
        if first < sinks:
            unref_blocks(cache, tip, self, first, sinks - 1, table[row, first:sinks])
        start = max(first, int(cache.rows.first_held[self.index, row]))
        if start < end:
            unref_blocks(cache, tip, self, start, end - 1, table[row, start:end])

    def fork(self, cache: Cache, source: int, row: int, tip: Node) -> None:
        super().fork(cache, source, row, tip)
        self.enter(cache, row, tip, tip.end)

    def end(self, cache: Cache, handle: KVCacheHandle, row: int, tip: Node, published: int, used: int) -> None:
        super().end(cache, handle, row, tip, published, used)
        self.leave(cache, row, tip, 0, published)

    def slide(self, cache: Cache, row: int, position: int) -> None:
        rows = cache.rows
        tip, handle = tip_of(cache, row), rows.handles[row]
        old = int(rows.first_held[self.index, row])
        new = min(self.first_read(position), rows.num_blocks_of[row])
        if new <= old:
            return
        table = rows.tables[self.index]
        published = min(new, max(old, tip.end))
        if published > old:
            unref_blocks(cache, tip, self, old, published - 1, table[row, old:published])
            self.passed(cache, tip, max(old, handle.num_prompt_tokens // self.block_size), published)
        if new > published:
            self.unref(table[row, published:new], handle.family is not None)
            table[row, published:new] = -1
        rows.first_held[self.index, row] = new

    def passed(self, cache: Cache, tip: Node, first: int, end: int) -> None:
        """A sequence has passed published blocks `first..end` behind its prompt."""

    def adopt(self, cache: Cache, row: int, child: Node, first: int, shared: bool) -> int:
        """As for full attention, where the tree may have lost blocks that this row still has."""
        table = cache.rows.tables[self.index]
        own, theirs = table[row, first : child.end], child.ids[self.index]
        lost, first_lost = (theirs < 0) & (own >= 0), child.end
        if lost.any():
            first_lost = first + int(lost.argmax())
            theirs = np.where(lost, own, theirs)
            child.set_ids(self.index, theirs)
            if child.digests is not None and cache.events.listening:
                announce_blocks(cache, child, self, np.flatnonzero(lost))
        doubled = (own >= 0) & (own != theirs)
        if doubled.any():
            ref_blocks(cache, child.root, self, theirs[doubled])
            self.gpu.unref(own[doubled])
            cache.counters.blocks_merged += int(doubled.sum())
            table[row, first : child.end] = np.where(doubled, theirs, own)
        return first_lost

    def fresh_columns(self, rows: Rows, row: int) -> Int64Array:
        columns = super().fresh_columns(rows, row)
        unpassed: Int64Array = columns[(columns >= rows.first_held[self.index, row]) | (columns < self.sinks)]
        return unpassed

    # --- what eviction asks ------------------------------------------------------------------------------------------

    def needed_from(self, cache: Cache, node: Node) -> int:
        """The next end is that of this run if prompts part there or nothing follows; else where its only successor ends."""
        size, last = cache.block_size, node
        while (following := last.only_child()) is not None:
            last = following
            if self.first_read(last.start * size) >= node.end:
                return node.end
        return self.first_read(last.start * size + len(last.tokens))

    def needed(self, cache: Cache, node: Node, first: int = 0) -> BoolArray:
        depths = np.arange(node.start + first, node.end)
        wanted: BoolArray = (depths >= self.needed_from(cache, node)) | (depths < self.sinks)
        return wanted & (node.ids[self.index][first:] >= 0)

    def must_stay(self, depth: int, first_needed: int) -> bool:
        return depth >= first_needed or depth < self.sinks

    def has_last(self, path: list[Node], num_blocks: int) -> bool:
        return bool(path_ids(path, num_blocks, self.index)[-1] >= 0)

    def pinned_columns(self, present: BoolArray) -> Int64Array:
        num_blocks = len(present)
        return np.flatnonzero(self.reads(np.arange(num_blocks), num_blocks * self.block_size))


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


def slide(cache: Cache, row: int, position: int) -> None:
    """Lets go of the blocks of a row that the query at `position`, and those behind it, do not read."""
    for group in cache.by_block:
        group.slide(cache, row, position)


# --- backwards -------------------------------------------------------------------------------------------------------


def reopen(cache: Cache, handle: KVCacheHandle, row: int, length: int) -> Reopened:
    """A row goes back to `length` tokens: it reads again what it had passed, if that is still there.

    Returns (group, first block, block where it began to read before), for `close_again`.
    """
    rows, size = cache.rows, cache.block_size
    tip = rows.tips[row]
    path = tip.path()
    reopened: Reopened = []
    for group in cache.by_block:
        stop = int(rows.first_held[group.index, row])
        start = min(group.first_read(length), stop)
        left = rows.tables[group.index][row, start:stop]
        # The tree may have lost blocks since they were passed; the table is not told.
        left[: max(0, tip.end - start)] = path_ids(path, tip.end, group.index)[start:stop]
        if (left[: max(0, ceil_div(length, size) - start)] < 0).any():
            raise SequenceStateError(
                f"request {handle.request_id!r} cannot be rewound to {length} tokens: "
                f"layer group {group.index} has already dropped blocks that its window would cover again"
            )
        if start < stop:
            reopened.append((group, start, stop))
    for group, start, stop in reopened:
        ref_blocks(cache, tip.root, group, rows.tables[group.index][row, start : min(stop, tip.end)])
        rows.first_held[group.index, row] = start
    return reopened


def close_again(cache: Cache, row: int, reopened: Reopened) -> None:
    """Takes `reopen` back."""
    tip = cache.rows.tips[row]
    for group, start, stop in reopened:
        ids = cache.rows.tables[group.index][row, start : min(stop, tip.end)]
        unref_blocks(cache, tip, group, start, min(stop, tip.end) - 1, ids)
        cache.rows.first_held[group.index, row] = stop
