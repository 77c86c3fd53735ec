"""Who reads cached runs: references and pins along paths of the tree, and the books of what nobody reads.

A sequence holds a path by its deepest node. `ref` and `unref` walk up only while a node changes between idle and active.
Idle leaves are offered to the eviction policy, and taken back when they are used again.

`num_cached` and `num_pinned` of pools and quotas are changed here, and by host copies. Blocks of full groups count with their
run. Those read one by one count by themselves on the GPU, with the sequences that read them; below it they count with
their run, because nobody reads one of them alone there.
"""

from __future__ import annotations

from collections.abc import Iterator

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


# --- what nobody reads ----------------------------------------------------------------------------------------------


def add_cached(root: Root, pool: BlockPool, change: int) -> None:
    """`change` blocks became idle (or, if negative, stopped being so)."""
    pool.num_cached += change
    if root.quota is not None and pool.tier == GPU:
        root.quota.cached[pool.index] += change


def add_pinned(root: Root, pool: BlockPool, change: int) -> None:
    """`change` idle blocks became pinned (or, if negative, stopped being so)."""
    pool.num_pinned += change
    if root.quota is not None and pool.tier == GPU:
        root.quota.pinned[pool.index] += change


def count_positions(cache: Cache, node: Node, change: int) -> None:
    """`change` positions of full groups in a run became idle (or, if negative, stopped being so)."""
    if cache.only_pools is not None and node.root.quota is None:
        cache.only_pools[node.tier].num_cached += change
        return
    for index, per_position in cache.full_per_pool:
        add_cached(node.root, cache.pools[index][node.tier], change * per_position)


def count_run(cache: Cache, node: Node, change: int) -> None:
    """A run became idle (`change` 1) or stopped being so (-1): its blocks that count with it are cached, or not."""
    if cache.only_pools is not None and node.root.quota is None:
        cache.only_pools[node.tier].num_cached += change * node.num_blocks
        return
    count_positions(cache, node, change * node.num_blocks)
    if cache.by_block and node.tier != GPU:
        for pool, num_blocks in _by_block_below(cache, node):
            add_cached(node.root, pool, change * num_blocks)


def count_pinned_run(cache: Cache, node: Node, change: int) -> None:
    """An idle run became pinned (`change` 1) or stopped being so (-1)."""
    for index, per_position in cache.full_per_pool:
        add_pinned(node.root, cache.pools[index][node.tier], change * node.num_blocks * per_position)
    if cache.by_block and node.tier != GPU:
        for pool, num_blocks in _by_block_below(cache, node):
            add_pinned(node.root, pool, change * num_blocks)


def _by_block_below(cache: Cache, node: Node) -> Iterator[tuple[BlockPool, int]]:
    """(pool, blocks) of each group read block by block of a run below the GPU."""
    for group in cache.by_block:
        yield group.on(node.tier), int((node.ids[group.index] >= 0).sum())


def free_blocks(cache: Cache, node: Node, group: ByBlock, ids: Int32Array) -> None:
    """Frees published, unread blocks (-1: none) of a run; pinned ones only below the GPU, where their run is pinned."""
    held = ids[ids >= 0]
    pool = group.on(node.tier)
    pool.give(held)
    add_cached(node.root, pool, -len(held))
    if node.pins and node.tier != GPU:
        add_pinned(node.root, pool, -len(held))
