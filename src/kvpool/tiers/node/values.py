"""What a node's index keeps of values, slots and holders, and how much of the region each owner may fill."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvpool.config.layers import ceil_div
from kvpool.errors import ConfigError
from kvpool.eviction import EvictionPolicy, Run
from kvpool.pools.arrays import Int64Array
from kvpool.tiers.contract import KEY_BYTES, Worth
from kvpool.tiers.keys import SPACE_BYTES, TENANT_BYTES
from kvpool.tiers.node.region import PAGE, Record
from kvpool.tiers.node.wire import ABSENT, PLACE_BYTES, place_bytes

_NO_KEY = secrets.token_bytes(KEY_BYTES)
_NO_PLACE = place_bytes(ABSENT)


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


class Batch:
    """Values that were committed or used together, in the order of a prompt: what a question needs lies side by side.

    So a prefix that is asked for is compared, answered and marked as used as a whole, and not key by key.
    """

    __slots__ = ("keys", "places", "rows", "slabs", "sums", "uses", "values")

    def __init__(self, values: list[Value], rows: Sequence[int], uses: Int64Array) -> None:
        self.keys = bytearray().join([value.key for value in values])
        self.places = b"".join([place_bytes((value.offset, value.length, value.check)) for value in values])
        self.rows = np.array(rows, np.int64)
        """Of the region's records; -1 where a value is gone."""
        self.slabs = np.array([value.slab for value in values], np.int64)
        self.uses = uses
        """[3, value]: the time of its last use as the index counts, the same in nanoseconds, how often it was used."""
        self.values = values
        self.sums = [0, *accumulate(smallest_slot(value.length) for value in values)]
        """What the values before each fill, in bytes."""
        for at, value in enumerate(values):
            value.batch, value.at = self, at

    @classmethod
    def of(cls, values: list[Value]) -> Batch:
        """Takes values out of their batches into a new one."""
        rows = [int(value.batch.rows[value.at]) for value in values]
        uses = np.stack([value.batch.uses[:, value.at] for value in values], axis=1)
        for value in values:
            value.batch.forget(value.at)
        return cls(values, rows, uses)

    def num_shared(self, at: int, keys: bytes, start: int) -> int:
        """How many of these keys, from number `start` on, are those of the values from `at` on. The first one is."""
        here, there = KEY_BYTES * at, KEY_BYTES * start
        if self.keys[here + KEY_BYTES : here + 2 * KEY_BYTES] != keys[there + KEY_BYTES : there + 2 * KEY_BYTES]:
            return 1  # as with keys that are in no order
        length = min(len(self.keys) - here, len(keys) - there)
        mine, theirs = self.keys[here : here + length], keys[there : there + length]
        if mine == theirs:
            return length // KEY_BYTES
        return int((np.frombuffer(mine, np.uint8) == np.frombuffer(theirs, np.uint8)).argmin()) // KEY_BYTES

    def use(self, start: int, stop: int, newest: int, now: int, hits: int) -> tuple[Int64Array, Int64Array]:
        """Values are used now, the first as the newest; returns the rows of those that are not gone, and their times."""
        uses, rows, times = (
            self.uses[:, start:stop],
            self.rows[start:stop],
            np.arange(newest, newest + start - stop, -1),
        )
        uses[0], uses[1] = times, now
        uses[2] += hits
        are_there = rows >= 0
        return rows[are_there], times[are_there]

    def forget(self, at: int) -> None:
        """A value is gone: no question finds it here any more."""
        self.keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] = _NO_KEY
        self.rows[at] = self.slabs[at] = -1


class Span(NamedTuple):
    """Neighbours in a batch, from `start` to before `stop`. Without a batch: so many keys that are not there."""

    batch: Batch | None
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """What they fill."""
        return 0 if self.batch is None else self.batch.sums[self.stop] - self.batch.sums[self.start]

    @property
    def places(self) -> bytes:
        """Where they are, as it is sent."""
        if self.batch is None:
            return _NO_PLACE * (self.stop - self.start)
        return self.batch.places[PLACE_BYTES * self.start : PLACE_BYTES * self.stop]


