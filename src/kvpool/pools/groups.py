"""What each kind of layer group decides: how its private blocks are counted, and which blocks a later query still reads.

One class per kind, one object per group. A new kind of attention is one more class here and one more entry in `KINDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvpool.compiling import mypyc_attr, tell_apart
from kvpool.config import GroupKind, LayerGroup, Tier
from kvpool.config.layers import ceil_div
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.pools.pool import GPU, BlockPool

T = TypeVar("T")


@mypyc_attr(allow_interpreted_subclasses=True)
class Group(ABC):
    """The blocks of one layer group. As it stands here, every query reads every block.

    A new kind of attention is a class of its own below this one: it says how blocks of a single owner are counted
    (`take`, `give_back`, `share`) and what the next query reads (`first_read`). Everything else follows from these and
    from two facts about the kind, `grows` and `slides`.
    """

    grows: ClassVar[bool] = True  # its blocks follow the tokens of the sequence, and enter the prefix tree
    slides: ClassVar[bool] = False  # blocks are given up while the sequence runs, and each one counts its own readers
    keeps_state: ClassVar[bool] = False  # a block is a checkpoint, and only some columns of a table have one
    single_owner: ClassVar[int] = 1  # what `refs` says of a private block that one sequence holds

    def __init__(self, spec: LayerGroup, block_size: int, tiers: list[BlockPool]) -> None:
        self.spec = spec
        self.index = spec.index
        self.pool = spec.pool
        self.block_size = block_size
        self.tiers = tiers
        self.gpu = tiers[GPU]
        self.sinks = ceil_div(spec.sink_tokens, block_size)  # leading blocks that stay whatever the window does

    @classmethod
    def pick(cls, of_sequence: T, of_encoder: T) -> T:
        """Which of two numbers counts for this kind: that of the sequence's own tokens, or that of its encoder's."""
        return of_sequence

    def on(self, tier: Tier) -> BlockPool:
        """The pool that holds this group's blocks on a tier."""
        return self.tiers[tier]

    # --- private blocks ----------------------------------------------------------------------------------------------

    @abstractmethod
    def take(self, num_blocks: int) -> Int32Array:
        """New GPU blocks for one sequence."""

    @abstractmethod
    def give_back(self, ids: Int32Array, shared: bool) -> None:
        """A sequence lets go of private GPU blocks; `shared` says whether forks may hold them too. -1 is no block."""

    @abstractmethod
    def share(self, ids: Int32Array) -> None:
        """One more sequence holds private GPU blocks. -1 is no block."""

    def own(self, block: int) -> None:
        """A GPU block that was taken from the pool is one sequence's own."""
        self.gpu.refs[block] = self.single_owner

    def mark_single_owner(self, ids: Int32Array) -> None:
        """All holders of these GPU blocks were counted; a single one is noted as this kind does it."""
        self.gpu.refs[ids[self.gpu.refs[ids] == 1]] = self.single_owner

    def publish(self, ids: Int32Array) -> None:  # noqa: B027 - most kinds go on counting as before
        """Private GPU blocks enter the tree."""

    # --- what a query reads ------------------------------------------------------------------------------------------

    def first_read(self, num_tokens: int) -> int:
        """The first block, after the sinks, that the query at position `num_tokens` (the next one) can still read."""
        return self.sinks

    def reads(self, columns: Any, num_tokens: int) -> BoolArray:
        """Which of these blocks the query at position `num_tokens` reads, if it has that many before it."""
        read: BoolArray = (columns >= self.first_read(num_tokens)) | (columns < self.sinks)
        return read

    def hidden(self, columns: Any, starts: Any) -> BoolArray:
        """Which blocks a sequence has given up whose window starts at block `starts`."""
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
        missing = np.flatnonzero(~present)
        size, sinks = self.block_size, self.sinks
        length = num_tokens
        while length > 0:
            blocks = ceil_div(length, size)
            start = self.first_read(length)
            gaps = missing[(missing < blocks) & ((missing >= start) | (missing < sinks))]
            if not len(gaps):
                return length
            length = int(gaps[-1]) * size if int(gaps[-1]) >= start else int(gaps[0]) * size
        return 0

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        """Blocks that a request holds right after its admission, reused ones included.

        It has places in `num_blocks` blocks, `num_fixed` for its encoder, and reuses `num_reused` whole blocks.
        """
        return num_blocks


