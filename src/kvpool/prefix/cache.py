"""The prefix cache: what leaves the tree, when, and to which tier.

Eviction takes blocks from the tail of idle leaves in the order of the policy, so a parent never leaves before its cached
children. With a lower tier below, evicted runs move there; without one, or when that is full too, they are dropped.
Blocks of windowed groups that no window covers any more stay cached until their pool needs them: they stand in
`leftovers`, oldest first, and compete with the policy's victim by age, unless the end of a run needs them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from kvpool.config import LayerGroup, Tier
from kvpool.events import EventLog
from kvpool.eviction import EvictionPolicy
from kvpool.pools.arrays import Int32Array
from kvpool.pools.copies import CopyKind, CopyOp
from kvpool.pools.pool import GPU, BlockPool
from kvpool.pools.rows import SequenceRows
from kvpool.prefix.calendar import NEVER
from kvpool.prefix.node import DEFAULT_PRIORITY, MAX_PRIORITY, Node, Root
from kvpool.prefix.quota import Quota
from kvpool.prefix.windows import Leftover, WindowedTree
from kvpool.stats import Counters, EvictionReason

CAPACITY: Final = EvictionReason.CAPACITY  # a global is several times cheaper than a member of an enum


class PrefixCache(WindowedTree):
    """The tree plus eviction, tiers, expiry and removal."""

    def __init__(
        self,
        block_size: int,
        groups: tuple[LayerGroup, ...],
        pools: list[list[BlockPool]],
        rows: SequenceRows[Node, Any],
        new_policy: Callable[[], EvictionPolicy],
        counters: Counters,
        clock: Callable[[], float],
        events: EventLog,
        copies: list[CopyOp],
        offload_on_evict: bool,
        offload_min_priority: int,
    ) -> None:
        super().__init__(block_size, groups, pools, rows, new_policy, counters, clock, events)
        self.copies = copies
        self.offload_on_evict = offload_on_evict
        self.offload_min_priority = offload_min_priority
        self.leftovers = [deque() for _ in groups]
        self.lasting = [deque() for _ in groups]
        self.pinned_windowed = [{} for _ in pools]
        self.pinned_blocks = 0  # positions on pinned paths
        self.on_pinned_promoted: Callable[[Node], None] = lambda node: None  # told of a pinned run that came to the GPU
        cached_groups = groups[: self.num_cached_groups]
        self.blocks_per_position = [max(1, sum(g.pool == i for g in cached_groups)) for i in range(len(pools))]
        self.has_full = [any(groups[g].pool == i for g in self.full) for i in range(len(pools))]
        self.find_lower_tiers()

    # --- supply ------------------------------------------------------------------------------------------------------

    def evictable(self, pool: BlockPool, tenant: str | None) -> int:
        """How many cached blocks of a pool a request of `tenant` could have evicted."""
        supply = pool.num_cached - pool.num_pinned
        if self.quotas and pool.tier == GPU:
            for quota in self.quotas.values():
                if quota.tenant != tenant:
                    supply -= quota.protected(pool.index)
        return max(supply, 0)

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
        ceiling: int = MAX_PRIORITY,
    ) -> int:
        """Frees up to `num_blocks` of a pool; returns how many became free (one position may free several).

        A policy that goes by priority gives up no run above the priority `ceiling`.
        """
        before = pool.num_free
        goal = before + num_blocks
        has_leftovers = self.windowed and pool.tier == GPU
        while pool.num_free < goal:
            victim = self.victim(pool, tenant)
            wanted = goal - pool.num_free
            if has_leftovers:
                until = math.inf if victim is None else victim.last_access
                if self.evict_leftovers(pool, wanted, until, tenant, reason):
                    continue
                if victim is None and self.evict_lasting(pool, wanted, tenant, reason):
                    continue
            if victim is None or (victim.priority > ceiling and victim.root.policies[pool.tier].by_priority):
                break
            length = self._tail_for(victim, pool, wanted)
            if victim.root.quota is not None:
                length = self._above_guarantee(victim.root.quota, length, pool, tenant)
            self._evict_tail(victim, length, reason)
        return pool.num_free - before

    def _tail_for(self, node: Node, pool: BlockPool, num_blocks: int) -> int:
        """How many positions of a run hold its last `num_blocks` of a pool: all of them if it has fewer."""
        if self.has_full[pool.index]:
            return min(node.num_blocks, -(-num_blocks // self.blocks_per_position[pool.index]))
        held = np.zeros(node.num_blocks, np.int64)
        for group in self.windowed:
            if self.groups[group].pool == pool.index:
                held += node.ids[group] >= 0
        from_tail = np.cumsum(held[::-1])
        return min(node.num_blocks, int(from_tail.searchsorted(num_blocks)) + 1)

    def victim(self, pool: BlockPool, tenant: str | None) -> Node | None:
        """The next run to lose its tail: the stalest among the policy's choice and those of tenants over their guarantee."""
        try:
            best: Any = self.policies[pool.tier].victim()
        except LookupError:
            best = None
        if not self.quotas:
            return best  # type: ignore[no-any-return]
        for quota in self.quotas.values():
            candidates = quota.policies[pool.tier]
            if not len(candidates):
                continue
            if pool.tier == GPU and quota.tenant != tenant and quota.cached[pool.index] <= quota.guaranteed[pool.index]:
                continue
            node = candidates.victim()
            if best is None or node.last_access < best.last_access:
                best = node
        return best  # type: ignore[no-any-return]

    def _above_guarantee(self, quota: Quota, length: int, pool: BlockPool, tenant: str | None) -> int:
        """How many of `length` positions another tenant's run may lose before its owner has less than is guaranteed."""
        if quota.tenant == tenant or pool.tier != GPU:
            return length
        spare = (quota.cached[pool.index] - quota.guaranteed[pool.index]) // self.blocks_per_position[pool.index]
        return min(length, max(1, spare))

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _evict_tail(self, node: Node, num_blocks: int, reason: EvictionReason) -> None:
        if self.offload_on_evict and self.lower_tier[node.tier] is not None:
            worth_it = not self.windowed or self.is_usable(node, node.num_blocks - num_blocks)
            if worth_it and self._importance(node) >= self.offload_min_priority and self.demote(node, num_blocks):
                self.counters.evictions[reason.value] += self.num_present(node, 0)
                return
        self.drop_tail(node, num_blocks, reason, evicted=True)

    def _importance(self, node: Node) -> int:
        """The priority of a leaf, or of what lies below it on lower tiers if that is higher: it would be lost too."""
        return node.priority if node.children is None else max(part.priority for part in node.subtree())

    def drop_tail(self, node: Node, num_blocks: int, reason: EvictionReason, evicted: bool = False) -> None:
        """Removes the last `num_blocks` of an idle leaf from the index and frees them; lower-tier children go with it."""
        if node.children is not None:
            for child in list(node.children.values()):
                self.drop_subtree(child, reason)
        policy = node.root.policies[node.tier]
        keep = node.num_blocks - num_blocks
        if evicted or self.is_candidate(node):
            if evicted and not keep:
                policy.evicted(node)
            policy.remove(node)
        self._note_departure(node, num_blocks, reason)
        for group in self.full:
            self.pools[self.groups[group].pool][node.tier].give(node.ids[group][keep:])
        self.count_cached(node, -num_blocks)
        for group in self.windowed:
            ids = node.ids[group][keep:]
            self.free_windowed(node, group, ids[ids >= 0])
        node.num_blocks = keep
        if not keep:
            self._unlink(node)
            return
        rest = 2 * keep < keep + num_blocks  # a short rest must not keep the memory of a long run
        node.ids = [ids[:keep].copy() if rest else ids[:keep] for ids in node.ids]
        tokens = node.tokens[: keep * self.block_size]
        node.tokens = tokens.copy() if rest else tokens
        if node.digests is not None:
            del node.digests[keep:]
        if node.logits is not None:
            node.logits = {k: v for k, v in node.logits.items() if k[0] // self.block_size <= node.end}
        policy.add(node)

    def drop_covered(self, parent: Node, key: bytes) -> None:
        """Drops the remainders below `parent` that hold nothing but a beginning of the block `key`, which is cached now."""
        for length in range(4, len(key), 4):
            covered = parent.children.get(key[:length]) if parent.children is not None else None
            if covered is not None and self.is_candidate(covered):
                self.drop_tail(covered, 1, EvictionReason.CONTINUED)

    def take_over(self, node: Node) -> list[int]:
        """The last block of an idle leaf on the GPU leaves the index and is a request's own; returns its id per group."""
        ids = [int(of_group[-1]) for of_group in node.ids]
        self.drop_tail(node, 1, EvictionReason.CONTINUED)
        for group, block in enumerate(ids):
            pool = self.pool(group, GPU)
            pool.take(1)  # all of them lie on top of the free stack, in some order
            pool.refs[block] = int(group in self.windowed)
        return ids

    def num_present(self, node: Node, first: int) -> int:
        """Blocks of all groups in a run from position `first` on."""
        count = (node.num_blocks - first) * len(self.full)
        for group in self.windowed:
            count += int((node.ids[group][first:] >= 0).sum())
        return count

    def _unlink(self, node: Node) -> None:
        """Takes an empty leaf out of the tree; its parent may become a leaf."""
        node.detached = True
        if self.calendar.actions:
            self.calendar.forget(node)
        parent = node.parent
        parent.remove_child(node)
        self.num_runs -= 1
        if node.session is not None:
            self._untag(node, node.session)
        if parent is parent.root:
            if parent.children is None:
                self._forget_root(parent.root)
        elif parent.tier == node.tier:
            self.offer(parent)

    def offer(self, node: Node) -> None:
        """Gives a node to the eviction policy if it is a candidate now."""
        if self.is_candidate(node):
            if node.expires_at <= self.now:
                self.watch(node)
            node.root.policies[node.tier].add(node)

    def _untag(self, node: Node, session: str) -> None:
        tagged = self.sessions.get(session)
        if tagged is not None:
            tagged.discard(node)
            if not tagged:
                del self.sessions[session]

    def _note_departure(self, node: Node, num_blocks: int, reason: EvictionReason) -> None:
        counters, now = self.counters, self.now
        present = self.num_present(node, node.num_blocks - num_blocks) if self.windowed else num_blocks * len(self.full)
        counters.evictions[reason._value_] += present
        counters.lifetime.add(now - node.created_at, num_blocks)
        counters.idle_before_eviction.add(now - node.last_access_at, num_blocks)
        if self.events.listening and node.digests:
            self.announce_removal(node, node.num_blocks - num_blocks, node.num_blocks, reason)

    def drop_subtree(self, node: Node, reason: EvictionReason) -> None:
        """Drops an idle node with everything below it, deepest first."""
        for part in reversed(list(node.subtree())):
            self.drop_tail(part, part.num_blocks, reason)

    def detach(self, node: Node, reason: EvictionReason) -> int:
        """Takes a subtree out of the index, also under live sequences: they keep their blocks and publish nothing more.

        Idle nodes are dropped; nodes that are read become detached and free their blocks with their last reader. The
        caller ended the pins on them. Returns how many blocks (positions) left the index.
        """
        removed = 0
        parts = list(node.subtree())
        for part in reversed(parts):
            self.sync(part)
            removed += part.num_blocks
            if not part.active:
                if part.num_blocks:
                    self.drop_tail(part, part.num_blocks, reason)
                continue
            if self.events.listening and part.digests:
                self.announce_removal(part, 0, part.num_blocks, reason)
            self.counters.evictions[reason.value] += self.num_present(part, 0)
            if part.session is not None:
                self._untag(part, part.session)
            part.digests = part.logits = None
        for part in parts:
            if part.active and not part.detached:
                self._cut_off(part)
        return removed

    def _cut_off(self, node: Node) -> None:
        parent = node.parent
        node.detached = True
        self.calendar.forget(node)
        parent.remove_child(node)
        self.num_runs -= 1
        if parent is not parent.root and not parent.detached and parent.tier == node.tier:
            self.offer(parent)

    # --- pins --------------------------------------------------------------------------------------------------------

    def pin_path(self, node: Node) -> None:
        """Protects a path from eviction; counts like `hold`."""
        while node is not node.root:
            node.pins += 1
            if node.pins > 1:
                return
            self.pinned_blocks += node.num_blocks
            if not node.active:
                if not node.same_tier_children:
                    node.root.policies[node.tier].remove(node)
                self._count_pinned(node, 1)
            node = node.parent

    def unpin_path(self, node: Node) -> None:
        while node is not node.root:
            node.pins -= 1
            if node.pins:
                return
            self.pinned_blocks -= node.num_blocks
            if not node.active:
                self._count_pinned(node, -1)
                self.offer(node)
            node = node.parent

    # --- tiers -------------------------------------------------------------------------------------------------------

    def find_lower_tiers(self) -> None:
        """Where evicted runs go from each tier: the next one that has blocks in every pool. Call again after a resize."""
        usable = [tier for tier in range(self.num_tiers) if all(tiers[tier].num_blocks for tiers in self.pools)]
        self.lower_tier: list[Tier | None] = [
            next((Tier(below) for below in usable if below > tier), None) for tier in range(self.num_tiers)
        ]

    def demote(self, node: Node, num_blocks: int) -> bool:
        """Moves the last `num_blocks` of an idle leaf one tier down; False when there is no room.

        Of windowed groups only what the end of a run needs goes along. Runs of a higher priority do not give way.
        """
        target = self.lower_tier[node.tier]
        if target is None:
            return False
        keep = node.num_blocks - num_blocks
        needs = [0] * len(self.pools)
        for group in self.full:
            needs[self.groups[group].pool] += num_blocks
        along = {group: self.needed(node, group, keep) for group in self.windowed}  # before runs below it give way
        for group, wanted in along.items():
            needs[self.groups[group].pool] += int(wanted.sum())
        for index, need in enumerate(needs):
            pool = self.pools[index][target]
            if pool.num_free + self.evictable(pool, None) < need:
                return False
        if not self._make_room_below(target, needs, self._importance(node)):
            return False
        if keep:
            self.split(node, keep)
        for group, wanted in along.items():
            for index in np.flatnonzero((node.ids[group] >= 0) & ~wanted).tolist():
                block = int(node.ids[group][index])
                self.remove_windowed(node, group, node.start + index, block, CAPACITY)
        self._move(node, target, CopyKind.OFFLOAD)
        self.counters.offloaded_blocks += num_blocks
        return True

    def _make_room_below(self, target: Tier, needs: list[int], priority: int) -> bool:
        """Evicts on a lower tier for a run of this priority; False if only more important runs could give way."""
        for index, need in enumerate(needs):
            pool = self.pools[index][target]
            if pool.num_free < need:
                self.evict(pool, need - pool.num_free, None, CAPACITY, priority)
            if pool.num_free < need:
                return False
        return True

    def promote(self, node: Node) -> None:
        """Moves a node to the GPU. The caller holds it and made room."""
        self._move(node, GPU, CopyKind.ONBOARD)
        self.counters.onboarded_blocks += node.num_blocks

    def adopt_blocks(self, node: Node, ids: list[Int32Array]) -> None:
        """An idle run of a lower tier was computed again: it takes the new GPU blocks and frees its own."""
        for group in self.full:
            self.pool(group, GPU).refs[ids[group]] = 0
        announced = self.events.listening and bool(node.digests)
        gained = []
        for group in self.windowed:
            for index in np.flatnonzero((node.ids[group] >= 0) & (ids[group] < 0)).tolist():
                block = int(node.ids[group][index])
                self.remove_windowed(node, group, node.start + index, block, CAPACITY)
            gained.append((group, np.flatnonzero((node.ids[group] < 0) & (ids[group] >= 0))))
        self._move(node, GPU, CopyKind.ONBOARD, ids)
        for group, present in gained if announced else ():
            self.announce_blocks(node, group, present)

    def _move(self, node: Node, target: Tier, kind: CopyKind, ready: list[Int32Array] | None = None) -> None:
        """Gives a run blocks on another tier: new ones and a planned copy, or `ready` ones that hold the data already."""
        source, parent = node.tier, node.parent
        idle = not node.active
        if self.is_candidate(node):
            if kind is CopyKind.OFFLOAD:
                node.root.policies[source].evicted(node)
            node.root.policies[source].remove(node)
            node.entry = None  # the policy of the new tier starts afresh
        if idle:
            self._count_idle(node, -1)
            if node.pins:
                self._count_pinned(node, -1)
        if ready is None:
            node.ids = [self._move_ids(node, group, target, kind) for group in range(self.num_cached_groups)]
        if self.events.listening and node.digests:
            self.announce_move(node, source, target)
        if ready is not None:
            for group in range(self.num_cached_groups):
                self.pool(group, source).give(node.ids[group][node.ids[group] >= 0])
            node.ids = ready
        if parent is not parent.root and parent.tier == target and self.is_candidate(parent):
            parent.root.policies[target].remove(parent)
        parent.same_tier_children += int(parent.tier == target) - int(parent.tier == source)
        node.tier = target
        node.same_tier_children = sum(c.tier == target for c in node.children.values()) if node.children else 0
        if idle:
            self._count_idle(node, 1)
            if node.pins:
                self._count_pinned(node, 1)
        if node.pins and target == GPU:
            self.on_pinned_promoted(node)
        self.offer(node)
        if parent is not parent.root and parent.tier == source:
            self.offer(parent)

    def _move_ids(self, node: Node, group: int, target: Tier, kind: CopyKind) -> Int32Array:
        source = node.tier
        old = node.ids[group]
        present = old >= 0
        src = old if present.all() else old[present]
        pool = self.pool(group, target)
        dst = pool.take(len(src))
        if len(src):
            self.copies.append(CopyOp(kind, group, source, target, src, dst))
        self.pool(group, source).give(src)
        if group in self.windowed and GPU in (source, target):  # where windowed blocks count by themselves
            self.add_cached(node.root, self.pool(group, GPU), len(src) if target == GPU else -len(src))
            if target == GPU and len(src):
                self.leave_over(group, Leftover(self.tick, node, node.start, node.end - 1))
        if len(src) == len(old):
            return dst.copy()  # the planned copy keeps its own: ids change when the pool is defragmented
        moved = np.full(len(old), -1, np.int32)
        moved[present] = dst
        return moved

    # --- time --------------------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Drops idle leaves whose time to live is over, ends pins and priorities; returns positions dropped."""
        return self.calendar.run_due(self.now)

    def time_is_up(self, node: Node) -> int:
        dropped = 0
        if node.priority_until <= self.now:
            self.set_priority(node, DEFAULT_PRIORITY, NEVER)
        while node.expires_at <= self.now and self.is_candidate(node):
            dropped += node.num_blocks
            parent = node.parent
            self.drop_tail(node, node.num_blocks, EvictionReason.EXPIRED)
            node = parent
        for when in (node.expires_at, node.priority_until):
            if self.now < when < NEVER and not node.detached:
                self.calendar.schedule(node, when, partial(self.time_is_up, node))
        return dropped

    def set_priority(self, node: Node, priority: int, until: float) -> None:
        """Changes the retention priority of a node, in the policy and for subscribers."""
        old = node.priority
        node.priority_until = until
        self.watch(node)
        if priority == old:
            return
        policy = node.root.policies[node.tier]
        candidate = self.is_candidate(node)
        if candidate:
            policy.remove(node)
        node.priority = priority
        if candidate:
            policy.add(node)
        if self.events.listening and node.digests:
            for group in range(self.num_cached_groups):
                self.events.updated(
                    self.present_digests(node, group, 0, node.num_blocks),
                    group=group,
                    old_priority=old,
                    new_priority=priority,
                )

    def enforce_quota(self, root: Root) -> None:
        """Evicts a tenant's own idle blocks while it is over its maximum."""
        quota = root.quota
        if quota is None:
            return
        for tiers in self.pools:
            pool = tiers[GPU]
            while quota.excess(pool.index) and len(quota.policies[GPU]):
                victim: Any = quota.policies[GPU].victim()
                self._evict_tail(victim, min(victim.num_blocks, quota.excess(pool.index)), EvictionReason.QUOTA)
