"""What the address of a Redis tier says, read and checked. Its password is shown nowhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvpool.config.layers import show
from kvpool.errors import InvalidArgumentError
from kvpool.plainfile import read_plain
from kvpool.tiers.contract import CALL_TIMEOUT
from kvpool.tiers.remote.breaker import FIRST_PAUSE
from kvpool.tiers.url import MAX_SECONDS, Options, TierURL, check_namespace

DEFAULT_PORT = 6379
MAX_VALUE_BYTES = 512 << 20  # the longest string that Redis takes


@dataclass(frozen=True)
class RedisOptions:
    """An address, part by part."""

    seeds: tuple[tuple[str, int], ...]
    database: int
    cluster: bool
    namespace: str
    ttl: float | None
    timeout: float
    max_value_bytes: int
    connections: int
    pause: float
    tls: bool
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    ca: bytes | None = field(repr=False)
    cert: bytes | None = field(repr=False)
    key: bytes | None = field(repr=False)

    @classmethod
    def of(cls, url: TierURL) -> RedisOptions:
        """Reads the parts of an address; raises for the first that is wrong."""
        if url.user is not None and url.password is None:
            raise InvalidArgumentError(f"{url.shown}: a user needs a password, redis://user:password@host")
        options = Options(url)
        cluster = options.flag("cluster")
        seeds = [(url.host, url.port or DEFAULT_PORT)]
        seeds += [_address(text, url) for text in options.text("nodes", "").split(",") if text]
        if len(seeds) > 1 and not cluster:
            raise InvalidArgumentError(f"{url.shown}: nodes= names more nodes of a cluster, so it needs cluster=1")
        files = {name: _file(options.text(name, ""), name, url) for name in ("ca", "cert", "key")}
        if any(files.values()) and url.scheme != "rediss":
            raise InvalidArgumentError(f"{url.shown}: ca, cert and key are for TLS, so write rediss:// for redis://")
        if (files["cert"] is None) != (files["key"] is None):
            raise InvalidArgumentError(f"{url.shown}: cert and key belong together, one of them is missing")
        found = cls(
            seeds=tuple(dict.fromkeys(seeds)),
            database=_database(url, cluster),
            cluster=cluster,
            namespace=check_namespace(options.text("namespace", "default"), url),
            ttl=options.number("ttl", None, low=0.001, high=MAX_SECONDS),
            timeout=options.seconds("timeout", CALL_TIMEOUT),
            max_value_bytes=options.integer("max_value_bytes", MAX_VALUE_BYTES, low=1, high=MAX_VALUE_BYTES),
            connections=options.integer("connections", 2, low=1, high=16),
            pause=options.seconds("pause", FIRST_PAUSE),
            tls=url.scheme == "rediss",
            user=url.user,
            password=url.password,
            **files,
        )
        options.finish()
        return found


def _address(text: str, url: TierURL) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"nodes={show(text)} of {url.shown} must be host:port, several divided by commas")
    return host.strip("[]"), int(port)


def _database(url: TierURL, cluster: bool) -> int:
    text = url.path.strip("/")
    if text and not (text.isdigit() and int(text) < 2**31):
        raise InvalidArgumentError(f"the path of {url.shown} is the number of a database, got {show(text)}")
    if cluster and text not in ("", "0"):
        raise InvalidArgumentError(f"{url.shown}: a cluster has database 0 only; use namespace= to keep values apart")
    return int(text or 0)


def _file(path: str, name: str, url: TierURL) -> bytes | None:
    if not path:
        return None
    try:
        return read_plain(Path(path))
    except OSError as error:
        raise InvalidArgumentError(f"{name}={show(path)} of {url.shown} cannot be read: {error.strerror}") from None
