"""kvpool's events in the dictionaries that readers of TensorRT-LLM's event stream parse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpool.config import KVCacheConfig, Tier
from kvpool.events import Created, Event, Removed, Stored, Updated


def translate(event: Event, config: KVCacheConfig) -> Iterator[dict[str, Any]]:
    """One dictionary per event; a Created gives one per layer group, an Updated one per block, with equal event ids."""
    if isinstance(event, Created):
        for group in config.groups:
            counts = [size.num_blocks for size in event.pools if size.group == group.index]
            yield _envelope(event, group.index, config, {"type": "created", "num_blocks_per_cache_level": counts})
    elif isinstance(event, Stored):
        yield _envelope(event, event.group, config, _stored(event))
    elif isinstance(event, Removed):
        hashes = [digest.hex() for digest in event.digests]
        yield _envelope(event, event.group, config, {"type": "removed", "block_hashes": hashes})
    else:
        for digest in event.digests:
            yield _envelope(event, event.group, config, _updated(event, digest))


def _envelope(event: Event, group: int, config: KVCacheConfig, data: dict[str, Any]) -> dict[str, Any]:
    window = config.groups[group].window
    if window is None:
        window = config.max_seq_len
    return {"event_id": event.event_id, "layer_group_id": group, "window_size": window, "data": data}


def _stored(event: Stored) -> dict[str, Any]:
    size = event.block_size
    tokens = event.tokens.tolist()
    blocks = [
        {
            "type": "stored_block",
            "block_hash": digest.hex(),
            "tokens": [{"type": "unique_token", "token_id": token} for token in tokens[i * size : (i + 1) * size]],
            "cache_level": int(event.tier),
            "priority": event.priority,
        }
        for i, digest in enumerate(event.digests)
    ]
    parent = None if event.parent is None else event.parent.hex()
    return {"type": "stored", "parent_hash": parent, "blocks": blocks}


def _updated(event: Updated, digest: bytes) -> dict[str, Any]:
    def diff(old: Tier | int | None, new: Tier | int | None) -> dict[str, Any] | None:
        if old is None or new is None:
            return None
        return {"type": "event_diff", "old_value": int(old), "new_value": int(new)}

    return {
        "type": "updated",
        "block_hash": digest.hex(),
        "cache_level": diff(event.old_tier, event.new_tier),
        "priority": diff(event.old_priority, event.new_priority),
    }
