"""How many blocks running sequences are promised, and which requests can never fit. Nothing here changes the manager.

Requests cannot use blocks that are guaranteed to another tenant.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvpool.config import LayerGroup, Tier
from kvpool.config.layers import MAX_TOKENS, ceil_div
from kvpool.core.cache import Admission
from kvpool.kinds import kind_of
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int64Array
from kvpool.scheduling.request import Request, ScheduledSequence
from kvpool.scheduling.running import Lanes
from kvpool.scheduling.scheduler_config import CapacityMode, SchedulerConfig
from kvpool.scope import ReuseScope

SPARE_WINDOW_BLOCKS = 2  # a window moves on when a step is committed: until then its last blocks are held


class Supply:
    """How many blocks of each GPU pool are free or evictable, beside what is guaranteed to tenants."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.num_pools = len(manager.config.pools)

    def of(self, tenant: str) -> tuple[int, ...]:
        """What requests of a tenant may take."""
        return self.manager.can_allocate(num_tokens=1, scope=ReuseScope(tenant=tenant)).blocks_available

    def room(self, admission: Admission, tenant: str, running: Iterable[ScheduledSequence]) -> tuple[int, ...]:
        """Blocks per pool into which an admission and all promises, also those to other tenants, must fit together.

        A tenant takes free blocks before it evicts cached blocks of its own. So all promises together must fit into what is
        available to each tenant that has one.
        """
        have = admission.blocks_available
        quotas = self.manager.cache.quotas()
        others = {sequence.request.scope.tenant for sequence in running} - {tenant} if quotas else set()
        if not others:
            return have
        before, least = self.of(tenant), list(have)
        for pool in range(self.num_pools):
            kept = quotas[tenant].protected(pool, before[pool] - have[pool]) if tenant in quotas else 0
            own = min(quotas[other].protected(pool) if other in quotas else 0 for other in others)
            least[pool] += min(0, own - kept)
        return tuple(least)

    def num_served(self, needs: list[tuple[str, tuple[int, ...]]]) -> int:
        """How many of these needs, (tenant, blocks per pool) each, can be met in this order."""
        quotas = self.manager.cache.quotas()
        pools = range(self.num_pools)
        own = {tenant: [quota.protected(pool) for pool in pools] for tenant, quota in quotas.items()}
        shared = list(self.of(""))
        for pool, kept in enumerate(own.get("", [])):
            shared[pool] -= kept
        for position, (tenant, of_one) in enumerate(needs):
            for pool, need in enumerate(of_one):
                of_own = min(need, own[tenant][pool]) if tenant in own else 0
                if of_own:
                    own[tenant][pool] -= of_own
                shared[pool] -= need - of_own
            if min(shared) < 0:
                return position
        return len(needs)


