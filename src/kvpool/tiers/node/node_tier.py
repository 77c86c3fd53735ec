"""NodeTier: the tier of an engine whose values lie in memory that `kvpool node` owns. How to use it: docs/node.md."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvpool.config.layers import Tier
from kvpool.errors import ConfigError
from kvpool.tiers.contract import (
    CALL_TIMEOUT,
    PURGE_TIMEOUT,
    KeyedTier,
    Listing,
    Loan,
    Outcome,
    Purged,
    Room,
    Slots,
    Source,
    Worth,
)
from kvpool.tiers.envelope import checksum
from kvpool.tiers.keys import KeyPattern, KeySpace
from kvpool.tiers.node import wire
from kvpool.tiers.node.connection import Connection, LostNodeError
from kvpool.tiers.node.lending import NodeLoan, doubt, lease, milliseconds, release
from kvpool.tiers.node.region import slab_size
from kvpool.tiers.node.wire import ABSENT, PRESENT, Place, Verb
from kvpool.tiers.options import SECONDS, TierURL, option, read_options, text
from kvpool.tiers.remote.breaker import Breaker
from kvpool.tiers.remote.remote_tier import seconds_left

PAUSE, LONGEST_PAUSE = 0.1, 2.0
LOOK_SECONDS = 0.25
MAX_LOANS = 16
"""Of one tier at a time; each has a connection. More is loaded into the caller's memory."""
MAX_LENT_KEYS = 16 * wire.MAX_KEYS
PART_SHARE = 8
"""A call leases or reserves at most the region divided by this at a time."""

_T = TypeVar("_T")
_Write: TypeAlias = Callable[[Slots], list[int]]


@dataclass(frozen=True)
class NodeOptions:
    """The options of `node:NAME?option=value`."""

    engine: str = option(
        text(f"be a name of 1 to {wire.MAX_NAME} bytes", lambda name: 0 < len(name.encode()) <= wire.MAX_NAME), ""
    )
    timeout: float = option(SECONDS, CALL_TIMEOUT)


