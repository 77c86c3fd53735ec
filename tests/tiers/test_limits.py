"""Every setting and option of tiers: the rule that an error shows, and what is just allowed and just not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.fields import Kind
from kvpool.tiers.compressed_tier import CompressionOptions
from kvpool.tiers.disk.disk_tier import DiskOptions
from kvpool.tiers.node.node_tier import NodeOptions
from kvpool.tiers.node.settings import NodeSettings
from kvpool.tiers.options import TierURL, count, read_options, size
from kvpool.tiers.remote.mooncake import MooncakeOptions
from kvpool.tiers.remote.redis_node import RedisOptions
from kvpool.tiers.remote.s3 import S3Options
from kvpool.tiers.settings import TierConfig

MOST = 2**63 - 1
SECONDS = "must be a number of seconds from 0.001 to 1e+08", [0.001, 1, 1e8], [0, 0.0009, 1.1e8, True, "1", None]
FLAG = "must be true or false", [True, False], [0, 1, "yes", None]
TEXT = "must be text", ["", "x"], [7, None, b"x"]
BYTES = 'must be a size above 0, as 1048576 or "50GB"', [1, MOST, "50GB"], [0, -1, MOST + 1, 1.5, True, "much"]
NAME = (
    "must be 1 to 64 letters, digits, dots, dashes or underlines: it is a name",
    ["a", "a" * 64],
    ["", "a" * 65, "a b", 7],
)
CODEC = "must be one of zstd, lz4, fp8", ["zstd", "lz4", "fp8"], ["", "zip", 7]
DTYPE = "must be one of bfloat16, float16, float32", ["bfloat16", "float32"], ["", "int8"]
SHARE = "must be a share above 0 and up to 1", [0.001, 1, 1.0], [0, 1.001, True, "1", -0.5]


def whole(low: int, high: int) -> tuple[str, list[Any], list[Any]]:
    rule = f"must be a whole number from {low} to {high}"
    return rule, [low, high], [low - 1, high + 1, float(low), True, str(low)]


def sizes(low: int, high: int) -> tuple[str, list[Any], list[Any]]:
    return f"must be {low:,} to {high:,} bytes", [low, high], [low - 1, high + 1, True, 1.5]


REMOTE = ["node:", "redis://h", "rediss://h", "s3://b", "mooncake://h", "disk:d", "mine://x"]
RULES: dict[Any, dict[str, tuple[str, list[Any], list[Any]]]] = {
    TierConfig: {
        "timeout": ("must be a number of seconds from 0.001 to 3600", [0.001, 3600], [0, 3600.1]),
        "min_uses": whole(1, 2**31 - 1),
        "host_bytes": ('must be a size, as 0 or "8GB"', [0, MOST, "8GB"], [-1, MOST + 1, True]),
        "offload_on_evict": FLAG,
        "offload_min_priority": whole(0, 100),
        "host_write": (
            "must be one of back, through",
            ["back", "through"],
            ["around", 1, True],
        ),
        "disk": ("must be the path of a directory, without a question mark", ["d", "/d"], ["", "a?b", 7]),
        "disk_bytes": BYTES,
        "disk_threads": whole(1, 64),
        "disk_direct": FLAG,
        "disk_read_only": FLAG,
        "disk_timeout": SECONDS,
        "disk_compression": CODEC,
        "disk_dtype": DTYPE,
        "remote": ("must be the address of a tier, such as node: or redis://HOST", REMOTE, ["", 5]),
        "remote_namespace": NAME,
        "remote_ttl": SECONDS,
        "remote_timeout": SECONDS,
        "remote_max_value_bytes": BYTES,
        "remote_compression": CODEC,
        "remote_dtype": DTYPE,
    },
    NodeSettings: {
        "bytes": sizes(2**20, MOST),
        "policy": (
            "must be one of adaptive, lru, priority",
            ["lru", "priority"],
            ["", "mine", "sieve"],
        ),
        "engine_share": SHARE,
        "tenant_share": SHARE,
        "tenants": (
            "must name tenants with a share each, as { acme = 0.25 }",
            [{}, {"acme": 0.25}],
            [{"acme": 0}, {"acme": 1.5}, 7, {"acme": True}],
        ),
        "metrics": (
            "must be HOST:PORT, as 127.0.0.1:9464",
            ["127.0.0.1:0", "[::1]:65535"],
            ["host", ":80", "h:65536", "h:-1", "h:x"],
        ),
        "disk": ("must be the path of a directory", ["d"], ["", 7]),
        "disk_bytes": BYTES,
        "remote": ("must be an address", ["redis://h"], ["", 7]),
    },
    DiskOptions: {"bytes": BYTES, "threads": whole(1, 64), "direct": FLAG, "read_only": FLAG, "timeout": SECONDS},
    NodeOptions: {
        "engine": ("must be a name of 1 to 64 bytes", ["a", "a" * 64, "é" * 32], ["", "a" * 65, "é" * 33]),
        "timeout": SECONDS,
    },
    MooncakeOptions: {
        "timeout": SECONDS,
        "pause": SECONDS,
        "namespace": NAME,
        "buffer": sizes(67_239_936, 2**40),
        "protocol": ("must be tcp or rdma", ["tcp", "rdma"], ["", "udp"]),
        "hostname": TEXT,
        "metadata": TEXT,
        "segment": sizes(0, 2**40),
        "devices": TEXT,
    },
    RedisOptions: {
        "cluster": FLAG,
        "nodes": TEXT,
        "namespace": NAME,
        "ttl": SECONDS,
        "timeout": SECONDS,
        "max_value_bytes": sizes(1, 2**29),
        "connections": whole(1, 16),
        "pause": SECONDS,
        "ca": TEXT,
        "cert": TEXT,
        "key": TEXT,
    },
    S3Options: {
        "timeout": SECONDS,
        "max_value_bytes": sizes(1, 5 * 2**30 - 64),
        "connections": whole(1, 256),
        "pause": SECONDS,
        "endpoint": ("must begin with https:// or http://", ["", "http://h", "https://h"], ["ftp://h"]),
        "region": TEXT,
        "anonymous": FLAG,
    },
    CompressionOptions: {"compress": CODEC, "dtype": DTYPE},
}


@pytest.mark.parametrize("options", RULES)
def test_given_a_setting_then_its_rule_says_what_is_just_allowed_and_what_is_not(options: Any) -> None:
    kinds: dict[str, Kind] = {each.name: each.metadata["kind"] for each in fields(options) if "kind" in each.metadata}
    assert {name: kind.rule for name, kind in kinds.items()} == {name: rule[0] for name, rule in RULES[options].items()}
    for name, (_, right, wrong) in RULES[options].items():
        for value in right:
            kinds[name].check(value)
        for value in wrong:
            with pytest.raises((ValueError, TypeError, AttributeError, InvalidArgumentError)):
                pytest.fail(f"{name}={kinds[name].check(value)!r} is taken")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("disk:d", (0, 4, True, False, 1.0)),
        ("disk:d?bytes=5MB&threads=7&direct=no&read_only=ON&timeout=2.5", (5 * 2**20, 7, False, True, 2.5)),
        ("disk:d?bytes=&threads=&direct=&read_only=&timeout=", (0, 4, True, False, 1.0)),  # empty: the default
        ("d?direct=0&read_only=1", (0, 4, False, True, 1.0)),
        ("d?direct=false&read_only=True", (0, 4, False, True, 1.0)),
        ("d?direct=off&read_only=yes", (0, 4, False, True, 1.0)),
    ],
)
def test_given_an_address_then_its_options_are_read_or_have_their_defaults(address: str, found: Any) -> None:
    assert tuple(read_options(DiskOptions, TierURL.local(address)).values()) == found


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("threads=x", "threads='x' of disk:d must be a whole number from 1 to 64"),
        ("threads=65", "threads='65' of disk:d must be a whole number from 1 to 64"),
        ("direct=maybe", "direct='maybe' of disk:d must be true or false"),
        ("timeout=nan", "timeout='nan' of disk:d must be a number of seconds from 0.001 to 1e+08"),
        ("color=red", "disk:d has no option 'color'; it has bytes, threads, direct, read_only, timeout"),
        ("threads=1&threads=2", "an option stands twice in the address disk:d"),
    ],
)
def test_given_a_wrong_option_of_an_address_then_the_error_says_exactly_this(query: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_options(DiskOptions, TierURL.local(f"disk:d?{query}"))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("text", "parts", "shown"),
    [
        ("redis://host", ("redis", "host", None, "", None, None, {}), "redis://host"),
        (
            "rediss://us%40er:pa%3Ass@host:7/a%20b?x=1&y=",
            ("rediss", "host", 7, "/a b", "us@er", "pa:ss", {"x": "1", "y": ""}),
            "rediss://host:7/a b",
        ),
        ("redis://:secret@[::1]:7", ("redis", "::1", 7, "", None, "secret", {}), "redis://[::1]:7"),
        ("redis://user:@host:0", ("redis", "host", 0, "", "user", "", {}), "redis://host:0"),
    ],
)
def test_given_an_address_then_it_is_taken_apart_and_shown_without_what_is_secret(
    text: str, parts: Any, shown: str
) -> None:
    url = TierURL.parse(text)
    assert (url.scheme, url.host, url.port, url.path, url.user, url.password, url.options) == parts
    assert url.shown == shown
    assert "secret" not in repr(url)


@pytest.mark.parametrize("text", ["redis://host:65536", "redis://host:x", "redis://[::1"])
def test_given_an_address_with_a_wrong_port_then_it_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="with a port up to 65535, and this one is not"):
        TierURL.parse(text)


@pytest.mark.parametrize("text", ["redis://", "host:80", "//host", "redis:///path"])
def test_given_an_address_without_a_scheme_or_a_host_then_it_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"needs a scheme and a host, such as redis://127.*; this one "):
        TierURL.parse(text)


def test_given_a_size_or_a_count_as_text_then_it_is_read_under_its_name() -> None:
    assert (size(1).read("2KiB", "bytes"), size(0).read(0, "bytes"), count(1, 8).read("8", "n")) == (2048, 0, 8)
    with pytest.raises(InvalidArgumentError, match="bytes of x"):
        size(1).read("much", "bytes of x")
