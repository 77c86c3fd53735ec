"""What a kind of layer group decides, from the admission of a sequence to its end. `kinds/` has a file for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kvpool.config import LayerGroup, Tier
from kvpool.config.layers import ceil_div
from kvpool.core.handle import KVCacheHandle, Rows
from kvpool.core.node import Node, path_ids
from kvpool.core.prompt import AdmissionPlan, Prompt
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, put
from kvpool.pools.pool import GPU, BlockPool

T = TypeVar("T")
TheCache: TypeAlias = Any  # a `Cache`, whose module imports this one


class StatePlaces(NamedTuple):
    """Where one step of a batch reads states and where it leaves them: blocks of the group whose layers keep states."""

    sources: Int32Array  # -1 for a sequence that begins
    targets: Int32Array


class Group:
    """The blocks of one layer group, and what happens to them in the life of a sequence.

    As it stands here, it is full attention: every query reads every block. Blocks are written by one sequence and read along
    paths of the tree, so a single owner is not counted: counting starts when forks share a block. A kind of one's own is a
    class below this one, or below `ByBlock`, in a file of its own, and an entry in `kinds.KINDS`. It says whether a single
    owner is counted, what the next query reads, and what differs from admission to the end.
    """

    grows: ClassVar[bool] = True  # its blocks follow the tokens of the sequence, and enter the prefix tree
    by_block: ClassVar[bool] = False  # each block counts its own readers, and may leave while its run stays
    has_holes: ClassVar[bool] = False  # only some columns of a table have a block
    has_slots: ClassVar[bool] = True  # each position of the sequence has a place of its own, which steps write
    sees_writes: ClassVar[bool] = False  # it is told what every step wrote: `write`
    single_owner: ClassVar[int] = 0  # what `refs` says of a private block that one sequence holds

    def __init__(self, spec: LayerGroup, block_size: int, tiers: list[BlockPool]) -> None:
        self.spec = spec
        self.index = spec.index
        self.pool = spec.pool
        self.block_size = block_size
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.sinks = ceil_div(spec.sink_tokens, block_size)  # leading blocks that stay whatever follows

    @classmethod
    def pick(cls, of_sequence: T, of_fixed: T) -> T:
        """Which of two numbers counts for this kind: that of what grows with a sequence, or of what is fixed at admission."""
        return of_sequence

    def on(self, tier: Tier) -> BlockPool:
        """The pool that holds this group's blocks on a tier."""
        return self.tiers[tier]

    # --- private blocks ----------------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> Int32Array:
        """New GPU blocks for one sequence."""
        return self.gpu.take(num_blocks, self.single_owner)

    def ref(self, ids: Int32Array) -> None:
        """One more sequence holds private GPU blocks. -1 is no block."""
        self.gpu.ref(ids[ids >= 0])

    def unref(self, ids: Int32Array, shared: bool) -> None:
        """A sequence lets go of private GPU blocks; `shared` says whether forks may hold them too. -1 is no block."""
        if shared or self.single_owner:
            self.gpu.unref(ids[ids >= 0], self.single_owner)
        else:
            self.gpu.give(ids)

    # --- what a query reads ------------------------------------------------------------------------------------------

    def first_read(self, num_tokens: int) -> int:
        """The first block that the query at position `num_tokens` (the next one) can still read, sinks apart."""
        return 0

    def reads(self, columns: Any, num_tokens: int) -> BoolArray:
        """Which of these blocks the query at position `num_tokens` reads, if it has that many before it."""
        read: BoolArray = (columns >= self.first_read(num_tokens)) | (columns < self.sinks)
        return read

    def hidden(self, columns: Any, starts: Any) -> BoolArray:
        """Which blocks a sequence has given up that reads from block `starts` on."""
        gone: BoolArray = (columns < starts) & (columns >= self.sinks)
        return gone

    def visible(self, ids: Int32Array, start: int) -> Int32Array:
        """Block ids with -1 for those before `start` that were given up (a copy if there are any)."""
        if start <= self.sinks:
            return ids
        shown = ids.copy()
        shown[self.sinks : start] = -1
        return shown

    def longest_valid(self, present: BoolArray, num_tokens: int) -> int:
        """The longest prefix, at most `num_tokens`, whose next query finds every block of this group that it reads.

        `present[i]` says whether block i of the path is there; the last block may be used in part. Shorter candidates are
        whole blocks only.
        """
        missing = np.flatnonzero(~present[: ceil_div(num_tokens, self.block_size)])
        return int(missing[0]) * self.block_size if len(missing) else num_tokens

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        """Blocks that a request holds right after its admission, reused ones included.

        It has places in `num_blocks` blocks, `num_fixed` for what does not grow, and reuses `num_reused` whole blocks.
        """
        return num_blocks

    # --- the life of a sequence --------------------------------------------------------------------------------------

    def needs(self, prompt: Prompt, num_blocks: int, num_reused: int) -> int:
        """Blocks that a request takes which has places in `num_blocks` blocks and reuses `num_reused` of them."""
        return num_blocks - num_reused

    def begin(self, cache: TheCache, row: int, tip: Node, plan: AdmissionPlan, first: int) -> int:
        """Fills the table of a new row: with what it reuses, and from its column `first` on with new blocks.

        Returns how many new blocks its tokens take.
        """
        table, place = cache.rows.flat_tables[self.index], row * cache.rows.num_columns
        reused, new = plan.match.num_blocks, plan.num_blocks - first
        if reused:
            put(table, place, path_ids(plan.match.path, reused, self.index), 0, reused)
        if new > 0:
            put(table, place + first, self.take(new), 0, new)
        return new

    def num_grown(self, rows: Rows, grown: Int64Array, counts: Int64Array) -> int:
        """Blocks that rows take which get so many more columns each."""
        return int(counts.sum())

    def grow(self, rows: Rows, grown: Int64Array, counts: Int64Array, owners: Int64Array, columns: Int64Array) -> None:
        """Rows get so many more columns each; `owners` and `columns` say where each of these is."""
        rows.tables[self.index][owners, columns] = self.take(len(owners))

    def num_used(self, rows: Rows, row: int, column: int) -> int | None:
        """How many tokens of a private block hold data that a copy of it needs; None: all of it."""
        return min(rows.written_of[row] - column * self.block_size, self.block_size)

    def write(self, rows: Rows, row: int, start: int, stop: int) -> None:
        """One step wrote tokens `start..stop` of a row."""

    def places(self, batch: Any, start: Int64Array, stop: Int64Array) -> StatePlaces | None:
        """Where a step reads and writes that writes the tokens `start..stop` of each sequence; None: it keeps no states."""
        return None

    def step_end(self, cache: TheCache, handle: KVCacheHandle, start: int, stop: int) -> int:
        """Where a step should end that begins at `start` and may go up to `stop`."""
        return stop

    def adopt(self, cache: TheCache, row: int, child: Node, first: int, shared: bool) -> int:
        """A row computed again what `child` holds from block `first` on: it takes these blocks and frees its own.

        Returns from which block on the run has taken blocks of the row; its end if it took none.
        """
        table = cache.rows.tables[self.index]
        own, theirs = table[row, first : child.end], child.ids[self.index]
        doubled = own[own != theirs]
        if len(doubled):
            self.unref(doubled, shared)
            cache.counters.blocks_merged += len(doubled)
            table[row, first : child.end] = theirs
        return child.end

    def fork(self, cache: TheCache, source: int, row: int, tip: Node) -> None:
        """A new row shares all blocks of another one."""
        rows = cache.rows
        table = rows.tables[self.index]
        first, used = self.pick((tip.end, rows.num_blocks_of[source]), (0, rows.num_fixed.item(source)))
        table[row, :used] = table[source, :used]
        self.ref(table[row, first:used])

    def end(self, cache: TheCache, handle: KVCacheHandle, row: int, tip: Node, published: int, used: int) -> None:
        """A row lets go of its blocks: those between `published` and `used` are private."""
        if published >= used:
            return
        if handle.family is not None or self.single_owner:
            self.unref(cache.rows.tables[self.index][row, published:used], handle.family is not None)
        else:
            place = row * cache.rows.num_columns
            self.gpu.give(cache.rows.flat_tables[self.index], place + published, place + used)

    def silence(self, handle: KVCacheHandle) -> None:
        """Nobody may share blocks with this sequence from now on."""

    def check_rewind(self, rows: Rows, handle: KVCacheHandle, row: int, length: int) -> None:
        """Refuses to go back to where the sequence cannot go on."""

    def shrink(self, rows: Rows, row: int, num_blocks: int) -> int:
        """A row is about to give up all columns from `num_blocks` on; returns how many it keeps."""
        return num_blocks

    def written_ids(self, rows: Rows, row: int) -> Int32Array:
        """The blocks of a row that carry data, by column; -1 elsewhere (a copy)."""
        ids = rows.visible_blocks(self.index, row).copy()
        ids[ceil_div(rows.written_of[row], self.block_size) :] = -1
        return ids

    def fresh_columns(self, rows: Rows, row: int) -> Int64Array:
        """The columns of a swapped-out row that need a block although none of it was written."""
        return np.arange(ceil_div(rows.written_of[row], self.block_size), rows.num_blocks_of[row])

    def lengths(self, rows: Rows, selection: Any, handles: tuple[KVCacheHandle, ...]) -> Int64Array:
        """The tokens of these sequences that this group has places for; `selection` says which rows they have."""
        lengths: Int64Array = rows.reserved[selection]
        return lengths

    def check(self, rows: Rows) -> str | None:
        """What is wrong with the books of this kind, beside those that all kinds have."""
        return None


