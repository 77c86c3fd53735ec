"""Who reads cached runs: references and pins along paths of the tree.

A sequence holds a path by its deepest node. `ref` and `unref` walk up only while a node changes between idle and active.
Idle leaves are offered to the eviction policy, and taken back when they are used again.
"""

from __future__ import annotations

from kvpool.core.cache import Cache
from kvpool.core.node import Node
from kvpool.prefix.blocks import free_blocks
from kvpool.prefix.idle import count_pinned_run, count_run
from kvpool.prefix.tree import forget_root, watch


def ref(cache: Cache, node: Node) -> None:
    """One more sequence (or one more active child) reads this node."""
    while True:
        node.active += 1
        if node.active > 1 or node is node.root:
            return
        if node.pins:
            count_pinned_run(cache, node, -1)
        elif not node.same_tier_children:
            node.root.policies[node.tier].remove(node)
        count_run(cache, node, -1)
        node = node.parent


def unref(cache: Cache, node: Node, used: bool = True) -> None:
    """A sequence lets go of its deepest node; nodes that nobody reads any more become cached, or free if detached.

    Unless it only held them (`used` is False), this was their last use.
    """
    waiting = cache.host_copies.waiting if used else None
    while True:
        node.active -= 1
        if node.active:
            return
        if node is node.root:
            if node.children is None:
                forget_root(cache, node.root)
            return
        parent = node.parent
        if used:
            node.last_access = cache.tick
            node.last_access_at = cache.now
        if node.detached:
            _free_detached(cache, node)
        else:
            count_run(cache, node, 1)
            if waiting is not None:
                waiting.append(node)
            if node.ttl is not None:
                node.expires_at = cache.now + node.ttl
                watch(cache, node)
            if node.pins:
                count_pinned_run(cache, node, 1)
            elif not node.same_tier_children:
                node.root.policies[node.tier].add(node)
        node = parent


def _free_detached(cache: Cache, node: Node) -> None:
    """Frees the blocks of a detached node that lost its last reader."""
    for group in cache.full:
        group.on(node.tier).give(node.ids[group.index])
    for group in cache.by_block:
        free_blocks(cache, node, group, node.ids[group.index])
    node.num_blocks = 0


def offer(cache: Cache, node: Node) -> None:
    """Gives a node to the eviction policy if it is a candidate now."""
    if node.is_candidate():
        if node.expires_at <= cache.now:
            watch(cache, node)
        node.root.policies[node.tier].add(node)


def pin_path(cache: Cache, node: Node) -> None:
    """Protects a path from eviction; counts like `hold`."""
    while node is not node.root:
        node.pins += 1
        if node.pins > 1:
            return
        cache.pinned_positions += node.num_blocks
        if not node.active:
            if not node.same_tier_children:
                node.root.policies[node.tier].remove(node)
            count_pinned_run(cache, node, 1)
        node = node.parent


def unpin_path(cache: Cache, node: Node) -> None:
    """One pin less on a path."""
    while node is not node.root:
        node.pins -= 1
        if node.pins:
            return
        cache.pinned_positions -= node.num_blocks
        if not node.active:
            count_pinned_run(cache, node, -1)
            offer(cache, node)
        node = node.parent
