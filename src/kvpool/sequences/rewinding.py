"""Tokens taken back: rejected drafts, and final tokens when a sequence goes another way.

What was published stays in the tree; the sequence only moves its tip up. A block that is cut in two is copied, because the
tree keeps the old one.
"""

from __future__ import annotations

from kvpool.config.layers import ceil_div
from kvpool.errors import OutOfBlocksError, SequenceStateError
from kvpool.pools.copies import CopyKind, CopyOp
from kvpool.pools.groups import sink_blocks, window_start
from kvpool.pools.pool import GPU
from kvpool.prefix.node import Node, path_ids
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.in_flight import InFlight
from kvpool.sequences.state import CacheState


class Rewinding:
    """`rewind`: checked first, then done."""

    def __init__(self, state: CacheState, in_flight: InFlight) -> None:
        self.state = state
        self.rows = state.rows
        self.cache = state.cache
        self.context = state.context
        self.tree = state.cache.tree
        self.readers = state.cache.readers
        self.windows = state.cache.windows
        self.in_flight = in_flight

    def rewind(self, handle: KVCacheHandle, num_tokens: int) -> None:
        """Forgets the last `num_tokens` reserved tokens and gives back the blocks behind them."""
        rows, size = self.rows, self.state.block_size
        row = self.state.row_of(handle)
        length = int(rows.reserved[row]) - num_tokens
        rows.moves += 1
        tip = rows.tips[row]
        assert tip is not None
        self.context.sync(tip)
        self._prepare(handle, row, length)
        if length < tip.end * size:
            self._leave_published(handle, row, length)
        self._drop_private(handle, row, ceil_div(length, size))
        rows.reserved[row] = length
        rows.present[row] = min(rows.present.item(row), length)
        rows.following.pop(row, None)
        rows.written[row] = min(int(rows.written[row]), length)
        if int(rows.committed[row]) > length:
            rows.committed[row] = length
            rows.forget_token_ids(row, length)
        if handle.family is not None:
            rows.set_shared(row, True)  # the blocks that it will write now may be older than those it copied
        if handle.publishes and int(rows.known[row]) > int(rows.committed[row]):
            self.in_flight.track(row)
        else:
            self.in_flight.untrack(handle)
        self.state.counters.rewinds += 1
        self.cache.enforce_quota(tip.root)

    def _prepare(self, handle: KVCacheHandle, row: int, length: int) -> None:
        """Before a rewind: reads again what the windows will cover, and makes room for the block that is cut in two."""
        rows, size = self.rows, self.state.block_size
        committed = min(length, rows.committed.item(row))
        tip = rows.tips[row]
        assert tip is not None
        path = tip.path()
        reopened: list[tuple[int, int, int]] = []
        for group in self.context.windowed:
            start, stop = window_start(self.state.groups[group], committed, size), int(rows.window_start[group, row])
            left = rows.tables[group][row, start:stop]
            # The tree may have lost blocks since they left the window; the table is not told.
            left[: max(0, tip.end - start)] = path_ids(path, tip.end, group)[start:stop]
            if (left[: max(0, ceil_div(committed, size) - start)] < 0).any():
                raise SequenceStateError(
                    f"request {handle.request_id!r} cannot be rewound to {committed} committed tokens: "
                    f"layer group {group} has already dropped blocks that its window would cover again"
                )
            if start < stop:
                reopened.append((group, start, stop))
        for group, start, stop in reopened:
            self.windows.enter(tip.root, group, rows.tables[group][row, start : min(stop, tip.end)])
            rows.window_start[group, row] = start
        if length % size and length < tip.end * size:
            try:
                what = f"rewinding {handle.request_id!r}"
                self.state.require(list(self.state.per_position), handle.scope.tenant, what)
            except OutOfBlocksError:
                for group, start, stop in reopened:
                    ids = rows.tables[group][row, start : min(stop, tip.end)]
                    self.windows.leave(tip, group, start, min(stop, tip.end) - 1, ids)
                    rows.window_start[group, row] = stop
                raise

    def _leave_published(self, handle: KVCacheHandle, row: int, length: int) -> None:
        """Moves the tip up to the last full block before `length`; a block cut in two is copied."""
        rows, size = self.rows, self.state.block_size
        rows.keep_token_ids(row)
        blocks, extra = divmod(length, size)
        if rows.is_open[row]:
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
        for group in range(self.state.growing):
            table = rows.tables[group]
            if group in self.context.windowed:
                sinks = min(sink_blocks(self.state.groups[group], size), end)
                if blocks < sinks:
                    self.windows.leave(old, group, blocks, sinks - 1, table[row, blocks:sinks])
                start = max(blocks, int(rows.window_start[group, row]))
                self.windows.leave(old, group, start, end - 1, table[row, start:end])
            if extra:
                dst = self.state.take(group, 1)
                src = table[row, blocks : blocks + 1].copy()
                self.state.copies.append(CopyOp(CopyKind.COPY_ON_WRITE, group, GPU, GPU, src, dst.copy(), extra))
                self.state.counters.copies_on_write += 1
                handle.stats.copies_on_write += 1
                table[row, blocks] = dst[0]
            table[row, blocks + bool(extra) : end] = -1
        rows.tips[row] = new
        self.readers.release(old)

    @staticmethod
    def _note_session(handle: KVCacheHandle, node: Node, depth: int) -> None:
        """Remembers who made the block at `depth` on the path to `node`: the beginning of it is about to be copied."""
        while node.start > depth:
            node = node.parent
        if node.session is not None and node.session not in handle.copied_sessions:
            handle.copied_sessions = (*handle.copied_sessions, node.session)

    def _drop_private(self, handle: KVCacheHandle, row: int, num_blocks: int) -> None:
        """Gives back the blocks from `num_blocks` on, all of them private by now."""
        rows = self.rows
        used = int(rows.num_blocks[row])
        if num_blocks >= used:
            return
        for group in range(self.state.growing):
            table = rows.tables[group]
            ids = table[row, num_blocks:used]
            self.state.give_back(group, ids[ids >= 0], handle)  # -1 where published blocks were left just before
            table[row, num_blocks:used] = -1
        rows.num_blocks[row] = num_blocks
