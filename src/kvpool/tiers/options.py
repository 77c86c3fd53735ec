"""Settings and addresses of tiers as people write them: which values are allowed, and the parts of an address.

An address may hold a password, so errors and logs show it without one.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvpool.checks import show
from kvpool.config.layers import MAX_BYTES
from kvpool.errors import InvalidArgumentError
from kvpool.fields import Kind
from kvpool.terminal import parse_bytes

MAX_SECONDS = 1e8
MIN_SECONDS = 0.001
_NAMESPACE = set(string.ascii_letters + string.digits + "._-")
_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


# --- kinds of values -------------------------------------------------------------------------------------------------


def text(rule: str, is_right: Callable[[str], bool] = bool, *, is_secret: bool = False) -> Kind:
    """Text; by default any text that is not empty."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not is_right(value):
            raise ValueError
        return value

    return Kind(f"must {rule}", check, is_secret=is_secret)


def choice(*choices: str) -> Kind:
    """One of some words."""
    return text(f"be one of {', '.join(choices)}", lambda value: value in choices)


def count(low: int, high: int) -> Kind:
    """A whole number of [low, high]."""
    return Kind(
        f"must be a whole number from {low} to {high}",
        lambda value: _whole(value, low, high),
        lambda value, name: int(value),
    )


def size(low: int, high: int = MAX_BYTES) -> Kind:
    """A number of bytes of [low, high], also as text like 50GB."""
    rule = f"must be {low:,} to {high:,} bytes"
    if high == MAX_BYTES and low <= 1:
        rule = 'must be a size above 0, as 1048576 or "50GB"' if low else 'must be a size, as 0 or "8GB"'

    def check(value: Any) -> int:
        return _whole(parse_bytes(value, "size") if isinstance(value, str) else value, low, high)

    return Kind(rule, check, parse_bytes)


def seconds(high: float = MAX_SECONDS) -> Kind:
    """A time above 0."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not MIN_SECONDS <= value <= high:
            raise ValueError
        return float(value)

    rule = f"must be a number of seconds from {MIN_SECONDS:g} to {high:g}"
    return Kind(rule, check, lambda value, name: float(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _whole(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError
    return number


ANY_TEXT = text("be text", lambda value: True)
FLAG = Kind("must be true or false", _flag, lambda value, name: _FLAGS[value.lower()])
SECONDS = seconds()
NAMESPACE = text(
    "be 1 to 64 letters, digits, dots, dashes or underlines: it is a name",
    lambda value: 0 < len(value) <= 64 and set(value) <= _NAMESPACE,
)
"""The name that keeps values of one user of a store apart from those of others."""


# --- addresses -------------------------------------------------------------------------------------------------------


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
        """Takes an address apart."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise InvalidArgumentError(
                "the address of a tier is scheme://host:port/path?option=value with a port up to 65535, and this one is not"
            ) from None
        if not parts.scheme or not parts.hostname:
            lacking = (
                f"this one begins with '{parts.scheme}:' and has no host" if parts.scheme else "this one has no scheme"
            )
            raise InvalidArgumentError(
                f"the address of a tier needs a scheme and a host, such as redis://127.0.0.1:6379/0; {lacking}"
            )
        options = _options(parts.query, f"{parts.scheme}://{parts.hostname}")
        user = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password is not None else None
        return cls(parts.scheme, parts.hostname, port, unquote(parts.path), user, password, options)

    @classmethod
    def local(cls, text: str, scheme: str = "disk") -> TierURL:
        """Takes `disk:PATH?option=value` apart; the scheme may be missing."""
        path, _, query = text.removeprefix(f"{scheme}:").partition("?")
        if not path and scheme == "disk":
            raise InvalidArgumentError("the address of a disk tier needs a directory, such as disk:cache?bytes=50GB")
        return cls(scheme, "", None, path, None, None, _options(query, f"{scheme}:{path}"))

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


def option(kind: Kind, default: Any) -> Any:
    """A field of a dataclass that the options of an address set, under the field's name."""
    return field(default=default, metadata={"kind": kind})


def option_kinds(cls: Any) -> dict[str, Kind]:
    """The options that such a dataclass has."""
    return {each.name: each.metadata["kind"] for each in fields(cls) if "kind" in each.metadata}


def read_options(cls: Any, url: TierURL) -> dict[str, Any]:
    """The options of an address by the fields of a dataclass; those that are not given have its defaults.

    >>> @dataclass
    ... class Example:
    ...     ttl: float = option(SECONDS, 1.0)
    ...     cluster: bool = option(FLAG, False)
    >>> read_options(Example, TierURL.parse("redis://host?ttl=60"))
    {'ttl': 60.0, 'cluster': False}
    """
    kinds = option_kinds(cls)
    for name in url.options:
        if name not in kinds:
            raise InvalidArgumentError(f"{url.shown} has no option {show(name)}; it has {', '.join(kinds)}")
    found = {}
    for each in fields(cls):
        if each.name not in kinds:
            continue
        kind, given = kinds[each.name], url.options.get(each.name)
        if given is None or (not given and kind.parse is not None):
            found[each.name] = each.default
            continue
        try:
            found[each.name] = kind.read(given, f"{each.name} of {url.shown}")
        except InvalidArgumentError:
            raise
        except (ValueError, TypeError, KeyError):
            raise InvalidArgumentError(f"{each.name}={show(given)} of {url.shown} {kind.rule}") from None
    return found
