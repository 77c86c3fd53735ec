"""Blocks that are read one by one, not with their run: who reads them, and those that lost their last reader.

A sequence reads such a block for a while, so readers are counted per block, not along paths. A block that nobody reads any
more stays cached until its pool needs it: it stands in `leftovers`, oldest first.

A prefix is found again at its end or where others branched off, and there all that the next query reads must be present.
So of the unread blocks those that such an end needs are kept with their run: without them its full-attention blocks are
worth nothing. They leave and move with the run; they go alone (`lasting`) only when no run can give way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from kvpool.core.cache import Cache, Leftover
from kvpool.core.kind import ByBlock, Group
from kvpool.core.node import Node, Root, path_ids
from kvpool.core.prompt import Match
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.announcer import announce_removed_block
from kvpool.prefix.tree import add_idle, free_blocks
from kvpool.stats import EvictionReason

Held: TypeAlias = list[tuple[ByBlock, Int32Array]]  # blocks that nobody may evict for a while

# --- readers ---------------------------------------------------------------------------------------------------------


def block_of(cache: Cache, node: Node, group: ByBlock, depth: int) -> tuple[Node, int]:
    """The run above `node` that holds the block of a group at `depth`, and its id."""
    while node.start > depth:
        node = node.parent
    return node, int(node.ids[group.index][depth - node.start])


def keep_pinned(cache: Cache, node: Node) -> None:
    """A pinned run came to the GPU, where its blocks read one by one are kept one by one."""
    for pin in cache.pins.values():
        kept = []
        for group, depth in pin.blocks:
            at, block = block_of(cache, pin.node, group, depth)
            if at is not node or block >= 0:
                kept.append((group, depth))
            if at is node and block >= 0:
                count_pin(cache, node.root, group, block, 1)
        pin.blocks = kept


def ref_blocks(cache: Cache, root: Root, group: ByBlock, ids: Int32Array) -> None:
    """A sequence starts reading published blocks of a group read block by block."""
    pool = group.gpu
    held = ids[ids >= 0]
    before = pool.refs[held]
    pool.refs[held] = before + 1
    idle = held[before == 0]
    if len(idle):
        add_idle(root, pool, -len(idle), -_num_pinned(cache, pool, idle))


def unref_blocks(cache: Cache, node: Node, group: ByBlock, first: int, last: int, ids: Int32Array) -> None:
    """A sequence on the path to `node` stops reading published blocks `first..last` of a group read block by block."""
    pool = group.gpu
    held = ids[ids >= 0]
    left = pool.refs[held] - 1
    pool.refs[held] = left
    idle = held[left == 0]
    if len(idle):
        add_idle(node.root, pool, len(idle), _num_pinned(cache, pool, idle))
        leave_over(cache, node, group, first, last)


def idle_blocks(cache: Cache, node: Node, group: Group) -> tuple[int, int]:
    """How many blocks of a group in a synced run nobody reads, and how many of those are pinned."""
    ids = node.ids[group.index]
    if not group.by_block or node.tier != GPU:
        idle = 0 if node.active else int((ids >= 0).sum())
        return idle, idle if node.pins else 0
    held = ids[ids >= 0]
    unread = held[group.gpu.refs[held] == 0]
    return len(unread), _num_pinned(cache, group.gpu, unread)


def _num_pinned(cache: Cache, pool: BlockPool, ids: Int32Array) -> int:
    """How many of these blocks on the GPU are pinned."""
    pinned = cache.pinned_blocks[pool.index]
    return sum(block in pinned for block in ids.tolist()) if pinned else 0


def count_pin(cache: Cache, root: Root, group: ByBlock, block: int, change: int) -> None:
    """One pin more (1) or less (-1) on a block of a group read block by block."""
    pool = group.gpu
    pinned = cache.pinned_blocks[pool.index]
    was_pinned = block in pinned
    pinned[block] = pinned.get(block, 0) + change
    if not pinned[block]:
        del pinned[block]
    if was_pinned != (block in pinned) and not pool.refs[block]:
        add_idle(root, pool, 0, change)


# --- leftovers -------------------------------------------------------------------------------------------------------


def leave_over(cache: Cache, node: Node, group: Group, first: int, last: int) -> None:
    """Notes unread blocks of a group read block by block as the youngest candidates for eviction."""
    _enqueue(cache, cache.leftovers, group, Leftover(cache.tick, node, first, last))


def _enqueue(cache: Cache, queues: list[deque[Leftover]], group: Group, leftover: Leftover) -> None:
    queue = queues[group.index]
    queue.append(leftover)
    if len(queue) > 2 * group.gpu.num_blocks + 64:
        queues[group.index] = _without_stale(cache, group, queue)


def _without_stale(cache: Cache, group: Group, queue: deque[Leftover]) -> deque[Leftover]:
    """Keeps the youngest leftover of each unread block and drops the rest."""
    seen: set[int] = set()
    kept: list[Leftover] = []
    for leftover in reversed(queue):
        blocks = {block for _, _, block in _unread(cache, group, leftover)}
        if not blocks <= seen:
            kept.append(leftover)
            seen |= blocks
    return deque(reversed(kept))


def _unread(cache: Cache, group: Group, leftover: Leftover) -> Iterator[tuple[Node, int, int]]:
    """(node, depth, block) of what a leftover still has on the GPU and nobody reads, deepest first."""
    refs = group.gpu.refs
    _, node, first, depth = leftover
    while depth >= first:
        while node is not node.root and (node.start > depth or (node.detached and not node.num_blocks)):
            node = node.parent
        if node is node.root:
            return
        node.sync()
        if node.tier != GPU:  # it moved down with its blocks; what stands above it may still be here
            depth = node.start
        elif depth >= node.end:
            depth = node.end
        else:
            block = int(node.ids[group.index][depth - node.start])
            if block >= 0 and not refs[block]:
                yield node, depth, block
        depth -= 1


# --- ends of runs ----------------------------------------------------------------------------------------------------


def is_usable(cache: Cache, node: Node, first: int, end: int) -> bool:
    """Whether a prompt can still end in blocks `first..end` of this run; at its end also in a lower tier's run below."""
    whole = end == node.num_blocks
    if whole and node.children is not None:
        return True
    path, size = node.path(), cache.block_size
    length = node.start * size + (len(node.tokens) if whole else end * size)
    for group in cache.by_block:
        present = path_ids(path, node.start + end, group.index) >= 0
        length = min(length, group.longest_valid(present, length))
    return length > (node.start + first) * size


