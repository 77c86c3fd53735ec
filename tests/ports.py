"""Ports for servers that tests start as processes of their own."""

from __future__ import annotations

import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports that are free, as is the one above each.

    They lie below those that the kernel gives to connections, so nobody takes one before its server listens, or while that
    is started again.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000, 2)  # two test processes must not draw the same
        if _is_free(port) and _is_free(port + 1):
            found.add(port)
    return list(found)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
