"""The Redis tier on real servers: the contract, one server and a cluster, passwords, TLS, limits and names."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from servers import RedisCluster, RedisServer, running

from kvpool.errors import InvalidArgumentError
from kvpool.testing import TierContract, key, load, store, value
from kvpool.tiers import KeyedTier, Outcome
from kvpool.tiers.remote.redis import RedisTier, SlotMap, slot_of

_namespaces = itertools.count()


def fresh(url: str, **options: object) -> RedisTier:
    """A tier whose namespace nobody used before."""
    words = [
        f"{name}={word}" for name, word in {"namespace": f"n{next(_namespaces)}", "timeout": 10, **options}.items()
    ]
    return RedisTier(f"{url}{'&' if '?' in url else '?'}{'&'.join(words)}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    with running(made):
        yield made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    made = RedisCluster(tmp_path_factory.mktemp("cluster"))
    with running(made):
        yield made


class TestOneServer(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self.url = server.url

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return fresh(self.url)


class TestCluster(TierContract):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RedisCluster) -> None:
        self.url = cluster.url

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        return fresh(self.url)


def test_given_two_tiers_with_one_address_then_they_share_values_and_namespaces_do_not(server: RedisServer) -> None:
    with fresh(server.url, namespace="shared") as one, fresh(server.url, namespace="shared") as two:
        store(one, [1])
        assert load(two, [1]) == ([Outcome.OK], [value(1)])
    with fresh(server.url, namespace="other") as other:
        assert load(other, [1])[0] == [Outcome.MISS]


def test_given_a_cluster_then_values_are_on_every_node_and_a_batch_finds_them_all(cluster: RedisCluster) -> None:
    with fresh(cluster.url) as tier:
        numbers = list(range(30))
        assert store(tier, numbers) == [Outcome.OK] * 30
        assert load(tier, numbers) == ([Outcome.OK] * 30, [value(number) for number in numbers])
        assert all(int(node.ask("DBSIZE")[1:]) > 0 for node in cluster.nodes)


def test_given_a_batch_larger_than_a_share_then_every_value_comes_back(server: RedisServer) -> None:
    with fresh(server.url) as tier:
        size = 5 << 20  # three to a share
        assert store(tier, list(range(8)), size) == [Outcome.OK] * 8
        outcomes, found = load(tier, list(range(8)), size)
        assert outcomes == [Outcome.OK] * 8
        assert found == [value(number, size) for number in range(8)]


def test_given_a_long_prefix_with_gaps_then_every_key_is_found_or_not_as_it_is(server: RedisServer) -> None:
    with fresh(server.url) as tier:
        there = [*range(40), *range(48, 64), 70, 99]
        store(tier, there)
        keys = [key(number) for number in range(100)]
        assert tier.contains(keys) == [number in there for number in range(100)]
        assert tier.contains_prefix(keys) == 40
        assert tier.contains_prefix(keys[:33]) == 33


def test_given_only_seals_or_only_bytes_then_nothing_is_there(server: RedisServer) -> None:
    with fresh(server.url, namespace="halves") as tier:
        store(tier, [1, 2, 3, 4])
        server.ask("DEL", *(names("halves", number)[number % 2] for number in (1, 2, 3, 4)))
        assert tier.contains([key(number) for number in (1, 2, 3, 4)]) == [False] * 4
        assert store(tier, [1, 2]) == [Outcome.OK] * 2
        assert load(tier, [1, 2]) == ([Outcome.OK] * 2, [value(1), value(2)])


def test_given_little_time_or_a_large_value_then_it_comes_through_a_copy_and_is_the_same(server: RedisServer) -> None:
    with fresh(server.url, timeout=40) as tier:
        store(tier, [1])
        out = bytearray(len(value(1)))
        assert tier.load([key(1)], [out], timeout=9) == [Outcome.OK]  # under a quarter of the tier's own limit
        assert bytes(out) == value(1)
        large = np.random.default_rng(0).bytes(17 << 20)
        assert tier.store([key(2)], [large]) == [Outcome.OK]
        out = bytearray(len(large))
        assert tier.load([key(2)], [out]) == [Outcome.OK]
        assert out == large


def test_given_a_time_to_live_then_both_strings_expire(server: RedisServer) -> None:
    with fresh(server.url, namespace="mortal", ttl=100) as tier:
        store(tier, [1])
    name = f"kvpool:mortal:{{{key(1).hex()}}}"
    for of_value in (name, f"{name}:seal"):
        assert 90_000 < int(server.ask("PTTL", of_value)[1:]) <= 100_000


def test_given_a_value_over_the_limit_then_it_is_refused_and_nothing_is_sent(server: RedisServer) -> None:
    with fresh(server.url, max_value_bytes=100) as tier:
        assert tier.store([key(1), key(2)], [value(1, 101), value(2, 100)]) == [Outcome.REFUSED, Outcome.OK]
        assert tier.contains([key(1), key(2)]) == [False, True]


# --- values that are not what they were ------------------------------------------------------------------------------


def names(namespace: str, number: int) -> tuple[str, str]:
    name = f"kvpool:{namespace}:{{{key(number).hex()}}}"
    return name, f"{name}:seal"


def spoil(server: RedisServer, what: str) -> None:
    """Changes value 1 of namespace `spoilt` behind the tier's back."""
    name, seal = names("spoilt", 1)
    other, other_seal = names("spoilt", 2)
    commands = {
        "flipped": [("SETRANGE", name, "77", "????")],
        "shorter": [("SET", name, "stub")],
        "longer": [("APPEND", name, "more")],
        "no string": [("DEL", name), ("LPUSH", name, "x")],
        "seal flipped": [("SETRANGE", seal, "50", "????")],
        "seal shorter": [("SET", seal, "stub")],
        "seal no string": [("DEL", seal), ("LPUSH", seal, "x")],
        "of another key": [("COPY", other, name, "REPLACE"), ("COPY", other_seal, seal, "REPLACE")],
    }
    for command in commands[what]:
        assert not server.ask(*command).startswith("-")


