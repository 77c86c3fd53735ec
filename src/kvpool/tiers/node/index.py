"""NodeIndex: which value is in which slot, who holds what, and which value goes next. One thread uses it; it does no I/O.

A *lease* keeps values where they are while a client copies them. A *reservation* keeps slots that a client writes to; nobody
finds what is in them before it is committed. Both belong to a `Holder` (a connection) and end with it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvpool.tiers.contract import KEY_BYTES, Worth
from kvpool.tiers.keys import KeyPattern
from kvpool.tiers.node.leases import Leases
from kvpool.tiers.node.ranking import Ranking
from kvpool.tiers.node.region import Record, Region
from kvpool.tiers.node.values import (
    Batch,
    Holder,
    Process,
    Quotas,
    Slot,
    Span,
    Value,
    first_bytes,
    num_bytes_of,
    num_found,
    smallest_slot,
    tenant_of,
    values_of,
)
from kvpool.tiers.node.wire import MAX_KEYS, unpacked

WASTE = 8
"""A value goes into larger slots that exist already if it leaves less than one part in so many unused."""
PROCESS_SHARE = 2
"""All connections of one process lease and reserve at most the region divided by this."""
MOST_USED = 64
"""Leases that have ended and wait for `count_uses`: many at a time cost each less, and nobody waits for it."""
SPAN_VALUES = 16
"""A prefix whose spans have fewer values than this on average becomes a batch of its own."""


class _Slab:
    def __init__(self, number: int, slot_bytes: int, num_slots: int) -> None:
        self.number, self.slot_bytes, self.num_slots = number, slot_bytes, num_slots
        self.values: dict[int, Value] = {}
        self.num_writing = 0

    def is_free_to_go(self, held: set[Value]) -> bool:
        return not self.num_writing and held.isdisjoint(self.values.values())


class _SizeClass:
    """Slots of one size."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.slabs: dict[int, _Slab] = {}
        self.free: list[tuple[int, int]] = []


