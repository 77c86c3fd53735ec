"""Real servers on loopback for tests of remote tiers: Redis or Valkey, alone and as a cluster. Stopped by their own pid."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PATIENCE = 30.0  # seconds in which a server must be up, on a machine that has other things to do
HASH_SLOTS = 16384


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], object], what: str) -> None:
    """Returns when the condition holds; fails if it never does."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            pytest.fail(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(0.01)


def server_program() -> str:
    """redis-server, or valkey-server; the test is skipped where there is neither."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("needs redis-server or valkey-server: apt-get install redis-server")
    return found


class RedisServer:
    """One server process with an empty folder of its own."""

    def __init__(self, folder: Path, *arguments: str, password: str | None = None, tls: bool = False) -> None:
        self.folder = folder
        self.port = free_port()
        self.password = password
        self._tls = tls
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        secret = ["--requirepass", password] if password else []
        self._arguments = [*ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *secret, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> RedisServer:
        """Starts it, also again after `kill`, on the same port."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen([server_program(), *self._arguments], cwd=self.folder, stdout=log, stderr=log)
        eventually(self._answers, f"redis-server on port {self.port}")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.fail(f"redis-server ended: {(self.folder / 'log').read_text()[-2000:]}")
        with contextlib.suppress(OSError):
            if not self._tls:
                return self.ask("PING") == "+PONG"
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False

    def ask(self, *words: str) -> str:
        """The first line of an answer, or the whole text where the answer is one string."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            stream = connection.makefile("rwb")
            if self.password:
                self._say(stream, "AUTH", self.password)
            return self._say(stream, *words)

    @staticmethod
    def _say(stream: socket.SocketIO, *words: str) -> str:  # type: ignore[name-defined]
        parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
        stream.write("".join(parts).encode())
        stream.flush()
        line = stream.readline().decode().rstrip()
        if line.startswith("$") and line != "$-1":
            return str(stream.read(int(line[1:])).decode())
        return line

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class RedisCluster:
    """Masters without replicas that share the slots; a lost one takes only its own slots with it."""

    def __init__(self, folder: Path, num_nodes: int = 3) -> None:
        self.nodes = []
        for number in range(num_nodes):
            bus = ["--cluster-port", str(free_port())]
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"]
            self.nodes.append(RedisServer(folder / f"node-{number}", *options, *bus))
        self._buses = [node._arguments[-1] for node in self.nodes]

    @property
    def url(self) -> str:
        return f"{self.nodes[0].url}?cluster=1"

    def start(self) -> RedisCluster:
        share = -(-HASH_SLOTS // len(self.nodes))
        for number, node in enumerate(self.nodes):
            node.start()
            first, last = number * share, min((number + 1) * share, HASH_SLOTS) - 1
            assert node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == "+OK"
            assert node.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)) == "+OK"
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            assert self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", str(node.port), bus) == "+OK"
        eventually(self._is_whole, "the cluster knows all its slots")
        return self

    def _is_whole(self) -> bool:
        wanted = ["cluster_state:ok", f"cluster_slots_ok:{HASH_SLOTS}", f"cluster_known_nodes:{len(self.nodes)}"]
        return all(all(word in node.ask("CLUSTER", "INFO") for word in wanted) for node in self.nodes)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def running(server: RedisServer | RedisCluster) -> Iterator[None]:
    """The server runs in the block and is gone afterwards."""
    try:
        server.start()
        yield
    finally:
        server.kill()
