"""Planned moves of block bytes. The control plane writes this list, the data plane carries it out in order."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvpool.config import Tier
from kvpool.pools.arrays import Int32Array


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
