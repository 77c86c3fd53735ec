"""Copies of cached runs on the host, made ahead of their eviction."""

from __future__ import annotations

from kvpool.config import Tier
from kvpool.core.kind import Group
from kvpool.core.node import Node
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import BlockPool


class HostCopies:
    """Blocks on the host that hold the same as a run on the GPU, copied ahead of its eviction.

    Evicting the run takes its host copy over and moves nothing. Dropping a host copy loses nothing, so host copies count
    as cached blocks of the host that anybody may have: swapped requests and smaller pools take them first, and a run that
    must be copied to the host takes them only where no other run gives way. Nobody finds a run by its host copy, and no
    event tells of one. The host copy of a full group is whole; that of another has some of its blocks.

    `waiting` collects the runs whose last reader leaves, for whoever makes host copies at the end of an operation; it is None
    where runs are copied on eviction only.
    """

    __slots__ = ("groups", "nodes", "num_blocks", "waiting")

    def __init__(self, groups: list[Group], num_pools: int) -> None:
        self.groups = groups
        self.nodes: dict[Node, None] = {}  # that have a host copy, oldest first
        self.num_blocks = [0] * num_pools
        self.waiting: list[Node] | None = None

    def keep(self, node: Node, ids: list[Int32Array]) -> None:
        """These host blocks (-1: none) are the host copy of a run from now on."""
        node.host_copy = ids
        self.nodes[node] = None
        self._count(ids, 1)

    def take(self, node: Node) -> list[Int32Array] | None:
        """Takes the host copy away from a run and gives its blocks to the caller. None if the run has no copy."""
        ids = node.host_copy
        if ids is not None:
            node.host_copy = None
            del self.nodes[node]
            self._count(ids, -1)
        return ids

    def drop(self, node: Node) -> None:
        """Frees the host copy of a run, if it has one."""
        ids = self.take(node)
        if ids is not None:
            self._give(ids)

    def trim(self, node: Node, num_blocks: int) -> None:
        """A run is cut to its first `num_blocks`, and its host copy with it."""
        ids = self.take(node)
        if ids is not None:
            self._give([of_group[num_blocks:] for of_group in ids])
            if num_blocks:
                self.keep(node, [of_group[:num_blocks] for of_group in ids])

    def drop_block(self, node: Node, group: Group, index: int) -> None:
        """A group lost a block of a run: its host copy has no use for it either."""
        assert node.host_copy is not None
        ids = node.host_copy[group.index]
        gone = ids[index : index + 1].copy()
        if gone[0] >= 0:
            ids[index] = -1
            pool = group.on(Tier.HOST)
            pool.give(gone)
            pool.num_cached -= 1
            self.num_blocks[pool.index] -= 1

    def divide(self, ids: list[Int32Array], upper: Node, lower: Node) -> None:
        """A run with this host copy was cut in two."""
        for part, begin, end in ((upper, 0, upper.num_blocks), (lower, upper.num_blocks, None)):
            part.host_copy = [of_group[begin:end] for of_group in ids]
            self.nodes[part] = None

    def give_way(self, pool: BlockPool, num_free: int, for_run: Node | None = None) -> None:
        """Frees host copies until so many blocks of a host pool are free, the youngest first: their runs stay longest.

        It ends at the host copy of a run that is more important than `for_run`.
        """
        while self.nodes and pool.num_free < num_free:
            youngest = next(reversed(self.nodes))
            if for_run is not None and youngest.outranks(for_run):
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
