"""Servers and `kvpool route` in front of them, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import httpx

from ports import free_ports
from traffic import answers, closed_on_error, until


class RealCluster:
    """The processes, and a client of the proxy."""

    def __init__(self, model: str, num_servers: int = 3, memory: str = "64MiB") -> None:
        self.ports = free_ports(2 * num_servers + 1)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports[:num_servers]]
        self.proxy_url = f"http://127.0.0.1:{self.ports[-1]}"
        events = [f"tcp://127.0.0.1:{port}" for port in self.ports[num_servers : 2 * num_servers]]
        serve = ("serve", "--model", model, "--name", "tiny", "--memory", memory)
        backends = [f"--backend={url}={where}" for url, where in zip(self.urls, events, strict=True)]
        self.processes: list[subprocess.Popen[bytes]] = []
        with closed_on_error(self):
            for port, where in zip(self.ports, events, strict=False):
                self.processes.append(self.start(*serve, f"--port={port}", "--publish", where))
            self.processes.append(
                self.start("route", *backends, "--port", str(self.ports[-1]), "--health-seconds", "0.2")
            )
            for url in self.urls:
                until(lambda url=url: answers(f"{url}/ready"), f"{url} answers")
            until(lambda: all(node["is_ready"] for node in self.stats()["nodes"].values()), "all are ready")

    @staticmethod
    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvpool", *arguments]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    def stats(self) -> Any:
        try:
            return httpx.get(f"{self.proxy_url}/route/stats", timeout=30, trust_env=False).json()
        except httpx.TransportError:
            return {"nodes": {"not yet": {"is_ready": False}}}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
