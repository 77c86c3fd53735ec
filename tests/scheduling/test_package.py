"""The scheduler runs wherever the manager does: numpy, the standard library, and nothing above it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import kvpool.scheduling

FILES = sorted(Path(kvpool.scheduling.__file__).parent.rglob("*.py"))
BELOW = tuple(
    f"kvpool.{room}"
    for room in (
        *("checks", "config", "core", "errors", "eviction", "files", "kinds", "manager"),
        *("pools", "prefix", "scheduling", "scope", "sequences"),
    )
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_given_a_module_of_the_scheduler_then_it_imports_numpy_and_what_is_below_it_only(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    foreign = {name for name in imported if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}}
    assert [name for name in sorted(foreign) if not name.startswith(BELOW)] == []
