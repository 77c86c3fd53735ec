"""Real servers on loopback for tests of remote tiers: Redis or Valkey, alone and as a cluster; moto as S3."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ports import free_ports

PATIENCE = 120.0  # seconds in which a server must be up; a busy machine takes half a minute to start a process
HASH_SLOTS = 16384


def eventually(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Returns when the condition holds; fails if it never does."""
    until = time.monotonic() + patience
    while not condition():
        if time.monotonic() > until:
            pytest.fail(f"{what}: not within {patience:.0f} s")
        time.sleep(0.01)


def server_program() -> str:
    """redis-server, or valkey-server; the test is skipped where there is neither."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("needs redis-server or valkey-server: apt-get install redis-server")
    return found


class Server:
    """One server process with a folder of its own, on a port of its own. Everything is done to its own pid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(1)[0]
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether it is up; may raise OSError if not."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts it, also again after `kill`, on the same port."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(self.command(), cwd=self.folder, stdout=log, stderr=log)
        eventually(self._is_up, f"{type(self).__name__} on port {self.port}")

    def _is_up(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.fail(f"{type(self).__name__} ended: {(self.folder / 'log').read_text()[-2000:]}")
        with contextlib.suppress(OSError):
            return self.answers()
        return False

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


class RedisServer(Server):
    """Redis or Valkey, without anything on disk."""

    def __init__(self, folder: Path, *arguments: str, password: str | None = None, tls: bool = False) -> None:
        super().__init__(folder)
        self.password = password
        self._tls = tls
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        secret = ["--requirepass", password] if password else []
        self._arguments = [*ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *secret, *arguments]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [server_program(), *self._arguments]

    def answers(self) -> bool:
        if not self._tls:
            return self.ask("PING") == "+PONG"
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        return True

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


class RedisCluster:
    """Masters without replicas that share the slots; a lost one takes only its own slots with it."""

    def __init__(self, folder: Path, num_nodes: int = 3) -> None:
        self.nodes: list[RedisServer] = []
        self._folder = folder
        for _ in range(num_nodes):
            self._new_node()

    def _new_node(self) -> RedisServer:
        options = [
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "2000",
            "--cluster-require-full-coverage",
            "no",
        ]
        bus = ["--cluster-port", str(free_ports(1)[0])]
        self.nodes.append(RedisServer(self._folder / f"node-{len(self.nodes)}", *options, *bus))
        return self.nodes[-1]

    def _meet(self, node: RedisServer) -> None:
        assert self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", str(node.port), node._arguments[-1]) == "+OK"

    @property
    def url(self) -> str:
        return f"{self.nodes[0].url}?cluster=1"

    def start(self) -> None:
        share = -(-HASH_SLOTS // len(self.nodes))
        for number, node in enumerate(self.nodes):
            node.start()
            first, last = number * share, min((number + 1) * share, HASH_SLOTS) - 1
            assert node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == "+OK"
            assert node.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)) == "+OK"
        for node in self.nodes[1:]:
            self._meet(node)
        eventually(self._is_whole, "the cluster knows all its slots")

    def add_replica(self, master: RedisServer) -> RedisServer:
        """A node that has everything a master has."""
        replica = self._new_node()
        replica.start()
        self._meet(replica)
        eventually(self._is_whole, "everybody knows the new node")
        assert replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID")) == "+OK"
        eventually(lambda: "master_link_status:up" in replica.ask("INFO", "replication"), "the replica follows")
        return replica

    def _is_whole(self) -> bool:
        wanted = ["cluster_state:ok", f"cluster_slots_ok:{HASH_SLOTS}", f"cluster_known_nodes:{len(self.nodes)}"]
        return all(all(word in node.ask("CLUSTER", "INFO") for word in wanted) for node in self.nodes)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


GARBAGE = {
    "nothing": b"",
    "noise": b"\x00\xff\xfegarbage\r\n\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "always OK": b"+OK\r\n",
    "always a string": b"$5\r\nhello\r\n",
    "always two": b":2\r\n",
}


class FakeServer:
    """Listens and says the same to everybody who says something."""

    def __init__(self, says: bytes, port: int = 0) -> None:
        self._says = says
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while connection.recv(65536):
                connection.sendall(self._says)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class MotoServer(Server):
    """moto, which speaks enough of S3 for a contract."""

    def command(self) -> list[str]:
        pytest.importorskip("moto.server", reason="moto is the S3 server of these tests")
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def answers(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        return True

    def make_bucket(self, name: str) -> str:
        """The address of a new bucket."""
        endpoint = f"http://127.0.0.1:{self.port}"
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=PATIENCE):
            return f"s3://key:secret@{name}/some/where?endpoint={endpoint}"

    def bucket(self, name: str) -> Any:
        """A client of a bucket, to see and change what is in it."""
        from obstore.store import S3Store

        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        return S3Store(name, endpoint=f"http://127.0.0.1:{self.port}", client_options={"allow_http": True}, **keys)


class MooncakeMaster(Server):
    """The master of a Mooncake Store, on loopback."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metrics_port = free_ports(1)[0]

    def command(self) -> list[str]:
        import mooncake

        program = Path(mooncake.__file__).parent / "mooncake_master"
        where = ["--rpc_address=127.0.0.1", f"--rpc_port={self.port}"]
        return [str(program), *where, "--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}"]

    def answers(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        return True


class MooncakeNode(Server):
    """A process that lends its memory to a Mooncake Store. It listens on all interfaces: run it in a namespace of its own."""

    PROGRAM = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]) == 0
open(sys.argv[3], "w").close()
threading.Event().wait()
"""

    def __init__(self, folder: Path, master: MooncakeMaster, num_bytes: int) -> None:
        super().__init__(folder)
        self._arguments = [f"127.0.0.1:{master.port}", str(num_bytes), str(folder / "ready")]

    def command(self) -> list[str]:
        (self.folder / "ready").unlink(missing_ok=True)
        return [sys.executable, "-c", self.PROGRAM, *self._arguments]

    def answers(self) -> bool:
        return (self.folder / "ready").exists()


@contextlib.contextmanager
def running(server: Server | RedisCluster) -> Iterator[None]:
    """The server runs in the block and is gone afterwards."""
    try:
        server.start()
        yield
    finally:
        server.kill()
