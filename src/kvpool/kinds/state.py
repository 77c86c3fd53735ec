"""Layers that keep a state: where each step reads one and where it leaves the next, and which of them are kept."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle, Rows, SequenceBatch
from kvpool.core.kind import StatePlaces
from kvpool.core.node import Node
from kvpool.core.prompt import AdmissionPlan, Prompt
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.kinds.by_block import BlockwiseGroup
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array
from kvpool.prefix.blocks import block_of, remove_block
from kvpool.stats import EvictionReason


class StateGroup(BlockwiseGroup):
    """A block is a checkpoint, all states of a sequence behind one of its tokens.

    A row of its table has a block in some columns only. The block in column c becomes, when block c of the sequence is full,
    the checkpoint behind it. Until then it is the row's live state: the one behind all tokens written so far stands in the
    first column from `(written - 1) // block_size` on that has a block. A step that writes up to `stop` tokens reads it
    and leaves the new state in the first column from `(stop - 1) // block_size` on. So a step that ends with a block and
    is followed by one in another column leaves a checkpoint behind. Published checkpoints are never written again. A row
    has at most two blocks that nobody else knows: its live state, and the place where the step goes that was reserved last.
    """

    has_holes: ClassVar[bool] = True
    has_slots: ClassVar[bool] = False
    sees_writes: ClassVar[bool] = True
    yields_first: ClassVar[bool] = True  # a checkpoint inside a run is worth less than any run

    def first_read(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.block_size

    def longest_valid(self, present: BoolArray, num_tokens: int) -> int:
        """The last checkpoint: a state goes on from where it is, and from nowhere else."""
        kept = np.flatnonzero(present[: num_tokens // self.block_size])
        return (int(kept[-1]) + 1) * self.block_size if len(kept) else 0

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        return int(num_reused > 0) + int(num_blocks > num_reused)

    def column_of(self, table_row: Int32Array, num_tokens: int) -> int:
        """The column that has the state behind `num_tokens`, or will have it; -1 if there is none, as behind no token."""
        if not num_tokens:
            return -1
        first = (num_tokens - 1) // self.block_size
        found = np.flatnonzero(table_row[first:] >= 0)
        return first + int(found[0]) if len(found) else -1

    # --- the life of a sequence --------------------------------------------------------------------------------------

    def needs(self, prompt: Prompt, num_blocks: int, num_reused: int) -> int:
        return int(num_blocks > num_reused)

    def begin(self, cache: Cache, row: int, tip: Node, plan: AdmissionPlan, first: int) -> int:
        """Only the last column gets a block of its own."""
        end = plan.num_blocks
        super().begin(cache, row, tip, plan, end)
        if end <= first:
            return 0
        table = cache.rows.tables[self.index]
        table[row, first:end] = -1
        table[row, end - 1] = self.take(1)[0]
        return 1

    def _takes_block(self, rows: Rows, row_list: Int64Array) -> BoolArray:
        """Which rows need a block if they get more columns. The others take the one of their last column along.

        What a step leaves at the end of a block is a checkpoint, and stays there.
        """
        num_blocks = rows.num_blocks[row_list]
        takes: BoolArray = rows.reserved[row_list] == num_blocks * self.block_size
        takes |= rows.tables[self.index][row_list, num_blocks - 1] < 0  # it was narrowed
        return takes

    def num_grown(self, rows: Rows, grown: Int64Array, counts: Int64Array) -> int:
        return int(self._takes_block(rows, grown).sum())

    def grow(self, rows: Rows, grown: Int64Array, counts: Int64Array, owners: Int64Array, columns: Int64Array) -> None:
        """The last column gets a block: a new one, or that of the column that was the last."""
        table, takes = rows.tables[self.index], self._takes_block(rows, grown)
        old = rows.num_blocks[grown]
        last = np.where(takes, 0, old - 1)
        moved = table[grown, last]
        table[grown[~takes], last[~takes]] = -1
        moved[takes] = self.take(int(takes.sum()))
        table[grown, old + counts - 1] = moved

    def num_used(self, rows: Rows, row: int, column: int) -> int | None:
        return None if column == self.live_column(rows, row) else 0

    def write(self, rows: Rows, row: int, start: int, stop: int) -> None:
        """One step wrote tokens `start..stop` of a row: what stands at places where it did not end is no checkpoint."""
        first, last = start // self.block_size, (stop - 1) // self.block_size
        if first < last:
            self._give_back(rows, row, first, last)

    def _give_back(self, rows: Rows, row: int, first: int, end: int) -> None:
        columns = rows.tables[self.index][row, first:end]
        self.gpu.unref(columns[columns >= 0])
        columns[...] = -1

    def live_column(self, rows: Rows, row: int) -> int:
        """The column that has the state behind all tokens written so far; -1 if none are, or if it was given up."""
        return self.column_of(self._columns(rows, row), rows.written_of[row])

    def _columns(self, rows: Rows, row: int) -> Int32Array:
        columns: Int32Array = rows.tables[self.index][row, : rows.num_blocks_of[row]]
        return columns

    def places(self, batch: SequenceBatch, start: Int64Array, stop: Int64Array) -> StatePlaces:
        """Where a step reads and writes that writes the tokens `start..stop` of each sequence."""
        rows = batch._all_rows
        size, table = self.block_size, rows.tables[self.index]
        if (start >= stop).any():
            raise InvalidArgumentError(
                f"a step writes at least one token of each sequence; asked for {start.tolist()[:8]}..{stop.tolist()[:8]}"
            )
        columns = np.maximum(start - 1, 0) // size
        passed = (columns < rows.first_held[self.index][batch.rows]) & (start > 0)
        sources = table[batch.rows, columns]
        targets = table[batch.rows, (stop - 1) // size]
        sources[start == 0] = -1
        for index in np.flatnonzero((targets < 0) | passed | ((sources < 0) & (start > 0))).tolist():
            row = self._columns(rows, batch.rows.item(index))
            target = self.column_of(row, stop.item(index))
            source = self.column_of(row, start.item(index))
            if target < 0 or passed[index] or (source < 0 < start[index]):
                raise SequenceStateError(
                    f"request {batch.handles[index].request_id!r} has no state at position {start[index]}; "
                    "start at num_written"
                )
            targets[index] = row[target]
            sources[index] = row[source] if source >= 0 else -1
        return StatePlaces(sources, targets)

    def check_rewind(self, rows: Rows, handle: KVCacheHandle, row: int, length: int) -> None:
        """Refuses to go back to where no state was kept."""
        written, column = rows.written_of[row], (length - 1) // self.block_size
        if not 0 < length < written:
            return
        is_kept = self._columns(rows, row)[column] >= 0 or column < rows.first_held[self.index, row]
        if length % self.block_size or not is_kept:
            kept = [(c + 1) * self.block_size for c in np.flatnonzero(self._columns(rows, row) >= 0).tolist()]
            at = ", ".join(str(end) for end in kept if end < written) or "none"
            raise SequenceStateError(
                f"request {handle.request_id!r} cannot be rewound to {length} tokens: its layers keep a state, and states "
                f"were kept behind these numbers of its {written} tokens: {at}"
            )

    def shrink(self, rows: Rows, row: int, num_blocks: int) -> int:
        """Before a row gives up all columns from `num_blocks` on: the last one left takes over the state that it needs.

        Returns how many columns are left. It is one more where the last one is published: the state stays private.
        """
        table, tip = rows.tables[self.index], rows.tips[row]
        used = rows.num_blocks_of[row]
        if num_blocks < 1 or table[row, num_blocks - 1] >= 0:
            return num_blocks
        behind = num_blocks + np.flatnonzero(table[row, num_blocks:used] >= 0)
        if len(behind):
            num_blocks += num_blocks <= tip.end
            moved = table[row, behind[0]]
            table[row, behind[0]] = -1
            table[row, num_blocks - 1] = moved
        return num_blocks

    def step_end(self, cache: Cache, handle: KVCacheHandle, start: int, stop: int) -> int:
        """Where a step should end so that it leaves a checkpoint.

        States are kept where prompts parted so far, behind the last full block of a prompt but its last token, and at
        multiples of `checkpoint_every`.
        """
        every, size = cache.config.checkpoint_every, self.block_size
        stops = [handle.num_matched_tokens, (handle.num_prompt_tokens - 1) // size * size]
        if every is not None:
            following = (start // every + 1) * every
            if following < handle.num_prompt_tokens:
                stops.append(following)
        return min([stop, *(wanted for wanted in stops if wanted > start)])

    # --- checkpoints that are cached ---------------------------------------------------------------------------------

    def passed(self, cache: Cache, tip: Node, first: int, end: int) -> None:
        """Drops unread checkpoints behind a prompt: the next turn goes on from the last one."""
        pinned = cache.pinned_blocks[self.pool]
        for depth in range(first, end):
            node, block = block_of(cache, tip, self, depth)
            if block >= 0 and not self.gpu.refs[block] and block not in pinned:
                remove_block(cache, node, self, depth - node.start, EvictionReason.CONTINUED)

    def needed_from(self, cache: Cache, node: Node) -> int:
        """The depth of the checkpoint in this run that must stay; its end if there is none, or if requests find a later one.

        It is the last one before the next end of a run. A prompt that fills its blocks ends there, and left one more, a block
        earlier: it computes its last token when it comes again, so it needs that one, which serves longer prompts too.
        """
        last, kept = node, self._checkpoints(node)
        while (following := last.only_child()) is not None:
            last = following
            kept += self._checkpoints(last)
        if not kept:
            return node.end
        earlier = last.end - 2
        return min(earlier if last.children is None and earlier in kept else kept[-1], node.end)

    def _checkpoints(self, node: Node) -> list[int]:
        """The depths of the checkpoints in a run."""
        depths: list[int] = (node.start + np.flatnonzero(node.ids[self.index] >= 0)).tolist()
        return depths

    def needed(self, cache: Cache, node: Node, first: int = 0) -> BoolArray:
        """Few are kept, and each was chosen."""
        depths = np.arange(node.start + first, node.end)
        kept: BoolArray = (node.ids[self.index][first:] >= 0) & (depths <= self.needed_from(cache, node))
        return kept

    def must_stay(self, depth: int, first_needed: int) -> bool:
        return depth == first_needed

    def has_last(self, path: list[Node], num_blocks: int) -> bool:
        """Never: the state before the last token is needed to compute that token again."""
        return False

    def pinned_columns(self, present: BoolArray) -> Int64Array:
        num_blocks = self.longest_valid(present, len(present) * self.block_size) // self.block_size
        return super().pinned_columns(present[:num_blocks])

    # --- swapping ----------------------------------------------------------------------------------------------------

    def written_ids(self, rows: Rows, row: int) -> Int32Array:
        ids = rows.visible_blocks(self.index, row).copy()
        ids[np.arange(len(ids)) != self.column_of(ids, rows.written_of[row])] = -1
        return ids

    def fresh_columns(self, rows: Rows, row: int) -> Int64Array:
        """Only the last column counts, unless what it had was written."""
        handle, last = rows.handles[row], rows.num_blocks_of[row] - 1
        assert handle.swapped is not None
        live = np.flatnonzero(handle.swapped[self.index] >= 0)
        passed = max(int(live[-1]) if len(live) else -1, int(rows.first_held[self.index, row]) - 1)
        return np.arange(last, last + int(last > passed))

    def lengths(self, rows: Rows, selection: Any, handles: tuple[KVCacheHandle, ...]) -> Int64Array:
        raise InvalidArgumentError(f"the layers of group {self.index} keep a state: ask state_places where they are")
