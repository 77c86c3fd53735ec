"""The windows of live sequences: what they read of published blocks, from admission through every step to the end."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvpool.config.layers import ceil_div
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle
from kvpool.core.node import Node, path_ids
from kvpool.errors import SequenceStateError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.groups import Group
from kvpool.pools.pool import GPU
from kvpool.prefix.tree import Match
from kvpool.prefix.windows import block_of, ref_blocks, remove_block, unref_blocks
from kvpool.stats import EvictionReason

Held: TypeAlias = list[tuple[Group, Int32Array]]  # blocks that nobody may evict for a while


# --- while a row is made ---------------------------------------------------------------------------------------------


def hold_windows(cache: Cache, path: list[Node], num_tokens: int) -> Held:
    """Protects the blocks of these runs that a request reads which reuses `num_tokens`, until `let_go_windows`."""
    held: Held = []
    for group in cache.windowed:
        for node in path:
            if node.tier == GPU:
                read = group.reads(np.arange(node.start, node.end), num_tokens)
                ids = node.ids[group.index][read]
                ref_blocks(cache, node.root, group, ids)
                held.append((group, ids))
    return held


def let_go_windows(cache: Cache, tip: Node, held: Held) -> None:
    """The row itself reads by now what was held for it."""
    for group, ids in held:
        unref_blocks(cache, tip, group, 0, 0, ids)


def hold_source(cache: Cache, match: Match, holds: bool) -> None:
    """Protects (`holds`) or lets go of the windowed blocks of the block that is about to be copied."""
    source = match.partial
    assert source is not None
    if source.tier != GPU:
        return
    index = match.num_blocks - source.start
    for group in cache.windowed:
        ids = source.ids[group.index][index : index + 1]
        if holds:
            ref_blocks(cache, source.root, group, ids)
        else:
            unref_blocks(cache, source, group, match.num_blocks, match.num_blocks, ids)


def begin_windows(cache: Cache, row: int, tip: Node, num_blocks: int, num_tokens: int) -> None:
    """A new row reuses `num_tokens`, `num_blocks` of them whole blocks: its windows open there."""
    for group in cache.windowed:
        cache.rows.window_start[group.index, row] = group.first_read(num_tokens)
    enter_windows(cache, row, tip, num_blocks)


def enter_windows(cache: Cache, row: int, tip: Node, num_blocks: int) -> None:
    """A row reads those of its first `num_blocks` blocks, all published, that its windows cover."""
    for group in cache.windowed:
        table, start = cache.rows.tables[group.index], int(cache.rows.window_start[group.index, row])
        ref_blocks(cache, tip.root, group, table[row, : min(group.sinks, num_blocks)])
        ref_blocks(cache, tip.root, group, table[row, start:num_blocks])


# --- steps -----------------------------------------------------------------------------------------------------------


def slide_windows(cache: Cache, row: int, position: int) -> None:
    """Lets go of the blocks of a row that the query at `position`, and those behind it, do not read."""
    rows = cache.rows
    tip, handle = rows.tips[row], rows.handles[row]
    assert tip is not None and handle is not None
    cache.sync(tip)
    for group in cache.windowed:
        old = int(rows.window_start[group.index, row])
        new = min(group.first_read(position), rows.num_blocks_of[row])
        if new <= old:
            continue
        table = rows.tables[group.index]
        published = min(new, max(old, tip.end))
        if published > old:
            unref_blocks(cache, tip, group, old, published - 1, table[row, old:published])
            if group.keeps_state:
                _drop_passed(cache, tip, group, max(old, handle.num_prompt_tokens // group.block_size), published)
        if new > published:
            group.give_back(table[row, published:new], handle.family is not None)
            table[row, published:new] = -1
        rows.window_start[group.index, row] = new


def _drop_passed(cache: Cache, tip: Node, group: Group, first: int, end: int) -> None:
    """Drops unread checkpoints behind a prompt that its sequence has passed: the next turn goes on from the last one."""
    pinned = cache.pinned_blocks[group.pool]
    for depth in range(first, end):
        node, block = block_of(cache, tip, group, depth)
        if block >= 0 and not group.gpu.refs[block] and block not in pinned:
            remove_block(cache, node, group, depth - node.start, EvictionReason.CONTINUED)


def reopen_windows(cache: Cache, handle: KVCacheHandle, row: int, length: int) -> list[tuple[Group, int, int]]:
    """A row goes back to `length` tokens: its windows cover again what they had left, if that is still there.

    Returns (group, first block, block where the window started before), for `close_again`.
    """
    rows, size = cache.rows, cache.block_size
    tip = rows.tips[row]
    assert tip is not None
    path = tip.path()
    reopened: list[tuple[Group, int, int]] = []
    for group in cache.windowed:
        stop = int(rows.window_start[group.index, row])
        start = min(group.first_read(length), stop)
        left = rows.tables[group.index][row, start:stop]
        # The tree may have lost blocks since they left the window; the table is not told.
        left[: max(0, tip.end - start)] = path_ids(path, tip.end, group.index)[start:stop]
        if (left[: max(0, ceil_div(length, size) - start)] < 0).any():
            raise SequenceStateError(
                f"request {handle.request_id!r} cannot be rewound to {length} tokens: "
                f"layer group {group.index} has already dropped blocks that its window would cover again"
            )
        if start < stop:
            reopened.append((group, start, stop))
    for group, start, stop in reopened:
        ref_blocks(cache, tip.root, group, rows.tables[group.index][row, start : min(stop, tip.end)])
        rows.window_start[group.index, row] = start
    return reopened


def close_windows(cache: Cache, row: int, reopened: list[tuple[Group, int, int]]) -> None:
    """Takes `reopen` back."""
    tip = cache.rows.tips[row]
    assert tip is not None
    for group, start, stop in reopened:
        ids = cache.rows.tables[group.index][row, start : min(stop, tip.end)]
        unref_blocks(cache, tip, group, start, min(stop, tip.end) - 1, ids)
        cache.rows.window_start[group.index, row] = stop


# --- the end ---------------------------------------------------------------------------------------------------------


def leave_windows(cache: Cache, row: int, tip: Node, first: int, end: int) -> None:
    """A row on the path to `tip` stops reading its published blocks `first..end` (end exclusive)."""
    for group in cache.windowed:
        table = cache.rows.tables[group.index]
        sinks = min(group.sinks, end)
        if first < sinks:
            unref_blocks(cache, tip, group, first, sinks - 1, table[row, first:sinks])
        start = max(first, int(cache.rows.window_start[group.index, row]))
        if start < end:
            unref_blocks(cache, tip, group, start, end - 1, table[row, start:end])
