"""TensorRT-LLM's hierarchy as objects that can be asked: windows, their pools, and the blocks in these.

They hold no state of their own: each answer is that of the manager at the moment.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from kvpool.checks import as_count, as_flag, check_int, show
from kvpool.config import KVCacheConfig, LayerGroup, Tier
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.manager.inspection import BlockState
from kvpool.stats import PoolStats


def window_sizes(config: KVCacheConfig) -> list[int]:
    """The attention window of every layer group; of full attention `max_seq_len`, or the longest sequence that fits."""
    longest = config.max_seq_len or config.longest_sequence(keep_watermark=False) or 0  # 0: there is no full attention
    return [longest if group.window is None else group.window for group in config.groups]


class KVCacheBlock(NamedTuple):
    """What is known of one block: metadata, no keys or values."""

    block_id: int
    is_primary: bool
    request_ids: tuple[Hashable, ...]  # live sequences that hold it
    is_cached: bool  # its content can be found and reused
    is_pinned: bool
    priority: int | None  # of cached content
    position: int | None  # of its first token in its sequence

    @property
    def ref_count(self) -> int:
        return len(self.request_ids)

    @property
    def has_refs(self) -> bool:
        return bool(self.request_ids)

    @property
    def is_shared(self) -> bool:
        return len(self.request_ids) > 1


class KVCacheBlockPool:
    """The memory of layers with one window and one shape: primary blocks on the GPU, secondary ones on the host.

    Pools of equal block bytes take their blocks from the same memory, `memory`: what is free is free for all of them.
    """

    def __init__(self, manager: KVCacheManager, group: LayerGroup) -> None:
        self._manager = manager
        self._group = group
        self.index = group.index
        self.memory = group.pool
        self.layers = group.layers
        self.num_layers = len(group.layers)
        self.kv_factor = len(group.attention.parts)  # K and V, or one of them
        self.num_kv_heads = group.attention.kv_heads
        self.size_per_head = group.attention.head_dim
        self.tokens_per_block = group.block_size
        # Elements, in one layer, of K or V
        self.block_size = self.num_kv_heads * self.size_per_head * self.tokens_per_block
        self.block_bytes = group.block_bytes  # over all its layers

    def __repr__(self) -> str:
        return f"<KVCacheBlockPool {self.index} layers={self.layers} heads={self.num_kv_heads}x{self.size_per_head}>"

    def _stats(self, tier: Tier) -> PoolStats | None:
        pools = self._manager.stats().pools
        return next((pool for pool in pools if pool.pool == self.memory and pool.tier == tier), None)

    @property
    def num_primary_blocks(self) -> int:
        stats = self._stats(Tier.GPU)
        return stats.total if stats else 0

    @property
    def num_secondary_blocks(self) -> int:
        stats = self._stats(Tier.HOST)
        return stats.total if stats else 0

    @property
    def num_free_blocks(self) -> int:
        """Primary blocks that nobody reads, those with cached content included; pinned ones are not free."""
        stats = self._stats(Tier.GPU)
        return stats.available if stats else 0

    @property
    def num_allocated_blocks(self) -> int:
        """Primary blocks that live sequences hold for these layers."""
        return sum(g.referenced for g in self._manager.stats().groups if (g.group, g.tier) == (self.index, Tier.GPU))

    def get_block_by_id(self, block_id: int, is_primary: bool = True) -> KVCacheBlock:
        """A block of this pool. Looks at everything: for people and tests, not for engines."""
        tier = Tier.GPU if as_flag(is_primary, "is_primary") else Tier.HOST
        if tier == Tier.HOST and not self.num_secondary_blocks:
            raise InvalidArgumentError("there is no secondary pool: give blocks_in_secondary_pool or host_cache_size")
        found = self._manager.inspect.block(as_count(block_id, "block_id"), pool=self.memory, tier=tier)
        pinned = found.state is BlockState.PINNED
        return KVCacheBlock(
            found.block_id,
            tier == Tier.GPU,
            found.request_ids,
            found.is_published,
            pinned,
            found.priority,
            found.position,
        )


class WindowBlockManager:
    """The pools of one attention window: one for each shape of keys and values among its layers."""

    def __init__(self, manager: KVCacheManager, size: int, groups: list[LayerGroup]) -> None:
        self.window_size = size
        self.is_swa = all(group.window is not None for group in groups)
        self.pools = tuple(KVCacheBlockPool(manager, group) for group in groups)
        self.layers = tuple(sorted(layer for pool in self.pools for layer in pool.layers))
        self.tokens_per_block = self.pools[0].tokens_per_block
        self.num_pools = len(self.pools)

    def __repr__(self) -> str:
        return f"<WindowBlockManager window_size={self.window_size} layers={self.layers} pools={self.num_pools}>"

    @property
    def num_primary_blocks(self) -> int:
        return min(pool.num_primary_blocks for pool in self.pools)

    @property
    def num_secondary_blocks(self) -> int:
        return min(pool.num_secondary_blocks for pool in self.pools)

    @property
    def num_free_blocks(self) -> int:
        return min(pool.num_free_blocks for pool in self.pools)

    @property
    def num_allocated_blocks(self) -> int:
        return max(pool.num_allocated_blocks for pool in self.pools)

    def has_free_blocks(self, num_required: int = 1) -> bool:
        return self.num_free_blocks >= as_count(num_required, "num_required")

    def get_pool(self, pool_idx: int) -> KVCacheBlockPool:
        return self.pools[check_int(pool_idx, "pool_idx", 0, self.num_pools - 1, InvalidArgumentError)]

    def get_layer_pool_idx(self, layer_idx: int) -> int:
        """Which of the window's pools holds a layer."""
        for index, pool in enumerate(self.pools):
            if type(layer_idx) is int and layer_idx in pool.layers:
                return index
        raise InvalidArgumentError(
            f"layer_idx={show(layer_idx)} is no layer of window {self.window_size}: {self.layers}"
        )

    def get_pool_layer_idx(self, layer_idx: int) -> int:
        """The number of a layer among those of its pool."""
        return self.pools[self.get_layer_pool_idx(layer_idx)].layers.index(layer_idx)

    def get_block_by_id(self, block_id: int, pool_idx: int = 0, is_primary: bool = True) -> KVCacheBlock:
        return self.get_pool(pool_idx).get_block_by_id(block_id, is_primary)


