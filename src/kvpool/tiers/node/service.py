"""NodeService: what a node does for a message. All of it runs in one thread; tiers behind the node answer later.

A handler returns the answer, None where there is none, or `LATER` where a job of `Behind` will give it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvpool.errors import InvalidArgumentError
from kvpool.files import parse_json
from kvpool.tiers.contract import Worth
from kvpool.tiers.envelope import checksum
from kvpool.tiers.keys import Fingerprint, KeySpace
from kvpool.tiers.node import wire
from kvpool.tiers.node.behind import Behind
from kvpool.tiers.node.index import NodeIndex
from kvpool.tiers.node.values import Holder, Process, Slot, Span, Value, found_flags, num_found, values_of
from kvpool.tiers.node.wire import ABSENT, PRESENT, Message, Verb, WireError

LATER: Final = b""
"""The answer comes when tiers behind the node have answered."""
MAX_LEASES = 64
"""That one connection may have at a time; it needs one."""
MAX_SPACES = 1024
MAX_NAMES = 1024
WAITING_SHARE = 4
"""Values that wait for tiers behind the node fill at most the region divided by this."""
_TOLD = 64  # clients and owners that statistics name


class Client:
    """The other end of a connection, as the node knows it."""

    def __init__(self, pid: int, send: Callable[[bytes], None], process: Process | None = None) -> None:
        self.pid = pid
        self.process = process or Process()
        self.name = ""
        """Of the engine; empty until it has said hello."""
        self.holder = Holder(0, self.process)
        self.send = send
        self.is_gone = False

    def begin(self, name: str) -> None:
        """It has said hello."""
        self.name = name
        self.holder = Holder(owner_of(name), self.process)


def owner_of(name: str) -> int:
    """What records keep of an engine's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class NodeService:
    """The verbs of `wire.Verb`. A message that is wrong raises `WireError`: its sender is cut off."""

    def __init__(self, index: NodeIndex, behind: Behind) -> None:
        self.index = index
        self.behind = behind
        self.has_tiers = bool(behind)
        self.counts: Counter[str] = Counter()
        self._spaces: set[bytes] = set()
        self.names: dict[int, str] = {}
        self._num_removals = 0
        self._waiting_bytes = 0
        self._verbs: dict[int, Callable[[Client, Message], bytes | None]] = {
            Verb.INTRODUCE: self._introduce,
            Verb.FIND: self._find,
            Verb.LEASE: self._lease,
            Verb.RESERVE: self._reserve,
            Verb.COMMIT: self._commit,
            Verb.RELEASE: self._release,
            Verb.DOUBT: self._doubt,
            Verb.REMOVE: self._remove,
            Verb.PURGE: self._purge,
            Verb.LIST: self._list,
        }

    def handle(self, client: Client, found: Message) -> bytes | None:
        """The answer to a message."""
        verb = self._verbs.get(found.verb)
        if verb is None:
            raise WireError(f"there is no verb {found.verb}")
        try:
            return verb(client, found)
        except InvalidArgumentError as error:
            raise WireError(str(error)) from None

    def hello(self, client: Client, found: Message) -> bytes:
        """The first message of a client; its answer goes with the region's file descriptor."""
        name = bytes(found.body).decode(errors="replace")
        if found.verb != Verb.HELLO or not 0 < len(found.body) <= wire.MAX_NAME:
            raise WireError(f"the first message must say hello, with a name of 1 to {wire.MAX_NAME} bytes")
        client.begin(name)
        if len(self.names) < MAX_NAMES:
            self.names[client.holder.owner] = name
        return wire.message(Verb.HELLO, 0, self.index.region.num_bytes)

    def leave(self, client: Client) -> None:
        """The connection has ended, and with it all that it holds."""
        client.is_gone = True
        self.index.release_all(client.holder)

    # --- looking and loading -----------------------------------------------------------------------------------------

    def _find(self, client: Client, found: Message) -> bytes | None:
        keys = wire.keys_in(found)
        there = found_flags(self.index.find(keys))
        if not self.has_tiers or 0 not in there:
            return wire.message(Verb.FIND, found.num, 0, there)
        lacking = [key for key, is_there in zip(wire.unpacked(keys), there, strict=True) if not is_there]

        def done(behind: list[bool]) -> None:
            rest = iter(behind)
            client.send(wire.message(Verb.FIND, len(there), 0, wire.flags(here or next(rest) for here in there)))

        self.behind.find(lacking, _due(found), done)
        return LATER

    def _lease(self, client: Client, found: Message) -> bytes | None:
        keys = wire.keys_in(found, with_numbers=True)
        if len(client.holder.leases) >= MAX_LEASES:
            raise WireError(f"it has {MAX_LEASES} leases already and released none")
        spans = self.index.find(keys)
        if self.has_tiers and num_found(spans) < found.num:
            self._fetch(client, keys, wire.numbers_behind(found), spans, _due(found))
            return LATER
        return self._leased(client, spans, found.num)

    def _leased(self, client: Client, spans: Sequence[Span], count: int) -> bytes:
        spans = self.index.within_share(client.process, spans)
        number, hits = self.index.lease(client.holder, spans)
        self.counts["hits"] += hits
        self.counts["misses"] += count - hits
        return wire.message(Verb.LEASE, count, number, b"".join([span.places for span in spans]))

    def _fetch(self, client: Client, keys: bytes, sizes: Sequence[int], spans: list[Span], due: float) -> None:
        """Brings what memory lacks from the tiers behind, as far as there is room, and answers then."""
        held = self.index.hold(spans)
        asked = zip(wire.unpacked(keys), sizes, found_flags(spans), strict=True)
        wanted = {key: size for key, size, is_there in asked if not is_there and size}
        fetching = Holder(client.holder.owner, client.process)
        num_removals = self._num_removals

        def found(there: list[bool]) -> None:
            """Only what is there gets a slot: for a miss, nothing must leave the memory."""
            chosen = [key for key, is_there in zip(wanted, there, strict=True) if is_there]
            number, slots = self.index.reserve(fetching, [(key, wanted[key], Worth()) for key in chosen])
            taken = [slot for slot in slots if slot is not None]
            if not taken:
                answer()
                return
            rows = [self._row(slot) for slot in taken]
            self.behind.load([slot.key for slot in taken], rows, due, lambda checks: loaded(number, checks))

        def loaded(number: int, checks: list[int | None]) -> None:
            if num_removals != self._num_removals:  # what was removed meanwhile must not come back
                checks = [None] * len(checks)
            new = self.index.commit(fetching, number, checks)
            self.counts["fetched"] += len(new) - new.count(None)
            answer()

        def answer() -> None:
            self.index.let_go(held, were_used=False)
            if not client.is_gone:
                client.send(self._leased(client, self.index.find(keys), len(sizes)))

        self.behind.find(list(wanted), due, found)

    def _row(self, slot: Slot | Value) -> memoryview:
        return self.index.region.memory[slot.offset : slot.offset + slot.length]

    def _release(self, client: Client, found: Message) -> None:
        if not self.index.release(client.holder, found.number):
            raise WireError(f"it has no lease {found.number}")

    def _doubt(self, client: Client, found: Message) -> None:
        """Drops values whose bytes are not what was stored. Nobody is believed: a copy may have been torn elsewhere."""
        for value in values_of(self.index.find(wire.keys_in(found))):
            if checksum(value.key, self._row(value)) != value.check:
                self.index.remove(value.key)
                self.counts["damaged"] += 1

    # --- storing and removing ----------------------------------------------------------------------------------------

    def _reserve(self, client: Client, found: Message) -> bytes:
        keys, wanted = wire.keys_in(found, with_numbers=True), map(wire.unrated, wire.numbers_behind(found))
        if len(client.holder.reservations) >= MAX_LEASES:
            raise WireError(f"it has {MAX_LEASES} reservations already and committed none")
        there = found_flags(self.index.find(keys))
        asked = zip(wire.unpacked(keys), wanted, there, strict=True)
        number, slots = self.index.reserve(
            client.holder, [(key, *each) for key, each, is_there in asked if not is_there]
        )
        rest = iter([ABSENT if slot is None else (slot.offset, slot.length, 0) for slot in slots])
        places = [PRESENT if is_there else next(rest) for is_there in there]
        self.counts["refused"] += slots.count(None)
        return wire.message(Verb.RESERVE, found.num, number, b"".join(map(wire.place_bytes, places)))

    def _commit(self, client: Client, found: Message) -> bytes:
        try:
            values = self.index.commit(client.holder, found.number, wire.numbers_in(found))
        except KeyError:
            raise WireError(f"it has no reservation {found.number}") from None
        except ValueError as error:
            raise WireError(str(error)) from None
        self.counts["stored"] += len(values)
        self._store_behind([value for value in values if value is not None])
        return wire.message(Verb.COMMIT, len(values), 0, wire.flags(value is not None for value in values))

    def _store_behind(self, values: list[Value]) -> None:
        """Values stay until the tiers behind have them, unless too many wait."""
        if not self.has_tiers or not values:
            return
        num_bytes = sum(value.length for value in values)
        if self._waiting_bytes + num_bytes > self.index.region.num_bytes // WAITING_SHARE:
            self.counts["not_stored_behind"] += len(values)
            return
        held = self.index.hold([value.span for value in values])
        self._waiting_bytes += num_bytes

        def done() -> None:
            self._waiting_bytes -= num_bytes
            self.index.let_go(held, were_used=False)

        if not self.behind.store([value.key for value in values], [self._row(value) for value in values], done):
            self.counts["not_stored_behind"] += len(values)
            done()

    def _remove(self, client: Client, found: Message) -> bytes | None:
        keys = wire.unpacked(wire.keys_in(found))
        was_there = [self.index.remove(key) for key in keys]
        self._num_removals += 1
        if not self.has_tiers:
            return wire.message(Verb.REMOVE, len(keys), 0, wire.flags(was_there))

        def done(there: list[bool]) -> None:
            both = [here or behind for here, behind in zip(was_there, there, strict=True)]
            client.send(wire.message(Verb.REMOVE, len(keys), 0, wire.flags(both)))

        self.behind.remove(keys, _due(found), done)
        return LATER

    def _purge(self, client: Client, found: Message) -> bytes | None:
        pattern = wire.pattern_in(found)
        matching = self.index.matching(pattern)
        for key in matching:
            self.index.remove(key)
        self._num_removals += 1

        def done(removed: int, is_complete: bool) -> None:
            client.send(wire.message(Verb.PURGE, 1, max(len(matching), removed), wire.flags([is_complete])))

        if not self.has_tiers:
            return wire.message(Verb.PURGE, 1, len(matching), wire.flags([True]))
        self.behind.purge(pattern, done)
        return LATER

    # --- for people --------------------------------------------------------------------------------------------------

    def _introduce(self, client: Client, found: Message) -> None:
        space = KeySpace(Fingerprint.from_description(parse_json(bytes(found.body))))
        if self.has_tiers and space.prefix not in self._spaces and len(self._spaces) < MAX_SPACES:
            self._spaces.add(space.prefix)
            self.behind.introduce(space)

    def _list(self, client: Client, found: Message) -> bytes:
        cursor, values = self.index.listed(found.number, wire.MAX_KEYS)
        body = wire.with_numbers([value.key for value in values], [value.length for value in values])
        return wire.message(Verb.LIST, len(values), cursor, body)

    def stats(self, clients: Sequence[Client]) -> dict[str, Any]:
        """One look at the node."""
        index = self.index
        engines = sorted(index.used_by_engine.items(), key=lambda each: -each[1])
        tenants = sorted(index.used_by_tenant.items(), key=lambda each: -each[1])
        return {
            "pid": os.getpid(),
            "num_values": len(index),
            "used_bytes": index.used_bytes,
            "capacity_bytes": index.region.num_bytes,
            "policy": index.policy,
            "evicted": index.num_evicted,
            **{name: self.counts[name] for name in COUNTS},
            "slots": [
                dict(zip(("bytes", "slabs", "slots", "free"), each, strict=True)) for each in index.slot_counts()
            ],
            "num_clients": len(clients),
            "clients": [self._told(client) for client in clients[:_TOLD]],
            "engines": {self.names.get(owner, f"{owner:016x}"): used for owner, used in engines[:_TOLD]},
            "tenants": {tag.hex(): used for tag, used in tenants[:_TOLD]},
            "waiting_bytes": self._waiting_bytes,
            "behind": self.behind.stats(),
        }

    def _told(self, client: Client) -> dict[str, Any]:
        leased, reserved = self.index.num_leased(client.holder), client.holder.reserved_bytes
        return {"engine": client.name, "pid": client.pid, "leased": leased, "reserved_bytes": reserved}


COUNTS = ("hits", "misses", "fetched", "stored", "refused", "damaged", "not_stored_behind", "cut_off")
"""Counters of a node since it was started."""


def _due(found: Message) -> float:
    return time.monotonic() + min(found.number / 1000, wire.ANSWERED_LATE)


def stats_answer(stats: dict[str, Any]) -> bytes:
    """Statistics as they are sent."""
    return wire.message(Verb.STATS, 0, 0, json.dumps(stats).encode())
