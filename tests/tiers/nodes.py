"""Nodes for tests: in a thread of this process, or in a process of their own that can be killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from servers import eventually

from kvpool.tiers import NodeTier
from kvpool.tiers.node import wire
from kvpool.tiers.node.connection import LostNodeError

SRC = Path(__file__).resolve().parents[2] / "src"
MEGABYTE = 2**20
needs_linux = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="a node needs Linux")


@contextmanager
def node_folder() -> Iterator[Path]:
    """A directory for a node: in memory, and with a path that is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def node_thread(directory: Path, num_bytes: int = 16 * MEGABYTE, **options: Any) -> Iterator[Any]:
    """A node in a thread of this process."""
    from kvpool.tiers.node.server import NodeServer

    server = NodeServer(directory, num_bytes, **options)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        server.close()


class NodeProcess:
    """A `kvpool node` of its own."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "kvpool", "node", str(self.directory), *self._arguments]
        environment = {**os.environ, "PYTHONPATH": str(SRC)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            eventually(self.answers, "the node is up")
        except BaseException:
            self.kill()
            raise

    def answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(f"the node ended with status {self.process.returncode}")
        with NodeTier(f"node:{self.directory}") as tier, suppress(OSError, LostNodeError):
            return isinstance(tier, NodeTier) and bool(tier.node_stats())
        return False

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None


class RawClient:
    """Says whatever a test wants to say to a node."""

    def __init__(self, directory: Path, name: bytes = b"raw") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(str(directory / wire.SOCKET))
        if name:
            assert self.ask(wire.message(wire.Verb.HELLO, 0, 0, name)).verb == wire.Verb.HELLO

    def __del__(self) -> None:
        self.socket.close()

    def ask(self, packet: bytes) -> wire.Message:
        self.socket.send(packet)
        return self.heard()

    def heard(self) -> wire.Message:
        return wire.parse(memoryview(self.socket.recv(wire.MAX_MESSAGE)))

    def is_cut_off(self) -> bool:
        """Whether the node ends the connection, after a word of refusal or without one."""
        with suppress(ConnectionError):
            while packet := self.socket.recv(wire.MAX_MESSAGE):
                if wire.parse(memoryview(packet)).verb == wire.Verb.REFUSED:
                    return not self.socket.recv(wire.MAX_MESSAGE)
        return True
