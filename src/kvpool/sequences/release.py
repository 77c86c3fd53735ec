"""The end of sequences: what they published stays cached, what only they held becomes free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.pools.arrays import Int32Array, Int64Array, within
from kvpool.pools.pool import HOST
from kvpool.prefix.node import NEVER, Node
from kvpool.prefix.retention import Retention
from kvpool.sequences.handle import GivenHandle, KVCacheHandle
from kvpool.sequences.state import CacheState
from kvpool.sequences.windows import RowWindows
from kvpool.stats import EvictionReason


class Releaser:
    """`free`, of one sequence or many; also the halves of it that swaps need. Each checks first and then cannot fail."""

    def __init__(self, state: CacheState, windows: RowWindows) -> None:
        self.state = state
        self.rows = state.rows
        self.requests = state.requests
        self.keeps_remainders = state.config.cache_unfilled_blocks
        self.cache = state.cache
        self.tree = state.cache.tree
        self.readers = state.cache.readers
        self.expiry = state.cache.expiry
        self.publisher = state.publisher
        self.in_flight = state.in_flight
        self.windows = windows

    def free(self, handle: GivenHandle, keep: bool, is_listed: bool = True) -> None:
        """Ends a sequence; what it published stays cached unless `keep` is False. `is_listed`: the index still has it."""
        row = self.state.any_row_of(handle)
        if is_listed:
            self._forget(handle)
        tip = self.rows.tips[row]
        assert tip is not None
        if handle.swapped is not None:
            root = tip
            if not keep and handle.publishes:
                final = self.rows.token_ids(row)[: self.rows.committed_of[row]]
                tip = next(reversed(self.tree.match(handle.scope, final).path), root)
            self.release_host(handle)
            self.readers.release(root)
        else:
            self.release_gpu(handle, row, keep and self.keeps_remainders)
        if not keep:
            self._drop_own(tip, handle.serial)
        if handle.inflight is not None or handle.family is not None:
            self._leave_others(handle, row)
        handle.row = -1
        if tip.root.quota is not None:
            self.cache.enforce_quota(tip.root)
        self.rows.drop_row(row)

    def _forget(self, handle: KVCacheHandle) -> None:
        """Takes a request out of the index, first of all: that runs code of its id, which may raise by now."""
        try:
            found = self.requests.pop(handle.request_id, None)
        except Exception as error:
            raise InvalidArgumentError(f"a request cannot be freed by its id {handle.request_id!r}: {error}") from None
        if found is not handle:
            if found is not None:
                self.requests[found.request_id] = found
            raise InvalidArgumentError(f"its id {handle.request_id!r} is not what it was when the request was admitted")

    def _leave_others(self, handle: KVCacheHandle, row: int) -> None:
        """Those who wait for the block that it was computing, and the forks that share blocks with it, go on without it."""
        if handle.inflight is not None:
            self.in_flight.hand_over(handle)
        if handle.family is not None:
            handle.family.discard(row)
            self.rows.following.pop(row, None)
            self.publisher.publish_postponed(handle.family)

    def release_host(self, handle: KVCacheHandle) -> None:
        """Gives back the host blocks of a swapped-out sequence."""
        assert handle.swapped is not None
        for group, ids in zip(self.state.groups, handle.swapped.ids, strict=True):
            group.on(HOST).release(ids[ids >= 0])
        handle.swapped = None

    def release_gpu(self, handle: KVCacheHandle, row: int, keep_remainder: bool = False) -> None:
        """Lets go of every GPU block of a row: published ones stay in the tree, private ones become free.

        With `keep_remainder` the unfilled last block enters the tree as well.
        """
        rows = self.rows
        tip = rows.tips[row]
        assert tip is not None
        if tip.open_row == row:
            self.publisher.close(row)
        if keep_remainder:
            tip = self.publisher.publish_remainder(row, handle, tip)
        used, published = rows.num_blocks_of[row], tip.start + tip.num_blocks
        if not self.state.is_simple or handle.family is not None:
            self._release_groups(handle, row, tip, used, published)
        elif used > published:
            place = row * rows.num_columns
            self.state.gpu_pools[0].give(rows.first_table, place + published, place + used)
        if handle.retention is not None and tip is not tip.root:
            self._apply_retention(handle.retention, tip, handle.num_prompt_tokens)
        if handle.hint:
            self._pass_on(handle, tip)
        self.readers.release(tip)

    def _pass_on(self, handle: KVCacheHandle, tip: Node) -> None:
        """What was said about a request holds for the runs that it published, or for the last one that it read."""
        tip.hint = handle.hint
        while tip is not tip.root and tip.published_by == handle.serial:
            tip.hint = handle.hint
            tip = tip.parent

    def _release_groups(self, handle: KVCacheHandle, row: int, tip: Node, used: int, published: int) -> None:
        """Gives back private blocks of a row, between the published ones and `used`, and leaves its windows."""
        rows, shared = self.rows, handle.family is not None
        cross = rows.num_cross_blocks.item(row)
        for group in self.state.groups:
            first, end = group.pick((published, used), (0, cross))
            if first < end:
                group.give_back(rows.tables[group.index][row, first:end], shared)
        if cross:
            self.state.leave_encoded(handle, row)
        self.windows.leave(row, tip, 0, published)

    def _apply_retention(self, retention: Retention, tip: Node, num_prompt_tokens: int) -> None:
        """Cuts the path where priorities change and sets them."""
        size, now = self.state.context.block_size, self.state.context.now
        for cut in retention.cuts(num_prompt_tokens, size):
            node = tip
            while node.start >= cut:
                node = node.parent
            if node.end > cut:
                self.tree.split(node, cut - node.start)
        node = tip
        while node is not node.root:
            priority, duration = retention.priority_at(node.start * size, num_prompt_tokens)
            if priority is not None:
                self.expiry.set_priority(node, priority, NEVER if duration is None else now + duration)
            node = node.parent

    def _drop_own(self, tip: Node, serial: int) -> None:
        """Drops what a request published and nobody else uses."""
        node = tip
        while node.is_candidate() and node.published_by == serial:
            parent = node.parent
            self.cache.drop_tail(node, node.num_blocks, EvictionReason.EXPLICIT)
            node = parent

    def free_batch(self, given: Sequence[GivenHandle], keep: bool) -> None:
        """Ends many sequences; checked as a whole first."""
        row_list = [self.state.any_row_of(handle) for handle in given]
        handles: list[KVCacheHandle] = list(given)
        if len(set(row_list)) < len(row_list):
            twice = next(handle for i, handle in enumerate(handles) if handle.row in row_list[:i])
            raise SequenceStateError(f"request {twice.request_id!r} stands twice in the batch to free")
        forgotten: list[KVCacheHandle] = []
        try:
            for handle in handles:
                self._forget(handle)
                forgotten.append(handle)
        except InvalidArgumentError:
            self.requests.update((handle.request_id, handle) for handle in forgotten)
            raise
        simple = keep and self.state.is_simple
        plain = [h for h in handles if simple and h.swapped is None and h.retention is None and h.family is None]
        if len(plain) > 1:
            self._free_plain([h.row for h in plain], plain)
        for handle in handles:
            if handle.row >= 0:
                self.free(handle, keep, is_listed=False)

    def _free_plain(self, row_list: list[int], handles: list[KVCacheHandle]) -> None:
        """`free` for sequences of one full-attention group without forks, private blocks given back in one go."""
        rows, size = self.rows, self.state.context.block_size
        index = np.array(row_list)
        used = rows.num_blocks[index]
        longest = int(used.max())
        done: list[int] = (rows.committed[index] // size).tolist()
        have: list[int] = rows.num_history[index].tolist()
        table = rows.tables[0][index, :longest]  # a copy, of which nodes may keep slices
        blocks: list[Int32Array] = list(table)
        alike = longest * len(index) <= 4 * int(used.sum())
        published: list[int] = []
        for i, row in enumerate(row_list):
            tip = rows.tips[row]
            assert tip is not None
            if tip.open_row == row:
                end, start = done[i], tip.start
                tip.open_row = -1
                tip.num_blocks = end - start
                tip.tokens = rows.final_token_ids(row, start * size, end * size, have[i])
                ids = blocks[i] if end - start == longest else blocks[i][start:end]
                tip.ids = (ids if alike else ids.copy(),)
            if self.keeps_remainders:
                tip = rows.tips[row] = self.publisher.publish_remainder(row, handles[i], tip)
            published.append(tip.start + tip.num_blocks)
        rows.grows_alone[index] = False
        self._give_tails(table, used, np.array(published))
        for i, row in enumerate(row_list):
            tip, handle = rows.tips[row], handles[i]
            assert tip is not None
            if handle.hint:
                self._pass_on(handle, tip)
            self.readers.release(tip)
            if handle.inflight is not None:
                self._leave_others(handle, row)
            handle.row = -1
            if tip.root.quota is not None:
                self.cache.enforce_quota(tip.root)
        rows.drop_rows(index)

    def _give_tails(self, table: Int32Array, used: Int64Array, published: Int64Array) -> None:
        """Frees what each row of `table` has between its published blocks and its end."""
        counts = np.maximum(used - published, 0)
        if counts.any():
            columns = np.repeat(published, counts) + within(counts)
            self.state.gpu_pools[0].give(table[np.repeat(np.arange(len(counts)), counts), columns])
