"""A node in a process of its own, for benchmarks/node.py and benchmarks/node_gpu.py."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VALUE_BYTES = 2 << 20
"""Of a model of 32 layers, 8 KV heads of 128, bfloat16, 16 tokens."""

_NODE = """
import signal, sys
from pathlib import Path
from kvpool.tiers.node.server import NodeServer

server = NodeServer(Path(sys.argv[1]), int(sys.argv[2]))
signal.signal(signal.SIGTERM, lambda *_: server.stop())
print("up", flush=True)
server.serve()
server.close()
"""


@contextmanager
def node(num_bytes: int) -> Iterator[Path]:
    """The directory of a node that runs in the block."""
    directory = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir="/dev/shm"))
    command = [sys.executable, "-c", _NODE, str(directory), str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "up\n":
                sys.exit("the node did not start")
            yield directory
        finally:
            process.terminate()
            process.wait(60)
            shutil.rmtree(directory, ignore_errors=True)


def keys(count: int, of: str = "bench") -> list[bytes]:
    """Keys like those of a model."""
    return [hashlib.sha256(f"{of} {number}".encode()).digest() for number in range(count)]
