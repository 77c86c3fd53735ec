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


@pytest.mark.parametrize(("source", "status"), [(LEAVING, 1), ("def test_nothing():\n    pass\n", 0)])
def test_given_a_test_that_leaves_a_file_in_the_working_tree_then_the_run_fails_and_names_it(
    tmp_path: Path, source: str, status: int
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("tests/conftest.py", "tests/lock_watch.py", "docs/threads.md"):  # which says what locks may do
        shutil.copy(Path(__file__).resolve().parents[1] / name, tmp_path / name)
    (tmp_path / "tests" / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}  # not a worker
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert ("left files in the working tree: somewhere" in ended.stderr) == bool(status)
    assert "1 passed" in ended.stdout
