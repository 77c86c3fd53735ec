"""Two machines on this one: network namespaces with a link between them, each with a host name and /dev/shm of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Hosts:
    """The hosts `names[0]` and `names[1]`, which reach each other at `addresses`."""

    def __init__(self) -> None:
        self.names = [f"kvpool-{os.getpid()}-{letter}" for letter in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host."""
        enter = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--mount", "--ipc", "sh", "-c"]
        own = f'hostname {self.names[host]} && mount -t tmpfs none /dev/shm && exec "$@"'
        return subprocess.Popen([*enter, own, "sh", *command], **options)

    def cut(self) -> None:
        """Takes the link between the hosts away."""
        _ip("-n", self.names[1], "link", "set", "veth", "down")


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts; skips the test where this process may not make them."""
    if missing := [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]:
        pytest.skip(f"two hosts need {' and '.join(missing)}")
    hosts = Hosts()
    try:
        for name in hosts.names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"two hosts need network namespaces, which root may make: {made.stderr.strip()}")
        first, second = hosts.names
        _ip("link", "add", "veth", "netns", first, "type", "veth", "peer", "name", "veth", "netns", second)
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
            _ip("-n", name, "link", "set", "veth", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in hosts.names:
            _ip("netns", "del", name, check=False)
