"""The node tier: its contract, what clients share, what a restart keeps, and what the node refuses."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nodes import MEGABYTE, RawClient, needs_linux, node_folder, node_thread
from servers import eventually

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.testing import VALUE_BYTES, TierContract, Written, key, load, store, value
from kvpool.tiers import DiskTier, KeyedTier, KeyPattern, MemoryTier, NodeTier, Outcome, open_tier
from kvpool.tiers.contract import Loan, Slots, Worth
from kvpool.tiers.keys import tenant_tag
from kvpool.tiers.remote import remote_tier
from kvpool.tiers.remote.breaker import Breaker

pytestmark = [needs_linux, pytest.mark.usefixtures("patience")]

if hasattr(os, "eventfd"):
    from kvpool.tiers.node import lending, node_tier, wire
    from kvpool.tiers.node.connection import Connection
    from kvpool.tiers.node.server import SILENCE_SECONDS, NodeServer
    from kvpool.tiers.node.values import Quotas
    from kvpool.tiers.node.wire import Verb


@pytest.fixture
def folder() -> Iterator[Path]:
    with node_folder() as found:
        yield found


def tier_of(folder: Path, options: str = "") -> NodeTier:
    return NodeTier(f"node:{folder}{options}")


def lent(tier: NodeTier, numbers: list[int], size: int = VALUE_BYTES) -> Loan:
    loan = tier.lend([key(number) for number in numbers], [size] * len(numbers))
    assert loan is not None
    return loan


def sound(server: NodeServer) -> None:
    """Nobody holds anything, and every slot is free or holds a value that is found."""
    stats = server.call(server.stats, 30)
    assert sum(client["leased"] + client["reserved_bytes"] for client in stats["clients"]) == 0
    assert sum(size["slots"] - size["free"] for size in stats["slots"]) == stats["num_values"]
    assert stats["used_bytes"] == sum((size["slots"] - size["free"]) * size["bytes"] for size in stats["slots"])


class TestNodeTier(TierContract):
    @pytest.fixture(autouse=True)
    def node(self, folder: Path) -> Iterator[None]:
        self.folder = folder
        with node_thread(folder) as server:
            yield
            eventually(lambda: not server.call(server.stats, 30)["num_clients"], "the clients have left")
            sound(server)

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return open_tier(f"node:{self.folder}?timeout=30")


class TestNodeTierOverDisk(TestNodeTier):
    """The same with a disk behind the node."""

    @pytest.fixture(autouse=True)
    def node(self, folder: Path) -> Iterator[None]:
        self.folder = folder
        with node_thread(folder, 4 * MEGABYTE, tiers=[DiskTier(folder / "disk", 16 * MEGABYTE, timeout=30)]) as server:
            yield
            eventually(lambda: not server.call(server.stats, 30)["num_clients"], "the clients have left")
            eventually(lambda: not server.call(server.stats, 30)["waiting_bytes"], "the disk has all")
            sound(server)

    def test_given_calls_then_the_statistics_balance(self, tier: KeyedTier) -> None:
        store(tier, [1, 2])
        assert load(tier, [1, 2, 3])[0] == [Outcome.OK, Outcome.OK, Outcome.MISS]


# --- what clients share ----------------------------------------------------------------------------------------------


def test_given_two_engines_then_what_one_stores_the_other_loads_and_it_is_there_once(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as one, tier_of(folder) as other:
        assert store(one, [1, 2, 3]) == [Outcome.OK] * 3
        assert store(other, [1, 2, 3]) == [Outcome.OK] * 3
        assert load(other, [3, 1]) == ([Outcome.OK] * 2, [value(3), value(1)])
        assert server.call(server.stats, 30)["num_values"] == 3
        sound(server)


def test_given_engines_with_names_then_the_statistics_of_a_tier_say_who_holds_what(folder: Path) -> None:
    with node_thread(folder), tier_of(folder, "?engine=one") as one, tier_of(folder, "?engine=two") as two:
        store(one, [1, 2])
        store(two, [3])
        assert one.stats().holders == two.stats().holders == {"one": 2 * 8192, "two": 8192}


def test_given_more_keys_than_a_message_holds_then_all_are_stored_and_found(folder: Path) -> None:
    numbers = list(range(2 * wire.MAX_KEYS + 7))
    with node_thread(folder) as server, tier_of(folder, "?timeout=60") as tier:
        assert store(tier, numbers, 64) == [Outcome.OK] * len(numbers)
        assert tier.contains_prefix([key(number) for number in numbers]) == len(numbers)
        assert load(tier, numbers, 64)[1] == [value(number, 64) for number in numbers]
        assert len(tier.listed().sizes) == len(numbers)
        sound(server)


def test_given_a_full_region_then_the_value_used_longest_ago_goes(folder: Path) -> None:
    numbers = list(range(40))  # 28 slots of 36 KiB
    with node_thread(folder, MEGABYTE) as server, tier_of(folder) as tier:
        for number in numbers:
            assert store(tier, [number], 36_000) == [Outcome.OK]
            assert load(tier, [0], 36_000)[0] == [Outcome.OK]
        found = tier.contains([key(number) for number in numbers])
        assert found[0]
        assert found[-20:] == [True] * 20
        assert not found[1]
        sound(server)


def test_given_values_of_another_size_then_old_slabs_make_room_for_them(folder: Path) -> None:
    with node_thread(folder, 4 * MEGABYTE) as server, tier_of(folder) as tier:
        assert store(tier, list(range(50)), 80_000) == [Outcome.OK] * 50
        assert store(tier, list(range(100, 200)), 20_000) == [Outcome.OK] * 100
        assert load(tier, [150], 20_000) == ([Outcome.OK], [value(150, 20_000)])
        assert store(tier, [300], 2 * MEGABYTE) == [Outcome.REFUSED]
        sound(server)


def test_given_values_of_two_other_sizes_then_those_used_longest_ago_make_room(folder: Path) -> None:
    with node_thread(folder, 2 * MEGABYTE) as server, tier_of(folder) as tier:
        assert store(tier, [1], 80_000) == [Outcome.OK]
        assert store(tier, [2], 300_000) == [Outcome.OK]
        assert load(tier, [1], 80_000)[0] == [Outcome.OK]
        assert store(tier, [3], 20_000) == [Outcome.OK]
        assert tier.contains([key(number) for number in (1, 2, 3)]) == [True, False, True]
        sound(server)


def test_given_a_deadline_then_a_message_says_how_many_milliseconds_are_left_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert [lending.milliseconds(deadline) for deadline in (1100.0, 100.25, 100.0, 95.0)] == [1_000_000, 250, 1, 1]


def test_given_a_worth_beyond_what_a_message_can_say_then_it_is_the_most_that_it_can() -> None:
    for worth, told in ((Worth(7, 300), Worth(7, 300)), (Worth(300, 70_000), Worth(255, 65_535))):
        assert wire.unrated(wire.rated(5_000_000_000, worth)) == (5_000_000_000, told)


def test_given_a_loan_then_its_values_stay_while_others_store_and_remove(folder: Path) -> None:
    with node_thread(folder, MEGABYTE) as server, tier_of(folder) as tier:
        store(tier, [0], 36_000)
        loan = lent(tier, [0], 36_000)
        assert store(tier, list(range(1, 60)), 36_000).count(Outcome.OK) == 59
        assert tier.remove([key(0)]) == [Outcome.OK]
        assert store(tier, list(range(60, 90)), 36_000).count(Outcome.OK) == 30
        assert bytes(loan.views[0]) == value(0, 36_000)
        assert loan.is_held()
        loan.share()
        loan.release()
        assert server.call(server.stats, 30)["clients"][0]["leased"] == 1
        loan.release()
        eventually(lambda: not server.call(server.stats, 30)["clients"][0]["leased"], "the lease has ended")
        sound(server)


def test_given_values_that_a_caller_writes_then_nobody_finds_them_before_they_are_compared(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier, tier_of(folder) as other:

        class Watched(Written):
            def is_in(self, slots: Slots) -> bool:
                assert other.contains(keys) == [False] * len(keys)
                return super().is_in(slots)

        keys, source = [key(number) for number in range(3)], Watched([0, 1, 2])
        assert tier.store_straight(keys, [VALUE_BYTES] * 3, source) == [Outcome.OK] * 3
        assert source.written == [0, 1, 2]
        assert load(other, [0, 1, 2])[1] == [value(number) for number in range(3)]
        sound(server)


def test_given_a_process_that_writes_to_a_slot_it_had_before_then_what_lies_there_is_not_stored(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:

        class Spoiled(Written):
            def write(self, slots: Slots) -> None:
                super().write(slots)
                slots.views[0][:3] = b"old"  # of a process that was stopped, and cut off, and goes on now

        assert tier.store_straight([key(0)], [VALUE_BYTES], Spoiled([0])) == [Outcome.FAILED]
        assert tier.contains([key(0)]) == [False]
        eventually(lambda: not server.call(server.stats, 30)["used_bytes"], "the slot is free again")
        sound(server)


def test_given_more_values_than_may_be_reserved_at_a_time_then_a_caller_writes_them_part_by_part(folder: Path) -> None:
    with node_thread(folder, 4 * MEGABYTE) as server, tier_of(folder) as tier:
        numbers = list(range(60))
        source = Written(numbers, 36_000)
        assert not any(tier.store_straight([key(number) for number in numbers], [36_000] * 60, source))
        assert source.written == numbers
        assert load(tier, numbers, 36_000)[1] == [value(number, 36_000) for number in numbers]
        sound(server)


def test_given_values_that_are_as_much_as_may_be_reserved_at_a_time_then_they_go_in_one_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    part = node_tier._store_part

    def counted(*given: Any, **options: Any) -> list[Outcome]:
        parts.append(len(found := part(*given, **options)))
        return found

    monkeypatch.setattr(node_tier, "_store_part", counted)
    with node_thread(folder, 4 * MEGABYTE), tier_of(folder) as tier:
        eighth = 4 * MEGABYTE // node_tier.PART_SHARE
        assert tier.store([key(1), key(2)], [value(1, eighth - 5000), value(2, 5000)]) == [Outcome.OK] * 2
        assert tier.store([key(3), key(4)], [value(3, eighth - 5000), value(4, 5001)]) == [Outcome.OK] * 2
    assert parts == [2, 1, 1]


def test_given_a_node_that_leaves_while_its_values_are_lent_then_the_loan_says_so(folder: Path) -> None:
    with tier_of(folder) as tier:
        with node_thread(folder):
            store(tier, [0])
            loan = lent(tier, [0])
        assert not loan.is_held()
        loan.release()
        with node_thread(folder) as server:  # it knows of no lease, and may give the slot to others
            eventually(lambda: tier.contains([key(0)]) == [True], "the tier has found the node again")
            sound(server)


def test_given_a_client_that_is_cut_off_while_it_borrows_then_the_loan_is_not_held(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [0])
        loan = lent(tier, [0])
        server.call(lambda: [server._cut_off(peer, "a test") for peer in list(server._peers.values())], 30)
        assert not loan.is_held()
        loan.release()


def test_given_a_value_that_somebody_spoiled_then_it_is_not_lent_and_the_node_drops_it(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [0, 1])
        loan = lent(tier, [0])
        loan.views[0][:1] = bytes([loan.views[0][0] ^ 1])
        loan.release()
        loan = lent(tier, [0, 1])
        assert loan.outcomes == [Outcome.FAILED, Outcome.OK]
        loan.release()
        eventually(lambda: tier.contains([key(0)]) == [False], "the node has looked itself")
        sound(server)


def test_given_sizes_that_are_not_those_of_the_values_then_nothing_is_lent_and_nothing_dropped(folder: Path) -> None:
    with node_thread(folder), tier_of(folder) as tier:
        store(tier, [0])
        loan = lent(tier, [0], VALUE_BYTES + 1)
        assert loan.outcomes == [Outcome.FAILED]
        loan.release()
        assert load(tier, [0])[0] == [Outcome.OK]
        assert tier.stats().load_failures == 1


def test_given_many_loans_then_the_next_is_refused_until_one_ends(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [0])
        loans = [lent(tier, [0]) for _ in range(node_tier.MAX_LOANS)]
        assert tier.lend([key(0)], [VALUE_BYTES]) is None
        loans.pop().release()
        lent(tier, [0]).release()
        for loan in loans:
            loan.release()
        eventually(lambda: not sum(each["leased"] for each in server.call(server.stats, 30)["clients"]), "all ended")
        sound(server)


def test_given_more_keys_than_a_message_holds_then_one_loan_has_them_all(folder: Path) -> None:
    numbers = list(range(wire.MAX_KEYS + 7))
    with node_thread(folder), tier_of(folder, "?timeout=60") as tier:
        store(tier, numbers, 64)
        loan = lent(tier, numbers, 64)
        assert [bytes(view) for view in loan.views] == [value(number, 64) for number in numbers]
        loan.release()


def test_given_as_many_keys_as_a_loan_may_have_then_they_are_lent_and_one_more_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_tier, "MAX_LENT_KEYS", 3)
    with node_thread(folder), tier_of(folder) as tier:
        store(tier, [0, 1, 2, 3])
        lent(tier, [0, 1, 2]).release()
        assert tier.lend([key(number) for number in range(4)], [VALUE_BYTES] * 4) is None


def test_given_no_node_then_nothing_is_lent(folder: Path) -> None:
    with tier_of(folder) as tier:
        assert tier.lend([key(0)], [VALUE_BYTES]) is None
        with node_thread(folder):
            eventually(lambda: store(tier, [0]) == [Outcome.OK], "the tier has found the node")
            lent(tier, [0]).release()


def test_given_a_lease_then_its_values_stay_where_they_are_until_it_ends(folder: Path) -> None:
    with node_thread(folder, MEGABYTE) as server, tier_of(folder) as tier:
        store(tier, [0], 36_000)
        raw = RawClient(folder)
        answer = raw.ask(wire.message(Verb.LEASE, 1, 1000, wire.with_numbers([key(0)], [36_000])))
        (place,) = wire.places_in(answer)
        assert place != wire.ABSENT
        assert store(tier, list(range(1, 60)), 36_000).count(Outcome.OK) == 59
        memory = server.index.region.memory[place[0] : place[0] + place[1]]
        assert bytes(memory) == value(0, 36_000)
        assert tier.remove([key(0)]) == [Outcome.OK]
        assert store(tier, list(range(60, 90)), 36_000).count(Outcome.OK) == 30
        assert bytes(memory) == value(0, 36_000), "removed, but somebody reads it"
        raw.socket.close()
        eventually(lambda: server.call(server.stats, 30)["num_clients"] == 1, "the lease has ended")
        sound(server)


# --- who may fill how much -------------------------------------------------------------------------------------------


def tenant_key(tenant: str, number: int) -> bytes:
    return bytes(8) + tenant_tag(tenant) + bytes(2) + key(number)[:20]


def test_given_a_quota_of_engines_then_one_evicts_its_own_values_and_leaves_those_of_others(folder: Path) -> None:
    with (
        node_thread(folder, MEGABYTE, quotas=Quotas(engine=0.5)) as server,
        tier_of(folder, "?engine=calm") as calm,
        tier_of(folder, "?engine=greedy") as greedy,
    ):
        assert store(calm, list(range(5)), 36_000) == [Outcome.OK] * 5
        for number in range(100, 160):
            assert store(greedy, [number], 36_000) == [Outcome.OK]
        assert calm.contains_prefix([key(number) for number in range(5)]) == 5
        assert server.call(server.stats, 30)["engines"]["greedy"] <= MEGABYTE // 2


def test_given_a_quota_of_a_tenant_then_it_holds_for_that_tenant_alone(folder: Path) -> None:
    quotas = Quotas(tenants={tenant_tag("small"): 0.25})
    with node_thread(folder, MEGABYTE, quotas=quotas) as server, tier_of(folder) as tier:
        for tenant, most in (("small", MEGABYTE // 4), ("large", MEGABYTE)):
            for number in range(20):
                assert tier.store([tenant_key(tenant, number)], [value(number, 36_000)]) == [Outcome.OK]
            used = server.call(server.stats, 30)["tenants"][tenant_tag(tenant).hex()]
            assert used <= most
        assert used > MEGABYTE // 2


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_given_any_policy_that_needs_no_tokens_then_a_full_node_evicts_by_it(folder: Path, policy: str) -> None:
    with node_thread(folder, MEGABYTE, policy=policy) as server, tier_of(folder) as tier:
        for number in range(80):
            assert store(tier, [number], 36_000) == [Outcome.OK]
            assert load(tier, [number // 2], 36_000)[0] in ([Outcome.OK], [Outcome.MISS])
        assert server.call(server.stats, 30)["evicted"] > 40
        sound(server)


def test_given_a_policy_that_nobody_knows_then_it_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy='newest' must be one of .*adaptive"):
        NodeServer(folder, MEGABYTE, policy="newest")


# --- restarts --------------------------------------------------------------------------------------------------------


def test_given_a_node_that_is_started_again_then_values_are_there_in_their_order(folder: Path) -> None:
    with node_thread(folder, MEGABYTE), tier_of(folder) as tier:
        assert store(tier, list(range(28)), 36_000) == [Outcome.OK] * 28
        load(tier, [0], 36_000)
    with node_thread(folder, MEGABYTE) as server, tier_of(folder) as tier:
        assert server.is_warm
        assert load(tier, list(range(28)), 36_000)[1] == [value(number, 36_000) for number in range(28)]
        sound(server)
    with node_thread(folder, 2 * MEGABYTE) as server, tier_of(folder) as tier:
        assert not server.is_warm
        assert tier.contains([key(0)]) == [False]


def test_given_a_use_right_before_a_node_ends_then_the_next_one_knows_of_it(folder: Path) -> None:
    with node_thread(folder, MEGABYTE), tier_of(folder) as tier:
        assert store(tier, list(range(28)), 36_000) == [Outcome.OK] * 28
        load(tier, [2], 36_000)  # the last one of a part goes first otherwise
    assert not (folder / "socket").exists()
    with node_thread(folder, MEGABYTE), tier_of(folder) as tier:
        assert store(tier, [28], 36_000) == [Outcome.OK]
        assert tier.contains([key(1), key(2)]) == [False, True]


def test_given_values_that_were_damaged_between_two_nodes_then_they_are_gone_and_not_wrong(folder: Path) -> None:
    with node_thread(folder), tier_of(folder) as tier:
        store(tier, list(range(20)))
    with open(folder / "region", "r+b") as region:
        for at in range(0, 20 * 8192, 16_384):
            region.seek(at + 100)
            region.write(b"damaged")
    with node_thread(folder) as server, tier_of(folder) as tier:
        outcomes, found = load(tier, list(range(20)))
        assert outcomes.count(Outcome.FAILED) == 10
        for number, (outcome, data) in enumerate(zip(outcomes, found, strict=True)):
            assert outcome == Outcome.FAILED or data == value(number)
        eventually(lambda: server.call(server.stats, 30)["damaged"] == 10, "the node has looked itself")
        assert load(tier, list(range(20)))[0].count(Outcome.MISS) == 10
        sound(server)


def test_given_records_that_are_noise_then_the_node_begins_anew_or_finds_nothing_wrong(folder: Path) -> None:
    with node_thread(folder), tier_of(folder) as tier:
        store(tier, list(range(20)))
    size = (folder / "slots").stat().st_size
    for offset in (0, 8, 32, 40, 4096 + 32, 4096 + 7, 5000):
        content = (folder / "slots").read_bytes()
        with open(folder / "slots", "r+b") as slots:
            slots.seek(min(offset, size - 64))
            slots.write(os.urandom(64))
        with node_thread(folder) as server, tier_of(folder) as tier:
            outcomes, found = load(tier, list(range(20)))
            for number, (outcome, data) in enumerate(zip(outcomes, found, strict=True)):
                assert outcome != Outcome.OK or data == value(number)
            sound(server)
        (folder / "slots").write_bytes(content)


def test_given_a_node_that_is_not_there_then_calls_find_nothing_and_it_is_used_once_it_is(folder: Path) -> None:
    with tier_of(folder) as tier:
        assert tier.contains([key(1)]) == [False]
        assert store(tier, [1]) == [Outcome.FAILED]
        assert load(tier, [1])[0] == [Outcome.FAILED]
        assert "no node answers" in tier.stats().problem
        for _ in range(2):
            with node_thread(folder):
                eventually(lambda: store(tier, [1]) == [Outcome.OK], "the tier has found the node")
                assert load(tier, [1]) == ([Outcome.OK], [value(1)])
                assert tier.stats().problem == ""
        assert load(tier, [1])[0] == [Outcome.FAILED]


def test_given_a_node_that_cuts_every_call_off_then_the_statistics_of_the_tier_say_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object) -> bytes:
        raise wire.WireError("no call is right")

    with node_thread(folder) as server, tier_of(folder) as tier:
        monkeypatch.setattr(server.service, "handle", cut_off)
        assert tier.contains([key(1)]) == [False]
        assert tier.stats().problem


def test_given_a_node_that_is_down_then_one_thread_looks_for_it_after_a_pause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, probes = 0.0, list[str]()
    monkeypatch.setattr(node_tier, "Breaker", lambda **options: Breaker(**options, clock=lambda: now))
    monkeypatch.setattr(NodeTier, "_probe", lambda _: probes.append(threading.current_thread().name))

    def num_probes(tier: NodeTier) -> int:
        for _ in range(3):
            assert tier.contains([key(1)]) == [False]
        for thread in threading.enumerate():
            if thread.name == "kvpool-node-probe":
                thread.join(30)
        return len(probes)

    with tier_of(folder) as tier:
        assert num_probes(tier) == 0
        now = node_tier.PAUSE
        assert num_probes(tier) == 1


def test_given_a_deadline_that_passes_while_values_are_written_then_they_are_late_and_nobody_finds_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy = node_tier._copy

    def slow(source: memoryview, target: memoryview) -> None:
        copied.append(target.nbytes)
        copy(source, target)
        monkeypatch.setattr(remote_tier, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000))

    with node_thread(folder) as server, tier_of(folder) as tier:
        monkeypatch.setattr(node_tier, "_copy", slow)
        assert store(tier, [1, 2, 3]) == [Outcome.LATE] * 3
        monkeypatch.undo()
        assert len(copied) == 1
        assert tier.contains([key(number) for number in (1, 2, 3)]) == [False] * 3
        eventually(lambda: server.call(server.stats, 30)["used_bytes"] == 0, "their slots are free again")


def test_given_a_deadline_that_is_over_then_nothing_is_sent(folder: Path) -> None:
    with node_thread(folder):
        node = Connection(folder, "engine", (), 30)
        with pytest.raises(TimeoutError):
            node.tell(wire.message(Verb.STATS), time.monotonic() - 1)
        assert node.ask(wire.message(Verb.FIND, 1, 1000, key(1)), time.monotonic() + 30).verb == Verb.FIND
        node.close()


def test_given_a_node_that_hangs_then_a_call_ends_at_its_deadline(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [1])
        hanging, released = threading.Event(), threading.Event()

        def hang() -> None:
            hanging.set()
            released.wait(30)

        server._post(hang)
        assert hanging.wait(30)
        began = time.monotonic()
        assert tier.load([key(1)], [bytearray(VALUE_BYTES)], timeout=0.2) == [Outcome.LATE]
        assert time.monotonic() - began < 20
        released.set()
        eventually(lambda: load(tier, [1]) == ([Outcome.OK], [value(1)]), "the node is used again")


def test_given_an_engine_that_writes_to_a_slot_of_a_node_that_is_gone_then_nobody_gets_what_it_wrote(
    folder: Path,
) -> None:
    with node_thread(folder, MEGABYTE) as server:
        raw = RawClient(folder)
        body = wire.with_numbers([key(1)], [36_000])
        (place,) = wire.places_in(raw.ask(wire.message(Verb.RESERVE, 1, 0, body)))
        assert place != wire.ABSENT
        memory = server.index.region.memory  # as an engine has it mapped
    with node_thread(folder, MEGABYTE) as server, tier_of(folder) as tier:
        assert store(tier, list(range(28)), 36_000) == [Outcome.OK] * 28
        memory[place[0] : place[0] + 20_000] = bytes(20_000)  # its copy ends only now
        outcomes, found = load(tier, list(range(28)), 36_000)
        assert outcomes.count(Outcome.FAILED) == 1
        for number, (outcome, data) in enumerate(zip(outcomes, found, strict=True)):
            assert outcome == Outcome.FAILED or data == value(number, 36_000)
        eventually(lambda: server.call(server.stats, 30)["damaged"] == 1, "the node has dropped it")
        sound(server)


def test_given_bytes_that_change_while_they_are_copied_then_the_copy_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node_tier._copy

    def torn(source: memoryview, target: memoryview) -> None:
        copy(source, target)
        target[-1] ^= 1

    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [1])
        monkeypatch.setattr(node_tier, "_copy", torn)
        assert load(tier, [1])[0] == [Outcome.FAILED]
        monkeypatch.setattr(node_tier, "_copy", copy)
        assert load(tier, [1]) == ([Outcome.OK], [value(1)]), "the node has looked itself: the value is right"
        assert server.call(server.stats, 30)["damaged"] == 0


# --- tiers behind it -------------------------------------------------------------------------------------------------


def test_given_a_disk_behind_the_node_then_what_memory_lost_comes_from_there(folder: Path) -> None:
    numbers = list(range(60))
    with (
        node_thread(folder, MEGABYTE, tiers=[DiskTier(folder / "disk", 16 * MEGABYTE, timeout=30)]) as server,
        tier_of(folder, "?timeout=30") as tier,
    ):
        for number in numbers:
            assert store(tier, [number], 36_000) == [Outcome.OK]
            eventually(lambda: not server.call(server.stats, 30)["waiting_bytes"], "the disk has it")
        assert tier.contains_prefix([key(number) for number in numbers]) == 60
        for number in numbers:
            assert load(tier, [number], 36_000) == ([Outcome.OK], [value(number, 36_000)])
        assert server.call(server.stats, 30)["fetched"] >= 32
        assert tier.purge(KeyPattern()).removed == 60
        assert tier.contains([key(1)]) == [False]
        sound(server)
    with DiskTier(folder / "disk", 16 * MEGABYTE) as disk:
        assert disk.contains([key(1)]) == [False]


def test_given_a_value_behind_the_node_that_is_shorter_than_the_buffer_then_it_is_a_miss(folder: Path) -> None:
    behind = MemoryTier(MEGABYTE)
    behind.store([key(1)], [value(1, 100)])
    with node_thread(folder, tiers=[behind]) as server, tier_of(folder, "?timeout=30") as tier:
        assert load(tier, [1], 300)[0] == [Outcome.MISS]
        assert load(tier, [1], 100) == ([Outcome.OK], [value(1, 100)])
        assert load(tier, [1], 300)[0] == [Outcome.OK], "from memory, where its length is known"
        sound(server)


class SlowTier(MemoryTier):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__(MEGABYTE)
        self.may_answer = threading.Event()

    def _contains(self, keys: object, deadline: float) -> list[bool]:  # type: ignore[override]
        self.may_answer.wait(30)
        return super()._contains(keys, deadline)  # type: ignore[arg-type]


def test_given_a_slow_tier_behind_the_node_then_hits_in_memory_do_not_wait_for_it(folder: Path) -> None:
    behind = SlowTier()
    with node_thread(folder, tiers=[behind]) as server, tier_of(folder, "?timeout=30") as tier:
        store(tier, [1])
        missing = threading.Thread(target=lambda: tier.contains([key(2)]))
        missing.start()
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])
        assert missing.is_alive()
        behind.may_answer.set()
        missing.join()
        sound(server)


def test_given_a_client_that_waits_for_tiers_then_its_next_message_waits_too(folder: Path) -> None:
    behind = SlowTier()
    with node_thread(folder, tiers=[behind]) as server:
        raw, other = RawClient(folder), RawClient(folder, b"other")
        raw.socket.send(wire.message(Verb.FIND, 1, 9000, key(1)))
        raw.socket.send(wire.message(Verb.STATS))
        for _ in range(3):
            assert other.ask(wire.message(Verb.STATS)).verb == Verb.STATS
        behind.may_answer.set()
        assert [raw.heard().verb for _ in range(2)] == [Verb.FIND, Verb.STATS]
        sound(server)


def test_given_a_client_that_waits_for_tiers_then_it_may_be_silent_until_they_have_answered(folder: Path) -> None:
    behind = SlowTier()
    with node_thread(folder, tiers=[behind]) as server, tier_of(folder) as tier:

        def look_after(seconds: float) -> None:
            for peer in server._peers.values():
                peer.heard -= seconds
            server._tick()

        assert store(tier, [1]) == [Outcome.OK]
        raw = RawClient(folder)
        raw.socket.send(wire.message(Verb.LEASE, 2, 9000, wire.with_numbers([key(1), key(2)], [VALUE_BYTES] * 2)))
        eventually(lambda: any(peer.is_busy for peer in list(server._peers.values())), "tiers are asked for it")
        server.call(lambda: look_after(3600.0), 30)
        behind.may_answer.set()
        assert raw.heard().verb == Verb.LEASE
        server.call(lambda: look_after(SILENCE_SECONDS / 2), 30)
        assert raw.ask(wire.message(Verb.STATS)).verb == Verb.STATS, "its time began with the answer"
        server.call(lambda: look_after(SILENCE_SECONDS * 2 / 3), 30)
        assert raw.ask(wire.message(Verb.STATS)).verb == Verb.STATS, "and again with each message"
        server.call(lambda: look_after(SILENCE_SECONDS + 1), 30)
        assert raw.is_cut_off()
        sound(server)


def test_given_an_engine_that_leaves_while_tiers_are_asked_for_it_then_nothing_is_left_behind(folder: Path) -> None:
    behind = SlowTier()
    behind.store([key(1)], [value(1)])
    with node_thread(folder, tiers=[behind]) as server:
        raw = RawClient(folder)
        raw.socket.send(wire.message(Verb.LEASE, 1, 9000, wire.with_numbers([key(1)], [VALUE_BYTES])))
        raw.socket.close()
        eventually(lambda: not server.call(server.stats, 30)["num_clients"], "it has left")
        behind.may_answer.set()
        eventually(lambda: server.call(server.stats, 30)["fetched"] == 1, "it came and stays")
        sound(server)


# --- who is cut off --------------------------------------------------------------------------------------------------

GARBAGE = {
    "empty head": b"\1",
    "another version": b"\x09\x0c" + bytes(10),  # a question that the node would answer
    "no such verb": b"\1\xff" + bytes(10),
    "hello again": b"\1\1" + bytes(10),
    "keys that are not there": b"\1\3\5\0" + bytes(8),
    "too many keys": b"\1\3\xff\xff" + bytes(8 + 32 * 1800),
    "half a key": b"\1\3\1\0" + bytes(8 + 31),
    "a lease of nobody": b"\1\7\0\0" + b"\x63" + bytes(7),
    "a commit of nothing": b"\1\6\0\0" + bytes(8),
    "a pattern that is none": b"\1\x0a\0\0" + bytes(8 + 1 + 8) + b"\3" + bytes(4),
    "no JSON": b"\1\2\0\0" + bytes(8) + b"{",
    "no fingerprint": b"\1\2\0\0" + bytes(8) + b"[1]",
    "too long": bytes(70_000),
}


@pytest.mark.parametrize("packet", GARBAGE.values(), ids=GARBAGE.keys())
def test_given_a_client_that_says_something_wrong_then_it_is_cut_off_alone(folder: Path, packet: bytes) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [1])
        raw = RawClient(folder)
        raw.socket.send(packet)
        assert raw.is_cut_off()
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])
        assert server.call(server.stats, 30)["cut_off"] == 1
        sound(server)


def test_given_a_mistake_of_the_node_then_it_costs_one_client_and_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise RuntimeError("a mistake")

    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [1])
        raw = RawClient(folder)
        with monkeypatch.context() as patch:
            patch.setattr(server.service, "handle", broken)
            raw.socket.send(b"\1\3\0\0" + bytes(8))
            assert raw.is_cut_off()
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])
    assert "failed" in caplog.text
    assert "RuntimeError: a mistake" in caplog.text


def test_given_random_packets_then_the_node_goes_on_and_holds_nothing(folder: Path) -> None:
    import random

    rng = random.Random(5)
    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [1])
        for _ in range(300):
            raw = RawClient(folder)
            for _ in range(rng.randrange(1, 4)):
                body = rng.randbytes(rng.choice([0, 1, 32, 40, 64, 80, 500]))
                try:
                    raw.socket.send(bytes([1, rng.randrange(14), rng.randrange(4), 0]) + rng.randbytes(8) + body)
                except OSError:
                    break
            raw.socket.close()
        eventually(lambda: server.call(server.stats, 30)["num_clients"] <= 1, "they have left")
        assert load(tier, [1])[0] in ([Outcome.OK], [Outcome.MISS])  # a purge may have been among them
        sound(server)


def test_given_a_client_with_what_belongs_to_another_then_it_is_cut_off_and_the_other_goes_on(folder: Path) -> None:
    with node_thread(folder) as server:
        one, other = RawClient(folder, b"one"), RawClient(folder, b"other")
        reserve = wire.message(Verb.RESERVE, 1, 0, wire.with_numbers([key(1)], [VALUE_BYTES]))
        answer = one.ask(reserve)
        number, place = answer.number, wire.places_in(answer)[0]
        assert place != wire.ABSENT
        other.socket.send(wire.message(Verb.COMMIT, 1, number, wire.numbers([7])))
        assert other.is_cut_off()
        assert wire.flags_in(one.ask(wire.message(Verb.COMMIT, 1, number, wire.numbers([7])))) == [True]
        one.socket.close()
        eventually(lambda: not server.call(server.stats, 30)["num_clients"], "both have left")
        sound(server)


def test_given_a_slot_that_is_reserved_and_not_committed_then_nobody_finds_it_and_it_is_free_again(
    folder: Path,
) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        raw = RawClient(folder)
        raw.ask(wire.message(Verb.RESERVE, 1, 0, wire.with_numbers([key(1)], [VALUE_BYTES])))
        assert tier.contains([key(1)]) == [False]
        assert load(tier, [1])[0] == [Outcome.MISS]
        raw.socket.close()
        eventually(lambda: server.call(server.stats, 30)["num_clients"] == 1, "it has left")
        assert store(tier, [1]) == [Outcome.OK]
        sound(server)


def test_given_a_client_that_holds_a_lease_and_is_silent_then_it_is_cut_off(folder: Path) -> None:
    with node_thread(folder, silence_seconds=0.5) as server, tier_of(folder) as tier:
        store(tier, [1])
        idle, silent = RawClient(folder, b"idle"), RawClient(folder, b"silent")
        silent.ask(wire.message(Verb.LEASE, 1, 1000, wire.with_numbers([key(1)], [VALUE_BYTES])))
        assert silent.is_cut_off()
        assert idle.ask(wire.message(Verb.FIND, 1, 1000, key(1))).verb == Verb.FIND, (
            "it holds nothing: it may be silent"
        )
        sound(server)


def test_given_a_client_that_holds_leases_and_goes_on_talking_then_it_is_cut_off_all_the_same(folder: Path) -> None:
    with node_thread(folder, held_seconds=0.5) as server, tier_of(folder) as tier:
        store(tier, [1])
        busy, hoarder = RawClient(folder, b"busy"), RawClient(folder, b"hoarder")
        lease = wire.message(Verb.LEASE, 1, 1000, wire.with_numbers([key(1)], [VALUE_BYTES]))
        hoarder.ask(lease)

        def ask() -> bool:
            """One takes a lease, too, and gives it back; the other one asks for nothing."""
            busy.socket.send(wire.message(Verb.RELEASE, 0, busy.ask(lease).number))
            try:
                return hoarder.ask(wire.message(Verb.FIND, 1, 1000, key(2))).verb == Verb.REFUSED
            except BrokenPipeError:  # it was cut off between two questions
                return True

        eventually(ask, "it is cut off")
        assert busy.ask(wire.message(Verb.FIND, 1, 1000, key(1))).verb == Verb.FIND
        sound(server)


def test_given_a_client_that_asks_and_reads_no_answers_then_it_is_cut_off_alone(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        flood = RawClient(folder)
        packet = wire.message(Verb.LIST)
        store(tier, list(range(200)), 64)
        with suppress(OSError):
            while True:
                flood.socket.send(packet)
        assert load(tier, [1], 64)[0] == [Outcome.OK]
        assert server.call(server.stats, 30)["cut_off"] == 1
        sound(server)


def test_given_a_client_that_hoards_leases_or_reservations_then_it_is_cut_off(folder: Path) -> None:
    with node_thread(folder) as server, tier_of(folder) as tier:
        store(tier, [1])
        body = wire.with_numbers([key(1)], [VALUE_BYTES])
        hoarder = RawClient(folder)
        while hoarder.ask(wire.message(Verb.LEASE, 1, 1000, body)).verb == Verb.LEASE:
            pass
        assert hoarder.is_cut_off()
        hoarder = RawClient(folder)
        for number in range(1000, 2000):
            body = wire.with_numbers([key(number)], [VALUE_BYTES])
            if hoarder.ask(wire.message(Verb.RESERVE, 1, 0, body)).verb != Verb.RESERVE:
                break
        assert hoarder.is_cut_off()
        sound(server)


def test_given_a_client_that_reserves_without_end_then_others_keep_half_of_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = itertools.count(1)
    monkeypatch.setattr(wire, "peer_of", lambda _: (next(processes), os.getuid()))
    with node_thread(folder, 4 * MEGABYTE) as server, tier_of(folder) as tier:
        hoarder = RawClient(folder)
        body = wire.with_numbers([key(number) for number in range(1000)], [8192] * 1000)
        answer = hoarder.ask(wire.message(Verb.RESERVE, 1000, 0, body))
        taken = [place for place in wire.places_in(answer) if place != wire.ABSENT]
        assert len(taken) == 4 * MEGABYTE // 2 // 8192
        assert store(tier, list(range(100)), 8192) == [Outcome.OK] * 100
        hoarder.socket.close()
        eventually(lambda: server.call(server.stats, 30)["num_clients"] == 1, "it has left")
        sound(server)


# --- files and settings ----------------------------------------------------------------------------------------------


def test_given_a_node_then_its_files_are_for_this_user_alone(folder: Path) -> None:
    with node_thread(folder):
        for name in ("socket", "region", "slots", "lock"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="nobody else can enter"):
        NodeServer(folder, MEGABYTE)


def test_given_files_that_others_may_read_then_a_node_takes_that_back(folder: Path) -> None:
    for name in ("region", "slots"):
        (folder / name).touch()
        (folder / name).chmod(0o644)
    with node_thread(folder, MEGABYTE):
        assert [stat.S_IMODE((folder / name).stat().st_mode) for name in ("region", "slots")] == [0o600] * 2


def test_given_a_path_that_just_fits_a_socket_then_it_is_taken() -> None:
    longest = "/" + "x" * 99
    assert wire.node_directory(longest) == Path(longest)
    with pytest.raises(InvalidArgumentError, match="too long for a socket"):
        wire.node_directory(longest + "x")


def test_given_a_second_node_in_one_directory_then_it_is_refused_by_name(folder: Path) -> None:
    with node_thread(folder), pytest.raises(ConfigError, match=f"process {os.getpid()} is the node"):
        NodeServer(folder, MEGABYTE)


@pytest.mark.parametrize("num_bytes", [0, 1000, 2**50, "1GB"])
def test_given_a_size_that_cannot_be_then_it_is_refused(folder: Path, num_bytes: int) -> None:
    with pytest.raises(ConfigError, match="bytes"):
        NodeServer(folder, num_bytes)
    assert not (folder / "region").exists()


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("node:a b", "letters"),
        ("node:?bytes=5", "no option"),
        ("node:?timeout=0", "seconds"),
        ("node:?engine=" + "x" * 65, "1 to 64 bytes"),
        ("node:?engine=", "1 to 64 bytes"),
        ("node:/" + "x" * 200, "too long"),
    ],
)
def test_given_a_wrong_address_then_it_is_refused_by_name(address: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        open_tier(address)


def test_given_no_linux_or_no_package_for_checksums_then_a_tier_says_so_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(*_: object) -> int:
        raise ConfigError("install xxhash")

    with monkeypatch.context() as patch:
        patch.setattr(node_tier, "checksum", lacks)
        with pytest.raises(ConfigError, match="install xxhash"):
            NodeTier("node:n")
    monkeypatch.delattr(socket, "SO_PEERCRED")
    with pytest.raises(ConfigError, match="node: needs Linux"):
        NodeTier("node:n")
