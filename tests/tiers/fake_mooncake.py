"""Mooncake's client as a dictionary of this process: the same calls and codes, no network, and faults on demand."""

from __future__ import annotations

import ctypes
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

FULL, TOO_SMALL, NOT_FOUND, NO_MASTER = -200, -600, -704, -900


class FakeStore:
    """What all clients of one master see, and what they are told to do wrong."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.clients: list[FakeClient] = []
        self.codes: dict[str, int] = {}
        """By the name of a call: what it answers instead of doing anything."""
        self.gates: dict[str, threading.Event] = {}
        """By the name of a call: it waits for this, for thirty seconds at most."""

    def begin(self, call: str) -> int | None:
        """Notes a call; the code that it must answer, if any."""
        self.calls.append(call)
        if call in self.gates:
            assert self.gates[call].wait(30)
        return self.codes.get(call)


class FakeClient:
    """A client that has joined the store."""

    store: FakeStore  # of the class that `fake_mooncake` makes

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.memory = range(0)
        self.is_closed = False
        self.store.clients.append(self)

    def setup(self, settings: dict[str, str]) -> int:
        self.settings = settings
        return self.store.begin("setup") or 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        self.memory = range(address, address + num_bytes)
        return self.store.begin("register_buffer") or 0

    def close(self) -> None:
        self.is_closed = True

    def batch_is_exist(self, names: list[str]) -> list[int]:
        code = self.store.begin("batch_is_exist")
        return [int(name in self.store.values) if code is None else code for name in names]

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        code = self.store.begin("batch_remove")
        assert force
        if code is not None:
            return [code] * len(names)
        return [NOT_FOUND if self.store.values.pop(name, None) is None else 0 for name in names]

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        code = self.store.begin("remove_by_regex")
        assert force
        found = [name for name in self.store.values if code is None and re.search(pattern, name)]
        for name in found:
            del self.store.values[name]
        return len(found) if code is None else code

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        code = self.store.begin("batch_get_into")
        assert len(set(names)) == len(names)  # the real one loads a key once
        self._check(addresses, sizes)
        return [self._get(*each) if code is None else code for each in zip(names, addresses, sizes, strict=True)]

    def _get(self, name: str, address: int, size: int) -> int:
        value = self.store.values.get(name)
        if value is None:
            return NOT_FOUND
        if len(value) > size:
            return TOO_SMALL
        ctypes.memmove(address, value, len(value))
        return len(value)

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        code = self.store.begin("batch_put_from")
        self._check(addresses, sizes)
        for name, address, size in zip(names, addresses, sizes, strict=True):
            if code is None:
                self.store.values.setdefault(name, ctypes.string_at(address, size))  # it never overwrites
        return [code or 0] * len(names)

    def _check(self, addresses: list[int], sizes: list[int]) -> None:
        """Every place lies in memory that was registered, and no two overlap."""
        end = 0
        for address, size in sorted(zip(addresses, sizes, strict=True)):
            assert end <= address
            end = address + size
            assert address in self.memory
            assert end - 1 in self.memory


@contextmanager
def fake_mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeStore, int]]:
    """A store, and the port of its master, for tiers that are opened meanwhile."""
    store = FakeStore()
    package, module = ModuleType("mooncake"), ModuleType("mooncake.store")
    made: Any = type("MooncakeDistributedStore", (FakeClient,), {"store": store})
    package.store, module.MooncakeDistributedStore = module, made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield store, master.getsockname()[1]
