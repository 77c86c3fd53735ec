"""What public methods return has a public name: whoever annotates a variable with it imports it from a package, not a module.

This reads the sources, so it sees the packages that need torch, too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import kvpool

SRC = Path(__file__).resolve().parent.parent / "src"
OTHERS = ("kvpool.compat", "kvpool.integrations")  # what these have is named as other systems name it


class Definition(NamedTuple):
    """A class or function and the module that has it."""

    module: str
    name: str


@functools.cache
def tree_of(module: str) -> ast.Module | None:
    """The source of a module of ours."""
    path = SRC.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


@functools.cache
def names_of(module: str) -> dict[str, ast.stmt | str]:
    """What a module defines at its top, and where it imports the rest from."""
    tree = tree_of(module)
    names: dict[str, ast.stmt | str] = {}
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("kvpool"):
            names |= {alias.asname or alias.name: node.module for alias in node.names}
    for node in tree.body if tree is not None else ():
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = node
    return names


def definition(module: str, name: str) -> Definition | None:
    """Where a name comes from, through all re-exports; None if it is no class or function of ours."""
    found = names_of(module).get(name)
    if isinstance(found, str):
        return definition(found, name) if found != module else None
    return None if found is None else Definition(module, name)


def exported() -> set[Definition]:
    """Everything that a package lists in `__all__`."""
    found = set()
    for file in SRC.joinpath("kvpool").rglob("__init__.py"):
        module = ".".join(file.parent.relative_to(SRC).parts)
        for node in ast.walk(tree_of(module) or ast.Module([], [])):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = {text.value for text in ast.walk(node.value) if isinstance(text, ast.Constant)}
                found |= {definition(module, str(name)) for name in names}
    return {each for each in found if each is not None}


def members(of: Definition) -> Iterator[tuple[str, str, ast.expr]]:
    """Public methods and properties of a class, inherited ones too: the module, the name, the type that is returned."""
    node = names_of(of.module)[of.name]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.returns is not None:
            yield of.module, of.name, node.returns
        return
    assert isinstance(node, ast.ClassDef)
    for member in node.body:
        is_function = isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and member.returns is not None and not member.name.startswith("_"):
            yield of.module, f"{of.name}.{member.name}", member.returns
    for base in node.bases:
        parent = definition(of.module, ast.unparse(base).partition("[")[0])
        if parent is not None:
            yield from members(parent)


def named_in(annotation: ast.expr) -> Iterator[str]:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from named_in(ast.parse(node.value, mode="eval").body)


def test_given_the_public_packages_then_every_type_that_they_return_is_exported() -> None:
    public = exported()
    assert len(public) > 100
    missing = set()
    for each in public:
        if each.module.startswith(OTHERS):
            continue
        for module, member, annotation in members(each):
            for name in named_in(annotation):
                found = definition(module, name)
                if found is not None and found not in public:
                    missing.add((found.name, found.module, member))
    assert sorted(missing) == []


def test_given_the_root_then_it_has_what_engines_catch_and_write_down() -> None:
    wanted = {"CachedRun", "NeverFitsError", "Observer", "OutOfBlocksError", "Subscription", "TenantQuota"}
    assert wanted <= set(kvpool.__all__)
    assert all(hasattr(kvpool, name) for name in kvpool.__all__)


def test_given_the_reference_then_it_has_every_public_name_of_the_root() -> None:
    page = (SRC.parent / "docs" / "reference.md").read_text(encoding="utf-8")
    errors = {name for name in kvpool.__all__ if name.endswith("Error")}  # `kvpool.errors` is there as a whole
    named = set(re.findall(r"^::: kvpool\.(\w+)$", page, re.MULTILINE))
    assert set(kvpool.__all__) - errors - named == {"__version__", "compiled"}
