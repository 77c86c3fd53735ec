"""The prefix cache: cached content and its parts, and the eviction that all of them take part in.

Eviction takes blocks from the tail of idle leaves in the order of the policy, so a parent never leaves before its cached
children. With a lower tier below, evicted runs move there; without one, or when that is full too, they are dropped.
Blocks of windowed groups that no window covers any more stay cached until their pool needs them: they stand in
`leftovers`, oldest first, and compete with the policy's victim by age, unless the end of a run needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvpool.eviction import EvictionPolicy
from kvpool.pools.pool import GPU, HOST, BlockPool
from kvpool.prefix.announcer import Announcer
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import Node, Root
from kvpool.prefix.orders import EvictionOrders, Expiry, IdleLedger, Quota
from kvpool.prefix.readers import PathReaders, WindowReaders
from kvpool.prefix.tier_mover import TierMover
from kvpool.prefix.tree import RunTree, StoredLogits, trim_logits
from kvpool.stats import EvictionReason

CAPACITY: Final = EvictionReason.CAPACITY  # a global is several times cheaper than a member of an enum


class PrefixCache:
    """Owns the parts, decides what leaves when room is needed, and takes it out of the index.

    `tree` finds and cuts runs, `readers` counts who holds paths, `windows` who reads windowed blocks, `ledger` what is idle,
    `orders` knows who goes first, `expiry` when somebody must, `mover` changes tiers, `logits` keeps what was computed behind
    whole prompts, `announcer` tells subscribers. No part knows the cache: what it needs of it is given to it as a function.
    """

    def __init__(
        self,
        context: CacheContext,
        new_policy: Callable[[], EvictionPolicy],
        offload_on_evict: bool,
        offload_min_priority: int,
        host_write: str = "back",
        depth_cost: float | None = None,
    ) -> None:
        self.context = context
        self.offload_on_evict = offload_on_evict
        self.offload_min_priority = offload_min_priority
        if host_write != "back":
            context.host_copies.waiting = []
        usable = [tier for tier in range(context.num_tiers) if all(tiers[tier].num_blocks for tiers in context.pools)]
        last = max(usable, default=0) if offload_on_evict else 0
        self.orders = EvictionOrders(new_policy, context.num_tiers, context.failures, depth_cost, last)
        self.ledger = IdleLedger(context)
        self.announcer = Announcer(context)
        self.expiry = Expiry(context, self.announcer, self._drop_expired)
        self.tree = RunTree(context, self.orders.new_root, self.expiry.watch)
        self.logits = StoredLogits(context)
        self.windows = WindowReaders(context, self.ledger, self.announcer)
        self.readers = PathReaders(context, self.tree, self.ledger, self.expiry, self.windows)
        self.mover = TierMover(
            context,
            self.tree,
            self.ledger,
            self.windows,
            self.readers,
            self.announcer,
            self._available_below,
            self._make_room_below,
        )
        self._spared: Node | None = None  # what `evict` must hold before it could leave
        pools = range(len(context.pools))
        self.blocks_per_position = [max(1, sum(group.pool == i for group in context.cached)) for i in pools]
        self.has_full = [any(group.pool == i for group in context.full) for i in pools]

    # --- what the parts ask for --------------------------------------------------------------------------------------

    def _drop_expired(self, node: Node) -> None:
        self.drop_tail(node, node.num_blocks, EvictionReason.EXPIRED)

    def _available_below(self, pool: BlockPool) -> int:
        return self.orders.available(pool, None)

    def _make_room_below(self, pool: BlockPool, num_blocks: int, run: Node) -> None:
        self.evict(pool, num_blocks - pool.num_free, None, CAPACITY, run)

    # --- eviction ----------------------------------------------------------------------------------------------------

    def make_room(self, pool: BlockPool, num_blocks: int, tenant: str | None) -> None:
        """Evicts until `num_blocks` are free. The caller has checked that enough is evictable."""
        if pool.num_free < num_blocks:
            self.evict(pool, num_blocks - pool.num_free, tenant, CAPACITY)

    def evict(
        self,
        pool: BlockPool,
        num_blocks: int,
        tenant: str | None,
        reason: EvictionReason,
        for_run: Node | None = None,
    ) -> int:
        """Frees up to `num_blocks` of a pool; returns how many became free (one position may free several).

        Host copies go first. If it is `for_run`, which comes from above, no host copy goes, and a policy that goes by
        priority gives up no run that is more important.
        """
        before = pool.num_free
        goal = before + num_blocks
        if pool.tier == HOST and for_run is None:
            self.context.host_copies.give_way(pool, goal)
        has_leftovers = self.context.windowed and pool.tier == GPU
        while pool.num_free < goal:
            victim = self.orders.victim(pool, tenant)
            if victim is not None and victim is self._spared:
                self._hold_spared(victim)
                continue
            wanted = goal - pool.num_free
            if has_leftovers:
                until = math.inf if victim is None else victim.last_access
                if self.windows.evict_leftovers(pool, wanted, until, tenant, reason):
                    continue
                if victim is None and self.windows.evict_last_resort(pool, wanted, tenant, reason):
                    continue
            if victim is None:
                break
            if for_run is not None and victim.root.policies[pool.tier].by_priority and victim.outranks(for_run):
                break
            length = self._tail_for(victim, pool, wanted)
            if victim.root.quota is not None:
                length = self._above_guarantee(victim.root.quota, length, pool, tenant)
            self._evict_tail(victim, length, reason)
        return pool.num_free - before

    def spare(self, node: Node) -> None:
        """Evicts nothing of a run, and nothing above it, until `spare_no_more`.

        One on the GPU has a place in an order of eviction, or its children have. It keeps the place until it is its turn.
        """
        self._spared = node
        if node.tier != GPU:
            self._hold_spared(node)

    def _hold_spared(self, node: Node) -> None:
        self.readers.hold(node)
        self._spared = None

    def spare_no_more(self, node: Node) -> None:
        """Ends `spare`. That it was spared was no use of it."""
        if self._spared is None:
            self.readers.release(node, used=False)
        self._spared = None

    def _tail_for(self, node: Node, pool: BlockPool, num_blocks: int) -> int:
        """How many positions of a run hold its last `num_blocks` of a pool: all of them if it has fewer."""
        if self.has_full[pool.index]:
            length = -(-num_blocks // self.blocks_per_position[pool.index])
            return length if length < node.num_blocks else node.num_blocks
        held = np.zeros(node.num_blocks, np.int64)
        for group in self.context.windowed:
            if group.pool == pool.index:
                held += node.ids[group.index] >= 0
        from_tail = np.cumsum(held[::-1])
        return min(node.num_blocks, int(from_tail.searchsorted(num_blocks)) + 1)

    def _above_guarantee(self, quota: Quota, length: int, pool: BlockPool, tenant: str | None) -> int:
        """How many of `length` positions another tenant's run may lose before its owner has less than is guaranteed."""
        if quota.tenant == tenant or pool.tier != GPU:
            return length
        spare = (quota.cached[pool.index] - quota.guaranteed[pool.index]) // self.blocks_per_position[pool.index]
        return min(length, max(1, spare))

    def _evict_tail(self, node: Node, num_blocks: int, reason: EvictionReason) -> None:
        """The last blocks of an idle leaf move down if that is wanted and possible; else they leave the index."""
        if self.mover.lower_tier[node.tier] is not None and self._goes_down(node):
            num_blocks = self._move_down(node, num_blocks, reason)
        if num_blocks:
            self.drop_tail(node, num_blocks, reason, evicted=True)

    def _goes_down(self, node: Node) -> bool:
        """Whether a run should have a place below its tier when it is evicted."""
        least = self.offload_min_priority
        return self.offload_on_evict and any(part.priority >= least for part in node.subtree())

    def _move_down(self, node: Node, num_blocks: int, reason: EvictionReason) -> int:
        """Moves the last blocks of an idle leaf one tier down. If only a first part of them fits, it drops the rest.

        Returns how many blocks the caller must still drop: 0, or all that are left if no usable part fits.
        """
        keep = node.num_blocks - num_blocks
        # First try all of it. Then try what fits if less important runs below are evicted. Last try what fits as it is.
        for evicting in (None, True, False):
            part = num_blocks if evicting is None else min(num_blocks, self.mover.num_fitting(node, evicting))
            if not part or (self.context.windowed and not self.windows.is_usable(node, keep, keep + part)):
                break
            if part < num_blocks:
                self.drop_tail(node, num_blocks - part, reason, goes_on=True)
                num_blocks = part
            moved = self.mover.demote(node, part)
            if moved is not None:
                self.context.counters.evictions[reason.value] += self.context.num_present(moved, 0)
                return 0
        return num_blocks

    def copy_ahead(self) -> None:
        """Ends an operation: runs that nobody reads any more are copied to the host before they are evicted."""
        self.mover.copy_ahead(self.offload_min_priority)

    def enforce_quota(self, root: Root) -> None:
        """Evicts a tenant's own idle blocks while it is over its maximum."""
        quota = root.quota
        if quota is None:
            return
        for tiers in self.context.pools:
            pool = tiers[GPU]
            while quota.excess(pool.index) and len(quota.policies[GPU]):
                victim: Any = quota.policies[GPU].victim()
                self._evict_tail(victim, min(victim.num_blocks, quota.excess(pool.index)), EvictionReason.QUOTA)

    # --- leaving the index -------------------------------------------------------------------------------------------

    def drop_tail(
        self, node: Node, num_blocks: int, reason: EvictionReason, evicted: bool = False, goes_on: bool = False
    ) -> None:
        """Removes the last `num_blocks` of an idle leaf from the index and frees them; lower-tier children go with it.

        If it `goes_on`, more of the run leaves its tier at once: the policy is told then, of all of it.
        """
        if node.children is not None:
            for child in list(node.children.values()):
                self.drop_subtree(child, reason)
        context = self.context
        policy = node.root.policies[node.tier]
        keep = node.num_blocks - num_blocks
        if node.host_copy is not None:
            context.host_copies.trim(node, keep)
        if not keep and (evicted or node.is_candidate()):
            if evicted:
                policy.evicted(node)
            policy.remove(node)
        counters = context.counters
        counters.evictions[reason._value_] += context.num_present(node, keep)
        counters.lifetime.add(context.now - node.created_at, num_blocks)
        counters.idle_before_eviction.add(context.now - node.last_access_at, num_blocks)
        if node.digests and context.events.listening:
            self.announcer.removed(node, keep, node.num_blocks, reason)
        for group in context.full:
            group.tiers[node.tier].give(node.ids[group.index], keep)
        self.ledger.count_positions(node, -num_blocks)
        for group in context.windowed:
            self.windows.free(node, group, node.ids[group.index][keep:])
        node.num_blocks = keep
        if not keep:
            self._unlink(node)
            return
        rest = 2 * keep < keep + num_blocks  # a short rest must not keep the memory of a long run
        node.ids = tuple([ids[:keep].copy() if rest else ids[:keep] for ids in node.ids])
        tokens = node.tokens[: keep * self.context.block_size]
        node.tokens = tokens.copy() if rest else tokens
        node.lose_end()
        if node.digests is not None:
            del node.digests[keep:]
        trim_logits(node, self.context.block_size)
        if not goes_on:
            policy.trimmed(node)

    def _unlink(self, node: Node) -> None:
        """Takes a leaf out of the tree; its parent may become a leaf."""
        self.expiry.forget(node)
        self.tree.remove(node)
        parent = node.parent
        if parent is not parent.root and parent.tier == node.tier:
            self.readers.offer(parent)

    def drop_subtree(self, node: Node, reason: EvictionReason) -> None:
        """Drops an idle node with everything below it, deepest first."""
        for part in reversed(list(node.subtree())):
            self.drop_tail(part, part.num_blocks, reason)

    def drop_covered(self, parent: Node, key: bytes) -> None:
        """Drops the remainders below `parent` that hold nothing but a beginning of the block `key`, which is cached now."""
        for length in range(4, len(key), 4):
            covered = parent.children.get(key[:length]) if parent.children is not None else None
            if covered is not None and covered.is_candidate():
                self.drop_tail(covered, 1, EvictionReason.CONTINUED)

    def take_over(self, node: Node) -> list[int]:
        """The last block of an idle leaf on the GPU leaves the index and is a request's own; returns its id per group."""
        ids = [int(of_group[-1]) for of_group in node.ids]
        self.drop_tail(node, 1, EvictionReason.CONTINUED)
        for group, block in zip(self.context.cached, ids, strict=True):
            group.gpu.take(1)  # all of them lie on top of the free stack, in some order
            group.own(block)
        return ids

    def detach(self, node: Node, reason: EvictionReason) -> int:
        """Takes a subtree out of the index, also under live sequences: they keep their blocks and publish nothing more.

        Idle nodes are dropped; nodes that are read become detached and free their blocks with their last reader. The
        caller ended the pins on them. Returns how many blocks (positions) left the index.
        """
        context = self.context
        removed = 0
        parts = list(node.subtree())
        for part in reversed(parts):
            context.sync(part)
            removed += part.num_blocks
            if not part.active:
                if part.num_blocks:
                    self.drop_tail(part, part.num_blocks, reason)
                continue
            if context.events.listening and part.digests:
                self.announcer.removed(part, 0, part.num_blocks, reason)
            context.counters.evictions[reason.value] += context.num_present(part, 0)
            part.digests = part.logits = None
            context.host_copies.drop(part)
        for part in parts:
            if part.active and not part.detached:
                self._unlink(part)
        return removed
