"""What a Redis tier does when its servers do not: nobody gets wrong bytes, nobody waits past the deadline, and it recovers.

A bound on time here is many times what it guards, so that a busy machine cannot break it: it tells "ended at the deadline"
from "hung".
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import GARBAGE, FakeServer, RedisCluster, RedisServer, eventually, running

from kvpool.testing import key, load, store, value
from kvpool.tiers import KeyPattern, Outcome, Purged
from kvpool.tiers.remote.redis import RedisTier, slot_of
from kvpool.tiers.remote.redis_node import RedisNode

TIMEOUT = 2.0
HANGS = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path)
    with running(made):
        yield made


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """The block ends, if not at its deadline then long before something hangs."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < HANGS


def opened(url: str, pause: float = 0.05) -> RedisTier:
    return RedisTier(f"{url}{'&' if '?' in url else '?'}timeout={TIMEOUT}&pause={pause}")


def is_up(tier: RedisTier) -> bool:
    """Asks once, which has a node probed that is due, and says whether all work."""
    tier.contains([key(number) for number in range(30)])
    return tier.stats().problem == ""


def found(tier: RedisTier, number: int) -> bool:
    return load(tier, [number]) == ([Outcome.OK], [value(number)])


def test_given_a_killed_server_then_one_deadline_is_lost_and_a_restarted_one_is_found_again(
    server: RedisServer,
) -> None:
    with opened(server.url) as tier:
        eventually(lambda: is_up(tier), "the tier is up")
        assert store(tier, [1]) == [Outcome.OK]
        server.kill()
        with bounded():
            assert load(tier, [1])[0][0] in (Outcome.LATE, Outcome.FAILED)
            assert load(tier, [1])[0] == [Outcome.FAILED]
            assert store(tier, [2]) == [Outcome.FAILED]
            assert tier.contains([key(1)]) == [False]
        assert tier.stats().problem
        server.start()
        eventually(lambda: is_up(tier), "the probe finds the server")
        assert load(tier, [1])[0] == [Outcome.MISS]
        assert store(tier, [1]) == [Outcome.OK]
        assert found(tier, 1)


