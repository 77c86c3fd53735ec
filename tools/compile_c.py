"""Compiles the C modules of a checkout beside their sources: `python tools/compile_c.py`. Wheels have them compiled already.

What is newer than its sources stays as it is. With `--again` only what was compiled before is compiled, if its sources have
changed. Without a C compiler or Python's headers nothing is compiled, and kvpool does
the same without these modules.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent


def c_modules(root: Path = ROOT) -> list[Path]:
    """The sources of all C modules."""
    return sorted((root / "src" / "kvpool").rglob("*.c"))


def missing() -> str | None:
    """What is missing for a C module to be compiled here, in words; None if nothing is."""
    if os.name != "posix" or shutil.which("cc") is None:
        return "no C compiler was found"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h is missing; Debian has it in python3-dev"
    return None


def built_from(source: Path, folder: Path) -> Path:
    """Where a module is, once it was compiled into a folder."""
    return folder / f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_module(source: Path, folder: Path, flags: Sequence[str] = ("-O3",)) -> Path:
    """Compiles one module into a folder, unless a file there is newer than its sources."""
    built = built_from(source, folder)
    newest = max(part.stat().st_mtime for part in (source, *source.parent.glob("*.h")))
    if built.exists() and built.stat().st_mtime > newest:
        return built
    new = folder / f"{source.stem}.{os.getpid()}.new"
    dynamic = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    include = [f"-I{headers}" for headers in (sysconfig.get_path("include"), numpy.get_include())]
    command = ["cc", *flags, "-shared", "-fPIC", "-pthread", *include, str(source), "-o", str(new), "-lm", *dynamic]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        new.replace(built)  # who runs the old one keeps it
    finally:
        new.unlink(missing_ok=True)
    return built


def main(*options: str) -> int:
    """Compiles all C modules and says in one line what was not."""
    sources = [
        source for source in c_modules() if "--again" not in options or built_from(source, source.parent).exists()
    ]
    if sources and (problem := missing()):
        print(f"kvpool's C modules are not compiled ({problem}): it does the same, more slowly")
        return 0
    for source in sources:
        try:
            compile_module(source, source.parent)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line] or [str(error)]
            print(f"{source.name} is not compiled ({lines[0]}): kvpool does the same, more slowly")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
