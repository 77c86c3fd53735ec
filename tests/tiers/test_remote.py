"""What all remote tiers share, by a tier whose nodes do what a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import eventually

from kvpool.errors import InvalidArgumentError
from kvpool.testing import key, load, store, value
from kvpool.tiers import KeyPattern, Outcome, Purged
from kvpool.tiers.remote.breaker import Breaker
from kvpool.tiers.remote.remote_tier import (
    MAX_STALE,
    SHARE_BYTES,
    Listing,
    NodeError,
    Purging,
    RemoteTier,
    Share,
    StaleKeys,
    StoreNode,
)
from kvpool.tiers.upkeep import listed, store_figures, verify_store

Behaviour = Callable[[Share[StoreNode]], None]
SECONDS = 60.0


class Puppet(RemoteTier[StoreNode]):
    """Two nodes, chosen by the last bit of a key; `behaviour` serves every share of either."""

    def __init__(self, behaviour: Behaviour, *, pause: float = 3600.0, max_value_bytes: int = 10**9) -> None:
        super().__init__("puppet", timeout=30.0, max_value_bytes=max_value_bytes)
        self.nodes = [StoreNode(name, 2, Breaker(pause=pause)) for name in ("left", "right")]
        self.behaviour = behaviour
        self.shares: list[Share[StoreNode]] = []
        self.probed = threading.Event()
        self.probe: Callable[[], None] = lambda: None
        self.listing: Callable[[StoreNode], Iterator[dict[bytes, int]]] = lambda node: iter(())
        self.purge_behaviour: Callable[[Purging[StoreNode]], None] = lambda purging: None

    def _nodes(self) -> list[StoreNode]:
        return self.nodes

    def _node_of(self, key: bytes) -> StoreNode:
        return self.nodes[key[-1] & 1]

    def _probe(self, node: StoreNode) -> None:
        try:
            self.probe()
        finally:
            self.probed.set()

    def _serve_one(self, share: Share[StoreNode]) -> None:
        self.shares.append(share)
        with share.node.asking():
            self.behaviour(share)

    def _list_node(self, node: StoreNode, deadline: float) -> Iterator[dict[bytes, int]]:
        yield from self.listing(node)

    def _purge_share(self, purging: Purging[StoreNode]) -> None:
        purging.removed += 5
        self.purge_behaviour(purging)

    _find_share = _load_share = _store_share = _remove_share = _serve_one


def works(share: Share[StoreNode]) -> None:
    share.outcomes = [Outcome.OK] * len(share.keys)


def side(number: int) -> int:
    return key(number)[-1] & 1


LEFT = [number for number in range(40) if side(number) == 0]
RIGHT = [number for number in range(40) if side(number) == 1]


def test_given_keys_of_two_nodes_then_each_gets_its_own_in_shares_of_bounded_size() -> None:
    with Puppet(works) as tier:
        size = SHARE_BYTES // 3
        numbers = LEFT[:7] + RIGHT[:2]
        assert store(tier, numbers, size) == [Outcome.OK] * 9
        sizes = sorted((share.node.name, len(share.keys)) for share in tier.shares)
        assert sizes == [("left", 1), ("left", 3), ("left", 3), ("right", 2)]


def test_given_a_node_that_cannot_serve_then_its_keys_fail_at_once_from_then_on() -> None:
    def left_is_down(share: Share[StoreNode]) -> None:
        if share.node.name == "left":
            raise NodeError("gone fishing")
        works(share)

    with Puppet(left_is_down) as tier:
        wanted = [Outcome.FAILED, Outcome.OK]
        assert load(tier, [LEFT[0], RIGHT[0]])[0] == wanted
        assert load(tier, [LEFT[0], RIGHT[0]])[0] == wanted
        assert [share.node.name for share in tier.shares].count("left") == 1
        assert tier.stats().problem == "left: gone fishing (asked again in 3600 s)"


def test_given_a_purge_then_every_node_is_looked_through_and_one_that_fails_is_told() -> None:
    def refuses(purging: Purging[StoreNode]) -> None:
        purging.num_left += 1

    def fails(purging: Purging[StoreNode]) -> None:
        if purging.node.name == "left":
            raise NodeError("gone fishing")

    def is_late(purging: Purging[StoreNode]) -> None:
        raise TimeoutError

    with Puppet(works) as tier:
        assert tier.purge(KeyPattern()) == Purged(10, is_complete=True)
        for behaviour in (refuses, fails, is_late):
            tier.purge_behaviour = behaviour
            assert tier.purge(KeyPattern()) == Purged(10, is_complete=False)
        assert tier.stats().removed == 40
        tier.nodes[0].breaker.failed("down")
        assert tier.purge(KeyPattern()) == Purged(5, is_complete=False)


def test_given_a_share_that_is_late_half_way_then_what_was_reached_counts() -> None:
    def slow(share: Share[StoreNode]) -> None:
        share.outcomes[0] = Outcome.OK
        raise TimeoutError

    with Puppet(slow) as tier:
        assert load(tier, LEFT[:3])[0] == [Outcome.OK, Outcome.LATE, Outcome.LATE]


def test_given_threads_that_are_busy_then_shares_that_wait_in_vain_are_late_and_never_begun() -> None:
    release = threading.Event()
    busy = threading.Semaphore(0)

    def blocked() -> None:
        busy.release()
        release.wait()

    with Puppet(works) as tier:
        for node in tier.nodes:
            for _ in range(2):
                node.threads.submit(blocked)
        for _ in range(4):
            busy.acquire()
        keys = [key(LEFT[0]), key(RIGHT[0])]
        assert tier.load(keys, [bytearray(1)] * 2, timeout=0.01) == [Outcome.LATE] * 2
        release.set()
    assert tier.shares == []


def test_given_a_node_that_leaves_its_cluster_then_a_call_that_waits_for_it_ends_at_once() -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        gate.wait(SECONDS)

    with Puppet(works) as tier:
        left = tier.nodes[0]
        for _ in range(2):  # both of its threads
            left.threads.submit(hang)
            assert begun.acquire(timeout=SECONDS)
        numbers = [LEFT[0], RIGHT[0]]
        found: list[Any] = []
        out = [bytearray(8) for _ in numbers]
        keys = [key(number) for number in numbers]
        thread = threading.Thread(target=lambda: found.append(tier.load(keys, out, timeout=3600.0)), daemon=True)
        thread.start()
        eventually(lambda: tier.shares and left.threads._work_queue.qsize(), "one share is served, the other waits")
        left.close()
        thread.join(SECONDS)
        assert found == [[Outcome.LATE, Outcome.OK]]
        gate.set()


def test_given_a_node_that_is_down_when_a_probe_is_due_then_it_runs_in_the_background_and_closes_the_breaker() -> None:
    def down(share: Share[StoreNode]) -> None:
        raise NodeError("down")

    begun, answer = threading.Event(), threading.Event()

    def probe() -> None:
        begun.set()
        answer.wait()

    with Puppet(down, pause=0.0) as tier:
        tier.probe = probe
        assert load(tier, LEFT[:1])[0] == [Outcome.FAILED]
        assert load(tier, LEFT[:1])[0] == [Outcome.FAILED]  # returns although the probe still waits for an answer
        begun.wait()
        assert not tier.nodes[0].breaker.allows()
        tier.behaviour = works
        answer.set()
        while not tier.nodes[0].breaker.allows():
            time.sleep(0.001)
        assert load(tier, LEFT[:1])[0] == [Outcome.OK]


def test_given_a_probe_that_fails_then_the_breaker_stays_open() -> None:
    def probe() -> None:
        raise ConnectionError("still down")

    with Puppet(works, pause=0.0) as tier:
        tier.nodes[0].breaker.failed("down")
        tier.probe = probe
        assert load(tier, LEFT[:1])[0] == [Outcome.FAILED]
        tier.probed.wait()
        tier.nodes[0].threads.shutdown(wait=True)
        assert tier.nodes[0].breaker.problem.startswith("still down")


def test_given_one_key_twice_and_a_large_value_then_each_is_sent_once_or_not_at_all() -> None:
    with Puppet(works, max_value_bytes=100) as tier:
        keys = [key(number) for number in (LEFT[0], LEFT[0], LEFT[1])]
        data = [value(LEFT[0], 100), value(LEFT[0], 100), value(LEFT[1], 101)]
        assert tier.store(keys, data) == [Outcome.OK, Outcome.OK, Outcome.REFUSED]
        assert [len(share.keys) for share in tier.shares] == [1]


def test_given_one_key_twice_that_is_not_stored_then_neither_is() -> None:
    def refuses(share: Share[StoreNode]) -> None:
        share.outcomes = [Outcome.REFUSED] * len(share.keys)

    with Puppet(refuses) as tier:
        assert store(tier, [LEFT[0], LEFT[0]]) == [Outcome.REFUSED] * 2


def test_given_a_node_that_refused_a_value_then_it_counts_as_full_for_a_moment() -> None:
    node = StoreNode("one", 1, Breaker())
    assert not node.is_full()
    node.refused()
    assert node.is_full()
    node.full_until = time.monotonic()
    assert not node.is_full()
    node.close()


def test_given_stale_keys_then_they_are_remembered_for_a_time_and_not_more_than_so_many() -> None:
    now = 0.0
    stale = StaleKeys(10.0, clock=lambda: now)
    stale.add(key(1))
    stale.add(key(2))
    stale.discard(key(2))
    assert (key(1) in stale, key(2) in stale) == (True, False)
    now = 10.0
    assert key(1) not in stale
    for number in range(MAX_STALE + 10):
        stale.add(key(number))
    assert len(stale) == MAX_STALE
    assert key(0) not in stale
    assert key(MAX_STALE + 9) in stale
    stale.add(key(10))  # the oldest becomes the newest
    stale.add(key(0))
    assert [key(number) in stale for number in (0, 10, 11, 12)] == [True, True, False, True]


@pytest.mark.parametrize("call", ["load", "contains"])
def test_given_a_stale_key_then_it_is_a_miss_whatever_the_store_says(call: str) -> None:
    with Puppet(works) as tier:
        tier.stale.add(key(LEFT[0]))
        if call == "load":
            assert load(tier, [LEFT[0], LEFT[1]])[0] == [Outcome.MISS, Outcome.OK]
        else:
            assert tier.contains([key(LEFT[0]), key(LEFT[1])]) == [False, True]


# --- what it holds -------------------------------------------------------------------------------------------------------


def test_given_nodes_that_list_then_all_values_are_found_and_what_a_node_did_not_say_is_told() -> None:
    def listing(node: StoreNode) -> Iterator[dict[bytes, int]]:
        yield {key(1): 10, key(2): 20}
        if node.name == "right":
            raise NodeError("the line was cut")
        yield {key(2): 20, key(3): 30}

    with Puppet(works) as tier:
        tier.listing = listing
        assert tier.listed() == ({key(1): 10, key(2): 20, key(3): 30}, "right: the line was cut")


def test_given_a_node_that_is_down_when_listed_then_the_others_are_and_the_reason_is_told() -> None:
    with Puppet(works) as tier:
        tier.timeout = 0.01
        tier.nodes[0].breaker.failed("it burnt down")
        tier.listing = lambda node: iter([{key(1): 10}])
        sizes, problem = tier.listed()
        assert sizes == {key(1): 10}
        assert problem.startswith("left: it burnt down")


def test_given_a_store_that_cannot_list_then_stat_tells_whether_it_answers_and_the_rest_is_refused() -> None:
    with Puppet(works) as tier:
        tier.can_list, tier.timeout = False, 0.01
        figures = store_figures(tier)
        assert (figures["values"], figures["problem"]) == (None, "")
        with pytest.raises(InvalidArgumentError, match="puppet cannot list what it holds; `kvpool tier stat`"):
            listed(tier)
        tier.nodes[0].breaker.failed("it burnt down")
        assert "it burnt down" in store_figures(tier)["problem"]


def test_given_a_store_that_died_since_it_was_last_asked_then_stat_asks_it_and_says_so() -> None:
    def dies(share: Share[StoreNode]) -> None:
        raise NodeError("it burnt down")

    with Puppet(dies) as tier:
        tier.can_list = False
        assert tier.stats().problem == ""
        assert "it burnt down" in store_figures(tier)["problem"]


def test_given_a_store_that_is_lost_while_it_is_verified_then_nothing_is_called_damaged() -> None:
    def dies(share: Share[StoreNode]) -> None:
        raise NodeError("it burnt down")

    with Puppet(dies) as tier:
        listing = Listing({key(number): 100 for number in range(10)}, "")
        result, problem = verify_store(tier, listing, lambda _: None, repair=True)
        assert (result.damaged, result.num_values, result.removed) == ([], 0, 0)
        assert "it burnt down" in problem


def test_given_large_values_when_verified_then_they_are_loaded_a_few_at_a_time() -> None:
    with Puppet(works) as tier:
        listing = Listing({key(number): 20 << 20 for number in range(5)}, "")
        result, problem = verify_store(tier, listing, lambda _: None, repair=False)
        assert (result.num_values, result.num_bytes, problem) == (5, 100 << 20, "")
        assert max(len(share.keys) for share in tier.shares) == 1
