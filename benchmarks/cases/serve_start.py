"""The start of `kvpool serve` as a process: when it is ready, and when the first token comes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

_LOOK_SECONDS = 0.02  # between questions


class Started(NamedTuple):
    """CPU time of the process until something came."""

    ready_seconds: float
    first_token_seconds: float


def start(*options: str) -> Started:
    """Starts a server with one thread, asks for a token when it is ready, and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool", "serve", "--port", str(port), "--device", "cpu", "--quiet", *options],
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    try:
        while _status(port, "/ready") != 200:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            time.sleep(_LOOK_SECONDS)
        ready = _cpu_seconds(process.pid)
        if _status(port, "/v1/completions", {"prompt": "Hello", "max_tokens": 1}) != 200:
            raise RuntimeError("the first request failed")
        return Started(ready, _cpu_seconds(process.pid))
    finally:
        process.terminate()
        process.wait()


def _status(port: int, path: str, body: object = None) -> int:
    """The status of an answer; 0 if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("GET" if text is None else "POST", path, text, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except ConnectionRefusedError:
        return 0
    finally:
        connection.close()


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
