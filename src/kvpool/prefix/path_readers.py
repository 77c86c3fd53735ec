"""Who reads a path of the tree, and who has pinned one.

A sequence holds a path by its deepest node. `hold` and `release` walk up only while a node changes between idle and
active; idle leaves are offered to the eviction policy and taken back when they are used again.
"""

from __future__ import annotations

from kvpool.prefix.context import CacheContext
from kvpool.prefix.expiry import Expiry
from kvpool.prefix.ledger import IdleLedger
from kvpool.prefix.node import Node
from kvpool.prefix.tree import RunTree
from kvpool.prefix.window_readers import WindowReaders


class PathReaders:
    """Counts the readers and the pins of runs; what nobody reads becomes cached, or free if it is detached."""

    def __init__(
        self, context: CacheContext, tree: RunTree, ledger: IdleLedger, expiry: Expiry, windows: WindowReaders
    ) -> None:
        self.context = context
        self.tree = tree
        self.ledger = ledger
        self.expiry = expiry
        self.windows = windows
        self.pinned_blocks = 0  # positions on pinned paths

    def hold(self, node: Node) -> None:
        """One more sequence (or one more active child) reads this node."""
        while True:
            node.active += 1
            if node.active > 1 or node is node.root:
                return
            if node.pins:
                self.ledger.count_pinned_run(node, -1)
            elif not node.same_tier_children:
                node.root.policies[node.tier].remove(node)
            self.ledger.count_run(node, -1)
            node = node.parent

    def release(self, node: Node, used: bool = True) -> None:
        """A sequence lets go of its deepest node; nodes that nobody reads any more become cached, or free if detached.

        Unless it only held them (`used` is False), this was their last use.
        """
        waiting = self.context.shadows.waiting if used else None
        while True:
            node.active -= 1
            if node.active:
                return
            if node is node.root:
                if node.children is None:
                    self.tree.forget_root(node.root)
                return
            parent = node.parent
            if used:
                node.last_access = self.context.tick
                node.last_access_at = self.context.now
            if node.detached:
                self._free_detached(node)
            else:
                self.ledger.count_run(node, 1)
                if waiting is not None:
                    waiting.append(node)
                if node.ttl is not None:
                    node.expires_at = self.context.now + node.ttl
                    self.expiry.watch(node)
                if node.pins:
                    self.ledger.count_pinned_run(node, 1)
                elif not node.same_tier_children:
                    node.root.policies[node.tier].add(node)
            node = parent

    def _free_detached(self, node: Node) -> None:
        """Frees the blocks of a detached node that lost its last reader."""
        for group in self.context.full:
            group.on(node.tier).give(node.ids[group.index])
        for group in self.context.windowed:
            self.windows.free(node, group, node.ids[group.index])
        node.num_blocks = 0

    def offer(self, node: Node) -> None:
        """Gives a node to the eviction policy if it is a candidate now."""
        if node.is_candidate():
            if node.expires_at <= self.context.now:
                self.expiry.watch(node)
            node.root.policies[node.tier].add(node)

    def pin(self, node: Node) -> None:
        """Protects a path from eviction; counts like `hold`."""
        while node is not node.root:
            node.pins += 1
            if node.pins > 1:
                return
            self.pinned_blocks += node.num_blocks
            if not node.active:
                if not node.same_tier_children:
                    node.root.policies[node.tier].remove(node)
                self.ledger.count_pinned_run(node, 1)
            node = node.parent

    def unpin(self, node: Node) -> None:
        """One pin less on a path."""
        while node is not node.root:
            node.pins -= 1
            if node.pins:
                return
            self.pinned_blocks -= node.num_blocks
            if not node.active:
                self.ledger.count_pinned_run(node, -1)
                self.offer(node)
            node = node.parent