class ByBlock(Group, ABC):
    """A group whose published blocks are read one by one: what the rest of the core asks of it. See `kinds/by_block.py`."""

    by_block: ClassVar[bool] = True
    single_owner: ClassVar[int] = 1
    yields_first: ClassVar[bool] = False  # blocks that no end of a run needs go before any run, however old that is

    @abstractmethod
    def needed_from(self, cache: TheCache, node: Node) -> int:
        """The depth from which blocks of this run must stay: a request that finds the next end of a run reads them."""

    @abstractmethod
    def needed(self, cache: TheCache, node: Node, first: int = 0) -> BoolArray:
        """Which blocks of a run, from its block `first` on, are there and needed by the end of a run."""

    @abstractmethod
    def must_stay(self, depth: int, first_needed: int) -> bool:
        """Whether the block at a depth is one that the end of its run needs, whose `needed_from` this is."""

    @abstractmethod
    def has_last(self, path: list[Node], num_blocks: int) -> bool:
        """Whether a request can hold the last of so many blocks as it is, and compute its last token again."""

    @abstractmethod
    def pinned_columns(self, present: BoolArray) -> Int64Array:
        """Which of so many blocks, some of them present, a request reads that goes on right behind them."""

    @abstractmethod
    def enter(self, cache: TheCache, row: int, tip: Node, num_blocks: int) -> None:
        """A row reads those of its first `num_blocks` blocks, all published, that it has not passed."""

    @abstractmethod
    def leave(self, cache: TheCache, row: int, tip: Node, first: int, end: int) -> None:
        """A row on the path to `tip` stops reading its published blocks `first..end` (end exclusive)."""

    @abstractmethod
    def slide(self, cache: TheCache, row: int, position: int) -> None:
        """Lets go of the blocks of a row that the query at `position`, and those behind it, do not read."""
