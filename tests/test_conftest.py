"""What a run of the tests checks of itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAVING = """
import socket
def test_that_leaves_a_socket():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("somewhere")
"""


QUICK = """
import pytest
@pytest.mark.quick("{case}")
@pytest.mark.parametrize("letter", ["a", "b", "c"])
def test_letters(letter):
    assert letter != "c"
"""


def run(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest in a working tree that has our conftest.py and one test."""
    (folder / "tests").mkdir()
    (folder / "docs").mkdir()
    for name in ("tests/conftest.py", "tests/lock_watch.py", "docs/threads.md"):  # which says what locks may do
        shutil.copy(Path(__file__).resolve().parents[1] / name, folder / name)
    markers = 'markers = ["slow", "quick", "gpu"]'
    (folder / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{markers}\n")
    (folder / "tests" / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "tests"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}  # not a worker
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and most of the time went into importing them
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_given_a_test_that_leaves_a_file_in_the_working_tree_then_the_run_fails_and_names_it(tmp_path: Path) -> None:
    ended = run(tmp_path, LEAVING)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "left files in the working tree: somewhere" in ended.stderr
    assert "1 passed" in ended.stdout


def test_given_quick_cases_then_make_test_runs_these_and_the_rest_is_slow(tmp_path: Path) -> None:
    ended = run(tmp_path, QUICK.format(case="b"), "-m", "not slow")
    assert "1 passed, 2 deselected" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 0  # which left no file


def test_given_a_quick_case_that_is_none_then_the_run_fails_and_names_it(tmp_path: Path) -> None:
    ended = run(tmp_path, QUICK.format(case="d"), "-m", "not slow")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no such case of a test: [('tests/test_it.py::test_letters', 'd')]" in ended.stdout + ended.stderr
