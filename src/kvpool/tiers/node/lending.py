"""Leases of a client: a question for places, the check of what lies there, and the loan that a caller copies from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvpool.tiers.contract import Loan, Outcome
from kvpool.tiers.envelope import checksum
from kvpool.tiers.node import wire
from kvpool.tiers.node.connection import Connection, LostNodeError
from kvpool.tiers.node.region import slab_size
from kvpool.tiers.node.wire import ABSENT, Place, Verb

RELEASE_SECONDS = 0.1  # also after the deadline: what was loaded in time is not late
_NOTHING = memoryview(b"")


def lease(
    node: Connection, keys: Sequence[bytes], sizes: Sequence[int], deadline: float
) -> tuple[int | None, list[Place]]:
    """Where values are, and the lease that keeps them there; None if none is there."""
    packet = wire.message(Verb.LEASE, len(keys), milliseconds(deadline), wire.with_numbers(keys, sizes))
    answer = node.ask(packet, deadline)
    places = wire.places_in(answer)
    return (None if places.count(ABSENT) == len(places) else answer.number), places


def release(node: Connection, number: int | None) -> None:
    """Ends a lease."""
    if number is not None:
        node.tell(wire.message(Verb.RELEASE, 0, number), time.monotonic() + RELEASE_SECONDS)


def doubt(node: Connection, keys: Sequence[bytes]) -> None:
    """Tells the node that these bytes are not what was stored."""
    if keys:
        packet = wire.message(Verb.DOUBT, len(keys), 0, b"".join(keys))
        node.tell(packet, time.monotonic() + RELEASE_SECONDS)


def milliseconds(deadline: float) -> int:
    """What is left until a deadline, as a message says it."""
    return max(1, round(1000 * (deadline - time.monotonic())))


class NodeLoan(Loan):
    """Values in the region under leases. It has a connection for itself: with that the leases would end."""

    def __init__(self, node: Connection, give_back: Callable[[Connection | None], None]) -> None:
        self._node = node
        self._give_back = give_back
        self._leases: list[int | None] = []
        super().__init__(node.region, slab_size(node.num_bytes))

    def add(self, keys: Sequence[bytes], sizes: Sequence[int], deadline: float) -> None:
        """Leases values, and compares them with their checksums where they lie."""
        number, places = lease(self._node, keys, sizes, deadline)
        self._leases.append(number)
        outcomes = [self._look(*each, deadline) for each in zip(keys, sizes, places, strict=True)]
        self.outcomes += outcomes
        self.views += [
            self._node.slot(place) if outcome == Outcome.OK else _NOTHING
            for place, outcome in zip(places, outcomes, strict=True)
        ]
        failed = zip(keys, sizes, places, outcomes, strict=True)
        doubt(self._node, [k for k, size, place, outcome in failed if outcome == Outcome.FAILED and place[1] == size])

    def _look(self, key: bytes, size: int, place: Place, deadline: float) -> Outcome:
        if place == ABSENT:
            return Outcome.MISS
        if time.monotonic() > deadline:
            return Outcome.LATE
        _, length, check = place
        return Outcome.OK if length == size and checksum(key, self._node.slot(place)) == check else Outcome.FAILED

    def is_held(self) -> bool:
        """A lease ends with its connection, also when the node dies: the next one may give the slots to others."""
        return self._node.is_quiet()

    def _end(self) -> None:
        try:
            for number in self._leases:
                release(self._node, number)
        except (LostNodeError, TimeoutError):
            self._node.close()
            self._give_back(None)
        else:
            self._give_back(self._node)
