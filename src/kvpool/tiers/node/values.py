"""What a node's index keeps of a value, a slot and a holder, and how much of the region each owner may fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvpool.errors import ConfigError
from kvpool.eviction import EvictionPolicy
from kvpool.eviction.run import Tokens
from kvpool.tiers.contract import Worth
from kvpool.tiers.keys import SPACE_BYTES, TENANT_BYTES
from kvpool.tiers.node.region import Record
from kvpool.tiers.node.wire import place_bytes


@dataclass(frozen=True)
class Quotas:
    """The largest share of the region, of (0, 1], that one engine and one tenant may fill."""

    engine: float = 1.0
    tenant: float = 1.0
    tenants: Mapping[bytes, float] = field(default_factory=dict)
    """By `keys.tenant_tag`; others have `tenant`."""

    def __post_init__(self) -> None:
        for share in (self.engine, self.tenant, *self.tenants.values()):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise ConfigError(f"a quota of a node is a share above 0 and up to 1, got {share!r}")

    def shelf(self, engine: int, tenant: bytes) -> tuple[int, bytes]:
        """Values of one shelf are evicted in one order; without quotas there is one."""
        return engine if self.engine < 1 else 0, tenant if self.tenants.get(tenant, self.tenant) < 1 else b""


class Slot(NamedTuple):
    """A slot that somebody writes to."""

    key: bytes
    slab: int
    slot: int
    length: int
    offset: int
    worth: Worth = Worth()


class Value:
    """A value in its slot. Policies see it as a run of one block."""

    __slots__ = (
        *("check", "created", "entry", "fan_out", "hits", "is_gone", "is_touched", "key"),
        *("last_access", "last_access_at", "length", "offset", "owner", "place", "priority", "shelf", "slab", "slot"),
        *("start", "turn"),
    )
    num_blocks: ClassVar[int] = 1
    hint: ClassVar[int] = 0
    session: ClassVar[str | None] = None
    tenant: ClassVar[str] = ""
    sum_before: ClassVar[int] = 0

    def __init__(self, record: Record, offset: int, created: int, now: float) -> None:
        self.key, self.slab, self.slot = record.key, record.slab, record.slot
        self.length, self.check, self.owner = record.length, record.check, record.owner
        self.offset = offset
        self.place = place_bytes((offset, record.length, record.check))
        self.priority, self.start = record.worth
        self.created, self.last_access, self.last_access_at = created, record.used, now
        self.hits = self.turn = self.fan_out = 0
        self.is_gone = self.is_touched = False
        self.entry: Any = None
        self.shelf: EvictionPolicy | None = None

    @property
    def tokens(self) -> Tokens:
        """What stands for its content: policies recognise by it what has left."""
        return np.frombuffer(self.key[-8:], np.int32)

    @property
    def fingerprint(self) -> int:
        """Identity of the content."""
        return int.from_bytes(self.key[-8:], "little")

    def fingerprint_of(self, start: int, sum_before: int, key: bytes) -> int:
        """Of a run that begins elsewhere in its text: values have no such parts."""
        return self.fingerprint


class Holder:
    """What one connection holds."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.leases: set[int] = set()
        self.reservations: dict[int, list[Slot]] = {}
        self.reserved_bytes = 0

    def __bool__(self) -> bool:
        return bool(self.leases or self.reservations)


def tenant_of(key: bytes) -> bytes:
    """What a key says about its tenant."""
    return key[SPACE_BYTES : SPACE_BYTES + TENANT_BYTES]
