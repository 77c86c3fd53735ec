"""The Redis tier over servers in memory: the commands that it sends, and each of them refused in turn."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from servers import eventually

from kvpool.errors import InvalidArgumentError
from kvpool.testing import key, load, store, value
from kvpool.tiers import KeyPattern, Outcome, Purged
from kvpool.tiers.options import TierURL
from kvpool.tiers.remote import redis as redis_module
from kvpool.tiers.remote import redis_node
from kvpool.tiers.remote.breaker import Breaker
from kvpool.tiers.remote.redis import NUM_SLOTS, RedisTier, slot_of
from kvpool.tiers.remote.redis_node import CommandError, RedisNode, RedisOptions
from kvpool.tiers.remote.remote_tier import NodeError, StoreNode

OK, MISS, FAILED, LATE, REFUSED = Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.LATE, Outcome.REFUSED
Refusal = Callable[[Sequence[Any]], str | None]


class Server(StoreNode):
    """A server in memory, in the place of `RedisNode`. `refusal` says why a command is refused, None if it is not."""

    made: list[Server] = []  # noqa: RUF012  # of the test that runs
    slots: list[Any] = []  # noqa: RUF012
    refusal: Refusal = staticmethod(lambda command: None)

    def __init__(self, host: str, port: int, options: RedisOptions) -> None:
        super().__init__(f"{host}:{port}", 1, Breaker(pause=3600.0, proven=False))
        self.host, self.direct_seconds = host, options.timeout / 4
        self.strings: dict[str, bytes] = {}
        self.batches: list[list[list[Any]]] = []
        self.limits: list[float] = []
        self.direct: list[int] = []
        self.scanned: list[str] = []
        self.is_closed = False
        self.made.append(self)

    @contextmanager
    def connection(self) -> Iterator[str]:
        yield "client"

    def check(self, seconds: float) -> None:
        if (refusal := type(self).refusal(["PING"])) is not None:
            raise NodeError(refusal)

    def cluster_slots(self, seconds: float) -> Any:
        return self.slots

    def close(self) -> None:
        self.is_closed = True
        super().close()

    def run(self, client: str, commands: Sequence[Sequence[Any]], seconds: float) -> list[Any]:
        assert client == "client"
        self.batches.append([[bytes(word) if isinstance(word, memoryview) else word for word in c] for c in commands])
        self.limits.append(seconds)
        with self.asking():
            return [self._answer(command) for command in commands]

    def _answer(self, command: Sequence[Any]) -> Any:
        if (refusal := type(self).refusal(command)) is not None:
            return CommandError(Exception(refusal))
        verb, *words = [
            word.decode() if isinstance(word, bytes) and word.startswith(b"kvpool:") else word for word in command
        ]
        if verb == "EXISTS":
            return sum(name in self.strings for name in words)
        if verb == "GET":
            return self.strings.get(words[0])
        if verb == "SET":
            self.strings[words[0]] = bytes(words[1])
            return b"OK"
        if verb == "UNLINK":
            return sum(self.strings.pop(name, None) is not None for name in words)
        if verb == "STRLEN":
            return len(self.strings.get(words[0], b""))
        assert verb == "SCAN"
        at, found = int(words[0]), self.strings
        if not at:
            self.scanned = sorted(name for name in found if fnmatch.fnmatchcase(name, words[2]))
        following = "0" if at + 3 >= len(self.scanned) else str(at + 3)
        return [following.encode(), [name.encode() for name in self.scanned[at : at + 3]]]

    def read_into(self, client: str, name: str, view: memoryview) -> int | None:
        self.direct.append(view.nbytes)
        content = self.strings.get(name)
        if content is None:
            return None
        if len(content) > view.nbytes:
            return -1
        view[: len(content)] = content
        return len(content)


@pytest.fixture(autouse=True)
def _servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "RedisNode", Server)
    monkeypatch.setattr(Server, "made", [])
    monkeypatch.setattr(Server, "slots", [])
    monkeypatch.setattr(Server, "refusal", staticmethod(lambda command: None))


@contextmanager
def tier_of(url: str = "redis://host?timeout=30") -> Iterator[tuple[RedisTier, Server]]:
    with RedisTier(url) as tier:
        assert tier.stats().problem == ""
        yield tier, Server.made[0]
    assert all(server.is_closed for server in Server.made)


def refusing(verb: str, text: str, name: str = "") -> Any:
    return staticmethod(lambda command: text if command[0] == verb and name in str(command[1:]) else None)


def names_of(number: int, namespace: str = "default") -> tuple[str, str]:
    name = f"kvpool:{namespace}:{{{key(number).hex()}}}"
    return name, f"{name}:seal"


def test_given_values_then_each_is_two_strings_that_are_found_listed_and_removed() -> None:
    with tier_of() as (tier, server):
        assert store(tier, [1, 2, 3]) == [OK] * 3
        assert sorted(server.strings) == sorted(name for number in (1, 2, 3) for name in names_of(number))
        assert server.strings[names_of(1)[0]] == value(1)
        server.batches.clear()
        assert store(tier, [1, 4]) == [OK] * 2
        assert [[command[0] for command in batch] for batch in server.batches] == [["EXISTS"] * 2, ["SET"] * 2]
        assert load(tier, [1, 9]) == ([OK, MISS], [value(1), bytes(5000)])
        assert tier.remove([key(3), key(9)]) == [OK, MISS]
        server.strings["kvpool:default:{notes}"] = b"mine"
        del server.strings[names_of(4)[1]]
        server.strings[names_of(5)[1]] = b"the seal of bytes that are gone"
        assert tier.listed() == ({key(1): 5000, key(2): 5000}, "")
        assert tier.purge(KeyPattern(key(1)[:8], key(1)[8:12])) == Purged(1, is_complete=True)
        assert tier.purge(KeyPattern()) == Purged(2, is_complete=True)
        assert list(server.strings) == ["kvpool:default:{notes}"]


@pytest.mark.parametrize(("ttl", "words"), [("", []), ("&ttl=60", ["PX", "60000"]), ("&ttl=0.001", ["PX", "1"])])
def test_given_a_time_to_live_and_a_namespace_then_both_strings_are_sent_with_them(ttl: str, words: list[str]) -> None:
    with tier_of(f"redis://host?timeout=30&namespace=team{ttl}") as (tier, server):
        store(tier, [1])
        (of_bytes, of_seal) = server.batches[-1]
        assert [command[3:] for command in (of_bytes, of_seal)] == [words] * 2
        assert (of_bytes[1], of_seal[1]) == names_of(1, "team")


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("lacking", [None, 0, 14, 16])
def test_given_many_keys_then_groups_are_counted_and_only_those_with_gaps_are_looked_at_again(
    count: int, lacking: int | None
) -> None:
    with tier_of() as (tier, server):
        numbers = [number for number in range(count) if number != lacking]
        store(tier, numbers)
        server.batches.clear()
        found = tier.contains([key(number) for number in range(count)])
        assert found == [number != lacking for number in range(count)]
        groups, *again = server.batches
        assert [len(command) - 1 for command in groups] == [2 * min(16, count - start) for start in range(0, count, 16)]
        at = None if lacking is None or lacking >= count else lacking // 16
        size = 0 if at is None else min(16, count - 16 * at)
        assert [len(batch) for batch in again] == ([size] if size > 1 else [])


@pytest.mark.parametrize(
    ("verb", "text", "outcome", "problem"),
    [
        ("GET", "WRONGTYPE Operation against a key", FAILED, ""),
        ("GET", "NOPERM this user has no permissions", FAILED, "NOPERM this user has no permissions"),
        ("EXISTS", "LOADING the dataset", FAILED, "LOADING the dataset"),
        ("SET", "OOM command not allowed", REFUSED, ""),
        ("UNLINK", "READONLY You can't write", FAILED, "READONLY You can't write"),
        ("GET", "MOVED 3999 127.0.0.1:6381", FAILED, "it is a node of a cluster: add cluster=1 to the address"),
        ("SET", "MOVED 3999 127.0.0.1:6381", FAILED, "it is a node of a cluster: add cluster=1 to the address"),
    ],
)
def test_given_a_command_that_is_refused_then_its_key_or_the_whole_server_has_failed(
    verb: str, text: str, outcome: Outcome, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier_of() as (tier, server):
        store(tier, [1, 2])
        monkeypatch.setattr(Server, "refusal", refusing(verb, text, key(1).hex() if verb in ("GET", "UNLINK") else ""))
        if verb == "GET":
            outcomes = load(tier, [1, 2])[0]
            assert outcomes == ([outcome, FAILED] if problem else [outcome, OK])
        elif verb == "UNLINK":
            assert tier.remove([key(1)]) == [outcome]
        else:
            assert store(tier, [3]) == [outcome]
        assert tier.stats().problem.startswith(problem)
        assert bool(tier.stats().problem) == bool(problem)
        if outcome == REFUSED:
            monkeypatch.setattr(Server, "refusal", staticmethod(lambda command: None))
            assert store(tier, [4, 1]) == [REFUSED, OK]  # it is full for a moment
            server.full_until = 0.0
            assert store(tier, [4]) == [OK]


def test_given_commands_of_a_scan_that_are_refused_then_it_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_of() as (tier, server):
        store(tier, [1, 2, 3])
        monkeypatch.setattr(Server, "refusal", refusing("UNLINK", "NOPERM", f"{key(2).hex()}}}'"))
        assert tier.purge(KeyPattern()) == Purged(2, is_complete=False)
        monkeypatch.setattr(Server, "refusal", refusing("SCAN", "NOPERM scan"))
        assert tier.purge(KeyPattern()) == Purged(0, is_complete=False)
        assert tier.listed() == ({}, "NOPERM scan")
        assert list(server.strings) == [names_of(2)[0]]
        monkeypatch.setattr(Server, "refusal", refusing("STRLEN", "NOPERM", key(4).hex()))
        assert store(tier, [3, 4]) == [OK] * 2
        assert tier.listed() == ({key(3): 5000}, "")


def test_given_a_value_that_was_broken_when_it_is_removed_then_nothing_of_it_is_remembered() -> None:
    with tier_of() as (tier, _):
        store(tier, [1])
        tier.stale.add(key(1))
        assert tier.remove([key(1)]) == [OK]
        assert key(1) not in tier.stale


def test_given_a_scan_then_its_commands_take_no_longer_than_a_request_may() -> None:
    with tier_of("redis://host?timeout=7") as (tier, server):
        store(tier, [1])
        server.limits.clear()
        tier.purge(KeyPattern(), timeout=100.0)
        assert server.limits == [7.0, 7.0]
        server.limits.clear()
        tier.purge(KeyPattern(), timeout=3.0)
        assert all(2.0 < limit <= 3.0 for limit in server.limits)


@pytest.mark.parametrize(
    ("size", "seconds", "is_direct"), [(5000, 30.0, True), (5000, 7.0, False), (5001, 30.0, False), (0, 30.0, False)]
)
def test_given_a_value_then_it_is_read_straight_into_its_buffer_if_the_client_ends_before_the_deadline(
    size: int, seconds: float, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "DIRECT_BYTES", 5000)
    with tier_of() as (tier, server):
        assert server.direct_seconds == 7.5
        store(tier, [1], size)
        out = bytearray(size)
        assert tier.load([key(1)], [out], timeout=seconds) == [OK]
        assert (bytes(out), server.direct) == (value(1, size), [size] if is_direct else [])
        if size:
            server.strings[names_of(1)[0]] += b"x"
            assert tier.load([key(1)], [out], timeout=seconds) == [FAILED]
            assert tier.load([key(1)], [out], timeout=seconds) == [MISS]  # it is stale
            assert tier.contains([key(1)]) == [False]
            del server.strings[names_of(1)[0]]
            tier.stale.discard(key(1))
            assert tier.load([key(1)], [out], timeout=seconds) == [MISS]


def test_given_a_seal_that_is_none_then_the_value_has_failed_and_a_smaller_buffer_costs_no_read() -> None:
    with tier_of() as (tier, server):
        store(tier, [1, 2], 300)
        server.strings[names_of(1)[1]] = b"no seal"
        assert load(tier, [1, 2], 299)[0] == [FAILED, FAILED]
        assert server.direct == []
        assert tier.contains([key(1), key(2)]) == [False, True]  # the second is whole
        assert store(tier, [1], 300) == [OK]
        assert load(tier, [1, 2], 300)[0] == [OK, OK]


def test_given_many_bytes_then_they_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "PIPELINE_BYTES", 250)
    with tier_of() as (tier, server):
        sizes = [100, 150, 1, 300, 10]
        data = [value(number, size) for number, size in enumerate(sizes)]
        assert tier.store([key(number) for number in range(5)], data) == [OK] * 5
        assert [len(batch) // 2 for batch in server.batches[1:]] == [2, 1, 1, 1]


def test_given_a_cluster_then_each_key_goes_to_the_master_of_its_slot_and_nodes_that_left_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = NUM_SLOTS // 2
    monkeypatch.setattr(Server, "slots", [[half, NUM_SLOTS - 1, [b"two", 7, b"id"]], [0, half - 1, [b"", 6379]]])
    with tier_of("redis://one?cluster=1&timeout=30&nodes=three:8") as (tier, _):
        by_name = {server.name: server for server in Server.made}
        assert sorted(by_name) == ["one:6379", "three:8", "two:7"]
        numbers = list(range(20))
        assert store(tier, numbers) == [OK] * 20
        for number in numbers:
            owner = by_name["two:7" if slot_of(key(number).hex().encode()) >= half else "one:6379"]
            assert names_of(number)[0] in owner.strings
        assert load(tier, numbers)[0] == [OK] * 20
        assert {server.name for server in tier._holders()} == {"one:6379", "two:7"}  # the third has no slot
        assert len(tier.listed().sizes) == 20
        monkeypatch.setattr(Server, "slots", [[0, NUM_SLOTS - 1, [b"one", 6379]]])
        monkeypatch.setattr(Server, "refusal", refusing("GET", "MOVED 1 one:6379"))
        assert set(load(tier, numbers)[0]) <= {FAILED, LATE}  # late: its share was not begun before the node left
        eventually(lambda: by_name["two:7"].is_closed, "the node that left is closed")
        assert tier.stats().problem == ""
        assert sorted(node.name for node in tier._nodes()) == ["one:6379", "three:8"]


@pytest.mark.parametrize("wrong", ["host", ":7", "host:0", "host:65536", "host:x", "host:-1", "host:"])
def test_given_a_node_of_a_cluster_that_is_no_host_and_port_then_it_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"of redis://h must be host:port, several divided by commas"):
        RedisOptions.of(TierURL.parse(f"redis://h?cluster=1&nodes={wrong}"))


@pytest.mark.parametrize(
    ("url", "seeds", "database"),
    [
        ("redis://h", (("h", 6379),), 0),
        ("redis://h:7/15", (("h", 7),), 15),
        ("redis://h:7/2147483647", (("h", 7),), 2**31 - 1),
        ("redis://h?cluster=1&nodes=h:6379,a:1,[::1]:65535", (("h", 6379), ("a", 1), ("::1", 65535)), 0),
        ("redis://h/0?cluster=1", (("h", 6379),), 0),
    ],
)
def test_given_an_address_then_its_nodes_and_its_database_are_read(url: str, seeds: Any, database: int) -> None:
    options = RedisOptions.of(TierURL.parse(url))
    assert (options.seeds, options.database, options.tls) == (seeds, database, False)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h/x", "is the number of a database, got 'x'"),
        ("redis://h/2147483648", "is the number of a database, got '2147483648'"),
        ("redis://h/1?cluster=1", "a cluster has database 0 only"),
        ("redis://h?nodes=a:1", "so it needs cluster=1"),
        ("redis://user@h", "a user needs a password"),
        (f"rediss://h?cert={__file__}", "cert and key belong together"),
        (f"redis://h?ca={__file__}", "ca, cert and key are for TLS, so write rediss://"),
        ("rediss://h?ca=/nowhere", "ca='/nowhere' of rediss://h cannot be read: No such file"),
    ],
)
def test_given_a_wrong_address_then_the_error_names_the_wrong_part(url: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RedisOptions.of(TierURL.parse(url))
    assert said in str(caught.value)


# --- a node and its client -----------------------------------------------------------------------------------------------


class Client:
    """Of the library: answers what a test wants."""

    def __init__(self) -> None:
        self.is_closed = False
        self.answer: Any = [b"PONG"]
        self.timeouts: list[int] = []

    def exec(self, batch: Any, raise_on_error: bool, options: Any) -> Any:
        assert not raise_on_error
        self.timeouts.append(options.timeout)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def get(self, name: str, *, buffer: memoryview) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.is_closed = True


class Glide:
    """Stands for the library."""

    class GlideError(Exception):
        pass

    class TimeoutError(GlideError):
        pass

    class RequestError(GlideError):
        pass

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.configurations: list[Any] = []
        self.GlideClient = SimpleNamespace(create=self._create)
        for name in ("ServerCredentials", "NodeAddress", "TlsAdvancedConfiguration", "BatchOptions"):
            setattr(self, name, lambda *words, **options: SimpleNamespace(words=words, **options))
        self.AdvancedGlideClientConfiguration = self.BatchOptions  # type: ignore[attr-defined]
        self.GlideClientConfiguration = self.BatchOptions  # type: ignore[attr-defined]

    def _create(self, configuration: Any) -> Client:
        self.configurations.append(configuration)
        self.clients.append(Client())
        return self.clients[-1]

    @staticmethod
    def Batch(is_atomic: bool) -> Any:
        assert not is_atomic
        commands: list[Any] = []
        return SimpleNamespace(commands=commands, custom_command=commands.append)


@pytest.fixture
def glide(monkeypatch: pytest.MonkeyPatch) -> Glide:
    made = Glide()
    monkeypatch.setattr(redis_node, "import_glide", lambda: made)
    return made


def node_of(url: str = "redis://host:7/3?timeout=2&connections=2") -> RedisNode:
    return RedisNode("host", 7, RedisOptions.of(TierURL.parse(url)))


def test_given_an_address_then_every_connection_is_made_with_what_it_says(glide: Glide, tmp_path: Any) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_bytes(name.encode())
    files = "&".join(f"{name}={tmp_path / name}" for name in ("ca", "cert", "key"))
    node_of().close()
    node_of(f"rediss://us:pa@host:7?timeout=2&connections=1&{files}").close()
    plain, again, secure = glide.configurations
    assert plain == again
    assert (plain.use_tls, plain.credentials, plain.database_id, plain.request_timeout) == (False, None, 3, 500)
    assert (plain.lazy_connect, plain.client_info_tag) == (True, "kvpool")
    assert (plain.advanced_config.connection_timeout, plain.advanced_config.tls_config) == (2000, None)
    assert [address.words for address in plain.words[0]] == [("host", 7)]
    assert (secure.use_tls, secure.credentials.words) == (True, ("pa", "us"))
    tls = secure.advanced_config.tls_config
    assert (tls.root_pem_cacerts, tls.client_cert_pem, tls.client_key_pem) == (b"ca", b"cert", b"key")


def test_given_connections_in_use_then_others_are_taken_and_closing_waits_for_the_last(glide: Glide) -> None:
    node = node_of()
    first, second = glide.clients
    with node.connection() as one, node.connection() as two:
        assert {id(one), id(two)} == {id(first), id(second)}
        with node.connection() as third:
            assert third is first  # all are in use
        node.close()
        assert not first.is_closed
        with pytest.raises(NodeError, match="closed"), node.connection():
            raise AssertionError
    assert first.is_closed
    assert second.is_closed


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (Glide.TimeoutError("slow"), TimeoutError, ""),
        (Glide.GlideError("two\n lines"), NodeError, "two lines"),
        (Glide.RequestError("NOAUTH"), NodeError, "NOAUTH"),
    ],
)
def test_given_errors_of_the_client_then_they_are_ours_and_the_breaker_hears_of_them(
    glide: Glide, error: Exception, raised: type[Exception], told: str
) -> None:
    node = node_of()
    node.breaker.claim_probe()
    node.breaker.succeeded()
    client = glide.clients[0]
    client.answer = error
    for call in (lambda: node.run(client, [["PING"]], 1.5), lambda: node.read_into(client, "n", memoryview(b""))):
        with pytest.raises(raised) as caught:
            call()
        assert str(caught.value) == told
    assert client.timeouts == [1500]
    assert node.breaker.allows() == (raised is TimeoutError)  # it had hardly any time
    node.close()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, None),
        (5, 5),
        (Glide.RequestError("value exceeds buffer size"), -1),
        (Glide.RequestError("WRONGTYPE"), -1),
    ],
)
def test_given_a_string_that_is_read_straight_then_its_length_says_what_came(
    glide: Glide, answer: Any, found: int | None
) -> None:
    node = node_of()
    glide.clients[0].answer = answer
    assert node.read_into(glide.clients[0], "name", memoryview(bytearray(5))) == found
    node.close()


def test_given_a_probe_then_every_connection_must_answer(glide: Glide, monkeypatch: pytest.MonkeyPatch) -> None:
    node, reached = node_of(), list[Any]()
    monkeypatch.setattr(node, "_reach", reached.append)
    node.check(3.0)
    assert (reached, [client.timeouts for client in glide.clients]) == ([3.0], [[3000]] * 2)
    glide.clients[1].answer = [Exception("NOAUTH Authentication\nrequired")]
    with pytest.raises(NodeError, match="NOAUTH Authentication required"):
        node.check(3.0)
    glide.clients[1].answer = [[[0, 1, [b"h", 7]]]]
    assert node.cluster_slots(2.0) == [[0, 1, [b"h", 7]]]
    assert reached[-1] == 2.0
    node.close()


@pytest.mark.parametrize(("error", "raised"), [(TimeoutError(), TimeoutError), (OSError(111, "refused"), NodeError)])
def test_given_a_host_that_cannot_be_reached_then_the_client_is_not_asked(
    glide: Glide, monkeypatch: pytest.MonkeyPatch, error: OSError, raised: type[Exception]
) -> None:
    asked: list[Any] = []

    def connect(*where: Any) -> None:
        asked.append(where)
        raise error

    monkeypatch.setattr(redis_node.socket, "create_connection", connect)
    node = node_of()
    with pytest.raises(raised):
        node.check(3.0)
    assert asked == [(("host", 7), 3.0)]
    assert glide.clients[0].timeouts == []
    node.close()


def test_given_a_request_without_an_answer_then_the_breaker_hears_how_long_it_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []
    breaker: Any = SimpleNamespace(
        failed=lambda problem, **how: heard.append((problem, how)), succeeded=lambda: heard.append("ok")
    )
    node, clock = StoreNode("name", 1, breaker), iter([100.0, 102.5, 200.0, 300.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with pytest.raises(TimeoutError), node.asking():
        raise TimeoutError
    with pytest.raises(NodeError), node.asking():
        raise NodeError("refused")
    with node.asking():
        pass
    monkeypatch.undo()
    assert heard == [("no answer in 2.50 s", {"asked_at": 100.0}), ("refused", {}), "ok"]
    node.close()


@pytest.mark.parametrize(("options", "waits"), [("timeout=30", [15.0]), ("timeout=30&cluster=1", [15.0, 15.0])])
def test_given_servers_then_opening_waits_for_their_first_answer_half_of_the_time_of_a_call(
    monkeypatch: pytest.MonkeyPatch, options: str, waits: list[float]
) -> None:
    waited: list[float] = []
    wait = redis_module.wait

    def recorded(probes: Any, seconds: float) -> Any:
        waited.append(seconds)
        return wait(probes, seconds)

    monkeypatch.setattr(Server, "slots", [[0, NUM_SLOTS - 1, [b"host", 6379]]])
    monkeypatch.setattr(redis_module, "wait", recorded)
    with tier_of(f"redis://host?{options}"):
        assert waited == waits
