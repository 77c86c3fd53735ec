"""PyAgent's names: `KVCacheManager`, `PagedKVCache` and all that stands below them.

`from kvpool.compat.pyagent import KVCacheConfig, KVCacheManager` is PyAgent's import with another module. Requests have
ids, prompts have lengths, tables have layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.checks import as_count, check_int, show
from kvpool.compat.adapter import Adapter, knows_settings
from kvpool.compat.pyagent_blocks import KVCacheAllocator, KVCacheBlock, KVCacheBlocks, KVCacheTransfer
from kvpool.compat.pyagent_config import MORE_SETTINGS, DeviceType, DType, Fraction, KVCacheConfig, check_config
from kvpool.config import Tier
from kvpool.config.layers import DType as StoredType
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import ConfigError, InvalidArgumentError, OutOfBlocksError
from kvpool.manager import KVCacheManager as Manager
from kvpool.manager.guard import PressureChange, contain
from kvpool.stats import MemoryPressure

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
    "create_kv_cache_manager",
]

PressureCallback = Callable[[PressureChange], None] | Callable[[], None]


class PagedKVCache(Adapter):
    """A paged cache made from PyAgent's configuration; what it allocates it lists as `KVCacheBlocks`.

    >>> cache = PagedKVCache(KVCacheConfig(num_layers=2, num_heads=4, head_dim=64, num_gpu_blocks=8, block_size=4))
    >>> cache.allocate_for_request("r", 6).gpu_blocks, cache.extend_allocation("r", 3).gpu_blocks
    ([0, 1], [2])
    """

    def __init__(self, config: KVCacheConfig) -> None:
        check_config(type(self).__name__, config)
        super().__init__(Manager(config.cache_config), device=config.device)
        self.config = config

    def allocate_for_request(
        self, request_id: Hashable, num_tokens: int | None = None, *, tokens: Any = None, reserve: int | None = None
    ) -> KVCacheBlocks:
        """Blocks for a number of tokens, or for a prompt's `tokens`; with `reserve` only for its first chunk.

        A prompt given by its `tokens` reuses the cached beginning of others, which `commit` made known.
        """
        if reserve is not None and not self.config.enable_chunked_prefill:
            raise ConfigError(f"reserve={show(reserve)} makes chunks of a prompt, but enable_chunked_prefill is False")
        places, reserve = _places(num_tokens, reserve)
        with self._named_host_blocks():
            self.manager.allocate(request_id, tokens, num_tokens=places, reserve=reserve)
        return self.get_blocks(request_id)

    def extend_allocation(self, request_id: Hashable, additional_tokens: int = 1) -> KVCacheBlocks:
        """Places for more tokens; returns the blocks that were added, none while the last one has room."""
        handle = self.handle(request_id)
        before = handle.num_blocks
        with self._named_host_blocks():
            self.manager.extend(handle, additional_tokens)
        return KVCacheBlocks(gpu_blocks=handle.block_ids()[before:].tolist())

    @contextmanager
    def _named_host_blocks(self) -> Iterator[None]:
        """PyAgent mixed CPU blocks into tables when the GPU was full; here the error names the way to use them."""
        try:
            yield
        except OutOfBlocksError as error:
            free = sum(pool.available for pool in self.manager.stats().pools if pool.tier == Tier.HOST)
            if not free:
                raise
            raise type(error)(
                f"{error}. A table never mixes GPU and CPU blocks: swap_out(other_request) moves one to the {free} free "
                f"CPU blocks"
            ) from None

    def _get_block_tokens(self, request_id: Hashable, layer_idx: int, block_id: int) -> int:
        """How many tokens of a request have a place in one of its blocks."""
        table = self.get_block_table(request_id, layer_idx)
        number = as_count(block_id, "block_id")
        if number not in table:
            raise InvalidArgumentError(f"request {request_id!r} has no block {number}; its table is {show(table)}")
        size = self.config.block_size
        return min(size, self.handle(request_id).num_reserved - table.index(number) * size)

    def free_request(self, request_id: Hashable) -> None:
        self.manager.free(self.handle(request_id))

    def get_blocks(self, request_id: Hashable) -> KVCacheBlocks:
        """Where the blocks of a request are now; on the host only those that hold something."""
        handle = self.handle(request_id)
        if handle.swapped is not None:
            return KVCacheBlocks(cpu_blocks=[block for block in handle.swapped[0].tolist() if block >= 0])
        return KVCacheBlocks(gpu_blocks=handle.block_ids().tolist())

    def get_block_table(self, request_id: Hashable | KVCacheHandle, layer_idx: int = 0) -> list[int | None]:
        """Block ids of the request for one layer; all layers share a table. None for each while it is swapped out."""
        return self.table(request_id, self._group(layer_idx, "layer_idx"))

    def commit(self, request_id: Hashable | KVCacheHandle, tokens: Any) -> None:
        """Keys and values of these tokens (ids, how many of the prompt's, or None for its rest) are written and final."""
        self.manager.commit(self.handle(request_id), tokens)

    @property
    def usage(self) -> Fraction:
        """The fraction of the GPU blocks that live requests hold."""
        return Fraction(self.manager.inspect.usage)

    def get_num_free_blocks(self) -> int:
        """Free GPU blocks, those that eviction could free included."""
        return self.manager.stats().pool(0, Tier.GPU).available

    @property
    def allocator(self) -> KVCacheAllocator:
        """Refused: the blocks of requests belong to the manager, and nobody else gives them out."""
        raise InvalidArgumentError(
            "a cache has no allocator of its own: ask get_num_free_blocks, usage or can_allocate; "
            "KVCacheAllocator(config) gives out single blocks"
        )


class KVCacheManager(PagedKVCache):
    """The manager under PyAgent's name: `paged_cache` is itself, `transfer` moves single blocks of an allocator.

    `swap_out` and `swap_in` move requests: table, references and bytes together.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        super().__init__(config)
        self.transfer = KVCacheTransfer(config)
        self._pressure_callbacks: list[Callable[[PressureChange], None]] = []

    @property
    def paged_cache(self) -> PagedKVCache:
        return self

    def allocate(
        self, request_id: Hashable, num_tokens: int | None = None, *, tokens: Any = None, reserve: int | None = None
    ) -> KVCacheBlocks:
        return self.allocate_for_request(request_id, num_tokens, tokens=tokens, reserve=reserve)

    def extend(self, request_id: Hashable, additional_tokens: int = 1) -> KVCacheBlocks:
        return self.extend_allocation(request_id, additional_tokens)

    def free(self, request_id: Hashable) -> None:
        self.free_request(request_id)

    def swap_out(self, *requests: Hashable) -> int:
        """Moves requests to the host; returns how many blocks were copied."""
        return self.manager.swap_out(*map(self.handle, requests))

    def swap_in(self, *requests: Hashable) -> int:
        return self.manager.swap_in(*map(self.handle, requests))

    def can_allocate(self, num_tokens: int | None = None, *, tokens: Any = None) -> bool:
        """Whether `allocate` would succeed now; `manager.can_allocate` tells LATER from NEVER."""
        places, reserve = _places(num_tokens, None)
        return bool(self.manager.can_allocate(tokens, num_tokens=places, reserve=reserve))

    def on_memory_pressure(self, callback: PressureCallback) -> Callable[[], None]:
        """Calls back under pressure; returns a function that stops it.

        A callback without parameters, as PyAgent's are, is called when the level rises to CRITICAL. One that takes an
        argument gets every change of the level, in both directions. An allocation that fails calls all of them.
        """
        call = _as_listener(callback)
        stop_listening = self.manager.on_memory_pressure(call)
        self._pressure_callbacks.append(call)

        def stop() -> None:
            stop_listening()
            if call in self._pressure_callbacks:
                self._pressure_callbacks.remove(call)

        return stop

    @contextmanager
    def _named_host_blocks(self) -> Iterator[None]:
        try:
            with super()._named_host_blocks():
                yield
        except OutOfBlocksError as error:
            self._call_back(f"an allocation failed: {error}")
            raise

    def _trigger_memory_pressure(self) -> None:
        """Calls every callback as if the level had risen to CRITICAL now."""
        self._call_back("triggered by a call")

    def _call_back(self, reason: str) -> None:
        change = PressureChange(MemoryPressure.CRITICAL, self.manager.inspect.pressure, self.usage, 0, reason)
        for callback in list(self._pressure_callbacks):
            contain(lambda call=callback: call(change))  # type: ignore[misc]


def _places(num_tokens: int | None, reserve: int | None) -> tuple[int | None, int | None]:
    """The same numbers as kvpool takes them: a request for no tokens is one whose places are not reserved yet."""
    if num_tokens is None or as_count(num_tokens, "num_tokens") or reserve:
        return num_tokens, reserve
    return 1, 0


def _as_listener(callback: Any) -> Callable[[PressureChange], None]:
    """A callback of either kind as one that takes a change; each registration is a function of its own."""
    if not callable(callback):
        raise InvalidArgumentError(f"on_memory_pressure takes a callable, got {show(callback)}")
    if _takes(callback, 1):
        return lambda change: callback(change)
    if _takes(callback, 0):
        return lambda change: callback() if change.level is MemoryPressure.CRITICAL else None
    raise InvalidArgumentError(
        f"a callback of on_memory_pressure takes nothing or the change of the level, got {show(callback)} with "
        f"{inspect.signature(callback)}"
    )


def _takes(callback: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(callback).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # some builtins do not say
        return True
    return True


@knows_settings("create_kv_cache_manager", MORE_SETTINGS)
def create_kv_cache_manager(
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_blocks: int = 1000,
    block_size: int = 16,
    *,
    dtype: StoredType | DType | str = DType.FLOAT16,
    num_cpu_blocks: int = 0,
    device: DeviceType | str | None = None,
    **settings: Any,
) -> KVCacheManager:
    """A manager for equal layers with `num_heads` KV heads each; `settings` are other fields of kvpool's `KVCacheConfig`.

    >>> cache = create_kv_cache_manager(num_layers=2, num_heads=4, head_dim=64, num_blocks=8, block_size=4)
    >>> cache.allocate("r", 6).gpu_blocks, cache.get_block_table("r", layer_idx=1), cache.get_num_free_blocks()
    ([0, 1], [0, 1], 6)
    """
    num_blocks = check_int(num_blocks, "num_blocks", 0, 2**31 - 1)
    config = KVCacheConfig(
        num_layers, num_heads, head_dim, dtype, device, block_size, num_blocks, num_cpu_blocks, more=settings
    )
    return KVCacheManager(config)
