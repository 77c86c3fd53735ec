"""Names of settings, checked: a name that nobody knows is refused with the nearest known ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from kvpool.config import KVCacheConfig
from kvpool.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

CONFIG_SETTINGS = frozenset(field.name for field in fields(KVCacheConfig) if field.init)


def knows_settings(name: str, settings: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse keywords that are neither parameters of its own nor among `settings`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        own = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        known = sorted({*own, *settings})

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for given in kwargs:
                if given not in known:
                    nearest = get_close_matches(given, known, cutoff=0.5)
                    hint = f"the nearest: {', '.join(nearest)}" if nearest else f"it knows {', '.join(known)}"
                    raise ConfigError(f"{name} has no setting {given!r}; {hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def checked_settings(cls: C) -> C:
    """Makes a dataclass refuse unknown fields in the same way."""
    setattr(cls, "__init__", knows_settings(cls.__name__)(vars(cls)["__init__"]))  # noqa: B010 - mypy refuses the assignment
    return cls
