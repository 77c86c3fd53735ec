"""Ports for servers that tests start as processes of their own."""

from __future__ import annotations

import os
import random
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports that are free, as is the one above each.

    They lie below those that the kernel gives to connections, so nobody takes one before its server listens, or while that
    is started again. Each test process has ports of its own, and gives none of them twice.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000 + 2 * _WORKER, 32_000, 2 * _NUM_WORKERS)
        if port not in _given and _is_free(port) and _is_free(port + 1):
            _given.add(port)
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