# --- leaving ---------------------------------------------------------------------------------------------------------


def evict_leftovers(
    cache: Cache, pool: BlockPool, num_blocks: int, until: float, tenant: str | None, reason: EvictionReason
) -> int:
    """Frees at most `num_blocks` unread blocks, left until the tick `until`, that no end of a run needs."""
    freed = 0
    waiting = [g for g in cache.by_block if g.pool == pool.index and cache.leftovers[g.index]]
    for group in sorted(waiting, key=lambda g: cache.leftovers[g.index][0].tick):
        oldest = math.inf if group.yields_first else until
        freed += _evict_queue(cache, cache.leftovers[group.index], group, num_blocks - freed, oldest, tenant, reason)
    return freed


def evict_last_resort(
    cache: Cache, pool: BlockPool, num_blocks: int, tenant: str | None, reason: EvictionReason
) -> int:
    """Frees at most `num_blocks` unread blocks that ends of runs do need: they are all that is left."""
    freed = 0
    for group in cache.by_block:
        if group.pool == pool.index:
            queue = cache.lasting[group.index]
            freed += _evict_queue(cache, queue, group, num_blocks - freed, math.inf, tenant, reason, whole=True)
    return freed


def _evict_queue(
    cache: Cache,
    queue: deque[Leftover],
    group: ByBlock,
    num_blocks: int,
    until: float,
    tenant: str | None,
    reason: EvictionReason,
    whole: bool = False,
) -> int:
    """Frees unread blocks, oldest first; those that the end of a run needs move to `lasting` unless `whole`."""
    index = group.pool
    pinned = cache.pinned_blocks[index]
    kept: list[Leftover] = []
    freed = 0
    while queue and freed < num_blocks and queue[0].tick <= until:
        leftover = queue.popleft()
        quota = leftover.node.root.quota
        run: Node | None = None
        first_needed, lasts = 0, False
        for node, depth, block in _unread(cache, group, leftover):
            if node is not run and not whole:
                run, first_needed = node, group.needed_from(cache, node)
            guarded = quota is not None and quota.tenant != tenant and quota.cached[index] <= quota.guaranteed[index]
            if freed == num_blocks or guarded or block in pinned:
                kept.append(leftover)
                if freed == num_blocks:
                    break
            elif not whole and group.must_stay(depth, first_needed):
                lasts = True
            else:
                remove_block(cache, node, group, depth - node.start, reason)
                freed += 1
        if lasts:
            _enqueue(cache, cache.lasting, group, leftover)
    queue.extendleft(reversed(list(dict.fromkeys(kept))))
    return freed


def remove_block(cache: Cache, node: Node, group: ByBlock, index: int, reason: EvictionReason) -> None:
    """The block at `index` of a run leaves a group read block by block; the rest of the run stays."""
    if cache.events.listening and node.digests:
        announce_removed_block(cache, node, group, index, reason)
    cache.counters.evictions[reason.value] += 1
    if node.host_copy is not None:
        cache.host_copies.drop_block(node, group, index)
    gone = node.ids[group.index][index : index + 1].copy()
    # For an open node the ids are a view of its row's table, so this clears the table entry as well.
    if node.open_row < 0:
        node.set_ids(group.index, node.ids[group.index].copy())
    node.ids[group.index][index] = -1
    free_blocks(cache, node, group, gone)


# --- held for a while ------------------------------------------------------------------------------------------------


def hold_blocks(cache: Cache, path: list[Node], num_tokens: int) -> Held:
    """Protects the blocks of these runs that a request reads which reuses `num_tokens`, until `let_go_blocks`."""
    held: Held = []
    for group in cache.by_block:
        for node in path:
            if node.tier == GPU:
                read = group.reads(np.arange(node.start, node.end), num_tokens)
                ids = node.ids[group.index][read]
                ref_blocks(cache, node.root, group, ids)
                held.append((group, ids))
    return held


def let_go_blocks(cache: Cache, tip: Node, held: Held) -> None:
    """The row itself reads by now what was held for it."""
    for group, ids in held:
        unref_blocks(cache, tip, group, 0, 0, ids)


def hold_source(cache: Cache, match: Match, holds: bool) -> None:
    """Protects (`holds`) or lets go of the blocks read one by one of the block that is about to be copied."""
    source = match.partial
    assert source is not None
    if source.tier != GPU:
        return
    index = match.num_blocks - source.start
    for group in cache.by_block:
        ids = source.ids[group.index][index : index + 1]
        if holds:
            ref_blocks(cache, source.root, group, ids)
        else:
            unref_blocks(cache, source, group, match.num_blocks, match.num_blocks, ids)
