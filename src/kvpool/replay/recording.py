"""The file that a `TraceRecorder` writes: what was done to a manager, with tokens that say only which prefixes are equal.

One JSON value per line. The first line describes the manager, the last one says how the recording ended; between them is
one list per operation: a letter, the time in seconds, and its arguments. Sequences are named by numbers, tokens are base64
of little-endian int32. A prompt names an earlier sequence and how many leading tokens it shares with it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.blocks.arrays import Int32Array
from kvpool.blocks.handle import KVCacheHandle
from kvpool.blocks.hashing import ReuseScope
from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.manager import KVCacheManager
from kvpool.replay.trace import Trace, TraceBuilder, TraceError
from kvpool.stats import CacheStats

MAGIC_KEY = "kvpool_recording"
VERSION = 1
_SWITCHES = (
    "block_size", "enable_prefix_caching", "partial_match", "offload_on_evict", "watermark", "default_ttl",
    "max_pinned_tokens", "max_seq_len",
)  # fmt: skip
_BUDGETS = {"gpu_blocks": Tier.GPU, "host_blocks": Tier.HOST, "disk_blocks": Tier.DISK}


def header_of(manager: KVCacheManager) -> dict[str, Any]:
    """What is needed to build the same manager again, as plain data."""
    config = manager.config
    pools = {name: [p.total for p in manager.stats().pools if p.tier == tier] for name, tier in _BUDGETS.items()}
    return {
        MAGIC_KEY: VERSION,
        "policy": config.eviction_policy,
        "layers": [asdict(layer) for layer in config.layers],
        **{name: getattr(config, name) for name in _SWITCHES},
        **{name: blocks for name, blocks in pools.items() if blocks},
    }


def manager_from(header: dict[str, Any], policy: str | None, clock: Any) -> KVCacheManager:
    """A fresh manager like the recorded one; `policy` replaces its policy."""
    layers = [LayerSpec(**layer) for layer in header["layers"]]
    fields = {name: header[name] for name in (*_SWITCHES, *_BUDGETS) if header.get(name) is not None}
    fields["event_buffer_size"] = 0
    return KVCacheManager(KVCacheConfig(layers, **fields), policy=policy or header["policy"], clock=clock)


def pack(tokens: Int32Array) -> str:
    """Tokens as text."""
    return base64.b64encode(tokens.astype("<i4").tobytes()).decode()


def unpack(text: str) -> Int32Array:
    """The tokens that `pack` made text of."""
    return np.frombuffer(base64.b64decode(text), "<i4").astype(np.int32)


class _Operations:
    """The lines of a recording, checked; keeps the prompt of every sequence that a later one may refer to."""

    def __init__(self, lines: Iterable[bytes], name: str) -> None:
        self._lines = iter(lines)
        self._name = name
        self._prompts: dict[int, Int32Array] = {}
        header = self._parse(next(self._lines, b""), 1)
        if not isinstance(header, dict) or header.get(MAGIC_KEY) != VERSION:
            raise TraceError(f"{name} is no kvpool recording of version {VERSION}")
        self.header: dict[str, Any] = header
        self.end: dict[str, Any] | None = None  # the last line; None while it is not reached, or was never written

    def __iter__(self) -> Iterator[list[Any]]:
        for number, line in enumerate(self._lines, 2):
            operation = self._parse(line, number)
            if isinstance(operation, dict):
                self.end = operation
                return
            yield operation

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise TraceError(
                f"line {number} of {self._name} is broken ({error}); a recording needs all its lines"
            ) from None

    def prompt(self, serial: int, shared_with: int, num_shared: int, packed: str) -> Int32Array:
        """The tokens of a new sequence, remembered for those that share them."""
        rest = unpack(packed)
        tokens = np.concatenate((self._prompts[shared_with][:num_shared], rest)) if num_shared else rest
        self._prompts[serial] = tokens
        return tokens


def requests_of_recording(lines: Iterable[bytes], name: str, limit: int | None = None) -> Trace:
    """The requests in a recording as a trace of tokens: arrival, prompt, tokens generated."""
    operations = _Operations(lines, name)
    found: dict[int, tuple[float, Int32Array, str | None]] = {}
    committed: dict[int, int] = {}
    for operation in operations:
        kind, when = operation[0], operation[1]
        if kind == "a":
            serial, shared_with, num_shared, packed, more = operation[2:]
            tokens = operations.prompt(serial, shared_with, num_shared, packed)
            if limit is not None and len(found) >= limit:
                break
            session = more.get("scope")
            found[serial] = (when * 1000, tokens, None if session is None else f"scope {session}")
        elif kind == "c" and operation[4] is not None:
            counts = operation[3] or [1] * len(operation[2])
            for serial, count in zip(operation[2], counts, strict=True):
                committed[serial] = committed.get(serial, 0) + count
    builder = TraceBuilder(name, unit=1, format="recording")
    for serial, (when, tokens, session) in found.items():
        builder.add(when, tokens.tolist(), len(tokens), committed.get(serial, 0), session)
    return builder.build()


def replay_recording(path: str | Path, policy: str | None = None) -> CacheStats:
    """Does again, on a fresh manager, everything that was recorded; its counters are those of the recorded one.

    With another `policy` the same operations run against another order of eviction. An operation that does not fit any
    more then raises, as it would have in the engine.
    """
    from kvpool.replay.formats import open_bytes

    with open_bytes(Path(path)) as stream:
        operations = _Operations(stream, Path(path).name)
        return _Player(operations, policy).run()


class _Player:
    def __init__(self, operations: _Operations, policy: str | None) -> None:
        self.operations = operations
        self.now = 0.0
        self.manager = manager_from(operations.header, policy, lambda: self.now)
        self.handles: dict[int, KVCacheHandle] = {}

    def run(self) -> CacheStats:
        for kind, when, *arguments in self.operations:
            self.now = when
            getattr(self, f"_{_NAMES[kind]}")(*arguments)
            self.manager.take_copies()
        return self.manager.stats()

    def _all(self, serials: list[int]) -> list[KVCacheHandle]:
        return [self.handles[serial] for serial in serials]

    def _allocate(self, serial: int, shared_with: int, num_shared: int, packed: str, more: dict[str, Any]) -> None:
        tokens = self.operations.prompt(serial, shared_with, num_shared, packed)
        scope = more.pop("scope", None)
        chosen = ReuseScope() if scope is None else ReuseScope(tenant=f"scope {scope}")
        if "num_tokens" in more:
            self.handles[serial] = self.manager.allocate(serial, scope=chosen, **more)
        else:
            self.handles[serial] = self.manager.allocate(serial, tokens, scope=chosen, **more)

    def _extend(self, serials: list[int], counts: Any, lookahead: int) -> None:
        self.manager.extend_batch(self._all(serials), counts, lookahead)

    def _commit(self, serials: list[int], counts: list[int] | None, packed: str | None) -> None:
        tokens = None if packed is None else unpack(packed)
        self.manager.commit_batch(self._all(serials), tokens, counts)

    def _commit_prompt(self, serial: int) -> None:
        self.manager.commit(self.handles[serial])

    def _mark_written(self, serials: list[int], counts: Any) -> None:
        self.manager.mark_written(self._all(serials), counts)

    def _rewind(self, serial: int, num_tokens: int) -> None:
        self.manager.rewind(self.handles[serial], num_tokens)

    def _fork(self, serial: int, children: list[int]) -> None:
        for child, handle in zip(children, self.manager.fork(self.handles[serial], *children), strict=True):
            self.handles[child] = handle

    def _free(self, serials: list[int], keep: bool) -> None:
        self.manager.free_batch([self.handles.pop(serial) for serial in serials], keep)

    def _swap_out(self, serials: list[int]) -> None:
        self.manager.swap_out(*self._all(serials))

    def _swap_in(self, serials: list[int]) -> None:
        self.manager.swap_in(*self._all(serials))

    def _evict(self, num_blocks: int) -> None:
        self.manager.evict(num_blocks)

    def _reset(self) -> None:
        self.manager.reset_prefix_cache()


_NAMES = {
    "a": "allocate", "e": "extend", "c": "commit", "p": "commit_prompt", "w": "mark_written", "r": "rewind",
    "k": "fork", "f": "free", "o": "swap_out", "i": "swap_in", "v": "evict", "z": "reset",
}  # fmt: skip
