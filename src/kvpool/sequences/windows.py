"""The windows of live sequences: what they read of published blocks, from admission through every step to the end."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvpool.config.layers import ceil_div
from kvpool.errors import SequenceStateError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.groups import Group
from kvpool.pools.pool import GPU
from kvpool.prefix.node import Node, path_ids
from kvpool.prefix.tree import Match
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.state import CacheState
from kvpool.stats import EvictionReason

Held: TypeAlias = list[tuple[Group, Int32Array]]  # blocks that nobody may evict for a while


class RowWindows:
    """Keeps `window_start` of every row, and tells `WindowReaders` which published blocks a row begins or stops to read.

    All of it concerns groups that slide. A model without one never comes here: callers ask `context.windowed` first where
    it counts.
    """

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.rows = state.rows
        self.context = state.context
        self.readers = state.cache.windows

    # --- while a row is made -----------------------------------------------------------------------------------------

    def hold(self, tip: Node, num_tokens: int) -> Held:
        """Protects the blocks that a request reads which reuses `num_tokens` up to `tip`, until `let_go`."""
        held: Held = []
        for group in self.context.windowed:
            for node in tip.path():
                if node.tier == GPU:
                    read = group.reads(np.arange(node.start, node.end), num_tokens)
                    held.append((group, node.ids[group.index][read]))
        for group, ids in held:
            self.readers.enter(tip.root, group, ids)
        return held

    def let_go(self, tip: Node, held: Held) -> None:
        """The row itself reads by now what was held for it."""
        for group, ids in held:
            self.readers.leave(tip, group, 0, 0, ids)

    def hold_source(self, match: Match, holds: bool) -> None:
        """Protects (`holds`) or lets go of the windowed blocks of the block that is about to be copied."""
        source = match.partial
        assert source is not None
        if source.tier != GPU:
            return
        index = match.num_blocks - source.start
        for group in self.context.windowed:
            ids = source.ids[group.index][index : index + 1]
            if holds:
                self.readers.enter(source.root, group, ids)
            else:
                self.readers.leave(source, group, match.num_blocks, match.num_blocks, ids)

    def begin(self, row: int, tip: Node, num_blocks: int, num_tokens: int) -> None:
        """A new row reuses `num_tokens`, `num_blocks` of them whole blocks: its windows open there."""
        for group in self.context.windowed:
            self.rows.window_start[group.index, row] = group.first_read(num_tokens)
        self.enter(row, tip, num_blocks)

    def enter(self, row: int, tip: Node, num_blocks: int) -> None:
        """A row reads those of its first `num_blocks` blocks, all published, that its windows cover."""
        for group in self.context.windowed:
            table, start = self.rows.tables[group.index], int(self.rows.window_start[group.index, row])
            self.readers.enter(tip.root, group, table[row, : min(group.sinks, num_blocks)])
            self.readers.enter(tip.root, group, table[row, start:num_blocks])

    # --- steps -------------------------------------------------------------------------------------------------------

    def slide(self, row: int, position: int) -> None:
        """Lets go of the blocks of a row that the query at `position`, and those behind it, do not read."""
        rows = self.rows
        tip, handle = rows.tips[row], rows.handles[row]
        assert tip is not None and handle is not None
        self.context.sync(tip)
        for group in self.context.windowed:
            old = int(rows.window_start[group.index, row])
            new = min(group.first_read(position), rows.num_blocks_of[row])
            if new <= old:
                continue
            table = rows.tables[group.index]
            published = min(new, max(old, tip.end))
            if published > old:
                self.readers.leave(tip, group, old, published - 1, table[row, old:published])
                if group.keeps_state:
                    self._drop_passed(tip, group, max(old, handle.num_prompt_tokens // group.block_size), published)
            if new > published:
                group.give_back(table[row, published:new], handle.family is not None)
                table[row, published:new] = -1
            rows.window_start[group.index, row] = new

    def _drop_passed(self, tip: Node, group: Group, first: int, end: int) -> None:
        """Drops unread checkpoints behind a prompt that its sequence has passed: the next turn goes on from the last one."""
        pinned = self.readers.pinned[group.pool]
        for depth in range(first, end):
            node, block = self.readers.block_of(tip, group, depth)
            if block >= 0 and not group.gpu.refs[block] and block not in pinned:
                self.readers.remove_block(node, group, depth - node.start, EvictionReason.CONTINUED)

    def reopen(self, handle: KVCacheHandle, row: int, length: int) -> list[tuple[Group, int, int]]:
        """A row goes back to `length` tokens: its windows cover again what they had left, if that is still there.

        Returns (group, first block, block where the window started before), for `close_again`.
        """
        rows, size = self.rows, self.context.block_size
        tip = rows.tips[row]
        assert tip is not None
        path = tip.path()
        reopened: list[tuple[Group, int, int]] = []
        for group in self.context.windowed:
            stop = int(rows.window_start[group.index, row])
            start = min(group.first_read(length), stop)
            left = rows.tables[group.index][row, start:stop]
            # The tree may have lost blocks since they left the window; the table is not told.
            left[: max(0, tip.end - start)] = path_ids(path, tip.end, group.index)[start:stop]
            if (left[: max(0, ceil_div(length, size) - start)] < 0).any():
                raise SequenceStateError(
                    f"request {handle.request_id!r} cannot be rewound to {length} tokens: "
                    f"layer group {group.index} has already dropped blocks that its window would cover again"
                )
            if start < stop:
                reopened.append((group, start, stop))
        for group, start, stop in reopened:
            self.readers.enter(tip.root, group, rows.tables[group.index][row, start : min(stop, tip.end)])
            rows.window_start[group.index, row] = start
        return reopened

    def close_again(self, row: int, reopened: list[tuple[Group, int, int]]) -> None:
        """Takes `reopen` back."""
        tip = self.rows.tips[row]
        assert tip is not None
        for group, start, stop in reopened:
            ids = self.rows.tables[group.index][row, start : min(stop, tip.end)]
            self.readers.leave(tip, group, start, min(stop, tip.end) - 1, ids)
            self.rows.window_start[group.index, row] = stop

    # --- the end -----------------------------------------------------------------------------------------------------

    def leave(self, row: int, tip: Node, first: int, end: int) -> None:
        """A row on the path to `tip` stops reading its published blocks `first..end` (end exclusive)."""
        for group in self.context.windowed:
            table = self.rows.tables[group.index]
            sinks = min(group.sinks, end)
            if first < sinks:
                self.readers.leave(tip, group, first, sinks - 1, table[row, first:sinks])
            start = max(first, int(self.rows.window_start[group.index, row]))
            if start < end:
                self.readers.leave(tip, group, start, end - 1, table[row, start:end])
