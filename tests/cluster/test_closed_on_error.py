"""Helpers of tests that start servers: whatever fails, no process is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.parametrize("num_started", [1, 3, 4])
def test_given_a_cluster_whose_start_fails_then_no_process_of_it_is_left(
    monkeypatch: pytest.MonkeyPatch, num_started: int
) -> None:
    import real_cluster

    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        if len(started) == num_started:
            raise OSError("no more processes")
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    def give_up(*_: Any) -> None:
        raise AssertionError("it does not answer")

    monkeypatch.setattr(real_cluster.RealCluster, "start", staticmethod(start))
    monkeypatch.setattr(real_cluster, "until", give_up)
    try:
        with pytest.raises((OSError, AssertionError), match=r"no more processes|it does not answer"):
            real_cluster.RealCluster("model")
        assert len(started) == num_started
        assert [process.poll() is None for process in started] == [False] * num_started
    finally:
        for process in started:
            process.kill()
            process.wait()
