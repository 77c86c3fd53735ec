"""The shape of the package: what importing it pulls in, which layer may import which, that each module has a docstring.

The layer rules read the source, so they also see imports inside functions and under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
MODULE_FILES = sorted((SRC / "kvpool").rglob("*.py"))

# Dependencies point one way: a room may import those before it. The rooms of bytes stand behind those of the control plane
# that they use, and the control plane must not know them. Pools of transformers (`hf`) must not know the engine, nor the
# engine the tools that analyse it.
LAYERS = (
    *(
        "errors",
        "checks",
        "prometheus",
        "quiet",
        "files",
        "removed",
        "fields",
        "terminal",
        "scope",
        "told",
        "config",
        "stats",
    ),
    *(
        "eviction",
        "events",
        "pools",
        "core",
        "prefix",
        "kinds",
        "sequences",
        "version",
        "manager",
        "recording",
        "scheduling",
    ),
    *("kernels", "storage", "attention", "tiers", "testing", "view", "web", "cluster"),
    *("model", "hf", "engine", "server", "prove", "integrations", "replay", "compat", "cli", "__main__"),
)
CONTROL_PLANE = LAYERS[: LAYERS.index("kernels")]
BYTES = ("kernels", "storage", "attention")

# The modules and packages directly under kvpool; any other name imported from the root is one it re-exports.
SIBLINGS = {module_path.stem for module_path in (SRC / "kvpool").iterdir()}

# Everything an extra brings. Trying to import one of these counts, even inside try/except.
HEAVY = [
    *("torch", "triton", "flashinfer", "transformers", "safetensors"),
    *("xxhash", "lz4", "glide_sync", "obstore", "mooncake", "vllm", "sglang", "llama_cpp"),
    *("msgspec", "zmq", "prometheus_client", "fastapi", "uvicorn", "llguidance", "typer", "rich", "ray"),
]

# Runs in a fresh interpreter: refuses and records every attempt to import a heavy module, then prints the record.
PROBE = """
import importlib, json, sys

heavy, modules = json.loads(sys.argv[1])
attempts = []

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            attempts.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Recorder())
for module in modules:
    importlib.import_module(module)
print(json.dumps(attempts))
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Module(NamedTuple):
    """What the rules ask of a module's source."""

    name: str
    has_docstring: bool
    imports: list[tuple[int, str]]


@functools.cache
def modules() -> list[Module]:
    """Every module of the package, parsed once for all rules."""
    found = []
    for path in MODULE_FILES:
        tree, name = ast.parse(path.read_text(encoding="utf-8")), module_name(path)
        imports = list(imported_names(tree, name, is_package=path.name == "__init__.py"))
        found.append(Module(name, bool(ast.get_docstring(tree)), imports))
    return found


def room_of(name: str) -> str:
    """The part of the package that a dotted name belongs to; of the root itself, and of what is no part of it, nothing."""
    top, _, rest = name.partition(".")
    return rest.partition(".")[0] if top == "kvpool" else ""


def is_control_plane(name: str) -> bool:
    return room_of(name) in (*CONTROL_PLANE, "", "cli", "compat")


def imported_names(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import; `from a import b` gives `a.b`, be it a module or a name in one."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def upward_imports(module: str, imports: list[tuple[int, str]]) -> list[str]:
    """Those of a module's imports that reach a higher layer, or the root package, which holds the names of all layers."""
    own = room_of(module)
    if not own:
        return []
    above = LAYERS[LAYERS.index(own) + 1 :]
    found = []
    for line, name in imports:
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "kvpool" and (target in above or target not in {*LAYERS, *SIBLINGS}):
            found.append(f"{module}:{line} imports {name}")
    return found


def test_given_a_fresh_interpreter_when_the_control_plane_is_imported_then_no_optional_package_is_asked_for() -> None:
    names = [name for name in map(module_name, MODULE_FILES) if is_control_plane(name)]
    result = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([HEAVY, names])],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []


def test_given_a_module_then_it_imports_no_higher_layer() -> None:
    assert [found for module in modules() for found in upward_imports(module.name, module.imports)] == []


def test_given_the_package_then_every_module_of_it_has_a_layer() -> None:
    found = {module_name(path).split(".")[1] for path in MODULE_FILES if module_name(path) != "kvpool"}
    assert sorted(found) == sorted(LAYERS)


def import_graph() -> dict[str, set[str]]:
    """Which module imports which, also inside functions and for types alone. Packages count as their `__init__`."""
    names = {module.name for module in modules()}
    graph: dict[str, set[str]] = {}
    for module in modules():
        used = graph.setdefault(module.name, set())
        for _, name in module.imports:
            used.update({name, name.rpartition(".")[0]} & names - {module.name})
    return graph


def without_circles(graph: dict[str, set[str]]) -> list[str]:
    """What is left of a graph when everything that leads to no circle is taken out."""
    graph = dict(graph)
    while leaves := [name for name, used in graph.items() if not used & graph.keys()]:
        for name in leaves:
            del graph[name]
    return sorted(graph)


def test_given_the_package_then_no_modules_import_each_other_in_a_circle() -> None:
    assert without_circles({name: used for name, used in import_graph().items() if name != "kvpool"}) == []


def test_given_a_room_then_its_inner_rooms_do_not_import_each_other_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {module_name(path): set() for path in MODULE_FILES if path.name == "__init__.py"}
    for module, used in import_graph().items():
        for target in used:
            own, other = module.split("."), target.split(".")
            depth = next((at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if depth is not None:  # the two rooms in which their paths part
                pair = ".".join(own[: depth + 1]), ".".join(other[: depth + 1])
                if rooms.keys() >= set(pair):
                    rooms[pair[0]].add(pair[1])
    assert without_circles(rooms) == []


def test_given_a_module_of_the_control_plane_then_it_imports_none_that_holds_bytes() -> None:
    plane = [module for module in modules() if room_of(module.name) in CONTROL_PLANE]
    assert plane
    imports = [(f"{module.name}:{line}", name) for module in plane for line, name in module.imports]
    assert [found for found in imports if room_of(found[1]) in BYTES] == []


def test_given_a_module_then_its_docstring_says_what_it_is_for() -> None:
    assert [module.name for module in modules() if not module.has_docstring] == []


def upward_in_pools(source: str) -> list[str]:
    """What the rule says of a module of `pools/` with this source."""
    module = "kvpool.pools.pool"
    return upward_imports(module, list(imported_names(ast.parse(source), module, is_package=False)))


@pytest.mark.parametrize(
    "source",
    [
        "import kvpool.manager",
        "from kvpool.scheduling import Scheduler",
        "from kvpool import engine",
        "from kvpool import KVCacheManager",
        "import kvpool",
        "from ..manager import KVCacheManager",
        "from .. import engine",
        "from kvpool.storage import BlockStore",
        "def f():\n    from kvpool.manager import KVCacheManager",
    ],
)
def test_given_an_upward_import_in_blocks_then_it_is_found(source: str) -> None:
    assert len(upward_in_pools(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from kvpool.errors import ConfigError",
        "from ..errors import KVPoolError",
        "from . import arrays",
        "from kvpool.eviction import LRUPolicy",
    ],
)
def test_given_a_downward_import_in_blocks_then_it_is_allowed(source: str) -> None:
    assert upward_in_pools(source) == []
