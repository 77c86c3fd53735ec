"""PyAgent's `KVCacheManager`: requests by id, token counts, block tables by layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kvpool.blocks.handle import KVCacheHandle
from kvpool.blocks.state import Admission
from kvpool.compat.base import CountingSpelling
from kvpool.compat.ferrum import FerrumKVCacheManager
from kvpool.config import DType, KVCacheConfig, LayerSpec
from kvpool.errors import InvalidArgumentError
from kvpool.guard import PressureChange
from kvpool.manager import KVCacheManager


class PyAgentKVCacheManager(CountingSpelling):
    """allocate, extend, free, get_block_table, usage, get_num_free_blocks, can_allocate, on_memory_pressure.

    `allocate` also takes the prompt's `tokens` in place of their number: then its prefix is looked up in the cache, and
    what `commit` says is written can be found by others.
    """

    def can_allocate(self, num_tokens: int | None = None, *, tokens: Any = None) -> Admission:
        """True in a condition when it fits now; `.status` tells LATER from NEVER."""
        return self.manager.can_allocate(tokens, num_tokens=num_tokens)

    def commit(self, request_id: Hashable | KVCacheHandle, tokens: Any) -> None:
        """Keys and values of these tokens (ids, or how many of the prompt's) are written."""
        self.manager.commit(self.handle(request_id), tokens)

    def free(self, request_id: Hashable | KVCacheHandle) -> None:
        self.manager.free(self.handle(request_id))

    def get_block_table(self, request_id: Hashable | KVCacheHandle, layer_idx: int = 0) -> list[int | None]:
        """Block ids of the request for one layer; layers of one group share a table."""
        group_of_layer = self.manager.config.group_of_layer
        if not 0 <= layer_idx < len(group_of_layer):
            raise InvalidArgumentError(f"layer_idx {layer_idx} is outside the model's {len(group_of_layer)} layers")
        return self.table(request_id, group_of_layer[layer_idx])

    @property
    def usage(self) -> float:
        return self.manager.usage

    def get_num_free_blocks(self) -> int:
        return self.manager.get_num_free_blocks()

    def on_memory_pressure(self, callback: Callable[[PressureChange], None]) -> Callable[[], None]:
        """Calls back when the pressure level changes; returns a function that stops it."""
        return self.manager.on_memory_pressure(callback)


class SeedKVCacheManager(PyAgentKVCacheManager, FerrumKVCacheManager):
    """PyAgent's calls and ferrum's on one object: they do not collide."""


def create_kv_cache_manager(
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_blocks: int = 1000,
    block_size: int = 16,
    *,
    dtype: DType | str = DType.FLOAT16,
    num_cpu_blocks: int = 0,
    **settings: Any,
) -> SeedKVCacheManager:
    """A manager for equal layers with `num_heads` KV heads each; `settings` are other fields of `KVCacheConfig`.

    >>> cache = create_kv_cache_manager(num_layers=2, num_heads=4, head_dim=64, num_blocks=8, block_size=4)
    >>> _ = cache.allocate("r", 6)
    >>> cache.get_block_table("r", layer_idx=1), cache.get_num_free_blocks()
    ([0, 1], 6)
    """
    layers = [LayerSpec(kv_heads=num_heads, head_dim=head_dim, dtype=DType.parse(dtype))] * num_layers
    config = KVCacheConfig(layers, block_size, gpu_blocks=num_blocks, host_blocks=num_cpu_blocks, **settings)
    return SeedKVCacheManager(KVCacheManager(config))
