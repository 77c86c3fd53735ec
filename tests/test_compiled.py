"""The C modules of wheels: where the build goes on without them, and how a user sees whether they are there."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.cli import version_line
from tool_files import load_tool

ROOT = Path(__file__).resolve().parent.parent
hatchling = pytest.importorskip("hatchling", reason="the build backend is not installed here")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build hook of this checkout, as hatchling makes it for a wheel."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("hatch_build")
    config = {"compiler": ["setuptools"]}
    warnings: list[str] = []
    app = type("App", (), {"display_warning": staticmethod(warnings.append)})()
    made = module.CompileHook(str(ROOT), config, None, None, "", "wheel", app)
    made.warnings = warnings
    return made


def test_the_version_says_whether_the_c_modules_are_there() -> None:
    if "site" in Path(kvpool.__file__).parts:  # make test-compiled
        for source in load_tool("compile_c").c_modules():
            assert find_spec(".".join(source.relative_to(ROOT / "src").with_suffix("").parts)), source
        assert kvpool.compiled
    assert version_line() == f"kvpool {kvpool.__version__} ({'with C modules' if kvpool.compiled else 'pure Python'})"


def test_given_no_c_compiler_then_the_wheel_is_built_without_and_one_line_says_why(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_COMPILE", "auto")
    monkeypatch.setattr("hatch_build.shutil.which", lambda name: None)
    build_data: dict[str, Any] = {"force_include": {}}
    assert hook.dependencies() == []
    hook.initialize("standard", build_data)
    hook.finalize("standard", build_data, "")
    assert build_data == {"force_include": {}}
    assert hook.warnings == [
        "kvpool's C modules are not installed (no C compiler was found): it does the same, more slowly"
    ]


def test_given_no_c_compiler_when_a_compiled_wheel_is_demanded_then_the_build_fails(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_COMPILE", "1")
    monkeypatch.setattr("hatch_build.shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="KVPOOL_COMPILE=1, but no C compiler was found"):
        hook.initialize("standard", {"force_include": {}})


def test_given_a_compiler_that_fails_then_the_wheel_is_built_without(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_COMPILE", "auto")
    monkeypatch.setattr(type(hook), "_why_not", lambda self: None)
    monkeypatch.setattr("hatch_build.SETUP", "raise SystemExit('error: no such luck')")
    build_data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", build_data)
    hook.finalize("standard", build_data, "")
    assert build_data == {"force_include": {}}
    assert hook.warnings == [
        "kvpool's C modules are not installed (compiling failed: error: no such luck): it does the same, more slowly"
    ]


def test_given_an_editable_install_then_nothing_is_compiled(hook: Any) -> None:
    build_data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", build_data)
    hook.finalize("editable", build_data, "")
    assert build_data == {"force_include": {}}
    assert hook.warnings == []


def test_given_another_word_for_compiling_then_the_build_says_what_it_takes(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_COMPILE", "yes")
    with pytest.raises(ValueError, match="KVPOOL_COMPILE is 'yes'; it takes auto, 1 or 0"):
        hook.dependencies()
