"""Who leaves when room is needed, and where to: one recursion from `evict` down the tiers.

Eviction takes blocks from the tail of idle leaves in the order of the policy, so a parent never leaves before its cached
children. With a lower tier below, evicted runs move there (`demote`), for which others there may have to leave (`evict`);
without one, or when that is full too, they are dropped. Blocks read one by one that nobody reads
any more stay cached until their pool needs them: they stand in `Cache.leftovers`, oldest first, and compete with the
policy's victim by age, unless the end of a run needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from kvpool.config import Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.core.cache import Cache
from kvpool.core.kind import ByBlock, Group
from kvpool.core.node import Node, Root
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.pools.pool import GPU, HOST, BlockPool, CopyKind, CopyOp
from kvpool.prefix.announcer import announce_blocks, announce_moved, announce_removed
from kvpool.prefix.blocks import evict_last_resort, evict_leftovers, is_usable, keep_pinned, leave_over, remove_block
from kvpool.prefix.tree import (
    add_idle,
    count_run,
    cut_off,
    free_blocks,
    offer,
    ref,
    remove_node,
    split,
    unref,
)
from kvpool.stats import EvictionReason

PIECES_PER_TIER: Final = 16  # at least, of what comes up from a lower tier where others go down for it
MOST_IN_PIECE: Final = 64  # blocks
CAPACITY: Final = EvictionReason.CAPACITY  # a global is several times cheaper than a member of an enum
Along: TypeAlias = list[tuple[ByBlock, BoolArray]]  # which blocks of a run go along with it, where not all do

# --- eviction --------------------------------------------------------------------------------------------------------


def evict(
    cache: Cache,
    pool: BlockPool,
    num_free: int,
    tenant: str | None,
    reason: EvictionReason = CAPACITY,
    for_run: Node | None = None,
) -> int:
    """Evicts until so many blocks of a pool are free, or nothing can go any more; returns how many became free.

    One position may free several. Host copies go first. If it is `for_run`, which comes from above, no host copy goes, and a
    policy that goes by priority gives up no run that is more important.
    """
    before = pool.num_free
    if before >= num_free:
        return 0
    if pool.tier == HOST and for_run is None:
        cache.host_copies.give_way(pool, num_free)
    has_leftovers = cache.by_block and pool.tier == GPU
    while pool.num_free < num_free:
        victim = cache.orders.victim(pool, tenant)
        if victim is not None and victim is cache.spared:
            ref(cache, victim)
            cache.spared = None
            continue
        wanted = num_free - pool.num_free
        if has_leftovers and not (victim is not None and victim.leaves):
            until = math.inf if victim is None else victim.last_access
            if evict_leftovers(cache, pool, wanted, until, tenant, reason):
                continue
            if victim is None and evict_last_resort(cache, pool, wanted, tenant, reason):
                continue
        if victim is None:
            break
        by_priority = for_run is not None and victim.root.policies[pool.tier].by_priority and not victim.leaves
        if for_run is not None and by_priority and victim.outranks(for_run):
            break
        _evict_tail(cache, victim, _tail_for(cache, victim, pool, wanted, tenant), reason)
    return pool.num_free - before


def spare(cache: Cache, node: Node) -> None:
    """Evicts nothing of a run, and nothing above it, until `spare_no_more`.

    One on the GPU has a place in an order of eviction, or its children have. It keeps the place until it is its turn.
    """
    if node.tier == GPU:
        cache.spared = node
    else:
        ref(cache, node)


def spare_no_more(cache: Cache, node: Node) -> None:
    """Ends `spare`. That it was spared was no use of it."""
    if cache.spared is None:
        unref(cache, node, used=False)
    cache.spared = None


def _tail_for(cache: Cache, node: Node, pool: BlockPool, num_blocks: int, tenant: str | None) -> int:
    """How many positions at the end of a run go for `num_blocks` of a pool: those that hold so many, or all it has.

    Another tenant's run loses no more than its owner has above what is guaranteed.
    """
    if cache.has_full[pool.index]:
        length = -(-num_blocks // cache.blocks_per_position[pool.index])
        length = length if length < node.num_blocks else node.num_blocks
    else:
        held = np.zeros(node.num_blocks, np.int64)
        for group in cache.by_block:
            if group.pool == pool.index:
                held += node.ids[group.index] >= 0
        length = min(node.num_blocks, int(np.cumsum(held[::-1]).searchsorted(num_blocks)) + 1)
    quota = node.root.quota
    if quota is None or quota.tenant == tenant or pool.tier != GPU:
        return length
    above: int = (quota.cached[pool.index] - quota.guaranteed[pool.index]) // cache.blocks_per_position[pool.index]
    return min(length, max(1, above))


def _evict_tail(cache: Cache, node: Node, num_blocks: int, reason: EvictionReason) -> None:
    """The last blocks of an idle leaf move down if that is wanted and possible; else they leave the index."""
    if node.owner is not None and node.leaves:
        reason = EvictionReason.ENDED
    elif (
        cache.lower_tier[node.tier] is not None
        and cache.config.offload_on_evict
        and any(part.priority >= cache.config.offload_min_priority for part in node.subtree())
    ):
        num_blocks = _move_down(cache, node, num_blocks, reason)
    if num_blocks:
        drop_tail(cache, node, num_blocks, reason, evicted=True)


def _move_down(cache: Cache, node: Node, num_blocks: int, reason: EvictionReason) -> int:
    """Moves the last blocks of an idle leaf one tier down. If only a first part of them fits, it drops the rest.

    Returns how many blocks the caller must still drop: 0, or all that are left if no usable part fits.
    """
    keep = node.num_blocks - num_blocks
    # First try all of it. Then try what fits if less important runs below are evicted. Last try what fits as it is.
    for evicting in (None, True, False):
        part = num_blocks if evicting is None else min(num_blocks, num_fitting(cache, node, evicting))
        if not part or (cache.by_block and not is_usable(cache, node, keep, keep + part)):
            break
        if part < num_blocks:
            drop_tail(cache, node, num_blocks - part, reason, goes_on=True)
            num_blocks = part
        moved = demote(cache, node, part)
        if moved is not None:
            cache.counters.evictions[reason.value] += cache.num_present(moved, 0)
            return 0
    return num_blocks


def enforce_quota(cache: Cache, root: Root) -> None:
    """Evicts a tenant's own idle blocks while it is over its maximum."""
    quota = root.quota
    if quota is None:
        return
    for tiers in cache.pools:
        pool = tiers[GPU]
        while quota.excess(pool.index) and len(quota.policies[GPU]):
            victim: Any = quota.policies[GPU].victim()
            _evict_tail(cache, victim, min(victim.num_blocks, quota.excess(pool.index)), EvictionReason.QUOTA)


