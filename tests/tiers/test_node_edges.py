"""A node and its engines where something is not as usual: other users, nodes that lie, sockets that fail, full memory."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nodes import MEGABYTE, RawClient, needs_linux, node_folder, node_thread
from servers import eventually

from kvpool.errors import ConfigError, StorageError
from kvpool.eviction import LRUPolicy
from kvpool.testing import VALUE_BYTES, key, load, store, value
from kvpool.tiers import Fingerprint, KeySpace, MemoryTier, NodeTier, Outcome
from kvpool.tiers.contract import Worth
from kvpool.tiers.keys import KeyPattern

pytestmark = needs_linux

if hasattr(os, "eventfd"):
    from kvpool.tiers.node import connection as connection_module
    from kvpool.tiers.node import lending, node_tier, ranking, region, server, wire
    from kvpool.tiers.node.connection import Connection, LostNodeError
    from kvpool.tiers.node.index import NodeIndex
    from kvpool.tiers.node.region import Region
    from kvpool.tiers.node.values import Holder, Quotas
    from kvpool.tiers.node.wire import Verb

SECONDS = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with node_folder() as found:
        yield found


def open_files() -> int:
    gc.collect()  # maps end with their last view, also those of tests before
    return len(os.listdir("/proc/self/fd"))


# --- a node that is not what it should be ----------------------------------------------------------------------------


@contextmanager
def liar(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Something that listens where a node should, hears one message and answers as a test wants."""
    folder.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / wire.SOCKET))
    listener.listen(1)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            if connection.recv(wire.MAX_MESSAGE):
                answer(connection)
                connection.settimeout(SECONDS)
                connection.recv(1)  # until the client leaves

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join(SECONDS)
    listener.close()


def says(packet: bytes, *sizes: int) -> Callable[[socket.socket], None]:
    """Sends a packet, and memory of these sizes with it."""

    def send(connection: socket.socket) -> None:
        fds = [os.memfd_create("memory") for _ in sizes]
        for fd, size in zip(fds, sizes, strict=True):
            os.ftruncate(fd, size)
        socket.send_fds(connection, [packet], fds)
        for fd in fds:
            os.close(fd)

    return send


def hello(number: int) -> bytes:
    return wire.message(Verb.HELLO, 0, number)


LIES: list[tuple[Callable[[], Callable[[socket.socket], None]], str]] = [
    (lambda: lambda connection: connection.shutdown(socket.SHUT_RDWR), "the node ended the connection"),
    (lambda: says(b"short"), "a message has at least 12 bytes, and this one 5"),
    (
        lambda: says(bytes([99]) + hello(4096)[1:], 4096),
        "it speaks version 99 of the protocol, and this kvpool version 1",
    ),
    (lambda: says(wire.message(Verb.REFUSED, 0, 0, b"too many")), "the node refused: too many"),
    (lambda: says(wire.message(Verb.STATS), 4096), "the node answered 12 to 1"),
    (lambda: says(hello(4096)), "the node sent no memory"),
    (lambda: says(hello(8192), 4096), "the node promised 8192 bytes of memory and sent 4096"),
    (lambda: says(hello(0), 4096), "the node promised 0 bytes of memory and sent 4096"),
]


@pytest.mark.quick("0", "2", "5")
@pytest.mark.parametrize("number", range(len(LIES)))
def test_given_a_node_that_lies_then_nothing_is_used_of_it_and_the_reason_is_told(folder: Path, number: int) -> None:
    make, problem = LIES[number]
    files = open_files()
    with (
        liar(folder / "n", make()),
        pytest.raises(LostNodeError, match=problem),
    ):
        Connection(folder / "n", "engine", (), SECONDS)
    assert open_files() <= files


def test_given_a_node_of_another_user_then_nobody_talks_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node_thread(folder, MEGABYTE):
        monkeypatch.setattr(connection_module.wire, "peer_of", lambda _: (1, os.getuid() + 1))
        with pytest.raises(LostNodeError, match=f"the node in {folder} belongs to another user"):
            Connection(folder, "engine", (), SECONDS)


def test_given_a_node_that_says_nothing_then_its_client_waits_only_so_long(folder: Path) -> None:
    with liar(folder / "n", lambda _: None), pytest.raises(TimeoutError):
        Connection(folder / "n", "engine", (), 0.02)


