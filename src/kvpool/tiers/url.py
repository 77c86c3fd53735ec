"""Addresses of tiers as people write them: read with care, and never shown with a password in them."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from kvpool.config.layers import show
from kvpool.errors import InvalidArgumentError

MAX_SECONDS = 1e8
_NAMESPACE = set(string.ascii_letters + string.digits + "._-")
TRUE = {"1", "true", "yes", "on"}
FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class TierURL:
    """The parts of `scheme://user:password@host:port/path?option=value`."""

    scheme: str
    host: str
    port: int | None
    path: str
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    options: Mapping[str, str] = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> TierURL:
        """Takes an address apart. Errors never repeat it: it may hold a password."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise InvalidArgumentError(
                "the address of a tier is scheme://host:port/path?option=value with a port up to 65535, and this one is not"
            ) from None
        if not parts.scheme or not parts.hostname:
            raise InvalidArgumentError(
                "the address of a tier needs a scheme and a host, such as redis://127.0.0.1:6379/0"
            )
        options = _options(parts.query, f"{parts.scheme}://{parts.hostname}")
        user = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password is not None else None
        return cls(parts.scheme, parts.hostname, port, unquote(parts.path), user, password, options)

    @classmethod
    def local(cls, text: str) -> TierURL:
        """Takes `disk:PATH?option=value` apart; the scheme may be missing."""
        path, _, query = text.removeprefix("disk:").partition("?")
        if not path:
            raise InvalidArgumentError("the address of a disk tier needs a directory, such as disk:cache?bytes=50GB")
        return cls("disk", "", None, path, None, None, _options(query, f"disk:{path}"))

    @property
    def shown(self) -> str:
        """The address for logs and statistics: no user, no password, no options."""
        if not self.host:
            return f"{self.scheme}:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{'' if self.port is None else f':{self.port}'}{self.path}"


def _options(query: str, shown: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise InvalidArgumentError(f"an option stands twice in the address {shown}")
    return options


class Options:
    """The options of an address, each asked for once by name; what nobody asked for is refused.

    >>> options = Options(TierURL.parse("redis://host?ttl=60"))
    >>> options.seconds("ttl", 1.0), options.flag("cluster")
    (60.0, False)
    >>> options.finish()
    """

    def __init__(self, url: TierURL) -> None:
        self._left = dict(url.options)
        self._shown = url.shown
        self._known: list[str] = []

    def text(self, name: str, default: str) -> str:
        """An option as it stands."""
        self._known.append(name)
        return self._left.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """An option that is on or off."""
        value = self.text(name, "1" if default else "0").lower()
        if value not in TRUE | FALSE:
            raise self._wrong(name, value, "must be 1 or 0")
        return value in TRUE

    def number(self, name: str, default: float | None, *, low: float, high: float) -> float | None:
        """An option that is a number of [low, high]."""
        value = self.text(name, "")
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise self._wrong(name, value, f"must be a number from {low:g} to {high:g}")
        return number

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """An option that is a whole number of [low, high]."""
        number = self.number(name, default, low=low, high=high)
        assert number is not None
        if number != int(number):
            raise self._wrong(name, str(number), "must be a whole number")
        return int(number)

    def seconds(self, name: str, default: float) -> float:
        """An option that is a time above 0."""
        number = self.number(name, default, low=0.001, high=MAX_SECONDS)
        assert number is not None
        return number

    def finish(self) -> None:
        """Refuses options that nobody asked for."""
        for name in self._left:
            raise InvalidArgumentError(f"{self._shown} has no option {show(name)}; it has {', '.join(self._known)}")

    def _wrong(self, name: str, value: str, rule: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{name}={show(value)} of {self._shown} {rule}")


def check_namespace(text: str, url: TierURL) -> str:
    """The name that keeps values of one user of a store apart from those of others."""
    if not 0 < len(text) <= 64 or not set(text) <= _NAMESPACE:
        raise InvalidArgumentError(
            f"namespace={show(text)} of {url.shown} must be 1 to 64 letters, digits, dots, dashes or underlines"
        )
    return text
