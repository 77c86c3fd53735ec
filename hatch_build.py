"""Builds wheels with their C modules where a C compiler is found, and without them elsewhere: Python does the same.

`KVPOOL_COMPILE` decides: `auto` (the default) compiles if it can and says in one line if it cannot; `1` fails where it
cannot; `0` never compiles. Editable installs are never compiled: `tools/compile_c.py` is for checkouts.
"""

from __future__ import annotations

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
from setuptools import Extension, setup

threads = ["-pthread"] if os.name == "posix" else []
optimise = ["-O3"] if os.name == "posix" else ["/O2"]
options = dict(include_dirs=[numpy.get_include()], extra_compile_args=[*optimise, *threads], extra_link_args=threads)
modules = [
    Extension(source.removesuffix(".c").replace("/", "."), [source], optional=True, **options) for source in {sources!r}
]
setup(name="kvpool-compiled", ext_modules=modules)
"""


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts compiled modules beside their sources in the wheel."""

    def dependencies(self) -> list[str]:
        """What compiling needs, asked for only where it will be tried."""
        return list(self.config["compiler"]) if self._why_not() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles into a folder of its own and adds what came out to the wheel."""
        self._folder: Path | None = None
        if self.target_name != "wheel" or version == "editable":
            return
        problem, modules = self._why_not(), list[Path]()
        if problem is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kvpool-build-"))
            modules, problem = self._compile(self._folder)
        if problem is not None:
            if _wish() == "1":
                raise RuntimeError(f"KVPOOL_COMPILE=1, but {problem}")
            self.app.display_warning(f"kvpool's C modules are not installed ({problem}): it does the same, more slowly")
        for module in modules:
            build_data["force_include"][str(module)] = str(module.relative_to(self._folder / "compiled"))  # type: ignore[operator]
        if modules:
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

    def _compile(self, folder: Path) -> tuple[list[Path], str | None]:
        """Compiles all C modules; returns those that came out, and what went wrong, in one line."""
        source = Path(self.root, "src")
        for file in [*source.rglob("*.c"), *source.rglob("*.h")]:
            (folder / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / file.relative_to(source))
        sources = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.c"))
        (folder / "setup.py").write_text(SETUP.format(sources=sources), encoding="utf-8")
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "compiled", "--build-temp", "objects"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        built = [*(folder / "compiled").rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}")]
        if result.returncode == 0 and len(built) == len(sources):
            return built, None
        lines = (result.stdout + result.stderr).strip().splitlines() or ["no output"]
        return built, "compiling failed: " + next((line for line in lines if "error" in line.lower()), lines[-1])


def _wish() -> str:
    wish = os.environ.get("KVPOOL_COMPILE", "auto")
    if wish not in ("auto", "0", "1"):
        raise ValueError(f"KVPOOL_COMPILE is {wish!r}; it takes auto, 1 or 0")
    return wish
