"""Content that must not be found again: cached runs leave the index, and live requests that hold copies fall silent.

A live request keeps what it has and goes on, but publishes nothing more if any of it may be older than the invalidation:
blocks on a path that left the index, a beginning that it copied from one, and what it has written or is computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.manager.pins import Pins
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.node import Node
from kvpool.scope import ReuseScope
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.state import CacheState
from kvpool.stats import EvictionReason


class Invalidation:
    """`invalidate` and `reset_prefix_cache`. Each method returns how many blocks (positions) left the index."""

    def __init__(self, state: CacheState, pins: Pins) -> None:
        self.state = state
        self.cache = state.cache
        self.tree = state.cache.tree
        self.removal = state.cache.removal
        self.logits = state.cache.logits
        self.rows = state.rows
        self.in_flight = state.in_flight
        self.pins = pins

    def everything(self) -> int:
        """All scopes, on all tiers."""
        roots = list(self.tree.roots.values())
        for root in roots:
            root.logits = None
        nodes = [node for root in roots for node in (root.children or {}).values()]
        return self._remove(nodes, lambda handle: True, EvictionReason.RESET)

    def in_scope(self, scope: ReuseScope) -> int:
        """All content of one scope."""
        root = self.tree.roots.get(scope)
        nodes: list[Node] = []
        if root is not None:
            root.logits = None
            nodes = list((root.children or {}).values())
        return self._remove(nodes, lambda handle: handle.scope == scope, EvictionReason.INVALIDATED)

    def of_tenant(self, tenant: str) -> int:
        """All content of a tenant, in all its scopes."""
        nodes: list[Node] = []
        for scope, root in self.tree.roots.items():
            if scope.tenant == tenant:
                root.logits = None
                nodes += (root.children or {}).values()
        return self._remove(nodes, lambda handle: handle.scope.tenant == tenant, EvictionReason.INVALIDATED)

    def of_session(self, session: str) -> int:
        """What the requests of a session published, and blocks for which others took over a part of it."""
        nodes = sorted(self.tree.sessions.get(session, ()), key=lambda n: (n.start, n.created))

        def affected(handle: KVCacheHandle) -> bool:
            return session in handle.sessions

        for node in nodes:
            self.logits.forget_inside(node.parent, node.start, node.key)
        self.logits.forget_made_by(session, self.tree.roots.values())
        return self._remove(nodes, affected, EvictionReason.INVALIDATED)

    def below_prefix(self, prefix: Int32Array, scope: ReuseScope) -> int:
        """The last full block of a prefix and everything that follows it."""
        size = self.state.context.block_size
        last = len(prefix) // size - 1
        if last < 0:
            return 0
        start = last * size
        before = self.tree.match(scope, prefix[:start], partial=False)
        if before.root is not None and before.num_blocks == last:
            parent = before.path[-1] if before.path else before.root
            self.logits.forget_inside(parent, last, prefix[start : start + size].tobytes())

        def affected(handle: KVCacheHandle) -> bool:
            """Whether it has, or is computing, a token of the block: its ids agree with the prefix as far as they go."""
            if handle.scope != scope or int(self.rows.reserved[handle.row]) <= start:
                return False
            known = self.rows.token_ids(handle.row)[: start + 1]
            return bool((known == prefix[: len(known)]).all())

        return self._remove(self._nodes_from(prefix, last, scope), affected, EvictionReason.INVALIDATED)

    def _nodes_from(self, prefix: Int32Array, last: int, scope: ReuseScope) -> list[Node]:
        """The node that starts at block `last` of a prefix, cut free from what comes before it."""
        match = self.tree.match(scope, prefix[: (last + 1) * self.state.context.block_size], partial=False)
        if match.num_blocks <= last:
            return []
        node = match.path[-1]
        if node.start < last:
            self.tree.split(node, last - node.start)
        return [node]

    def _remove(self, nodes: Sequence[Node], affected: Callable[[KVCacheHandle], bool], reason: EvictionReason) -> int:
        doomed = {part for node in nodes for part in node.subtree()}
        self._silence(lambda handle: self.rows.tips[handle.row] in doomed or affected(handle))
        self.pins.void(doomed)
        return sum(self.removal.detach(node, reason) for node in nodes if not node.detached)

    def _silence(self, affected: Callable[[KVCacheHandle], bool]) -> None:
        """These requests publish nothing more; what they were computing may be in the hands of others."""
        handles = [handle for handle in self.state.requests.values() if handle.publishes]
        silenced = [handle for handle in handles if affected(handle)]
        for handle in silenced:
            if self.rows.has_open_tip(handle.row):
                self.state.publisher.close(handle.row)
            handle.publishes = False
            self.in_flight.untrack(handle)
        for handle in handles if silenced else ():
            if handle.publishes and handle.inflight is None and handle.swapped is None:
                self.in_flight.track(handle.row)
