"""Addresses and network interfaces of this machine: by which of them ranks on several machines reach each other."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpool.errors import ConfigError

_GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def this_machine() -> str:
    """Processes for which this is the same have one loopback interface. It begins with the name of the machine."""
    said = [socket.gethostname()]
    with suppress(OSError):  # elsewhere than on Linux
        said += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(said)


def address_towards(host: str) -> str:
    """The address of this machine on the way to `host`."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(there)  # which sends nothing
            return str(asked.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"this machine has no way to {host}: {error}") from None


@contextmanager
def gloo_at(address: str) -> Iterator[None]:
    """Has gloo listen at an address, or with "" at the loopback interface, unless the environment names an interface."""
    if _GLOO in os.environ:
        yield
        return
    os.environ[_GLOO] = _interface(address) if address else "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO]


def _interface(address: str) -> str:
    """The name of the interface with this address."""
    import fcntl  # which not every system has

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise ConfigError(f"no interface of {socket.gethostname()} has the address {address}; name one in {_GLOO}")
