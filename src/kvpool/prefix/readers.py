"""Who reads cached blocks: along paths of the tree for full attention, block by block for windows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.pools.groups import Group
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.announcer import Announcer
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import Node, Root, path_ids
from kvpool.prefix.orders import Expiry, IdleLedger
from kvpool.prefix.tree import RunTree
from kvpool.stats import EvictionReason


class PathReaders:
    """Counts the readers and the pins of runs; what nobody reads becomes cached, or free if it is detached.

    A sequence holds a path by its deepest node. `hold` and `release` walk up only while a node changes between idle and
    active. Idle leaves are offered to the eviction policy, and taken back when they are used again.
    """

    def __init__(
        self, context: CacheContext, tree: RunTree, ledger: IdleLedger, expiry: Expiry, windows: WindowReaders
    ) -> None:
        self.context = context
        self.tree = tree
        self.ledger = ledger
        self.expiry = expiry
        self.windows = windows
        self.pinned_blocks = 0  # positions on pinned paths

    def hold(self, node: Node) -> None:
        """One more sequence (or one more active child) reads this node."""
        while True:
            node.active += 1
            if node.active > 1 or node is node.root:
                return
            if node.pins:
                self.ledger.count_pinned_run(node, -1)
            elif not node.same_tier_children:
                node.root.policies[node.tier].remove(node)
            self.ledger.count_run(node, -1)
            node = node.parent

    def release(self, node: Node, used: bool = True) -> None:
        """A sequence lets go of its deepest node; nodes that nobody reads any more become cached, or free if detached.

        Unless it only held them (`used` is False), this was their last use.
        """
        context = self.context
        waiting = context.host_copies.waiting if used else None
        while True:
            node.active -= 1
            if node.active:
                return
            if node is node.root:
                if node.children is None:
                    self.tree.forget_root(node.root)
                return
            parent = node.parent
            if used:
                node.last_access = context.tick
                node.last_access_at = context.now
            if node.detached:
                self._free_detached(node)
            else:
                self.ledger.count_run(node, 1)
                if waiting is not None:
                    waiting.append(node)
                if node.ttl is not None:
                    node.expires_at = context.now + node.ttl
                    self.expiry.watch(node)
                if node.pins:
                    self.ledger.count_pinned_run(node, 1)
                elif not node.same_tier_children:
                    node.root.policies[node.tier].add(node)
            node = parent

    def _free_detached(self, node: Node) -> None:
        """Frees the blocks of a detached node that lost its last reader."""
        for group in self.context.full:
            group.on(node.tier).give(node.ids[group.index])
        for group in self.context.windowed:
            self.windows.free(node, group, node.ids[group.index])
        node.num_blocks = 0

    def offer(self, node: Node) -> None:
        """Gives a node to the eviction policy if it is a candidate now."""
        if node.is_candidate():
            if node.expires_at <= self.context.now:
                self.expiry.watch(node)
            node.root.policies[node.tier].add(node)

    def pin(self, node: Node) -> None:
        """Protects a path from eviction; counts like `hold`."""
        while node is not node.root:
            node.pins += 1
            if node.pins > 1:
                return
            self.pinned_blocks += node.num_blocks
            if not node.active:
                if not node.same_tier_children:
                    node.root.policies[node.tier].remove(node)
                self.ledger.count_pinned_run(node, 1)
            node = node.parent

    def unpin(self, node: Node) -> None:
        """One pin less on a path."""
        while node is not node.root:
            node.pins -= 1
            if node.pins:
                return
            self.pinned_blocks -= node.num_blocks
            if not node.active:
                self.ledger.count_pinned_run(node, -1)
                self.offer(node)
            node = node.parent


class Leftover(NamedTuple):
    """Blocks `first..last` (depths) of one windowed group on the path to `node`, unread since `tick`."""

    tick: int
    node: Node
    first: int
    last: int


class Pin:
    """A pinned prefix; give it to `unpin`. It is void once its prefix was invalidated."""

    __slots__ = ("expires_at", "node", "num_tokens", "pin_id", "windowed")

    def __init__(self, pin_id: int, num_tokens: int, expires_at: float, node: Node) -> None:
        self.pin_id = pin_id
        self.num_tokens = num_tokens
        self.expires_at = expires_at
        self.node = node
        self.windowed: list[
            tuple[Group, int]
        ] = []  # (group, depth) of blocks kept one by one; below the GPU their run is

    def __repr__(self) -> str:
        return f"Pin(pin_id={self.pin_id}, num_tokens={self.num_tokens})"


class WindowReaders:
    """The readers of windowed blocks, and the blocks that lost their last one.

    A sequence reads such a block while its window covers it, so readers are counted per block, not along paths. A block that
    nobody reads any more stays cached until its pool needs it: it stands in `leftovers`, oldest first.

    A prefix is found again at its end or where others branched off, and there the last window must be whole. So of the unread
    blocks those in the last window of such an end (and the sinks) are kept with their run: without them its full-attention
    blocks are worth nothing. They leave and move with the run; they go alone (`lasting`) only when no run can give way.
    """

    def __init__(self, context: CacheContext, ledger: IdleLedger, announcer: Announcer) -> None:
        self.context = context
        self.windowed = context.windowed
        self.ledger = ledger
        self.announcer = announcer
        self.pins: dict[int, Pin] = {}  # by number, those that hold
        self.leftovers: list[deque[Leftover]] = [deque() for _ in context.groups]
        # Leftovers that held blocks which the end of a run needs, when they were looked at.
        self.lasting: list[deque[Leftover]] = [deque() for _ in context.groups]
        self.pinned: list[dict[int, int]] = [{} for _ in context.pools]  # per pool: how many pins keep a block

    # --- readers -----------------------------------------------------------------------------------------------------

    def block_of(self, node: Node, group: Group, depth: int) -> tuple[Node, int]:
        """The run above `node` that holds the block of a group at `depth`, and its id."""
        while node.start > depth:
            node = node.parent
        self.context.sync(node)
        return node, int(node.ids[group.index][depth - node.start])

    def keep_pinned(self, node: Node) -> None:
        """A pinned run came to the GPU, where its windowed blocks are kept one by one."""
        for pin in self.pins.values():
            kept = []
            for group, depth in pin.windowed:
                at, block = self.block_of(pin.node, group, depth)
                if at is not node or block >= 0:
                    kept.append((group, depth))
                if at is node and block >= 0:
                    self.pin(node.root, group, block)
            pin.windowed = kept

    def enter(self, root: Root, group: Group, ids: Int32Array) -> None:
        """A sequence starts reading published blocks of a windowed group."""
        pool = group.gpu
        held = ids[ids >= 0]
        before = pool.refs[held]
        pool.refs[held] = before + 1
        idle = held[before == 0]
        if len(idle):
            self.ledger.add_cached(root, pool, -len(idle))
            if self.pinned[pool.index]:
                pinned = self.pinned[pool.index]
                self.ledger.add_pinned(root, pool, -sum(int(i) in pinned for i in idle.tolist()))

    def leave(self, node: Node, group: Group, first: int, last: int, ids: Int32Array) -> None:
        """A sequence on the path to `node` stops reading published blocks `first..last` of a windowed group."""
        pool = group.gpu
        held = ids[ids >= 0]
        left = pool.refs[held] - 1
        pool.refs[held] = left
        idle = int((left == 0).sum())
        if idle:
            self.ledger.add_cached(node.root, pool, idle)
            if self.pinned[pool.index]:
                pinned = self.pinned[pool.index]
                self.ledger.add_pinned(node.root, pool, sum(int(i) in pinned for i in held[left == 0].tolist()))
            self.leave_over(node, group, first, last)

    def idle_blocks(self, node: Node, group: Group) -> tuple[int, int]:
        """How many blocks of a group in a synced run nobody reads, and how many of those are pinned."""
        ids = node.ids[group.index]
        if not group.slides or node.tier != GPU:
            idle = 0 if node.active else int((ids >= 0).sum())
            return idle, idle if node.pins else 0
        held = ids[ids >= 0]
        unread, pinned = held[group.gpu.refs[held] == 0], self.pinned[group.pool]
        return len(unread), sum(block in pinned for block in unread.tolist()) if pinned else 0

    def pin(self, root: Root, group: Group, block: int) -> None:
        """One pin more on a block of a windowed group."""
        pool = group.gpu
        pinned = self.pinned[pool.index]
        pinned[block] = pinned.get(block, 0) + 1
        if pinned[block] == 1 and not pool.refs[block]:
            self.ledger.add_pinned(root, pool, 1)

    def unpin(self, root: Root, group: Group, block: int) -> None:
        """One pin less on a block of a windowed group."""
        pool = group.gpu
        pinned = self.pinned[pool.index]
        pinned[block] -= 1
        if not pinned[block]:
            del pinned[block]
            if not pool.refs[block]:
                self.ledger.add_pinned(root, pool, -1)

    # --- leftovers ---------------------------------------------------------------------------------------------------

    def leave_over(self, node: Node, group: Group, first: int, last: int) -> None:
        """Notes unread blocks of a windowed group as the youngest candidates for eviction."""
        self._enqueue(self.leftovers, group, Leftover(self.context.tick, node, first, last))

    def _enqueue(self, queues: list[deque[Leftover]], group: Group, leftover: Leftover) -> None:
        queue = queues[group.index]
        queue.append(leftover)
        if len(queue) > 2 * group.gpu.num_blocks + 64:
            queues[group.index] = self._without_stale(group, queue)

    def _without_stale(self, group: Group, queue: deque[Leftover]) -> deque[Leftover]:
        """Keeps the youngest leftover of each unread block and drops the rest."""
        seen: set[int] = set()
        kept: list[Leftover] = []
        for leftover in reversed(queue):
            blocks = {block for _, _, block in self._unread(group, leftover)}
            if not blocks <= seen:
                kept.append(leftover)
                seen |= blocks
        return deque(reversed(kept))

    def _unread(self, group: Group, leftover: Leftover) -> Iterator[tuple[Node, int, int]]:
        """(node, depth, block) of what a leftover still has on the GPU and nobody reads, deepest first."""
        refs = group.gpu.refs
        _, node, first, depth = leftover
        while depth >= first:
            while node is not node.root and (node.start > depth or (node.detached and not node.num_blocks)):
                node = node.parent
            if node is node.root:
                return
            self.context.sync(node)
            if node.tier != GPU:  # it moved down with its blocks; what stands above it may still be here
                depth = node.start
            elif depth >= node.end:
                depth = node.end
            else:
                block = int(node.ids[group.index][depth - node.start])
                if block >= 0 and not refs[block]:
                    yield node, depth, block
            depth -= 1

    # --- ends of runs ------------------------------------------------------------------------------------------------

    def _needed_from(self, node: Node, group: Group) -> int:
        """The depth from which a group's blocks in this run must stay: a request that finds the next end of a run reads them.

        The next end is that of this run if prompts part there or nothing follows; else it is where its only successor ends.
        """
        if group.keeps_state:
            return self._last_checkpoint(node, group)
        size = self.context.block_size
        last = node
        while last.children is not None and len(last.children) == 1 and not last.num_remainders:
            (last,) = last.children.values()
            if group.first_read(last.start * size) >= node.end:
                return node.end
        self.context.sync(last)
        return group.first_read(last.start * size + len(last.tokens))

    def _last_checkpoint(self, node: Node, group: Group) -> int:
        """The depth of the checkpoint in this run that must stay; its end if there is none, or if requests find a later one.

        It is the last one before the next end of a run. A prompt that fills its blocks ends there, and left one more, a block
        earlier: it computes its last token when it comes again, so it needs that one, which serves longer prompts too.
        """
        last, kept = node, self._checkpoints(node, group)
        while last.children is not None and len(last.children) == 1 and not last.num_remainders:
            (last,) = last.children.values()
            kept += self._checkpoints(last, group)
        if not kept:
            return node.end
        earlier = last.end - 2
        return min(earlier if last.children is None and earlier in kept else kept[-1], node.end)

    def _checkpoints(self, node: Node, group: Group) -> list[int]:
        """The depths of the checkpoints in a run."""
        self.context.sync(node)
        depths: list[int] = (node.start + np.flatnonzero(node.ids[group.index] >= 0)).tolist()
        return depths

    def needed(self, node: Node, group: Group, first: int = 0) -> BoolArray:
        """Which blocks of a run, from its block `first` on, a group has and the end of a run needs."""
        depths = np.arange(node.start + first, node.end)
        if group.keeps_state:  # few are kept, and each was chosen
            kept: BoolArray = (node.ids[group.index][first:] >= 0) & (depths <= self._last_checkpoint(node, group))
            return kept
        wanted: BoolArray = (depths >= self._needed_from(node, group)) | (depths < group.sinks)
        return wanted & (node.ids[group.index][first:] >= 0)

    def is_usable(self, node: Node, first: int, end: int) -> bool:
        """Whether a prompt can still end in blocks `first..end` of this run; at its end also in a lower tier's run below."""
        whole = end == node.num_blocks
        if whole and node.children is not None:
            return True
        path, size = node.path(), self.context.block_size
        length = node.start * size + (len(node.tokens) if whole else end * size)
        for group in self.windowed:
            present = path_ids(path, node.start + end, group.index) >= 0
            length = min(length, group.longest_valid(present, length))
        return length > (node.start + first) * size

    # --- leaving -----------------------------------------------------------------------------------------------------

    def evict_leftovers(
        self, pool: BlockPool, num_blocks: int, until: float, tenant: str | None, reason: EvictionReason
    ) -> int:
        """Frees at most `num_blocks` unread blocks, left until the tick `until`, that no end of a run needs."""
        freed = 0
        waiting = [g for g in self.windowed if g.pool == pool.index and self.leftovers[g.index]]
        for group in sorted(waiting, key=lambda g: self.leftovers[g.index][0].tick):
            # A checkpoint inside a run is worth less than any run
            oldest = math.inf if group.keeps_state else until
            freed += self._evict_queue(self.leftovers[group.index], group, num_blocks - freed, oldest, tenant, reason)
        return freed

    def evict_last_resort(self, pool: BlockPool, num_blocks: int, tenant: str | None, reason: EvictionReason) -> int:
        """Frees at most `num_blocks` unread blocks that ends of runs do need: they are all that is left."""
        freed = 0
        for group in self.windowed:
            if group.pool == pool.index:
                queue = self.lasting[group.index]
                freed += self._evict_queue(queue, group, num_blocks - freed, math.inf, tenant, reason, whole=True)
        return freed

    def _evict_queue(
        self,
        queue: deque[Leftover],
        group: Group,
        num_blocks: int,
        until: float,
        tenant: str | None,
        reason: EvictionReason,
        whole: bool = False,
    ) -> int:
        """Frees unread blocks, oldest first; those that the end of a run needs move to `lasting` unless `whole`."""
        index, sinks = group.pool, group.sinks
        pinned = self.pinned[index]
        kept: list[Leftover] = []
        freed = 0
        while queue and freed < num_blocks and queue[0].tick <= until:
            leftover = queue.popleft()
            quota = leftover.node.root.quota
            run: Node | None = None
            first_needed, lasts = 0, False
            for node, depth, block in self._unread(group, leftover):
                if node is not run and not whole:
                    run, first_needed = node, self._needed_from(node, group)
                guarded = (
                    quota is not None and quota.tenant != tenant and quota.cached[index] <= quota.guaranteed[index]
                )
                if freed == num_blocks or guarded or block in pinned:
                    kept.append(leftover)
                    if freed == num_blocks:
                        break
                elif not whole and (
                    depth == first_needed if group.keeps_state else depth >= first_needed or depth < sinks
                ):
                    lasts = True
                else:
                    self.remove_block(node, group, depth - node.start, reason)
                    freed += 1
            if lasts:
                self._enqueue(self.lasting, group, leftover)
        queue.extendleft(reversed(list(dict.fromkeys(kept))))
        return freed

    def remove_block(self, node: Node, group: Group, index: int, reason: EvictionReason) -> None:
        """The block at `index` of a run leaves a windowed group; the rest of the run stays."""
        if self.context.events.listening and node.digests:
            self.announcer.removed_block(node, group, index, reason)
        self.context.counters.evictions[reason.value] += 1
        if node.host_copy is not None:
            self.context.host_copies.drop_block(node, group, index)
        gone = node.ids[group.index][index : index + 1].copy()
        # For an open node the ids are a view of its row's table, so this clears the table entry as well.
        if node.open_row < 0:
            node.set_ids(group.index, node.ids[group.index].copy())
        node.ids[group.index][index] = -1
        self.free(node, group, gone)

    def free(self, node: Node, group: Group, ids: Int32Array) -> None:
        """Frees published, unread blocks (-1: none) of a run; pinned ones only below the GPU, where their run is pinned."""
        held = ids[ids >= 0]
        pool = group.on(node.tier)
        pool.give(held)
        self.ledger.add_cached(node.root, pool, -len(held))
        if node.pins and node.tier != GPU:
            self.ledger.add_pinned(node.root, pool, -len(held))
