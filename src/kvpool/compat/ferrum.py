"""ferrum's `PagedKvCacheManager`: prefixes with their last logits, shared prefixes, swapping, garbage collection."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from kvpool.blocks.arrays import as_count, as_token_array
from kvpool.blocks.handle import KVCacheHandle
from kvpool.blocks.hashing import ReuseScope, chain_digests, root_digest
from kvpool.compat.base import CountingSpelling
from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError, SequenceStateError, UnknownRequestError
from kvpool.manager import KVCacheManager
from kvpool.stats import MemoryPressure


class FoundPrefix(NamedTuple):
    """The cached beginning of a prompt. `prefix_id` is the digest that events use (None below one full block)."""

    num_tokens: int
    prefix_id: bytes | None
    last_logits: Any  # only when the whole prompt is cached and its logits were stored


class PrefixCacheStats(NamedTuple):
    """Hits, misses and evictions in blocks; prefixes are runs of the prefix tree."""

    hits: int
    misses: int
    evictions: int
    active_prefixes: int
    total_cached_tokens: int
    hit_rate: float


class CacheGcStats(NamedTuple):
    memory_freed: int  # bytes
    caches_freed: int  # blocks (positions) dropped
    gc_time_ms: float


class FerrumKVCacheManager(CountingSpelling):
    """find_prefix, store_prefix, share_prefix, evict_prefixes, swap_out, swap_in, gc, check_pressure and relatives."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__(manager)
        self._stop_callback: Callable[[], None] | None = None

    def deallocate(self, request_id: Hashable | KVCacheHandle) -> None:
        self.manager.free(self.handle(request_id))

    def get_handle(self, request_id: Hashable) -> KVCacheHandle | None:
        try:
            return self.manager.get(request_id)
        except UnknownRequestError:
            return None

    def list_handles(self) -> list[tuple[Hashable, KVCacheHandle]]:
        return [(handle.request_id, handle) for handle in self.manager.handles]

    # --- prefixes ----------------------------------------------------------------------------------------------------

    def find_prefix(self, tokens: Any) -> FoundPrefix | None:
        """The longest cached beginning of `tokens`; `allocate(..., tokens=tokens)` reuses it."""
        ids = as_token_array(tokens)
        match = self.manager.match_prefix(ids)
        if not match.num_tokens:
            return None
        size = self.manager.config.block_size
        digests = chain_digests(root_digest(ReuseScope()), ids[: match.num_blocks * size], size)
        return FoundPrefix(match.num_tokens, digests[-1] if digests else None, match.last_logits)

    def store_prefix(self, tokens: Any, handle: Hashable | KVCacheHandle, last_logits: Any = None) -> bool:
        """The keys and values of `tokens` are written in the blocks of `handle`: others may reuse them from now on.

        The cache owns the blocks, so they outlive the request. False when the logits could not be kept.
        """
        found, ids = self.handle(handle), as_token_array(tokens)
        known = found.token_ids[: len(ids)]
        if not np.array_equal(known, ids[: len(known)]):
            raise InvalidArgumentError(f"request {found.request_id!r} holds other tokens than those to store")
        if len(ids) > found.num_committed:
            self.manager.commit(found, ids[found.num_committed :])
        return last_logits is None or self.manager.store_last_logits(found, last_logits, len(ids))

    def share_prefix(self, source: Hashable | KVCacheHandle, target: Hashable, num_tokens: int) -> KVCacheHandle:
        """A new request `target` that starts with the first `num_tokens` written tokens of `source`, in its blocks."""
        parent = self.handle(source)
        as_count(num_tokens, "num_tokens", minimum=1)
        if num_tokens > parent.num_written:
            raise SequenceStateError(
                f"request {parent.request_id!r} has {parent.num_written} written tokens; {num_tokens} cannot be shared"
            )
        [child] = self.manager.fork(parent, target)
        try:
            self.manager.rewind(child, child.num_reserved - num_tokens)
        except Exception:
            self.manager.free(child)
            raise
        return child

    def evict_prefixes(self, count: int) -> int:
        """Evicts up to `count` cached blocks, the tail of the least valuable prefix first; returns how many."""
        return self.manager.evict(count)

    def clear_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()

    def prefix_cache_stats(self) -> PrefixCacheStats:
        stats = self.manager.stats()
        hits, misses = sum(stats.hit_blocks.values()), stats.miss_blocks
        cached = stats.pool(0, Tier.GPU).cached * self.manager.config.block_size
        rate = hits / (hits + misses) if hits + misses else 0.0
        return PrefixCacheStats(hits, misses, sum(stats.evictions.values()), stats.num_cached_runs, cached, rate)

    # --- memory ------------------------------------------------------------------------------------------------------

    def swap_out(self, *requests: Hashable | KVCacheHandle) -> int:
        """Moves whole requests to the host; returns the blocks to copy (see `manager.take_copies`)."""
        return self.manager.swap_out(*map(self.handle, requests))

    def swap_in(self, *requests: Hashable | KVCacheHandle) -> int:
        return self.manager.swap_in(*map(self.handle, requests))

    def check_pressure(self) -> MemoryPressure:
        return self.manager.pressure

    def set_pressure_callback(self, callback: Callable[[MemoryPressure], None]) -> None:
        """One callback with the new level; a second call replaces the first."""
        if self._stop_callback is not None:
            self._stop_callback()
        self._stop_callback = self.manager.on_memory_pressure(lambda change: callback(change.level))

    def gc(self) -> CacheGcStats:
        """Drops what has outlived its time to live."""
        started = time.perf_counter()
        dropped = self.manager.gc()
        milliseconds = (time.perf_counter() - started) * 1000
        return CacheGcStats(dropped * self.manager.config.block_bytes, dropped, milliseconds)
