"""The calls of ferrum's manager that need none of its own handles, on any `KVCacheManager`."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.checks import as_count, show
from kvpool.compat.adapter import Adapter, CountingAdapter
from kvpool.compat.ferrum_handle import CacheHandleStats
from kvpool.compat.ferrum_prefixes import (
    BlockPool,
    CachedPrefix,
    FoundPrefix,
    PrefixCache,
    PrefixCacheStats,
    refuse_prefix,
)
from kvpool.config import Tier
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError, SequenceStateError, UnknownRequestError
from kvpool.manager import KVCacheManager
from kvpool.manager.guard import contain
from kvpool.stats import MemoryPressure

if TYPE_CHECKING:
    from torch import Tensor

GC_BLOCKS = 10  # idle blocks that ferrum's collection frees


class CacheManagerStats(NamedTuple):
    """The cache as a whole. Free blocks include those that eviction could free; requests are counted, not blocks."""

    total_memory_bytes: int
    used_memory_bytes: int
    active_caches: int
    total_blocks: int
    free_blocks: int
    cache_hit_rate: float
    eviction_count: int
    allocation_count: int
    allocation_failures: int


class CacheGcStats(NamedTuple):
    """What a collection freed. It may be awaited, as ferrum's `gc` is."""

    memory_freed: int  # bytes
    caches_freed: int  # stored prefixes of which nothing is cached any more
    gc_time_ms: float

    def __await__(self) -> Generator[None, None, CacheGcStats]:
        return self
        yield


