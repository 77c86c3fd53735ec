"""The compiled control plane: what the build names exists, and a build that asks for compiled modules gets them."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

import kvpool

ROOT = Path(__file__).resolve().parent.parent


def compiled_modules() -> list[str]:
    """The sources that pyproject.toml has compiled, as module names."""
    listed = re.search(r"hooks\.mypyc\].*?include = \[(.*?)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.DOTALL)
    assert listed is not None
    return [path.removesuffix(".py").replace("/", ".") for path in re.findall(r'"src/([^"]+)"', listed.group(1))]


def test_given_the_list_of_the_build_then_every_module_in_it_exists() -> None:
    assert len(compiled_modules()) > 5
    for name in compiled_modules():
        assert (ROOT / "src" / (name.replace(".", "/") + ".py")).exists(), name


@pytest.mark.skipif("site" not in Path(kvpool.__file__).parts, reason="kvpool is not the compiled one: make test-compiled")
def test_given_a_compiled_build_then_none_of_its_modules_is_interpreted() -> None:
    for name in compiled_modules():
        file = importlib.import_module(name).__file__
        assert file is not None
        assert not file.endswith(".py"), f"{name} is interpreted ({os.path.basename(file)})"
