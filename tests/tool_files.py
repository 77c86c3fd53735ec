"""The programs in `tools/`, and the modules in C that one of them compiles, as modules."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_tool(name: str) -> ModuleType:
    """Runs `tools/NAME.py` as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def compiled_module(name: str, directory: Path) -> ModuleType:
    """A module in C that wheels have, built from its source; skips the test where that is impossible."""
    tool = load_tool("compile_c")
    if problem := tool.missing():
        pytest.skip(problem)
    (source,) = (path for path in tool.c_modules() if path.stem == name)
    spec = importlib.util.spec_from_file_location(name, tool.compile_module(source, directory, ["-O1"]))
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:  # this processor lacks its instructions
        pytest.skip(str(error))
    spec.loader.exec_module(module)
    return module


def emulated(source: Path, directory: Path, flags: Sequence[str] = ("-O1",)) -> list[str]:
    """A program in C that includes a module's source, compiled for ARM: the command that runs it in an emulator.

    There is no Python for it. Debian has what this needs in gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user; tests
    are skipped where it is missing.
    """
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    for program in (compiler, emulator):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    target = directory / source.stem
    folders = [f"-I{ROOT / 'src' / 'kvpool' / 'kernels'}", f"-I{sysconfig.get_path('include')}"]
    without_python = ["-static", "-pthread", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"]
    command = [compiler, *flags, *without_python, *folders, str(source), "-o", str(target), "-lm"]
    subprocess.run(command, check=True)
    return [emulator, str(target)]
