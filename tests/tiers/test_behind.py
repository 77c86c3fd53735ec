"""The tiers behind a node: what comes from which of them, in which order, and what happens when none can answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from kvpool.testing import key, value
from kvpool.tiers import Fingerprint, KeyPattern, KeySpace, MemoryTier, Outcome
from kvpool.tiers.envelope import checksum
from kvpool.tiers.node import behind as behind_module
from kvpool.tiers.node.behind import Behind

SECONDS = 30.0
SIZE = 64


class Told(MemoryTier):
    """A tier that notes what it is told, and whose stores wait for a gate."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.spaces: list[KeySpace] = []
        self.gate = threading.Event()
        self.gate.set()

    def introduce(self, space: KeySpace) -> None:
        self.spaces.append(space)

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        assert self.gate.wait(SECONDS)
        return super()._store(keys, data, deadline)


class Node:
    """The thread of a node: runs what is posted when a test looks for an answer."""

    def __init__(self, *tiers: Told) -> None:
        self.tiers = tiers
        self._posted: SimpleQueue[Any] = SimpleQueue()
        self.behind = Behind(tiers, self._posted.put)
        self.answers: list[tuple[Any, ...]] = []

    def answer(self, *arguments: Any) -> None:
        self.answers.append(arguments)

    def next(self) -> Any:
        """The next answer, and nothing else has been answered before it."""
        assert not self.answers
        self._posted.get(timeout=SECONDS)()
        (answer,) = self.answers.pop()
        return answer

    def is_quiet(self) -> bool:
        return self._posted.empty() and not self.answers


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(Told(), Told())
    yield made
    for tier in made.tiers:
        tier.gate.set()
    made.behind.close()


