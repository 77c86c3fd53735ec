"""Settings as fields of a dataclass, each defined once: keys of files, options of commands and their help follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from kvpool.checks import show
from kvpool.errors import ConfigError
from kvpool.removed import instead_of


def setting(
    default: Any,
    help: str = "",
    kind: type = str,
    *,
    option: str = "",
    key: str = "",
    flag: str = "",
    low: int | None = None,
    high: int | None = None,
) -> Any:
    """A setting that files have, and commands if there is a `help`.

    `option` is its name as an option and `key` its name in a file, where they differ from the field's; `flag` is how the
    option is written, where that differs from its name. The default `dict` is an empty one.
    """
    shown = {"help": help, "kind": kind, "option": option, "key": key, "flag": flag, "low": low, "high": high}
    return field(default_factory=default, metadata=shown) if default is dict else field(default=default, metadata=shown)


def settings_of(cls: Any) -> dict[str, Field[Any]]:
    """The settings of a dataclass, by their names as options."""
    return {each.metadata["option"] or each.name: each for each in fields(cls) if "kind" in each.metadata}


def kinds_of(cls: Any) -> dict[str, type]:
    """The keys that a section of a file has, with the types of their values."""
    kinds = {each.metadata["key"] or name: each.metadata["kind"] for name, each in settings_of(cls).items()}
    return {key: str if kind is Path else kind for key, kind in kinds.items()}


def options_of(cls: Any, name: str, bases: tuple[type, ...] = ()) -> Any:
    """A dataclass with an option of a command for each setting that has a help. One that is not given is None."""
    import typer

    found = []
    for option, each in settings_of(cls).items():
        about = each.metadata
        if about["help"]:
            kind = list[str] if about["kind"] is list else about["kind"]
            flags = (about["flag"],) if about["flag"] else ()
            shown = typer.Option(*flags, help=about["help"], min=about["low"], max=about["high"])
            found.append((option, Annotated[kind | None, shown], None))
    return make_dataclass(name, found, bases=bases, frozen=True)


def checked(table: Any, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """A section of a file, which has only known keys with values of their types. Errors begin with `where` it stands."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a section, got {show(table)}")
    for key, value in table.items():
        if key not in kinds:
            if (words := instead_of([key])) is not None:
                raise ConfigError(f"{where}: {words}")
            raise ConfigError(f"{where} has no key {show(key)}; it has {', '.join(kinds)}")
        kind = kinds[key]
        if kind is dict and not isinstance(value, dict):
            raise ConfigError(f"{where[:-1]}.{key}] must be a section, got {show(value)}")
        is_bool = isinstance(value, bool)
        if not isinstance(value, (int, float) if kind is float else kind) or is_bool != (kind is bool):
            raise ConfigError(f"{where}: {key} must be of type {kind.__name__}, got {show(value)}")
    return dict(table)
