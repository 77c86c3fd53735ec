"""TensorRT-LLM's words: sequences, primary and secondary blocks per attention window, retention, the event stream."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from kvpool.compat.known_settings import CONFIG_SETTINGS, checked_settings, knows_settings
from kvpool.compat.spelling import Spelling
from kvpool.compat.trtllm_events import EventTranslator, reuse_scope
from kvpool.config import DType, KVCacheConfig, LayerSpec, Tier
from kvpool.config.layers import check_int
from kvpool.errors import ConfigError
from kvpool.manager import KVCacheManager
from kvpool.manager.pins import Pin
from kvpool.pools.arrays import as_token_array
from kvpool.prefix.retention import Retention, TokenRange

if TYPE_CHECKING:
    from kvpool.storage import LayerCache

_OWN_SETTINGS = {"layers", "block_size", "gpu_blocks", "host_blocks", "max_seq_len", "event_buffer_size"}
_OWN_SETTINGS |= {"enable_prefix_caching", "partial_match"}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


@checked_settings
@dataclass(frozen=True)
class TokenRangeRetentionConfig:
    """Priority of the tokens `token_start..token_end` (None = to the end of the prompt)."""

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: float | None = None


@checked_settings
@dataclass(frozen=True)
class KvCacheRetentionConfig:
    """How long the blocks of a request stay; `retention` is the same thing in kvpool's words."""

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = 35
    decode_duration_ms: float | None = None

    @property
    def retention(self) -> Retention:
        ranges = [
            TokenRange(part.token_start, part.token_end, part.priority, _seconds(part.duration_ms))
            for part in self.token_range_retention_configs
        ]
        return Retention(ranges, self.decode_retention_priority, _seconds(self.decode_duration_ms))