def keys_of(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def due() -> float:
    return time.monotonic() + SECONDS


def put(tier: Told, *numbers: int, size: int = SIZE) -> None:
    assert tier.store(keys_of(*numbers), [value(number, size) for number in numbers]) == [Outcome.OK] * len(numbers)


def test_given_tiers_then_there_is_something_behind_the_node(node: Node) -> None:
    assert node.behind
    assert not Node().behind


def test_given_values_in_two_tiers_then_those_of_both_are_found_and_come_with_their_checksums(node: Node) -> None:
    put(node.tiers[0], 1)
    put(node.tiers[1], 2)
    node.behind.find(keys_of(1, 2, 3), due(), node.answer)
    assert node.next() == [True, True, False]
    rows = [memoryview(bytearray(SIZE)) for _ in range(3)]
    node.behind.load(keys_of(1, 2, 3), rows, due(), node.answer)
    assert node.next() == [checksum(key(1), rows[0]), checksum(key(2), rows[1]), None]
    assert [bytes(row) for row in rows[:2]] == [value(1, SIZE), value(2, SIZE)]
    assert [stats["hits"] for stats in node.behind.stats()] == [1, 1]
    assert node.is_quiet()


@pytest.mark.parametrize("size", [1, 15, 16, 17, SIZE])
@pytest.mark.parametrize("lacking", [0, 1, 20])
def test_given_a_value_that_does_not_fill_its_row_then_it_is_not_taken(node: Node, size: int, lacking: int) -> None:
    put(node.tiers[0], 1, size=size)
    row = memoryview(bytearray(size + lacking))
    node.behind.load(keys_of(1), [row], due(), node.answer)
    assert node.next() == [None if lacking else checksum(key(1), row)]


def test_given_a_value_that_ends_like_the_mark_of_its_row_then_it_is_taken(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(node.tiers[0], 1)
    put(node.tiers[1], 2, size=SIZE - 1)
    monkeypatch.setattr("secrets.randbelow", lambda _: value(1, SIZE)[-1])
    rows = [memoryview(bytearray(SIZE)) for _ in range(2)]
    node.behind.load(keys_of(1, 2), rows, due(), node.answer)
    assert node.next() == [checksum(key(1), rows[0]), None]
    assert bytes(rows[0]) == value(1, SIZE)


def test_given_values_to_store_then_every_tier_has_them_when_the_node_is_told(node: Node) -> None:
    rows = [memoryview(value(number, SIZE)) for number in (1, 2)]
    assert node.behind.store(keys_of(1, 2), rows, lambda: node.answer("stored"))
    assert node.next() == "stored"
    assert [tier.contains(keys_of(1, 2)) for tier in node.tiers] == [[True, True]] * 2


def test_given_keys_to_remove_then_the_answer_says_which_of_them_any_tier_had(node: Node) -> None:
    put(node.tiers[0], 1)
    put(node.tiers[1], 1, 2)
    node.behind.remove(keys_of(1, 2, 3), due(), node.answer)
    assert node.next() == [True, True, False]
    assert [tier.contains(keys_of(1, 2)) for tier in node.tiers] == [[False, False]] * 2


def test_given_a_time_that_is_over_then_values_are_removed_all_the_same(node: Node) -> None:
    put(node.tiers[0], 1)
    node.behind.remove(keys_of(1), time.monotonic() - 1.0, node.answer)
    assert node.next() == [True]


def test_given_a_purge_then_the_answer_counts_what_left_all_tiers(node: Node) -> None:
    put(node.tiers[0], 1)
    put(node.tiers[1], 1, 2)
    node.behind.purge(KeyPattern(None), lambda *found: node.answer(found))
    assert node.next() == (3, True)


def test_given_a_tier_that_cannot_purge_then_the_answer_says_that_something_is_left(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no answer")

    put(node.tiers[0], 1)
    monkeypatch.setattr(node.tiers[1], "_purge", fails)
    node.behind.purge(KeyPattern(None), lambda *found: node.answer(found))
    assert node.next() == (1, False)


@pytest.mark.parametrize("call", ["find", "load", "remove", "purge"])
def test_given_a_mistake_in_a_thread_then_the_node_hears_that_nothing_is_there(
    node: Node, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a mistake")

    chain = node.behind._chain
    for owner, name in [
        (chain, "find"),
        (chain, "load"),
        *((w, n) for w in chain.watched for n in ("remove", "purge")),
    ]:
        monkeypatch.setattr(owner, name, fails)
    ask(node, call)
    assert node.next() == ((0, False) if call == "purge" else [None] if call == "load" else [False])
    node.behind.close()
    assert "a mistake" in caplog.text


def ask(node: Node, call: str) -> None:
    rows = [memoryview(bytearray(SIZE))]
    asked: dict[str, Any] = {
        "find": lambda: node.behind.find(keys_of(1), due(), node.answer),
        "load": lambda: node.behind.load(keys_of(1), rows, due(), node.answer),
        "remove": lambda: node.behind.remove(keys_of(1), due(), node.answer),
        "purge": lambda: node.behind.purge(KeyPattern(None), lambda *found: node.answer(found)),
    }
    asked[call]()


def test_given_more_stores_than_may_wait_then_the_next_is_refused_and_jobs_in_the_order_of_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(behind_module, "MAX_STORES", 2)
    node = Node(Told())
    node.tiers[0].gate.clear()
    row = [memoryview(value(1, SIZE))]
    taken = 0
    while node.behind.store(keys_of(1), row, lambda: node.answer("stored")):
        taken += 1
        if taken == 1:
            while node.behind._storing.num_waiting:  # the thread has begun it
                time.sleep(0.001)
    assert taken == 3
    for call, nothing in (("remove", [False]), ("purge", (0, False))):  # no room for these, either: it is told at once
        ask(node, call)
        assert node.next() == nothing
    node.tiers[0].gate.set()
    assert [node.next() for _ in range(3)] == ["stored"] * 3
    node.behind.close()


def test_given_a_store_that_waits_then_a_removal_comes_after_it(node: Node) -> None:
    node.tiers[0].gate.clear()
    assert node.behind.store(keys_of(1), [memoryview(value(1, SIZE))], lambda: node.answer("stored"))
    ask(node, "remove")
    assert node.is_quiet()
    node.tiers[0].gate.set()
    assert [node.next(), node.next()] == ["stored", [True]]


def test_given_a_close_then_what_waits_is_stored_first_and_nothing_is_taken_any_more() -> None:
    node = Node(Told())
    tier = node.tiers[0]
    tier.gate.clear()
    kept: dict[str, Any] = {}
    tier._close = lambda: kept.update(found=list(tier._values))  # type: ignore[method-assign]
    space = KeySpace(Fingerprint("model", "weights", 16, ()))
    assert all(node.behind.store([key(n)], [memoryview(value(n, SIZE))], lambda: node.answer("stored")) for n in (1, 2))
    node.behind.introduce(space)
    closing = threading.Thread(target=node.behind.close)
    closing.start()
    tier.gate.set()
    closing.join(SECONDS)
    assert kept["found"] == keys_of(1, 2)
    assert tier.spaces == [space]
    assert [node.next(), node.next()] == ["stored", "stored"]
    assert not node.behind.store(keys_of(3), [memoryview(value(3, SIZE))], lambda: None)
    for call, nothing in (("find", [False]), ("load", [None])):
        ask(node, call)
        assert node.next() == nothing
    assert not any(
        thread.is_alive() for pool in (node.behind._fetching, node.behind._storing) for thread in pool._threads
    )
