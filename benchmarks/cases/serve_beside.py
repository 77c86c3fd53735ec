"""Two servers with the same weights under the same load, each in processes of its own: kvpool's and vLLM's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import PeerAbsentError, Runner
from kvpool.errors import KVPoolError
from kvpool.model.loading import default_model_directory
from load import Endpoint, fetch_text, figures, run_load, synthetic

CLIENTS = 16
_START_SECONDS = 900.0
_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says, on any core
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class Measured(NamedTuple):
    """One load: what its clients saw, and the CPU time of the server's processes."""

    tokens_per_second: float
    first_token_ms: float  # half of the requests
    cpu_ms_per_token: float


class ServerProcess:
    """A server that answers OpenAI's protocol, started by a command; its processes are those of its session."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._endpoint = Endpoint.at(f"http://127.0.0.1:{port}", model="bench")
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port],
            env=os.environ | dict(environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._number = 0
        self._wait()
        self.load(2, 2)  # what is made on first use
        self.measured: list[Measured] = []

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                asyncio.run(fetch_text(self._endpoint, "/v1/models"))
                return
            except (OSError, asyncio.TimeoutError, ValueError):
                time.sleep(1)
        self.stop()
        raise PeerAbsentError(f"the server did not answer; its status is {self._process.poll()}")

    def load(self, num_requests: int, num_new: int) -> Measured:
        """Clients that ask one after the other, behind 400 tokens that no load before had."""
        self._number += 1
        asked = synthetic(
            num_requests, prompt_tokens=440, shared_tokens=400, num_prefixes=1, max_tokens=num_new, seed=self._number
        )
        start = self._cpu_seconds()
        found = figures(*asyncio.run(run_load(self._endpoint, asked, num_clients=CLIENTS, timeout=1800)))
        if found["errors"]:
            raise PeerAbsentError(f"requests failed: {found['errors']}")
        cpu = self._cpu_seconds() - start
        tokens = found["output_tokens"]
        return Measured(found["output_tokens_per_second"], found["first_token_ms"]["p50"], 1e3 * cpu / tokens)

    def repeat(self, num_requests: int, num_new: int) -> list[float]:
        """Tokens a second of one load; the rest is kept."""
        self.measured.append(self.load(num_requests, num_new))
        return [self.measured[-1].tokens_per_second]

    def _cpu_seconds(self) -> float:
        """Of all processes of the server so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            if int(words[3]) == self._process.pid:  # its session
                ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ends its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class KvpoolServer:
    """`kvpool serve`, started once."""

    def __init__(self, dtype: str, threads: int) -> None:
        self._dtype = dtype
        self._threads = threads
        self._server: ServerProcess | None = None

    def runner(self, figure: str, num_requests: int = 0, num_new: int = 0) -> Runner:
        """Runs loads, or tells another figure of those that ran."""
        if self._server is None:
            try:
                model = str(default_model_directory())
            except KVPoolError as error:
                raise PeerAbsentError(str(error).splitlines()[0]) from None
            options = (
                f"--device cpu --dtype {self._dtype} --memory 1GiB --name bench --max-sequences {CLIENTS} -q".split()
            )
            command = [sys.executable, "-m", "kvpool", "serve", "--model", model, *options]
            self._server = ServerProcess(command, {"OMP_NUM_THREADS": str(self._threads)})
        return _runner(self._server, figure, num_requests, num_new)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()


class VllmServer:
    """vLLM's OpenAI server, in an environment of its own."""

    name = "vllm"

    def __init__(self, python: str, eager: bool, threads: int) -> None:
        self._python = python
        self._threads = threads
        self._eager = eager
        self._server: ServerProcess | None = None
        self._runner: Runner | None = None

    def start(self) -> str:
        """Which vLLM it is."""
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        try:
            told = subprocess.run([self._python, "-c", code], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerAbsentError(f"{self._python} has no vllm-cpu: {error}") from None
        return told.stdout.strip() + (" eager" if self._eager else "")

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        """Starts the server for its first case."""
        if self._server is None:
            options = (
                f"--dtype {params['dtype']} --served-model-name bench --max-model-len 1024 --max-num-seqs {CLIENTS}"
            )
            command = [self._python, "-m", "vllm.entrypoints.launchers.api_server.entry"]
            command += ["--model", str(default_model_directory()), *options.split()]
            command += ["--enforce-eager"] if self._eager else []
            self._server = ServerProcess(command, _VLLM | {"PYTHONPATH": "", "OMP_NUM_THREADS": str(self._threads)})
        self._runner = _runner(self._server, case, params.get("num_requests", 0), params.get("num_new", 0))

    def repeat(self) -> Sequence[float]:
        """One load, or what those before were like."""
        assert self._runner is not None
        return self._runner()

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()


def _runner(server: ServerProcess, figure: str, num_requests: int, num_new: int) -> Runner:
    if figure == "tokens_per_second":
        return lambda: server.repeat(num_requests, num_new)
    return lambda: [getattr(each, figure) for each in server.measured]