SPOILT = [
    "flipped",
    "shorter",
    "longer",
    "no string",
    "seal flipped",
    "seal shorter",
    "seal no string",
    "of another key",
]


@pytest.mark.parametrize("what", SPOILT)
@pytest.mark.parametrize("timeout", [None, 2.0], ids=["direct", "copied"])
def test_given_a_spoilt_value_then_it_failed_others_do_not_and_storing_it_again_heals(
    server: RedisServer, what: str, timeout: float | None
) -> None:
    with fresh(server.url, namespace="spoilt") as tier:
        tier.remove([key(1), key(2)])
        store(tier, [1, 2])
        spoil(server, what)
        out = [bytearray(len(value(1))) for _ in range(2)]
        assert tier.load([key(1), key(2)], out, timeout=timeout) == [Outcome.FAILED, Outcome.OK]
        assert tier.stats().problem == ""
        if "no string" not in what:
            assert store(tier, [1]) == [Outcome.OK]
            assert load(tier, [1]) == ([Outcome.OK], [value(1)])


def test_given_a_stale_hit_then_it_is_not_promised_again_until_it_is_stored(server: RedisServer) -> None:
    with fresh(server.url, namespace="stale") as tier:
        store(tier, [1])
        name, seal = names("stale", 1)
        server.ask("DEL", name)
        assert load(tier, [1])[0] == [Outcome.MISS]
        server.ask("SET", name, "back, but wrong")
        assert int(server.ask("EXISTS", name, seal)[1:]) == 2
        assert tier.contains([key(1)]) == [False]
        assert load(tier, [1])[0] == [Outcome.MISS]
        assert store(tier, [1]) == [Outcome.OK]
        assert tier.contains([key(1)]) == [True]
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])


# --- passwords and TLS -----------------------------------------------------------------------------------------------

SECRET = "s3same p:ss/word"
QUOTED = "s3same%20p%3Ass%2Fword"


def test_given_a_password_then_it_opens_the_server_and_is_shown_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path, password=SECRET)
    with running(server), caplog.at_level(logging.DEBUG):
        address = f"127.0.0.1:{server.port}"
        with fresh(f"redis://default:{QUOTED}@{address}/3", timeout=2) as tier:
            assert store(tier, [1]) == [Outcome.OK]
            assert "db3:keys=2" in server.ask("INFO", "keyspace")
            server.kill()
            store(tier, [2])
            shown = [repr(tier), repr(tier._options), str(tier.stats()), caplog.text, repr(tier.__dict__)]
        assert tier.name == f"redis://{address}/3"
        assert tier.stats().name == tier.name
        assert "tier redis://" in caplog.text
        assert all(SECRET not in text and QUOTED not in text for text in shown)


@pytest.mark.parametrize(("login", "said"), [("default:wrong@", "WRONGPASS"), ("", "NOAUTH")])
def test_given_a_wrong_password_then_everything_is_a_miss_and_the_statistics_say_why(
    tmp_path: Path, login: str, said: str
) -> None:
    server = RedisServer(tmp_path, password=SECRET)
    with running(server), fresh(f"redis://{login}127.0.0.1:{server.port}") as tier:
        assert load(tier, [1])[0] == [Outcome.FAILED]
        assert store(tier, [1]) == [Outcome.FAILED]
        assert tier.contains([key(1)]) == [False]
        assert said in tier.stats().problem
        assert "wrong" not in tier.stats().problem


