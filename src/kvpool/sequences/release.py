"""What sequences give back: at their end what only they held, while what they published stays cached; and tokens taken back.

After a rewind the sequence goes on from fewer tokens: rejected drafts, or final tokens when it goes another way. What was
published stays in the tree; the sequence only moves its tip up. A block that is cut in two is copied, because the tree keeps
the old one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.config.layers import ceil_div
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle, any_row_of, note_sessions, row_of
from kvpool.core.node import NEVER, Node
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError
from kvpool.kinds.by_block import close_again, reopen
from kvpool.pools.arrays import Int32Array, within
from kvpool.pools.pool import GPU, HOST, CopyKind, CopyOp
from kvpool.prefix.evict import drop_tail, enforce_quota, require
from kvpool.prefix.keeping import set_priority
from kvpool.prefix.tree import close, match_tokens, ref, split, tip_of, unref
from kvpool.scope import Retention
from kvpool.sequences.publish import hand_over, publish_postponed, publish_remainder, track, untrack
from kvpool.stats import EvictionReason


def free(cache: Cache, handle: KVCacheHandle, keep: bool, is_listed: bool = True) -> None:
    """Ends a sequence; what it published stays cached unless `keep` is False. `is_listed`: the index still has it."""
    row = any_row_of(cache.rows, handle)
    if is_listed:
        _forget(cache, handle)
    if handle.user is not None:
        handle.user.used(cache.now, cache.rows.committed_of[row])
    tip = cache.rows.tips[row]
    if handle.swapped is not None:
        root = tip
        if not keep and handle.publishes:
            final = cache.rows.token_ids(row)[: cache.rows.committed_of[row]]
            tip = next(reversed(match_tokens(cache, handle.scope, final).path), root)
        release_host(cache, handle)
        unref(cache, root)
    else:
        release_gpu(cache, handle, row, keep and cache.config.cache_unfilled_blocks)
    node = tip
    while not keep and node.is_candidate() and node.published_by == handle.serial:  # and nobody else uses it
        parent = node.parent
        drop_tail(cache, node, node.num_blocks, EvictionReason.EXPLICIT)
        node = parent
    if handle.inflight is not None:
        hand_over(cache, handle)
    if handle.family is not None:
        handle.family.discard(row)
        cache.rows.following.pop(row, None)
        publish_postponed(cache, handle.family)
    handle.row = -1
    if tip.root.quota is not None:
        enforce_quota(cache, tip.root)
    cache.rows.drop_rows([row])


def _forget(cache: Cache, handle: KVCacheHandle) -> None:
    """Takes a request out of the index, first of all: that runs code of its id, which may raise by now."""
    try:
        found = cache.requests.pop(handle.request_id, None)
    except Exception as error:
        raise InvalidArgumentError(f"a request cannot be freed by its id {handle.request_id!r}: {error}") from None
    if found is not handle:
        if found is not None:
            cache.requests[found.request_id] = found
        raise InvalidArgumentError(f"its id {handle.request_id!r} is not what it was when the request was admitted")


def release_host(cache: Cache, handle: KVCacheHandle) -> None:
    """Gives back the host blocks of a swapped-out sequence."""
    assert handle.swapped is not None
    for group, ids in zip(cache.groups, handle.swapped, strict=True):
        group.on(HOST).unref(ids[ids >= 0])
    handle.swapped = None


def release_gpu(cache: Cache, handle: KVCacheHandle, row: int, keep_remainder: bool = False) -> None:
    """Lets go of every GPU block of a row: published ones stay in the tree, private ones become free.

    With `keep_remainder` the unfilled last block enters the tree as well.
    """
    rows = cache.rows
    tip = rows.tips[row]
    close(cache, tip)
    if keep_remainder:
        tip = publish_remainder(cache, row, handle, tip)
    used, published = rows.num_blocks_of[row], tip.start + tip.num_blocks
    for group in cache.groups:
        group.end(cache, handle, row, tip, published, used)
    if handle.retention is not None and tip is not tip.root:
        _apply_retention(cache, handle.retention, tip, handle.num_prompt_tokens)
    if handle.hint:
        _pass_on(cache, handle, tip)
    unref(cache, tip)


def _pass_on(cache: Cache, handle: KVCacheHandle, tip: Node) -> None:
    """What was said about a request holds for the runs that it published, or for the last one that it read."""
    tip.hint = handle.hint
    while tip is not tip.root and tip.published_by == handle.serial:
        tip.hint = handle.hint
        tip = tip.parent


def _apply_retention(cache: Cache, retention: Retention, tip: Node, num_prompt_tokens: int) -> None:
    """Cuts the path where priorities change and sets them."""
    size, now = cache.block_size, cache.now
    for cut in retention.cuts(num_prompt_tokens, size):
        node = tip
        while node.start >= cut:
            node = node.parent
        if node.end > cut:
            split(cache, node, cut - node.start)
    node = tip
    while node is not node.root:
        priority, duration = retention.priority_at(node.start * size, num_prompt_tokens)
        if priority is not None:
            set_priority(cache, node, priority, NEVER if duration is None else now + duration)
        node = node.parent


def free_batch(cache: Cache, given: Sequence[KVCacheHandle], keep: bool) -> None:
    """Ends many sequences; checked as a whole first."""
    row_list = [any_row_of(cache.rows, handle) for handle in given]
    handles: list[KVCacheHandle] = list(given)
    if len(set(row_list)) < len(row_list):
        twice = next(handle for i, handle in enumerate(handles) if handle.row in row_list[:i])
        raise SequenceStateError(f"request {twice.request_id!r} stands twice in the batch to free")
    forgotten: list[KVCacheHandle] = []
    try:
        for handle in handles:
            _forget(cache, handle)
            forgotten.append(handle)
    except InvalidArgumentError:
        cache.requests.update((handle.request_id, handle) for handle in forgotten)
        raise
    simple = keep and cache.is_simple
    plain = [h for h in handles if simple and h.swapped is None and h.retention is None and h.family is None]
    if len(plain) > 1:
        _free_plain(cache, [h.row for h in plain], plain)
    for handle in handles:
        if handle.row >= 0:
            free(cache, handle, keep, is_listed=False)


def _free_plain(cache: Cache, row_list: list[int], handles: list[KVCacheHandle]) -> None:
    """`free` for sequences of one full-attention group without forks, private blocks given back in one go."""
    rows, size = cache.rows, cache.block_size
    index = np.array(row_list)
    used = rows.num_blocks[index]
    longest = int(used.max())
    done: list[int] = (rows.committed[index] // size).tolist()
    have: list[int] = rows.num_history[index].tolist()
    table = rows.tables[0][index, :longest]  # a copy, of which nodes may keep slices
    blocks: list[Int32Array] = list(table)
    alike = longest * len(index) <= 4 * int(used.sum())
    published: list[int] = []
    for i, row in enumerate(row_list):
        tip = rows.tips[row]
        if tip.open_row == row:
            end, start = done[i], tip.start
            tip.open_row = -1
            tip.num_blocks = end - start
            tip.tokens = rows.final_token_ids(row, start * size, end * size, have[i])
            ids = blocks[i] if end - start == longest else blocks[i][start:end]
            tip.ids = (ids if alike else ids.copy(),)
        if cache.config.cache_unfilled_blocks:
            tip = rows.tips[row] = publish_remainder(cache, row, handles[i], tip)
        published.append(tip.start + tip.num_blocks)
    rows.grows_alone[index] = False
    ends = np.array(published)
    counts = np.maximum(used - ends, 0)
    if counts.any():
        columns = np.repeat(ends, counts) + within(counts)
        cache.gpu_pools[0].give(table[np.repeat(np.arange(len(counts)), counts), columns])
    for i, row in enumerate(row_list):
        tip, handle = rows.tips[row], handles[i]
        if handle.hint:
            _pass_on(cache, handle, tip)
        if handle.user is not None:
            handle.user.used(cache.now, cache.rows.committed_of[row])
        unref(cache, tip)
        if handle.inflight is not None:
            hand_over(cache, handle)
        handle.row = -1
        if tip.root.quota is not None:
            enforce_quota(cache, tip.root)
    rows.drop_rows(row_list)


# --- rewind ----------------------------------------------------------------------------------------------------------


def rewind(cache: Cache, handle: KVCacheHandle, num_tokens: int) -> None:
    """Forgets the last `num_tokens` reserved tokens and gives back the blocks behind them."""
    rows, size = cache.rows, cache.block_size
    row = row_of(cache.rows, handle)
    length = rows.reserved_of[row] - num_tokens
    rows.moves += 1
    tip = tip_of(cache, row)
    for group in cache.groups:
        group.check_rewind(rows, handle, row, length)
    reopened = reopen(cache, handle, row, length)  # reads again what was passed
    if length < tip.end * size:
        if length % size:  # a block is cut in two
            try:
                require(cache, {handle.scope.tenant: cache.per_position}, f"rewinding {handle.request_id!r}")
            except OutOfBlocksError:
                close_again(cache, row, reopened)
                raise
        _leave_published(cache, handle, row, length)
    num_blocks, used = ceil_div(length, size), rows.num_blocks_of[row]
    if num_blocks < used:
        num_blocks = max(group.shrink(rows, row, num_blocks) for group in cache.groups)
        for group in cache.growing:
            table = rows.tables[group.index]
            ids = table[row, num_blocks:used]  # all of them private by now
            group.unref(ids[ids >= 0], handle.family is not None)  # -1 where published blocks were left just before
            table[row, num_blocks:used] = -1
        rows.num_blocks_of[row] = num_blocks
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
        made = old
        while made.start > blocks:
            made = made.parent
        note_sessions(handle, made.sessions)  # of who made the block whose beginning is about to be copied
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
