"""What users say about cached content: pins, times to live, retention priorities, and quotas of tenants.

What is due is done by the first operation after its time.
"""

from __future__ import annotations

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Cache, Pin
from kvpool.core.kind import ByBlock
from kvpool.core.node import DEFAULT_PRIORITY, NEVER, Node, path_ids
from kvpool.core.orders import Quota
from kvpool.errors import InvalidArgumentError, PinBudgetError
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.announcer import announce_priority
from kvpool.prefix.blocks import block_of, count_pin, idle_blocks
from kvpool.prefix.evict import drop_tail, enforce_quota
from kvpool.prefix.tree import all_nodes, end_at, match_tokens, pin_path, unpin_path, watch
from kvpool.scope import ReuseScope
from kvpool.stats import EvictionReason

# --- pins ------------------------------------------------------------------------------------------------------------


def pin_prefix(cache: Cache, tokens: Int32Array, scope: ReuseScope, ttl: float | None) -> Pin:
    """Pins the full cached blocks that `tokens` starts with."""
    size = cache.block_size
    match = match_tokens(cache, scope, tokens)
    if not match.num_blocks:
        raise InvalidArgumentError(f"no full block of these {len(tokens)} tokens is cached; commit them first")
    fresh = sum(min(n.end, match.num_blocks) - n.start for n in match.path if not n.pins) * size
    pinned, limit = cache.pinned_positions * size, cache.config.pinned_tokens_limit
    if pinned + fresh > limit:
        raise PinBudgetError(
            f"pinning {fresh} more tokens would exceed max_pinned_tokens={limit} "
            f"({pinned} are pinned); unpin something or raise the limit"
        )
    node = end_at(cache, match.path[-1], match.num_blocks)
    pin_path(cache, node)
    made = Pin(next(cache.pin_ids), match.num_blocks * size, NEVER if ttl is None else cache.now + ttl, node)
    for group in cache.by_block:
        _pin_blocks(cache, made, group, match.num_blocks)
    cache.pins[made.pin_id] = made
    if ttl is not None:
        cache.calendar.schedule(made, made.expires_at)
    return made


def _pin_blocks(cache: Cache, pin: Pin, group: ByBlock, num_blocks: int) -> None:
    """Keeps the blocks that a request going on right behind the prefix would read."""
    present = path_ids(pin.node.path(), num_blocks, group.index) >= 0
    for depth in group.pinned_columns(present).tolist():
        node, block = block_of(cache, pin.node, group, depth)
        if block >= 0:
            pin.blocks.append((group, depth))
            if node.tier == Tier.GPU:
                count_pin(cache, node.root, group, block, 1)


def unpin(cache: Cache, pin: Pin) -> None:
    """Ends a pin; its blocks stay cached and may be evicted again."""
    if cache.pins.pop(pin.pin_id, None) is not pin:
        raise InvalidArgumentError(f"pin {pin.pin_id} is not active here; it was unpinned, expired or made elsewhere")
    _end_pin(cache, pin)
    enforce_quota(cache, pin.node.root)


def _end_pin(cache: Cache, pin: Pin) -> None:
    for group, depth in pin.blocks:
        node, block = block_of(cache, pin.node, group, depth)
        if node.tier == Tier.GPU:
            count_pin(cache, pin.node.root, group, block, -1)
    unpin_path(cache, pin.node)


def void_pins(cache: Cache, doomed: set[Node]) -> None:
    """Ends the pins on nodes that are about to be invalidated."""
    for pin in [pin for pin in cache.pins.values() if pin.node in doomed]:
        del cache.pins[pin.pin_id]
        _end_pin(cache, pin)


# --- deadlines -------------------------------------------------------------------------------------------------------


def expire(cache: Cache) -> int:
    """Drops idle leaves whose time to live is over, ends pins and priorities; returns positions dropped."""
    dropped = 0
    while (key := cache.calendar.due(cache.now)) is not None:
        if not isinstance(key, Pin):
            dropped += _time_is_up(cache, key)
        elif key.pin_id in cache.pins:
            unpin(cache, key)
    return dropped


