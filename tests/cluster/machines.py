"""Machines of a Ray cluster, all of them on this one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from traffic import closed_on_error, until

TELLS = {  # how soon Ray notices that a machine is gone
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "15",
}
SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # nobody else gets into this cluster
ENVIRONMENT = {**os.environ, **TELLS, **SECRET, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Machine:
    """A raylet with all that belongs to it, as `ray start --block` starts it."""

    def __init__(self, *arguments: str, num_cpus: int) -> None:
        limits = ["--object-store-memory=100000000", f"--num-cpus={num_cpus}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *limits, *arguments]
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        with closed_on_error(self):
            until(lambda: self.raylet() is not None, "the raylet runs")

    def raylet(self) -> int | None:
        """Its process, which the command started."""
        assert self.process.poll() is None, "ray start ended"
        return next((pid for pid, name in children(self.process.pid) if name.endswith("/raylet")), None)

    def ranks(self) -> list[int]:
        """The processes of ranks on it that serve."""
        raylet = self.raylet()
        return [pid for pid, name in children(raylet or 0) if name.startswith("ray::RankActor.serve")]

    def close(self) -> None:
        """Everything of its session, by the group that it started in."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def children(parent: int) -> Iterator[tuple[int, str]]:
    """The processes that a process has started, with what they are called."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                yield int(folder.name), name
        except OSError:
            continue
