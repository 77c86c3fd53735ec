"""ferrum's block pool, to look at, and its prefix cache: at most so many prefixes by name, over what the manager caches."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kvpool.checks import as_count, check_int, show
from kvpool.compat.adapter import Adapter
from kvpool.config import Tier
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.manager import KVCacheManager
from kvpool.manager.inspection import KVCacheBlock
from kvpool.pools.arrays import Int32Array, as_token_array
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.scope import ReuseScope

if TYPE_CHECKING:
    from torch import Tensor


class BlockPoolStats(NamedTuple):
    """Blocks of the pool. All of them exist from the start; free ones include those that eviction could free."""

    total_blocks: int
    free_blocks: int
    allocated_blocks: int
    max_blocks: int


class PoolOwner(Protocol):
    """What a pool asks of the manager that it belongs to."""

    manager: KVCacheManager

    def write_kv(self, handle: Any, layer: int, token_position: int, key: Any, value: Any = None) -> None: ...
    def read_kv(self, handle: Any, layer: int, start_token: int, num_tokens: int) -> tuple[Tensor, Tensor | None]: ...


class BlockPool:
    """The GPU blocks of a manager. They are handed out and freed with requests, never one by one."""

    def __init__(self, owner: PoolOwner) -> None:
        if not isinstance(owner, Adapter):
            raise InvalidArgumentError(f"a pool belongs to a manager, whose gpu_pool() it is, got {show(owner)}")
        self._owner = owner

    def stats(self) -> BlockPoolStats:
        pool = self._owner.manager.stats().pool(0, Tier.GPU)
        return BlockPoolStats(pool.total, pool.available, pool.referenced, pool.total)

    def get_block(self, physical_id: int) -> KVCacheBlock | None:
        """Who holds a block, with its reference count; None past the end of the pool."""
        block_id = as_count(physical_id, "physical_id")
        return (
            self._owner.manager.inspect.block(block_id) if block_id < self._owner.manager.inspect.num_blocks() else None
        )

    def write_kv_slot(self, physical_id: int, layer: int, slot: int, key: Any, value: Any = None) -> None:
        """`write_kv` by block and slot, for the request that holds the block."""
        request, position = self._place(physical_id, slot)
        self._owner.write_kv(request, layer, position, key, value)

    def read_kv_slot(self, physical_id: int, layer: int, slot: int) -> tuple[Tensor, Tensor | None]:
        """`read_kv` of one token by block and slot, for a request that holds the block."""
        request, position = self._place(physical_id, slot)
        return self._owner.read_kv(request, layer, position, 1)

    def _place(self, physical_id: int, slot: int) -> tuple[Any, int]:
        size = self._owner.manager.config.block_size
        slot = as_count(slot, "slot", maximum=size - 1)
        block = self.get_block(physical_id)
        if block is None or not block.request_ids or block.position is None:
            raise SequenceStateError(
                f"no live request holds block {show(physical_id)}; read and write blocks of a request"
            )
        return block.request_ids[0], block.position + slot

    def evict_blocks(self, max_blocks: int) -> int:
        """Frees up to `max_blocks` cached blocks that nobody uses; returns how many."""
        return self._owner.manager.cache.evict(as_count(max_blocks, "max_blocks"))

    def allocate(self) -> None:
        """Refused: blocks belong to requests."""
        raise InvalidArgumentError(
            "a pool hands out no single blocks: allocate(AllocationRequest(...)) or allocate_blocks(handle, n) give them "
            "to a request"
        )

    def deallocate(self, physical_id: int) -> None:
        """Refused: blocks belong to requests."""
        raise InvalidArgumentError(
            f"a pool takes no single blocks back, such as {show(physical_id)}: deallocate(request) frees those of a request"
        )


class CachedPrefix:
    """The cached beginning of a prompt, as a source for `share_prefix_blocks`. It holds no blocks, so it may be evicted."""

    def __init__(self, adapter: Adapter, tokens: Int32Array, num_tokens: int) -> None:
        self._adapter = adapter
        self._tokens = tokens
        self._num_tokens = num_tokens

    def num_tokens(self) -> int:
        """Tokens that were cached when it was found."""
        return self._num_tokens

    def is_valid(self) -> bool:
        """Whether all of them are still cached."""
        return self._adapter.manager.match_prefix(self._tokens).num_tokens >= self._num_tokens

    @contextmanager
    def held(self, request_id: Hashable) -> Iterator[KVCacheHandle]:
        """A request that holds what is still cached, for as long as the block of code runs."""
        manager = self._adapter.manager
        handle = manager.allocate(request_id, self._tokens, reserve=0, lease=True)
        try:
            yield handle
        finally:
            manager.free(handle)


class FoundPrefix(NamedTuple):
    """The cached beginning of a prompt. `prefix_id` is the digest that events use (None below one full block)."""

    prefix_id: bytes | None
    kv_handle: CachedPrefix
    last_logits: Any  # only when the whole prompt is cached and its logits were stored
    matched_length: int


class PrefixCacheStats(NamedTuple):
    """Hits, misses and evictions in blocks. Prefixes are those of `store_prefix` that are still cached, in use or not."""

    hits: int
    misses: int
    evictions: int
    active_prefixes: int
    total_cached_tokens: int
    hit_rate: float


class PrefixCache:
    """The prefixes that were stored. Their blocks belong to the manager's cache, which may evict them earlier.

    At most `max_prefixes` are kept (None: as many as there is room for); what is shorter than `min_length` tokens is neither
    stored nor found.
    """

    def __init__(self, adapter: Adapter, max_prefixes: int | None, min_length: int) -> None:
        if not isinstance(adapter, Adapter):
            raise InvalidArgumentError(
                f"a prefix cache belongs to a manager, whose prefix_cache() it is, got {show(adapter)}"
            )
        if max_prefixes is not None:
            check_int(max_prefixes, "max_prefixes", 0, 2**31)
        check_int(min_length, "min_prefix_length", 0, 2**31)
        self._adapter = adapter
        self.manager = adapter.manager
        self.max_prefixes = max_prefixes
        self.min_length = min_length
        self._lock = threading.Lock()  # of the names: nobody asks the manager under it
        self._tokens: OrderedDict[bytes, Int32Array] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._lookups = self._hits = 0  # of `find_prefix`, in blocks; the manager counts those of allocations

    def find_prefix(self, tokens: Any) -> FoundPrefix | None:
        """The longest cached beginning of `tokens`; `allocate(..., tokens=tokens)` reuses it."""
        ids = as_token_array(tokens).copy()
        match, size = self.manager.match_prefix(ids), self.manager.config.block_size
        found = match.num_tokens > 0 and match.num_tokens >= self.min_length
        is_whole = match.num_tokens + 1 == len(ids)  # of a prompt's own last token nothing is reused
        with self._lock:
            self._lookups += len(ids) // size
            self._hits += (match.num_tokens + is_whole) // size * found
        if not found:
            return None
        self._touch(ids)
        digests = chain_digests(root_digest(ReuseScope()), ids[: match.num_blocks * size], size)
        handle = CachedPrefix(self._adapter, ids, match.num_tokens)
        return FoundPrefix(digests[-1] if digests else None, handle, match.last_logits, match.num_tokens)

    def store_prefix(self, tokens: Any, kv_handle: Hashable | KVCacheHandle, last_logits: Any = None) -> bool:
        """The keys and values of `tokens` are written in the blocks of `kv_handle`: others may reuse them from now on.

        The cache owns the blocks, so they outlive the request. False when the prefix is shorter than `min_length` or none
        is kept (then nothing happens), when it fills no block, when the request publishes nothing because what it began with
        was evicted, and when the logits could not be kept.
        """
        found, ids = self._adapter.handle(kv_handle), as_token_array(tokens)
        if len(ids) < self.min_length or self.max_prefixes == 0:
            return False
        self._adapter.commit_known(found, ids)
        size = self.manager.config.block_size
        if self._cached_length(ids) < max(len(ids) // size, 1) * size:
            return False
        self._add(ids)
        return last_logits is None or self.manager.store_last_logits(found, last_logits, len(ids))

    def stats(self) -> PrefixCacheStats:
        (hits, lookups), cached = self.hits_and_lookups(), self._cached_lengths()
        evictions = sum(self.manager.stats().evictions.values())
        rate = hits / lookups if lookups else 0.0
        return PrefixCacheStats(hits, lookups - hits, evictions, len(cached), sum(cached), rate)

    def hits_and_lookups(self) -> tuple[int, int]:
        """Blocks of prompts that were found, and all that were looked for: by allocations, and by `find_prefix`."""
        stats = self.manager.stats()
        with self._lock:
            return sum(stats.hit_blocks.values()) + self._hits, stats.prompt_blocks + self._lookups

    def evict_n(self, count: int) -> int:
        """Forgets up to `count` prefixes, those not used for longest first, with the blocks that no other one starts with.

        Those that the cache had no room for any more do not count.
        """
        count = as_count(count, "count")
        evicted = 0
        while evicted < count and (was_cached := self._forget_oldest()) is not None:
            evicted += was_cached
        return evicted

    def clear(self) -> None:
        """Forgets everything cached, stored by name or not."""
        with self._lock:
            self._tokens.clear()
            self._lengths.clear()
        self.manager.cache.reset()

    def forget_evicted(self) -> int:
        """Forgets the prefixes of which nothing is cached any more; returns how many."""
        gone = [tokens for tokens in self._stored() if not self._cached_length(tokens)]
        with self._lock:
            return sum(self._forget(tokens) for tokens in gone)

    def _stored(self) -> list[Int32Array]:
        with self._lock:
            return list(self._tokens.values())

    def _forget(self, tokens: Int32Array) -> bool:
        """Whether this prefix was there until now."""
        known = self._tokens.pop(tokens.tobytes(), None) is not None
        self._lengths -= Counter([len(tokens)] * known)
        return known

    def _add(self, tokens: Int32Array) -> None:
        """Notes a stored prefix as the one used last; the one not used for longest gives way."""
        key = tokens.tobytes()
        with self._lock:
            if key not in self._tokens:
                self._tokens[key] = tokens.copy()
                self._lengths[len(tokens)] += 1
            self._tokens.move_to_end(key)
            is_full = self.max_prefixes is not None and len(self._tokens) > self.max_prefixes
        if is_full:
            self._forget_oldest()

    def _touch(self, tokens: Int32Array) -> None:
        """A prompt was looked up: the stored prefixes that it starts with count as used now."""
        with self._lock:
            for length in sorted(self._lengths):
                key = tokens[:length].tobytes()
                if key in self._tokens:
                    self._tokens.move_to_end(key)

    def _forget_oldest(self) -> bool | None:
        """Whether anything of it was still cached; None where no prefix is stored."""
        with self._lock:
            if not self._tokens:
                return None
            tokens = next(iter(self._tokens.values()))
            self._forget(tokens)
        was_cached = self._cached_length(tokens) > 0
        size = self.manager.config.block_size
        shared = max((_common_blocks(tokens, other, size) for other in self._stored()), default=0)
        if shared < len(tokens) // size:
            self.manager.cache.invalidate(tokens[: (shared + 1) * size])
        return was_cached

    def _cached_lengths(self) -> list[int]:
        """How many tokens of every stored prefix are in the cache now, also while requests use them."""
        lengths = (self._cached_length(tokens) for tokens in self._stored())
        return [length for length in lengths if length]

    def _cached_length(self, tokens: Int32Array) -> int:
        longer = np.append(tokens, np.int32(0))  # of a prompt's own last token nothing is reused
        return min(len(tokens), self.manager.match_prefix(longer).num_tokens)


def _common_blocks(left: Int32Array, right: Int32Array, size: int) -> int:
    """Whole blocks that two token runs begin with alike."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return (int(differs.argmax()) if differs.any() else length) // size


def refuse_prefix(request: object) -> None:
    """A found prefix is no request: its blocks may be evicted, so nothing can be read or written through it."""
    if isinstance(request, CachedPrefix):
        raise InvalidArgumentError(
            "the kv_handle of find_prefix holds no blocks: share_prefix_blocks(kv_handle, target, n) gives a request "
            "the cached ones, and so does allocate with tokens"
        )
