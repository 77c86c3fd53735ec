"""One engine of `kvpool serve --data-parallel`, as a process of its own that serves it at a port of this machine.

`EngineProcess` is how the process in front starts and ends it. The first line of its standard input is an `EngineOrder`.
When its standard input ends, the process in front is gone, and the engine ends, too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.cluster.proxy.backends import Backend
from kvpool.errors import (
    ConfigError,
    InvalidArgumentError,
    KVPoolError,
    ModelLoadError,
    UnsupportedAttentionError,
    UnsupportedModelError,
)

REFUSED = 78  # the exit status for settings with which no start can succeed
_REFUSALS = (ConfigError, InvalidArgumentError, ModelLoadError, UnsupportedAttentionError, UnsupportedModelError)


class EngineOrder(NamedTuple):
    """What an engine is made from: what `read_serve` takes, as the command got it, and where this engine is reached.

    The process reads files itself, so a restart finds what has changed in them.
    """

    number: int
    port: int
    publish: str
    options: Mapping[str, Any]
    host_memory: str | None
    name: str | None
    given: Mapping[str, Any]
    adapters: Sequence[str]


class EngineProcess:
    """An engine as the process in front sees it: at the same address whenever it starts."""

    command = (sys.executable, "-m", "kvpool.server.engine_process")

    def __init__(self, order: EngineOrder, where: str, environment: Mapping[str, str]) -> None:
        self.name = f"engine {order.number}"
        self.where = where  # its devices
        self.backend = Backend.parse(f"http://127.0.0.1:{order.port}={order.publish}")
        self.state = "starting"  # or running, draining, waiting (to be started again), failed (given up)
        self.num_starts = 0
        self._order = order
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at = float("inf")

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    def start(self) -> None:
        """Starts it; the one before must have ended."""
        self.state = "starting"
        self.num_starts += 1
        self._kill_at = float("inf")
        self._process = None
        with suppress(OSError):  # it cannot be started, or has ended already: `ended` says so
            # In a session of its own: Ctrl-C is for the process in front
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(self._order._asdict(), default=str).encode() + b"\n")
            self._process.stdin.flush()

    def drain(self, seconds: float) -> None:
        """Tells it to answer what it has and to end. After so many seconds it is killed."""
        self.state = "draining"
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)
        if self._process is not None:
            self._process.terminate()

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        if self._process is None:
            return "could not be started"
        code = self._process.poll()
        if code is None:
            if time.monotonic() > self._kill_at:
                self._process.kill()
            return None
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"

    @property
    def is_refused(self) -> bool:
        """Whether it ended because no start with these settings can succeed."""
        return self._process is not None and self._process.returncode == REFUSED

    def wait(self) -> None:
        """Waits until it has ended. Only after `drain`."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, self._kill_at - time.monotonic()))
            self._process.kill()
            self._process.wait()
            self.ended()


def order_of(
    number: int,
    port: int,
    publish: str,
    asked: tuple[Any, str | None, str | None, Mapping[str, Any], Sequence[str]],
    **changes: Any,
) -> EngineOrder:
    """The order for one engine; `asked` is what `read_serve` takes, `changes` are other values of its options."""
    options, host_memory, name, given, adapters = asked
    return EngineOrder(number, port, publish, asdict(options.changed(**changes)), host_memory, name, given, adapters)


def main() -> int:
    """Serves the engine of the order; returns the exit status."""
    line = sys.stdin.buffer.readline()
    if not line:  # the process in front was gone before it said anything
        return 0
    order = EngineOrder(**json.loads(line))
    threading.Thread(target=_end_with_the_front, daemon=True).start()
    from kvpool.engine.options import EngineOptions
    from kvpool.server.auth import Access
    from kvpool.server.early_server import ended_by_sigterm
    from kvpool.server.running import serve_models
    from kvpool.server.serve_settings import read_serve

    logging.basicConfig(level=logging.WARNING, format=f"engine {order.number}: %(message)s")
    config = order.options["config"]
    try:
        with ended_by_sigterm():
            options = EngineOptions(**{**order.options, "config": None if config is None else Path(config)})
            settings, models = read_serve(options, order.host_memory, order.name, order.given, order.adapters)
            access = Access.read(settings.keys, os.environ, share=settings.share_cache)
            own = replace(settings, host="127.0.0.1", port=order.port, insecure=False, tls_cert=None, tls_key=None)
            model = models[0].placed(order.publish, f"engine-{order.number}")
            serve_models(own, [model], access, quiet=True)
    except (KVPoolError, OSError) as error:
        print(f"engine {order.number}: {error}", file=sys.stderr, flush=True)
        return REFUSED if isinstance(error, _REFUSALS) else 1
    return 0


def _end_with_the_front() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
