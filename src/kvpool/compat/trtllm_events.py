"""kvpool's events in the dictionaries that readers of TensorRT-LLM's event stream parse."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvpool.checks import check_number, show
from kvpool.compat.trtllm_blocks import window_sizes
from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.events import Created, Removed, Stored, Updated
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import as_array
from kvpool.scope import MultimodalItem, ReuseScope

HASH_ALGORITHM = "kvpool_sha256"  # none of TensorRT-LLM's, so none of its names

# Extra ids and images are items of a prompt alike. The key of an extra id is an int, that of an image never is.


def prompt_items(multimodal: Any, extra_ids: Any, num_tokens: int) -> list[MultimodalItem]:
    """Images, given as (content hash, offset) or (content hash, offset, length), and runs of equal extra ids as items."""
    try:
        given = [tuple(item) for item in multimodal]
    except Exception:  # whatever the object raises when it is asked for its values
        message = f"multimodal takes (hash, offset, length) for every item, got {show(multimodal)}"
        raise InvalidArgumentError(message) from None
    images = []
    for item in given:
        if len(item) not in (2, 3) or not isinstance(item[0], (str, bytes)):
            raise InvalidArgumentError(
                "multimodal takes (hash, offset) or (hash, offset, length), the hash as a string or bytes, "
                f"got {show(item)} in {show(multimodal)}"
            )
        images.append(MultimodalItem(item[1], item[2] if len(item) == 3 else 1, item[0]))
    extras = [] if extra_ids is None else _extra_items(extra_ids, num_tokens)
    for extra in extras:
        for image in images:
            if _overlap(extra, image):
                raise InvalidArgumentError(
                    f"tokens from {show(image.position)} on belong to the image {show(image.key)} and have the extra id "
                    f"{extra.key!r}: a token has one of both; give the image a hash that tells the two apart"
                )
    return images + extras


def _overlap(extra: MultimodalItem, image: MultimodalItem) -> bool:
    numbers = type(image.position) is int and type(image.length) is int  # others are refused with the whole prompt
    return numbers and image.position < extra.position + extra.length and extra.position < image.position + image.length


def _extra_items(extra_ids: Any, num_tokens: int) -> list[MultimodalItem]:
    ids = as_array(extra_ids, "extra_ids")
    if ids.shape != (num_tokens,) or ids.dtype.kind not in "iu" or (ids < 0).any():
        raise InvalidArgumentError(
            f"extra_ids must hold one int >= 0 for each of the {num_tokens} tokens, got {show(extra_ids)}"
        )
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), num_tokens]
    return [MultimodalItem(start, end - start, int(ids[start])) for start, end in pairwise(edges) if ids[start]]


def reuse_scope(lora_task_id: Any, cache_salt: Any) -> ReuseScope:
    """What must be equal besides tokens and items: the LoRA and the salt. A LoRA is a number or a name."""
    adapter = ""
    if lora_task_id is not None:
        is_name = isinstance(lora_task_id, str) and lora_task_id and not lora_task_id.isdecimal()
        if not is_name and (type(lora_task_id) is not int or not 0 <= lora_task_id < 2**64):
            raise InvalidArgumentError(
                f"lora_task_id must be an int in 0..2**64-1, or a name that is no number, got {show(lora_task_id)}"
            )
        adapter = str(lora_task_id)
    return ReuseScope(tenant="" if cache_salt is None else cache_salt, adapter=adapter)


class KVCacheEventManager:
    """What happened to pools and blocks, in order, since it was last asked.

    Ids begin at 0 and grow by one. A gap means that events were dropped, because more came than the buffer holds:
    `cache.manager.subscribe()` starts with everything that is cached.
    """

    def __init__(self, manager: KVCacheManager, attention_dp_rank: int | None = None) -> None:
        self.attention_dp_rank = attention_dp_rank
        self._groups = range(len(manager.config.groups))
        self._windows = window_sizes(manager.config)
        self._block_size = manager.config.block_size
        manager.events.tells_unfilled = True
        self._subscription = manager.subscribe()
        self._next_id = 0
        self._last_id: int | None = None  # of the last event in the log, whose events may be several here

    def get_events(self, timeout_ms: float | None = 0) -> list[dict[str, Any]]:
        """Events since the last call; 0 does not wait for one, None waits as long as it takes."""
        seconds = None
        if timeout_ms is not None:
            expected = "a number of milliseconds, 0 or more, or None"
            seconds = check_number(timeout_ms, "timeout_ms", expected, InvalidArgumentError) / 1000
            if seconds < 0:
                raise InvalidArgumentError(f"timeout_ms={timeout_ms} must be {expected}")
        self._subscription.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
        found: list[dict[str, Any]] = []
        ends: dict[int, list[dict[str, Any]]] = {}  # by layer group, the blocks of the last Stored
        for event in self._subscription.poll().events:
            if self._last_id is not None:
                self._next_id += max(0, event.event_id - self._last_id - 1)  # what was dropped leaves a gap
            self._last_id = event.event_id
            if isinstance(event, Stored):
                blocks, before = _stored_blocks(event), ends.get(event.group)
                if event.block_size < self._block_size and before and before[-1]["block_hash"] == _hex(event.parent):
                    before += blocks  # the unfilled block of a sequence that ends, behind its full ones
                    continue
                ends[event.group] = blocks
                data = {"type": "stored", "parent_hash": _hex(event.parent), "blocks": blocks}
                found.append(self._envelope(event.group, data))
            else:
                found += [self._envelope(group, data) for group, data in self._translate(event)]
        return found

    def _envelope(self, group: int, data: dict[str, Any]) -> dict[str, Any]:
        self._next_id += 1
        return {
            "event_id": self._next_id - 1,
            "layer_group_id": group,
            "window_size": self._windows[group],
            "attention_dp_rank": self.attention_dp_rank,
            "hash_algo": HASH_ALGORITHM,
            "data": data,
        }

    def _translate(self, event: Created | Removed | Updated) -> Iterator[tuple[int, dict[str, Any]]]:
        """(layer group, data): one of each event; of a Created one per group, of an Updated one per block."""
        if isinstance(event, Created):
            for group in self._groups:
                levels = {size.tier: size.num_blocks for size in event.pools if size.group == group}
                if not levels.get(Tier.DISK):
                    levels.pop(Tier.DISK, None)  # TensorRT-LLM knows two levels
                yield group, {"type": "created", "num_blocks_per_cache_level": list(levels.values())}
        elif isinstance(event, Removed):
            hashes = [digest.hex() for digest in event.digests]
            yield event.group, {"type": "removed", "block_hashes": hashes}
        else:
            for digest in event.digests:
                yield event.group, _updated(event, digest)


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()


def _stored_blocks(event: Stored) -> list[dict[str, Any]]:
    return [_stored_block(event, index) for index in range(len(event.digests))]


def _stored_block(event: Stored, index: int) -> dict[str, Any]:
    """One block of an event, with the extra ids of its tokens and the images that it has a part of."""
    start, stop = index * event.block_size, (index + 1) * event.block_size
    extras, media = [0] * event.block_size, []
    for item in event.multimodal:
        first, last = max(item.position, start), min(item.position + item.length, stop)
        if first >= last:
            continue
        if isinstance(item.key, int):
            extras[first - start : last - start] = [item.key] * (last - first)
        else:
            key = item.key if isinstance(item.key, str) else item.key.hex()
            media.append({"type": "mm_key", "hash": key, "start_offset": first - item.position})
    tokens: Sequence[int] = event.tokens[start:stop].tolist()
    return {
        "type": "stored_block",
        "block_hash": event.digests[index].hex(),
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": extra}
            for token, extra in zip(tokens, extras, strict=True)
        ],
        "lora_id": _lora_id(event.scope.adapter),
        "cache_salt": event.scope.tenant or None,
        "mm_keys": media,
        "cache_level": int(event.tier),
        "priority": event.priority,
    }


def _lora_id(adapter: str) -> int | str | None:
    """The adapter as it was given: a number, a name, or none."""
    return int(adapter) if adapter.isdecimal() else adapter or None


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
