"""The books of what nobody reads: who else changes `num_cached` and `num_pinned` of pools and quotas? Host copies alone.

Blocks of full groups count with their run. Those read one by one count by themselves on the GPU, with the sequences that
read them; below it they count with their run, because nobody reads one of them alone there.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.core.cache import Cache
from kvpool.core.node import Node, Root
from kvpool.pools.pool import GPU, BlockPool


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
