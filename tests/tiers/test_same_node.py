"""The same calls, faults and times make a node and its clients answer, count and keep values as ever.

The messages are those of the socket, without one, and the tier behind the node answers at once. `same_node.txt` is written
again by `python tests/tiers/test_same_node.py`: see `test_same_answers.py`.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # for programs that run without pytest
from runs import NUM_KEYS, VERBS, Run, Slow, assert_same, call, content, done_at_once, figures, key, write_down

from kvpool.tiers import NodeTier, Outcome
from kvpool.tiers.contract import Slots, Worth
from kvpool.tiers.node import wire
from kvpool.tiers.node.behind import Behind
from kvpool.tiers.node.connection import LostNodeError
from kvpool.tiers.node.index import NodeIndex
from kvpool.tiers.node.metrics import prometheus_text
from kvpool.tiers.node.region import Region
from kvpool.tiers.node.service import LATER, Client, NodeService, stats_answer
from kvpool.tiers.node.values import Quotas
from kvpool.tiers.node.wire import WireError
from kvpool.tiers.transport.threads import ThreadPool

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="a node needs Linux")
ANSWERS = Path(__file__).with_name("same_node.txt")
MEGABYTE = 2**20


class Node:
    """A region, the service of a process, and whoever is connected."""

    def __init__(self, run: Run, with_behind: bool) -> None:
        self.run = run
        self._region = Region(run.folder, 3 * MEGABYTE)
        tiers = [Slow(run, 300_000, "near"), Slow(run, 900_000, "far")] if with_behind else []
        self.behind = Behind(tiers, lambda job: job())
        self.is_up = True
        self.heard = hashlib.sha256()
        self.begin()

    def begin(self) -> None:
        """A new process takes over the region."""
        index = NodeIndex(self._region, "lru", Quotas(engine=0.7), clock=lambda: self.run.now)
        self.service = NodeService(index, self.behind)
        self.clients: list[Client] = []

    @property
    def memory(self) -> memoryview:
        return self._region.memory

    def close(self) -> None:
        self.behind.close()
        self._region.close()


class Wire:
    """A connection without a socket; it can break, and its answers can be late."""

    def __init__(self, node: Node, engine: str) -> None:
        if not node.is_up:
            raise LostNodeError("no node answers")
        self.node, self._service = node, node.service
        self.region, self.num_bytes = node.memory, node.memory.nbytes
        self._sent: list[bytes] = []
        self._client = Client(len(node.clients), self._sent.append)
        node.clients.append(self._client)
        self._service.hello(self._client, _parsed(wire.message(wire.Verb.HELLO, 0, 0, engine.encode())))

    def ask(self, packet: bytes, deadline: float) -> Any:
        answer = self.tell(packet, deadline)
        return _parsed(self._sent.pop() if answer == LATER else answer)

    def tell(self, packet: bytes, deadline: float) -> Any:
        run = self.node.run
        self.node.heard.update(packet)
        run.wait(0.001)
        chosen = run.rng.random()
        if chosen < 0.01:
            run.wait(0.3)
            raise TimeoutError
        if not self.is_quiet():
            raise LostNodeError("the node left")
        try:
            if packet[1] == wire.Verb.STATS:
                return stats_answer(self._service.stats(self.node.clients))
            return self._service.handle(self._client, _parsed(packet))
        except WireError as error:
            raise LostNodeError(f"the node refused: {error}") from None

    def is_quiet(self) -> bool:
        return self.node.is_up and self._service is self.node.service

    def slot(self, place: wire.Place) -> memoryview:
        return self.region[place[0] : place[0] + place[1]]

    def close(self) -> None:
        if self._client in self.node.clients:
            self.node.clients.remove(self._client)
            self._service.leave(self._client)


def _parsed(packet: bytes) -> wire.Message:
    return wire.parse(memoryview(packet))


class Written:
    """Values that a caller writes into slots; another process may have had them before."""

    def __init__(self, run: Run, numbers: Sequence[int]) -> None:
        self._run, self._numbers = run, numbers

    def write(self, slots: Slots) -> None:
        for number, view in zip(slots.numbers, slots.views, strict=True):
            view[:] = content(self._numbers[number])

    def is_in(self, slots: Slots) -> bool:
        return self._run.rng.random() < 0.9


def step(run: Run, node: Node, tier: NodeTier) -> str:
    rng, numbers, chosen = run.rng, run.some(), run.rng.random()
    keys, sizes = [key(number) for number in numbers], [len(content(number)) for number in numbers]
    worths = [Worth(rng.choice((0, 35, 80)), at, rng.choice((None, 5.0))) for at in range(len(keys))]
    if chosen < (0.02 if node.is_up else 0.2):
        node.is_up = not node.is_up
        if node.is_up:
            node.begin()
        return f"the node is up: {node.is_up}"
    if chosen < 0.08 and (values := list(node.service.index._values.values())):
        value = rng.choice(values)
        if value.length:
            node.memory[value.offset] ^= 1
        return f"damage at {value.offset}"
    if chosen < 0.2:
        loan = tier.lend(keys, [max(0, size - rng.choice((0, 0, 1))) for size in sizes])
        if loan is None:
            return "no loan"
        for number, outcome, view in zip(numbers, loan.outcomes, loan.views, strict=True):
            assert outcome != Outcome.OK or view == content(number)
        said = f"lent {[outcome.name for outcome in loan.outcomes]} {loan.is_held()} {loan.part_bytes}"
        loan.release()
        return said
    if chosen < 0.3:
        outcomes = tier.store_straight(keys, sizes, Written(run, numbers), worths=worths)
        return f"straight {[outcome.name for outcome in outcomes]}"
    if chosen < 0.35:
        return f"rated {tier.store(keys, [content(number) for number in numbers], worths=worths)}"
    if chosen < 0.4:
        listing = tier.listed(timeout=1.0)
        return f"listed {sum(listing.sizes.values())} {len(listing.sizes)} {listing.problem}"
    return call(run, tier, rng.choice(VERBS))


def node(with_behind: bool) -> Callable[[Run], None]:
    def steps(run: Run) -> None:
        shared = Node(run, with_behind)
        at_once = SimpleNamespace(Thread=lambda target, **_: SimpleNamespace(start=target))
        wired = mock.patch.object(NodeTier, "_new_connection", lambda tier: Wire(shared, tier.engine))
        with (
            wired,
            mock.patch("kvpool.tiers.node.node_tier.threading", at_once),
            mock.patch.object(wire, "MAX_KEYS", 4),
            mock.patch.object(ThreadPool, "submit", done_at_once),
            mock.patch("secrets.randbelow", return_value=7),
        ):
            tiers = [NodeTier(f"node:{run.folder}?engine={name}") for name in ("a", "b")]
            for tier in tiers:
                tier._breaker._clock = lambda: run.now
            for _ in range(500):
                run.wait(run.rng.choice((0.0, 0.0, 0.0, 0.05, 0.1, 1.0, 5.0, 61.0)))
                tier = run.rng.choice(tiers)
                said = step(run, shared, tier)
                stats = shared.service.stats(shared.clients)
                there = [number for number in range(NUM_KEYS) if key(number) in shared.service.index._values]
                run.say(tier.engine, said, figures(tier), tier._num_lent, stats, there, shared.heard.hexdigest())
            run.say(prometheus_text(shared.service.stats(shared.clients)))
            for tier in tiers:
                tier.close()
        run.say(len(shared.clients))
        shared.close()

    return steps


CASES = {"node": node(with_behind=False), "node with a tier behind": node(with_behind=True)}


@pytest.mark.quick("node with a tier behind")
@pytest.mark.parametrize("name", CASES)
def test_given_the_same_calls_faults_and_times_then_a_node_answers_and_keeps_as_ever(name: str) -> None:
    assert_same(name, CASES, ANSWERS)


if __name__ == "__main__":
    write_down(CASES, ANSWERS)
