"""The compiled control plane: what the build names exists, where it falls back, and how a user sees which one runs."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

import kvpool
from kvpool.cli import version_line
from tool_files import load_tool

ROOT = Path(__file__).resolve().parent.parent
hatchling = pytest.importorskip("hatchling", reason="the build backend is not installed here")


def compiled_modules() -> list[str]:
    """The sources that pyproject.toml has compiled, as module names."""
    return listed_modules("compile")


def listed_modules(name: str) -> list[str]:
    """A list of sources in pyproject.toml, as module names."""
    listed = re.search(rf"\n{name} = \[(.*?)\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.DOTALL)
    assert listed is not None
    return [path.removesuffix(".py").replace("/", ".") for path in re.findall(r'"([^"]+)"', listed.group(1))]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build hook of this checkout, as hatchling makes it for a wheel."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("hatch_build")
    config = {"compiler": ["mypy"], "compile": ["kvpool/errors.py"], "border": [], "unchecked": [], "sources": []}
    warnings: list[str] = []
    app = type("App", (), {"display_warning": staticmethod(warnings.append)})()
    made = module.CompileHook(str(ROOT), config, None, None, "", "wheel", app)
    made.warnings = warnings
    return made


def test_given_the_list_of_the_build_then_every_module_in_it_exists() -> None:
    assert len(compiled_modules()) > 5
    for name in compiled_modules():
        assert (ROOT / "src" / (name.replace(".", "/") + ".py")).exists(), name


def test_given_the_list_of_c_modules_then_it_has_all_that_exist() -> None:
    sources = load_tool("compile_c").c_modules()
    assert listed_modules("sources") == [str(path.relative_to(ROOT / "src")).replace("/", ".") for path in sources]


def test_given_the_list_of_the_border_then_every_module_of_it_is_compiled() -> None:
    assert set(listed_modules("border")) <= set(compiled_modules())


SOURCE = b"""
class Facade:
    def free(self, handle: KVCacheHandle, keep: "bool" = True, *rest: int, at: dict[
        str, int] | None = None, **named: int) -> None: ...
    @overload
    def get(self, index: int) -> int: ...
    def row(self, handle: list[Given], n\xc3\xb8: int) -> tuple[Given, ...]: ...
"""


def test_given_a_module_of_the_border_then_its_parameters_lose_their_types(hook: Any) -> None:
    without = importlib.import_module("hatch_build").without_types(SOURCE, frozenset(), everywhere=True)
    assert without == SOURCE.replace(b": KVCacheHandle", b"").replace(b': "bool"', b"").replace(
        b"*rest: int", b"*rest"
    ).replace(b"at: dict[\n        str, int] | None", b"at").replace(b"**named: int", b"**named").replace(
        b"handle: list[Given], n\xc3\xb8: int", b"handle, n\xc3\xb8"
    )


def test_given_types_that_come_from_users_then_only_these_are_not_checked(hook: Any) -> None:
    without = importlib.import_module("hatch_build").without_types(SOURCE, frozenset({"Given"}), everywhere=False)
    assert without == SOURCE.replace(b"handle: list[Given]", b"handle").replace(b" -> tuple[Given, ...]", b" ")


@pytest.mark.skipif(
    "site" not in Path(kvpool.__file__).parts, reason="kvpool is not the compiled one: make test-compiled"
)
def test_given_a_compiled_build_then_none_of_its_modules_is_interpreted() -> None:
    assert kvpool.compiled
    assert version_line() == f"kvpool {kvpool.__version__} (compiled)"
    for name in compiled_modules():
        file = importlib.import_module(name).__file__
        assert file is not None
        assert not file.endswith(".py"), f"{name} is interpreted ({os.path.basename(file)})"


@pytest.mark.skipif("site" in Path(kvpool.__file__).parts, reason="kvpool is the compiled one")
def test_given_a_checkout_then_kvpool_says_that_it_is_not_compiled() -> None:
    assert not kvpool.compiled
    assert version_line() == f"kvpool {kvpool.__version__} (pure Python)"


def test_given_no_c_compiler_then_the_wheel_is_built_uncompiled_and_one_line_says_why(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_COMPILE", "auto")
    monkeypatch.setattr("hatch_build.shutil.which", lambda name: None)
    build_data: dict[str, Any] = {"force_include": {}}
    assert hook.dependencies() == []
    hook.initialize("standard", build_data)
    hook.finalize("standard", build_data, "")
    assert build_data == {"force_include": {}}
    assert hook.warnings == ["kvpool is installed uncompiled (no C compiler was found): it does the same, more slowly"]


def test_given_no_c_compiler_when_a_compiled_wheel_is_demanded_then_the_build_fails(
    hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_COMPILE", "1")
    monkeypatch.setattr("hatch_build.shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="KVPOOL_COMPILE=1, but no C compiler was found"):
        hook.initialize("standard", {"force_include": {}})


def test_given_a_compiler_that_fails_then_the_wheel_is_built_uncompiled(
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
        "kvpool is installed uncompiled (compiling failed: error: no such luck): it does the same, more slowly"
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