# --- down ------------------------------------------------------------------------------------------------------------


def num_fitting(cache: Cache, node: Node, evicting: bool) -> int:
    """How many positions of a run the tier below it has room for, or could make room for by `evicting`."""
    below = cache.lower_tier[node.tier]
    assert below is not None
    if node.host_copy is not None and below == HOST:
        return node.num_blocks
    fitting = MAX_BLOCKS
    for index, per_position in cache.full_per_pool:
        pool = cache.pools[index][below]
        room = cache.orders.available(pool, None) if evicting else pool.num_free
        fitting = min(fitting, room // per_position)
    return fitting


def demote(cache: Cache, node: Node, num_blocks: int) -> Node | None:
    """Moves the last `num_blocks` of an idle leaf one tier down and returns the run that they are; None without room.

    Of blocks read one by one only what the end of a run needs goes along. Runs of a higher priority do not give way;
    others may have done so when it turns out that the room is not enough: ask `num_fitting` again, and move what fits.
    """
    target = cache.lower_tier[node.tier]
    if target is None or (node.children is not None and any(below.tier < target for below in node.children.values())):
        return None  # runs without blocks stay on a tier that was resized to nothing; none lies below a lower one
    keep = node.num_blocks - num_blocks
    # Asked before runs below it give way.
    along = [(group, group.needed(cache, node, keep)) for group in cache.by_block]
    host_copy = cache.host_copies.take(node) if node.host_copy is not None else None  # nobody else is to have it
    there = None if host_copy is None or target != HOST else [ids[keep:] for ids in host_copy]
    if not _make_room_below(cache, target, _needs_below(cache, num_blocks, along, there), node):
        if host_copy is not None:
            cache.host_copies.keep(node, host_copy)
        return None
    if host_copy is not None:
        cache.host_copies.keep(node, host_copy)
    policy, moving = node.root.policies[node.tier], node
    if keep:
        moving = cut_off(cache, node, keep)
    else:
        policy.evicted(node)
    for group, wanted in along:
        for index in np.flatnonzero((moving.ids[group.index] >= 0) & ~wanted).tolist():
            remove_block(cache, moving, group, index, EvictionReason.CAPACITY)
    _move(cache, moving, target, CopyKind.OFFLOAD)
    if keep:
        policy.trimmed(node)
    else:
        offer(cache, node.parent)
    cache.counters.offloaded_blocks += num_blocks
    return moving


def _needs_below(cache: Cache, num_blocks: int, along: Along, there: list[Int32Array] | None) -> list[int]:
    """Blocks per pool of a lower tier for so many positions and for what goes `along`, less those `there`."""
    needs = [0] * len(cache.pools)
    if there is None:
        for group in cache.full:
            needs[group.pool] += num_blocks
    for group, wanted in along:
        missing = wanted if there is None else wanted & (there[group.index] < 0)
        needs[group.pool] += int(missing.sum())
    return needs


def _make_room_below(cache: Cache, target: Tier, needs: list[int], node: Node, for_host_copy: bool = False) -> bool:
    """Frees blocks of a lower tier for a run; False if only more important runs could give way.

    Host copies give way when no run can, and not to a host copy: without them, somebody would wait for a copy soon.
    """
    pools, host_copies = [tiers[target] for tiers in cache.pools], cache.host_copies
    for pool, need in zip(pools, needs, strict=True):
        spared = host_copies.num_blocks[pool.index] if for_host_copy else 0
        if cache.orders.available(pool, None) - spared < need:
            return False
    for pool, need in zip(pools, needs, strict=True):
        evict(cache, pool, need, None, for_run=node)
        if pool.num_free < need and target == HOST and not for_host_copy:
            host_copies.give_way(pool, need, node)
        if pool.num_free < need:
            return False
    return True


# --- ahead of eviction -----------------------------------------------------------------------------------------------


def copy_ahead(cache: Cache) -> None:
    """Copies runs to the host whose last reader left in the present operation."""
    host_copies = cache.host_copies
    waiting, host_copies.waiting = host_copies.waiting, []
    if cache.lower_tier[GPU] != HOST:
        return
    for node in reversed(waiting or ()):  # parents before their children, as they would be matched
        stays = node.tier == GPU and not node.detached and node.host_copy is None
        if stays and node.priority >= cache.config.offload_min_priority:
            _copy_to_host(cache, node)


def _copy_to_host(cache: Cache, node: Node) -> None:
    """Gives a run a host copy, if there is room for it and it could be matched below the GPU."""
    if cache.by_block and not is_usable(cache, node, 0, node.num_blocks):
        return
    along = [(group, group.needed(cache, node)) for group in cache.by_block]
    needs = _needs_below(cache, node.num_blocks, along, None)
    if not _make_room_below(cache, HOST, needs, node, for_host_copy=True):
        return
    wanted = {group.index: of_group for group, of_group in along}
    ids = []
    for group in cache.growing:
        old = node.ids[group.index]
        chosen = wanted[group.index] if group.by_block else old >= 0
        src = old[chosen]
        of_group = np.full(len(old), -1, np.int32)
        of_group[chosen] = dst = group.on(HOST).take(len(src))
        ids.append(of_group)
        if len(src):
            cache.copies.append(CopyOp(CopyKind.OFFLOAD, group.index, GPU, HOST, src, dst))
    cache.host_copies.keep(node, ids)
    cache.counters.blocks_copied_ahead += node.num_blocks


# --- up --------------------------------------------------------------------------------------------------------------


def bring_up(cache: Cache, tip: Node) -> Iterator[tuple[Node, Tier]]:
    """Moves the runs on the path to `tip` to the GPU, top down; yields each with the tier that it came from.

    What leaves the GPU for them has no place below while they still lie there. So they come in pieces, and only as much
    leaves at a time as the next piece takes. The caller holds the path and has checked that enough is evictable.
    """
    waiting = [node for node in reversed(tip.path()) if node.tier != GPU]  # the next one last
    needs = cache.blocks_per_pool(waiting)
    evicts = any(need > pool.num_free for need, pool in zip(needs, cache.gpu_pools, strict=True))
    while waiting:
        piece, room = [], MAX_BLOCKS
        if evicts:  # a small part of what the tier below holds
            smallest = min(tiers[waiting[-1].tier].num_blocks for tiers in cache.pools)
            room = max(1, min(MOST_IN_PIECE, smallest // PIECES_PER_TIER))
        while waiting and room:
            node = waiting.pop()
            if node.num_blocks > room:
                waiting.append(node)
                node = split(cache, node, room)
            piece.append(node)
            room -= node.num_blocks
        for pool, need in zip(cache.gpu_pools, cache.blocks_per_pool(piece), strict=True):
            evict(cache, pool, need, tip.tenant)
        for node in piece:
            tier = node.tier
            promote(cache, node)
            yield node, tier


def promote(cache: Cache, node: Node) -> None:
    """Moves a node to the GPU. The caller holds it and made room."""
    _move(cache, node, GPU, CopyKind.ONBOARD)
    cache.counters.onboarded_blocks += node.num_blocks


def adopt_blocks(cache: Cache, node: Node, ids: list[Int32Array]) -> None:
    """An idle run of a lower tier was computed again: it takes the new GPU blocks and frees its own."""
    for group in cache.full:
        group.gpu.refs[ids[group.index]] = 0  # their readers are counted on the node
    announced = cache.events.listening and bool(node.digests)
    gained = []
    for group in cache.by_block:
        old, new = node.ids[group.index], ids[group.index]
        for index in np.flatnonzero((old >= 0) & (new < 0)).tolist():
            remove_block(cache, node, group, index, EvictionReason.CAPACITY)
        gained.append((group, np.flatnonzero((old < 0) & (new >= 0))))
    _move(cache, node, GPU, CopyKind.ONBOARD, ids)
    for group, present in gained if announced else ():
        announce_blocks(cache, node, group, present)


# --- either way ------------------------------------------------------------------------------------------------------


def _move(cache: Cache, node: Node, target: Tier, kind: CopyKind, ready: list[Int32Array] | None = None) -> None:
    """Gives a run blocks on another tier: new ones and a planned copy, or `ready` ones that hold the data already."""
    source = node.tier
    if node.is_candidate():
        node.root.policies[source].remove(node)
        node.entry = None  # the policy of the new tier starts afresh
    if not node.active:
        count_run(cache, node, -1, -1 if node.pins else 0)
    old, host_copy = node.ids, None
    if node.host_copy is not None:
        if target != HOST:
            cache.host_copies.drop(node)
        host_copy = cache.host_copies.take(node)
    if ready is None:
        node.ids = tuple([_move_ids(cache, node, group, target, kind, host_copy) for group in cache.growing])
    if cache.events.listening and node.digests:
        announce_moved(cache, node, source, target)
    if ready is not None:
        node.ids = tuple(ready)
    if source == HOST and target == GPU and cache.host_copies.waiting is not None:
        cache.host_copies.keep(node, [ids.copy() for ids in old])  # evicted again it need not be copied
    else:
        for group in cache.growing:
            ids = old[group.index]
            group.tiers[source].give(ids[ids >= 0] if group.by_block else ids)
    parent = node.parent  # who is a leaf of which tier changes with it
    if parent.tier == target and parent.is_candidate():
        parent.root.policies[target].remove(parent)
    parent.same_tier_children += int(parent.tier == target) - int(parent.tier == source)
    node.tier = target
    node.same_tier_children = sum(c.tier == target for c in node.children.values()) if node.children else 0
    if not node.active:
        count_run(cache, node, 1, 1 if node.pins else 0)
    if node.pins and target == GPU:
        keep_pinned(cache, node)
    offer(cache, node)


def _move_ids(
    cache: Cache, node: Node, group: Group, target: Tier, kind: CopyKind, host_copy: list[Int32Array] | None
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
        cache.copies.append(CopyOp(kind, group.index, source, target, src, dst))
    if group.by_block and GPU in (source, target):  # where blocks read one by one count by themselves
        num_moved = int(present.sum())
        add_idle(node.root, group.gpu, num_moved if target == GPU else -num_moved)
        if target == GPU and num_moved:
            leave_over(cache, node, group, node.start, node.end - 1)
    return moved


# --- leaving the index -----------------------------------------------------------------------------------------------


def drop_tail(
    cache: Cache, node: Node, num_blocks: int, reason: EvictionReason, evicted: bool = False, goes_on: bool = False
) -> None:
    """Removes the last `num_blocks` of an idle leaf from the index and frees them; lower-tier children go with it.

    If it `goes_on`, more of the run leaves its tier at once: the policy is told then, of all of it.
    """
    if node.children is not None:
        for below in reversed(list(node.subtree())[1:]):
            drop_tail(cache, below, below.num_blocks, reason)
    policy = node.root.policies[node.tier]
    keep = node.num_blocks - num_blocks
    if node.host_copy is not None:
        cache.host_copies.trim(node, keep)
    if not keep and (evicted or node.is_candidate()):
        if evicted:
            policy.evicted(node)
        policy.remove(node)
    counters = cache.counters
    counters.evictions[reason._value_] += cache.num_present(node, keep)
    counters.lifetime.add(cache.now - node.created_at, num_blocks)
    counters.idle_before_eviction.add(cache.now - node.last_access_at, num_blocks)
    if node.digests and cache.events.listening:
        announce_removed(cache, node, keep, node.num_blocks, reason)
    if cache.departed is not None and not node.is_remainder:
        cache.departed.note(node, keep, reason, cache.now, cache.tick)
    for group in cache.full:
        pool = group.tiers[node.tier]
        pool.give(node.ids[group.index], keep)
        add_idle(node.root, pool, -num_blocks)
    for group in cache.by_block:
        free_blocks(cache, node, group, node.ids[group.index][keep:])
    node.num_blocks = keep
    if not keep:
        remove_node(cache, node)
        return
    rest = 2 * keep < keep + num_blocks  # a short rest must not keep the memory of a long run
    node.ids = tuple([ids[:keep].copy() if rest else ids[:keep] for ids in node.ids])
    tokens = node.tokens[: keep * cache.block_size]
    node.tokens = tokens.copy() if rest else tokens
    node.end_sum = -1
    if node.digests is not None:
        del node.digests[keep:]
    if node.logits is not None:  # of prompts that ended in what is gone
        node.logits = {
            key: value for key, value in node.logits.items() if key[0] // cache.block_size <= keep + node.start
        }
    if not goes_on:
        policy.trimmed(node)


def drop_covered(cache: Cache, parent: Node, key: bytes) -> None:
    """Drops the remainders below `parent` that hold nothing but a beginning of the block `key`, which is cached now."""
    for length in range(4, len(key), 4):
        covered = parent.children.get(key[:length]) if parent.children is not None else None
        if covered is not None and covered.is_candidate():
            drop_tail(cache, covered, 1, EvictionReason.CONTINUED)


def take_over(cache: Cache, node: Node) -> list[int]:
    """The last block of an idle leaf on the GPU leaves the index and is a request's own; returns its id per group."""
    ids = [int(of_group[-1]) for of_group in node.ids]
    drop_tail(cache, node, 1, EvictionReason.CONTINUED)
    for group, block in zip(cache.growing, ids, strict=True):
        group.gpu.take(1)  # all of them lie on top of the free stack, in some order
        group.gpu.refs[block] = group.single_owner
    return ids


def detach(cache: Cache, node: Node, reason: EvictionReason) -> int:
    """Takes a subtree out of the index, also under live sequences: they keep their blocks and publish nothing more.

    Idle nodes are dropped; nodes that are read become detached and free their blocks with their last reader. The
    caller ended the pins on them. Returns how many blocks (positions) left the index.
    """
    removed = 0
    parts = list(node.subtree())
    for part in reversed(parts):
        removed += part.num_blocks
        if not part.active:
            if part.num_blocks:
                drop_tail(cache, part, part.num_blocks, reason)
            continue
        if cache.events.listening and part.digests:
            announce_removed(cache, part, 0, part.num_blocks, reason)
        cache.counters.evictions[reason.value] += cache.num_present(part, 0)
        if cache.departed is not None and not part.is_remainder:
            cache.departed.note(part, 0, reason, cache.now, cache.tick)
        part.digests = part.logits = None
        cache.host_copies.drop(part)
    for part in parts:
        if part.active and not part.detached:
            remove_node(cache, part)
    return removed


# --- asked for by live sequences -------------------------------------------------------------------------------------


def require(cache: Cache, needs: dict[str | None, list[int]], what: str) -> None:
    """Raises, before anything changes, if the GPU pools cannot serve the needs of all tenants; then evicts to make room.

    What is guaranteed to a tenant gives way to its own sequences only. Without quotas, nobody's name matters.
    """
    quotas = cache.orders.quotas
    for pool in cache.gpu_pools:
        total = sum([of_tenant[pool.index] for of_tenant in needs.values()])
        if total > pool.num_free:
            available = cache.orders.available(pool, None)
            for tenant, of_tenant in needs.items():
                if tenant in quotas:
                    available += min(of_tenant[pool.index], quotas[tenant].protected(pool.index))
            if total > available:
                raise cache.shortage(pool, total, available, what)
    make_room(cache, needs)


def make_room(cache: Cache, needs: dict[str | None, list[int]]) -> None:
    """Evicts until the needs of all tenants are free. The caller has checked that enough is evictable."""
    for pool in cache.gpu_pools:
        missing = sum([of_tenant[pool.index] for of_tenant in needs.values()]) - pool.num_free
        of_tenants = [(tenant, of_tenant[pool.index]) for tenant, of_tenant in needs.items()]
        for tenant, most in of_tenants if len(needs) == 1 else [(None, missing), *of_tenants]:
            if missing > 0:
                missing -= evict(cache, pool, pool.num_free + min(missing, most), tenant)
