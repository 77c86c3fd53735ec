"""ferrum's `PagedKvCacheManager`: prefixes with their last logits, shared prefixes, swapping, bytes token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.compat.ferrum_handle import CacheHandleStats
from kvpool.compat.ferrum_prefixes import StoredPrefixes, check_evict_count
from kvpool.compat.spelling import CountingSpelling, Spelling
from kvpool.config import Tier
from kvpool.errors import SequenceStateError, UnknownRequestError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import as_count, as_token_array
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.scope import ReuseScope
from kvpool.sequences.handle import KVCacheHandle
from kvpool.stats import MemoryPressure

if TYPE_CHECKING:
    from torch import Tensor


class FoundPrefix(NamedTuple):
    """The cached beginning of a prompt. `prefix_id` is the digest that events use (None below one full block)."""

    num_tokens: int
    prefix_id: bytes | None
    last_logits: Any  # only when the whole prompt is cached and its logits were stored


class PrefixCacheStats(NamedTuple):
    """Hits, misses and evictions in blocks. Prefixes are those of `store_prefix` that are still cached, in use or not."""

    hits: int
    misses: int
    evictions: int
    active_prefixes: int
    total_cached_tokens: int
    hit_rate: float


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
    """What a collection freed."""

    memory_freed: int  # bytes
    caches_freed: int  # blocks (positions) dropped
    gc_time_ms: float


class FerrumCalls(Spelling):
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
        self._prefixes = StoredPrefixes(manager, max_prefixes, min_prefix_length)
        self._stop_callback: Callable[[], None] | None = None

    def deallocate(self, request_id: Hashable | KVCacheHandle) -> None:
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
        keys, values = self.read(handle, layer, start_token, num_tokens)
        return keys.float().reshape(-1), None if values is None else values.float().reshape(-1)

    # --- prefixes ----------------------------------------------------------------------------------------------------

    def find_prefix(self, tokens: Any) -> FoundPrefix | None:
        """The longest cached beginning of `tokens`; `allocate(..., tokens=tokens)` reuses it."""
        ids = as_token_array(tokens)
        match = self.manager.match_prefix(ids)
        if not match.num_tokens or match.num_tokens < self._prefixes.min_length:
            return None
        self._prefixes.touch(ids)
        size = self.manager.config.block_size
        digests = chain_digests(root_digest(ReuseScope()), ids[: match.num_blocks * size], size)
        return FoundPrefix(match.num_tokens, digests[-1] if digests else None, match.last_logits)

    def store_prefix(self, tokens: Any, handle: Hashable | KVCacheHandle, last_logits: Any = None) -> bool:
        """The keys and values of `tokens` are written in the blocks of `handle`: others may reuse them from now on.

        The cache owns the blocks, so they outlive the request. False when the logits could not be kept, or when the prefix
        is shorter than `min_prefix_length` or the cache is off: then nothing happens.
        """
        found, ids = self.handle(handle), as_token_array(tokens)
        if len(ids) < self._prefixes.min_length or not self.manager.config.enable_prefix_caching:
            return False
        self.commit_known(found, ids)
        self._prefixes.add(ids)
        return last_logits is None or self.manager.store_last_logits(found, last_logits, len(ids))

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
        return min(as_count(num_blocks, "num_prefix_blocks"), source.num_written // size) * size

    def evict_prefixes(self, count: int) -> int:
        """Forgets up to `count` stored prefixes, the one not used for longest first; returns how many.

        Blocks that only they start with become free; live requests keep theirs and go on, but publish nothing more there.
        """
        return self._prefixes.evict(check_evict_count(count))

    def clear_prefix_cache(self) -> None:
        self._prefixes.clear()
        self.manager.reset_prefix_cache()

    def prefix_cache_stats(self) -> PrefixCacheStats:
        stats = self.manager.stats()
        hits, misses = sum(stats.hit_blocks.values()), stats.miss_blocks
        cached = [length for length in self._prefixes.cached_lengths() if length]
        rate = hits / (hits + misses) if hits + misses else 0.0
        return PrefixCacheStats(hits, misses, sum(stats.evictions.values()), len(cached), sum(cached), rate)

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate_blocks(self, handle: Hashable | KVCacheHandle, num_blocks: int) -> list[int]:
        """More blocks behind those of a request, empty ones first filled up; returns their ids."""
        found, size = self.handle(handle), self.manager.config.block_size
        before = found.num_blocks
        wanted = (before + as_count(num_blocks, "num_blocks")) * size - found.num_reserved
        self.manager.extend(found, wanted)
        return [int(block) for block in found.block_ids()[before:]]

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

    def free_block_count(self) -> int:
        """Free blocks, those that eviction could free included."""
        return self.stats().free_blocks

    def total_blocks(self) -> int:
        return self.stats().total_blocks

    def stats(self) -> CacheManagerStats:
        stats = self.manager.stats()
        pools = [pool for pool in stats.pools if pool.tier == Tier.GPU]
        hits = sum(stats.hit_blocks.values())
        return CacheManagerStats(
            sum(pool.total * pool.block_bytes for pool in pools),
            sum(pool.referenced * pool.block_bytes for pool in pools),
            stats.num_sequences,
            sum(pool.total for pool in pools),
            sum(pool.free + pool.cached - pool.pinned for pool in pools),
            hits / stats.prompt_blocks if stats.prompt_blocks else 0.0,
            sum(stats.evictions.values()),
            stats.requests,
            stats.allocation_failures + stats.extend_failures,
        )

    def handle_stats(self, request: Hashable | KVCacheHandle) -> CacheHandleStats:
        """What one request holds now, wherever it is."""
        handle, config = self.handle(request), self.manager.config
        blocks, tokens = handle.num_blocks, handle.num_reserved
        places = blocks * config.block_size
        used = tokens / places if places else 0.0
        return CacheHandleStats(blocks * config.block_bytes, blocks, tokens, used, time.monotonic())


class FerrumKVCacheManager(FerrumCalls, CountingSpelling):
    """ferrum's calls on any manager; `PagedKvCacheManager` is made from ferrum's own configuration."""

    def get_handle(self, request_id: Hashable) -> KVCacheHandle | None:
        """The handle of a live request; None where there is none."""
        try:
            return self.manager.get(request_id)
        except UnknownRequestError:
            return None

    def list_handles(self) -> list[tuple[Hashable, KVCacheHandle]]:
        return [(handle.request_id, handle) for handle in self.manager.handles]

    def share_prefix(self, source: Hashable | KVCacheHandle, target: Hashable, num_tokens: int) -> KVCacheHandle:
        """A new request `target` that starts with the first `num_tokens` written tokens of `source`, in its blocks."""
        return self._share_prefix(self.handle(source), target, num_tokens)

    def share_prefix_blocks(
        self, source: Hashable | KVCacheHandle, target: Hashable, num_prefix_blocks: int
    ) -> KVCacheHandle:
        """`share_prefix` by whole blocks, at most as many as `source` has written."""
        return self.share_prefix(source, target, self._tokens_in(self.handle(source), num_prefix_blocks))