class FerrumCalls(Adapter):
    """What ferrum's manager answers, but for `allocate` and what returns handles.

    At most `max_prefixes` stored prefixes are kept (None: as many as there is room for); what is shorter than
    `min_prefix_length` tokens is neither stored nor found by `store_prefix` and `find_prefix`.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        device: str | None = None,
        max_prefixes: int | None = None,
        min_prefix_length: int = 0,
    ) -> None:
        super().__init__(manager, device=device)
        self._prefixes = PrefixCache(self, max_prefixes, min_prefix_length)
        self._callback: Callable[[MemoryPressure], None] | None = None
        self._counting = threading.Lock()
        self._begun_by_sharing = 0  # requests that a fork began, where nothing was allocated

    def handle(self, request: Any) -> KVCacheHandle:
        refuse_prefix(request)
        return super().handle(request)

    def deallocate(self, request_id: Hashable | KVCacheHandle) -> Any:
        """Ends a request. What it stored stays cached; an unknown id is refused."""
        self.manager.free(self.handle(request_id))

    # --- bytes -------------------------------------------------------------------------------------------------------

    def write_kv(
        self, handle: Hashable | KVCacheHandle, layer: int, token_position: int, key: Any, value: Any = None
    ) -> None:
        """One token's K and V in one layer: heads x head_dim numbers each. Refused where others read the block."""
        self.write(handle, layer, token_position, key, value)

    def read_kv(
        self, handle: Hashable | KVCacheHandle, layer: int, start_token: int, num_tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        """K and V of written tokens in order, flat and in float32: num_tokens x heads x head_dim numbers each."""
        keys, values = self.read(handle, layer, start_token, as_count(num_tokens, "num_tokens"))
        return keys.float().reshape(-1), None if values is None else values.float().reshape(-1)

    # --- prefixes ----------------------------------------------------------------------------------------------------

    def prefix_cache(self) -> PrefixCache | None:
        """The stored prefixes; None where prefixes are not cached."""
        return self._prefixes if self.manager.config.enable_prefix_caching else None

    def find_prefix(self, tokens: Any) -> FoundPrefix | None:
        """The longest cached beginning of `tokens`; `allocate(..., tokens=tokens)` reuses it."""
        return self._prefixes.find_prefix(tokens)

    def store_prefix(self, tokens: Any, kv_handle: Hashable | KVCacheHandle, last_logits: Any = None) -> bool:
        """The keys and values of `tokens` are written in the blocks of `kv_handle`: others may reuse them from now on.

        The cache owns the blocks, so they outlive the request. False when the prefix is shorter than `min_prefix_length` or
        the cache is off (then nothing happens), when the request publishes nothing because what it began with was evicted,
        and when the logits could not be kept.
        """
        self.handle(kv_handle)
        cache = self.prefix_cache()
        return cache is not None and cache.store_prefix(tokens, kv_handle, last_logits)

    def evict_prefixes(self, count: int) -> int:
        """Forgets up to `count` stored prefixes, the one not used for longest first; returns how many.

        Blocks that only they start with become free; live requests keep theirs and go on, but publish nothing more there.
        """
        return self._prefixes.evict_n(count)

    def clear_prefix_cache(self) -> None:
        self._prefixes.clear()

    def prefix_cache_stats(self) -> PrefixCacheStats | None:
        """None where prefixes are not cached."""
        cache = self.prefix_cache()
        return None if cache is None else cache.stats()

    def _source(self, source: Any, target: Hashable) -> AbstractContextManager[KVCacheHandle]:
        """The request that a share reads from; a found prefix is held for that long."""
        return (
            source.held(("prefix of", target)) if isinstance(source, CachedPrefix) else nullcontext(self.handle(source))
        )

    def _share_prefix_with_new(self, source: KVCacheHandle, target: Hashable, num_tokens: int) -> KVCacheHandle:
        child = self._share_prefix(source, target, num_tokens)
        with self._counting:
            self._begun_by_sharing += 1
        return child

    def _share_prefix(self, source: KVCacheHandle, target: Hashable, num_tokens: int) -> KVCacheHandle:
        as_count(num_tokens, "num_tokens", minimum=1)
        if num_tokens > source.num_written:
            raise SequenceStateError(
                f"request {source.request_id!r} has {source.num_written} written tokens; {num_tokens} cannot be shared"
            )
        [child] = self.manager.fork(source, target)
        try:
            self.manager.rewind(child, child.num_reserved - num_tokens)
        except Exception:
            self.manager.free(child)
            raise
        return child

    def _tokens_in(self, source: KVCacheHandle, num_blocks: int) -> int:
        """Tokens of the first whole blocks, at most those that are written."""
        size = self.manager.config.block_size
        blocks = min(as_count(num_blocks, "num_prefix_blocks", minimum=1), source.num_written // size)
        if not blocks:
            raise SequenceStateError(
                f"request {source.request_id!r} has {source.num_written} written tokens, not one whole block of {size}; "
                "write what is to be shared first (write_kv)"
            )
        return blocks * size

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate_blocks(self, handle: Hashable | KVCacheHandle, num_blocks: int) -> list[int]:
        """More blocks behind those of a request, without counting tokens; returns their ids."""
        found, size = self.handle(handle), self.manager.config.block_size
        before = found.num_blocks
        wanted = (before + as_count(num_blocks, "num_blocks")) * size
        self.manager.extend(found, 0, lookahead=wanted - found.num_reserved)
        return [int(block) for block in found.block_ids()[before:]]

    def free_blocks(self, block_ids: Any) -> None:
        """Refused: blocks belong to requests."""
        raise InvalidArgumentError(
            f"free_blocks({show(block_ids)}): blocks belong to requests, whose tables would go on naming them; "
            "deallocate(request) frees all of its blocks that nobody else reads"
        )

    def cow_copy(self, handle: Any, block_ids: Any) -> None:
        """Refused: the manager copies."""
        raise InvalidArgumentError(
            f"cow_copy({show(handle)}, {show(block_ids)}): the manager copies a shared block, with its bytes, when its next "
            "token gets a place: call extend(handle, n)"
        )

    def swap_out(self, *requests: Any) -> int:
        """Moves whole requests to the host; returns the blocks to copy (see `manager.take_copies`)."""
        return self.manager.swap_out(*map(self._whole_request, requests))

    def swap_in(self, *requests: Any) -> int:
        return self.manager.swap_in(*map(self._whole_request, requests))

    def _whole_request(self, request: Any) -> KVCacheHandle:
        if isinstance(request, (list, np.ndarray)):
            raise InvalidArgumentError(
                f"requests are swapped, not block ids ({show(request)}): swap_out(handle) and swap_in(handle) move blocks, "
                "bytes and table together"
            )
        return self.handle(request)

    def gpu_pool(self) -> BlockPool:
        """The blocks of the GPU tier, to look at."""
        return BlockPool(self)

    def check_pressure(self) -> MemoryPressure:
        return self.manager.inspect.pressure

    def set_pressure_callback(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Calls back with CRITICAL at every allocation that begins under critical pressure, before it takes blocks.

        A second callback replaces the first. `manager.on_memory_pressure` tells of every change of the level.
        """
        if not callable(callback) or not _takes_one(callback):
            raise InvalidArgumentError(
                f"set_pressure_callback takes a function of one argument, the pressure, got {show(callback)}"
            )
        self._callback = callback

    def _notify_pressure(self) -> None:
        """Before an allocation. The callback may free requests; what it raises is logged and goes no further."""
        if self._callback is not None and self.check_pressure() is MemoryPressure.CRITICAL:
            contain(partial(self._callback, MemoryPressure.CRITICAL))

    def gc(self) -> CacheGcStats:
        """Drops what has outlived its time to live, and then up to ten cached blocks of each pool that nobody uses."""
        started = time.perf_counter()
        freed = self.manager.cache.gc() * self.manager.config.block_bytes
        for pool in self.manager.config.pools:
            freed += self.manager.cache.evict(GC_BLOCKS, pool=pool.index) * pool.block_bytes
        gone = self._prefixes.forget_evicted()
        return CacheGcStats(freed, gone, (time.perf_counter() - started) * 1000)

    def free_block_count(self) -> int:
        """Free blocks, those that eviction could free included."""
        return self.stats().free_blocks

    def total_blocks(self) -> int:
        return self.stats().total_blocks

    def stats(self) -> CacheManagerStats:
        stats = self.manager.stats()
        pools = [pool for pool in stats.pools if pool.tier == Tier.GPU]
        hits, lookups = self._prefixes.hits_and_lookups()
        return CacheManagerStats(
            sum(pool.total * pool.block_bytes for pool in pools),
            sum(pool.referenced * pool.block_bytes for pool in pools),
            stats.num_sequences,
            sum(pool.total for pool in pools),
            sum(pool.available for pool in pools),
            hits / lookups if lookups else 0.0,
            sum(stats.evictions.values()),
            stats.requests + self._begun_by_sharing,
            stats.allocation_failures + stats.extend_failures,
        )

    def handle_stats(self, request: Hashable | KVCacheHandle) -> CacheHandleStats:
        """What one request holds now, wherever it is."""
        handle, config = self.handle(request), self.manager.config
        blocks, tokens = handle.num_blocks, handle.num_reserved
        places = blocks * config.block_size
        used = tokens / places if places else 0.0
        return CacheHandleStats(blocks * config.block_bytes, blocks, tokens, used, time.monotonic())


class FerrumKVCacheManager(FerrumCalls, CountingAdapter):
    """ferrum's calls on any manager; `PagedKvCacheManager` is made from ferrum's own configuration."""

    def allocate(self, request_id: Hashable, num_tokens: int | None = None, *, tokens: Any = None) -> KVCacheHandle:
        """Blocks for a number of tokens; or for the prompt's `tokens`, whose cached prefix is then reused."""
        self._notify_pressure()
        return super().allocate(request_id, num_tokens, tokens=tokens)

    def get_handle(self, request_id: Hashable) -> KVCacheHandle | None:
        """The handle of a live request; None where there is none."""
        try:
            return self.manager.get(request_id)
        except UnknownRequestError:
            return None

    def list_handles(self) -> list[tuple[Hashable, KVCacheHandle]]:
        return [(handle.request_id, handle) for handle in self.manager.handles]

    def share_prefix(self, source: Any, target: Hashable, num_tokens: int) -> KVCacheHandle:
        """A new request `target` that starts with the first `num_tokens` written tokens of `source`, in its blocks."""
        with self._source(source, target) as parent:
            return self._share_prefix_with_new(parent, target, num_tokens)

    def share_prefix_blocks(self, source: Any, target: Hashable, num_prefix_blocks: int) -> KVCacheHandle:
        """`share_prefix` by whole blocks, at most as many as `source` has written."""
        with self._source(source, target) as parent:
            return self._share_prefix_with_new(parent, target, self._tokens_in(parent, num_prefix_blocks))


def _takes_one(callback: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument; those that do not say how they are called can."""
    try:
        inspect.signature(callback).bind(MemoryPressure.CRITICAL)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
