"""Runs change their tier: down instead of being dropped, up when somebody reads them, or taken over where computed again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpool.config import Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.pools.arrays import Int32Array
from kvpool.pools.copies import CopyKind, CopyOp
from kvpool.pools.groups import Group
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.announcing.announcer import Announcer
from kvpool.prefix.readers.ledger import IdleLedger
from kvpool.prefix.readers.paths import PathReaders
from kvpool.prefix.readers.windows import WindowReaders
from kvpool.prefix.tree.context import CacheContext
from kvpool.prefix.tree.node import Node
from kvpool.prefix.tree.run_tree import RunTree
from kvpool.stats import EvictionReason


class TierMover:
    """Gives runs blocks on another tier and plans the copies.

    `make_room(pool, num_blocks, priority)` frees blocks of a lower tier, and none of runs above the priority;
    `evictable(pool)` says how many could become free.
    """

    def __init__(
        self,
        context: CacheContext,
        tree: RunTree,
        ledger: IdleLedger,
        windows: WindowReaders,
        readers: PathReaders,
        announcer: Announcer,
        evictable: Callable[[BlockPool], int],
        make_room: Callable[[BlockPool, int, int], None],
    ) -> None:
        self.context = context
        self.tree = tree
        self.ledger = ledger
        self.windows = windows
        self.readers = readers
        self.announcer = announcer
        self.evictable = evictable
        self.make_room = make_room
        self.on_pinned_promoted: Callable[[Node], None] = lambda node: None  # told of a pinned run that came to the GPU
        self.find_lower_tiers()

    def find_lower_tiers(self) -> None:
        """Where evicted runs go from each tier: the next one that has blocks in every pool. Call again after a resize."""
        num_tiers, pools = self.context.num_tiers, self.context.pools
        usable = [tier for tier in range(num_tiers) if all(tiers[tier].num_blocks for tiers in pools)]
        self.lower_tier: list[Tier | None] = [
            next((Tier(below) for below in usable if below > tier), None) for tier in range(num_tiers)
        ]

    # --- down --------------------------------------------------------------------------------------------------------

    def num_fitting(self, tier: Tier, evicting: bool) -> int:
        """For how many positions of full groups the tier below `tier` has room, or could make it by `evicting`."""
        below = self.lower_tier[tier]
        assert below is not None
        fitting = MAX_BLOCKS
        for index, per_position in self.context.full_per_pool:
            pool = self.context.pools[index][below]
            room = pool.num_free + (self.evictable(pool) if evicting else 0)
            fitting = min(fitting, room // per_position)
        return fitting

    def demote(self, node: Node, num_blocks: int) -> bool:
        """Moves the last `num_blocks` of an idle leaf one tier down; False when there is no room.

        Of windowed groups only what the end of a run needs goes along. Runs of a higher priority do not give way; others
        may have done so when it turns out that the room is not enough: ask `num_fitting` again, and move what fits.
        """
        target = self.lower_tier[node.tier]
        if target is None:
            return False
        context = self.context
        keep = node.num_blocks - num_blocks
        needs = [0] * len(context.pools)
        for group in context.full:
            needs[group.pool] += num_blocks
        # Asked before runs below it give way.
        along = [(group, self.windows.needed(node, group, keep)) for group in context.windowed]
        for group, wanted in along:
            needs[group.pool] += int(wanted.sum())
        if not self._make_room_below(target, needs, importance(node)):
            return False
        if keep:
            self.tree.split(node, keep)
        for group, wanted in along:
            for index in np.flatnonzero((node.ids[group.index] >= 0) & ~wanted).tolist():
                self.windows.remove_block(node, group, index, EvictionReason.CAPACITY)
        self._move(node, target, CopyKind.OFFLOAD)
        context.counters.offloaded_blocks += num_blocks
        return True

    def _make_room_below(self, target: Tier, needs: list[int], priority: int) -> bool:
        """Frees blocks of a lower tier for a run of this priority; False if only more important runs could give way."""
        pools = [tiers[target] for tiers in self.context.pools]
        for pool, need in zip(pools, needs, strict=True):
            if pool.num_free + self.evictable(pool) < need:
                return False
        for pool, need in zip(pools, needs, strict=True):
            if pool.num_free < need:
                self.make_room(pool, need, priority)
            if pool.num_free < need:
                return False
        return True

    # --- up ----------------------------------------------------------------------------------------------------------

    def promote(self, node: Node) -> None:
        """Moves a node to the GPU. The caller holds it and made room."""
        self._move(node, GPU, CopyKind.ONBOARD)
        self.context.counters.onboarded_blocks += node.num_blocks

    def adopt_blocks(self, node: Node, ids: list[Int32Array]) -> None:
        """An idle run of a lower tier was computed again: it takes the new GPU blocks and frees its own."""
        context = self.context
        for group in context.full:
            group.publish(ids[group.index])
        announced = context.events.listening and bool(node.digests)
        gained = []
        for group in context.windowed:
            old, new = node.ids[group.index], ids[group.index]
            for index in np.flatnonzero((old >= 0) & (new < 0)).tolist():
                self.windows.remove_block(node, group, index, EvictionReason.CAPACITY)
            gained.append((group, np.flatnonzero((old < 0) & (new >= 0))))
        self._move(node, GPU, CopyKind.ONBOARD, ids)
        for group, present in gained if announced else ():
            self.announcer.stored_blocks(node, group, present)

    # --- either way --------------------------------------------------------------------------------------------------

    def _move(self, node: Node, target: Tier, kind: CopyKind, ready: list[Int32Array] | None = None) -> None:
        """Gives a run blocks on another tier: new ones and a planned copy, or `ready` ones that hold the data already."""
        context, source = self.context, node.tier
        if node.is_candidate():
            if kind is CopyKind.OFFLOAD:
                node.root.policies[source].evicted(node)
            node.root.policies[source].remove(node)
            node.entry = None  # the policy of the new tier starts afresh
        self._count(node, -1)
        if ready is None:
            node.ids = [self._move_ids(node, group, target, kind) for group in context.cached]
        if context.events.listening and node.digests:
            self.announcer.moved(node, source, target)
        if ready is not None:
            for group in context.cached:
                old = node.ids[group.index]
                group.on(source).give(old[old >= 0])
            node.ids = ready
        self._change_tier(node, target)
        self._count(node, 1)
        if node.pins and target == GPU:
            self.on_pinned_promoted(node)
        self.readers.offer(node)
        if node.parent.tier == source:
            self.readers.offer(node.parent)

    def _count(self, node: Node, change: int) -> None:
        if not node.active:
            self.ledger.count_run(node, change)
            if node.pins:
                self.ledger.count_pinned_run(node, change)

    @staticmethod
    def _change_tier(node: Node, target: Tier) -> None:
        """Books a run under its new tier: who is a leaf of which tier changes with it."""
        source, parent = node.tier, node.parent
        if parent.tier == target and parent.is_candidate():
            parent.root.policies[target].remove(parent)
        parent.same_tier_children += int(parent.tier == target) - int(parent.tier == source)
        node.tier = target
        node.same_tier_children = sum(c.tier == target for c in node.children.values()) if node.children else 0

    def _move_ids(self, node: Node, group: Group, target: Tier, kind: CopyKind) -> Int32Array:
        source = node.tier
        old = node.ids[group.index]
        present = old >= 0
        src = old if present.all() else old[present]
        dst = group.on(target).take(len(src))
        if len(src):
            self.context.copies.append(CopyOp(kind, group.index, source, target, src, dst))
        group.on(source).give(src)
        if group.slides and GPU in (source, target):  # where windowed blocks count by themselves
            self.ledger.add_cached(node.root, group.gpu, len(src) if target == GPU else -len(src))
            if target == GPU and len(src):
                self.windows.leave_over(node, group, node.start, node.end - 1)
        if len(src) == len(old):
            return dst.copy()  # the planned copy keeps its own: ids change when the pool is defragmented
        moved = np.full(len(old), -1, np.int32)
        moved[present] = dst
        return moved


def importance(node: Node) -> int:
    """The priority of a leaf, or of what lies below it on lower tiers if that is higher: it would be lost too."""
    return node.priority if node.children is None else max(part.priority for part in node.subtree())
