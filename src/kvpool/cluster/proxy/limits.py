"""How much clients may send to a proxy, and how long it waits: for them, and for servers that say nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvpool.config.layers import check_int, check_number
from kvpool.errors import ConfigError


@dataclass(frozen=True)
class ProxyLimits:
    """`body_bytes` and `send_seconds` are those of a server: the size of a body, and how long a client may keep the proxy
    waiting for a part of it, or with a part of an answer.

    A server that says nothing for `silence_seconds` in the middle of an answer is not waited for. One that answers nobody,
    not even whether it lives, for `lost_seconds` has lost its requests: they go elsewhere, or end with an error.
    """

    body_bytes: int = 4 << 20
    send_seconds: float = 30.0
    silence_seconds: float = 600.0
    lost_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_int("body_bytes", self.body_bytes, 1, 2**40)
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if not 0 < check_number(each.name, value, "seconds, more than 0") <= 1e9:
                raise ConfigError(f"{each.name}={value} must be seconds, more than 0")
