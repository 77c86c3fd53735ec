"""kvpool's events in the dictionaries that readers of TensorRT-LLM's event stream parse."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from kvpool.config import KVCacheConfig, Tier
from kvpool.errors import InvalidArgumentError
from kvpool.events import Created, Event, Removed, Stored, Updated
from kvpool.scope import ReuseScope

HASH_ALGORITHM = "kvpool_sha256"  # see kvpool.prefix.digests; none of TensorRT-LLM's, so none of its names
_EXTRA = "extra id "
_MAX_PAST = 65536


def reuse_scope(
    lora_task_id: int | str | None,
    cache_salt: str,
    multimodal: Sequence[Any],
    extra_ids: Sequence[int] | None,
    num_tokens: int,
) -> ReuseScope:
    """TensorRT-LLM's block key, but for the tokens. An extra id holds from the token where it begins to the next."""
    keys = [tuple(given) for given in multimodal]  # which `ReuseScope` checks
    if extra_ids is not None:
        if len(extra_ids) != num_tokens or any(type(extra) is not int or extra < 0 for extra in extra_ids):
            raise InvalidArgumentError(f"extra_ids must hold one int >= 0 for each of the {num_tokens} tokens")
        start, last = 0, 0
        for extra, run in groupby(extra_ids):
            if extra != last:
                keys.append((f"{_EXTRA}{extra}", start))
            start, last = start + len(list(run)), extra
        if last:
            keys.append((f"{_EXTRA}0", start))  # generated tokens have none
    adapter = "" if lora_task_id is None else str(lora_task_id)
    return ReuseScope(tenant=cache_salt, adapter=adapter, multimodal=tuple(keys))


class EventTranslator:
    """Turns events into dictionaries; remembers where blocks with extra keys lie in their sequences."""

    def __init__(self, config: KVCacheConfig, attention_dp_rank: int | None = None) -> None:
        self.config = config
        self.attention_dp_rank = attention_dp_rank
        self._depths: dict[bytes, int] = {}  # the number of a block in its sequence, while some group has it ...
        self._groups: Counter[bytes] = Counter()  # ... which this counts,
        self._past: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # and for a while after: windows lose parents before children

    def translate(self, event: Event) -> Iterator[dict[str, Any]]:
        """One dictionary per event; a Created gives one per layer group, an Updated one per block, with equal event ids."""
        if isinstance(event, Created):
            for group in self.config.groups:
                counts = [size.num_blocks for size in event.pools if size.group == group.index]
                yield self._envelope(event, group.index, {"type": "created", "num_blocks_per_cache_level": counts})
        elif isinstance(event, Stored):
            yield self._envelope(event, event.group, self._stored(event))
        elif isinstance(event, Removed):
            self._forget(event.digests)
            hashes = [digest.hex() for digest in event.digests]
            yield self._envelope(event, event.group, {"type": "removed", "block_hashes": hashes})
        else:
            for digest in event.digests:
                yield self._envelope(event, event.group, _updated(event, digest))

    def _envelope(self, event: Event, group: int, data: dict[str, Any]) -> dict[str, Any]:
        window = self.config.groups[group].window
        if window is None:
            window = self.config.max_seq_len
        return {
            "event_id": event.event_id,
            "layer_group_id": group,
            "window_size": window,
            "attention_dp_rank": self.attention_dp_rank,
            "hash_algo": HASH_ALGORITHM,
            "data": data,
        }

    def _stored(self, event: Stored) -> dict[str, Any]:
        size, scope = event.block_size, event.scope
        tokens = event.tokens.tolist()
        first = self._first_block(event) if scope.multimodal else 0
        blocks = []
        for i, digest in enumerate(event.digests):
            start = (first + i) * size
            extras, media = _keys_at(scope, start, size)
            media += [
                {"type": "mm_key", "hash": item.key, "start_offset": item.position - i * size}
                for item in event.multimodal
                if i * size <= item.position < (i + 1) * size
            ]
            pairs = zip(tokens[i * size : (i + 1) * size], extras, strict=True)
            blocks.append(
                {
                    "type": "stored_block",
                    "block_hash": digest.hex(),
                    "tokens": [
                        {"type": "unique_token", "token_id": token, "token_extra_id": extra} for token, extra in pairs
                    ],
                    "lora_id": _lora_id(scope.adapter),
                    "cache_salt": scope.tenant or None,
                    "mm_keys": media,
                    "cache_level": int(event.tier),
                    "priority": event.priority,
                }
            )
        parent = None if event.parent is None else event.parent.hex()
        return {"type": "stored", "parent_hash": parent, "blocks": blocks}

    def _first_block(self, event: Stored) -> int:
        """The number of the event's first block in its sequence; its blocks are noted for those that follow."""
        parent = event.parent
        first = 0 if parent is None else 1 + (self._depths[parent] if parent in self._depths else self._past[parent])
        for i, digest in enumerate(event.digests):
            self._depths[digest] = first + i
            self._groups[digest] += 1
        return first

    def _forget(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if digest in self._depths:
                self._groups[digest] -= 1
                if not self._groups[digest]:
                    del self._groups[digest]
                    self._past[digest] = self._depths.pop(digest)
        while len(self._past) > _MAX_PAST:
            self._past.popitem(last=False)


def _keys_at(scope: ReuseScope, start: int, size: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Extra ids of a block's tokens, and the multimodal inputs that begin in it."""
    changes = [(at, int(key.removeprefix(_EXTRA))) for key, at in scope.multimodal if key.startswith(_EXTRA)]
    media = [
        {"type": "mm_key", "hash": key, "start_offset": at - start}
        for key, at in scope.multimodal
        if not key.startswith(_EXTRA) and start <= at < start + size
    ]
    if not changes:
        return [0] * size, media
    places = [at for at, _ in changes]
    found = (bisect_right(places, position) - 1 for position in range(start, start + size))
    return [changes[index][1] if index >= 0 else 0 for index in found], media


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
