"""Block ids of one pool on one tier: who is free, and how many sequences hold a block of their own.

Ownership, in one place:

* free        the id is on the free stack; `refs` is 0.
* private     one or more sequences (forks) hold it through their tables.
* published   the prefix cache owns it.

`refs` says how many sequences hold a block; `ref` and `unref` count them. Blocks of full-attention groups are written by
one sequence and read along tree paths, so one with a single owner has 0, as has a published one. Admitting, publishing
and freeing a sequence then never touch the array. A single owner of a block of all other groups is counted (1), and so
is one of a host block of swapped sequences; published ones go on counting the sequences that read them.

`num_cached` counts published blocks without any reader, `num_pinned` those of them that are pinned, so
`num_free + num_referenced + num_cached == num_blocks` at every moment.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.pools.arrays import Int32Array, copied, put

# Read on hot paths, where a global is many times cheaper than a member of an enum
GPU: Final = Tier.GPU
HOST: Final = Tier.HOST


class ResizeResult(NamedTuple):
    """What a resize had to do."""

    num_blocks: int
    num_evicted: int
    num_moved: int


class BlockPool:
    """The ids, reference counts and free list of one tier.

    >>> pool = BlockPool(0, Tier.GPU, 4)
    >>> ids = pool.take(3)
    >>> ids.tolist(), pool.num_free
    ([0, 1, 2], 1)
    >>> pool.give(ids)
    >>> pool.num_free
    4
    """

    __slots__ = (
        *("_free", "index", "num_blocks", "num_cached", "num_free", "num_pinned", "peak_referenced", "refs", "tier"),
    )

    def __init__(self, index: int, tier: Tier, num_blocks: int) -> None:
        self.index = index
        self.tier = tier
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_pinned = 0
        self.peak_referenced = 0
        self.refs: Int32Array = np.zeros(num_blocks, np.int32)
        # A stack of the last `num_free` places, whose top comes first: a fresh pool hands out 0, 1, 2, ...
        self._free: Int32Array = np.arange(num_blocks, dtype=np.int32)

    @property
    def num_referenced(self) -> int:
        """Blocks that some live sequence holds."""
        return self.num_blocks - self.num_free - self.num_cached

    def take(self, num_blocks: int, refs: int = 0) -> Int32Array:
        """Hands out `num_blocks` free ids, which then have so many `refs`. The caller made sure that they exist."""
        num_free = self.num_free
        if num_blocks > num_free:
            raise OutOfBlocksError(
                f"pool {self.index} on {self.tier.name} has {num_free} free blocks, {num_blocks} were asked for"
            )
        self.num_free = num_free - num_blocks
        top = self.num_blocks - num_free
        ids = copied(self._free, top, top + num_blocks)
        if refs:
            self.refs[ids] = refs
        return ids

    def give(self, ids: Int32Array, start: int = 0, stop: int = -1) -> None:
        """Puts unreferenced ids, or the part `start..stop` of them, back on the free stack.

        The first of them is handed out first.
        """
        if stop < 0:
            stop = len(ids)
        self.num_free = num_free = self.num_free + stop - start
        put(self._free, self.num_blocks - num_free, ids, start, stop)

    def ref(self, ids: Int32Array) -> None:
        """One more sequence holds these blocks (each id at most once in `ids`)."""
        self.refs[ids] = np.maximum(self.refs[ids], 1) + 1

    def unref(self, ids: Int32Array, single_owner: int = 1) -> None:
        """One sequence lets go of these blocks; those that nobody else holds become free.

        `single_owner` is what `refs` says of such a block while one sequence holds it: 0 if that one is not counted.
        """
        left = self.refs[ids] - 1
        if single_owner and len(ids) and int(left.min()) < 0:
            wrong = ids[left < 0].tolist()
            raise InvalidArgumentError(
                f"blocks {wrong} of pool {self.index} on {self.tier.name} have no reference to release"
            )
        self.refs[ids] = np.where(left > 1, left, single_owner * (left == 1))
        self.give(ids[left < 1])

    def note_peak(self) -> None:
        """Remembers the largest number of referenced blocks ever seen."""
        used = self.num_blocks - self.num_free - self.num_cached
        if used > self.peak_referenced:
            self.peak_referenced = used

    def free_ids(self) -> Int32Array:
        """A copy of the free ids, next one last."""
        return self._free[self.num_blocks - self.num_free :][::-1].copy()

    def set_free_ids(self, ids: Int32Array) -> None:
        """Replaces the free stack (used when blocks were moved)."""
        self._free[self.num_blocks - len(ids) :] = ids[::-1]
        self.num_free = len(ids)

    def resize(self, num_blocks: int) -> None:
        """Grows or cuts the id space; when cutting, no id at or above `num_blocks` may be in use."""
        free = self.free_ids()
        old = self.num_blocks
        refs = np.zeros(num_blocks, np.int32)
        keep = min(old, num_blocks)
        refs[:keep] = self.refs[:keep]
        if num_blocks < old:
            free = free[free < num_blocks]
        else:
            free = np.concatenate([np.arange(num_blocks - 1, old - 1, -1, dtype=np.int32), free])
        stack = np.empty(num_blocks, np.int32)  # all memory is there before anything changes
        stack[num_blocks - len(free) :] = free[::-1]
        self.refs, self._free, self.num_blocks, self.num_free = refs, stack, num_blocks, len(free)


class CopyKind(str, Enum):
    """Why a block moves."""

    COPY_ON_WRITE = "copy_on_write"
    PARTIAL_REUSE = "partial_reuse"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    OFFLOAD = "offload"
    ONBOARD = "onboard"
    DEFRAGMENT = "defragment"


class CopyOp(NamedTuple):
    """Copy block `src[i]` of `src_tier` to block `dst[i]` of `dst_tier`, for every i, in the store of layer group `group`.

    `num_tokens` limits the copy to the first tokens of each block (None: whole blocks). Operations must be run in the order
    in which they were planned and before the next forward pass: a later one may reuse a block that an earlier one reads.
    The pairs inside one operation do not depend on each other.
    """

    kind: CopyKind
    group: int
    src_tier: Tier
    dst_tier: Tier
    src: Int32Array
    dst: Int32Array
    num_tokens: int | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.src)