class BlockManager:
    """All windows of a model, the largest first."""

    def __init__(self, manager: KVCacheManager) -> None:
        config = manager.config
        groups: dict[int, list[LayerGroup]] = {}
        for group, size in zip(config.groups, window_sizes(config), strict=True):
            groups.setdefault(size, []).append(group)
        ordered = sorted(groups.items(), reverse=True)
        self.window_block_managers = tuple(WindowBlockManager(manager, size, found) for size, found in ordered)
        self.tokens_per_block = config.block_size

    @property
    def pools(self) -> tuple[KVCacheBlockPool, ...]:
        return tuple(pool for window in self.window_block_managers for pool in window.pools)

    @property
    def num_pools(self) -> int:
        return len(self.pools)

    @property
    def window_sizes(self) -> tuple[int, ...]:
        return tuple(window.window_size for window in self.window_block_managers)

    @property
    def is_variable_window(self) -> bool:
        return len(self.window_block_managers) > 1

    def get_window_block_manager(self, window_size: int | None = None) -> WindowBlockManager:
        """The manager of a window; None is the only one."""
        windows = self.window_block_managers
        if window_size is None and len(windows) == 1:
            return windows[0]
        for window in windows:
            if type(window_size) is int and window.window_size == window_size:
                return window
        raise InvalidArgumentError(f"window_size={show(window_size)} must be one of {self.window_sizes}")
