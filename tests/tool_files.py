"""The programs in `tools/`, and the modules in C that one of them compiles, as modules."""

from __future__ import annotations

import importlib.util
import sys
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
