"""Who reads cached runs: references and pins along paths of the tree, and the books of what nobody reads.

A sequence holds a path by its deepest node. `ref` and `unref` walk up only while a node changes between idle and active.
Idle leaves are offered to the eviction policy, and taken back when they are used again.

`num_cached` and `num_pinned` of pools and quotas are changed here, and by host copies. Blocks of full groups count with their
run. Those read one by one count by themselves on the GPU, with the sequences that read them; below it they count with
their run, because nobody reads one of them alone there.
"""

from __future__ import annotations

from kvpool.core.cache import Cache
from kvpool.core.kind import ByBlock
from kvpool.core.node import Node, Root
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.tree import forget_root, watch

# --- readers and pins ------------------------------------------------------------------------------------------------


def ref(cache: Cache, node: Node) -> None:
    """One more sequence (or one more active child) reads this node."""
    while True:
        node.active += 1
        if node.active > 1 or node is node.root:
            return
        if not (node.pins or node.same_tier_children):
            node.root.policies[node.tier].remove(node)
        count_run(cache, node, -1, -1 if node.pins else 0)
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
            count_run(cache, node, 1, 1 if node.pins else 0)
            if waiting is not None:
                waiting.append(node)
            if node.ttl is not None:
                node.expires_at = cache.now + node.ttl
                watch(cache, node)
            if not (node.pins or node.same_tier_children):
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
            count_run(cache, node, 0, 1)
        node = node.parent


def unpin_path(cache: Cache, node: Node) -> None:
    """One pin less on a path."""
    while node is not node.root:
        node.pins -= 1
        if node.pins:
            return
        cache.pinned_positions -= node.num_blocks
        if not node.active:
            count_run(cache, node, 0, -1)
            offer(cache, node)
        node = node.parent


# --- what nobody reads -----------------------------------------------------------------------------------------------


def add_idle(root: Root, pool: BlockPool, idle: int, pinned: int = 0) -> None:
    """So many blocks became idle, so many idle ones pinned; or, where negative, stopped being so."""
    pool.num_cached += idle
    pool.num_pinned += pinned
    if root.quota is not None and pool.tier == GPU:
        root.quota.cached[pool.index] += idle
        root.quota.pinned[pool.index] += pinned


def count_run(cache: Cache, node: Node, idle: int, pinned: int) -> None:
    """The blocks that count with a run became idle (1), stopped being so (-1), or neither (0); `pinned` likewise."""
    root, tier, length = node.root, node.tier, node.num_blocks
    if cache.only_pools is not None and root.quota is None:
        pool = cache.only_pools[tier]
        pool.num_cached += idle * length
        if pinned:
            pool.num_pinned += pinned * length
        return
    for index, per_position in cache.full_per_pool:
        num_blocks = length * per_position
        add_idle(root, cache.pools[index][tier], idle * num_blocks, pinned * num_blocks)
    for group in cache.by_block if tier != GPU else ():
        num_blocks = int((node.ids[group.index] >= 0).sum())
        add_idle(root, group.on(tier), idle * num_blocks, pinned * num_blocks)


def free_blocks(cache: Cache, node: Node, group: ByBlock, ids: Int32Array) -> None:
    """Frees published, unread blocks (-1: none) of a run; pinned ones only below the GPU, where their run is pinned."""
    held = ids[ids >= 0]
    pool = group.on(node.tier)
    pool.give(held)
    add_idle(node.root, pool, -len(held), -len(held) if node.pins and node.tier != GPU else 0)