@mypyc_attr(allow_interpreted_subclasses=True)
class FullGroup(Group):
    """Blocks are written by one sequence and read along tree paths, so a single owner is not counted at all.

    Admitting, publishing and freeing a sequence then never touch `refs`; counting starts when forks share a block.
    """

    single_owner: ClassVar[int] = 0

    def take(self, num_blocks: int) -> Int32Array:
        return self.gpu.take(num_blocks)

    def give_back(self, ids: Int32Array, shared: bool) -> None:
        if shared:
            self.gpu.unshare(ids)
        else:
            self.gpu.give(ids)

    def share(self, ids: Int32Array) -> None:
        self.gpu.share(ids)

    def publish(self, ids: Int32Array) -> None:
        """From now on their readers are counted on the node that holds them."""
        self.gpu.refs[ids] = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class CountedGroup(Group):
    """A private block says how many sequences hold it, also when it is one; tables may have holes (-1)."""

    def take(self, num_blocks: int) -> Int32Array:
        return self.gpu.take_counted(num_blocks)

    def give_back(self, ids: Int32Array, shared: bool) -> None:
        self.gpu.release(ids[ids >= 0])

    def share(self, ids: Int32Array) -> None:
        self.gpu.acquire(ids[ids >= 0])


@mypyc_attr(allow_interpreted_subclasses=True)
class CrossGroup(CountedGroup):
    """Cross-attention: the encoder's blocks, all taken at admission, given back at the end, never in the prefix cache."""

    grows: ClassVar[bool] = False

    @classmethod
    def pick(cls, of_sequence: T, of_encoder: T) -> T:
        return of_encoder

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        return num_fixed


@mypyc_attr(allow_interpreted_subclasses=True)
class WindowedGroup(CountedGroup):
    """Blocks that left the window are given up while the sequence runs; published ones stay cached until needed."""

    slides: ClassVar[bool] = True

    @abstractmethod
    def first_position(self, num_tokens: int) -> int:
        """The first position, sinks apart, that the query at position `num_tokens` reads."""

    def first_read(self, num_tokens: int) -> int:
        return max(self.first_position(num_tokens) // self.block_size, self.sinks)

    def held_at_once(self, num_blocks: int, num_fixed: int, num_reused: int, num_reused_tokens: int) -> int:
        given_up = min(self.first_read(num_reused_tokens), num_reused) - self.sinks
        return num_blocks - max(0, given_up)


@mypyc_attr(allow_interpreted_subclasses=True)
class SlidingGroup(WindowedGroup):
    """A window of W covers the query itself, so it reaches back to position `num_tokens - W + 1`."""

    def first_position(self, num_tokens: int) -> int:
        assert self.spec.window is not None
        return max(0, num_tokens - self.spec.window + 1)


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkedGroup(WindowedGroup):
    """A chunk of C starts at a multiple of C."""

    def first_position(self, num_tokens: int) -> int:
        assert self.spec.window is not None
        return num_tokens // self.spec.window * self.spec.window


@mypyc_attr(allow_interpreted_subclasses=True)
class StateGroup(WindowedGroup):
    """Layers that keep a state: a block is a checkpoint, all states of a sequence behind one of its tokens.

    A row of its table has a block in some columns only. The block in column c becomes, when block c of the sequence is full,
    the checkpoint behind it. Until then it is the row's live state: the one behind all tokens written so far stands in the
    first column from `(written - 1) // block_size` on that has a block. A step that writes up to `stop` tokens reads it
    and leaves the new state in the first column from `(stop - 1) // block_size` on. So a step that ends with a block and
    is followed by one in another column leaves a checkpoint behind. Published checkpoints are never written again.
    """

    keeps_state: ClassVar[bool] = True

    def first_position(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1)

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


KINDS: dict[GroupKind, type[Group]] = {
    GroupKind.FULL: FullGroup,
    GroupKind.SLIDING: SlidingGroup,
    GroupKind.CHUNKED: ChunkedGroup,
    GroupKind.STATE: StateGroup,
    GroupKind.CROSS: CrossGroup,
}
tell_apart(CountedGroup, WindowedGroup, *KINDS.values())


def kind_of(spec: LayerGroup) -> type[Group]:
    """The class of a layer group, for whoever has its description alone.

    >>> from kvpool.config import KVCacheConfig, LayerSpec
    >>> config = KVCacheConfig([LayerSpec(1, 8), LayerSpec(1, 8, window=4)], block_size=2, gpu_blocks=8)
    >>> [kind_of(spec).slides for spec in config.groups]
    [False, True]
    """
    return KINDS[spec.kind]


def make_groups(specs: Iterable[LayerGroup], block_size: int, pools: Sequence[list[BlockPool]]) -> tuple[Group, ...]:
    """One object for each layer group of a model; `pools` are those of the model, each with one pool per tier."""
    return tuple(kind_of(spec)(spec, block_size, pools[spec.pool]) for spec in specs)
