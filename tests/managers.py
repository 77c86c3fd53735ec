"""Small managers, and requests of consecutive token ids, for tests anywhere in this folder."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, Tier
from kvpool.pools.groups import Group, make_groups
from kvpool.pools.pool import BlockPool

FULL = LayerSpec(kv_heads=1, head_dim=8)


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
