"""vLLM V0's `BlockManager`: AllocStatus answers, lookahead slots, copies and swaps as lists of (source, destination).

V0 handed the scheduler plain pairs of block ids. That is enough for one layer group without background copies, so the
manager behind these calls has partial-block reuse and offloading on eviction switched off. As in V0, one scheduler
thread makes the calls, and the worker runs the returned copies before the next step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import Any

from kvpool.blocks.state import AllocStatus
from kvpool.compat.base import SeedSpelling
from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.errors import ConfigError
from kvpool.manager import KVCacheManager

Pairs = list[tuple[int, int]]


class BlockManager(SeedSpelling):
    """The block space manager of vLLM V0, sequences named by their ids.

    >>> blocks = BlockManager(block_size=4, num_gpu_blocks=8, num_cpu_blocks=8)
    >>> blocks.allocate("parent", [1, 2, 3, 4, 5, 6])
    >>> blocks.mark_blocks_as_computed("parent", 6)
    >>> blocks.fork("parent", "child")
    >>> blocks.append_slots("child")
    [(1, 2)]
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = True,
        *,
        manager: KVCacheManager | None = None,
    ) -> None:
        if manager is None:
            layer = LayerSpec(kv_heads=1, head_dim=1, window=sliding_window)  # V0's manager knew no shapes, only ids
            manager = KVCacheManager(
                KVCacheConfig([layer], block_size, gpu_blocks=num_gpu_blocks, host_blocks=num_cpu_blocks,
                              watermark=watermark, enable_prefix_caching=enable_caching,
                              partial_match=False, offload_on_evict=False)
            )  # fmt: skip
        super().__init__(manager)
        config = manager.config
        if len(config.groups) > 1 or config.partial_match or config.offload_on_evict:
            raise ConfigError(
                "V0's pairs of block ids need one layer group, partial_match=False and offload_on_evict=False; "
                "otherwise use KVCacheManager.take_copies"
            )

    # --- admission ---------------------------------------------------------------------------------------------------

    def can_allocate(self, tokens: Any, num_lookahead_slots: int = 0) -> AllocStatus:
        return self.manager.can_allocate(tokens, lookahead=num_lookahead_slots).status

    def allocate(self, seq_id: Hashable, tokens: Any, num_lookahead_slots: int = 0) -> None:
        self.manager.allocate(seq_id, tokens, lookahead=num_lookahead_slots)

    def free(self, seq_id: Hashable) -> None:
        self.manager.free(self.handle(seq_id))

    def get_block_table(self, seq_id: Hashable) -> list[int | None]:
        return self.table(seq_id, 0)

    # --- steps -------------------------------------------------------------------------------------------------------

    def can_append_slots(self, seq_ids: Sequence[Hashable], num_lookahead_slots: int = 0) -> bool:
        """Whether one more token for each of them fits, in the worst case."""
        needs = (self.manager.blocks_needed(self.handle(seq), 1, num_lookahead_slots)[0] for seq in seq_ids)
        return sum(needs) <= self.get_num_free_gpu_blocks()

    def append_slots(self, seq_id: Hashable, num_tokens: int = 1, num_lookahead_slots: int = 0) -> Pairs:
        """Places for the next tokens and for drafts behind them; returns the copies-on-write to run first."""
        self.manager.extend(self.handle(seq_id), num_tokens, num_lookahead_slots)
        return self._pairs()

    def mark_blocks_as_computed(self, seq_id: Hashable, tokens: Any) -> None:
        """These tokens (ids, or how many of the prompt's) are written: their full blocks are reusable."""
        self.manager.commit(self.handle(seq_id), tokens)

    def fork(self, parent_seq_id: Hashable, child_seq_id: Hashable) -> None:
        self.manager.fork(self.handle(parent_seq_id), child_seq_id)

    def get_common_computed_block_ids(self, seq_ids: Sequence[Hashable]) -> list[int]:
        """Blocks that all these sequences have computed and share, from the start."""
        size = self.manager.config.block_size
        handles = [self.handle(seq) for seq in seq_ids]
        columns = zip(*(h.block_ids()[: h.num_committed // size].tolist() for h in handles), strict=False)
        return [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, columns)]

    def get_num_cached_tokens(self, seq_id: Hashable) -> int:
        return self.handle(seq_id).num_cached_tokens

    # --- swapping ----------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq_ids: Sequence[Hashable]) -> bool:
        return bool(self.manager.can_swap_out(*map(self.handle, seq_ids)))

    def can_swap_in(self, seq_ids: Sequence[Hashable]) -> AllocStatus:
        return self.manager.can_swap_in(*map(self.handle, seq_ids)).status

    def swap_out(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """(GPU block, CPU block) for every block to copy; forks swapped together stay shared."""
        self.manager.swap_out(*map(self.handle, seq_ids))
        return self._pairs()

    def swap_in(self, seq_ids: Sequence[Hashable]) -> Pairs:
        """(CPU block, GPU block) for every block to copy; what is still cached on the GPU is not copied."""
        self.manager.swap_in(*map(self.handle, seq_ids))
        return self._pairs()

    def _pairs(self) -> Pairs:
        copies = self.manager.take_copies()
        return [pair for op in copies for pair in zip(op.src.tolist(), op.dst.tolist(), strict=True)]

    # --- the cache ---------------------------------------------------------------------------------------------------

    def get_num_free_gpu_blocks(self) -> int:
        """Free blocks, those that eviction could free included."""
        return self._free_blocks(Tier.GPU)

    def get_num_free_cpu_blocks(self) -> int:
        return self._free_blocks(Tier.HOST)

    def _free_blocks(self, tier: Tier) -> int:
        pools = [pool for pool in self.manager.stats().pools if pool.tier == tier]
        return sum(pool.free + pool.cached - pool.pinned for pool in pools)

    def reset_prefix_cache(self) -> bool:
        """Forgets everything cached; False, changing nothing, while sequences are live (the manager itself could)."""
        if self.manager.handles:
            return False
        self.manager.reset_prefix_cache()
        return True

    def get_prefix_cache_hit_rate(self) -> float:
        """Prompt blocks found, as a fraction of those looked up; -1 when caching is off."""
        stats = self.manager.stats()
        if not self.manager.config.enable_prefix_caching:
            return -1.0
        return sum(stats.hit_blocks.values()) / stats.prompt_blocks if stats.prompt_blocks else 0.0
