"""TensorRT-LLM's words: sequences, primary and secondary blocks per attention window, retention, the event stream."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvpool.checks import as_count, as_flag, check_bool, check_int, check_number, show
from kvpool.compat.adapter import Adapter, checked_settings, knows_settings
from kvpool.compat.trtllm_blocks import (
    BlockManager,
    KVCacheBlock,
    KVCacheBlockPool,
    WindowBlockManager,
    window_sizes,
)
from kvpool.compat.trtllm_events import KVCacheEventManager, prompt_items, reuse_scope
from kvpool.compat.trtllm_settings import (
    MORE_SETTINGS,
    make_layers,
    own_names,
    primary_size,
    refuse_elsewhere,
    secondary_size,
)
from kvpool.config import DType, KVCacheConfig, Tier
from kvpool.config.layers import MAX_TOKENS, ceil_div
from kvpool.core.cache import Pin
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import as_token_array
from kvpool.scope import Retention, TokenRange

if TYPE_CHECKING:
    from kvpool.storage import LayerCache

__all__ = [
    "BlockManager",
    "KVCacheBlock",
    "KVCacheBlockPool",
    "KVCacheEventManager",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "TokenRangeRetentionConfig",
    "TrtLlmKVCacheManager",
    "WindowBlockManager",
]


def _seconds(name: str, duration: Any) -> float | None:
    if duration is None:
        return None
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    expected = "a number of milliseconds, a timedelta, or None"
    return check_number(duration, name, expected, InvalidArgumentError) / 1000


@checked_settings
@dataclass(frozen=True)
class TokenRangeRetentionConfig:
    """Priority of the tokens `token_start..token_end` (None = to the end of the prompt)."""

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: float | timedelta | None = None

    def __post_init__(self) -> None:
        _ = self.token_range  # which checks it

    @property
    def token_range(self) -> TokenRange:
        """The same thing in kvpool's words."""
        return TokenRange(self.token_start, self.token_end, self.priority, _seconds("duration_ms", self.duration_ms))


_TokenRanges = Sequence[TokenRangeRetentionConfig]


@checked_settings
@dataclass(frozen=True)
class KvCacheRetentionConfig:
    """How long the blocks of a request stay."""

    TokenRangeRetentionConfig: ClassVar = TokenRangeRetentionConfig  # where TensorRT-LLM has it

    token_range_retention_configs: _TokenRanges = ()
    decode_retention_priority: int = 35
    decode_duration_ms: float | timedelta | None = None

    def __post_init__(self) -> None:
        _ = self.retention  # which checks it

    @property
    def retention(self) -> Retention:
        """The same thing in kvpool's words."""
        parts: object = self.token_range_retention_configs
        if not isinstance(parts, (tuple, list)) or not all(isinstance(p, TokenRangeRetentionConfig) for p in parts):
            raise InvalidArgumentError(
                f"token_range_retention_configs must be a list of TokenRangeRetentionConfig, got {show(parts)}"
            )
        duration = _seconds("decode_duration_ms", self.decode_duration_ms)
        priority: object = self.decode_retention_priority
        return Retention(
            [part.token_range for part in parts],
            check_int(priority, "decode_retention_priority", 0, 100, InvalidArgumentError),
            duration,
        )


@dataclass(frozen=True)
class KvCacheStats:
    """Blocks of the primary pools, and what was reused. Pinned blocks are not free.

    Allocated blocks are those taken from the free ones; none of them holds anything then, so all are new. The prompt of a
    sequence reuses or misses each of its blocks, the unfilled last one, too; what is reused of it in part counts as reused.
    """

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int  # that live sequences hold
    tokens_per_block: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int
    cache_hit_rate: float
    num_free_blocks_per_window_size: dict[int, int]
    allocated_bytes: int


