"""The file that a `TraceRecorder` writes: what was done to a manager, with tokens that say only which prefixes are equal.

One JSON value per line. The first line describes the manager, the last one says how the recording ended; between them is
one list per operation: a letter (`VERBS`), the time in seconds, and its arguments. Sequences, tenants and sessions are
numbers. A list of sequences may be null: the same as in the last line that named more than one. Tokens are base64 of
little-endian int32; those of a prompt are [earlier sequence, how many leading tokens are its, the rest].
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
from kvpool.blocks.node import Node
from kvpool.blocks.pins import Pin
from kvpool.blocks.retention import Retention, TokenRange
from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.manager import KVCacheManager
from kvpool.replay.trace import Trace, TraceBuilder, TraceError
from kvpool.stats import CacheStats

MAGIC_KEY = "kvpool_recording"
VERSION = 2
_SWITCHES = (
    "block_size", "enable_prefix_caching", "partial_match", "offload_on_evict", "watermark", "default_ttl",
    "max_pinned_tokens", "max_seq_len",
)  # fmt: skip
_BUDGETS = {"gpu_blocks": Tier.GPU, "host_blocks": Tier.HOST, "disk_blocks": Tier.DISK}
VERBS = {
    "a": "allocate", "e": "extend", "c": "commit", "p": "commit_prompt", "w": "mark_written", "s": "slot_mapping",
    "r": "rewind", "k": "fork", "f": "free", "l": "store_last_logits", "o": "swap_out", "i": "swap_in", "t": "pin",
    "u": "unpin", "q": "set_quota", "v": "evict", "d": "offload", "b": "onboard", "x": "invalidate", "h": "resize",
    "g": "defragment", "z": "reset_prefix_cache",
}  # fmt: skip


def header_of(manager: KVCacheManager) -> dict[str, Any]:
    """What is needed to build the same manager again, as plain data."""
    config, stats = manager.config, manager.stats()
    pools = {name: [p.total for p in stats.pools if p.tier == tier] for name, tier in _BUDGETS.items()}
    return {
        MAGIC_KEY: VERSION,
        "policy": manager._state.cache.policies[Tier.GPU].name,
        "cached_runs": stats.num_cached_runs,  # before the first line: a replay does not have them
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
        self._batch: list[int] = []
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
            if not isinstance(operation, list) or len(operation) < 2 or operation[0] not in VERBS:
                raise TraceError(f"line {number} of {self._name} is no operation: {str(operation)[:80]}")
            yield operation

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise TraceError(
                f"line {number} of {self._name} is broken ({error}); a recording needs all its lines"
            ) from None

    def notes(self) -> list[str]:
        """What is missing; to be asked when all operations were read."""
        found = []
        if runs := self.header.get("cached_runs"):
            found.append(f"{runs} cached runs are older than the recording: what was reused of them is missing")
        if self.end is None:
            found.append(
                "the recording has no end: whoever made it did not close it, and its last operations are missing"
            )
        elif (reason := self.end.get("end", {}).get("stopped_because")) is not None:
            found.append(f"the recording stopped early: {reason}")
        return found

    def batch(self, serials: list[int] | None) -> list[int]:
        """The sequences of an operation."""
        if serials is None:
            return self._batch
        if len(serials) > 1:
            self._batch = serials
        return serials

    def tokens(self, prefix: list[Any]) -> Int32Array:
        """Tokens from what they share with an earlier prompt, and the rest."""
        shared_with, num_shared, packed = prefix
        rest = unpack(packed)
        return np.concatenate((self._prompts[shared_with][:num_shared], rest)) if num_shared else rest

    def prompt(self, serial: int, prefix: list[Any] | None) -> Int32Array | None:
        """The tokens of a new sequence, remembered for those that share them; None if only their number is known."""
        if prefix is None:
            return None
        self._prompts[serial] = self.tokens(prefix)
        return self._prompts[serial]


def requests_of_recording(lines: Iterable[bytes], name: str, limit: int | None = None) -> Trace:
    """The requests in a recording as a trace of tokens: arrival, prompt, tokens generated, tenant."""
    operations = _Operations(lines, name)
    found: dict[int, tuple[float, Int32Array, dict[str, Any]]] = {}
    committed: dict[int, int] = {}
    for kind, when, *arguments in operations:
        if kind == "a":
            serial, prefix, more = arguments
            tokens = operations.prompt(serial, prefix)
            if limit is not None and len(found) >= limit:
                break
            found[serial] = (when * 1000, unpack("") if tokens is None else tokens, more)
        elif kind in "ewsfoi":
            operations.batch(arguments[0])
        elif kind == "c":
            serials = operations.batch(arguments[0])
            if arguments[2] is not None:
                for serial, count in zip(serials, arguments[1] or [1] * len(serials), strict=True):
                    committed[serial] = committed.get(serial, 0) + count
    builder = TraceBuilder(name, unit=1, format="recording")
    for serial, (when, tokens, more) in found.items():
        session = None if "session" not in more else f"session {more['session']}"
        builder.add(
            when,
            tokens.tolist(),
            len(tokens),
            committed.get(serial, 0),
            session,
            _scope(more.get("scope")).tenant or None,
        )
    return builder.build()


def _scope(numbers: list[int] | None) -> ReuseScope:
    """A scope like the recorded one: equal numbers give equal scopes and tenants."""
    if numbers is None:
        return ReuseScope()
    tenant, scope, *encoder = numbers
    name = f"scope {scope}"
    return ReuseScope(tenant=f"tenant {tenant}" if tenant else "", adapter=name, encoder=name if encoder else "")


def replay_recording(path: str | Path, policy: str | None = None) -> CacheStats:
    """Does again, on a fresh manager, everything that was recorded; its counters are those of the recorded one.

    With another `policy` the same operations run against another order of eviction. An operation that does not fit any
    more then raises, as it would have in the engine.
    """
    return play_recording(path, policy)[0]


def play_recording(path: str | Path, policy: str | None = None) -> tuple[CacheStats, list[str]]:
    """`replay_recording`, and sentences about what the file does not hold."""
    from kvpool.replay.formats import open_bytes

    with open_bytes(Path(path)) as stream:
        operations = _Operations(stream, Path(path).name)
        stats = _Player(operations, policy).run()
    return stats, operations.notes()


class _Player:
    def __init__(self, operations: _Operations, policy: str | None) -> None:
        self.operations = operations
        self.now = 0.0
        self.manager = manager_from(operations.header, policy, lambda: self.now)
        self.handles: dict[int, KVCacheHandle] = {}
        self.pins: dict[int, Pin] = {}
        self.source: int | None = None  # the run from which the recorded manager took a partial block
        self.manager._state.cache.choose_source = self._recorded_source

    def run(self) -> CacheStats:
        for kind, when, *arguments in self.operations:
            self.now = when
            getattr(self, f"_{VERBS[kind]}")(*arguments)
            self.manager.take_copies()
        return self.manager.stats()

    def _recorded_source(self, found: Node) -> Node:
        """Of blocks that share equally many tokens with a prompt the tree takes a neighbour in the order of the tokens.

        A recording hides that order and names the choice instead.
        """
        if self.source is None or found.created == self.source:
            return found
        siblings = (found.parent.children or {}).values()
        recorded = next((node for node in siblings if node.created == self.source), None)
        if recorded is None:
            return found
        self.manager._state.cache.sync(recorded)
        return recorded

    def _all(self, serials: list[int] | None) -> list[KVCacheHandle]:
        return [self.handles[serial] for serial in self.operations.batch(serials)]

    def _allocate(self, serial: int, prefix: list[Any] | None, more: dict[str, Any]) -> None:
        tokens = self.operations.prompt(serial, prefix)
        self.source = more.pop("source", None)
        scope = _scope(more.pop("scope", None))
        if "session" in more:
            more["session"] = f"session {more['session']}"
        if "retention" in more:
            more["retention"] = _retention(more["retention"])
        self.handles[serial] = self.manager.allocate(serial, tokens, scope=scope, **more)
        self.source = None

    def _extend(self, serials: list[int] | None, counts: Any, lookahead: int) -> None:
        self.manager.extend_batch(self._all(serials), counts, lookahead)

    def _commit(self, serials: list[int] | None, counts: list[int] | None, packed: str | None) -> None:
        self.manager.commit_batch(self._all(serials), None if packed is None else unpack(packed), counts)

    def _commit_prompt(self, serial: int) -> None:
        self.manager.commit(self.handles[serial])

    def _mark_written(self, serials: list[int] | None, counts: Any) -> None:
        self.manager.mark_written(self._all(serials), counts)

    def _slot_mapping(self, serials: list[int] | None, start: Any, stop: Any) -> None:
        self.manager.slot_mapping(self._all(serials), start, stop)

    def _rewind(self, serial: int, num_tokens: int) -> None:
        self.manager.rewind(self.handles[serial], num_tokens)

    def _fork(self, serial: int, children: list[int]) -> None:
        for child, handle in zip(children, self.manager.fork(self.handles[serial], *children), strict=True):
            self.handles[child] = handle

    def _free(self, serials: list[int] | None, keep: bool) -> None:
        self.manager.free_batch([self.handles.pop(serial) for serial in self.operations.batch(serials)], keep)

    def _store_last_logits(self, serial: int, num_tokens: int | None) -> None:
        self.manager.store_last_logits(self.handles[serial], True, num_tokens)

    def _swap_out(self, serials: list[int] | None) -> None:
        self.manager.swap_out(*self._all(serials))

    def _swap_in(self, serials: list[int] | None) -> None:
        self.manager.swap_in(*self._all(serials))

    def _pin(self, number: int, pinned: Any, scope: list[int] | None, ttl: float | None) -> None:
        if isinstance(pinned, int):
            self.pins[number] = self.manager.pin(self.handles[pinned], ttl=ttl)
        else:
            self.pins[number] = self.manager.pin(self.operations.tokens(pinned), _scope(scope), ttl)

    def _unpin(self, number: int) -> None:
        self.manager.unpin(self.pins.pop(number))

    def _set_quota(self, tenant: int, guaranteed: Any, maximum: Any) -> None:
        self.manager.set_quota(_scope([tenant, 0]).tenant, guaranteed=guaranteed, maximum=maximum)

    def _evict(self, num_blocks: int, pool: int, tier: int) -> None:
        self.manager.evict(num_blocks, pool=pool, tier=Tier(tier))

    def _offload(self, num_blocks: int, pool: int, tier: int) -> None:
        self.manager.offload(num_blocks, pool=pool, tier=Tier(tier))

    def _onboard(self, prefix: list[Any], scope: list[int] | None) -> None:
        self.manager.onboard(self.operations.tokens(prefix), _scope(scope))

    def _invalidate(self, prefix: list[Any] | None, scope: list[int] | None, session: int | None) -> None:
        if session is not None:
            self.manager.invalidate(session=f"session {session}")
        else:
            self.manager.invalidate(None if prefix is None else self.operations.tokens(prefix), scope=_scope(scope))

    def _resize(self, num_blocks: int, pool: int, tier: int) -> None:
        self.manager.resize(num_blocks, pool=pool, tier=Tier(tier))

    def _defragment(self, tier: int) -> None:
        self.manager.defragment(Tier(tier))

    def _reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()


def _retention(plain: dict[str, Any]) -> Retention:
    return Retention(**{**plain, "ranges": tuple(TokenRange(**part) for part in plain["ranges"])})
