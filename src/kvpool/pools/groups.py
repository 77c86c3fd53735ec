"""Which blocks a layer group still needs: window arithmetic, in blocks."""

from __future__ import annotations

import numpy as np

from kvpool.config import GroupKind, LayerGroup
from kvpool.config.layers import ceil_div
from kvpool.pools.arrays import BoolArray, Int32Array


def is_cross(group: LayerGroup) -> bool:
    """Cross-attention groups hold the encoder's tokens: fixed at admission and never in the prefix cache."""
    return group.kind is GroupKind.CROSS


def is_windowed(group: LayerGroup) -> bool:
    """Sliding and chunked groups give up blocks while the sequence still runs."""
    return group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)


def sink_blocks(group: LayerGroup, block_size: int) -> int:
    """Leading blocks that stay whatever the window does."""
    return ceil_div(group.sink_tokens, block_size)


def window_start(group: LayerGroup, num_tokens: int, block_size: int) -> int:
    """The first block, after the sinks, that the query at position `num_tokens` (the next one) can still read.

    A window of W covers the query itself, so it reaches back to position `num_tokens - W + 1`; a chunk of C starts at a
    multiple of C.
    """
    if group.kind is GroupKind.SLIDING:
        assert group.window is not None
        first = max(0, num_tokens - group.window + 1)
    elif group.kind is GroupKind.CHUNKED:
        assert group.window is not None
        first = num_tokens // group.window * group.window
    else:
        first = 0
    return max(first // block_size, sink_blocks(group, block_size))


def longest_valid(group: LayerGroup, present: BoolArray, num_tokens: int, block_size: int) -> int:
    """The longest prefix, at most `num_tokens`, whose next query finds every block of this group that it reads.

    `present[i]` says whether block i of the path is there; the last block may be used in part. Shorter candidates are
    whole blocks only.
    """
    missing = np.flatnonzero(~present)
    sinks = sink_blocks(group, block_size)
    length = num_tokens
    while length > 0:
        blocks = ceil_div(length, block_size)
        start = window_start(group, length, block_size)
        gaps = missing[(missing < blocks) & ((missing >= start) | (missing < sinks))]
        if not len(gaps):
            return length
        length = int(gaps[-1]) * block_size if int(gaps[-1]) >= start else int(gaps[0]) * block_size
    return 0


def visible(group: LayerGroup, ids: Int32Array, start: int, block_size: int) -> Int32Array:
    """Block ids with -1 for those that left the window (a copy if there are any)."""
    sinks = sink_blocks(group, block_size)
    if start <= sinks:
        return ids
    shown = ids.copy()
    shown[sinks:start] = -1
    return shown
