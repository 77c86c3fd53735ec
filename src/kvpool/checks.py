"""Checks of what users give. Every check takes the value first, then the name that its error says, then the bounds.

`check_...` is for settings and raises `ConfigError` unless told otherwise. `as_...` is for arguments of calls, raises
`InvalidArgumentError` and returns the plain Python value. Arrays and token ids have theirs in `kvpool.pools.arrays`.
"""

from __future__ import annotations

import ipaddress
import math
import operator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError


def show(value: object) -> str:
    """`repr`, bounded: error messages must survive an integer of a million digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{'-' if value < 0 else ''}(an integer of {value.bit_length()} bits)"
    try:
        text = repr(value)
    except Exception:  # such an integer inside a container, containers inside each other, an object that cannot tell
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 120 else f"{text[:117]}..."


def check_int(value: object, name: str, low: int, high: int, error: type[KVPoolError] = ConfigError) -> int:
    """`value` as an int in [low, high]; bool and float are refused, numpy integers are welcome."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except Exception:  # TypeError, mostly; an object's own __index__ may raise anything
        raise error(f"{name}={show(value)} must be an integer, not {type(value).__name__}") from None
    if not low <= number <= high:
        limit = f"at least {low}" if number < low else f"at most {high}"
        raise error(f"{name}={show(number)} must be {limit}")
    return number


def check_number(value: object, name: str, expected: str, error: type[KVPoolError] = ConfigError) -> float:
    """`value` as a finite float; `expected` says in the error what would be right."""
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer above every float
        pass
    raise error(f"{name}={show(value)} must be {expected}")


def check_bool(value: object, name: str) -> bool:
    """`value` if it is True or False: 0, 1, "yes" and None are refused."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={show(value)} must be True or False")
    return value


def check_seconds(value: object, name: str) -> None:
    """ConfigError unless `value` is a time that passes: a finite number over 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number of seconds over 0, got {show(value)}")


def as_flag(value: Any, name: str) -> bool:
    """`value` as a bool; nothing else passes for one, since arrays and others have no truth value."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InvalidArgumentError(f"{name} must be True or False, got {show(value)}")


def as_count(value: Any, name: str, minimum: int = 0, maximum: int = 2**40) -> int:
    """`value` as an int within bounds; bools, floats and out-of-range numbers are refused by name."""
    if type(value) is not int:
        if isinstance(value, np.integer):
            value = int(value)
        else:
            raise InvalidArgumentError(f"{name} must be an int, got {show(value)} of type {type(value).__name__}")
    if not minimum <= value <= maximum:
        raise InvalidArgumentError(f"{name} must lie in {minimum}..{maximum}, got {show(value)}")
    return int(value)


def as_duration(value: Any, name: str) -> float | None:
    """`value` as a number of seconds over 0, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and float(value) > 0):
        raise InvalidArgumentError(f"{name} must be a positive number of seconds or None, got {show(value)}")
    return None if value is None else float(value)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is local to this machine, so that no other can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local_name(host: str) -> bool:
    """Whether a `Host` header has a name that only leads to this machine.

    The name of a foreign page may be made to lead here (DNS rebinding). Then the browser would let that page read answers.
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)