def _time_is_up(cache: Cache, node: Node) -> int:
    """A deadline of a node has passed; returns the positions that left the tree."""
    now, dropped = cache.now, 0
    if node.priority_until <= now:
        set_priority(cache, node, DEFAULT_PRIORITY, NEVER)
    while node.expires_at <= now and node.is_candidate():
        dropped += node.num_blocks
        parent = node.parent
        drop_tail(cache, node, node.num_blocks, EvictionReason.EXPIRED)
        node = parent
    for when in (node.expires_at, node.priority_until):
        if now < when < NEVER and not node.detached:
            cache.calendar.schedule(node, when)
    return dropped


def set_priority(cache: Cache, node: Node, priority: int, until: float) -> None:
    """Changes the retention priority of a node, in the policy and for subscribers."""
    old = node.priority
    node.priority_until = until
    watch(cache, node)
    if priority == old:
        return
    policy = node.root.policies[node.tier]
    candidate = node.is_candidate()
    if candidate:
        policy.remove(node)
    node.priority = priority
    if candidate:
        policy.add(node)
    if cache.events.listening and node.digests:
        announce_priority(cache, node, old)


# --- quotas ----------------------------------------------------------------------------------------------------------


def set_quota(cache: Cache, tenant: str, guaranteed: float | int, maximum: float | int | None) -> None:
    """Checks a quota against its pools and the other guarantees, then installs it; with neither it removes one."""
    pools = [tiers[Tier.GPU] for tiers in cache.pools]
    low = [_share(guaranteed, pool.num_blocks, "guaranteed") for pool in pools]
    high = [None if maximum is None else _share(maximum, pool.num_blocks, "maximum") for pool in pools]
    for floor, limit in zip(low, high, strict=True):
        if limit is not None and floor > limit:
            raise InvalidArgumentError(f"guaranteed={guaranteed} is more than maximum={maximum} for {tenant!r}")
    others = [quota for quota in cache.orders.quotas.values() if quota.tenant != tenant]
    for index, pool in enumerate(pools):
        promised = low[index] + sum(quota.guaranteed[index] for quota in others)
        if low[index] and promised > pool.num_blocks:  # a pool that shrank may be short of what was promised
            raise InvalidArgumentError(
                f"guarantees of pool {index} would add up to {promised} blocks of {pool.num_blocks}; lower one"
            )
    orders = cache.orders
    remove = not any(low) and all(limit is None for limit in high)
    quota = None if remove else Quota(tenant, low, high, orders.new_policies())
    orders.quotas.pop(tenant, None)
    if quota is not None:
        orders.quotas[tenant] = quota
    roots = [root for root in cache.roots.values() if root.scope.tenant == tenant]
    for root in roots:
        candidates = [n for n in root.subtree() if n.is_candidate()]
        for node in candidates:
            root.policies[node.tier].remove(node)
            node.entry = None
        root.policies = orders.policies if quota is None else quota.policies
        root.quota = quota
        for node in candidates:
            root.policies[node.tier].add(node)
    if quota is not None:
        quota.cached, quota.pinned = _idle_blocks_of(cache, tenant)
        for root in roots:
            enforce_quota(cache, root)


def _idle_blocks_of(cache: Cache, tenant: str) -> tuple[list[int], list[int]]:
    """Recounts the unread GPU blocks that a tenant's runs hold, and how many of them are pinned."""
    counts, pinned = [0] * len(cache.pools), [0] * len(cache.pools)
    for node in all_nodes(cache):
        if node.root.scope.tenant == tenant and node.tier == Tier.GPU:
            for group in cache.growing:
                idle, kept = idle_blocks(cache, node, group)
                counts[group.pool] += idle
                pinned[group.pool] += kept
    return counts, pinned


def _share(value: float | int, num_blocks: int, name: str) -> int:
    """Blocks out of an int (blocks) or a float (fraction of the pool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer)):
        raise InvalidArgumentError(f"{name} must be a number of blocks or a fraction, got {value!r}")
    if not 0 <= value <= (1.0 if isinstance(value, float) else num_blocks):
        raise InvalidArgumentError(f"{name}={value} is outside the pool of {num_blocks} blocks")
    return round(value * num_blocks) if isinstance(value, float) else int(value)