class NodeIndex:
    """All slots of a region. It begins with what the region's records say."""

    def __init__(
        self,
        region: Region,
        policy: str = "lru",
        quotas: Quotas | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.region = region
        self.policy = policy
        self.quotas = quotas or Quotas()
        self._clock = clock
        self.used_by_engine: dict[int, int] = defaultdict(int)
        self.used_by_tenant: dict[bytes, int] = defaultdict(int)
        self.num_evicted = 0
        self._values: dict[bytes, Value] = {}
        self._slabs: dict[int, _Slab] = {}
        self._classes: dict[int, _SizeClass] = {}
        self._unused = list(range(region.num_slabs))[::-1]
        self._newest_uses = np.zeros(region.num_slabs + 1, np.int64)  # of each slab, and of slots that are gone
        self._leases = Leases()
        self._ranking = Ranking(policy, self.quotas, region, self._leases, clock)
        self._gone: list[Value] = []  # removed, but somebody holds them
        self._used: list[tuple[Span, ...]] = []  # their leases have ended, and `count_uses` has not seen them yet
        self._created = self._tick = self._last_reservation = 0
        self._take_over()

    def __len__(self) -> int:
        return len(self._values)

    def _take_over(self) -> None:
        """The values of an earlier node. Of two under one key, the one used last stays."""
        for number in [number for number in reversed(self._unused) if self.region.slot_bytes(number)]:
            self._add_slab(number, self.region.slot_bytes(number))
        found: dict[bytes, Record] = {}
        for record in sorted(self.region.records(), key=lambda record: record.used):
            if (old := found.pop(record.key, None)) is not None:
                self.region.wipe(old.slab, old.slot)
            found[record.key] = record
        records = list(found.values())
        for record in records:
            self._count(record.owner, record.key, self._slabs[record.slab].slot_bytes)
        for at in range(0, len(records), MAX_KEYS):
            self._publish(records[at : at + MAX_KEYS][::-1])  # those of one prompt are neighbours: see `count_uses`
        for size in self._classes.values():
            size.free = [
                (slab.number, slot)
                for slab in size.slabs.values()
                for slot in range(slab.num_slots)[::-1]
                if slot not in slab.values
            ]

    # --- looking -----------------------------------------------------------------------------------------------------

    def find(self, keys: bytes) -> list[Span]:
        """Where the values under these keys are; the keys lie side by side."""
        spans: list[Span] = []
        at, count = 0, len(keys) // KEY_BYTES
        found: list[Value | None] = []
        while at < count:
            value = found[at] if found else self._values.get(keys[KEY_BYTES * at : KEY_BYTES * (at + 1)])
            if value is not None:
                num_shared = value.batch.num_shared(value.at, keys, at)
                spans.append(Span(value.batch, value.at, value.at + num_shared))
                at += num_shared
                continue
            found = found or list(map(self._values.get, unpacked(keys)))
            end = next((i for i in range(at, count) if found[i] is not None), count)
            spans.append(Span(None, at, end))
            at = end
        return spans

    def lease(self, holder: Holder, spans: Sequence[Span]) -> tuple[int, int]:
        """Keeps values for a holder: the number of the lease, 0 if none is there, and how many there are."""
        hits = num_found(spans)
        if not hits:
            return 0, 0
        number = self.hold(spans)
        self._begin_holding(holder)
        holder.leases.add(number)
        holder.process.held_bytes += num_bytes_of(spans)
        return number, hits

    def within_share(self, process: Process, spans: Sequence[Span]) -> Sequence[Span]:
        """The first values, as many as the process may lease beside all that it holds."""
        room = self.region.num_bytes // PROCESS_SHARE - process.held_bytes
        return spans if num_bytes_of(spans) <= room else first_bytes(spans, max(0, room))

    def _begin_holding(self, holder: Holder) -> None:
        if not holder:
            holder.since = self._clock()

    def hold(self, spans: Sequence[Span]) -> int:
        """Keeps values where they are until `let_go`."""
        return self._leases.begin(spans)

    def let_go(self, number: int, *, were_used: bool = True) -> None:
        """Ends what `hold` began."""
        self._let_go(self._leases.end(number), were_used=were_used)

    def _let_go(self, spans: Sequence[Span], *, were_used: bool) -> None:
        if self._gone:
            gone, self._gone = self._gone, []
            for value in gone:
                self._free_unless_held(value)
        if were_used:
            self._used.append(tuple(spans))
            if len(self._used) >= MOST_USED:
                self.count_uses()

    def count_uses(self) -> None:
        """Values whose leases have ended are used now, in the order of a prompt: the first is worth the most.

        The records learn of it, for the order after a restart.
        """
        used, now = Counter(reversed(self._used)), self._now()
        self._used.clear()
        for spans, hits in reversed(used.items()):  # the last use is the newest
            if SPAN_VALUES * len(spans) > SPAN_VALUES + num_found(spans):
                spans = self._joined(spans)
            for batch, start, stop in spans:
                if batch is None:
                    continue
                first = self._stamp(stop - start)
                self.region.touch(*batch.use(start, stop, first, now, hits))
                self._newest_uses[batch.slabs[start:stop]] = first

    def _joined(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Values that were committed in many batches and are asked for together become one."""
        values = [value for value in dict.fromkeys(values_of(spans)) if not value.is_gone]
        return (Span(Batch.of(values), 0, len(values)),) if values else ()

    def num_leased(self, holder: Holder) -> int:
        """How many values a holder keeps."""
        return sum(num_found(self._leases[number]) for number in holder.leases)

    def matching(self, pattern: KeyPattern) -> list[bytes]:
        """The keys of all values that are alike."""
        return [key for key in self._values if pattern.matches(key)]

    def listed(self, cursor: int, count: int) -> tuple[int, list[Value]]:
        """Up to `count` values from a slot on, and where to go on; 0 at the end. What stays meanwhile is listed once."""
        found: list[Value] = []
        number, slot = divmod(cursor, self.region.slab_bytes)
        for slab in (self._slabs[n] for n in range(number, self.region.num_slabs) if n in self._slabs):
            for at in range(slot if slab.number == number else 0, slab.num_slots):
                if len(found) == count:
                    return slab.number * self.region.slab_bytes + at, found
                value = slab.values.get(at)
                if value is not None and not value.is_gone:
                    found.append(value)
        return 0, found

    def slot_counts(self) -> Iterator[tuple[int, int, int, int]]:
        """For each slot size: slabs, slots, and slots that are free."""
        for size in self._classes.values():
            yield size.slot_bytes, len(size.slabs), sum(s.num_slots for s in size.slabs.values()), len(size.free)

    @property
    def used_bytes(self) -> int:
        """Of all slots that hold something or are reserved."""
        return sum(self.used_by_engine.values())

    # --- storing -----------------------------------------------------------------------------------------------------

    def reserve(self, holder: Holder, wanted: Iterable[tuple[bytes, int, Worth]]) -> tuple[int, list[Slot | None]]:
        """Slots for values that are not there: key, length, worth; None where there is no room that may be taken."""
        slots = [self._take(holder, *each) for each in wanted]
        taken = [slot for slot in slots if slot is not None]
        self._last_reservation = number = self._last_reservation + 1
        if taken:
            self._begin_holding(holder)
            holder.reservations[number] = taken
        return number, slots

    def commit(self, holder: Holder, number: int, checks: Sequence[int | None]) -> list[Value | None]:
        """Makes what was written findable; a slot without a checksum is given back. KeyError: no such reservation."""
        slots = holder.reservations[number]
        if len(slots) != len(checks):
            raise ValueError(f"a reservation of {len(slots)} slots was committed with {len(checks)} checksums")
        del holder.reservations[number]
        records: dict[bytes, Record] = {}
        first = self._stamp(len(slots))
        for at, (slot, check) in enumerate(zip(slots, checks, strict=True)):
            self._end_writing(holder, slot)
            if check is None or slot.key in self._values or slot.key in records:
                self._free(slot.slab, slot.slot, holder.owner, slot.key)
                continue
            record = Record(slot.slab, slot.slot, slot.key, slot.length, check, holder.owner, first - at, slot.worth)
            self.region.write(record)
            records[slot.key] = record
        self._publish(list(records.values()))
        return [self._values.get(slot.key) for slot in slots]

    def release(self, holder: Holder, number: int) -> bool:
        """Ends a lease; False: the holder has none of this number."""
        if number not in holder.leases:
            return False
        holder.leases.remove(number)
        spans = self._leases.end(number)
        holder.process.held_bytes -= num_bytes_of(spans)
        self._let_go(spans, were_used=True)
        return True

    def release_all(self, holder: Holder) -> None:
        """The connection has ended, and with it its leases and reservations."""
        for number in list(holder.leases):
            self.release(holder, number)
        for slot in [slot for slots in holder.reservations.values() for slot in slots]:
            self._end_writing(holder, slot)
            self._free(slot.slab, slot.slot, holder.owner, slot.key)
        holder.reservations.clear()

    def remove(self, key: bytes) -> bool:
        """Forgets a value; its slot is free as soon as nobody holds it."""
        value = self._values.get(key)
        if value is None:
            return False
        self._drop(value)
        return True

    # --- slots -------------------------------------------------------------------------------------------------------

    def _take(self, holder: Holder, key: bytes, length: int, worth: Worth) -> Slot | None:
        needed = smallest_slot(length)
        if needed > self.region.slab_bytes:
            return None
        size = self._class_for(needed)
        tenant = tenant_of(key)
        if holder.process.held_bytes + size.slot_bytes > self.region.num_bytes // PROCESS_SHARE:
            return None
        place = self._place_within_quotas(size, holder.owner, tenant)
        if place is None:
            return None
        slab, slot = place
        self._slabs[slab].num_writing += 1
        holder.reserved_bytes += size.slot_bytes
        holder.process.held_bytes += size.slot_bytes
        self._count(holder.owner, key, size.slot_bytes)
        return Slot(key, slab, slot, length, self.region.offset(slab, slot, size.slot_bytes), worth)

    def _place_within_quotas(self, size: _SizeClass, owner: int, tenant: bytes) -> tuple[int, int] | None:
        """A free slot that this engine and this tenant may have; what they evict for it is their own."""
        engine, of_tenant = self.quotas.engine, self.quotas.tenants.get(tenant, self.quotas.tenant)
        room = self.region.num_bytes
        while engine < 1 and self.used_by_engine[owner] + size.slot_bytes > room * engine:
            if not self._evict_of(size, owner, None):
                return None
        while of_tenant < 1 and self.used_by_tenant[tenant] + size.slot_bytes > room * of_tenant:
            if not self._evict_of(size, None, tenant):
                return None
        if not size.free:
            self._make_room(size)
        return size.free.pop() if size.free else None

    def _evict_of(self, size: _SizeClass, owner: int | None, tenant: bytes | None) -> bool:
        """Evicts a value of one engine or one tenant, of this size if there is one."""
        self.count_uses()
        for slot_bytes in (size.slot_bytes, *(other for other in self._classes if other != size.slot_bytes)):
            if (victim := self._ranking.next_victim(slot_bytes, owner, tenant)) is not None:
                self._evict(victim)
                return True
        return False

    def _make_room(self, size: _SizeClass) -> None:
        """Takes an unused slab, or the value that goes next, or a whole slab of another size that is older than that."""
        if self._unused:
            self._divide(self._unused.pop(), size)
            return
        self.count_uses()
        victim = self._ranking.next_victim(size.slot_bytes)
        cold = self._coldest(size, victim)
        if cold is not None:
            self._retire(cold)
            self._divide(cold.number, size)
        elif victim is not None:
            self._evict(victim)

    def _coldest(self, size: _SizeClass, victim: Value | None) -> _Slab | None:
        """The slab of another size whose last use lies furthest back, and before that of the value that would go."""
        others = [s for s in self._slabs.values() if s.slot_bytes != size.slot_bytes]
        newest = self._newest_uses
        others = [s for s in others if victim is None or newest[s.number] < victim.last_access]
        if self._ranking.by_priority and victim is not None:
            others = [s for s in others if all(v.priority <= victim.priority for v in s.values.values())]
        others.sort(key=lambda slab: int(newest[slab.number]))
        return next((slab for slab in others if slab.is_free_to_go(self._leases.held)), None)

    def _class_for(self, slot_bytes: int) -> _SizeClass:
        fitting = [size for size in self._classes if slot_bytes <= size <= slot_bytes + slot_bytes // WASTE]
        chosen = min(fitting, default=slot_bytes)
        return self._classes.get(chosen) or _SizeClass(chosen)

    def _divide(self, number: int, size: _SizeClass) -> None:
        self.region.divide(number, size.slot_bytes)
        self._classes.setdefault(size.slot_bytes, size)
        self._add_slab(number, size.slot_bytes)

    def _add_slab(self, number: int, slot_bytes: int) -> None:
        if number in self._unused:
            self._unused.remove(number)
        size = self._classes.setdefault(slot_bytes, _SizeClass(slot_bytes))
        slab = _Slab(number, slot_bytes, self.region.slab_bytes // slot_bytes)
        self._slabs[number] = size.slabs[number] = slab
        self._newest_uses[number] = 0
        size.free.extend((number, slot) for slot in range(slab.num_slots)[::-1])

    def _retire(self, slab: _Slab) -> None:
        """Evicts all values of a slab that nobody holds or writes to."""
        for value in list(slab.values.values()):
            self._evict(value)
        size = self._classes[slab.slot_bytes]
        del self._slabs[slab.number], size.slabs[slab.number]
        size.free = [place for place in size.free if place[0] != slab.number]
        if not size.slabs:
            del self._classes[slab.slot_bytes]
            self._ranking.remove_size(slab.slot_bytes)

    # --- values ------------------------------------------------------------------------------------------------------

    def _publish(self, records: Sequence[Record]) -> None:
        """Makes values findable, in the order of a prompt."""
        if not records:
            return
        region, used = self.region, [record.used for record in records]
        self._tick = max(self._tick, *used)
        values = []
        for record in records:
            slab = self._slabs[record.slab]
            self._created += 1
            value = Value(record, region.offset(slab.number, record.slot, slab.slot_bytes), self._created)
            slab.values[record.slot] = self._values[record.key] = value
            self._newest_uses[slab.number] = max(self._newest_uses[slab.number], record.used)
            values.append(value)
        uses = np.array([used, [self._now()] * len(used), [0] * len(used)], np.int64)
        Batch(values, [region.row(record.slab, record.slot) for record in records], uses)
        for record, value in zip(records, values, strict=True):
            self._ranking.add(value, self._slabs[value.slab].slot_bytes, record.worth.seconds)

    def _evict(self, value: Value) -> None:
        assert value.shelf is not None
        value.read_uses()
        value.shelf.evicted(value)
        self.num_evicted += 1
        self._drop(value)

    def _drop(self, value: Value) -> None:
        del self._values[value.key]
        assert value.shelf is not None
        value.read_uses()
        value.shelf.remove(value)
        value.is_gone = True
        value.batch.forget(value.at)
        self.region.wipe(value.slab, value.slot)
        self._free_unless_held(value)

    def _free_unless_held(self, value: Value) -> None:
        if value in self._leases.held:
            self._gone.append(value)
            return
        del self._slabs[value.slab].values[value.slot]
        self._free(value.slab, value.slot, value.owner, value.key)

    def _free(self, slab: int, slot: int, owner: int, key: bytes) -> None:
        slot_bytes = self._slabs[slab].slot_bytes
        self._count(owner, key, -slot_bytes)
        self._classes[slot_bytes].free.append((slab, slot))

    def _end_writing(self, holder: Holder, slot: Slot) -> None:
        slab = self._slabs[slot.slab]
        slab.num_writing -= 1
        holder.reserved_bytes -= slab.slot_bytes
        holder.process.held_bytes -= slab.slot_bytes

    def _count(self, owner: int, key: bytes, num_bytes: int) -> None:
        tenant = tenant_of(key)
        for used, name in ((self.used_by_engine, owner), (self.used_by_tenant, tenant)):
            used[name] += num_bytes  # type: ignore[index]  # mypy joins the two kinds of names
            if not used[name]:  # type: ignore[index]
                del used[name]  # type: ignore[arg-type]

    def _now(self) -> int:
        return int(1e9 * self._clock())

    def _stamp(self, count: int) -> int:
        """Takes `count` new times of use; returns the latest."""
        self._tick += count
        return self._tick
