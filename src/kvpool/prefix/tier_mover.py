"""Runs change their tier: down instead of being dropped, up when somebody reads them, or taken over where computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from kvpool.config import Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.pools.groups import Group
from kvpool.pools.pool import GPU, HOST, BlockPool, CopyKind, CopyOp
from kvpool.prefix.announcer import Announcer
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import Node
from kvpool.prefix.orders import IdleLedger
from kvpool.prefix.readers import PathReaders, WindowReaders
from kvpool.prefix.tree import RunTree
from kvpool.stats import EvictionReason

Along: TypeAlias = list[tuple[Group, BoolArray]]  # which windowed blocks of a run go along with it


class TierMover:
    """Gives runs blocks on another tier and plans the copies.

    `make_room(pool, num_blocks, run)` frees blocks of a lower tier for a run, none of more important ones, and no host
    copies; `available(pool)` says how many are free or could become free.
    """

    def __init__(
        self,
        context: CacheContext,
        tree: RunTree,
        ledger: IdleLedger,
        windows: WindowReaders,
        readers: PathReaders,
        announcer: Announcer,
        available: Callable[[BlockPool], int],
        make_room: Callable[[BlockPool, int, Node], None],
    ) -> None:
        self.context = context
        self.tree = tree
        self.ledger = ledger
        self.windows = windows
        self.readers = readers
        self.announcer = announcer
        self.available = available
        self.make_room = make_room
        self.find_lower_tiers()

    def find_lower_tiers(self) -> None:
        """Where evicted runs go from each tier: the next one that has blocks in every pool. Call again after a resize."""
        num_tiers, pools = self.context.num_tiers, self.context.pools
        usable = [tier for tier in range(num_tiers) if all(tiers[tier].num_blocks for tiers in pools)]
        self.lower_tier: list[Tier | None] = [
            next((Tier(below) for below in usable if below > tier), None) for tier in range(num_tiers)
        ]

    # --- down --------------------------------------------------------------------------------------------------------

    def num_fitting(self, node: Node, evicting: bool) -> int:
        """How many positions of a run the tier below it has room for, or could make room for by `evicting`."""
        below = self.lower_tier[node.tier]
        assert below is not None
        if node.host_copy is not None and below == HOST:
            return node.num_blocks
        fitting = MAX_BLOCKS
        for index, per_position in self.context.full_per_pool:
            pool = self.context.pools[index][below]
            room = self.available(pool) if evicting else pool.num_free
            fitting = min(fitting, room // per_position)
        return fitting

    def demote(self, node: Node, num_blocks: int) -> Node | None:
        """Moves the last `num_blocks` of an idle leaf one tier down and returns the run that they are; None without room.

        Of windowed groups only what the end of a run needs goes along. Runs of a higher priority do not give way; others
        may have done so when it turns out that the room is not enough: ask `num_fitting` again, and move what fits.
        """
        target = self.lower_tier[node.tier]
        if target is None or (
            node.children is not None and any(below.tier < target for below in node.children.values())
        ):
            return None  # runs without blocks stay on a tier that was resized to nothing; none lies below a lower one
        context = self.context
        keep = node.num_blocks - num_blocks
        # Asked before runs below it give way.
        along = [(group, self.windows.needed(node, group, keep)) for group in context.windowed]
        host_copy = context.host_copies.take(node) if node.host_copy is not None else None  # nobody else is to have it
        there = None if host_copy is None or target != HOST else [ids[keep:] for ids in host_copy]
        if not self._make_room_below(target, self._needs(num_blocks, along, there), node):
            if host_copy is not None:
                context.host_copies.keep(node, host_copy)
            return None
        if host_copy is not None:
            context.host_copies.keep(node, host_copy)
        policy, moving = node.root.policies[node.tier], node
        if keep:
            moving = self.tree.cut_off(node, keep)
        else:
            policy.evicted(node)
        for group, wanted in along:
            for index in np.flatnonzero((moving.ids[group.index] >= 0) & ~wanted).tolist():
                self.windows.remove_block(moving, group, index, EvictionReason.CAPACITY)
        self._move(moving, target, CopyKind.OFFLOAD)
        if keep:
            policy.trimmed(node)
        else:
            self.readers.offer(node.parent)
        context.counters.offloaded_blocks += num_blocks
        return moving

    def _needs(self, num_blocks: int, along: Along, there: list[Int32Array] | None) -> list[int]:
        """Blocks per pool of a lower tier for so many positions and what goes along of windows, less those `there`."""
        needs = [0] * len(self.context.pools)
        if there is None:
            for group in self.context.full:
                needs[group.pool] += num_blocks
        for group, wanted in along:
            missing = wanted if there is None else wanted & (there[group.index] < 0)
            needs[group.pool] += int(missing.sum())
        return needs

    def _make_room_below(self, target: Tier, needs: list[int], node: Node, for_host_copy: bool = False) -> bool:
        """Frees blocks of a lower tier for a run; False if only more important runs could give way.

        Host copies give way when no run can, and not to a host copy: without them, somebody would wait for a copy soon.
        """
        pools, host_copies = [tiers[target] for tiers in self.context.pools], self.context.host_copies
        for pool, need in zip(pools, needs, strict=True):
            spared = host_copies.num_blocks[pool.index] if for_host_copy else 0
            if self.available(pool) - spared < need:
                return False
        for pool, need in zip(pools, needs, strict=True):
            if pool.num_free < need:
                self.make_room(pool, need, node)
            if pool.num_free < need and target == HOST and not for_host_copy:
                host_copies.give_way(pool, need, node)
            if pool.num_free < need:
                return False
        return True

    # --- ahead of eviction -------------------------------------------------------------------------------------------

    def copy_ahead(self, least_priority: int) -> None:
        """Copies runs to the host whose last reader left in the present operation."""
        host_copies = self.context.host_copies
        waiting, host_copies.waiting = host_copies.waiting, []
        if self.lower_tier[GPU] != HOST:
            return
        for node in reversed(waiting or ()):  # parents before their children, as they would be matched
            stays = node.tier == GPU and not node.detached and node.host_copy is None
            if stays and node.priority >= least_priority:
                self._copy_to_host(node)

    def _copy_to_host(self, node: Node) -> None:
        """Gives a run a host copy, if there is room for it and it could be matched below the GPU."""
        context = self.context
        if context.windowed and not self.windows.is_usable(node, 0, node.num_blocks):
            return
        along = [(group, self.windows.needed(node, group)) for group in context.windowed]
        needs = self._needs(node.num_blocks, along, None)
        if not self._make_room_below(HOST, needs, node, for_host_copy=True):
            return
        wanted = {group.index: of_group for group, of_group in along}
        ids = []
        for group in context.cached:
            old = node.ids[group.index]
            chosen = wanted[group.index] if group.slides else old >= 0
            src = old[chosen]
            of_group = np.full(len(old), -1, np.int32)
            of_group[chosen] = dst = group.on(HOST).take(len(src))
            ids.append(of_group)
            if len(src):
                context.copies.append(CopyOp(CopyKind.OFFLOAD, group.index, GPU, HOST, src, dst))
        context.host_copies.keep(node, ids)
        context.counters.blocks_copied_ahead += node.num_blocks

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
            node.root.policies[source].remove(node)
            node.entry = None  # the policy of the new tier starts afresh
        self._count(node, -1)
        old, host_copy = node.ids, None
        if node.host_copy is not None:
            if target != HOST:
                context.host_copies.drop(node)
            host_copy = context.host_copies.take(node)
        if ready is None:
            node.ids = tuple([self._move_ids(node, group, target, kind, host_copy) for group in context.cached])
        if context.events.listening and node.digests:
            self.announcer.moved(node, source, target)
        if ready is not None:
            node.ids = tuple(ready)
        if source == HOST and target == GPU and context.host_copies.waiting is not None:
            context.host_copies.keep(node, [ids.copy() for ids in old])  # evicted again it need not be copied
        else:
            for group in context.cached:
                ids = old[group.index]
                group.tiers[source].give(ids[ids >= 0] if group.slides else ids)
        self._change_tier(node, target)
        self._count(node, 1)
        if node.pins and target == GPU:
            self.windows.keep_pinned(node)
        self.readers.offer(node)

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

    def _move_ids(
        self, node: Node, group: Group, target: Tier, kind: CopyKind, host_copy: list[Int32Array] | None
    ) -> Int32Array:
        """Blocks of a group on another tier for all that a run has of it: its host copy, and new ones for the rest."""
        source = node.tier
        old = node.ids[group.index]
        present = old >= 0
        missing = present if host_copy is None else present & (host_copy[group.index] < 0)
        src = old if missing.all() else old[missing]
        dst = group.tiers[target].take(len(src))
        if len(src) == len(old):
            moved = dst.copy()  # the planned copy keeps its own: ids change when the pool is defragmented
        else:
            moved = np.full(len(old), -1, np.int32) if host_copy is None else host_copy[group.index].copy()
            moved[missing] = dst
        if len(src):
            self.context.copies.append(CopyOp(kind, group.index, source, target, src, dst))
        if group.slides and GPU in (source, target):  # where windowed blocks count by themselves
            num_moved = int(present.sum())
            self.ledger.add_cached(node.root, group.gpu, num_moved if target == GPU else -num_moved)
            if target == GPU and num_moved:
                self.windows.leave_over(node, group, node.start, node.end - 1)
        return moved
