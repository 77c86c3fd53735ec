"""Tokens taken back: rejected drafts, and final tokens when a sequence goes another way.

What was published stays in the tree; the sequence only moves its tip up. A block that is cut in two is copied, because the
tree keeps the old one.
"""

from __future__ import annotations

from kvpool.config.layers import ceil_div
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle, note_sessions, row_of
from kvpool.core.node import Node
from kvpool.errors import OutOfBlocksError
from kvpool.kinds.by_block import close_again, reopen
from kvpool.pools.pool import GPU, CopyKind, CopyOp
from kvpool.prefix.evict import enforce_quota, require
from kvpool.prefix.readers import ref, unref
from kvpool.prefix.tree import close, split, tip_of
from kvpool.sequences.publish import track, untrack


def rewind(cache: Cache, handle: KVCacheHandle, num_tokens: int) -> None:
    """Forgets the last `num_tokens` reserved tokens and gives back the blocks behind them."""
    rows, size = cache.rows, cache.block_size
    row = row_of(cache.rows, handle)
    length = rows.reserved_of[row] - num_tokens
    rows.moves += 1
    tip = tip_of(cache, row)
    _prepare(cache, handle, row, length)
    if length < tip.end * size:
        _leave_published(cache, handle, row, length)
    _drop_private(cache, handle, row, ceil_div(length, size))
    rows.reserved_of[row] = length
    rows.present_of[row] = min(rows.present_of[row], length)
    if rows.written_of[row] > length:  # what is written there now may be other tokens
        rows.written_of[row] = length
        rows.committed_of[row] = min(rows.committed_of[row], length)
        rows.forget_token_ids(row, length)
    if handle.family is not None:
        rows.set_shared(row, True)  # the blocks that it will write now may be older than those it copied
    if handle.publishes and rows.known_of[row] > rows.committed_of[row]:
        track(cache, row)
    else:
        untrack(cache, handle)
    cache.counters.rewinds += 1
    enforce_quota(cache, tip.root)


def _prepare(cache: Cache, handle: KVCacheHandle, row: int, length: int) -> None:
    """Before a rewind: reads again what was passed, and makes room for the block that is cut in two."""
    rows, size = cache.rows, cache.block_size
    tip = rows.tips[row]
    assert tip is not None
    for group in cache.groups:
        group.check_rewind(rows, handle, row, length)
    reopened = reopen(cache, handle, row, length)
    if length % size and length < tip.end * size:
        try:
            what = f"rewinding {handle.request_id!r}"
            require(cache, list(cache.per_position), handle.scope.tenant, what)
        except OutOfBlocksError:
            close_again(cache, row, reopened)
            raise


def _leave_published(cache: Cache, handle: KVCacheHandle, row: int, length: int) -> None:
    """Moves the tip up to the last full block before `length`; a block cut in two is copied."""
    rows, size = cache.rows, cache.block_size
    rows.keep_token_ids(row)
    blocks, extra = divmod(length, size)
    old = new = tip_of(cache, row)
    close(cache, old)
    end = old.end
    while new is not new.root and new.start >= blocks:
        new = new.parent
    if extra:
        _note_session(handle, old, blocks)
    if new.end > blocks:
        new = split(cache, new, blocks - new.start)
    ref(cache, new)
    for each in cache.by_block:
        each.leave(cache, row, old, blocks, end)
    for group in cache.growing:
        table = rows.tables[group.index]
        if extra:
            dst = group.take(1)
            src = table[row, blocks : blocks + 1].copy()
            cache.copies.append(CopyOp(CopyKind.COPY_ON_WRITE, group.index, GPU, GPU, src, dst.copy(), extra))
            cache.counters.copies_on_write += 1
            handle.stats.copies_on_write += 1
            table[row, blocks] = dst[0]
        table[row, blocks + bool(extra) : end] = -1
    rows.tips[row] = new
    unref(cache, old)
    if row in rows.following:  # what is behind its path is its own from now on
        rows.follow(row, new.end * size)


def _note_session(handle: KVCacheHandle, node: Node, depth: int) -> None:
    """Remembers who made the block at `depth` on the path to `node`: the beginning of it is about to be copied."""
    while node.start > depth:
        node = node.parent
    note_sessions(handle, node.sessions)


def _drop_private(cache: Cache, handle: KVCacheHandle, row: int, num_blocks: int) -> None:
    """Gives back the blocks from `num_blocks` on, all of them private by now."""
    rows = cache.rows
    used = rows.num_blocks_of[row]
    if num_blocks >= used:
        return
    num_blocks = max(group.shrink(rows, row, num_blocks) for group in cache.groups)
    for group in cache.growing:
        table = rows.tables[group.index]
        ids = table[row, num_blocks:used]
        group.unref(ids[ids >= 0], handle.family is not None)  # -1 where published blocks were left just before
        table[row, num_blocks:used] = -1
    rows.num_blocks_of[row] = num_blocks
