"""Live sequences as rows of arrays: lengths, block tables and token ids.

One row per live sequence, one block table per layer group, all preallocated and growable. Batch operations index these
arrays with a whole batch at once, and kernels are handed the table itself. Numbers of a single row are read and written
through memoryviews (`committed_of` for `committed`), which take half as long. A row keeps the token ids it knows in
`history` (one growing array per row); ids that arrive one per step go to `recent`, a narrow matrix that a whole batch
writes in one operation, and move to `history` when the matrix row is full or somebody reads them. Placeholder tokens of
multimodal items are kept as `symbols`, here and in the tree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np

from kvpool.core.node import Node
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, copied, put
from kvpool.pools.symbols import Symbols
from kvpool.stats import MissCause

RECENT_TOKENS: Final = 128


HandleT = TypeVar("HandleT")  # a live sequence as its user sees it; rows only remember whose they are


class SequenceRows(Generic[HandleT]):
    """The struct of arrays behind all live sequences. Lengths are in tokens, `num_blocks` in blocks."""

    def __init__(
        self,
        groups: Sequence[Any],
        block_size: int,
        lock: threading.RLock,
        num_rows: int = 64,
        num_columns: int = 128,
    ) -> None:
        num_groups = len(groups)
        self.num_columns = num_columns  # of the tables
        self.lock = lock  # the manager's one lock: whoever reads or changes rows holds it
        self.block_size = block_size
        self.groups = groups  # `Group`s, whose module imports this one
        self.all_grow = all(group.grows for group in groups)
        self.by_block = [group.by_block for group in groups]
        self.num_shared = 0  # rows flagged in `shared`
        self.moves = 0  # grows whenever a row ends, or its blocks or lengths change other than by one decoding step
        self.reserved: Int64Array = np.zeros(num_rows, np.int64)
        self.written: Int64Array = np.zeros(num_rows, np.int64)
        self.committed: Int64Array = np.zeros(num_rows, np.int64)
        self.num_blocks: Int64Array = np.zeros(num_rows, np.int64)
        self.known: Int64Array = np.zeros(num_rows, np.int64)  # ids known: history followed by recent
        self.num_history: Int64Array = np.zeros(num_rows, np.int64)
        self.num_fixed: Int64Array = np.zeros(num_rows, np.int64)
        self.present: Int64Array = np.zeros(num_rows, np.int64)  # places below this have their data, written or not
        # `KVCacheHandle.serial` of the sequence whose blocks are in a row; -1 if it holds none on the GPU
        self.serials: Int64Array = np.full(num_rows, -1, np.int64)
        # The first block that a row still reads, those apart that it reads always
        self.first_held: Int64Array = np.zeros((num_groups, num_rows), np.int64)
        self.recent: Int32Array = np.zeros((num_rows, RECENT_TOKENS), np.int32)
        self.grows_alone: BoolArray = np.zeros(num_rows, np.bool_)  # its tip is open and takes blocks without a word
        self.shared: BoolArray = np.zeros(num_rows, np.bool_)  # blocks that it will write may have a second reader
        self.tables: list[Int32Array] = [np.full((num_rows, num_columns), -1, np.int32) for _ in range(num_groups)]
        # The deepest node that a sequence holds, and whose row it is
        self.tips: list[Node] = [_NOBODY] * num_rows
        self.handles: list[HandleT] = [_NOBODY] * num_rows
        self.history: list[Int32Array] = [np.empty(0, np.int32)] * num_rows
        # Forks that share blocks another one published: up to this many tokens, where its path ends, a row has not
        # committed them itself, and reads from its path which they are.
        self.following: dict[int, int] = {}
        # Position of a history's first id; those before are read from the row's path
        self.history_start = [0] * num_rows
        self.serial = 0  # grows with every sequence
        self.missed_tokens: Callable[[HandleT], dict[MissCause, int]]  # of a handle; set by who can tell
        self.symbols = Symbols()  # what the negative ones among token ids stand for
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._view_arrays()

    def _view_arrays(self) -> None:
        """Makes the views that single rows are read and written through."""
        self.reserved_of = self.reserved.data
        self.written_of = self.written.data
        self.committed_of = self.committed.data
        self.num_blocks_of = self.num_blocks.data
        self.known_of = self.known.data
        self.num_history_of = self.num_history.data
        self.present_of = self.present.data
        self.grows_alone_of = self.grows_alone.data
        self.serials_of = self.serials.data
        self._view_tables()

    def _view_tables(self) -> None:
        self.flat_tables = [table.reshape(-1) for table in self.tables]  # one row behind the other
        self.first_table = self.flat_tables[0]
        self.recent_ids = self.recent.reshape(-1)
        self._unwritable = [table.view() for table in self.tables]
        for table in self._unwritable:
            table.setflags(write=False)

    @property
    def num_rows(self) -> int:
        return len(self.handles)

    def live_rows(self) -> list[int]:
        return [row for row, handle in enumerate(self.handles) if handle is not None]

    def new_row(self, handle: HandleT, num_blocks: int, num_fixed: int = 0) -> int:
        """A row with room for so many blocks in its tables, which the caller fills; behind them they are clear."""
        if not self._free_rows:
            self._grow_rows()
        if num_blocks > self.num_columns or num_fixed > self.num_columns:
            self.ensure_columns(max(num_blocks, num_fixed))
        row = self._free_rows.pop()
        self.handles[row] = handle
        left = self.num_blocks_of[row]  # by the sequence that had it before
        if not self.all_grow:
            left = max(left, self.num_fixed.item(row))
            self.num_fixed[row] = num_fixed
        if left > num_blocks or not self.all_grow:
            for group, table in zip(self.groups, self.tables, strict=True):
                table[row, group.pick(num_blocks, num_fixed) : left] = -1
        return row

    def copy_row(self, source: int, handle: HandleT) -> int:
        """A row that begins with the tip, lengths and token ids of another one; its tables are the caller's to fill."""
        row = self.new_row(handle, self.num_blocks_of[source], self.num_fixed.item(source))
        for array in (self.reserved, self.written, self.committed, self.num_blocks, self.present):
            array[row] = array[source]
        self.first_held[:, row] = self.first_held[:, source]
        self.tips[row] = self.tips[source]
        if source in self.following:
            self.follow(row, self.following[source])
        self.store_recent(source)
        known, base = self.known_of[source], self.history_start[source]
        self.history[row] = self.history[source][: known - base]  # whoever appends first makes its own copy
        self.history_start[row] = base
        self.known_of[row] = self.num_history_of[row] = known
        return row

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Makes rows available again. Their blocks were released before.

        Their lengths and tables stay, because whoever gets them next sets its own.
        """
        for row in rows:
            if self.num_shared:
                self.set_shared(row, False)
            self.handles[row] = self.tips[row] = _NOBODY
            self.history[row] = _NO_TOKENS
            self.history_start[row] = 0
            self.serials_of[row] = -1
        self._free_rows += rows
        self.moves += 1

    def set_shared(self, row: int, shared: bool) -> None:
        """Flags a row whose next write may meet a block with a second reader."""
        self.num_shared += int(shared) - int(self.shared[row])
        self.shared[row] = shared

    def follow(self, row: int, num_tokens: int) -> None:
        """A row follows the nodes of its path up to `num_tokens`, where they end, unless it has committed as many."""
        if num_tokens > self.committed_of[row]:
            self.following[row] = num_tokens
        else:
            self.following.pop(row, None)

    def _grow_rows(self) -> None:
        old = self.num_rows
        self._free_rows.extend(range(2 * old - 1, old - 1, -1))
        for name in (
            *("reserved", "written", "committed", "num_blocks", "num_fixed", "present", "known", "num_history"),
            *("grows_alone", "shared", "recent"),
        ):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.first_held = np.concatenate([self.first_held, np.zeros_like(self.first_held)], axis=1)
        self.tables = [np.concatenate([table, np.full_like(table, -1)]) for table in self.tables]
        self.serials = np.concatenate([self.serials, np.full_like(self.serials, -1)])
        self.tips.extend([_NOBODY] * old)
        self.history.extend([_NO_TOKENS] * old)
        self.history_start.extend([0] * old)
        self.handles.extend([_NOBODY] * old)
        self._view_arrays()

    def ensure_columns(self, num_blocks: int) -> None:
        """Widens the tables so that a sequence of `num_blocks` fits."""
        columns = self.num_columns
        if num_blocks <= columns:
            return
        self.num_columns = wider = max(num_blocks, 2 * columns)
        for group, table in enumerate(self.tables):
            grown = np.full((table.shape[0], wider), -1, np.int32)
            grown[:, :columns] = table
            self.tables[group] = grown
        self._view_tables()

    def all_blocks(self, group: int, row: int) -> Int32Array:
        """A row's part of a group's table, as a view that may be written."""
        counts = self.groups[group].pick(self.num_blocks, self.num_fixed)
        return self.tables[group][row, : counts.item(row)]

    def visible_blocks(self, group: int, row: int) -> Int32Array:
        """A row's block ids in one group, -1 where a block was given up. Nobody may write them."""
        end = self.num_blocks_of[row] if self.all_grow else len(self.all_blocks(group, row))
        ids: Int32Array = self._unwritable[group][row, :end]
        if self.by_block[group]:
            ids = self.groups[group].visible(ids, int(self.first_held[group, row]))
            ids.setflags(write=False)
        return ids

    # --- token ids ---------------------------------------------------------------------------------------------------

    def ids_between(self, row: int, start: int, stop: int) -> Int32Array:
        """Ids `start..stop` of a row, as a view that stays valid while the row only grows."""
        base = self.history_start[row]
        if start < base:
            return self.token_ids(row)[start:stop]
        if stop > self.num_history_of[row]:
            self.store_recent(row)
        return self.history[row][start - base : stop - base]

    def token_ids(self, row: int) -> Int32Array:
        """All ids known of a row; a copy if the first of them are read from the tree."""
        self.store_recent(row)
        base = self.history_start[row]
        ids = self.history[row][: self.known_of[row] - base]
        return np.concatenate([self.path_ids(row, base), ids]) if base else ids

    def path_ids(self, row: int, stop: int) -> Int32Array:
        """The first `stop` ids of a row as the nodes of its path hold them."""
        parts: list[Int32Array] = []
        node = self.tips[row]
        while node is not node.root:
            first = node.start * self.block_size
            if first < stop:
                parts.append(node.tokens[: stop - first])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else _NO_TOKENS

    def keep_token_ids(self, row: int) -> None:
        """Copies what is read from the tree: the row is about to leave its path."""
        if self.history_start[row]:
            self.history[row] = self.token_ids(row)
            self.history_start[row] = 0

    def store_recent(self, row: int, more: Int32Array | None = None) -> None:
        """Moves ids from the matrix of recent ones to the row's history, and adds `more` behind them."""
        have, known, base = self.num_history_of[row], self.known_of[row], self.history_start[row]
        total = known if more is None else known + len(more)
        if total == have:
            return
        history = self.history[row]
        if len(history) < total - base:
            grown = np.empty(total - base + max((total - base) // 4, RECENT_TOKENS), np.int32)
            grown[: have - base] = history[: have - base]
            self.history[row] = history = grown
        history[have - base : known - base] = self.recent[row, : known - have]
        if more is not None:
            history[known - base : total - base] = more
        self.known_of[row] = self.num_history_of[row] = total

    def final_token_ids(self, row: int, start: int, stop: int, have: int) -> Int32Array:
        """Ids `start..stop` for a node that outlives the row, whose `num_history` is `have`: no larger than it must be."""
        history, base = self.history[row], self.history_start[row]
        if stop <= have:
            if start == base and stop - base == len(history):
                return history
            ids = history[start - base : stop - base]
            return ids.copy() if len(history) > 1.25 * len(ids) + 256 else ids
        recent = row * RECENT_TOKENS  # where those of this row begin
        if stop - base <= len(history):
            put(history, have - base, self.recent_ids, recent, recent + stop - have)
            return history[start - base : stop - base]
        if start >= have:
            return copied(self.recent_ids, recent + start - have, recent + stop - have)
        ids = np.empty(stop - start, np.int32)
        put(ids, 0, history, start - base, have - base)
        put(ids, have - start, self.recent_ids, recent, recent + stop - have)
        return ids

    def set_token_ids(self, row: int, tokens: Int32Array, num_cached: int) -> None:
        """Starts a row with the ids of its prompt: a copy, but for the first `num_cached`, which its path holds."""
        known = len(tokens)
        self.history[row] = copied(tokens, num_cached, known) if num_cached < known else _NO_TOKENS
        self.history_start[row] = num_cached
        self.known_of[row] = self.num_history_of[row] = known

    def forget_token_ids(self, row: int, known: int) -> None:
        """Keeps only the first `known` ids (after a rewind)."""
        ids = self.token_ids(row)
        if known < len(ids):
            # Others (closed nodes, forks) may look at the same memory: what follows must not be overwritten in place.
            self.history[row] = ids[:known].copy()
            self.history_start[row] = 0
            self.known_of[row] = self.num_history_of[row] = known


_NO_TOKENS: Int32Array = np.empty(0, np.int32)
_NOBODY: Any = None  # tip and handle of a row without a sequence: nobody asks for them
