"""PyAgent's names: `KVCacheManager`, `PagedKVCache` and all that stands below them.

`from kvpool.compat.pyagent import KVCacheConfig, KVCacheManager` is PyAgent's import with another module. Requests have
ids, prompts have lengths, tables have layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kvpool.compat.ferrum import FerrumKVCacheManager
from kvpool.compat.known_settings import CONFIG_SETTINGS, knows_settings
from kvpool.compat.pyagent_blocks import (
    DeviceType,
    DType,
    KVCacheAllocator,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheTransfer,
    stored_type,
)
from kvpool.compat.spelling import CountingSpelling, Spelling
from kvpool.config import KVCacheConfig as CacheConfig
from kvpool.config import LayerSpec
from kvpool.config.layers import DType as StoredType
from kvpool.errors import ConfigError
from kvpool.manager import KVCacheManager as Manager
from kvpool.manager.guard import PressureChange
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.state import Admission

__all__ = [
    "DType",
    "DeviceType",
    "KVCacheAllocator",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheManager",
    "KVCacheTransfer",
    "PagedKVCache",
    "PyAgentKVCacheManager",
    "CompatKVCacheManager",
    "create_kv_cache_manager",
]


class PyAgentCalls(Spelling):
    """What PyAgent's paged cache and its manager both answer."""

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
        return self.table(request_id, self._group(layer_idx))

    @property
    def usage(self) -> float:
        return self.manager.usage

    def get_num_free_blocks(self) -> int:
        return self.manager.get_num_free_blocks()

    def on_memory_pressure(self, callback: Callable[[PressureChange], None]) -> Callable[[], None]:
        """Calls back when the pressure level changes; returns a function that stops it."""
        return self.manager.on_memory_pressure(callback)


class PyAgentKVCacheManager(PyAgentCalls, CountingSpelling):
    """allocate, extend, free, get_block_table, usage, get_num_free_blocks, can_allocate, on_memory_pressure.

    `allocate` also takes the prompt's `tokens` in place of their number: then its prefix is looked up in the cache, and
    what `commit` says is written can be found by others.
    """


class CompatKVCacheManager(PyAgentKVCacheManager, FerrumKVCacheManager):
    """PyAgent's calls and ferrum's on one object: they do not collide."""


class PagedKVCache(PyAgentCalls):
    """A paged cache made from PyAgent's configuration; what it allocates it lists as `KVCacheBlocks`.

    >>> cache = PagedKVCache(KVCacheConfig(num_layers=2, num_heads=4, head_dim=64, num_gpu_blocks=8, block_size=4))
    >>> cache.allocate_for_request("r", 6).gpu_blocks, cache.extend_allocation("r", 3).gpu_blocks
    ([0, 1], [2])
    """

    def __init__(self, config: KVCacheConfig) -> None:
        if not isinstance(config, KVCacheConfig):
            raise ConfigError(f"{type(self).__name__} takes PyAgent's KVCacheConfig, got {type(config).__name__}")
        super().__init__(Manager(config.cache_config), device=DeviceType(config.device).value)
        self.config = config

    def allocate_for_request(
        self, request_id: Hashable, num_tokens: int | None = None, *, tokens: Any = None, reserve: int | None = None
    ) -> KVCacheBlocks:
        """Blocks for a number of tokens, or for a prompt's `tokens`; with `reserve` only for its first chunk."""
        if reserve is not None and not self.config.enable_chunked_prefill:
            raise ConfigError("reserve= divides a prompt into chunks, but enable_chunked_prefill is False")
        self.manager.allocate(request_id, tokens, num_tokens=num_tokens, reserve=reserve)
        return self.get_blocks(request_id)

    def extend_allocation(self, request_id: Hashable, additional_tokens: int = 1) -> KVCacheBlocks:
        """Places for more tokens; returns the blocks that were added, none while the last one has room."""
        handle = self.handle(request_id)
        before = handle.num_blocks
        self.manager.extend(handle, additional_tokens)
        return KVCacheBlocks(gpu_blocks=handle.block_ids()[before:].tolist())

    def free_request(self, request_id: Hashable) -> None:
        self.free(request_id)

    def get_blocks(self, request_id: Hashable) -> KVCacheBlocks:
        """Where the blocks of a request are now; on the host only those that hold something."""
        handle = self.handle(request_id)
        if handle.swapped is not None:
            return KVCacheBlocks(cpu_blocks=[block for block in handle.swapped.ids[0].tolist() if block >= 0])
        return KVCacheBlocks(gpu_blocks=handle.block_ids().tolist())


class KVCacheManager(PagedKVCache):
    """The manager under PyAgent's name: `paged_cache` is itself, `transfer` moves single blocks of an allocator.

    `swap_out` and `swap_in` move requests: table, references and bytes together.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        super().__init__(config)
        self.transfer = KVCacheTransfer(config)

    @property
    def paged_cache(self) -> PagedKVCache:
        return self

    def allocate(
        self, request_id: Hashable, num_tokens: int | None = None, *, tokens: Any = None, reserve: int | None = None
    ) -> KVCacheBlocks:
        return self.allocate_for_request(request_id, num_tokens, tokens=tokens, reserve=reserve)

    def extend(self, request_id: Hashable, additional_tokens: int = 1) -> KVCacheBlocks:
        return self.extend_allocation(request_id, additional_tokens)

    def swap_out(self, *requests: Hashable) -> int:
        """Moves requests to the host; returns how many blocks were copied."""
        return self.manager.swap_out(*map(self.handle, requests))

    def swap_in(self, *requests: Hashable) -> int:
        return self.manager.swap_in(*map(self.handle, requests))


@knows_settings("create_kv_cache_manager", CONFIG_SETTINGS - {"layers", "gpu_blocks", "host_blocks"})
def create_kv_cache_manager(
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_blocks: int = 1000,
    block_size: int = 16,
    *,
    dtype: StoredType | DType | str = StoredType.FLOAT16,
    num_cpu_blocks: int | None = None,
    device: str | None = None,
    **settings: Any,
) -> CompatKVCacheManager:
    """A manager for equal layers with `num_heads` KV heads each; `settings` are other fields of `KVCacheConfig`.

    >>> cache = create_kv_cache_manager(num_layers=2, num_heads=4, head_dim=64, num_blocks=8, block_size=4)
    >>> _ = cache.allocate("r", 6)
    >>> cache.get_block_table("r", layer_idx=1), cache.get_num_free_blocks()
    ([0, 1], 6)
    """
    layers = [LayerSpec(kv_heads=num_heads, head_dim=head_dim, dtype=stored_type(dtype))] * num_layers
    config = CacheConfig(layers, block_size, gpu_blocks=num_blocks, host_blocks=num_cpu_blocks, **settings)
    return CompatKVCacheManager(Manager(config), device=device)