def num_found(spans: Sequence[Span]) -> int:
    """How many values there are."""
    return sum([stop - start for batch, start, stop in spans if batch is not None])


def num_bytes_of(spans: Sequence[Span]) -> int:
    """What the values that are there fill."""
    return sum([span.num_bytes for span in spans])


def first_bytes(spans: Sequence[Span], room: int) -> list[Span]:
    """The first values, as many as fill `room` bytes; the others as if they were not there."""
    found: list[Span] = []
    for span in spans:
        batch, start, stop = span
        if batch is not None and span.num_bytes > room:
            stop, room = bisect_right(batch.sums, batch.sums[start] + room) - 1, 0
        else:
            room -= span.num_bytes
        found += [Span(batch, start, stop), Span(None, stop, span.stop)]
    return [span for span in found if span.start < span.stop]


def smallest_slot(length: int) -> int:
    """How many bytes the smallest slot for a value has."""
    return max(1, ceil_div(length, PAGE)) * PAGE


def found_flags(spans: Sequence[Span]) -> bytes:
    """A byte for each key: 1 if it is there."""
    return b"".join([(b"\0" if batch is None else b"\1") * (stop - start) for batch, start, stop in spans])


def values_of(spans: Sequence[Span]) -> list[Value]:
    """All values that are there."""
    return [value for batch, start, stop in spans if batch is not None for value in batch.values[start:stop]]


class Value(Run):
    """A value in its slot. Policies see it as a run of one block, with its uses as they were when it was last ranked."""

    __slots__ = ("at", "batch", "check", "is_gone", "length", "offset", "owner", "shelf", "slab", "slot")

    batch: Batch
    at: int

    def __init__(self, record: Record, offset: int, created: int) -> None:
        self.key, self.slab, self.slot = record.key, record.slab, record.slot
        self.length, self.check, self.owner = record.length, record.check, record.owner
        self.offset = offset
        self.priority, self.start, _ = record.worth
        self.created = created
        self.num_blocks = 1
        self.turn = self.fan_out = self.hint = self.hits = self.scope_hash = 0
        self.session = self.entry = None
        self.tokens = np.frombuffer(self.key[-8:], np.int32)  # stands for its content
        self.known_fingerprint = int.from_bytes(self.key[-8:], "little")
        self.is_gone = False
        self.shelf: EvictionPolicy | None = None

    @property
    def num_uses(self) -> int:
        """How often it was used since this node began."""
        return int(self.batch.uses[2, self.at])

    def read_uses(self) -> None:
        """From now on a policy sees its uses up to now. Whoever uses it only changes numbers of its batch."""
        self.last_access, used_at, self.hits = self.batch.uses[:, self.at].tolist()
        self.last_access_at = used_at / 1e9

    @property
    def span(self) -> Span:
        """It alone."""
        return Span(self.batch, self.at, self.at + 1)

    def fingerprint_of(self, start: int, sum_before: int, key: bytes) -> int:
        """Of a run that begins elsewhere in its text: values have no such parts."""
        return self.fingerprint


class Process:
    """What all connections of one process hold together, in bytes. A value counts for each of its leases."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.held_bytes = 0


class Holder:
    """What one connection holds."""

    def __init__(self, owner: int, process: Process | None = None) -> None:
        self.owner = owner
        self.process = process or Process()
        self.leases: set[int] = set()
        self.reservations: dict[int, list[Slot]] = {}
        self.reserved_bytes = 0
        self.since = 0.0
        """When it began to hold something, if it does: it has not been without anything since."""

    def __bool__(self) -> bool:
        return bool(self.leases or self.reservations)


def tenant_of(key: bytes) -> bytes:
    """What a key says about its tenant."""
    return key[SPACE_BYTES : SPACE_BYTES + TENANT_BYTES]
