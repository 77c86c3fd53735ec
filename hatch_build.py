"""Builds wheels with a compiled control plane where a C compiler is found, and with the same files as Python elsewhere.

`KVPOOL_COMPILE` decides: `auto` (the default) compiles if it can and says in one line if it cannot; `1` fails where it
cannot; `0` never compiles. Editable installs are never compiled: their files change. See docs/decisions/0006.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SETUP = """
import os

import numpy
from mypyc.build import mypycify
from setuptools import Extension, setup

modules = mypycify({arguments!r}, opt_level="3", multi_file=False)
if os.name == "posix":  # what no other library calls can be called directly, and inlined
    for module in modules:
        module.extra_compile_args = [*module.extra_compile_args, "-fvisibility=hidden"]
threads = ["-pthread"] if os.name == "posix" else []
for source in {sources!r}:
    name = source.removesuffix(".c").replace("/", ".")
    arguments = dict(extra_compile_args=["-O3", *threads], extra_link_args=threads, optional=True)
    modules.append(Extension(name, [source], include_dirs=[numpy.get_include()], **arguments))
setup(name="kvpool-compiled", ext_modules=modules)
"""


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts compiled modules beside their sources in the wheel; Python prefers them when it imports."""

    def dependencies(self) -> list[str]:
        """What compiling needs, asked for only where it will be tried."""
        return list(self.config["compiler"]) if self._why_not() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles into a folder of its own and adds what came out to the wheel."""
        self._folder: Path | None = None
        if self.target_name != "wheel" or version == "editable":
            return
        problem = self._why_not()
        if problem is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kvpool-build-"))
            problem = self._compile(self._folder)
        if problem is not None:
            if _wish() == "1":
                raise RuntimeError(f"KVPOOL_COMPILE=1, but {problem}")
            self.app.display_warning(f"kvpool is installed uncompiled ({problem}): it does the same, more slowly")
            return
        assert self._folder is not None
        compiled = self._folder / "compiled"
        for module in compiled.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
            build_data["force_include"][str(module)] = str(module.relative_to(compiled))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the folder of the build."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _why_not(self) -> str | None:
        """Why compiling is not tried, if it is not."""
        if _wish() == "0":
            return "KVPOOL_COMPILE=0"
        if sys.implementation.name != "cpython":
            return f"{sys.implementation.name} is not CPython"
        compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
        if sys.platform != "win32" and not shutil.which(compiler) and not shutil.which("cc"):
            return "no C compiler was found"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "Python.h is missing; Debian has it in python3-dev"
        return None

    def _compile(self, folder: Path) -> str | None:
        """Compiles copies of the sources; returns what went wrong, in one line."""
        skip = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(Path(self.root, "src", "kvpool"), folder / "kvpool", ignore=skip)
        (folder / "kvpool" / "__init__.py").write_bytes(b"")  # what it offers is not compiled, and long to read: torch
        for name in self.config["compile"]:
            module = folder / name
            types = frozenset(self.config["unchecked"])
            module.write_bytes(without_types(module.read_bytes(), types, everywhere=name in self.config["border"]))
        arguments = ["--ignore-missing-imports", *self.config["compile"]]
        (folder / "setup.py").write_text(
            SETUP.format(arguments=arguments, sources=self.config["sources"]), encoding="utf-8"
        )
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "compiled", "--build-temp", "objects"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return None
        lines = (result.stdout + result.stderr).strip().splitlines() or ["no output"]
        return "compiling failed: " + next((line for line in lines if "error" in line.lower()), lines[-1])


def without_types(source: bytes, types: frozenset[str], everywhere: bool) -> bytes:
    """A module whose parameters have lost their types: all of them (`everywhere`), or those that name one of `types`.

    Compiled code refuses an argument of another type with a `TypeError` of its own. Where users call, the module itself
    checks what it is given, and its error names the value and the remedy. Results of `types` go unchecked as well.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    cuts: list[tuple[int, int]] = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_overload(function):
            given = function.args
            optional = [parameter for parameter in (given.vararg, given.kwarg) if parameter is not None]
            for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs, *optional):
                kind = parameter.annotation
                if kind is not None and (everywhere or types & _names(kind)):
                    begin = starts[parameter.lineno - 1] + parameter.col_offset + len(parameter.arg.encode())
                    cuts.append((begin, starts[kind.end_lineno - 1] + kind.end_col_offset))  # type: ignore[operator]
            result = function.returns
            if result is not None and types & _names(result):
                begin = source.rindex(b"->", 0, starts[result.lineno - 1] + result.col_offset)
                cuts.append((begin, starts[result.end_lineno - 1] + result.end_col_offset))  # type: ignore[operator]
    for begin, end in sorted(cuts, reverse=True):
        source = source[:begin] + source[end:]
    return source


def _is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it only declares a type; the function that follows it is the one that is called."""
    return any(isinstance(node, ast.Name) and node.id == "overload" for node in function.decorator_list)


def _names(annotation: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def _wish() -> str:
    wish = os.environ.get("KVPOOL_COMPILE", "auto")
    if wish not in ("auto", "0", "1"):
        raise ValueError(f"KVPOOL_COMPILE is {wish!r}; it takes auto, 1 or 0")
    return wish
