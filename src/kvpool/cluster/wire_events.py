"""Cache events in vLLM's wire format, which common routers read. This module writes and reads both of its forms.

A batch is the msgpack array `[ts, events, data_parallel_rank]`. Since vLLM 0.24 an event is a map with its kind under "type".
Before, it was an array that begins with its kind. A block hash is a number, the low 64 bits of a digest. Whole digests as
bytes are cut to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kvpool.checks import show
from kvpool.errors import ConfigError, InvalidArgumentError

MEDIA = ("GPU", "CPU", "STORAGE")
_LOW_64 = (1 << 64) - 1
_REQUIRED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_OPTIONAL = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality")
_STORED_FIELDS = (*_REQUIRED, *_OPTIONAL, "ownership", "session_id")
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks can be reused in one medium. Each is the parent of the next; `parent` is that of the first."""

    hashes: Sequence[int]
    parent: int | None
    tokens: Sequence[int]
    block_size: int
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None  # per block: what its content depends on besides tokens, or None
    group: int | None = None
    kind: str | None = None
    window: int | None = None
    locality: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last copies of these blocks left a medium."""

    hashes: Sequence[int]
    medium: str = "GPU"
    group: int | None = None
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more, in any medium."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class WireBatch(NamedTuple):
    """One message: the time by the sender's clock, the events, and the data-parallel rank."""

    timestamp: float
    events: list[WireEvent]
    rank: int | None
    unknown: tuple[str, ...] = ()
    """Kinds of events that are not among them, because a later version of the format has them."""


def wire_hash(digest: bytes) -> int:
    """The low 64 bits of a digest, its form on the wire."""
    return int.from_bytes(digest[-8:], "big")


def encode_batch(timestamp: float, events: Iterable[WireEvent], rank: int = 0) -> bytes:
    """A batch as the payload of a message."""
    payload: bytes = _msgpack().encode([timestamp, [_as_map(event) for event in events], rank])
    return payload


def decode_batch(payload: bytes) -> WireBatch:
    """The batch in a payload, without events of unknown kinds; raises `InvalidArgumentError` if it is no batch."""
    try:
        timestamp, events, *rest = _msgpack().decode(payload)
        read = [_from_wire(event) for event in events]
        found = [event for event in read if not isinstance(event, str)]
        rank = None if not rest or rest[0] is None else int(rest[0])
        return WireBatch(float(timestamp), found, rank, tuple(sorted({kind for kind in read if isinstance(kind, str)})))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, _decode_error()) as error:
        raise InvalidArgumentError(
            f"this payload of {len(payload)} bytes is no batch of cache events: {error}"
        ) from None


def _as_map(event: WireEvent) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        required = (event.hashes, event.parent, event.tokens, event.block_size, None, event.medium, event.lora_name)
        optional = (event.extra_keys, event.group, event.kind, event.window, event.locality)
        fields = {"type": "BlockStored", **dict(zip(_REQUIRED, required, strict=True))}
        fields |= {name: value for name, value in zip(_OPTIONAL, optional, strict=True) if value is not None}
        if event.session is not None:
            fields["session_id"] = event.session
        return fields
    if isinstance(event, BlockRemoved):
        fields = {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium}
        fields |= {} if event.group is None else {"group_idx": event.group}
        return fields if event.locality is None else {**fields, "locality": event.locality}
    return {"type": "AllBlocksCleared"}


def _from_wire(event: Any) -> WireEvent | str:
    """An event of either form, checked as far as an index relies on it; for an unknown kind, its name."""
    if isinstance(event, dict):
        kind, fields = event["type"], event
    else:
        kind = event[0]
        fields = dict(zip(_STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS, event[1:], strict=False))
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind == "BlockRemoved":
        return BlockRemoved(_hashes(fields), _medium(fields), _group(fields), fields.get("locality"))
    if kind != "BlockStored":
        return show(kind)
    hashes, tokens, block_size = _hashes(fields), fields["token_ids"], int(fields["block_size"])
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int} or max(tokens, default=0) >= 2**63:
        raise ValueError("tokens have ids that are whole numbers")
    if len(tokens) != len(hashes) * block_size:
        raise ValueError(f"{len(hashes)} blocks of {block_size} tokens were stored with {len(tokens)} tokens")
    extra = fields.get("extra_keys")
    if extra is not None and len(extra) != len(hashes):
        raise ValueError(f"{len(hashes)} blocks were stored with the extra keys of {len(extra)}")
    if extra is not None and any(map(_holds_map, extra)):
        raise ValueError("extra keys are texts, numbers and lists of them")
    parent = fields.get("parent_block_hash")
    return BlockStored(
        hashes,
        None if parent is None else _as_number(parent),
        tokens,
        block_size,
        _medium(fields),
        _text_or_none(fields, "lora_name"),
        extra,
        _group(fields),
        _text_or_none(fields, "kv_cache_spec_kind"),
        fields.get("kv_cache_spec_sliding_window"),
        fields.get("locality"),
        fields.get("session_id"),
    )


def _hashes(fields: dict[str, Any]) -> list[int]:
    return [_as_number(value) for value in fields["block_hashes"]]


def _as_number(value: int | bytes) -> int:
    return wire_hash(value) if isinstance(value, bytes) else int(value) & _LOW_64


def _group(fields: dict[str, Any]) -> int | None:
    group = fields.get("group_idx")
    return None if group is None else int(group)


def _text_or_none(fields: dict[str, Any], name: str) -> str | None:
    text = fields.get(name)
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{name} is a text")
    return text or None


def _holds_map(value: Any) -> bool:
    """Whether nested lists contain a map, which cannot be hashed."""
    return any(map(_holds_map, value)) if isinstance(value, list) else isinstance(value, dict)


def _medium(fields: dict[str, Any]) -> str:
    medium = fields.get("medium")
    return "GPU" if medium is None else str(medium).upper()


def _decode_error() -> type[Exception]:
    """What msgspec raises for bytes that are no msgpack."""
    from msgspec import DecodeError

    return DecodeError


def _msgpack() -> Any:
    try:
        import msgspec.msgpack
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"events on the wire need {error.name}: pip install '.[cluster]' in a checkout of kvpool"
        ) from None
    return msgspec.msgpack
