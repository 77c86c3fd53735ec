"""What callers get who leave an option out, and the limits that they meet. Each is a promise: whoever changes one writes the
files of `defaults/` again (`python tests/test_defaults.py`) and says so."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

PROMISED = Path(__file__).with_name("defaults")
SOURCE = Path(__file__).parent.parent / "src" / "kvpool"
PUBLIC = {
    "library": ("kvpool", "kvpool.replay", "kvpool.scheduling", "kvpool.tiers", "kvpool.cluster", "kvpool.eviction"),
    "extras": ("kvpool.engine", "kvpool.storage", "kvpool.attention"),
}
FOLDERS = {
    "library": (
        "config",
        "core",
        "eviction",
        "kinds",
        "manager",
        "pools",
        "prefix",
        "recording",
        "scheduling",
        "sequences",
    ),
    "extras": ("tiers", "engine", "storage", "cluster", "server"),  # some modules need what an extra brings
}


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


def constants(folder: str) -> Iterator[str]:
    """Public constants of all modules of a folder that are numbers."""
    for file in sorted((SOURCE / folder).rglob("*.py")):
        names = {target.id for target in _targets(ast.parse(file.read_bytes()))}
        chosen = sorted(name for name in names if name.isupper() and not name.startswith("_"))
        if chosen:
            name = ".".join(("kvpool", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
            module = importlib.import_module(name)
            for constant in chosen:
                if isinstance(value := getattr(module, constant), (int, float)):
                    yield f"{name}.{constant} = {shown(value)}"


def _targets(tree: ast.Module) -> Iterator[ast.Name]:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:  # several names may get their values together
            named = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (name for name in named if isinstance(name, ast.Name))


def options() -> Iterator[str]:
    """What every command of the command line does unless it is told."""
    import typer

    from kvpool.cli import COMMANDS, build_app

    def of(command: Any, words: str) -> Iterator[str]:
        for name in sorted(getattr(command, "commands", ())):
            yield from of(command.commands[name], f"{words} {name}")
        for parameter in command.params:
            yield f"{words}: {parameter.opts[0]} = {shown(parameter.default)}"

    for name in COMMANDS:
        application: Any = typer.main.get_command(build_app([name]))
        yield from of(application.commands[name], name)


def tier_settings() -> Iterator[str]:
    """What an engine uses where a setting of tiers is None."""
    from dataclasses import fields

    from kvpool.engine.settings import EngineSettings
    from kvpool.tiers import TierConfig

    of_engine = {each.name.removeprefix("tier_"): each.default for each in fields(EngineSettings)}
    for each in fields(TierConfig):
        if each.name in of_engine:
            yield f"kvpool.tiers.TierConfig: {each.name} means {shown(of_engine[each.name])}"


def found(part: str) -> list[str]:
    if part != "library":
        for needed in ("typer", "torch", "fastapi"):
            pytest.importorskip(needed)
    if part == "commands":
        return list(options())
    lines = [line for module in PUBLIC[part] for line in defaults(module)]
    lines += [line for folder in FOLDERS[part] for line in constants(folder)]
    return [*lines, *tier_settings()] if part == "library" else lines


@pytest.mark.parametrize("part", ["library", "extras", "commands"])
def test_every_default_is_the_promised_one(part: str) -> None:
    assert found(part) == (PROMISED / f"{part}.txt").read_text().splitlines()


if __name__ == "__main__":
    for each in sys.argv[1:] or ("library", "extras", "commands"):
        (PROMISED / f"{each}.txt").write_text("\n".join(found(each)) + "\n")
