"""Everything the control plane knows, in one place, and the few helpers that all operations share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from kvpool.checks import as_count
from kvpool.config import KVCacheConfig, Tier
from kvpool.config.layers import ceil_div
from kvpool.errors import (
    InvalidArgumentError,
    NeverFitsError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.events import EventLog, PoolSize
from kvpool.eviction import EvictionPolicy
from kvpool.pools.groups import StateGroup, make_groups
from kvpool.pools.pool import GPU, BlockPool, CopyOp
from kvpool.pools.rows import SequenceRows
from kvpool.pools.symbols import Fresh, numbers_in
from kvpool.prefix.cache import PrefixCache
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import numbers_in_tree
from kvpool.scope import ReuseScope
from kvpool.sequences.handle import GivenHandle, KVCacheHandle, Rows
from kvpool.sequences.publish import InFlight, Publisher
from kvpool.stats import Counters, EvictionReason

LOCAL_TIERS = (GPU, Tier.HOST, Tier.DISK)


class AllocStatus(str, Enum):
    """Whether a request fits."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Admission(NamedTuple):
    """The answer of `can_allocate` and its relatives. True in a condition exactly when the status is OK."""

    status: AllocStatus
    reason: str
    blocks_needed: tuple[int, ...]  # per pool
    blocks_available: tuple[int, ...]  # per pool, free or evictable for this request
    num_cached_tokens: int = 0

    def __bool__(self) -> bool:
        return self.status is AllocStatus.OK


def common_tenant(handles: Sequence[KVCacheHandle]) -> str | None:
    """The tenant of all these sequences, or None if there are several: then nobody's guarantee gives way."""
    tenants = {handle.scope.tenant for handle in handles}
    return tenants.pop() if len(tenants) == 1 else None


