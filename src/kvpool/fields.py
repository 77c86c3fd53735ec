"""Settings as fields of a dataclass, each defined once: keys of files, options of commands and their help follow from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from kvpool.checks import show
from kvpool.errors import ConfigError
from kvpool.removed import instead_of


class Kind(NamedTuple):
    """The kind of a setting: `check` returns the value to use, or raises for a wrong one. `rule` is the end of the error.

    `parse` makes a value of a text; it also gets the name of the setting, for errors. None: the value is text.
    """

    rule: str
    check: Callable[[Any], Any]
    parse: Callable[[str, str], Any] | None = None
    is_secret: bool = False
    type: type = str  # of an option of commands

    def read(self, value: Any, name: str = "size") -> Any:
        """Checks a value that may also be written as text."""
        if isinstance(value, str) and self.parse is not None:
            value = self.parse(value, name)
        return self.check(value)


def setting(
    default: Any,
    help: str = "",
    kind: Any = str,
    *,
    option: str = "",
    key: str = "",
    flag: str = "",
    variable: str | None = None,
    low: int | None = None,
    high: int | None = None,
    in_address: str = "",
) -> Any:
    """A setting that files have, and commands if there is a `help`.

    `kind` is a type, or has one as `type`, checks values by itself, and may be a secret, which `repr` leaves out. `option`
    is the setting's name as an option and `key` its name in a file, where they differ from the field's. `flag` is how the
    option is written, where that differs from its name; `variable` gives it from the environment. `in_address` is its
    name in the address of its tier. The default `dict` is an empty one.
    """
    shown = {
        "help": help,
        "kind": kind,
        "option": option,
        "key": key,
        "flag": flag,
        "variable": variable,
        "low": low,
        "high": high,
        "in_address": in_address,
    }
    made = {"default_factory": default} if default is dict else {"default": default}
    return field(**made, repr=not getattr(kind, "is_secret", False), metadata=shown)


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
            kind = getattr(about["kind"], "type", about["kind"])
            kind = list[str] if kind is list else kind
            flags = (about["flag"],) if about["flag"] else ()
            shown = typer.Option(
                *flags, help=about["help"], envvar=about["variable"], min=about["low"], max=about["high"]
            )
            found.append((option, Annotated[kind | None, shown], None))
    return make_dataclass(name, found, bases=bases, frozen=True)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a command. Parameters that are dataclasses become one option per field."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if group := groups.get(parameter.name):
            of_group = inspect.signature(group, eval_str=True).parameters.values()
            parameters += (option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in of_group)
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    def run(**values: Any) -> None:
        made = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        function(**values, **made)

    run.__doc__ = function.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


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


class Given(NamedTuple):
    """A value, and the name under which it was given: a keyword, a key of a file, a variable or an option."""

    value: Any
    name: str
    is_keyword: bool = False

    def __str__(self) -> str:
        return f"{self.name}={show(self.value)}" if self.is_keyword else f"{self.name} = {show(self.value)}"

    def checked(self, kind: Kind) -> Any:
        """The value to use; raises `ConfigError` for a wrong one. Only what is no keyword may be text for a number."""
        try:
            return kind.check(self.value) if self.is_keyword else kind.read(self.value)
        except Exception:  # an object of the caller may raise anything
            if kind.is_secret:
                problem = f"{self.name} {kind.rule}"
            elif self.is_keyword and kind.parse is None:
                problem = f"{self.name} {kind.rule}, got {show(self.value)}"
            else:
                problem = f"{self} {kind.rule}"
            raise ConfigError(problem) from None


def given_in(path: Path, section: str, table: Mapping[str, Any], cls: Any) -> dict[str, Given]:
    """What a section of a file gives of a dataclass of settings; an unknown key raises `ConfigError`."""
    known = [each.name for each in fields(cls)]
    for name in table:
        if name not in known:
            raise ConfigError(f"{path}: [{section}] has no key {show(name)}; it has {', '.join(known)}")
    return {name: Given(value, f"{path}: {section}.{name}") for name, value in table.items()}
