"""Tokens taken back: rejected drafts, and final tokens when a sequence goes another way.

What was published stays in the tree; the sequence only moves its tip up. A block that is cut in two is copied, because the
tree keeps the old one.
"""

from __future__ import annotations

from kvpool.config.layers import ceil_div
from kvpool.errors import OutOfBlocksError
from kvpool.pools.pool import GPU, CopyKind, CopyOp
from kvpool.prefix.node import Node
from kvpool.sequences.handle import KVCacheHandle, note_sessions
from kvpool.sequences.state import CacheState
from kvpool.sequences.states import RowStates
from kvpool.sequences.windows import RowWindows


class Rewinder:
    """`rewind`: checked first, then done."""

    def __init__(self, state: CacheState, windows: RowWindows, states: RowStates | None) -> None:
        self.state = state
        self.states = states
        self.rows = state.rows
        self.cache = state.cache
        self.context = state.context
        self.tree = state.cache.tree
        self.readers = state.cache.readers
        self.windows = windows
        self.in_flight = state.in_flight

    def rewind(self, handle: KVCacheHandle, num_tokens: int) -> None:
        """Forgets the last `num_tokens` reserved tokens and gives back the blocks behind them."""
        rows, size = self.rows, self.context.block_size
        row = self.state.row_of(handle)
        length = rows.reserved_of[row] - num_tokens
        rows.moves += 1
        tip = rows.tips[row]
        assert tip is not None
        self.context.sync(tip)
        self._prepare(handle, row, length)
        if length < tip.end * size:
            self._leave_published(handle, row, length)
        self._drop_private(handle, row, ceil_div(length, size))
        rows.reserved_of[row] = length
        rows.present_of[row] = min(rows.present_of[row], length)
        if rows.written_of[row] > length:  # what is written there now may be other tokens
            rows.written_of[row] = length
            rows.committed_of[row] = min(rows.committed_of[row], length)
            rows.forget_token_ids(row, length)
        if handle.family is not None:
            rows.set_shared(row, True)  # the blocks that it will write now may be older than those it copied
        if handle.publishes and rows.known_of[row] > rows.committed_of[row]:
            self.in_flight.track(row)
        else:
            self.in_flight.untrack(handle)
        self.state.counters.rewinds += 1
        self.cache.enforce_quota(tip.root)

    def _prepare(self, handle: KVCacheHandle, row: int, length: int) -> None:
        """Before a rewind: reads again what the windows will cover, and makes room for the block that is cut in two."""
        rows, size = self.rows, self.context.block_size
        tip = rows.tips[row]
        assert tip is not None
        if self.states is not None:
            self.states.check_rewind(handle, row, length)
        reopened = self.windows.reopen(handle, row, length)
        if length % size and length < tip.end * size:
            try:
                what = f"rewinding {handle.request_id!r}"
                self.state.require(list(self.state.per_position), handle.scope.tenant, what)
            except OutOfBlocksError:
                self.windows.close_again(row, reopened)
                raise

    def _leave_published(self, handle: KVCacheHandle, row: int, length: int) -> None:
        """Moves the tip up to the last full block before `length`; a block cut in two is copied."""
        rows, size = self.rows, self.context.block_size
        rows.keep_token_ids(row)
        blocks, extra = divmod(length, size)
        if rows.has_open_tip(row):
            self.state.publisher.close(row)
        old = new = rows.tips[row]
        assert old is not None and new is not None
        end = old.end
        while new is not new.root and new.start >= blocks:
            new = new.parent
        if extra:
            self._note_session(handle, old, blocks)
        if new.end > blocks:
            new = self.tree.split(new, blocks - new.start)
        self.readers.hold(new)
        self.windows.leave(row, old, blocks, end)
        for group in self.state.growing:
            table = rows.tables[group.index]
            if extra:
                dst = group.take(1)
                src = table[row, blocks : blocks + 1].copy()
                self.state.copies.append(CopyOp(CopyKind.COPY_ON_WRITE, group.index, GPU, GPU, src, dst.copy(), extra))
                self.state.counters.copies_on_write += 1
                handle.stats.copies_on_write += 1
                table[row, blocks] = dst[0]
            table[row, blocks + bool(extra) : end] = -1
        rows.tips[row] = new
        self.readers.release(old)
        if row in rows.following:  # what is behind its path is its own from now on
            rows.follow(row, new.end * size)

    @staticmethod
    def _note_session(handle: KVCacheHandle, node: Node, depth: int) -> None:
        """Remembers who made the block at `depth` on the path to `node`: the beginning of it is about to be copied."""
        while node.start > depth:
            node = node.parent
        note_sessions(handle, node.sessions)

    def _drop_private(self, handle: KVCacheHandle, row: int, num_blocks: int) -> None:
        """Gives back the blocks from `num_blocks` on, all of them private by now."""
        rows = self.rows
        used = rows.num_blocks_of[row]
        if num_blocks >= used:
            return
        if self.states is not None:
            num_blocks = self.states.shrink(row, num_blocks)
        for group in self.state.growing:
            table = rows.tables[group.index]
            ids = table[row, num_blocks:used]
            group.give_back(ids[ids >= 0], handle.family is not None)  # -1 where published blocks were left just before
            table[row, num_blocks:used] = -1
        rows.num_blocks_of[row] = num_blocks