def certificates(folder: Path) -> dict[str, str]:
    """An authority of our own, and a certificate of loopback that it signed: options of an address and of a server."""
    x509 = pytest.importorskip("cryptography.x509", reason="makes the server's certificate")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvpool test authority")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvpool test server")])
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)

    def signed(name: object, secret: object, is_authority: bool) -> bytes:
        serial = x509.random_serial_number()
        made = x509.CertificateBuilder(issuer, name, secret.public_key(), serial, now - day, now + day)
        made = made.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        made = made.add_extension(loopback, critical=False)
        return made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    pem, pkcs8, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    contents = {
        "ca": signed(issuer, authority, True),
        "cert": signed(subject, own, False),
        "key": own.private_bytes(pem, pkcs8, plain),
    }
    for name, content in contents.items():
        (folder / f"{name}.pem").write_bytes(content)
    return {name: str(folder / f"{name}.pem") for name in contents}


def test_given_tls_then_values_travel_encrypted_and_a_stranger_is_not_trusted(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    trust = ["--tls-cert-file", files["cert"], "--tls-key-file", files["key"], "--tls-ca-cert-file", files["ca"]]
    server = RedisServer(tmp_path / "server", *trust, password=SECRET, tls=True)
    with running(server):
        address = f"rediss://default:{QUOTED}@127.0.0.1:{server.port}"
        with fresh(address, **files) as tier:
            assert store(tier, [1]) == [Outcome.OK]
            assert load(tier, [1]) == ([Outcome.OK], [value(1)])
        files.pop("ca")
        with fresh(address, **files, timeout=1) as tier:
            assert load(tier, [1])[0] == [Outcome.FAILED]
            assert tier.stats().problem


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://host", "redis:// or rediss://"),
        ("redis://", "scheme and a host"),
        ("redis://host:port", "port up to 65535"),
        ("redis://host:70000", "port up to 65535"),
        ("redis://host/zero", "number of a database"),
        ("redis://host/1?cluster=1", "database 0 only"),
        ("redis://host?ttl=soon", "ttl='soon' of redis://host must be a number"),
        ("redis://host?ttl=-1", "ttl='-1'"),
        ("redis://host?cluster=maybe", "cluster='maybe'"),
        ("redis://host?connections=1.5", "whole number"),
        ("redis://host?namespace={x}", "namespace='{x}'"),
        ("redis://host?nodes=other:1", "needs cluster=1"),
        ("redis://host?cluster=1&nodes=other", "host:port"),
        ("redis://host?ttl=1&ttl=2", "stands twice"),
        ("redis://host?tll=60", "no option 'tll'; it has cluster, nodes"),
        ("redis://host?ca=x", "ca='x' of redis://host cannot be read"),
        ("redis://user@host", "a user needs a password"),
    ],
)
def test_given_a_wrong_address_then_the_wrong_part_is_named(url: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RedisTier(url)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://host?ca={file}", "write rediss:// for redis://"),
        ("redis://host?cert={file}&key={file}", "write rediss:// for redis://"),
        ("rediss://host?cert={file}", "belong together"),
        ("rediss://host?key={file}", "belong together"),
    ],
)
def test_given_files_for_tls_that_would_not_be_used_then_the_address_is_refused(
    tmp_path: Path, url: str, says: str
) -> None:
    file = tmp_path / "some.pem"
    file.write_text("some")
    with pytest.raises(InvalidArgumentError, match=says):
        RedisTier(url.format(file=file))


def test_given_a_wrong_address_with_a_password_then_the_error_does_not_repeat_it() -> None:
    for url in (f"redis://u:{QUOTED}@host:port", f"redis://u:{QUOTED}@host/x", f"redis://u:{QUOTED}@host?ttl=x"):
        with pytest.raises(InvalidArgumentError) as caught:
            RedisTier(url)
        assert QUOTED not in str(caught.value)
        assert SECRET not in str(caught.value)


# --- slots -----------------------------------------------------------------------------------------------------------


def test_given_a_key_then_its_slot_is_the_one_that_the_server_computes(cluster: RedisCluster) -> None:
    for number in range(20):
        name = names("any", number)
        asked = {int(cluster.nodes[0].ask("CLUSTER", "KEYSLOT", part)[1:]) for part in name}
        assert asked == {slot_of(key(number).hex().encode())}


def test_given_the_slots_of_a_cluster_then_every_slot_has_its_node_and_a_gap_has_none() -> None:
    slots = SlotMap([[10, 19, [b"b", 2, b"id"]], [0, 4, [b"", 1, b"id"], [b"replica", 9, b"id"]]], asked="a")
    assert slots.addresses == {("a", 1), ("b", 2)}
    found = [slots.address(slot) for slot in (0, 4, 5, 9, 10, 19, 20)]
    assert found == [("a", 1), ("a", 1), None, None, ("b", 2), ("b", 2), None]