class NodeTier(KeyedTier):
    """Values in the memory of `node:NAME`, or of `node:DIRECTORY` where a node keeps its files.

    A load asks the node where values are and to keep them there, and copies them. A store asks for slots, copies, and
    commits. No value goes through the socket. A node that does not run costs a call nothing; the tier finds it again.
    """

    can_list = True
    medium = Tier.HOST
    has_slots = True

    def __init__(self, address: str = "node:") -> None:
        if not hasattr(socket, "SO_PEERCRED"):
            raise ConfigError("node: needs Linux")
        url = TierURL.local(address, "node")
        options = NodeOptions(**read_options(NodeOptions, url))
        super().__init__(f"node:{url.path}" if url.path else "node", timeout=options.timeout)
        checksum(bytes(32), memoryview(b""))  # says now which package is missing
        self.directory_of_node = wire.node_directory(url.path)
        self.engine = options.engine or f"pid-{os.getpid()}"
        self._idle: deque[Connection] = deque()
        self._num_lent = 0
        self._pid = os.getpid()
        self._spaces: dict[bytes, bytes] = {}
        self._breaker = Breaker(pause=PAUSE, longest=LONGEST_PAUSE)

    # --- the contract ------------------------------------------------------------------------------------------------

    def introduce(self, space: KeySpace) -> None:
        """Tells the node, also one that is started later."""
        described = json.dumps(space.fingerprint.describe()).encode()
        if len(described) < wire.MAX_MESSAGE // 2:
            self._spaces[space.prefix] = described
        self._drop_idle()

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self._flags(Verb.FIND, keys, deadline)

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        try:
            while len(outcomes) < len(keys):
                part = slice(len(outcomes), len(outcomes) + wire.MAX_KEYS)
                outcomes += self._asked(partial(self._load_part, keys=keys[part], out=out[part], deadline=deadline))
        except TimeoutError:
            outcomes += [Outcome.LATE] * (len(keys) - len(outcomes))
        return outcomes

    def _load_part(
        self, node: Connection, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float
    ) -> list[Outcome]:
        """Loads as many of the values as may be leased at a time, from the first on."""
        count = _num_at_a_time(node, [view.nbytes for view in out])
        keys, out = keys[:count], out[:count]
        number, places = lease(node, keys, [view.nbytes for view in out], deadline)
        outcomes = [
            self._taken(node, key, view, place, deadline) for key, view, place in zip(keys, out, places, strict=True)
        ]
        doubted = [
            key
            for key, view, place, outcome in zip(keys, out, places, outcomes, strict=True)
            if outcome == Outcome.FAILED and place[1] <= view.nbytes
        ]
        doubt(node, doubted)
        release(node, number)
        return outcomes

    def _taken(self, node: Connection, key: bytes, view: memoryview, place: Place, deadline: float) -> Outcome:
        """Copies one value. What was copied is compared, not what lies in the region: others may write there."""
        if place == ABSENT:
            return Outcome.MISS
        _, length, check = place
        if length > view.nbytes:
            return Outcome.FAILED
        if time.monotonic() > deadline:
            return Outcome.LATE
        data = view[:length]
        _copy(node.slot(place), data)
        if checksum(key, data) != check:
            return Outcome.FAILED
        self.left_unfilled(view.nbytes - length)
        return Outcome.OK

    def _lend(self, keys: Sequence[bytes], sizes: Sequence[int], deadline: float) -> Loan | None:
        with self._counting:
            if self._num_lent >= MAX_LOANS or len(keys) > MAX_LENT_KEYS:
                return None
            self._num_lent += 1
        try:
            return self._called(partial(self._lent, keys=keys, sizes=sizes, deadline=deadline))[1]
        except BaseException:
            self._returned(None)
            raise

    def _lent(self, node: Connection, keys: Sequence[bytes], sizes: Sequence[int], deadline: float) -> NodeLoan:
        loan = NodeLoan(node, self._returned)
        for at in range(0, len(keys), wire.MAX_KEYS):
            part = slice(at, at + wire.MAX_KEYS)
            loan.add(keys[part], sizes[part], deadline)
        return loan

    def _returned(self, node: Connection | None) -> None:
        """A loan is over; None: its connection, too."""
        with self._counting:
            self._num_lent -= 1
        if node is not None:
            self._idle.append(node)
        if self._closed:
            self._drop_idle()

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        return self._store_rated(keys, data, deadline, worths=[Worth()] * len(keys))

    def _store_rated(
        self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float, *, worths: Sequence[Worth]
    ) -> list[Outcome]:
        def write(slots: Slots) -> list[int]:
            for number, view in zip(slots.numbers, slots.views, strict=True):
                seconds_left(deadline)
                _copy(data[number], view)
            return [checksum(keys[number], data[number]) for number in slots.numbers]

        return self._store_all(keys, [view.nbytes for view in data], write, deadline, worths)

    def _store_straight(
        self, keys: Sequence[bytes], sizes: Sequence[int], source: Source, deadline: float, worths: Sequence[Worth]
    ) -> list[Outcome]:
        def write(slots: Slots) -> list[int]:
            source.write(slots)
            checks = [checksum(keys[number], view) for number, view in zip(slots.numbers, slots.views, strict=True)]
            if not source.is_in(slots):
                raise OSError("another process wrote to slots that it had before")
            return checks

        return self._store_all(keys, sizes, write, deadline, worths)

    def _store_all(
        self, keys: Sequence[bytes], sizes: Sequence[int], write: _Write, deadline: float, worths: Sequence[Worth]
    ) -> list[Outcome]:
        """Stores values with a function that writes them and returns their checksums."""
        first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
        chosen = sorted(first.values())
        outcomes = dict.fromkeys(keys, Outcome.LATE)
        with suppress(TimeoutError):
            while chosen:
                part = chosen[: wire.MAX_KEYS]
                asked = [(keys[number], sizes[number], worths[number]) for number in part]
                stored = self._asked(partial(_store_part, asked=asked, numbers=part, write=write, deadline=deadline))
                outcomes.update(zip([key for key, _, _ in asked], stored, strict=False))
                chosen = chosen[len(stored) :]
        return [outcomes[key] for key in keys]

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        found = self._flags(Verb.REMOVE, keys, deadline)
        return [Outcome.OK if was_there else Outcome.MISS for was_there in found]

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        def ask(node: Connection) -> Purged:
            packet = wire.message(Verb.PURGE, 0, milliseconds(deadline), wire.pattern_bytes(pattern))
            answer = node.ask(packet, deadline)
            return Purged(answer.number, wire.flags_in(answer) == [True])

        return self._asked(ask)

    def listed(self, *, timeout: float = PURGE_TIMEOUT) -> Listing:
        """All values that the node holds in memory. What is stored or removed meanwhile may be missing, or listed."""
        sizes: dict[bytes, int] = {}
        deadline, cursor = time.monotonic() + timeout, 0

        def ask(node: Connection) -> int:
            answer = node.ask(wire.message(Verb.LIST, 0, cursor), deadline)
            keys = wire.unpacked(wire.keys_in(answer, with_numbers=True))
            sizes.update(zip(keys, wire.numbers_behind(answer), strict=True))
            return answer.number

        try:
            while cursor := self._asked(ask):
                pass
            return Listing(sizes, "")
        except (OSError, LostNodeError) as error:
            return Listing(sizes, str(error) or "no answer in time")

    def node_stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """What the node tells about itself: sizes, slots, who holds what. Raises OSError or LostNodeError."""
        deadline = time.monotonic() + (timeout or self.timeout)
        return self._asked(lambda node: dict(json.loads(bytes(node.ask(wire.message(Verb.STATS), deadline).body))))

    def _look(self) -> Room:
        try:
            stats = self.node_stats(timeout=LOOK_SECONDS)
        except (OSError, LostNodeError) as error:
            return Room(problem=self._breaker.problem or str(error) or "no answer in time")
        return Room(stats["num_values"], stats["used_bytes"], stats["capacity_bytes"], holders=stats["engines"])

    def _close(self) -> None:
        self._drop_idle()

    def _flags(self, verb: Verb, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Asks something about each key."""
        found: list[bool] = []
        for at in range(0, len(keys), wire.MAX_KEYS):
            part = keys[at : at + wire.MAX_KEYS]
            packet = wire.message(verb, len(part), milliseconds(deadline), b"".join(part))
            found += self._asked(partial(_ask_flags, packet=packet, deadline=deadline))
        return found

    # --- connections -------------------------------------------------------------------------------------------------

    def _asked(self, call: Callable[[Connection], _T]) -> _T:
        """What a call with a connection returns."""
        node, found = self._called(call)
        self._idle.append(node)
        return found

    def _called(self, call: Callable[[Connection], _T]) -> tuple[Connection, _T]:
        """The same, with the connection. One that was idle may be of a node that is gone: then with a new one."""
        while True:
            node = self._take()
            is_new = node is None
            if node is None:
                node = self._connect()
            try:
                found = call(node)
            except LostNodeError as error:
                node.close()
                if is_new:
                    self._breaker.failed(str(error))
                    raise
                self._drop_idle()
            except BaseException:
                node.close()  # an answer may be under way: nobody shall take it for his own
                raise
            else:
                return node, found

    def _take(self) -> Connection | None:
        if self._pid != os.getpid():  # a process that was forked: these connections are its parent's
            self._pid = os.getpid()
            self._idle.clear()
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connect(self) -> Connection:
        """A new connection; while the node is down, only a thread in the background looks whether it is back."""
        if not self._breaker.allows():
            if self._breaker.claim_probe():
                threading.Thread(target=self._probe, name="kvpool-node-probe", daemon=True).start()
            raise LostNodeError(self._breaker.problem)
        try:
            return self._new_connection()
        except (LostNodeError, TimeoutError) as error:
            self._breaker.failed(str(error) or "no answer in time")
            raise

    def _new_connection(self) -> Connection:
        return Connection(self.directory_of_node, self.engine, self._spaces.values(), self.timeout)

    def _probe(self) -> None:
        try:
            node = self._new_connection()
        except (LostNodeError, TimeoutError) as error:
            self._breaker.failed(str(error) or "no answer in time")
            return
        self._breaker.succeeded()
        self._idle.append(node)
        if self._closed:
            self._drop_idle()

    def _drop_idle(self) -> None:
        while (node := self._take()) is not None:
            node.close()


def _store_part(
    node: Connection,
    asked: Sequence[tuple[bytes, int, Worth]],
    numbers: Sequence[int],
    write: _Write,
    deadline: float,
) -> list[Outcome]:
    """Stores as many of the values as may be reserved at a time, from the first on."""
    count = _num_at_a_time(node, [size for _, size, _ in asked])
    body = wire.with_numbers(
        [key for key, _, _ in asked[:count]], [wire.rated(size, worth) for _, size, worth in asked[:count]]
    )
    answer = node.ask(wire.message(Verb.RESERVE, count, 0, body), deadline)
    number, places = answer.number, wire.places_in(answer)
    outcomes = [Outcome.OK if place == PRESENT else Outcome.REFUSED for place in places]
    taken = [at for at, place in enumerate(places) if place not in (ABSENT, PRESENT)]
    if taken:
        views = [node.slot(places[at]) for at in taken]
        checks = write(Slots([numbers[at] for at in taken], views, node.region, slab_size(node.num_bytes)))
        packet = wire.message(Verb.COMMIT, len(checks), number, wire.numbers(checks))
        for at, is_there in zip(taken, wire.flags_in(node.ask(packet, deadline)), strict=True):
            outcomes[at] = Outcome.OK if is_there else Outcome.FAILED
    return outcomes


def _num_at_a_time(node: Connection, sizes: Sequence[int]) -> int:
    """How many values of these sizes one question may name."""
    return max(1, sum(num_bytes <= node.num_bytes // PART_SHARE for num_bytes in accumulate(sizes)))


def _copy(source: memoryview, target: memoryview) -> None:
    if source.nbytes:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # lets other threads run


def _ask_flags(node: Connection, packet: bytes, deadline: float) -> list[bool]:
    return wire.flags_in(node.ask(packet, deadline))
