"""Content that must not be reused leaves the index. Each function returns how many blocks (positions) left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle
from kvpool.core.node import Node
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.evict import detach
from kvpool.prefix.keeping import void_pins
from kvpool.prefix.tree import close, forget_logits_inside, forget_logits_of, match_tokens, split, tip_of
from kvpool.scope import ReuseScope
from kvpool.sequences.publish import track, untrack
from kvpool.stats import EvictionReason


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
