"""The four kinds of events: what each says about the cache, and their form for scripts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgumentError
from kvpool.scope import MultimodalItem, ReuseScope

if TYPE_CHECKING:
    from kvpool.config import Tier


class PoolSize(NamedTuple):
    """How many blocks one layer group can hold in one tier."""

    group: int
    tier: Tier
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Created:
    """The pools were created or resized. Says nothing about their contents."""

    event_id: int
    pools: tuple[PoolSize, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence became reusable in one layer group, each the parent of the next.

    `parent` is the digest of the block before the first one, None at the start of a sequence. `tokens` holds the tokens
    of all these blocks; it shares memory with the array of the producer and is read-only. `multimodal` lists the items whose
    placeholders are among them, with positions in `tokens`. An item that begins in an earlier block has a negative position.
    """

    event_id: int
    parent: bytes | None
    digests: tuple[bytes, ...]
    tokens: npt.NDArray[np.int32] = field(compare=False, repr=False)  # the digests identify them
    block_size: int
    scope: ReuseScope
    tier: Tier
    priority: int
    group: int
    session: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.digests) * self.block_size:
            raise InvalidArgumentError(
                f"{len(self.digests)} blocks of {self.block_size} tokens were stored with {len(self.tokens)} tokens"
            )
        tokens = self.tokens.view()
        tokens.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks of one layer group left the cache, in this order; `tier` is where they were last."""

    event_id: int
    digests: tuple[bytes, ...]
    tier: Tier
    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Updated:
    """Blocks of one layer group moved to another tier, or got another priority, or both. An unchanged pair is None."""

    event_id: int
    digests: tuple[bytes, ...]
    group: int
    old_tier: Tier | None = None
    new_tier: Tier | None = None
    old_priority: int | None = None
    new_priority: int | None = None

    def __post_init__(self) -> None:
        if (self.old_tier is None) != (self.new_tier is None):
            raise InvalidArgumentError(f"an update needs both tiers or none, got {self.old_tier} -> {self.new_tier}")
        if (self.old_priority is None) != (self.new_priority is None):
            raise InvalidArgumentError(
                f"an update needs both priorities or none, got {self.old_priority} -> {self.new_priority}"
            )
        if self.old_tier is None and self.old_priority is None:
            raise InvalidArgumentError("an update changes a tier or a priority, got neither")


Event: TypeAlias = Created | Stored | Removed | Updated


def to_dict(event: Event) -> dict[str, Any]:
    """An event as JSON-able values: digests in hexadecimal, tiers by name, its kind under "type".

    >>> to_dict(Updated(7, (bytes(2),), group=0, old_priority=35, new_priority=80))["digests"]
    ['0000']
    """
    values = {item.name: _jsonable(getattr(event, item.name)) for item in fields(event)}
    return {"type": type(event).__name__.lower(), **values}


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.name if isinstance(value, int) else value.value
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, PoolSize):
        return {"group": value.group, "tier": value.tier.name, "num_blocks": value.num_blocks}
    if isinstance(value, ReuseScope):
        return {item.name: _jsonable(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return value
