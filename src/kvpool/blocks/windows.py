"""Blocks of windowed groups in the tree: who reads them, and in which order the unread ones go.

A sequence reads such a block while its window covers it, so readers are counted per block, not along paths. A block that
nobody reads any more stays cached until its pool needs it: it stands in `leftovers`, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvpool.blocks.announcing import AnnouncedTree
from kvpool.blocks.arrays import Int32Array
from kvpool.blocks.node import Node, Root
from kvpool.blocks.pool import GPU, BlockPool
from kvpool.stats import EvictionReason


class Leftover(NamedTuple):
    """Blocks `first..last` (depths) of one windowed group on the path to `node`, unread since `tick`."""

    tick: int
    node: Node
    first: int
    last: int


class WindowedTree(AnnouncedTree):
    """The tree plus the readers of windowed blocks."""

    leftovers: list[deque[Leftover]]  # per group
    pinned_windowed: list[dict[int, int]]  # per pool: how many pins keep a block

    def leave_window(self, node: Node, group: int, first: int, last: int, ids: Int32Array) -> None:
        """A sequence on the path to `node` stops reading published blocks `first..last` of a windowed group."""
        pool = self.pool(group, GPU)
        held = ids[ids >= 0]
        left = pool.refs[held] - 1
        pool.refs[held] = left
        idle = int((left == 0).sum())
        if idle:
            self.add_cached(node.root, pool, idle)
            if self.pinned_windowed[pool.index]:
                pinned = self.pinned_windowed[pool.index]
                self.add_pinned(node.root, pool, sum(int(i) in pinned for i in held[left == 0].tolist()))
            self.leave_over(group, Leftover(self.tick, node, first, last))

    def enter_window(self, root: Root, group: int, ids: Int32Array) -> None:
        """A sequence starts reading published blocks of a windowed group."""
        pool = self.pool(group, GPU)
        held = ids[ids >= 0]
        before = pool.refs[held]
        pool.refs[held] = before + 1
        idle = held[before == 0]
        if len(idle):
            self.add_cached(root, pool, -len(idle))
            if self.pinned_windowed[pool.index]:
                pinned = self.pinned_windowed[pool.index]
                self.add_pinned(root, pool, -sum(int(i) in pinned for i in idle.tolist()))

    def leave_over(self, group: int, leftover: Leftover) -> None:
        """Notes unread blocks of a windowed group as the youngest candidates for eviction."""
        queue = self.leftovers[group]
        queue.append(leftover)
        if len(queue) > 2 * self.pool(group, GPU).num_blocks + 64:
            self._forget_stale(group)

    def _forget_stale(self, group: int) -> None:
        """Keeps the youngest leftover of each unread block and drops the rest."""
        seen: set[int] = set()
        kept: list[Leftover] = []
        for leftover in reversed(self.leftovers[group]):
            blocks = {block for _, _, block in self._unread(group, leftover)}
            if not blocks <= seen:
                kept.append(leftover)
                seen |= blocks
        self.leftovers[group] = deque(reversed(kept))

    def unpin_windowed(self, root: Root, group: int, block: int) -> None:
        """One pin less on a block of a windowed group."""
        pool = self.pool(group, GPU)
        pinned = self.pinned_windowed[pool.index]
        pinned[block] -= 1
        if not pinned[block]:
            del pinned[block]
            if not pool.refs[block]:
                self.add_pinned(root, pool, -1)

    def oldest_leftover(self, pool: BlockPool, groups: set[int]) -> tuple[int, Leftover] | None:
        """Which of these windowed groups in this pool has the oldest leftover, with that leftover."""
        best: tuple[int, Leftover] | None = None
        for group in sorted(groups):
            queue = self.leftovers[group]
            if self.groups[group].pool == pool.index and queue and (best is None or queue[0].tick < best[1].tick):
                best = (group, queue[0])
        return best

    def _unread(self, group: int, leftover: Leftover) -> Iterator[tuple[Node, int, int]]:
        """(node, depth, block) of what a leftover still has on the GPU and nobody reads, deepest first."""
        refs = self.pool(group, GPU).refs
        _, node, first, depth = leftover
        while depth >= first:
            while node is not node.root and (node.start > depth or (node.detached and not node.num_blocks)):
                node = node.parent
            if node is node.root:
                return
            self.sync(node)
            if node.tier != GPU:  # it moved down with its blocks; what stands above it may still be here
                depth = node.start
            elif depth >= node.end:
                depth = node.end
            else:
                block = int(node.ids[group][depth - node.start])
                if block >= 0 and not refs[block]:
                    yield node, depth, block
            depth -= 1

    def evict_leftover(self, group: int, num_blocks: int, tenant: str | None, reason: EvictionReason) -> int:
        """Frees at most `num_blocks` unread blocks of a windowed group, oldest first; returns how many."""
        queue = self.leftovers[group]
        index = self.groups[group].pool
        pinned = self.pinned_windowed[index]
        kept: list[Leftover] = []
        freed = 0
        while queue and freed < num_blocks:
            leftover = queue.popleft()
            quota = leftover.node.root.quota
            for node, depth, block in self._unread(group, leftover):
                guarded = (
                    quota is not None and quota.tenant != tenant and quota.cached[index] <= quota.guaranteed[index]
                )
                if freed == num_blocks or guarded or block in pinned:
                    kept.append(leftover)
                    if freed == num_blocks:
                        break
                else:
                    self.remove_windowed(node, group, depth, block, reason)
                    freed += 1
        queue.extendleft(reversed(list(dict.fromkeys(kept))))
        return freed

    def remove_windowed(self, node: Node, group: int, depth: int, block: int, reason: EvictionReason) -> None:
        """One block of a windowed group leaves the index; the rest of its run stays."""
        if self.events.listening and node.digests:
            digest = node.digests[depth - node.start : depth - node.start + 1]
            self.events.removed(digest, tier=node.tier, group=group, reason=reason.value)
        self.counters.evictions[reason.value] += 1
        # For an open node the ids are a view of its row's table, so this clears the table entry as well.
        if node.open_row < 0:
            node.ids[group] = node.ids[group].copy()
        node.ids[group][depth - node.start] = -1
        self.free_windowed(node, group, np.array([block], np.int32))