def test_given_a_place_outside_the_memory_then_it_is_not_read(folder: Path) -> None:
    with node_thread(folder, MEGABYTE):
        node = Connection(folder, "engine", (), SECONDS)
        assert node.slot((MEGABYTE - 10, 10, 0)).nbytes == 10
        with pytest.raises(LostNodeError, match="the node named a place outside its memory"):
            node.slot((MEGABYTE - 10, 11, 0))
        assert node.is_quiet()
        node.close()
        assert not node.is_quiet()


def test_given_two_connections_then_the_memory_is_mapped_once_in_this_process(folder: Path) -> None:
    with node_thread(folder, MEGABYTE):
        one, two = (Connection(folder, "engine", (), SECONDS) for _ in range(2))
        assert one.region is two.region
        one.close()
        two.close()


# --- engines ---------------------------------------------------------------------------------------------------------


class Introduced(MemoryTier):
    """Behind a node: notes whose keys will come."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.prefixes: list[bytes] = []

    def introduce(self, space: KeySpace) -> None:
        self.prefixes.append(space.prefix)


def test_given_models_then_a_node_hears_of_those_whose_description_fills_half_a_message_at_most(folder: Path) -> None:
    with NodeTier(f"node:{folder}") as tier:
        for number, size in enumerate((wire.MAX_MESSAGE // 2 - 1, wire.MAX_MESSAGE // 2)):
            described = SimpleNamespace(describe=lambda size=size: "x" * (size - 2))
            tier.introduce(SimpleNamespace(prefix=number, fingerprint=described))  # type: ignore[arg-type]
        assert list(tier._spaces) == [0]


def test_given_a_model_then_a_node_hears_of_it_also_if_it_is_started_later(folder: Path) -> None:
    space, long = (KeySpace(Fingerprint(name, "weights", 16, ())) for name in ("model", "m" * wire.MAX_MESSAGE))
    behind = Introduced()
    with NodeTier(f"node:{folder}?timeout={SECONDS}") as tier:
        tier.introduce(long)  # no message could hold it
        tier.introduce(space)
        assert list(tier._spaces) == [space.prefix]
        with node_thread(folder, MEGABYTE, tiers=[behind]):
            assert tier.contains([key(1)]) == [False]
            (connection,) = tier._idle
            tier.introduce(space)  # the next call has a connection that tells it
            assert connection not in tier._idle
            assert store(tier, [1]) == [Outcome.OK]
        assert behind.prefixes == [space.prefix]


def test_given_a_deadline_that_passed_meanwhile_then_what_is_not_copied_is_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node_thread(folder, MEGABYTE), NodeTier(f"node:{folder}?timeout={SECONDS}") as tier:
        store(tier, [1])
        now, lease = time.monotonic, lending.lease

        def slow(*given: Any) -> Any:
            found = lease(*given)
            monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * SECONDS)
            return found

        for where, call in ((node_tier, "load"), (lending, "lend")):
            monkeypatch.setattr(where, "lease", slow)
            if call == "load":
                assert load(tier, [1, 2])[0] == [Outcome.LATE, Outcome.MISS]
            else:
                loan = tier.lend([key(1), key(2)], [VALUE_BYTES] * 2)
                assert loan is not None
                assert (loan.outcomes, [len(view) for view in loan.views]) == ([Outcome.LATE, Outcome.MISS], [0, 0])
                loan.release()
            monkeypatch.undo()
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])


def test_given_a_loan_that_ends_after_its_tier_was_closed_then_its_connection_ends_too(folder: Path) -> None:
    with node_thread(folder, MEGABYTE) as node:
        tier = NodeTier(f"node:{folder}?timeout={SECONDS}")
        store(tier, [1])
        loan = tier.lend([key(1)], [VALUE_BYTES])
        assert loan is not None
        tier.close()
        eventually(lambda: node.call(node.stats, SECONDS)["num_clients"] == 1, "the loan keeps its connection")
        assert bytes(loan.views[0]) == value(1)
        loan.release()
        eventually(lambda: node.call(node.stats, SECONDS)["num_clients"] == 0, "the connection has ended")
        assert (tier._num_lent, len(tier._idle)) == (0, 0)


def test_given_a_process_that_was_forked_then_it_leaves_the_connections_to_its_parent(folder: Path) -> None:
    with node_thread(folder, MEGABYTE), NodeTier(f"node:{folder}?timeout={SECONDS}") as tier:
        store(tier, [1])
        (connection,) = list(tier._idle)
        tier._pid = -1  # as in the child
        assert tier._take() is None
        assert tier._pid == os.getpid()
        assert connection.is_quiet()  # not closed
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])
        connection.close()


@pytest.mark.parametrize("is_closed", [False, True])
def test_given_a_probe_then_its_connection_is_used_unless_the_tier_was_closed(folder: Path, is_closed: bool) -> None:
    tier = NodeTier(f"node:{folder}?timeout={SECONDS}")
    tier._breaker.failed("down")
    tier._probe()
    assert (tier._breaker.allows(), list(tier._idle)) == (False, [])
    with node_thread(folder, MEGABYTE) as node:
        tier._breaker._open_until = 0.0
        assert tier._breaker.claim_probe()
        tier._closed = is_closed
        tier._probe()
        assert (tier._breaker.allows(), len(tier._idle)) == (True, 0 if is_closed else 1)
        tier._closed = False
        tier.close()
        eventually(lambda: node.call(node.stats, SECONDS)["num_clients"] == 0, "the connection has ended")


# --- the node's side -------------------------------------------------------------------------------------------------


def test_given_an_answer_from_behind_that_cannot_be_used_then_it_is_logged_and_the_node_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("a mistake")

    with node_thread(folder, MEGABYTE) as node:
        node._post(fails)
        assert node.call(lambda: 7, SECONDS) == 7
    assert "node: what tiers behind it brought was not used" in caplog.text
    assert "RuntimeError: a mistake" in caplog.text


def refused(folder: Path) -> str:
    """What a client hears that is not let in."""
    client = RawClient(folder, b"")
    found = client.heard()
    assert (found.verb, client.socket.recv(1)) == (Verb.REFUSED, b"")
    return bytes(found.body).decode()


@pytest.mark.parametrize(("most", "of_process"), [(2, 100), (100, 2)])
def test_given_as_many_clients_as_may_be_then_the_next_is_refused_until_one_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most: int, of_process: int
) -> None:
    monkeypatch.setattr(server, "MAX_CLIENTS", most)
    monkeypatch.setattr(server, "MAX_OF_PROCESS", of_process)
    with node_thread(folder, MEGABYTE) as node:
        clients = [RawClient(folder), RawClient(folder)]
        said = refused(folder)
        assert said == f"process {os.getpid()} has 2 connections, and all processes 2"
        clients.pop().socket.close()
        eventually(lambda: len(node._peers) == 1, "a client has left")
        clients.append(RawClient(folder))
        for client in clients:
            client.socket.close()
        eventually(lambda: not node._processes, "nobody is left")


def test_given_a_client_of_another_user_then_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node_thread(folder, MEGABYTE):
        uid = os.getuid()
        monkeypatch.setattr(server.wire, "peer_of", lambda _: (77, uid + 1))
        assert refused(folder) == f"this node belongs to user {uid}, and process 77 to user {uid + 1}"


class Broken:
    """A socket that cannot do one thing any more."""

    def __init__(self, honest: socket.socket, name: str, error: OSError) -> None:
        self._honest, self._name, self._error = honest, name, error

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._name else getattr(self._honest, name)

    def _fail(self, *_: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("name", "error", "stays"),
    [
        ("send", OSError(errno.EMSGSIZE, "Message too long"), False),
        ("recv_into", ConnectionResetError(), False),
        ("recv_into", BlockingIOError(), True),
    ],
)
def test_given_a_socket_that_fails_then_its_client_is_gone_and_others_go_on(
    folder: Path, name: str, error: OSError, stays: bool
) -> None:
    with node_thread(folder, MEGABYTE) as node, NodeTier(f"node:{folder}?timeout={SECONDS}") as other:
        client = RawClient(folder)
        store(other, [1])

        def spoil() -> Any:
            peer = next(peer for peer in node._peers.values() if peer.name == "raw")
            honest, peer.socket = peer.socket, Broken(peer.socket, name, error)
            node._read(peer) if name == "recv_into" else node._send(peer, b"answer")
            peer.socket = honest
            return peer

        peer = node.call(spoil, SECONDS)
        assert (peer.is_gone, any(each is peer for each in node._peers.values())) == (not stays, stays)
        assert node.call(node.stats, SECONDS)["cut_off"] == 0
        assert load(other, [1]) == ([Outcome.OK], [value(1)])
        client.socket.close()


def test_given_a_client_that_leaves_before_it_is_greeted_then_it_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise BrokenPipeError

    with node_thread(folder, MEGABYTE) as node:
        monkeypatch.setattr(server.socket, "send_fds", fails)
        client = RawClient(folder, b"")
        client.socket.send(wire.message(Verb.HELLO, 0, 0, b"early"))
        assert client.socket.recv(1) == b""
        eventually(lambda: not node._peers, "nobody is left")


def test_given_a_client_that_leaves_without_a_word_then_the_node_goes_on(folder: Path) -> None:
    with node_thread(folder, MEGABYTE) as made:
        RawClient(folder, b"").socket.close()
        eventually(lambda: not made.call(made.stats, SECONDS)["num_clients"], "it has left")


def test_given_a_listener_that_fails_then_the_node_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node_thread(folder, MEGABYTE) as node:
        honest = node._listener

        def accept() -> Any:
            node._listener = Broken(honest, "accept", OSError(errno.EMFILE, "Too many open files"))  # type: ignore[assignment]
            node._accept()
            node._listener = honest
            return len(node._peers)

        assert node.call(accept, SECONDS) == 0
        assert RawClient(folder).ask(wire.message(Verb.STATS)).verb == Verb.STATS


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meminfo", "cgroup", "available"),
    [
        ("MemTotal: 9 kB\nMemAvailable:   100 kB\n", None, 102_400),
        ("MemTotal: 9 kB\nMemAvailable:   100 kB\n", ("70000", "20000"), 50_000),
        ("MemTotal: 9 kB\nMemAvailable:   100 kB\n", ("900000", "20000"), 102_400),
        ("MemTotal: 9 kB\nMemAvailable:   100 kB\n", ("20000", "70000"), 0),
        ("MemTotal: 9 kB\nMemAvailable:   100 kB\n", ("max", "70000"), 102_400),
        ("MemTotal: 9 kB\n", None, 2**62),
        (None, ("70000", "20000"), 50_000),
    ],
)
def test_given_a_machine_or_a_control_group_then_the_smaller_of_what_they_can_give_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meminfo: str | None, cgroup: tuple[str, str] | None, available: int
) -> None:
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    for name, text in zip(("memory.max", "memory.current"), cgroup or (), strict=False):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(region, "Path", lambda path: tmp_path / path.rpartition("/")[2])
    monkeypatch.setattr(region, "open", lambda path, **_: (tmp_path / path.rpartition("/")[2]).open(), raising=False)
    assert region.available_memory() == available


def test_given_a_region_larger_than_the_machine_or_its_file_system_then_it_is_refused_and_what_is_held_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "available_memory", lambda: 10_000)
    monkeypatch.setattr(region.os, "statvfs", lambda _: SimpleNamespace(f_bavail=2, f_frsize=4096))
    region.check_room(tmp_path, 8192)
    with pytest.raises(
        ConfigError, match=r"10,000 bytes of memory are free, and .* has room for 8,192; take a smaller"
    ):
        region.check_room(tmp_path, 8193)
    (tmp_path / wire.REGION).write_bytes(bytes(1))
    held = (tmp_path / wire.REGION).stat().st_blocks * 512
    region.check_room(tmp_path, 8192 + held)
    with pytest.raises(ConfigError, match="more than this machine can give"):
        region.check_room(tmp_path, 8193 + held)
    monkeypatch.setattr(region, "available_memory", lambda: 8000)
    with pytest.raises(ConfigError, match="more than this machine can give"):
        region.check_room(tmp_path, 8001 + held)


def fill_up(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def put_a_fifo(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    return lambda _, folder: os.mkfifo(folder / name)


def put_a_link(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def put(_: pytest.MonkeyPatch, folder: Path) -> None:
        (folder / "empty").touch()  # as new files of a node are
        (folder / name).symlink_to("empty")

    return put


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "ftruncate", refuse)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (fill_up, r"has no room for 1,048,576 bytes \(No space left on device\); take a smaller --bytes"),
        (put_a_fifo("region"), "region is not a plain file but a FIFO; remove it, and the node makes its own"),
        (put_a_fifo("slots"), "slots is not a plain file but a FIFO; remove it, and the node makes its own"),
        (put_a_link("region"), "region is not a plain file but a link; remove it, and the node makes its own"),
        (put_a_link("slots"), "slots is not a plain file but a link; remove it, and the node makes its own"),
        (forbid, r"cannot make .*region \(Operation not permitted\); name a directory that you can write to"),
    ],
)
def test_given_files_that_a_node_cannot_have_then_it_is_refused_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, problem: str
) -> None:
    files = open_files()
    with monkeypatch.context() as patch:
        spoil(patch, tmp_path)
        with pytest.raises(ConfigError, match=problem):
            Region(tmp_path, MEGABYTE)
    assert open_files() <= files


@pytest.mark.parametrize("spoil", ["policy", "bind", "listen"])
def test_given_a_node_that_cannot_begin_then_it_leaves_nothing_open_and_the_next_can(folder: Path, spoil: str) -> None:
    class Spoilt(socket.socket):
        def bind(self, _: object) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    class Deaf(socket.socket):
        def listen(self, _: object = 0) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    files = open_files()
    with pytest.MonkeyPatch.context() as patch:
        if spoil != "policy":
            patch.setattr(server.socket, "socket", Spoilt if spoil == "bind" else Deaf)
        with pytest.raises((ConfigError, OSError)):
            server.NodeServer(folder, MEGABYTE, policy="nobody's" if spoil == "policy" else "lru")
    assert open_files() <= files
    with node_thread(folder, MEGABYTE), NodeTier(f"node:{folder}?timeout={SECONDS}") as tier:
        assert store(tier, [1]) == [Outcome.OK]


@pytest.mark.parametrize("share", [0, 0.0, -1, 1.01, True, "all", None])
@pytest.mark.parametrize("whose", ["engine", "tenant", "tenants"])
def test_given_a_quota_that_is_no_share_then_it_is_refused(whose: str, share: Any) -> None:
    with pytest.raises(ConfigError, match=f"a share above 0 and up to 1, got {share!r}"):
        Quotas(**{whose: {b"ab": share} if whose == "tenants" else share})


def test_given_quotas_then_only_who_has_one_has_a_shelf() -> None:
    quotas = Quotas(tenants={b"ab": 0.5})
    assert [quotas.shelf(7, tenant) for tenant in (b"ab", b"cd")] == [(0, b"ab"), (0, b"")]
    assert Quotas(engine=0.5, tenant=0.5, tenants={b"ab": 1}).shelf(7, b"ab") == (7, b"")
    assert Quotas(engine=1, tenant=0.5).shelf(7, b"cd") == (0, b"cd")


# --- the index -------------------------------------------------------------------------------------------------------


def put(index: NodeIndex, holder: Holder, *numbers: int, worth: Worth | None = None, length: int = 3000) -> list[Any]:
    wanted = [(key(number), length, worth or Worth()) for number in numbers]
    reservation, slots = index.reserve(holder, wanted)
    taken = [slot for slot in slots if slot is not None]
    return index.commit(holder, reservation, [0] * len(taken)) if taken else []


def test_given_values_whose_priorities_end_at_one_moment_then_they_end_together(folder: Path) -> None:
    now = [100.0]
    index, holder = NodeIndex(Region(folder, MEGABYTE), "priority", clock=lambda: now[0]), Holder(1)
    values = put(index, holder, *range(5), worth=Worth(90, 0, 8.0))
    assert len({each.created for each in values}) == 5
    assert [each.priority for each in values] == [90] * 5
    now[0] = 107.9
    index._ranking.next_victim(4096)
    assert [each.priority for each in values] == [90] * 5
    now[0] = 108.0
    index._ranking.next_victim(4096)
    assert [each.priority for each in values] == [35] * 5
    assert [record.worth for record in index.region.records()] == [Worth()] * 5


def test_given_terms_of_values_that_are_gone_then_they_are_forgotten_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "_FEW_TERMS", 4)
    terms = ranking.Terms()
    values: list[Any] = [SimpleNamespace(created=number, is_gone=number % 4 > 0) for number in range(40)]
    sizes = []
    for number, each in enumerate(values):
        terms.add(float(number), each)
        sizes.append(len(terms._ends))
    dropped = [number for number in range(1, 40) if sizes[number] <= sizes[number - 1]]
    assert [(number, sizes[number]) for number in dropped] == [(4, 2), (11, 3), (19, 5), (29, 8)]
    assert terms.ended(19.0) == [each for each in values[:20] if not each.is_gone]
    assert terms.ended(100.0) == [each for each in values[20:] if not each.is_gone]


def test_given_two_records_of_one_key_then_the_one_used_last_stays(folder: Path) -> None:
    memory = Region(folder, MEGABYTE)
    index, holder = NodeIndex(memory), Holder(1)
    first, second = put(index, holder, 1, 2)
    record = next(each for each in memory.records() if each.key == key(2))
    memory.write(record._replace(key=key(1), used=memory._uses[memory.row(first.slab, first.slot)] + 10))
    again = NodeIndex(memory)
    assert len(again) == 1
    assert again._values[key(1)].slot == second.slot
    assert [each.slot for each in memory.records()] == [second.slot]


def test_given_a_tenant_whose_values_are_all_held_then_it_gets_no_more_than_its_quota(folder: Path) -> None:
    tenant = key(1)[8:10]
    index = NodeIndex(Region(folder, MEGABYTE), quotas=Quotas(tenants={tenant: 0.01}))
    holder = Holder(1)
    names = [key(1)[:10] + bytes([number]) * 22 for number in range(4)]
    number, slots = index.reserve(holder, [(name, 3000, Worth()) for name in names])
    assert [slot is not None for slot in slots] == [True, True, False, False]  # 10,485 bytes: two slots
    index.commit(holder, number, [0, 0])
    lease, hits = index.lease(holder, index.find(b"".join(names[:2])))
    assert hits == 2
    assert index.reserve(holder, [(names[3], 3000, Worth())])[1] == [None]
    index.release(holder, lease)
    assert index.reserve(holder, [(names[3], 3000, Worth())])[1] != [None]


def test_given_a_doubt_or_a_release_then_their_messages_say_only_what_they_mean() -> None:
    told: list[bytes] = []
    node: Any = SimpleNamespace(tell=lambda packet, deadline: told.append(packet))
    lending.doubt(node, [key(1), key(2)])
    lending.release(node, 7)
    lending.doubt(node, [])
    lending.release(node, None)
    assert told == [wire.message(Verb.DOUBT, 2, 0, key(1) + key(2)), wire.message(Verb.RELEASE, 0, 7)]


def test_given_a_slab_that_is_divided_anew_then_nothing_is_left_of_what_its_records_said(folder: Path) -> None:
    memory = Region(folder, 2 * MEGABYTE)
    for slab in range(2):
        memory.divide(slab, 4096)
        memory.write(region.Record(slab, 3, key(slab), 100, 7, 8, 9))
    assert [each.slab for each in memory.records()] == [0, 1]
    memory.divide(1, 8192)
    assert [each.slab for each in memory.records()] == [0]
    assert (memory.slot_bytes(0), memory.slot_bytes(1)) == (4096, 8192)


def test_given_a_node_that_is_killed_while_it_divides_a_slab_then_the_slab_has_no_slots(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Region(folder, 8 * MEGABYTE)
    for slab in range(8):
        memory.divide(slab, 4096)
    monkeypatch.setattr(memory, "_at", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memory.divide(5, 8192)
    assert [memory.slot_bytes(slab) for slab in range(8)] == [4096] * 5 + [0] + [4096] * 2
    memory.close()


@pytest.mark.parametrize("slot_bytes", [0, 4097, 2 * MEGABYTE])
def test_given_a_slab_whose_slots_cannot_be_then_the_records_of_others_are_read(folder: Path, slot_bytes: int) -> None:
    memory = Region(folder, 2 * MEGABYTE)
    memory.divide(0, slot_bytes)
    memory.divide(1, 4096)
    memory.write(region.Record(1, 3, key(1), 4096, 7, 8, 9))
    memory.write(region.Record(1, 4, key(2), 4097, 7, 8, 9))
    assert [each.key for each in memory.records()] == [key(1)]
    memory.close()


def test_given_a_region_then_it_is_mapped_with_huge_pages_where_the_system_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advised: list[int] = []

    class Mapped(bytearray):
        def madvise(self, advice: int) -> None:
            advised.append(advice)
            raise OSError(errno.EINVAL, "not here")

    system = SimpleNamespace(mmap=lambda fd, num_bytes: Mapped(num_bytes), MADV_HUGEPAGE=14)
    monkeypatch.setattr(region, "mmap", system)
    assert region.map_region(5, 100) == bytes(100)
    assert advised == [14]
    del system.MADV_HUGEPAGE
    assert region.map_region(5, 100) == bytes(100)
    assert advised == [14]


def test_given_a_value_that_is_gone_before_its_lease_ends_then_no_slab_counts_as_used_for_it(folder: Path) -> None:
    index, holder = NodeIndex(Region(folder, 2 * MEGABYTE)), Holder(1)
    put(index, holder, 1, 2, 3, 4, length=MEGABYTE // 4)
    put(index, holder, 5, length=200 * 4096)  # a slab of another size
    lease, _ = index.lease(holder, index.find(b"".join(map(key, (1, 2, 3, 4)))))
    index.remove(key(1))
    index.release(holder, lease)
    put(index, holder, 6, length=MEGABYTE // 4)
    put(index, holder, 7, length=MEGABYTE // 4)
    assert [number for number in range(1, 8) if key(number) in index._values] == [2, 3, 4, 6, 7]
    index.region.close()


def test_given_values_that_are_evicted_then_their_policy_hears_of_each_with_its_uses_and_of_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[bytes, int]] = []
    monkeypatch.setattr(LRUPolicy, "evicted", lambda policy, value: told.append((value.key, value.hits)))
    index, holder = NodeIndex(Region(folder, 2 * MEGABYTE)), Holder(1)
    put(index, holder, 1, 2, length=MEGABYTE // 2)
    put(index, holder, 3, length=200 * 4096)
    lease, _ = index.lease(holder, index.find(key(1) + key(2)))
    index.release(holder, lease)
    put(index, holder, 4, length=200 * 4096)
    assert told == [(key(3), 0)]
    lease, _ = index.lease(holder, index.find(key(4)))
    index.release(holder, lease)
    for number in (5, 6):
        put(index, holder, number, length=300)
        index.remove(key(number))
    assert told == [(key(3), 0), (key(1), 1), (key(2), 1)]  # a whole slab
    assert MEGABYTE // 2 not in index._ranking._shelves
    index.region.close()


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "verb"), [(wire.MAX_MESSAGE, Verb.STATS), (wire.MAX_MESSAGE + 1, Verb.REFUSED)])
def test_given_a_message_as_long_as_may_be_then_it_is_answered_and_a_longer_one_is_not(
    folder: Path, length: int, verb: Any
) -> None:
    with node_thread(folder, MEGABYTE):
        packet = wire.message(Verb.STATS)
        assert RawClient(folder).ask(packet + bytes(length - len(packet))).verb == verb


def test_given_more_keys_than_a_message_may_name_then_they_are_not_read() -> None:
    keys = [key(number % 7) for number in range(wire.MAX_KEYS + 1)]
    most = wire.message(Verb.FIND, wire.MAX_KEYS, 0, b"".join(keys[1:]))
    assert wire.keys_in(wire.parse(memoryview(most))) == b"".join(keys[1:])
    more = wire.message(Verb.FIND, len(keys), 0, b"".join(keys))
    with pytest.raises(wire.WireError, match="names at most 1024 keys, and this one 1025"):
        wire.keys_in(wire.parse(memoryview(more)))


def test_given_many_clients_that_are_cut_off_then_four_lines_say_so_and_a_refusal_is_short(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with node_thread(folder, MEGABYTE):
        for _ in range(6):
            assert RawClient(folder).ask(b"nonsense").verb == Verb.REFUSED
    assert sum("cut off engine" in record.getMessage() for record in caplog.records) == 4
    sent: list[bytes] = []
    server.NodeServer._refuse(SimpleNamespace(send=sent.append), "x" * 2000)  # type: ignore[arg-type]
    assert sent == [wire.message(Verb.REFUSED, 0, 0, b"x" * 1024)]


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("which", ["keys", "keys with numbers", "numbers", "places", "flags", "pattern"])
def test_given_a_message_with_less_or_more_than_it_says_then_nothing_of_it_is_read(which: str, change: int) -> None:
    read, size = {
        "keys": (wire.keys_in, 3 * 32),
        "keys with numbers": (partial(wire.keys_in, with_numbers=True), 3 * 40),
        "numbers": (wire.numbers_in, 3 * 8),
        "places": (wire.places_in, 3 * 24),
        "flags": (wire.flags_in, 3),
        "pattern": (wire.pattern_in, len(wire.pattern_bytes(KeyPattern()))),
    }[which]
    whole, wrong = (
        wire.Message(Verb.FIND, 3, 0, memoryview(bytes(length))) for length in (size, size + change * size // 3)
    )
    read(whole)
    with pytest.raises(wire.WireError, match=f"has {size} bytes, not {len(wrong.body)}"):
        read(wrong)


def test_given_a_second_part_that_does_not_come_in_time_then_only_its_values_are_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_KEYS", 2)
    with node_thread(folder, MEGABYTE), NodeTier(f"node:{folder}?timeout={SECONDS}") as tier:
        assert store(tier, [1, 2, 3, 4]) == [Outcome.OK] * 4
        load_part = tier._load_part

        def late(node: Any, keys: Any, **rest: Any) -> Any:
            if key(3) in keys:
                raise TimeoutError
            return load_part(node, keys, **rest)

        monkeypatch.setattr(tier, "_load_part", late)
        outcomes, found = load(tier, [1, 2, 3, 4, 5])
        assert outcomes == [Outcome.OK] * 2 + [Outcome.LATE] * 3
        assert found[:2] == [value(1), value(2)]


def test_given_idle_connections_of_a_node_that_is_gone_then_one_is_asked_and_all_are_closed(folder: Path) -> None:
    asked: list[Any] = []
    closed: list[Any] = []

    def ask(node: Any) -> str:
        asked.append(node.name)
        if node.name != "new":
            raise LostNodeError("it left")
        return "found"

    def connection(name: str) -> Any:
        return SimpleNamespace(name=name, close=lambda: closed.append(name))

    tier = NodeTier(f"node:{folder}")
    tier._idle.extend(map(connection, ("first", "second", "third")))
    tier._new_connection = lambda: connection("new")  # type: ignore[method-assign]
    assert tier._asked(ask) == "found"
    assert asked == ["third", "new"]
    assert sorted(closed) == ["first", "second", "third"]
    tier.close()
    assert closed[-1] == "new"


def test_given_an_answer_that_takes_long_then_a_client_yields_at_first_and_then_sleeps_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    done: list[Any] = []
    monkeypatch.setattr(os, "sched_yield", lambda: done.append("yield"))
    connection = Connection.__new__(Connection)
    connection._socket = "socket"  # type: ignore[assignment]
    connection._poll = SimpleNamespace(
        register=lambda *given: done.append(given), poll=lambda ms: done.append(ms) or True
    )  # type: ignore[assignment]
    tries = iter([*[BlockingIOError] * (connection_module.YIELDS + 2), None])

    def call() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "answer"

    assert connection._retried(call, 5, 102.0004) == "answer"
    assert done == ["yield"] * connection_module.YIELDS + [("socket", 5), 2001] * 2
    connection._poll.poll = lambda ms: []  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        connection._wait(5, 102.0)


def test_given_a_node_that_waits_then_stopping_wakes_it(folder: Path) -> None:
    made = server.NodeServer(folder, MEGABYTE)
    assert made._epoll.poll(0) == []
    made.stop()
    assert [fd for fd, _ in made._epoll.poll(0)] == [made._wake]
    made.serve()
    made.close()


def test_given_a_region_of_another_size_then_the_files_of_the_earlier_one_are_closed(tmp_path: Path) -> None:
    Region(tmp_path, MEGABYTE).close()
    files = open_files()
    Region(tmp_path, 2 * MEGABYTE).close()
    assert open_files() <= files


def test_given_a_region_that_another_process_cuts_off_then_the_node_ends_and_the_next_begins_empty(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TICK_SECONDS", 0.01)
    node = server.NodeServer(folder, MEGABYTE)
    put(node.index, Holder(1), 1)
    os.truncate(folder / wire.REGION, 0)
    with pytest.raises(StorageError, match=f"cut off {folder / wire.REGION}.* start it again"):
        node.serve()
    node.close()
    with node_thread(folder, MEGABYTE) as node, NodeTier(f"node:{folder}") as tier:
        assert not node.is_warm
        assert store(tier, [1]) == [Outcome.OK]


def test_given_terms_in_any_order_then_they_end_in_the_order_of_time_also_after_some_were_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "_FEW_TERMS", 4)
    terms = ranking.Terms()
    values: list[Any] = [SimpleNamespace(created=17 * number % 40, is_gone=number % 3 == 0) for number in range(40)]
    for each in values:
        terms.add(float(each.created), each)
    ended = [each.created for now in range(40) for each in terms.ended(float(now))]
    assert ended == sorted(each.created for each in values if not each.is_gone)


def test_given_a_node_that_is_away_then_an_answer_of_an_older_connection_does_not_mean_that_it_is_back(
    folder: Path,
) -> None:
    tier = NodeTier(f"node:{folder}")
    tier._breaker.failed("it was away")
    tier._breaker._open_until = 0.0
    assert tier._breaker.claim_probe()
    tier._idle.append(SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
    assert tier._asked(lambda node: 7) == 7
    assert not tier._breaker.allows()
    tier.close()
