"""Small managers, and requests of consecutive token ids, for tests anywhere in this folder."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.core.kind import Group
from kvpool.kinds import make_groups
from kvpool.pools.pool import BlockPool
from kvpool.stats import CacheStats

FULL = LayerSpec(kv_heads=1, head_dim=8)
HOW = pytest.mark.parametrize("how", ["prefix", "scope", "session", "reset"])
COUNTERS = (
    "requests",
    "prompt_tokens",
    "prompt_blocks",
    "hit_blocks",
    "hit_tokens",
    "partial_hit_tokens",
    "full_hits_with_logits",
    "blocks_allocated",
    "blocks_merged",
    "copies_on_write",
    "evictions",
    "forks",
    "rewinds",
    "swaps_out",
    "swaps_in",
    "swapped_blocks",
    "offloaded_blocks",
    "onboarded_blocks",
    "blocks_copied_ahead",
    "defragmented_blocks",
    "num_cached_runs",
)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_manager(
    *layers: LayerSpec, policy: Any = None, clock: Callable[[], float] | None = None, **overrides: Any
) -> KVCacheManager:
    """16 blocks of 4 tokens and no watermark, unless `overrides` of the configuration say otherwise."""
    options: dict[str, Any] = {"block_size": 4, "gpu_blocks": 16, "watermark": 0.0} | overrides
    return KVCacheManager(KVCacheConfig(list(layers) or [FULL], **options), policy=policy, clock=clock or Clock())


def pools_of(config: KVCacheConfig) -> list[list[BlockPool]]:
    """The pools of a model without a manager, each with one pool per tier."""
    tiers = (Tier.GPU, Tier.HOST, Tier.DISK)
    return [[BlockPool(spec.index, tier, spec.num_blocks.get(tier, 0)) for tier in tiers] for spec in config.pools]


def groups_of(config: KVCacheConfig) -> tuple[Group, ...]:
    """The layer groups of a model without a manager."""
    return make_groups(config.groups, config.block_size, pools_of(config))


def running(manager: KVCacheManager, name: Hashable, num_tokens: int, first: int = 0, **options: Any) -> KVCacheHandle:
    """Admits a prompt of consecutive ids from `first` on, and commits what was not cached."""
    handle = manager.allocate(name, list(range(first, first + num_tokens)), **options)
    manager.commit(handle, num_tokens - handle.num_cached_tokens)
    return handle


def cached(manager: KVCacheManager, num_tokens: int, first: int = 0, **options: Any) -> list[int]:
    """Runs one request to its end and returns its prompt, which is cached now."""
    manager.free(running(manager, ("cached", first), num_tokens, first, **options))
    return list(range(first, first + num_tokens))


def manager_with(*layers: LayerSpec, **overrides: Any) -> KVCacheManager:
    """10 blocks of 4 tokens, no watermark, and the time of the machine."""
    options: dict[str, Any] = {"block_size": 4, "gpu_blocks": 10, "watermark": 0.0} | overrides
    return KVCacheManager(KVCacheConfig(list(layers or (FULL,)), **options))


def manager_of_pairs(*layers: LayerSpec, **options: Any) -> KVCacheManager:
    """Blocks of 2 tokens, else as `make_manager`."""
    return make_manager(*layers, **{"block_size": 2} | options)


def computed(manager: KVCacheManager, name: str, tokens: Any, **options: Any) -> KVCacheHandle:
    """Admits a prompt of these ids and commits all of it."""
    handle = manager.allocate(name, list(tokens), **options)
    manager.commit(handle)
    return handle


def commit_all(manager: KVCacheManager, handle: KVCacheHandle) -> KVCacheHandle:
    """Commits everything that is reserved."""
    manager.commit(handle, handle.num_reserved - handle.num_committed)
    return handle


def num_cached(manager: KVCacheManager, pool: int = 0, tier: Tier = Tier.GPU) -> int:
    """Blocks of a pool that are cached and idle."""
    return manager.stats().pool(pool, tier).cached


def forget(manager: KVCacheManager, how: str, prefix: list[int]) -> None:
    """Invalidates what begins with `prefix`, each in its way."""
    if how == "prefix":
        manager.cache.invalidate(prefix)
    elif how == "scope":
        manager.cache.invalidate(scope=ReuseScope())
    elif how == "session":
        manager.cache.invalidate(session="s")
    else:
        manager.cache.reset()
    manager.check()


def counted(stats: CacheStats) -> dict[str, Any]:
    """What a manager has counted that a replay of its recording counts as well."""
    pools = [(pool.tier, pool.free, pool.cached, pool.referenced) for pool in stats.pools]
    return {name: getattr(stats, name) for name in COUNTERS} | {"pools": pools}
