"""The states of live sequences: where each step reads one and where it leaves the next, and which of them are kept.

`StateGroup` says what the columns of its table mean. A row has at most two blocks that nobody else knows: its live state, and
the place where the step goes that was reserved last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array
from kvpool.pools.groups import StateGroup
from kvpool.sequences.batch import SequenceBatch
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.state import CacheState


class StatePlaces(NamedTuple):
    """Where one step of a batch reads states and where it leaves them: blocks of the group whose layers keep states."""

    sources: Int32Array  # -1 for a sequence that begins
    targets: Int32Array


class RowStates:
    """Moves blocks between the columns of the table whose layers keep a state. Others ask `CacheState.stateful` first."""

    def __init__(self, state: CacheState, group: StateGroup) -> None:
        self.state = state
        self.rows = state.rows
        self.group = group
        self.table_of = group.index

    # --- steps -------------------------------------------------------------------------------------------------------

    def takes_block(self, row_list: Int64Array) -> BoolArray:
        """Which rows need a block if they get more columns. The others take the one of their last column along.

        What a step leaves at the end of a block is a checkpoint, and stays there.
        """
        rows = self.rows
        num_blocks = rows.num_blocks[row_list]
        takes: BoolArray = rows.reserved[row_list] == num_blocks * self.group.block_size
        takes |= rows.tables[self.table_of][row_list, num_blocks - 1] < 0  # it was narrowed
        return takes

    def grow(self, grown: Int64Array, old_columns: Int64Array, new_columns: Int64Array, takes: BoolArray) -> None:
        """These rows have so many columns now, and had so many: the last one gets a block."""
        table = self.rows.tables[self.table_of]
        last = np.where(takes, 0, old_columns - 1)
        moved = table[grown, last]
        table[grown[~takes], last[~takes]] = -1
        moved[takes] = self.group.take(int(takes.sum()))
        table[grown, new_columns - 1] = moved

    def write(self, row: int, start: int, stop: int) -> None:
        """One step wrote tokens `start..stop` of a row: what stands at places where it did not end is no checkpoint."""
        first, last = start // self.group.block_size, (stop - 1) // self.group.block_size
        if first < last:
            self._give_back(row, first, last)

    def _give_back(self, row: int, first: int, end: int) -> None:
        columns = self.rows.tables[self.table_of][row, first:end]
        self.group.gpu.release(columns[columns >= 0])
        columns[...] = -1

    def live_column(self, row: int) -> int:
        """The column that has the state behind all tokens written so far; -1 if none are, or if it was given up."""
        return self.group.column_of(self._columns(row), self.rows.written_of[row])

    def _columns(self, row: int) -> Int32Array:
        columns: Int32Array = self.rows.tables[self.table_of][row, : self.rows.num_blocks_of[row]]
        return columns

    def of_step(self, batch: SequenceBatch, start: Int64Array, stop: Int64Array) -> StatePlaces:
        """Where a step reads and writes that writes the tokens `start..stop` of each sequence."""
        size, table = self.group.block_size, self.rows.tables[self.table_of]
        if (start >= stop).any():
            raise InvalidArgumentError(
                f"a step writes at least one token of each sequence; asked for {start.tolist()[:8]}..{stop.tolist()[:8]}"
            )
        columns = np.maximum(start - 1, 0) // size
        passed = (columns < self.rows.window_start[self.table_of][batch.rows]) & (start > 0)
        sources = table[batch.rows, columns]
        targets = table[batch.rows, (stop - 1) // size]
        sources[start == 0] = -1
        for index in np.flatnonzero((targets < 0) | passed | ((sources < 0) & (start > 0))).tolist():
            row = self._columns(batch.rows.item(index))
            target = self.group.column_of(row, stop.item(index))
            source = self.group.column_of(row, start.item(index))
            if target < 0 or passed[index] or (source < 0 < start[index]):
                raise SequenceStateError(
                    f"request {batch.handles[index].request_id!r} has no state at position {start[index]}; "
                    "start at num_written"
                )
            targets[index] = row[target]
            sources[index] = row[source] if source >= 0 else -1
        return StatePlaces(sources, targets)

    # --- backwards ---------------------------------------------------------------------------------------------------

    def check_rewind(self, handle: KVCacheHandle, row: int, length: int) -> None:
        """Refuses to go back to where no state was kept."""
        written, column = self.rows.written_of[row], (length - 1) // self.group.block_size
        if not 0 < length < written:
            return
        is_kept = self._columns(row)[column] >= 0 or column < self.rows.window_start[self.table_of, row]
        if length % self.group.block_size or not is_kept:
            kept = [(c + 1) * self.group.block_size for c in np.flatnonzero(self._columns(row) >= 0).tolist()]
            at = ", ".join(str(end) for end in kept if end < written) or "none"
            raise SequenceStateError(
                f"request {handle.request_id!r} cannot be rewound to {length} tokens: its layers keep a state, and states "
                f"were kept behind these numbers of its {written} tokens: {at}"
            )

    def shrink(self, row: int, num_blocks: int) -> int:
        """Before a row gives up all columns from `num_blocks` on: the last one left takes over the state that it needs.

        Returns how many columns are left. It is one more where the last one is published: the state stays private.
        """
        table, tip = self.rows.tables[self.table_of], self.rows.tips[row]
        assert tip is not None
        used = self.rows.num_blocks_of[row]
        if num_blocks < 1 or table[row, num_blocks - 1] >= 0:
            return num_blocks
        behind = num_blocks + np.flatnonzero(table[row, num_blocks:used] >= 0)
        if len(behind):
            num_blocks += num_blocks <= tip.end
            moved = table[row, behind[0]]
            table[row, behind[0]] = -1
            table[row, num_blocks - 1] = moved
        return num_blocks

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def next_stop(self, handle: KVCacheHandle, start: int) -> int | None:
        """Where the step should end that begins behind `start` tokens, so that it leaves a checkpoint; None: anywhere.

        States are kept where prompts parted so far, behind the last full block of a prompt but its last token, and at
        multiples of `checkpoint_every`.
        """
        every, size = self.state.config.checkpoint_every, self.group.block_size
        stops = [handle.num_matched_tokens, (handle.num_prompt_tokens - 1) // size * size]
        if every is not None:
            following = (start // every + 1) * every
            if following < handle.num_prompt_tokens:
                stops.append(following)
        return min((stop for stop in stops if stop > start), default=None)
