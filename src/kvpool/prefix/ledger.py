"""How many blocks are cached and nobody reads them, and how many of these are pinned: per pool, tier and tenant."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import Node, Root


class IdleLedger:
    """The only one who changes `num_cached` and `num_pinned` of pools and quotas, but for shadows, which count themselves.

    Blocks of full groups count with their run. Those of windowed groups count by themselves on the GPU, with the sequences
    whose window covers them; below it they count with their run, because nobody reads one of them alone there.
    """

    def __init__(self, context: CacheContext) -> None:
        self.pools = context.pools
        self.windowed = context.windowed
        self.full_per_pool = context.full_per_pool
        # The pool of each tier when there is one full group and nothing else: counting is then one addition.
        plain = self.full_per_pool == [(0, 1)] and not self.windowed and len(self.pools) == 1
        self.only_pools = self.pools[0] if plain else None

    def add_cached(self, root: Root, pool: BlockPool, change: int) -> None:
        """`change` blocks became idle (or, if negative, stopped being so)."""
        pool.num_cached += change
        if root.quota is not None and pool.tier == GPU:
            root.quota.cached[pool.index] += change

    def add_pinned(self, root: Root, pool: BlockPool, change: int) -> None:
        """`change` idle blocks became pinned (or, if negative, stopped being so)."""
        pool.num_pinned += change
        if root.quota is not None and pool.tier == GPU:
            root.quota.pinned[pool.index] += change

    def count_positions(self, node: Node, change: int) -> None:
        """`change` positions of full groups in a run became idle (or, if negative, stopped being so)."""
        if self.only_pools is not None and node.root.quota is None:
            self.only_pools[node.tier].num_cached += change
            return
        for index, per_position in self.full_per_pool:
            self.add_cached(node.root, self.pools[index][node.tier], change * per_position)

    def count_run(self, node: Node, change: int) -> None:
        """A run became idle (`change` 1) or stopped being so (-1): its blocks that count with it are cached, or not."""
        if self.only_pools is not None and node.root.quota is None:
            self.only_pools[node.tier].num_cached += change * node.num_blocks
            return
        self.count_positions(node, change * node.num_blocks)
        if self.windowed and node.tier != GPU:
            for pool, num_blocks in self._windowed_below(node):
                self.add_cached(node.root, pool, change * num_blocks)

    def count_pinned_run(self, node: Node, change: int) -> None:
        """An idle run became pinned (`change` 1) or stopped being so (-1)."""
        for index, per_position in self.full_per_pool:
            self.add_pinned(node.root, self.pools[index][node.tier], change * node.num_blocks * per_position)
        if self.windowed and node.tier != GPU:
            for pool, num_blocks in self._windowed_below(node):
                self.add_pinned(node.root, pool, change * num_blocks)

    def _windowed_below(self, node: Node) -> Iterator[tuple[BlockPool, int]]:
        """(pool, blocks) of each windowed group of a run below the GPU."""
        for group in self.windowed:
            yield group.on(node.tier), int((node.ids[group.index] >= 0).sum())
