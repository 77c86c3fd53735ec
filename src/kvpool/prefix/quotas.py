"""Sets the limits that `Quota` describes, on a cache that is in use."""

from __future__ import annotations

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.orders import Quota
from kvpool.errors import InvalidArgumentError
from kvpool.prefix.blocks import idle_blocks
from kvpool.prefix.evict import enforce_quota
from kvpool.prefix.tree import all_nodes


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
    _install(cache, tenant, low, high)


def _install(cache: Cache, tenant: str, low: list[int], high: list[int | None]) -> None:
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
