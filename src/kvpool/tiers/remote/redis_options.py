"""What the address of a Redis tier says, read and checked. Its password is shown nowhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvpool.config.layers import show
from kvpool.errors import InvalidArgumentError
from kvpool.plainfile import read_plain
from kvpool.tiers.contract import CALL_TIMEOUT
from kvpool.tiers.options import ANY_TEXT, FLAG, NAMESPACE, SECONDS, TierURL, count, option, read_options, size
from kvpool.tiers.remote.breaker import FIRST_PAUSE

DEFAULT_PORT = 6379
MAX_VALUE_BYTES = 512 << 20  # the longest string that Redis takes


@dataclass(frozen=True)
class RedisOptions:
    """An address, part by part. `ca`, `cert` and `key` are paths of files in the address, and their bytes here."""

    seeds: tuple[tuple[str, int], ...]
    database: int
    tls: bool
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    cluster: bool = option(FLAG, False)
    nodes: str = option(ANY_TEXT, "")
    namespace: str = option(NAMESPACE, "default")
    ttl: float | None = option(SECONDS, None)
    timeout: float = option(SECONDS, CALL_TIMEOUT)
    max_value_bytes: int = option(size(1, MAX_VALUE_BYTES), MAX_VALUE_BYTES)
    connections: int = option(count(1, 16), 2)
    pause: float = option(SECONDS, FIRST_PAUSE)
    ca: bytes | None = option(ANY_TEXT, None)
    cert: bytes | None = option(ANY_TEXT, None)
    key: bytes | None = option(ANY_TEXT, None)

    @classmethod
    def of(cls, url: TierURL) -> RedisOptions:
        """Reads the parts of an address; raises for the first that is wrong."""
        if url.user is not None and url.password is None:
            raise InvalidArgumentError(f"{url.shown}: a user needs a password, redis://user:password@host")
        found = read_options(cls, url)
        seeds = [(url.host, url.port or DEFAULT_PORT)]
        seeds += [_address(text, url) for text in found["nodes"].split(",") if text]
        if len(seeds) > 1 and not found["cluster"]:
            raise InvalidArgumentError(f"{url.shown}: nodes= names more nodes of a cluster, so it needs cluster=1")
        found |= {name: _file(found[name], name, url) for name in ("ca", "cert", "key")}
        if (found["ca"] or found["cert"] or found["key"]) and url.scheme != "rediss":
            raise InvalidArgumentError(f"{url.shown}: ca, cert and key are for TLS, so write rediss:// for redis://")
        if (found["cert"] is None) != (found["key"] is None):
            raise InvalidArgumentError(f"{url.shown}: cert and key belong together, one of them is missing")
        return cls(
            tuple(dict.fromkeys(seeds)),
            _database(url, found["cluster"]),
            url.scheme == "rediss",
            url.user,
            url.password,
            **found,
        )


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


def _file(path: str | None, name: str, url: TierURL) -> bytes | None:
    if not path:
        return None
    try:
        return read_plain(Path(path))
    except OSError as error:
        raise InvalidArgumentError(f"{name}={show(path)} of {url.shown} cannot be read: {error.strerror}") from None
