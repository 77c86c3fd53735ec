"""What a node answers to each verb, without sockets and threads: the tiers behind it answer when the test does."""

from __future__ import annotations

import itertools
import json
import os
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from nodes import MEGABYTE, needs_linux, node_folder, node_thread

from kvpool.errors import ConfigError
from kvpool.testing import key, value
from kvpool.tiers import Fingerprint, KeyPattern, KeySpace
from kvpool.tiers.contract import Worth
from kvpool.tiers.envelope import checksum
from kvpool.tiers.node import server as server_module
from kvpool.tiers.node import service as service_module
from kvpool.tiers.node import wire
from kvpool.tiers.node.index import NodeIndex
from kvpool.tiers.node.metrics import MetricsServer, prometheus_text
from kvpool.tiers.node.region import PAGE, Region, slab_size
from kvpool.tiers.node.service import LATER, Client, NodeService, owner_of
from kvpool.tiers.node.wire import ABSENT, PRESENT, Message, Place, Verb, WireError

pytestmark = needs_linux
SIZE = 3000
ROOM = 4 * MEGABYTE


class Asked:
    """The tiers behind a node: notes every call, and the test gives its answer."""

    def __init__(self, *, are_there: bool = True, takes: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._are_there, self.takes = are_there, takes

    def __bool__(self) -> bool:
        return self._are_there

    def find(self, *call: Any) -> None:
        self.calls.append(("find", *call))

    def load(self, *call: Any) -> None:
        self.calls.append(("load", *call))

    def remove(self, *call: Any) -> None:
        self.calls.append(("remove", *call))

    def purge(self, *call: Any) -> None:
        self.calls.append(("purge", *call))

    def introduce(self, *call: Any) -> None:
        self.calls.append(("introduce", *call))

    def store(self, *call: Any) -> bool:
        self.calls.append(("store", *call))
        return self.takes

    def stats(self) -> list[dict[str, Any]]:
        return []

    def next(self, name: str) -> tuple[Any, ...]:
        """The arguments of the only call that waits."""
        ((found, *arguments),) = self.calls
        self.calls.clear()
        assert found == name
        return tuple(arguments)


class Talk:
    """A service and one client of it."""

    def __init__(self, folder: Path, behind: Asked, num_bytes: int = ROOM) -> None:
        self.index = NodeIndex(Region(folder, num_bytes))
        self.behind = behind
        self.service = NodeService(self.index, behind)  # type: ignore[arg-type]
        self.sent: list[bytes] = []
        self.client = Client(7, self.sent.append)
        self.ask(Verb.HELLO, body=b"engine", handle=self.service.hello)

    def ask(
        self, verb: Verb, count: int = 0, number: int = 0, body: bytes = b"", handle: Callable[..., Any] | None = None
    ) -> Any:
        answer = (handle or self.service.handle)(
            self.client, wire.parse(memoryview(wire.message(verb, count, number, body)))
        )
        return self._parsed(answer) if isinstance(answer, bytes) and answer != LATER else answer

    @staticmethod
    def _parsed(packet: bytes) -> Message:
        found = wire.parse(memoryview(packet))
        assert found.number == 0 or found.verb not in (Verb.FIND, Verb.COMMIT, Verb.REMOVE)
        return found

    def keys(self, verb: Verb, *numbers: int, milliseconds: int = 5000) -> Any:
        return self.ask(verb, len(numbers), milliseconds, b"".join(map(key, numbers)))

    def lease(self, *numbers: int, size: int = SIZE) -> Any:
        body = wire.with_numbers([key(number) for number in numbers], [size] * len(numbers))
        return self.ask(Verb.LEASE, len(numbers), 5000, body)

    def reserve(self, *numbers: int, size: int = SIZE) -> tuple[int, list[Place]]:
        body = wire.with_numbers([key(number) for number in numbers], [wire.rated(size, Worth())] * len(numbers))
        answer = self.ask(Verb.RESERVE, len(numbers), 0, body)
        return answer.number, wire.places_in(answer)

    def commit(self, reservation: int, checks: Sequence[int]) -> list[bool]:
        answer = self.ask(Verb.COMMIT, len(checks), reservation, wire.numbers(checks))
        assert answer.verb == Verb.COMMIT
        return wire.flags_in(answer)

    def put(self, *numbers: int, size: int = SIZE) -> None:
        """Stores values as an engine does."""
        reservation, places = self.reserve(*numbers, size=size)
        for number, (offset, length, _) in zip(numbers, places, strict=True):
            self.index.region.memory[offset : offset + length] = value(number, size)
        checks = [checksum(key(number), memoryview(value(number, size))) for number in numbers]
        assert self.commit(reservation, checks) == [True] * len(numbers)

    def answer(self) -> Message:
        """What was sent later."""
        (packet,) = self.sent
        self.sent.clear()
        return self._parsed(packet)

    def held(self) -> set[bytes]:
        return {value.key for value in self.index._leases.held}


@pytest.fixture
def folder() -> Iterator[Path]:
    with node_folder() as found:
        yield found


@pytest.fixture
def alone(folder: Path) -> Iterator[Talk]:
    talk = Talk(folder, Asked(are_there=False))
    yield talk
    assert talk.behind.calls == []
    talk.index.region.close()


@pytest.fixture
def talk(folder: Path) -> Iterator[Talk]:
    made = Talk(folder, Asked())
    yield made
    assert made.sent == []
    made.index.region.close()


# --- memory alone ----------------------------------------------------------------------------------------------------


def test_given_a_node_without_tiers_then_it_finds_stores_removes_and_counts_at_once(alone: Talk) -> None:
    assert wire.flags_in(alone.keys(Verb.FIND, 1, 2)) == [False, False]
    alone.put(1, 2)
    found = alone.keys(Verb.FIND, 1, 3, 2)
    assert (found.verb, found.num, wire.flags_in(found)) == (Verb.FIND, 3, [True, False, True])
    leased = alone.lease(1, 3, 2)
    places = wire.places_in(leased)
    assert (leased.verb, leased.number > 0, places[1]) == (Verb.LEASE, True, ABSENT)
    memory = alone.index.region.memory
    assert [bytes(memory[at : at + length]) for at, length, _ in (places[0], places[2])] == [
        value(1, SIZE),
        value(2, SIZE),
    ]
    assert alone.ask(Verb.RELEASE, number=leased.number) is None
    removed = alone.keys(Verb.REMOVE, 1, 3)
    assert (removed.verb, wire.flags_in(removed)) == (Verb.REMOVE, [True, False])
    counts = {name: alone.service.counts[name] for name in ("hits", "misses", "stored", "refused", "fetched")}
    assert counts == {"hits": 2, "misses": 1, "stored": 2, "refused": 0, "fetched": 0}
    purged = alone.ask(Verb.PURGE, body=wire.pattern_bytes(KeyPattern(None)))
    assert (purged.verb, purged.number, wire.flags_in(purged)) == (Verb.PURGE, 1, [True])
    assert len(alone.index) == 0


def test_given_a_lease_of_nothing_then_its_number_is_zero_and_all_are_misses(alone: Talk) -> None:
    answer = alone.lease(1, 2)
    assert (answer.number, wire.places_in(answer)) == (0, [ABSENT, ABSENT])
    assert (alone.service.counts["hits"], alone.service.counts["misses"]) == (0, 2)


def test_given_a_reservation_then_keys_that_are_there_are_named_and_what_is_too_large_is_refused(alone: Talk) -> None:
    alone.put(1)
    number, places = alone.reserve(2, 1, 3)
    assert number > 0
    assert places[1] == PRESENT
    assert [place[1:] for place in (places[0], places[2])] == [(SIZE, 0)] * 2
    assert alone.reserve(4, size=2 * MEGABYTE)[1] == [ABSENT]
    assert alone.service.counts["refused"] == 1
    with pytest.raises(WireError, match="2 slots was committed with 1 checksums"):
        alone.commit(number, [1])
    with pytest.raises(WireError, match=f"it has no reservation {number + 5}"):
        alone.commit(number + 5, [1])
    with pytest.raises(WireError, match="it has no lease 99"):
        alone.ask(Verb.RELEASE, number=99)
    with pytest.raises(WireError, match="there is no verb 1"):
        alone.ask(Verb.HELLO)


@pytest.mark.parametrize("limit", [1, 3])
def test_given_a_client_that_hoards_then_so_many_leases_and_reservations_are_the_most(
    alone: Talk, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_LEASES", limit)
    alone.put(1)
    for number in range(limit):
        assert alone.lease(1).number
        assert alone.reserve(10 + number)[0]
    with pytest.raises(WireError, match=f"it has {limit} leases already"):
        alone.lease(1)
    with pytest.raises(WireError, match=f"it has {limit} reservations already"):
        alone.reserve(30)
    alone.service.leave(alone.client)
    assert alone.client.is_gone
    assert not alone.client.holder
    assert alone.index.used_bytes == PAGE


def test_given_a_process_that_holds_half_of_the_memory_then_it_gets_no_more_and_another_one_does(alone: Talk) -> None:
    half = ROOM // 2 // PAGE
    for start in range(0, half, 128):
        alone.put(*range(start, start + 128))
    process = alone.client.process
    others = [Client(7, alone.sent.append, process), Client(8, alone.sent.append)]
    for other in others:
        other.begin("other")
    assert ABSENT not in alone.reserve(5000, 5001)[1]
    first = alone.lease(*range(300), 9000, *range(300, 400))
    assert [place == ABSENT for place in wire.places_in(first)] == [False] * 300 + [True] + [False] * 100
    for client, count in zip(others, (half - 402, half - 400), strict=True):
        alone.client = client
        places = wire.places_in(alone.lease(*range(400, half)))
        assert [place == ABSENT for place in places] == [False] * count + [True] * (half - 400 - count)
    assert process.held_bytes == ROOM // 2
    alone.client = others[0]
    assert alone.lease(1).number == 0
    assert alone.reserve(6000)[1] == [ABSENT]
    alone.service.leave(others[0])
    assert process.held_bytes == 402 * PAGE
    others[0].begin("other")
    assert len(alone.reserve(6000)[1]) == 1
    alone.service.leave(others[0])
    assert process.held_bytes == 402 * PAGE


def test_given_a_doubt_then_only_a_value_that_is_damaged_is_dropped(alone: Talk) -> None:
    alone.put(1, 2)
    (span,) = alone.index.find(key(2))
    offset = wire.places_in(alone.lease(2))[0][0]
    assert span.batch is not None
    alone.index.region.memory[offset + 10] ^= 1
    assert alone.keys(Verb.DOUBT, 1, 2, 3) is None
    assert wire.flags_in(alone.keys(Verb.FIND, 1, 2)) == [True, False]
    assert alone.service.counts["damaged"] == 1


@pytest.mark.parametrize("name", [b"", b"n" * (wire.MAX_NAME + 1)])
def test_given_a_name_that_cannot_be_then_the_client_is_refused(alone: Talk, name: bytes) -> None:
    with pytest.raises(WireError, match="must say hello, with a name of 1 to 64 bytes"):
        alone.ask(Verb.HELLO, body=name, handle=alone.service.hello)
    with pytest.raises(WireError, match="must say hello"):
        alone.ask(Verb.FIND, body=b"name", handle=alone.service.hello)


def test_given_names_then_the_longest_is_taken_and_statistics_name_them_up_to_a_limit(
    alone: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.ask(Verb.HELLO, body=b"n", handle=alone.service.hello)
    answer = alone.ask(Verb.HELLO, body=b"n" * wire.MAX_NAME, handle=alone.service.hello)
    assert (answer.verb, answer.num, answer.number) == (Verb.HELLO, 0, ROOM)
    assert alone.client.holder.owner == owner_of("n" * wire.MAX_NAME)
    alone.put(1)
    monkeypatch.setattr(service_module, "MAX_NAMES", len(alone.service.names) + 1)
    for name, size in ((b"known", 2 * SIZE), (b"unknown", 4 * SIZE)):
        alone.ask(Verb.HELLO, body=name, handle=alone.service.hello)
        alone.put(10 + len(name), size=size)
    reservation, _ = alone.reserve(50)
    leased = alone.lease(1, 15)
    stats = alone.service.stats([alone.client])
    unknown = f"{owner_of('unknown'):016x}"
    assert stats["engines"] == {unknown: 4 * PAGE, "known": 2 * PAGE, "n" * wire.MAX_NAME: PAGE}
    assert next(iter(stats["engines"])) == unknown  # those with most first
    assert sum(stats["tenants"].values()) == stats["used_bytes"] == 7 * PAGE
    assert list(stats["tenants"].values()) == sorted(stats["tenants"].values(), reverse=True)
    assert stats["clients"] == [{"engine": "unknown", "pid": 7, "leased": 2, "reserved_bytes": PAGE}]
    expected = {"pid": os.getpid(), "num_values": 3, "capacity_bytes": ROOM, "policy": "lru", "evicted": 0}
    assert {name: stats[name] for name in expected} == expected
    assert (stats["num_clients"], stats["waiting_bytes"], stats["behind"]) == (1, 0, [])
    assert stats["slots"] == [
        {"bytes": pages * PAGE, "slabs": 1, "slots": 256 // pages, "free": 256 // pages - used}
        for pages, used in ((1, 2), (2, 1), (3, 1))
    ]
    told = wire.parse(memoryview(service_module.stats_answer(stats)))
    assert (told[:3], json.loads(bytes(told.body))) == ((Verb.STATS, 0, 0), stats)
    assert (reservation > 0, leased.number > 0) == (True, True)


def test_given_many_values_then_a_list_of_them_comes_in_parts_and_names_each_once(
    alone: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.put(*range(10))
    monkeypatch.setattr(wire, "MAX_KEYS", 4)
    found: dict[bytes, int] = {}
    cursor, parts = 0, []
    while True:
        answer = alone.ask(Verb.LIST, number=cursor)
        keys = wire.unpacked(wire.keys_in(answer, with_numbers=True))
        found |= dict(zip(keys, wire.numbers_behind(answer), strict=True))
        parts.append(answer.num)
        cursor = answer.number
        if not cursor:
            break
    assert found == {key(number): SIZE for number in range(10)}
    assert parts == [4, 4, 2]


def test_given_the_name_of_an_engine_then_records_know_it_by_the_same_number_in_every_version() -> None:
    assert owner_of("engine") == 1918934510958042651


# --- with tiers behind -----------------------------------------------------------------------------------------------


def test_given_keys_that_memory_lacks_then_only_they_are_asked_for_behind(talk: Talk) -> None:
    talk.put(1)
    talk.behind.next("store")[2]()
    assert wire.flags_in(talk.keys(Verb.FIND, 1)) == [True]
    before = time.monotonic()
    assert talk.keys(Verb.FIND, 2, 1, 3, milliseconds=2000) == LATER
    keys, due, done = talk.behind.next("find")
    assert keys == [key(2), key(3)]
    assert before + 2.0 <= due <= time.monotonic() + 2.0
    done([False, True])
    answer = talk.answer()
    assert (answer.verb, wire.flags_in(answer)) == (Verb.FIND, [False, True, True])


def test_given_a_question_that_may_take_very_long_then_it_ends_earlier(talk: Talk) -> None:
    before = time.monotonic()
    talk.keys(Verb.FIND, 1, milliseconds=10**9)
    _, due, _ = talk.behind.next("find")
    assert before + wire.ANSWERED_LATE <= due <= time.monotonic() + wire.ANSWERED_LATE


def test_given_a_lease_of_what_memory_has_then_nobody_behind_is_asked(talk: Talk) -> None:
    talk.put(1)
    talk.behind.next("store")[2]()
    answer = talk.lease(1, 1)
    assert answer != LATER
    assert talk.held() == {key(1)}
    assert talk.behind.calls == []


def test_given_a_lease_of_what_is_behind_then_only_what_is_there_gets_a_slot_and_comes(talk: Talk) -> None:
    talk.put(1)
    talk.behind.next("store")[2]()
    assert talk.held() == set()
    assert talk.lease(1, 2, 3, 3) == LATER
    assert talk.held() == {key(1)}  # it must not leave while the others come
    keys, due, found = talk.behind.next("find")
    assert keys == [key(2), key(3)]
    used = talk.index.used_bytes
    found([False, True])
    assert talk.index.used_bytes == used + PAGE
    keys, rows, again, loaded = talk.behind.next("load")
    assert (keys, [len(row) for row in rows], again) == ([key(3)], [SIZE], due)
    rows[0][:] = value(3, SIZE)
    loaded([checksum(key(3), rows[0])])
    answer = talk.answer()
    places = wire.places_in(answer)
    assert [place == ABSENT for place in places] == [False, True, False, False]
    counts = talk.service.counts
    assert (counts["fetched"], counts["hits"], counts["misses"]) == (1, 3, 1)
    assert talk.held() == {key(1), key(3)}
    assert talk.index._used == []  # the lease counts as a use when it ends
    talk.ask(Verb.RELEASE, number=answer.number)
    assert talk.held() == set()


@pytest.mark.parametrize("gone", ["not there", "not whole", "removed", "purged", "removed and purged", "no room"])
def test_given_a_lease_of_what_does_not_come_then_it_is_a_miss_and_no_slot_is_kept(talk: Talk, gone: str) -> None:
    size = 2 * MEGABYTE if gone == "no room" else SIZE
    assert talk.lease(1, size=size) == LATER
    _, _, found = talk.behind.next("find")
    found([gone != "not there"])
    if gone not in ("not there", "no room"):
        _, _, _, loaded = talk.behind.next("load")
        if "removed" in gone:
            assert talk.keys(Verb.REMOVE, 1) == LATER
            assert talk.behind.next("remove")[0] == (key(1),)
        if "purged" in gone:
            assert talk.ask(Verb.PURGE, body=wire.pattern_bytes(KeyPattern(None))) == LATER
            talk.behind.next("purge")
        loaded([None if gone == "not whole" else 5])
    answer = talk.answer()
    assert (answer.number, wire.places_in(answer)) == (0, [ABSENT])
    assert (talk.index.used_bytes, len(talk.index), talk.service.counts["fetched"]) == (0, 0, 0)


def test_given_a_client_that_left_meanwhile_then_what_came_stays_and_nothing_is_sent(talk: Talk) -> None:
    talk.lease(1)
    _, _, found = talk.behind.next("find")
    found([True])
    _, rows, _, loaded = talk.behind.next("load")
    talk.service.leave(talk.client)
    loaded([checksum(key(1), rows[0])])
    assert talk.sent == []
    assert len(talk.index) == 1
    assert talk.held() == set()


def test_given_buffers_without_room_then_nothing_is_asked_for_behind(talk: Talk) -> None:
    assert talk.lease(1, size=0) == LATER
    keys, _, found = talk.behind.next("find")
    assert keys == []
    found([])
    assert wire.places_in(talk.answer()) == [ABSENT]


def test_given_values_that_are_stored_then_they_stay_until_the_tiers_have_them(talk: Talk) -> None:
    talk.put(1, 2)
    keys, rows, done = talk.behind.next("store")
    assert keys == [key(1), key(2)]
    assert [bytes(row) for row in rows] == [value(1, SIZE), value(2, SIZE)]
    assert (talk.held(), talk.service.stats([])["waiting_bytes"]) == ({key(1), key(2)}, 2 * SIZE)
    done()
    assert (talk.held(), talk.service.stats([])["waiting_bytes"]) == (set(), 0)
    assert talk.index._used == []  # nobody asked for them


def test_given_too_much_that_waits_for_tiers_then_more_is_kept_in_memory_alone(talk: Talk) -> None:
    share = ROOM // service_module.WAITING_SHARE
    talk.put(1, size=share)
    _, _, done = talk.behind.next("store")
    talk.put(2, size=1)
    assert talk.behind.calls == []
    assert talk.service.counts["not_stored_behind"] == 1
    done()
    talk.put(3, size=share)
    talk.behind.next("store")[2]()


def test_given_tiers_that_take_no_more_then_values_are_not_held_for_them(talk: Talk) -> None:
    talk.behind.takes = False
    talk.put(1, 2)
    talk.behind.next("store")
    assert (talk.held(), talk.service.stats([])["waiting_bytes"]) == (set(), 0)
    assert talk.service.counts["not_stored_behind"] == 2


def test_given_a_removal_then_the_answer_says_what_was_anywhere(talk: Talk) -> None:
    talk.put(1)
    talk.behind.next("store")[2]()
    assert talk.keys(Verb.REMOVE, 1, 2, 3) == LATER
    keys, _, done = talk.behind.next("remove")
    assert keys == (key(1), key(2), key(3))
    done([False, True, False])
    answer = talk.answer()
    assert (answer.verb, wire.flags_in(answer)) == (Verb.REMOVE, [True, True, False])


@pytest.mark.parametrize(("behind", "told"), [(0, 2), (1, 2), (5, 5)])
@pytest.mark.parametrize("is_complete", [True, False])
def test_given_a_purge_then_the_answer_counts_what_was_anywhere_and_says_whether_something_is_left(
    talk: Talk, behind: int, told: int, is_complete: bool
) -> None:
    talk.put(1, 2)
    talk.behind.next("store")[2]()
    pattern = KeyPattern(None)
    assert talk.ask(Verb.PURGE, body=wire.pattern_bytes(pattern)) == LATER
    assert len(talk.index) == 0
    found, done = talk.behind.next("purge")
    assert found == pattern
    done(behind, is_complete)
    answer = talk.answer()
    assert (answer.verb, answer.number, wire.flags_in(answer)) == (Verb.PURGE, told, [is_complete])


def test_given_fingerprints_then_the_tiers_hear_of_each_once_and_of_no_more_than_the_most(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_SPACES", 2)
    spaces = [KeySpace(Fingerprint(f"model {number}", "weights", 16, ())) for number in range(3)]

    def introduce(number: int) -> None:
        body = json.dumps(spaces[number].fingerprint.describe()).encode()
        assert talk.ask(Verb.INTRODUCE, body=body) is None

    introduce(0)
    (told,) = talk.behind.next("introduce")
    assert told.prefix == spaces[0].prefix
    introduce(0)
    assert talk.behind.calls == []
    introduce(1)
    talk.behind.next("introduce")
    introduce(2)
    assert talk.behind.calls == []


def test_given_a_node_without_tiers_then_nobody_hears_of_fingerprints(alone: Talk) -> None:
    space = KeySpace(Fingerprint("model", "weights", 16, ()))
    assert alone.ask(Verb.INTRODUCE, body=json.dumps(space.fingerprint.describe()).encode()) is None


# --- the memory, the directory, the figures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "slab"),
    [
        (MEGABYTE, MEGABYTE),
        (MEGABYTE + PAGE, MEGABYTE),
        (128 * MEGABYTE, MEGABYTE),
        (128 * MEGABYTE + 1, 2 * MEGABYTE),
        (256 * MEGABYTE, 2 * MEGABYTE),
        (256 * MEGABYTE + 1, 4 * MEGABYTE),
        (10 * PAGE + 1, 10 * PAGE),
    ],
)
def test_given_a_size_then_a_region_has_at_most_128_parts_of_at_least_a_mebibyte(num_bytes: int, slab: int) -> None:
    assert slab_size(num_bytes) == slab


def test_given_a_directory_that_others_can_enter_then_no_node_uses_it(folder: Path) -> None:
    (folder / "n").mkdir(0o700)
    for mode in (0o701, 0o702, 0o704, 0o710, 0o720, 0o740):
        (folder / "n").chmod(mode)
        with pytest.raises(ConfigError, match="nobody else can enter"):
            server_module._locked(folder / "n")
    os.close(server_module._locked(folder / "deep" / "n"))  # it makes what is missing
    (folder / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="nobody else can enter"):
        server_module._locked(folder / "link")
    (folder / "file").touch()
    for wrong in (folder / "file", folder / "file" / "n"):
        with pytest.raises(ConfigError, match=r"cannot use the directory .* name one that is yours"):
            server_module._locked(wrong)


def test_given_a_link_in_place_of_the_lock_then_it_is_not_followed(folder: Path) -> None:
    (folder / "precious").write_text("something")
    (folder / wire.LOCK).symlink_to("precious")
    with pytest.raises(ConfigError, match="lock is not a plain file but a link; remove it"):
        server_module._locked(folder)
    assert (folder / "precious").read_text() == "something"


def test_given_a_directory_of_another_user_then_no_node_uses_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="must be a directory of this user"):
        server_module._locked(folder)


def test_given_the_directory_of_this_users_nodes_then_it_must_be_private_too(folder: Path) -> None:
    parent = folder / f"kvpool-{os.getuid()}"
    os.close(server_module._locked(parent / "n"))
    assert {path.stat().st_mode & 0o777 for path in (parent, parent / "n")} == {0o700}
    assert (parent / "n" / wire.LOCK).read_text() == f"{os.getpid()}\n"
    parent.chmod(0o755)
    with pytest.raises(ConfigError, match="nobody else can enter"):
        server_module._locked(parent / "n")


def test_given_the_socket_of_a_node_that_was_killed_then_the_next_one_listens_in_its_place(folder: Path) -> None:
    path = folder / wire.SOCKET
    server_module._listening(path).close()
    assert path.exists()
    with server_module._listening(path) as listener:
        assert (listener.getsockname(), listener.getblocking()) == (str(path), False)  # a client may leave at once
        assert path.stat().st_mode & 0o777 == 0o600


def test_given_a_metrics_server_then_it_answers_two_paths_and_says_when_the_node_is_busy(folder: Path) -> None:
    with node_thread(folder / "n", MEGABYTE) as server:
        stats = server.call(server.stats, 30)

        def look(seconds: float) -> dict[str, Any]:
            if is_busy:
                raise queue.Empty
            assert seconds == 5.0
            return dict(stats)

        is_busy = False
        http = MetricsServer("127.0.0.1", 0, look)
        url = f"http://127.0.0.1:{http.port}"
        for path, kind, body in (
            ("/metrics", "text/plain; version=0.0.4; charset=utf-8", prometheus_text(stats).encode()),
            ("/stats", "application/json", json.dumps(stats).encode()),
        ):
            with urllib.request.urlopen(url + path, timeout=30) as answer:
                assert (answer.status, answer.headers["Content-Type"], answer.read()) == (200, kind, body)
                assert answer.headers["Content-Length"] == str(len(body))
        is_busy = True
        for path, host, status in (
            ("/metrics", "localhost:9464", 503),
            ("/other", "localhost", 404),
            ("/metrics", "evil.example", 403),
            ("/stats", "127.0.0.1.evil.example:80", 403),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(url + path, headers={"Host": host}), timeout=30)
            assert refused.value.code == status
            refused.value.close()
        http.close()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(url, timeout=30)


def test_given_figures_then_prometheus_gets_one_line_for_each_with_labels_that_it_can_read(alone: Talk) -> None:
    alone.ask(Verb.HELLO, body=b'a "b"\\c\nd', handle=alone.service.hello)
    alone.put(1)
    stats = alone.service.stats([alone.client])
    stats["behind"] = [{"name": "disk", **dict.fromkeys(("hits", "misses", "load_failures", "late_loads"), 3)}]
    stats["behind"][0] |= dict.fromkeys(("stored", "refused", "store_failures", "late_stores"), 4)
    lines = prometheus_text(stats).splitlines()
    figures = [line for line in lines if not line.startswith("#")]
    assert f"kvpool_node_used_bytes {PAGE}" in figures
    assert "kvpool_node_stored_total 1" in figures
    assert "kvpool_node_evicted_total 0" in figures
    assert f'kvpool_node_engine_bytes{{engine="a \\"b\\"\\\\c\\nd"}} {PAGE}' in figures
    assert 'kvpool_node_behind_hits_total{tier="disk"} 3' in figures
    assert 'kvpool_node_behind_stored_total{tier="disk"} 4' in figures
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(names)) == len(names) == len([line for line in lines if line.startswith("# HELP")])
    assert {figure.partition("{")[0].split()[0] for figure in figures} == set(names)


def test_given_a_node_then_it_looks_after_itself_once_in_a_while_and_not_with_every_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, ticks = [0.0], []

    def later() -> float:
        seconds[0] += 0.004
        return seconds[0]

    monkeypatch.setattr(server_module, "TICK_SECONDS", 0.01)
    server = server_module.NodeServer(folder, MEGABYTE)
    monkeypatch.setattr(server, "_tick", lambda: ticks.append(seconds[0]) or (len(ticks) == 4 and server.stop()))
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", later)
        server.serve()
    server.close()
    assert all(0.01 <= after - before < 0.02 for before, after in itertools.pairwise(ticks))
