"""Committed blocks enter the prefix tree: as the growing tail of their sequence, or merged with equal ones already there.

And content that must not be reused leaves it. Then those that have it, or are computing it, publish nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle
from kvpool.core.node import NEVER, Node
from kvpool.core.prompt import Match
from kvpool.core.sessions import Session, common_owner
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU
from kvpool.prefix.announcer import announce_stored
from kvpool.prefix.evict import adopt_blocks, detach, drop_covered
from kvpool.prefix.keeping import set_priority, void_pins
from kvpool.prefix.tree import (
    add_sessions,
    close,
    common_tokens,
    end_at,
    forget_logits_inside,
    forget_logits_of,
    match_tokens,
    new_child,
    ref,
    split,
    tip_of,
    unref,
)
from kvpool.scope import Retention, ReuseScope
from kvpool.stats import EvictionReason

_NOBODY: list[int] = []


def row_computing(cache: Cache, match: Match, tokens: Int32Array | None) -> int | None:
    """The row that is computing the first block of `tokens` that is not cached yet, if any."""
    if match.root is None or tokens is None or not cache.producers:
        return None
    size = cache.block_size
    start = match.num_blocks * size
    if len(tokens) - start < size:
        return None
    tip: Node = match.path[-1] if match.path else match.root
    if tip.end != match.num_blocks:
        return None
    return cache.producers.get((tip, tokens[start : start + size].tobytes()))


def track(cache: Cache, row: int) -> None:
    """Remembers which block a row with a known prompt computes next."""
    rows, size = cache.rows, cache.block_size
    handle = rows.handles[row]
    if handle.inflight is not None:
        untrack(cache, handle)
    start = rows.committed_of[row] // size * size
    if rows.known_of[row] - start < size:
        return
    tip = rows.tips[row]
    if tip.open_row != row:  # otherwise it ends with what is committed
        start = tip.end * size
    if handle.publishes and rows.known_of[row] - start >= size:
        place = tip, rows.ids_between(row, start, start + size).tobytes()
        if cache.producers.setdefault(place, row) == row:
            handle.inflight = place


def untrack(cache: Cache, handle: KVCacheHandle) -> None:
    """Forgets what a request computes next."""
    if handle.inflight is not None:
        cache.producers.pop(handle.inflight, None)
        handle.inflight = None


def hand_over(cache: Cache, handle: KVCacheHandle) -> None:
    """A request ends before its next block was computed. If another one computes the same block, that one is tracked."""
    place = handle.inflight
    untrack(cache, handle)
    tips = cache.rows.tips
    for other in cache.requests.values():
        if other.inflight is None and other.swapped is None and tips[other.row] is place[0]:
            track(cache, other.row)


def publish(cache: Cache, row: int) -> None:
    """Brings the tree up to date with everything that a row has committed.

    What it committed is merged with equal runs below its tip. The row opens a node for the rest, and grows there.
    """
    rows, size = cache.rows, cache.block_size
    handle, tip = rows.handles[row], rows.tips[row]
    if not handle.publishes:
        return
    done, first = rows.committed_of[row] // size, tip.start + tip.num_blocks
    while tip.open_row != row and first < done:
        limit, followers = (done, _NOBODY) if handle.family is None else _followers(cache, row, first, done)
        if limit == first:
            return
        place = handle.inflight
        if place is not None and place[0] is tip:
            key: bytes = place[1]
        else:
            key = rows.ids_between(row, first * size, (first + 1) * size).tobytes()
        child = tip.children.get(key) if tip.children is not None else None
        if child is not None:
            tokens = rows.ids_between(row, first * size, limit * size)
            child = end_at(cache, child, child.start + common_tokens(cache, child, tokens) // size)
            _merge(cache, [row, *followers], tip, child, first)
        elif followers:
            child = _closed_child(cache, [row, *followers], tip, key, first, limit)
            _stored(cache, handle, child)
        else:
            node = new_child(cache, tip, key, handle)
            node.active = 1  # the row held `tip` directly; now it does so through this node
            node.open_row = row
            node.num_blocks = done - first  # the rest when it is read: `sync`
            rows.tips[row] = node
            rows.grows_alone_of[row] = handle.retention is None
            if tip.num_remainders:
                drop_covered(cache, tip, key)
            tip = node
            break
        for follower in followers:
            rows.follow(follower, child.end * size)
            track(cache, follower)
        tip, first = child, child.end
    if tip.open_row == row and (handle.retention is not None or cache.events.listening):
        _stored(cache, handle, tip_of(cache, row))


def _stored(cache: Cache, handle: KVCacheHandle, node: Node) -> None:
    """Gives blocks that a sequence stored in a node of its own their priorities, and tells subscribers of them."""
    parts = [node]
    if handle.retention is not None and not node.detached:
        parts = _prioritise(cache, handle.retention, node, handle.num_prompt_tokens)
    if cache.events.listening:
        for part in parts:
            announce_stored(cache, part)


def _prioritise(cache: Cache, retention: Retention, node: Node, num_prompt_tokens: int) -> list[Node]:
    """Cuts a node where priorities change, and sets them; their durations count from the end of the request on.

    Returns the parts of the node. A row that is behind the last cut grows alone from now on.
    """
    parts, size = [node], cache.block_size
    cuts = retention.cuts(num_prompt_tokens, size)
    if cuts and node.start < cuts[-1]:
        for cut in cuts:
            if node.start < cut < node.end:
                parts.insert(-1, split(cache, node, cut - node.start))
    for part in parts:
        priority, _ = retention.priority_at(part.start * size, num_prompt_tokens)
        if priority is not None:
            set_priority(cache, part, priority, NEVER)
    if node.open_row >= 0:
        cache.rows.grows_alone_of[node.open_row] = not cuts or node.start >= cuts[-1]
    return parts


def _followers(cache: Cache, row: int, first: int, done: int) -> tuple[int, list[int]]:
    """Rows that share this row's private blocks from `first` on, and how far (at most `done`) all of them may follow.

    A fork follows as far as it has written the same tokens itself. Where one does not (it was rewound, or says that
    other tokens are there), the block stays private to both until one of them has let go of it.
    """
    rows, size = cache.rows, cache.block_size
    handle = rows.handles[row]
    assert handle.family is not None
    limit, followers = done, []
    for other in handle.family:
        # What rows with another tip say about these columns is published, or out of date where they have passed it.
        if other == row or rows.tips[other] is not rows.tips[row]:
            continue
        shared = _shared_length(cache, row, other, first, done)
        if not shared:
            continue
        length = max(0, min(shared, rows.written_of[other] // size - first))
        start, stop = first * size, min((first + length) * size, rows.known_of[other])
        if stop > start:
            differs = rows.ids_between(row, start, stop) != rows.ids_between(other, start, stop)
            if differs.any():
                length = int(differs.argmax()) // size
        limit = min(limit, first + length)
        followers.append(other)
    return limit, followers


def _shared_length(cache: Cache, row: int, other: int, first: int, done: int) -> int:
    """How many blocks from `first` to `done` two rows hold together, if they hold any from `first` on.

    One may have passed some of them. What they hold behind `done` counts too: a row that grows in the tree by itself
    would take it along.
    """
    end = min(cache.rows.num_blocks_of[row], cache.rows.num_blocks_of[other])
    columns = np.arange(first, end)
    same, held = np.ones(len(columns), np.bool_), np.zeros(len(columns), np.bool_)
    for group in cache.growing:
        mine, theirs = (cache.rows.tables[group.index][r, first:end] for r in (row, other))
        equal = (mine == theirs) & (mine >= 0)
        held |= equal
        if group.by_block:
            starts = cache.rows.first_held[group.index]
            gone = columns < max(starts[row], starts[other])
            equal |= ((mine < 0) | (theirs < 0)) & (gone | group.has_holes)
        same &= equal
    length = int(same.argmin()) if not same.all() else len(columns)
    return min(length, done - first) if held[:length].any() else 0


def publish_postponed(cache: Cache, family: set[int]) -> None:
    """A fork let go of shared blocks: others of its family may publish them now."""
    rows = cache.rows
    for row in list(family):
        handle, tip = rows.handles[row], rows.tips[row]
        closed = handle.swapped is None and tip.open_row != row
        # The last condition only saves time: without a whole block, neither call changes anything.
        if closed and rows.committed_of[row] // cache.block_size > tip.end:
            publish(cache, row)
            track(cache, row)


def publish_remainder(cache: Cache, row: int, handle: KVCacheHandle, tip: Node) -> Node:
    """A row that ends leaves its last, unfilled block to the tree; returns the deepest node that it holds then.

    Nobody writes the block any more, so this costs no copy. It becomes free instead if a fork still holds it or if
    something that begins with the same tokens is cached behind `tip`, which is closed.
    """
    rows, size = cache.rows, cache.block_size
    first, start, end = tip.end, tip.end * size, rows.committed_of[row]
    if not 0 < end - start < size or not handle.publishes or tip.detached:
        return tip
    groups = cache.growing
    ids = tuple([rows.tables[group.index][row, first : first + 1].copy() for group in groups])
    held = (group.gpu.refs[block[0]] > 1 for group, block in zip(groups, ids, strict=True))
    if handle.family is not None and any(held):
        return tip
    tokens = rows.final_token_ids(row, start, end, rows.num_history_of[row])
    key = tokens.tobytes()
    if tip.children is not None and tip.children.nearest(key)[1] == len(key):
        return tip
    if tip.num_remainders:
        drop_covered(cache, tip, key)
    node = new_child(cache, tip, key, handle, is_remainder=True)
    node.num_blocks, node.tokens, node.ids = 1, tokens, ids
    node.active = 1  # the row held `tip` directly; now it does so through this node
    if cache.events.listening and cache.events.tells_unfilled:
        _stored(cache, handle, node)
    return node


def _closed_child(cache: Cache, readers: list[int], tip: Node, key: bytes, first: int, last: int) -> Node:
    """A node for blocks that several rows share: all of them hold it instead of `tip`."""
    rows, size = cache.rows, cache.block_size
    row = readers[0]
    handle = rows.handles[row]
    tokens = rows.ids_between(row, first * size, last * size)
    # The same ids in every row, but for blocks that some of them have passed.
    ids = tuple([rows.tables[g.index][readers, first:last].max(axis=0) for g in cache.growing])
    node = new_child(cache, tip, key, handle)
    node.num_blocks, node.tokens, node.ids = last - first, tokens, ids
    for group in cache.full:
        group.gpu.refs[node.ids[group.index]] = 0  # their readers are counted on the node
    node.active = len(readers)
    tip.active -= len(readers) - 1  # each held the tip itself; together they now count as one active child
    for reader in readers:
        rows.tips[reader] = node
    if tip.num_remainders:
        drop_covered(cache, tip, key)
    return node


def _merge(cache: Cache, readers: list[int], tip: Node, child: Node, first: int) -> None:
    """The readers computed again what `child` holds: they take its blocks and free their own.

    What it has lost on the GPU, it takes from them.
    """
    rows = cache.rows
    rows.moves += 1
    first_adopted = child.end
    if child.tier != GPU:
        own = [rows.tables[g.index][readers, first : child.end].max(axis=0) for g in cache.growing]
        adopt_blocks(cache, child, own)
        first_adopted = first
    for reader in readers:
        handle = rows.handles[reader]
        child.owner = common_owner(child.owner, handle.user)
        ref(cache, child)
        for group in (*cache.full, *cache.by_block):
            first_adopted = min(first_adopted, group.adopt(cache, reader, child, first, handle.family is not None))
        unref(cache, tip)
        rows.tips[reader] = child
        handle.stats.merged_blocks += child.num_blocks
    if first_adopted < child.end:
        _share_origin(cache, readers, child, first_adopted)


def _share_origin(cache: Cache, readers: list[int], child: Node, first: int) -> None:
    """From block `first` on, a run holds blocks that these rows computed: what is wanted of theirs holds for it too.

    What it was published with stays: runs behind it were computed with the blocks that it had before.
    """
    for reader in readers:
        handle = cache.rows.handles[reader]
        new = any(child not in cache.sessions.get(name, ()) for name in handle.sessions)
        shorter = handle.ttl is not None and (child.ttl is None or handle.ttl < child.ttl)
        if (new or shorter) and child.start < first:
            split(cache, child, first - child.start)
        if new:
            add_sessions(cache, child, handle.sessions)
        if shorter:
            child.ttl = handle.ttl


# --- content that must not be reused ---------------------------------------------------------------------------------


def invalidate_scopes(cache: Cache, affected: Callable[[ReuseScope], bool], reason: EvictionReason) -> int:
    """All content of these scopes, on all tiers."""
    nodes: list[Node] = []
    for scope, root in cache.roots.items():
        if affected(scope):
            root.logits = None
            nodes += (root.children or {}).values()
    return _remove(cache, nodes, lambda handle: affected(handle.scope), reason)


def invalidate_session(cache: Cache, session: str) -> int:
    """What the requests of a session published, and blocks for which others took over a part of it."""
    nodes = sorted(cache.sessions.get(session, ()), key=lambda n: (n.start, n.created))
    for node in nodes:
        forget_logits_inside(cache, node.parent, node.start, node.key)
    forget_logits_of(cache, session, cache.roots.values())
    return _remove(cache, nodes, lambda handle: session in handle.sessions, EvictionReason.INVALIDATED)


class WouldRemove(NamedTuple):
    """What an invalidation would take, in tokens of cached blocks."""

    num_tokens: int
    tokens_of_others: int  # of these, the ones that others use or have used, or whose user is not known


def invalidation_of(cache: Cache, session: str) -> WouldRemove:
    """What `invalidate_session` would take."""
    doomed = {part for node in cache.sessions.get(session, ()) for part in node.subtree()}
    of_others = [node for node in doomed if not (isinstance(node.owner, Session) and node.owner.name == session)]
    size = cache.block_size
    return WouldRemove(*[sum(node.num_blocks for node in nodes) * size for nodes in (doomed, of_others)])


def invalidate_below_prefix(cache: Cache, prefix: Int32Array, scope: ReuseScope) -> int:
    """The last full block of a prefix and everything that follows it."""
    size = cache.block_size
    last = len(prefix) // size - 1
    if last < 0:
        return 0
    start = last * size
    before = match_tokens(cache, scope, prefix[:start])
    if before.root is not None and before.num_blocks == last:
        parent = before.path[-1] if before.path else before.root
        forget_logits_inside(cache, parent, last, prefix[start : start + size].tobytes())

    def affected(handle: KVCacheHandle) -> bool:
        """Whether it has, or is computing, a token of the block: its ids agree with the prefix as far as they go."""
        if handle.scope != scope or int(cache.rows.reserved[handle.row]) <= start:
            return False
        known = cache.rows.token_ids(handle.row)[: start + 1]
        return bool((known == prefix[: len(known)]).all())

    return _remove(cache, _nodes_from(cache, prefix, last, scope), affected, EvictionReason.INVALIDATED)


def _nodes_from(cache: Cache, prefix: Int32Array, last: int, scope: ReuseScope) -> list[Node]:
    """The node that starts at block `last` of a prefix, cut free from what comes before it."""
    match = match_tokens(cache, scope, prefix[: (last + 1) * cache.block_size])
    if match.num_blocks <= last:
        return []
    node = match.path[-1]
    if node.start < last:
        split(cache, node, last - node.start)
    return [node]


def _remove(
    cache: Cache, nodes: Sequence[Node], affected: Callable[[KVCacheHandle], bool], reason: EvictionReason
) -> int:
    """Takes out what begins with these nodes. Requests that it concerns publish nothing more.

    What they were computing may be in the hands of others.
    """
    doomed = {part for node in nodes for part in node.subtree()}
    handles = [handle for handle in cache.requests.values() if handle.publishes]
    silenced = [handle for handle in handles if cache.rows.tips[handle.row] in doomed or affected(handle)]
    for handle in silenced:
        close(cache, tip_of(cache, handle.row))
        handle.publishes = False
        for group in cache.groups:
            group.silence(handle)
        untrack(cache, handle)
    for handle in handles if silenced else ():
        if handle.publishes and handle.inflight is None and handle.swapped is None:
            track(cache, handle.row)
    void_pins(cache, doomed)
    return sum(detach(cache, node, reason) for node in nodes if not node.detached)
