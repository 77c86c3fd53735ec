"""TensorRT-LLM's settings by their own names: each sizes or shapes a `KVCacheConfig`, or is refused with the way here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

from kvpool.checks import check_int, check_number, show
from kvpool.compat.adapter import CONFIG_SETTINGS
from kvpool.config import DType, LayerSpec
from kvpool.config.layers import MAX_TOKENS, build_groups, build_pools, ceil_div
from kvpool.errors import ConfigError

_DEFAULT_PRIMARY_BLOCKS = 1024
_OFFLOAD_MIN_PRIORITY = 30  # TensorRT-LLM's own default; its documentation says 35

# Settings that have one value here, and what to do instead of setting another.
ELSEWHERE: dict[str, tuple[Any, str]] = {
    "max_beam_width": (
        1,
        "an id is one sequence here, and each beam is a fork of it: cache.manager.fork(cache.handle(id), 'beam 1')",
    ),
    "cross_kv_cache_fraction": (
        None,
        "the layers of this manager are self-attention. A KVCacheManager keeps both kinds: LayerSpec(cross_attention=True) "
        "and KVCacheConfig(pool_shares=...)",
    ),
    "use_uvm": (False, "blocks move between pools instead: blocks_in_secondary_pool or host_cache_size"),
    "attention_dp_events_gather_period_ms": (
        None,
        "every rank announces its own events; kvpool.cluster.EventPublisher and ClusterIndex bring them together",
    ),
    "kv_connector_manager": (None, "tiers outside of the process are in kvpool.tiers"),
}

# What these are called in kvpool.
_NAMES = {
    "block_size": "tokens_per_block",
    "enable_prefix_caching": "enable_block_reuse",
    "event_buffer_size": "event_buffer_max_size",
    "gpu_blocks": "blocks_in_primary_pool",
    "gpu_bytes": "max_gpu_total_bytes",
    "gpu_fraction": "free_gpu_memory_fraction",
    "head_dim": "size_per_head",
    "host_blocks": "blocks_in_secondary_pool",
    "host_bytes": "host_cache_size",
    "kv_heads": "num_kv_heads_per_layer",
    "max_gpu_tokens": "max_tokens",
    "offload_min_priority": "secondary_offload_min_priority",
    "offload_on_evict": "onboard_blocks",
    "partial_match": "enable_partial_reuse",
    "sink_tokens": "sink_token_length",
}
# Fields of `KVCacheConfig` that are settings under their own names; pins have no budget here.
MORE_SETTINGS = (CONFIG_SETTINGS - {*_NAMES, "layers", "max_pinned_tokens"}) | set(ELSEWHERE)


@contextmanager
def own_names() -> Iterator[None]:
    """Errors about the configuration name settings as TensorRT-LLM does."""
    try:
        yield
    except ConfigError as error:
        names = re.compile(rf"\b({'|'.join(_NAMES)})\b")
        raise ConfigError(names.sub(lambda found: _NAMES[found[0]], str(error))) from None


def refuse_elsewhere(settings: dict[str, Any]) -> None:
    """Takes out of `settings` those that have one value here; ConfigError for any other value."""
    for name, (only, way) in ELSEWHERE.items():
        value = settings.pop(name, only)
        if type(value) is not type(only) or value != only:
            raise ConfigError(f"{name}={show(value)} must be {only!r}: {way}")


def make_layers(
    num_kv_heads_per_layer: Any,
    size_per_head: int,
    max_attention_window: Any,
    max_seq_len: int | None,
    sink_token_length: int | None,
    dtype: DType | str,
) -> list[LayerSpec]:
    """A layer for each number of heads; windows repeat over them."""
    heads = _values("num_kv_heads_per_layer", num_kv_heads_per_layer)
    windows = [
        None if window is None else check_int(window, "max_attention_window", 1, MAX_TOKENS)
        for window in _values("max_attention_window", max_attention_window)
    ]
    if max_seq_len is not None:
        max_seq_len = check_int(max_seq_len, "max_seq_len", 1, MAX_TOKENS)
    sinks = 0 if sink_token_length is None else check_int(sink_token_length, "sink_token_length", 0, MAX_TOKENS)
    layers = []
    for kv_heads, window in zip(heads, islice(cycle(windows), len(heads)), strict=True):
        if window is not None and max_seq_len is not None and window >= max_seq_len:
            window = None
        tokens = 0 if window is None else sinks
        layers.append(LayerSpec(kv_heads, size_per_head, DType.parse(dtype), window=window, sink_tokens=tokens))
    if sinks and all(layer.window is None for layer in layers):
        raise ConfigError(f"sink_token_length={sinks} needs a max_attention_window: without one every token stays")
    return layers


def primary_size(
    layers: Sequence[LayerSpec],
    tokens_per_block: int,
    device: str | None,
    settings: dict[str, Any],
    *,
    blocks_in_primary_pool: int | None,
    free_gpu_memory_fraction: float | None,
    max_gpu_total_bytes: int | None,
    max_tokens: int | None,
) -> dict[str, Any]:
    """The fields of `KVCacheConfig` that size its GPU tier. `max_tokens` is a size by itself, or limits bytes."""
    sizes = {
        "blocks_in_primary_pool": blocks_in_primary_pool,
        "free_gpu_memory_fraction": free_gpu_memory_fraction,
        "max_gpu_total_bytes": max_gpu_total_bytes,
    }
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) > 1 or (max_tokens is not None and blocks_in_primary_pool is not None):
        both = " and ".join([*given, *(["max_tokens"] if max_tokens is not None else [])])
        raise ConfigError(f"{both} all size the primary pool: give one of them; max_tokens may limit bytes as well")
    if free_gpu_memory_fraction is not None:
        fraction = check_number(free_gpu_memory_fraction, "free_gpu_memory_fraction", "above 0 and below 1")
        if not 0 < fraction < 1:
            raise ConfigError(f"free_gpu_memory_fraction={fraction} must be above 0 and below 1")
        if settings.get("free_gpu_bytes") is None:
            settings["free_gpu_bytes"] = _free_gpu_bytes(device)
        return {"gpu_fraction": fraction, "max_gpu_tokens": max_tokens}
    if max_gpu_total_bytes is not None:
        return {"gpu_bytes": max_gpu_total_bytes, "max_gpu_tokens": max_tokens}
    if max_tokens is not None:
        size = check_int(tokens_per_block, "tokens_per_block", 1, MAX_TOKENS)
        blocks = ceil_div(check_int(max_tokens, "max_tokens", 1, MAX_TOKENS), size)
        return {"gpu_blocks": [blocks * len(pool.groups) for pool in build_pools(build_groups(layers, size))]}
    return {"gpu_blocks": _DEFAULT_PRIMARY_BLOCKS if blocks_in_primary_pool is None else blocks_in_primary_pool}


def secondary_size(
    blocks_in_secondary_pool: int | None,
    host_cache_size: int | None,
    onboard_blocks: bool,
    secondary_offload_min_priority: int | None,
) -> dict[str, Any]:
    """The fields of `KVCacheConfig` that size its HOST tier and say what goes there."""
    if blocks_in_secondary_pool is not None and host_cache_size is not None:
        raise ConfigError("blocks_in_secondary_pool and host_cache_size both size the secondary pool; give one of them")
    sizes = {"host_blocks": blocks_in_secondary_pool, "host_bytes": host_cache_size}
    if onboard_blocks is False:  # what could not come back does not go there
        if secondary_offload_min_priority is not None:
            raise ConfigError("secondary_offload_min_priority does nothing with onboard_blocks=False; leave one out")
        return {**sizes, "offload_on_evict": False}
    if onboard_blocks is not True:
        raise ConfigError(f"onboard_blocks={show(onboard_blocks)} must be True or False")
    least = _OFFLOAD_MIN_PRIORITY if secondary_offload_min_priority is None else secondary_offload_min_priority
    return {**sizes, "offload_min_priority": check_int(least, "secondary_offload_min_priority", 0, 100)}


def _values(name: str, given: Any) -> list[Any]:
    try:
        values = [] if isinstance(given, (str, bytes)) else list(given)
    except Exception:  # whatever the object raises when it is asked for its values
        values = []
    if not values:
        raise ConfigError(f"{name}={show(given)} must be a list of numbers, one for every layer or repeated over them")
    return values


def _free_gpu_bytes(device: str | None) -> int:
    try:
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    except Exception:  # no torch, no driver, no GPU, or a device that is none
        raise ConfigError(
            "free_gpu_memory_fraction asks a GPU how much is free, and there is none: pass free_gpu_bytes as well"
        ) from None
