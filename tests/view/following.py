"""What a page does with the stream, in Python; and a manager that is asked for all kinds of things at random."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool import KVCacheHandle, KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.core.cache import Pin
from kvpool.errors import KVPoolError
from managers import FULL, make_manager

WINDOWED = LayerSpec(kv_heads=1, head_dim=8, window=8)


def unpacked(text: str, kind: str) -> Any:
    return np.frombuffer(base64.b64decode(text), kind)


def events_in(stream: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, data) of every whole event."""
    for event in stream.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        yield lines["event"], json.loads(lines["data"])


class Mirror:
    """A copy of everything, kept as a page keeps it."""

    def __init__(self) -> None:
        self.number = 0
        self.words: dict[tuple[int, str], Any] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.rest: dict[str, Any] = {}

    def apply(self, frame: dict[str, Any]) -> None:
        assert frame["after"] in (None, self.number)
        if frame["after"] is None:
            self.words.clear()
        self.number = frame["number"]
        for told in frame["pools"]:
            key = told["pool"], told["tier"]
            if key not in self.words or len(self.words[key]) != told["blocks"]:
                self.words[key] = np.zeros(told["blocks"], np.uint64)
            if "spans" in told:
                start, length = (unpacked(told["spans"][name], "<u4") for name in ("start", "length"))
                for first, many, word in zip(start, length, unpacked(told["spans"]["word"], "<u8"), strict=True):
                    self.words[key][first : first + many] = word
        if "sequences" in frame:
            told = {int(serial): [_ids(table) for table in tables] for serial, tables in frame["tables"].items()}
            self.tables = {row[0]: told.get(row[0], self.tables.get(row[0], [])) for row in frame["sequences"]}
        self.rest |= frame


def _ids(text: str) -> list[int]:
    pairs = unpacked(text, "<i4").reshape(-1, 2).tolist()
    return [first + step if first >= 0 else -1 for first, many in pairs for step in range(many)]


class Random:
    """Does something with a manager at every step, whatever it allows."""

    def __init__(self, seed: int, *layers: LayerSpec) -> None:
        self.random = random.Random(seed)
        self.manager: KVCacheManager = make_manager(*(layers or (FULL,)), gpu_blocks=40, host_blocks=24)
        self.live: list[KVCacheHandle] = []
        self.pins: list[Pin] = []
        self.number = 0

    def step(self) -> None:
        verbs = [self._admit] * 4 + [self._decode] * 6 + [self._end] * 2
        verbs += [self._fork, self._swap, self._pin, self._unpin, self._evict, self._resize, self._forget, self._tidy]
        with contextlib.suppress(KVPoolError):
            self.random.choice(verbs)()
        self.manager.take_copies()

    def _admit(self) -> None:
        self.number += 1
        first = self.random.choice((0, 0, 1000, 2000))
        tokens = list(range(first, first + self.random.randint(1, 40))) + [9999 + self.number] * self.random.randint(
            0, 6
        )
        tenant = self.random.choice(("", "acme", "globex"))
        handle = self.manager.allocate(self.number, tokens, scope=ReuseScope(tenant=tenant))
        self.live.append(handle)
        self.manager.commit(handle, len(tokens) - handle.num_cached_tokens)

    def _chosen(self) -> KVCacheHandle:
        return self.random.choice(self.live or [None])  # type: ignore[list-item]

    def _decode(self) -> None:
        handle = self._chosen()
        if handle and not handle.is_swapped:
            self.manager.extend(handle, 1)
            self.manager.commit(handle, [self.random.randint(0, 3)])

    def _end(self) -> None:
        if handle := self._chosen():
            self.live.remove(handle)
            self.manager.free(handle)

    def _fork(self) -> None:
        if handle := self._chosen():
            self.number += 1
            self.live += self.manager.fork(handle, self.number)

    def _swap(self) -> None:
        if handle := self._chosen():
            (self.manager.swap_in if handle.is_swapped else self.manager.swap_out)([handle])

    def _pin(self) -> None:
        self.pins.append(self.manager.cache.pin(list(range(16)), ReuseScope(tenant=self.random.choice(("", "acme")))))

    def _unpin(self) -> None:
        if self.pins:
            self.manager.cache.unpin(self.pins.pop())

    def _evict(self) -> None:
        self.random.choice((self.manager.cache.evict, self.manager.cache.offload))(self.random.randint(1, 8))

    def _resize(self) -> None:
        self.manager.cache.resize(self.random.choice((36, 40, 48)), tier=self.random.choice((Tier.GPU, Tier.HOST)))

    def _forget(self) -> None:
        self.manager.cache.invalidate(list(range(self.random.randint(4, 30))))

    def _tidy(self) -> None:
        self.manager.cache.defragment()
