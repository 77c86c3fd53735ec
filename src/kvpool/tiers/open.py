"""open_tier: a tier by its address."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.config.layers import show
from kvpool.errors import InvalidArgumentError
from kvpool.tiers.contract import KeyedTier
from kvpool.tiers.remote.redis import RedisTier
from kvpool.tiers.remote.s3 import S3Tier

_OPENERS: dict[str, Callable[[str], KeyedTier]] = {"redis": RedisTier, "rediss": RedisTier, "s3": S3Tier}


def open_tier(address: str) -> KeyedTier:
    """The tier at an address, by its scheme: `redis://…`, `rediss://…` (`RedisTier` has their options), `s3://…` (`S3Tier`).

    An address that is wrong raises `InvalidArgumentError` and names the part; a package that is missing raises `ConfigError`
    and says what to install. A server that does not answer raises nothing: the tier says so in `stats().problem`, finds
    nothing, and works as soon as the server does.
    """
    if not isinstance(address, str):
        raise InvalidArgumentError(f"the address of a tier is a string, got {show(address)}")
    scheme, divider, _ = address.partition(":")
    if not divider or scheme not in _OPENERS:
        known = ", ".join(f"{name}://" for name in _OPENERS)
        named = f"begins with {show(scheme)}" if divider else "has no scheme"
        raise InvalidArgumentError(f"the address of a tier begins with one of {known}; this one {named}")
    return _OPENERS[scheme](address)