def test_given_a_killed_server_then_probes_print_nothing_however_long_it_is_away(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[object] = []
    probe = RedisTier._probe

    def counted(tier: RedisTier, node: RedisNode) -> None:
        try:
            probe(tier, node)
        finally:
            ended.append(node)

    with opened(server.url) as tier:
        eventually(lambda: is_up(tier), "the tier is up")
        server.kill()
        eventually(lambda: not is_up(tier), "its death is noticed")
        capfd.readouterr()
        monkeypatch.setattr(RedisTier, "_probe", counted)
        eventually(lambda: not is_up(tier) and len(ended) >= 3, "it was probed three times")
        assert "Connection refused" in tier.stats().problem
    assert "Error executing command" not in capfd.readouterr().err


def test_given_a_server_that_accepts_and_never_answers_then_the_client_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with contextlib.closing(FakeServer(b"")) as fake, opened(fake.url) as tier:
        eventually(lambda: bool(tier.stats().problem), "it is noticed")
        assert load(tier, [1])[0] != [Outcome.OK]
    assert "Error executing command" not in capfd.readouterr().err


def test_given_a_server_that_is_down_at_the_start_then_the_tier_opens_and_finds_it_later(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    with bounded(), opened(server.url) as tier:
        assert load(tier, [1])[0] == [Outcome.FAILED]
        assert tier.stats().problem
        with running(server):
            eventually(lambda: is_up(tier), "the probe finds the server")
            assert store(tier, [1]) == [Outcome.OK]
            assert found(tier, 1)


def test_given_a_paused_server_then_calls_end_at_the_deadline_and_later_ones_cost_nothing(server: RedisServer) -> None:
    with opened(server.url, pause=3600) as tier:
        eventually(lambda: is_up(tier), "the tier is up")
        assert store(tier, [1, 2]) == [Outcome.OK] * 2
        server.pause()
        try:
            with bounded():
                assert load(tier, [1, 2])[0] == [Outcome.LATE] * 2
                for _ in range(200):  # at a deadline each they would take minutes
                    assert load(tier, [1, 2])[0] == [Outcome.FAILED] * 2
                assert store(tier, [3]) == [Outcome.FAILED]
        finally:
            server.resume()
        stats = tier.stats()
        assert (stats.late_loads, stats.load_failures, stats.store_failures) == (2, 400, 1)
        assert "no answer" in stats.problem


def test_given_a_paused_server_then_a_purge_gives_up_long_before_its_deadline(server: RedisServer) -> None:
    with opened(server.url, pause=3600) as tier:
        eventually(lambda: is_up(tier), "the tier is up")
        store(tier, [1])
        server.pause()
        try:
            with bounded():
                assert tier.purge(KeyPattern(), timeout=3600.0) == Purged(0, is_complete=False)
        finally:
            server.resume()
        assert "no answer" in tier.stats().problem


def test_given_a_paused_server_when_it_goes_on_then_a_probe_finds_it(server: RedisServer) -> None:
    with opened(server.url) as tier:
        eventually(lambda: is_up(tier), "the tier is up")
        store(tier, [1])
        server.pause()
        assert load(tier, [1])[0] == [Outcome.LATE]
        server.resume()
        eventually(lambda: is_up(tier), "the probe finds the server")
        assert found(tier, 1)


def test_given_a_load_that_was_late_then_nothing_writes_to_its_buffer_afterwards(server: RedisServer) -> None:
    with opened(server.url) as tier:
        eventually(lambda: is_up(tier), "the tier is up")
        store(tier, [1])
        server.pause()
        out = bytearray(len(value(1)))
        assert tier.load([key(1)], [out]) == [Outcome.LATE]
        out[:] = b"\x5a" * len(out)
        server.resume()
        eventually(lambda: found(tier, 1), "the server answers")
        assert out == b"\x5a" * len(out)


def test_given_a_deadline_shorter_than_the_tiers_then_the_call_ends_at_its_own(server: RedisServer) -> None:
    url = f"{server.url}?timeout={HANGS * 3}&pause=3600"
    with RedisTier(url) as tier:
        assert store(tier, [1]) == [Outcome.OK]
        server.pause()
        try:
            with bounded():
                assert tier.load([key(1)], [bytearray(5000)], timeout=0.2) == [Outcome.LATE]
                assert tier.store([key(2)], [value(2)], timeout=0.2) == [Outcome.FAILED]
        finally:
            server.resume()


def test_given_a_full_server_then_values_are_refused_what_is_there_stays_and_room_is_found_again(
    tmp_path: Path,
) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    with running(server), opened(server.url) as tier:
        size, numbers = 500_000, list(range(40))
        eventually(lambda: is_up(tier), "the tier is up")
        outcomes = store(tier, numbers, size)
        assert set(outcomes) == {Outcome.OK, Outcome.REFUSED}
        assert outcomes[0] == Outcome.OK
        kept = [number for number, outcome in zip(numbers, outcomes, strict=True) if outcome == Outcome.OK]
        assert load(tier, kept, size) == ([Outcome.OK] * len(kept), [value(number, size) for number in kept])
        assert store(tier, kept, size) == [Outcome.OK] * len(kept)
        assert store(tier, [99], size) == [Outcome.REFUSED]
        assert tier.stats().refused == outcomes.count(Outcome.REFUSED) + 1
        assert tier.stats().problem == ""
        tier.remove([key(number) for number in numbers])
        eventually(lambda: store(tier, [99], size) == [Outcome.OK], "room is found again")


# --- a cluster -------------------------------------------------------------------------------------------------------


def node_of(number: int) -> int:
    return slot_of(key(number).hex().encode()) // 5462


@pytest.mark.slow
def test_given_a_cluster_that_loses_a_master_then_only_its_values_are_gone_and_it_may_come_back(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster), opened(cluster.url) as tier:
        numbers = list(range(30))
        eventually(lambda: is_up(tier), "all nodes are up")
        assert store(tier, numbers) == [Outcome.OK] * 30
        lost = [number for number in numbers if node_of(number) == 1]
        safe = [number for number in numbers if node_of(number) != 1]
        cluster.nodes[1].kill()
        with bounded():
            outcomes, contents = load(tier, numbers)
            assert all(outcomes[number] in (Outcome.LATE, Outcome.FAILED) for number in lost)
            for _ in range(20):
                outcomes, contents = load(tier, numbers)
                assert [outcomes[number] for number in safe] == [Outcome.OK] * len(safe)
                assert [contents[number] for number in safe] == [value(number) for number in safe]
                assert [outcomes[number] for number in lost] == [Outcome.FAILED] * len(lost)
        assert f":{cluster.nodes[1].port}:" in tier.stats().problem
        assert f":{cluster.nodes[0].port}:" not in tier.stats().problem
        cluster.nodes[1].start()
        eventually(lambda: is_up(tier) and store(tier, lost) == [Outcome.OK] * len(lost), "the node is back")
        assert load(tier, numbers) == ([Outcome.OK] * 30, [value(number) for number in numbers])


@pytest.mark.slow
def test_given_a_replica_that_takes_the_place_of_a_lost_master_then_its_values_are_found_there(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster), opened(cluster.url) as tier:
        replica = cluster.add_replica(cluster.nodes[1])
        numbers = list(range(30))
        eventually(lambda: is_up(tier), "all nodes are up")
        assert store(tier, numbers) == [Outcome.OK] * 30
        eventually(lambda: replica.ask("DBSIZE") == cluster.nodes[1].ask("DBSIZE"), "the replica has all values")
        cluster.nodes[1].kill()
        assert replica.ask("CLUSTER", "FAILOVER", "TAKEOVER") == "+OK"
        eventually(lambda: load(tier, numbers)[0] == [Outcome.OK] * 30, "the new master is found")
        assert load(tier, numbers)[1] == [value(number) for number in numbers]
        assert tier.stats().problem == ""


def test_given_a_cluster_with_a_paused_master_then_the_others_answer_in_the_very_same_call(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster), RedisTier(f"{cluster.url}&timeout=2&pause=3600") as tier:
        numbers = list(range(30))
        eventually(lambda: is_up(tier), "all nodes are up")
        assert store(tier, numbers) == [Outcome.OK] * 30
        cluster.nodes[2].pause()
        try:
            with bounded():
                outcomes, _ = load(tier, numbers)
        finally:
            cluster.nodes[2].resume()
        assert outcomes == [Outcome.LATE if node_of(number) == 2 else Outcome.OK for number in numbers]


def test_given_a_dead_first_node_then_another_one_of_the_address_leads_into_the_cluster(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster):
        cluster.nodes[0].kill()
        url = f"{cluster.url}&nodes=127.0.0.1:{cluster.nodes[1].port},127.0.0.1:{cluster.nodes[2].port}"
        safe = [number for number in range(30) if node_of(number) != 0]
        with bounded(), opened(url) as tier:
            eventually(lambda: store(tier, safe) == [Outcome.OK] * len(safe), "the others are found")
            assert load(tier, safe)[0] == [Outcome.OK] * len(safe)


def test_given_a_node_that_has_just_died_when_slots_are_asked_for_then_the_next_one_is_asked(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster), opened(cluster.url) as tier:
        eventually(lambda: is_up(tier), "all nodes are up")
        cluster.nodes[0].kill()
        by_name = {node.name: node for node in tier._nodes()}
        first, second = (by_name[f"127.0.0.1:{node.port}"] for node in cluster.nodes[:2])
        before = tier._slots
        tier._learn_slots([first, second])
        assert tier._slots is not before


def test_given_slots_that_move_then_they_are_found_on_their_new_node(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster), opened(cluster.url) as tier:
        eventually(lambda: is_up(tier), "all nodes are up")
        number = next(number for number in range(100) if node_of(number) == 0)
        slot = str(slot_of(key(number).hex().encode()))
        new_owner = cluster.nodes[1].ask("CLUSTER", "MYID")
        for node in (cluster.nodes[1], cluster.nodes[0], cluster.nodes[2]):
            assert node.ask("CLUSTER", "SETSLOT", slot, "NODE", new_owner) == "+OK"
        eventually(lambda: store(tier, [number]) == [Outcome.OK], "the slot's new node is known")
        assert found(tier, number)
        assert tier.stats().problem == ""


def test_given_a_node_of_a_cluster_without_saying_so_then_the_statistics_tell_what_to_add(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with running(cluster), opened(cluster.nodes[0].url, pause=3600) as tier:
        numbers = list(range(30))
        assert Outcome.FAILED in store(tier, numbers)
        assert "add cluster=1" in tier.stats().problem


# --- servers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says", GARBAGE.values(), ids=GARBAGE)
def test_given_a_server_that_answers_garbage_then_nothing_is_taken_for_a_value(says: bytes) -> None:
    fake = FakeServer(says)
    try:
        with bounded(), opened(fake.url) as tier:
            for _ in range(5):
                outcomes, _ = load(tier, [1, 2])
                assert not {Outcome.OK, Outcome.REFUSED} & set(outcomes)
                assert tier.remove([key(1)]) in ([Outcome.FAILED], [Outcome.LATE], [Outcome.MISS], [Outcome.OK])
                store(tier, [1])
    finally:
        fake.close()


def test_given_a_server_that_forbids_a_command_then_it_is_asked_no_more_and_the_log_says_why(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(server.url, pause=300.0) as tier:
        assert store(tier, [1, 2]) == [Outcome.OK] * 2
        assert server.ask("ACL", "SETUSER", "default", "-get") == "+OK"
        assert load(tier, [1, 2])[0] == [Outcome.FAILED] * 2
        assert "no permissions" in tier.stats().problem
        (line,) = [record.getMessage() for record in caplog.records if "no permissions" in record.getMessage()]
        assert str(server.port) in line
        assert server.ask("ACL", "SETUSER", "default", "+get") == "+OK"
        assert load(tier, [1, 2])[0] == [Outcome.FAILED] * 2  # until the pause is over


def test_given_a_tier_that_is_closed_during_calls_then_they_end_and_nothing_breaks(server: RedisServer) -> None:
    tier = opened(server.url)
    eventually(lambda: is_up(tier), "the tier is up")
    store(tier, list(range(20)))
    seen: list[Outcome] = []
    begun = threading.Barrier(5)

    def work() -> None:
        begun.wait()
        for _ in range(50):
            seen.extend(load(tier, list(range(20)))[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    tier.close()
    for thread in threads:
        thread.join(HANGS)
        assert not thread.is_alive()
    assert set(seen) <= {Outcome.OK, Outcome.FAILED, Outcome.LATE}