class TrtLlmKVCacheManager(Spelling):
    """One block manager per attention window, with primary (GPU) and secondary (host) blocks in each pool.

    `max_attention_window` is repeated over the layers; None in it, or a window of `max_seq_len` and more, is full
    attention. Eviction is by priority, then least recently used. Other fields of `KVCacheConfig` are settings too.
    """

    @knows_settings("TrtLlmKVCacheManager", CONFIG_SETTINGS - _OWN_SETTINGS)
    def __init__(
        self,
        num_kv_heads_per_layer: Sequence[int],
        size_per_head: int,
        tokens_per_block: int = 32,
        blocks_in_primary_pool: int = 1024,
        blocks_in_secondary_pool: int | None = None,
        *,
        max_attention_window: Sequence[int | None] = (None,),
        max_seq_len: int | None = None,
        dtype: DType | str = DType.FLOAT16,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        event_buffer_max_size: int = 0,
        attention_dp_rank: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        if not max_attention_window:
            raise ConfigError("max_attention_window must name a window; (None,) is full attention everywhere")
        if attention_dp_rank is not None:
            check_int("attention_dp_rank", attention_dp_rank, 0, 2**31)
        layers = []
        for kv_heads, window in zip(num_kv_heads_per_layer, cycle(max_attention_window), strict=False):
            full = window is None or (max_seq_len is not None and window >= max_seq_len)
            layers.append(LayerSpec(kv_heads, size_per_head, DType.parse(dtype), window=None if full else window))
        settings.setdefault("eviction_policy", "priority")
        settings.setdefault("cache_unfilled_blocks", bool(enable_block_reuse and enable_partial_reuse))
        config = KVCacheConfig(
            layers, tokens_per_block, gpu_blocks=blocks_in_primary_pool, host_blocks=blocks_in_secondary_pool,
            max_seq_len=max_seq_len, event_buffer_size=event_buffer_max_size,
            enable_prefix_caching=enable_block_reuse, partial_match=enable_partial_reuse, **settings,
        )  # fmt: skip
        super().__init__(KVCacheManager(config), device=device)
        self._events = self.manager.subscribe() if event_buffer_max_size else None
        self._translator = EventTranslator(config, attention_dp_rank)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def add_sequence(
        self,
        request_id: Hashable,
        tokens: Any,
        retention_config: KvCacheRetentionConfig | None = None,
        *,
        lora_task_id: int | str | None = None,
        cache_salt: str = "",
        multimodal: Sequence[tuple[str, int] | tuple[str, int, int]] = (),
        extra_ids: Sequence[int] | None = None,
    ) -> int:
        """Blocks for a prompt; returns the prepopulated length: how many of its tokens come from the cache.

        Blocks are reused where all of this is equal: the LoRA, the salt, the extra ids of the tokens (p-tuning), and the
        multimodal inputs up to the block as (content hash, token offset, length). One without its length must be equal in
        the whole prompt.
        """
        retention = None if retention_config is None else retention_config.retention
        ids = as_token_array(tokens)
        whole = [given for given in multimodal if len(given) != 3]
        items = [(given[1], given[2], given[0]) for given in multimodal if len(given) == 3]
        scope = reuse_scope(lora_task_id, cache_salt, whole, extra_ids, len(ids))
        handle = self.manager.allocate(request_id, ids, retention=retention, scope=scope, multimodal=items or None)
        return handle.num_cached_tokens

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
        self.manager.commit(self.handle(request_id), tokens)

    def remove_sequence(self, request_id: Hashable, tokens: Any = None, pin_on_release: bool = False) -> Pin | None:
        """Ends a sequence; what it stored stays reusable, and is kept from eviction while it is pinned.

        Give all of its `tokens`, prompt and generated, and what is not stored yet is stored now. The last one was sampled
        but never computed, so it is left out. Without `tokens` nothing more is stored: a request may end before its time.
        """
        handle = self.handle(request_id)
        if tokens is not None:
            self.commit_known(handle, as_token_array(tokens)[:-1])
        pin = self.manager.pin(handle) if pin_on_release else None
        self.manager.free(handle)
        return pin

    def get_cache_block_ids(self, request_id: Hashable, window_group: int = 0) -> list[int | None]:
        return self.table(request_id, window_group)

    def get_primary_pool_data(self, layer_idx: int) -> LayerCache:
        """Keys and values of one layer in the primary pool, [block, token, head, element]. Needs torch."""
        return self.plane.layer_cache(layer_idx)

    # --- observation -------------------------------------------------------------------------------------------------

    def get_kv_cache_stats(self) -> dict[str, Any]:
        """TensorRT-LLM's `KvCacheStats`, of the primary pools. Pinned blocks are not free."""
        stats, config = self.manager.stats(), self.manager.config
        primary = {pool.pool: pool for pool in stats.pools if pool.tier == Tier.GPU}
        free = {index: pool.free + pool.cached - pool.pinned for index, pool in primary.items()}
        reused, missed = sum(stats.hit_blocks.values()), stats.miss_blocks
        per_window: dict[int | None, int] = {}
        for group in config.groups:
            window = config.max_seq_len if group.window is None else group.window
            per_window[window] = min(free[group.pool], per_window.get(window, free[group.pool]))
        return {
            "max_num_blocks": sum(pool.total for pool in primary.values()),
            "free_num_blocks": sum(free.values()),
            "used_num_blocks": sum(pool.referenced for pool in primary.values()),
            "tokens_per_block": config.block_size,
            "alloc_total_blocks": stats.blocks_allocated + reused,
            "alloc_new_blocks": stats.blocks_allocated,
            "reused_blocks": reused,
            "missed_blocks": missed,
            "cache_hit_rate": reused / (reused + missed) if reused + missed else 0.0,
            "num_free_blocks_per_window_size": per_window,
            "allocated_bytes": config.pool_bytes(Tier.GPU),
        }

    def get_request_stats(self, request_id: Hashable) -> dict[str, int]:
        """The four counters of `get_kv_cache_stats` for one live request."""
        handle = self.handle(request_id)
        reused = handle.num_cached_blocks
        return {
            "alloc_total_blocks": handle.num_blocks,
            "alloc_new_blocks": handle.num_blocks - reused,
            "reused_blocks": reused,
            "missed_blocks": handle.num_prompt_tokens // self.manager.config.block_size - reused,
        }

    def get_latest_events(self, timeout_ms: float | None = 0) -> list[dict[str, Any]]:
        """Events since the last call as TensorRT-LLM's dictionaries; 0 does not wait, None waits as long as it takes.

        Event ids grow by one: a gap means that the buffer was too small, `manager.subscribe()` starts afresh.
        """
        if self._events is None:
            raise ConfigError("events are off: pass event_buffer_max_size > 0")
        self._events.wait(_seconds(timeout_ms))
        return [item for event in self._events.poll().events for item in self._translator.translate(event)]