class CacheState:
    """Pools, rows and tree. The operations on it live beside it, one file for each part of a sequence's life."""

    def __init__(
        self,
        config: KVCacheConfig,
        new_policy: Callable[[], EvictionPolicy],
        clock: Callable[[], float],
        events: EventLog,
        lock: threading.RLock,
    ) -> None:
        self.config = config
        self.max_seq_len = config.max_seq_len  # these are asked for in every operation
        self.default_ttl = config.default_ttl
        self.caches_prefixes = config.enable_prefix_caching
        self.counters = Counters()
        self.copies: list[CopyOp] = []
        self.requests: dict[Hashable, KVCacheHandle] = {}
        # Rows that have the same blocks for an encoder's named input of so many tokens
        self.encoded: dict[tuple[ReuseScope, int], set[int]] = {}
        columns = 128 if config.max_seq_len is None else min(1024, ceil_div(config.max_seq_len, config.block_size))
        self.pools: list[list[BlockPool]] = [
            [BlockPool(spec.index, tier, spec.num_blocks.get(tier, 0)) for tier in LOCAL_TIERS] for spec in config.pools
        ]
        self.groups = make_groups(config.groups, config.block_size, self.pools)
        self.rows: Rows = SequenceRows(self.groups, config.block_size, lock, num_columns=max(columns, 1))
        self.context = CacheContext(
            config.block_size, self.groups, self.pools, self.rows, self.counters, events, self.copies, clock
        )
        self.cache = PrefixCache(
            self.context,
            new_policy,
            config.offload_on_evict,
            config.offload_min_priority,
            config.host_write,
            config.block_depth_cost,
        )
        self.in_flight = InFlight(self.context, self.requests)
        self.publisher = Publisher(self.cache, self.in_flight)
        self.growing = self.context.cached
        self.fixed = [group for group in self.groups if not group.grows]
        self.stateful = next((group for group in self.groups if isinstance(group, StateGroup)), None)
        # How many blocks one more column of the tables costs in each pool, checkpoints apart.
        self.per_position = [0] * len(self.pools)
        for group in self.growing:
            self.per_position[group.pool] += not group.keeps_state
        self.gpu_pools = [tiers[GPU] for tiers in self.pools]
        self._watermarks: dict[tuple[int, int], int] = {}  # by pool and its size: exact fractions take a while
        self.is_simple = len(self.groups) == 1 and len(self.context.full) == 1

    def pool(self, index: Any, tier: Any) -> BlockPool:
        """The pool of a user's choice."""
        if not isinstance(tier, Tier) or tier == Tier.REMOTE:
            raise InvalidArgumentError(f"pools exist on GPU, HOST and DISK, not on {tier!r}")
        return self.pools[as_count(index, "pool", maximum=len(self.pools) - 1)][tier]

    def row_of(self, handle: GivenHandle) -> int:
        """The row of a live handle of this manager that is on the GPU."""
        if type(handle) is KVCacheHandle and handle.row >= 0 and handle.swapped is None and handle._rows is self.rows:
            return handle.row
        self.any_row_of(handle)
        raise SequenceStateError(f"request {handle.request_id!r} is swapped out; call swap_in first")

    def any_row_of(self, handle: GivenHandle) -> int:
        """The row of a live handle of this manager, swapped out or not."""
        if not isinstance(handle, KVCacheHandle):
            raise UnknownRequestError(f"expected a KVCacheHandle from allocate() or fork(), got {handle!r}")
        row = handle.row
        if row < 0:
            raise UnknownRequestError(f"request {handle.request_id!r} was freed; its handle cannot be used any more")
        if handle._rows is not self.rows:
            raise UnknownRequestError(f"the handle of request {handle.request_id!r} belongs to another manager")
        return row

    def leave_encoded(self, handle: KVCacheHandle, row: int) -> None:
        """A row has no blocks for its encoder's input any more."""
        key = handle.scope, handle.encoder_tokens
        holders = self.encoded.get(key)
        if holders is not None:
            holders.discard(row)
            if not holders:
                del self.encoded[key]

    def keep_symbols(self, fresh: Fresh) -> None:
        """Notes the symbols of multimodal items that are in a row now, and forgets old ones if there are too many."""
        symbols = self.rows.symbols
        if symbols.keep(fresh):
            symbols.forget_all_but(self.numbers_in_use())

    def numbers_in_use(self) -> set[int]:
        """The numbers of all symbols in rows and in the tree. Looks at every token."""
        nodes = [node for root in self.cache.tree.roots.values() for node in root.subtree()]
        for node in nodes:
            self.context.sync(node)
        used = numbers_in_tree(nodes)
        for row in self.rows.live_rows():
            used |= numbers_in(self.rows.token_ids(row))
        return used

    def watermark(self, index: int) -> int:
        """Blocks of a GPU pool, as large as it is now, that admission leaves free."""
        size = index, self.gpu_pools[index].num_blocks
        mark = self._watermarks.get(size)
        if mark is None:
            mark = self._watermarks[size] = self.config.watermark_blocks(*size)
        return mark

    def pool_sizes(self) -> tuple[PoolSize, ...]:
        """How many blocks each layer group has on each tier, for subscribers."""
        return tuple(
            PoolSize(group.index, tier, self.pools[group.pool][tier].num_blocks)
            for group in self.groups
            for tier in LOCAL_TIERS
        )

    def needs(self, num_columns: int, num_states: int) -> list[int]:
        """Blocks per GPU pool for so many more columns of the tables, and states in some of them."""
        needs = [num_columns * per for per in self.per_position]
        if self.stateful is not None:
            needs[self.stateful.pool] += num_states
        return needs

    def supply(self, tenant: str | None) -> list[int]:
        """Blocks per GPU pool that are free or that a request of `tenant` may have evicted."""
        return [self.cache.orders.available(pool, tenant) for pool in self.gpu_pools]

    def require(self, needs: list[int], tenant: str | None, what: str) -> None:
        """Raises, before anything changes, if the GPU pools cannot serve `needs`; then evicts to make room."""
        for pool, need in zip(self.gpu_pools, needs, strict=True):
            if need > pool.num_free and need > (available := self.cache.orders.available(pool, tenant)):
                raise self.shortage(pool, need, available, what)
        for pool, need in zip(self.gpu_pools, needs, strict=True):
            self.cache.make_room(pool, need, tenant)

    def require_each(self, needs: dict[str, list[int]], what: str) -> None:
        """`require` for sequences of several tenants: what is guaranteed to a tenant gives way to its own sequences only."""
        quotas = self.cache.orders.quotas
        totals = [sum(of_tenant) for of_tenant in zip(*needs.values(), strict=True)]
        for pool, total, shared in zip(self.gpu_pools, totals, self.supply(None), strict=True):
            own = (min(n[pool.index], quotas[t].protected(pool.index)) for t, n in needs.items() if t in quotas)
            available = shared + sum(own)
            if total > available:
                raise self.shortage(pool, total, available, what)
        self.make_room_for_each(needs)

    def make_room_for_each(self, needs: dict[str, list[int]]) -> None:
        """Evicts until the needs of all tenants are free. The caller has checked that enough is evictable."""
        for pool in self.gpu_pools:
            missing = sum(of_tenant[pool.index] for of_tenant in needs.values()) - pool.num_free
            of_tenants = [(tenant, of_tenant[pool.index]) for tenant, of_tenant in needs.items()]
            for tenant, most in of_tenants if len(needs) == 1 else [(None, missing), *of_tenants]:
                if missing > 0:
                    missing -= self.cache.evict(pool, min(missing, most), tenant, EvictionReason.CAPACITY)

    def refuse_shortage(self, needs: list[int], supply: list[int], what: str) -> None:
        """Raises for the first GPU pool that cannot serve what an operation needs."""
        for pool, need, have in zip(self.gpu_pools, needs, supply, strict=True):
            if need > have:
                raise self.shortage(pool, need, have, what)

    def shortage(self, pool: BlockPool, need: int, available: int, what: str) -> OutOfBlocksError:
        """The error for a pool that cannot serve `need` blocks."""
        if need > pool.num_blocks:
            return NeverFitsError(
                f"{what} needs {need} blocks of pool {pool.index} on {pool.tier.name}, which has {pool.num_blocks} in all "
                f"({pool.num_blocks * self.context.block_size} tokens); use a larger pool or a shorter sequence"
            )
        return OutOfBlocksError(
            f"{what} needs {need} blocks of pool {pool.index} on {pool.tier.name}; {available} of {pool.num_blocks} are free "
            f"or evictable ({pool.num_referenced} are in use, {pool.num_pinned} pinned); free or swap out requests first"
        )
