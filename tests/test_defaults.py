"""What callers get who leave an option out. A default is a promise: whoever changes one changes defaults.txt and says so."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from managers import signature

PROMISED = Path(__file__).with_name("defaults.txt")


def shown(value: Any) -> str:
    """A value as it can be compared in another process; of an object only its type."""
    is_plain = value is None or isinstance(value, (bool, int, float, str, bytes, tuple, enum.Enum))
    return repr(value) if is_plain else type(value).__name__


def functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions and methods of a package, and how its classes are made."""
    package = importlib.import_module(module)
    for name in sorted(package.__all__):
        thing = getattr(package, name)
        if not inspect.isclass(thing):
            yield f"{module}.{name}", thing
            continue
        for method in sorted(vars(thing)):
            found = getattr(thing, method)
            if method == "__init__":
                yield f"{module}.{name}", found
            elif not method.startswith("_") and inspect.isroutine(found):
                yield f"{module}.{name}.{method}", found


def defaults(module: str) -> Iterator[str]:
    for name, function in functions(module):
        try:
            parameters = signature(function).parameters.values()
        except (TypeError, ValueError, AttributeError):  # no function of ours
            continue
        for parameter in parameters:
            if parameter.default is not parameter.empty:
                yield f"{name}: {parameter.name} = {shown(parameter.default)}"


def test_every_default_of_the_public_interface_is_the_promised_one() -> None:
    modules = "kvpool", "kvpool.replay", "kvpool.scheduling", "kvpool.tiers"
    found = [line for module in modules for line in defaults(module)]
    assert found == PROMISED.read_text().splitlines()
