"""Shadows: blocks on the host that hold the same as a run on the GPU, copied before the run is evicted.

Evicting the run then takes them over and moves nothing. They are lost without loss, so they count as cached blocks of the
host that anybody may have: they are given up first for swapped requests and smaller pools. A run that was not copied before
it is evicted takes them only where no other run gives way. Nobody finds a run by its shadow and no event tells of it: a
run is where its best copy is.
"""

from __future__ import annotations

from kvpool.config import Tier
from kvpool.pools.arrays import Int32Array
from kvpool.pools.groups import Group
from kvpool.pools.pool import BlockPool
from kvpool.prefix.node import Node


class Shadows:
    """Keeps, divides and frees shadows. A full group's is whole; a windowed group's has some of the blocks of its run.

    `waiting` collects the runs whose last reader leaves, for whoever makes shadows at the end of an operation; it is None
    where runs are copied on eviction only.
    """

    __slots__ = ("groups", "nodes", "num_blocks", "waiting")

    def __init__(self, groups: list[Group], num_pools: int) -> None:
        self.groups = groups
        self.nodes: dict[Node, None] = {}  # that have a shadow, oldest first
        self.num_blocks = [0] * num_pools
        self.waiting: list[Node] | None = None

    def keep(self, node: Node, ids: list[Int32Array]) -> None:
        """These host blocks (-1: none) are the shadow of a run from now on."""
        node.shadow = ids
        self.nodes[node] = None
        self._count(ids, 1)

    def take(self, node: Node) -> list[Int32Array] | None:
        """The blocks of a run's shadow, which is none any more; the caller owns them. None if there is no shadow."""
        ids = node.shadow
        if ids is not None:
            node.shadow = None
            del self.nodes[node]
            self._count(ids, -1)
        return ids

    def drop(self, node: Node) -> None:
        """Frees the shadow of a run, if it has one."""
        ids = self.take(node)
        if ids is not None:
            self._give(ids)

    def trim(self, node: Node, num_blocks: int) -> None:
        """A run is cut to its first `num_blocks`, and its shadow with it."""
        ids = self.take(node)
        if ids is not None:
            self._give([of_group[num_blocks:] for of_group in ids])
            if num_blocks:
                self.keep(node, [of_group[:num_blocks] for of_group in ids])

    def drop_block(self, node: Node, group: Group, index: int) -> None:
        """A windowed group lost a block of a run: its shadow has no use for it either."""
        assert node.shadow is not None
        ids = node.shadow[group.index]
        gone = ids[index : index + 1].copy()
        if gone[0] >= 0:
            ids[index] = -1
            pool = group.on(Tier.HOST)
            pool.give(gone)
            pool.num_cached -= 1
            self.num_blocks[pool.index] -= 1

    def divide(self, upper: Node, node: Node, num_blocks: int) -> None:
        """The first `num_blocks` of a run became a run of their own, `upper`."""
        assert node.shadow is not None
        upper.shadow = [ids[:num_blocks] for ids in node.shadow]
        node.shadow = [ids[num_blocks:] for ids in node.shadow]
        self.nodes[upper] = None

    def give_way(self, pool: BlockPool, num_free: int, ceiling: int) -> None:
        """Frees shadows until so many blocks of a host pool are free, the youngest first: their runs stay longest.

        It ends at the shadow of a run above the priority `ceiling`.
        """
        while self.nodes and pool.num_free < num_free:
            youngest = next(reversed(self.nodes))
            if youngest.priority > ceiling:
                return
            self.drop(youngest)

    def _count(self, ids: list[Int32Array], change: int) -> None:
        for group in self.groups:
            pool = group.on(Tier.HOST)
            num_blocks = change * int((ids[group.index] >= 0).sum())
            pool.num_cached += num_blocks
            self.num_blocks[pool.index] += num_blocks

    def _give(self, ids: list[Int32Array]) -> None:
        for group in self.groups:
            of_group = ids[group.index]
            group.on(Tier.HOST).give(of_group[of_group >= 0])