class Capacity:
    """Promises made at admission, in blocks per pool.

    A running sequence was promised places for its known tokens, or, in guaranteed mode, for all it may generate. What it has
    not taken yet is not available to others, although it is free or evictable.
    """

    def __init__(self, manager: KVCacheManager, config: SchedulerConfig) -> None:
        self.manager = manager
        self.config = config
        self.supply = Supply(manager)
        self.num_pools = len(manager.config.pools)
        self.guaranteed = config.capacity is CapacityMode.GUARANTEED
        self._growing = [group for group in manager.config.groups if kind_of(group).grows]
        self._chunk_blocks = ceil_div(config.chunk_tokens, self.manager.config.block_size) + SPARE_WINDOW_BLOCKS

    def horizon(self, sequence: ScheduledSequence) -> int:
        """Tokens that a sequence is promised places for when it is admitted."""
        return sequence.request.num_places if self.guaranteed else len(sequence.tokens)

    def promise(self, lanes: Lanes, sequence: ScheduledSequence) -> None:
        """Records what a sequence on the GPU is promised."""
        lanes.promised[sequence.lane] = self.horizon(sequence)
        lanes.spare_blocks[sequence.lane] = self.spare_blocks(sequence)

    def spare_blocks(self, sequence: ScheduledSequence) -> int:
        """Blocks on top of its own that a sequence is promised: for samples that will branch off, or copies for forks."""
        request = sequence.request
        if request.n == 1:
            return 0
        if sequence.group.branched or not self.guaranteed:
            return 1
        of_each = (
            ceil_div(request.num_places, self.manager.config.block_size)
            - len(request.prompt) // self.manager.config.block_size
        )
        return (request.n - 1) * of_each + 1

    def outstanding(self, lanes: Lanes) -> list[int]:
        """Blocks per pool that all running sequences may still take by what they were promised."""
        size = self.manager.config.block_size
        blocks = (lanes.promised + (size - 1)) // size - (lanes.places + (size - 1)) // size
        np.maximum(blocks, 0, out=blocks)
        blocks += lanes.spare_blocks
        return self._per_pool(blocks)

    def future(self, sequence: ScheduledSequence, num_places: int) -> list[int]:
        """What `outstanding` will count for a sequence that is admitted with `num_places` places."""
        size = self.manager.config.block_size
        blocks = max(0, ceil_div(self.horizon(sequence), size) - ceil_div(num_places, size))
        return self._per_pool(np.array([blocks + self.spare_blocks(sequence)]))

    def _per_pool(self, blocks: Int64Array) -> list[int]:
        """Converts columns of the block table to blocks of each pool. A window holds a limited number of blocks."""
        needs = [0] * self.num_pools
        for group in self._growing:
            limit = self._window_limit(group)
            needs[group.pool] += int((blocks if limit is None else np.minimum(blocks, limit)).sum())
        return needs

    def _window_limit(self, group: LayerGroup) -> int | None:
        """The most blocks that a sequence of any length holds in a windowed group."""
        return group.max_live_blocks(MAX_TOKENS) + self._chunk_blocks if kind_of(group).by_block else None

    def why_never(self, request: Request) -> str | None:
        """Why a request can never be completed, even with all GPU blocks that are not guaranteed to other tenants."""
        config = self.manager.config
        if config.max_seq_len is not None and request.num_places > config.max_seq_len:
            return (
                f"its prompt of {len(request.prompt)} and {request.max_new_tokens} new tokens are over "
                f"max_seq_len={config.max_seq_len}"
            )
        limits, longest = self.config, max((stop - start for start, stop in request.together), default=0)
        if longest > limits.max_tokens_per_step - limits.max_sequences + 1:
            return (
                f"a step must compute {longest} of its tokens at once, because they see one another, beside a token of each "
                f"other sequence; use SchedulerConfig(max_tokens_per_step={longest + limits.max_sequences - 1}) or fewer "
                "max_sequences"
            )
        if request.cross_tokens and len(self._growing) == len(config.groups):
            return f"cross_tokens={request.cross_tokens}, but no layer of this model is cross_attention"
        sizes, quotas = self.pool_sizes(), self.manager.cache.quotas()
        others = {tenant: quota.guaranteed for tenant, quota in quotas.items() if tenant != request.scope.tenant}
        together = f" of {request.n} sequences" if self._advance_together(request) else ""
        for index, need in enumerate(self._needs_alone(request)):
            needs = (
                f"its prompt of {len(request.prompt)} and {request.max_new_tokens} new tokens{together} need {need} "
                f"blocks of pool {index}"
            )
            if need > sizes[index]:
                return f"{needs}, which has {sizes[index]} in all; ask for fewer tokens or use a larger pool"
            kept = {tenant: blocks[index] for tenant, blocks in others.items() if blocks[index]}
            left = max(0, sizes[index] - sum(kept.values()))
            if need > left:
                whose = ", ".join(f"{blocks} are guaranteed to {tenant!r}" for tenant, blocks in kept.items())
                return (
                    f"{needs}: {left} of {sizes[index]} are available to this tenant, {whose}; "
                    "ask for fewer tokens, lower a guarantee with set_quota, or use a larger pool"
                )
        return None

    def _advance_together(self, request: Request) -> bool:
        """Whether all sequences of a request need their places at the same time."""
        return request.n > 1 and self.guaranteed

    def _needs_alone(self, request: Request) -> list[int]:
        """Blocks per pool that one sequence of a request holds at most; all of them where they advance together."""
        needs = list(self.manager.config.pool_blocks_for(request.num_places, cross_tokens=request.cross_tokens))
        for group in self._growing:
            if kind_of(group).by_block:  # commits lag behind by a step
                columns = ceil_div(request.num_places, self.manager.config.block_size)
                needs[group.pool] += min(SPARE_WINDOW_BLOCKS, columns - group.max_live_blocks(request.num_places))
            if self._advance_together(request):
                shared = (
                    len(request.prompt) // self.manager.config.block_size
                    if self.manager.config.enable_prefix_caching
                    else 0
                )
                own = ceil_div(request.num_places, self.manager.config.block_size) - shared
                needs[group.pool] += (request.n - 1) * own
        return needs

    def has_shrunk(self) -> bool:
        """Whether a pool became smaller or guarantees grew, so that a request that was accepted may no longer fit."""
        made = (pool.num_blocks[Tier.GPU] for pool in self.manager.config.pools)
        return any(now < then for now, then in zip(self.pool_sizes(), made, strict=True)) or bool(
            self.manager.cache.quotas()
        )

    def pool_sizes(self) -> list[int]:
        """Blocks of each GPU pool, as large as it is now."""
        return [self.manager.inspect.num_blocks(pool.index) for pool in self.manager.config.pools]

    def blocks_per_column(self, pool: int) -> int:
        """Blocks of a pool behind one column of the block table."""
        return sum(group.pool == pool for group in self._growing)
