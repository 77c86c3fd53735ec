"""What docs/security.md promises: the tests that it names exist, and no code of the package runs what it reads."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "kvpool"

# Modules that make objects, code or commands of the bytes that they are given.
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "codeop", "pty", "runpy"}
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "torch.load", "torch.jit.load"),
    *("numpy.load", "np.load", "builtins.eval", "builtins.exec", "builtins.compile"),
}
METHODS = {"recv_pyobj", "send_pyobj"}  # pickles over ZeroMQ
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}  # that may only be a plain False
PROCESSES = {"subprocess", "multiprocessing"}  # modules that start programs, or send objects to processes as pickles
OS_PROCESSES = ("os.exec", "os.spawn", "os.posix_spawn")

# What is there on purpose: the file, what the scan finds in it, and why no data decides what runs.
EXCEPTIONS = {
    (
        "replay/runs.py",
        "import multiprocessing",
    ): "its pickles go to processes that it started, to nobody else",
    ("prove/checks.py", "import subprocess"): "for --restart-command",
    (
        "prove/checks.py",
        "shell=True",
    ): "--restart-command comes from the shell of who calls `kvpool prove`, and from nowhere else",
}


def findings(source: str) -> Iterator[str]:
    """What a module has that could run data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (f"import {name}" for name in names if name.partition(".")[0] in MODULES | PROCESSES)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            if module in MODULES | PROCESSES:
                yield f"import {module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in CALLS)
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "compile":
            yield "compile"  # a parameter may have that name, too
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in CALLS or name.startswith(OS_PROCESSES) or node.attr in METHODS:
                yield name
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS and ast.unparse(node.value) != "False":
            yield f"{node.arg}={ast.unparse(node.value)}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("def f(x):\n    import marshal", "import marshal"),
        ("eval(x)", "eval"),
        ("f = exec", "exec"),
        ("compile(x, y, z)", "compile"),
        ("yaml.load(x)", "yaml.load"),
        ("from yaml import load", "yaml.load"),
        ("os.system(x)", "os.system"),
        ("os.execv(x, y)", "os.execv"),
        ("run(x, shell=True)", "shell=True"),
        ("run(x, shell=y)", "shell=y"),
        ("np.load(x)", "np.load"),
        ("socket.recv_pyobj()", "socket.recv_pyobj"),
        ("torch.load(x)", "torch.load"),
    ],
)
def test_given_code_that_runs_data_then_the_scan_finds_it(source: str, found: str) -> None:
    assert found in findings(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "re.compile(x)", "client.exec(x)", "yaml.safe_load(x)", "run(x, shell=False)"]
)
def test_given_code_that_only_looks_alike_then_the_scan_leaves_it_alone(source: str) -> None:
    assert list(findings(source)) == []


def test_given_the_package_then_nothing_in_it_runs_data_but_what_is_listed_here() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), finding)
        for path in PACKAGE.rglob("*.py")
        for finding in findings(path.read_text(encoding="utf-8"))
    }
    assert found - set(EXCEPTIONS) == set()
    assert set(EXCEPTIONS) - found == set(), "these exceptions are not needed any more"


def test_given_the_promises_then_every_test_behind_them_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    assert [f"{file}::{test}" for file, test in named if test not in names_in(file)] == []


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Names of the tests in a file; none if there is no such file."""
    path = ROOT / file
    return frozenset(re.findall(r"^ *def (test_\w+)", path.read_text("utf-8"), re.MULTILINE) if path.exists() else ())


def test_given_the_promises_then_none_is_without_a_test() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    promised = page.partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in promised.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 20
    assert [row for row in rows if "::test_" not in row] == []