class TrtLlmKVCacheManager(Adapter):
    """One block manager per attention window, with primary (GPU) and secondary (host) blocks in each pool.

    `max_attention_window` is repeated over the layers; None in it, or a window of `max_seq_len` and more, is full
    attention. One setting sizes the primary pools: a number of blocks (1024 if none is given), `free_gpu_memory_fraction`,
    `max_gpu_total_bytes` or `max_tokens`, which may also limit the two before it. Eviction is by priority, then least
    recently used. Pins have no budget. Fields of `KVCacheConfig` that have no other name here are settings too.
    """

    @knows_settings("TrtLlmKVCacheManager", MORE_SETTINGS)
    def __init__(
        self,
        num_kv_heads_per_layer: Sequence[int],
        size_per_head: int,
        tokens_per_block: int = 32,
        blocks_in_primary_pool: int | None = None,
        blocks_in_secondary_pool: int | None = None,
        *,
        max_attention_window: Sequence[int | None] = (None,),
        max_seq_len: int | None = None,
        sink_token_length: int | None = None,
        dtype: DType | str = DType.FLOAT16,
        free_gpu_memory_fraction: float | None = None,
        max_gpu_total_bytes: int | None = None,
        max_tokens: int | None = None,
        host_cache_size: int | None = None,
        onboard_blocks: bool = True,
        secondary_offload_min_priority: int | None = None,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        event_buffer_max_size: int = 0,
        attention_dp_rank: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        refuse_elsewhere(settings)
        if attention_dp_rank is not None:
            attention_dp_rank = check_int(attention_dp_rank, "attention_dp_rank", 0, 2**31)
        for name, flag in (("block", enable_block_reuse), ("partial", enable_partial_reuse)):
            check_bool(flag, f"enable_{name}_reuse")
        settings.setdefault("eviction_policy", "priority")
        settings.setdefault("cache_unfilled_blocks", enable_block_reuse and enable_partial_reuse)
        with own_names():
            layers = make_layers(
                num_kv_heads_per_layer, size_per_head, max_attention_window, max_seq_len, sink_token_length, dtype
            )
            settings |= primary_size(
                layers,
                tokens_per_block,
                device,
                settings,
                blocks_in_primary_pool=blocks_in_primary_pool,
                free_gpu_memory_fraction=free_gpu_memory_fraction,
                max_gpu_total_bytes=max_gpu_total_bytes,
                max_tokens=max_tokens,
            )
            settings |= secondary_size(
                blocks_in_secondary_pool, host_cache_size, onboard_blocks, secondary_offload_min_priority
            )
            config = KVCacheConfig(
                layers,
                tokens_per_block,
                max_seq_len=max_seq_len,
                event_buffer_size=event_buffer_max_size,
                enable_prefix_caching=enable_block_reuse,
                partial_match=enable_partial_reuse,
                max_pinned_tokens=MAX_TOKENS,
                **settings,
            )
        super().__init__(KVCacheManager(config), device=device)
        self.block_manager = BlockManager(self.manager)
        self._counting = threading.Lock()
        self._reused = self._missed = 0  # blocks of the prompts of all sequences
        self.event_manager = KVCacheEventManager(self.manager, attention_dp_rank) if event_buffer_max_size else None

    @property
    def tokens_per_block(self) -> int:
        return self.manager.config.block_size

    @property
    def num_pools(self) -> int:
        return self.block_manager.num_pools

    @property
    def max_num_blocks(self) -> int:
        return self.get_kv_cache_stats().max_num_blocks

    @property
    def enable_block_reuse(self) -> bool:
        return self.manager.config.enable_prefix_caching

    # --- sequences ---------------------------------------------------------------------------------------------------

    def add_sequence(
        self,
        request_id: Hashable,
        tokens: Any,
        retention_config: KvCacheRetentionConfig | None = None,
        *,
        lora_task_id: int | str | None = None,
        cache_salt: str | None = None,
        multimodal: Sequence[tuple[str | bytes, int] | tuple[str | bytes, int, int]] = (),
        extra_ids: Sequence[int] | None = None,
    ) -> int:
        """Blocks for a prompt; returns the prepopulated length: how many of its tokens come from the cache.

        Blocks are reused where all of this is equal up to their end: the LoRA, the salt, the tokens, their extra ids
        (p-tuning), and the multimodal inputs as (content hash, token offset, length). The length may be left out. The
        number of tokens in place of `tokens` gives blocks that reuse nothing.
        """
        if retention_config is not None and not isinstance(retention_config, KvCacheRetentionConfig):
            raise InvalidArgumentError(
                f"retention_config must be a KvCacheRetentionConfig, got {show(retention_config)}; there is no beam width: "
                "each beam is a fork, cache.manager.fork(cache.handle(id), 'beam 1')"
            )
        retention = None if retention_config is None else retention_config.retention
        scope = reuse_scope(lora_task_id, cache_salt)
        if np.isscalar(tokens):
            if extra_ids is not None or prompt_items(multimodal, None, 0):
                raise InvalidArgumentError(
                    f"extra_ids and multimodal inputs need tokens, not their number {show(tokens)}"
                )
            length = as_count(tokens, "the number of tokens", minimum=1)
            handle = self.manager.allocate(request_id, num_tokens=length, retention=retention, scope=scope)
        else:
            ids = as_token_array(tokens)
            items = prompt_items(multimodal, extra_ids, len(ids))
            handle = self.manager.allocate(request_id, ids, retention=retention, scope=scope, multimodal=items or None)
        reused, missed = self._context_blocks(handle)
        with self._counting:
            self._reused += reused
            self._missed += missed
        return handle.num_cached_tokens

    def _context_blocks(self, handle: KVCacheHandle) -> tuple[int, int]:
        """Blocks of a prompt that were found, in part counts too, and those that were not, the unfilled one too."""
        if not self.enable_block_reuse:
            return 0, 0
        reused = handle.num_cached_blocks + (handle.num_partial_tokens > 0)
        return reused, ceil_div(handle.num_prompt_tokens, self.tokens_per_block) - reused

    def add_token(self, request_id: Hashable) -> None:
        """A place for one more token."""
        self.manager.extend(self.handle(request_id))

    def rewind_kv_cache(self, request_id: Hashable, rewind_lengths: int) -> None:
        self.manager.rewind(self.handle(request_id), rewind_lengths)

    def store_context_blocks(self, request_id: Hashable) -> None:
        """The prompt is computed: its full blocks can be reused while the request still runs."""
        handle = self.handle(request_id)
        self.manager.commit(handle, max(0, handle.num_prompt_tokens - handle.num_committed))

    def store_new_block(self, request_id: Hashable, tokens: Any) -> None:
        """These generated tokens are computed; a block that they fill can be reused."""
        self.manager.commit(self.handle(request_id), as_token_array(tokens))

    def store_blocks_for_reuse(self, request_id: Hashable, tokens: Any = None, pin_blocks: bool = False) -> Pin | None:
        """Stores what `tokens`, all of the sequence, hold and is not stored yet; with `pin_blocks` eviction spares it.

        The last token was sampled but never computed, so it is left out. None if no full block is stored.
        """
        handle = self.handle(request_id)
        pins = as_flag(pin_blocks, "pin_blocks")
        if tokens is not None:
            self.commit_known(handle, as_token_array(tokens)[:-1])
        return self._pin(handle) if pins else None

    def remove_sequence(self, request_id: Hashable, tokens: Any = None, pin_on_release: bool = False) -> Pin | None:
        """Ends a sequence; what it stored stays reusable, and is kept from eviction while it is pinned.

        Give all of its `tokens`, prompt and generated, and what is not stored yet is stored now. The last one was sampled
        but never computed, so it is left out. Without `tokens` nothing more is stored: a request may end before its time.
        The pin is None if no full block is stored.
        """
        pin = self.store_blocks_for_reuse(request_id, tokens, as_flag(pin_on_release, "pin_on_release"))
        self.manager.free(self.handle(request_id))
        return pin

    def pin_blocks(self, request_id: Hashable) -> Pin | None:
        """Keeps what a sequence has stored from eviction, also after its end. None if no full block is stored."""
        return self._pin(self.handle(request_id))

    def _pin(self, handle: KVCacheHandle) -> Pin | None:
        try:
            return self.manager.cache.pin(handle)
        except InvalidArgumentError:  # pins have no budget here, so this is all that can be: nothing is stored
            return None

    def unpin_blocks_by_id(self, pin: Pin) -> None:
        """Ends a pin. Takes what pinned the blocks, not their ids: a block that moves gets another id."""
        self.manager.cache.unpin(pin)

    def get_cache_block_ids(
        self, request_id: Hashable, window_size: int | None = None, pool_idx: int = 0
    ) -> list[list[int | None]]:
        """Block ids of a sequence in one window, for its only beam; None where a block left the window.

        Every pool of a window has ids of its own.
        """
        pool = self.block_manager.get_window_block_manager(window_size).get_pool(pool_idx)
        return [self.table(request_id, pool.index)]

    def get_batch_cache_block_ids(
        self, request_ids: Sequence[Hashable], window_size: int | None = None, pool_idx: int = 0
    ) -> list[list[list[int | None]]]:
        """`get_cache_block_ids` of several sequences."""
        if not isinstance(request_ids, (list, tuple)):
            raise InvalidArgumentError(f"request_ids must be a list of ids, got {show(request_ids)}")
        return [self.get_cache_block_ids(request_id, window_size, pool_idx) for request_id in request_ids]

    def get_primary_pool_data(self, layer_idx: int) -> LayerCache:
        """Keys and values of one layer in the primary pool, [block, token, head, element]. Needs torch."""
        self._group(layer_idx)
        return self.plane.layer_cache(layer_idx)

    # --- upkeep and observation --------------------------------------------------------------------------------------

    def refresh_blocks(self) -> None:
        """Ends priorities whose duration is over. Every other call does so first."""
        self.manager.cache.gc()

    def reset_reuse_state(self) -> None:
        """Forgets everything that is stored."""
        self.manager.cache.reset()

    def get_kv_cache_stats(self) -> KvCacheStats:
        stats, config = self.manager.stats(), self.manager.config
        primary = {pool.pool: pool for pool in stats.pools if pool.tier == Tier.GPU}
        free = {index: pool.available for index, pool in primary.items()}
        with self._counting:
            reused, missed = self._reused, self._missed
        per_window: dict[int, int] = {}
        for group, window in zip(config.groups, window_sizes(config), strict=True):
            per_window[window] = min(free[group.pool], per_window.get(window, free[group.pool]))
        return KvCacheStats(
            max_num_blocks=sum(pool.total for pool in primary.values()),
            free_num_blocks=sum(free.values()),
            used_num_blocks=sum(pool.referenced for pool in primary.values()),
            tokens_per_block=config.block_size,
            alloc_total_blocks=stats.blocks_allocated,
            alloc_new_blocks=stats.blocks_allocated,
            reused_blocks=reused,
            missed_blocks=missed,
            cache_hit_rate=reused / (reused + missed) if reused + missed else 0.0,
            num_free_blocks_per_window_size=per_window,
            allocated_bytes=config.pool_bytes(Tier.GPU),
        )

    def get_request_stats(self, request_id: Hashable) -> dict[str, int]:
        """The four counters of `get_kv_cache_stats` for the prompt of one live request."""
        handle, size = self.handle(request_id), self.tokens_per_block
        reused, missed = self._context_blocks(handle)
        in_place = reused
        if handle.num_partial_tokens and self.manager.config.copy_on_partial_reuse:
            in_place -= 1  # what is reused of its last block was copied
        taken = (ceil_div(handle.num_prompt_tokens, size) or handle.num_blocks) - in_place
        return {
            "alloc_total_blocks": taken,
            "alloc_new_blocks": taken,
            "reused_blocks": reused,
            "missed_blocks": missed,
        }

    def flush_iteration_events(self) -> None:
        """Events need no flush: they can be read as soon as they happened. A loop that calls this goes on working."""

    def get_latest_events(self, timeout_ms: float | None = 0) -> list[dict[str, Any]]:
        """Events since the last call as TensorRT-LLM's dictionaries; 0 does not wait, None waits as long as it takes.

        Event ids grow by one: a gap means that the buffer was too small, `manager.subscribe()` starts afresh.
        """
        if self.event_manager is None:
            raise ConfigError("events are off: pass event_buffer_max_size > 0")
        return self.event_manager.get_events(timeout_ms)
