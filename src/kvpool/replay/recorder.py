"""Records what an engine asks of its manager, so that it can be replayed; prompts cannot be read back from the file.

A token is written as a keyed hash of itself and everything before it: equal prefixes look equal and nothing else can be
seen, not even how often a word occurs. The key is random, stays in memory and dies with the recorder. (The hash is a keyed
64-bit mix cut to 31 bits, made to be cheap; it is not a cryptographic MAC.)
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import update_wrapper
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvpool.blocks.arrays import Int32Array, as_token_array
from kvpool.blocks.batch import SequenceBatch
from kvpool.blocks.handle import KVCacheHandle
from kvpool.blocks.hashing import ReuseScope
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.replay.formats import open_bytes
from kvpool.replay.recording import header_of, pack
from kvpool.replay.trace import END_MARK

UInt64Array = npt.NDArray[np.uint64]

DEFAULT_MAX_BYTES = 2**30
MAX_PENDING = 2**17  # operations that may wait for the writer
_FOREIGN = ("pin", "unpin", "set_quota", "offload", "onboard", "prefetch", "invalidate", "resize", "defragment")
_KNOWN_PREFIXES = 2**20  # block ends remembered, to write a shared prefix once


class _PrefixHash:
    """Keyed hashes of every prefix of a token sequence, vectorised: a running sum of mixed (position, token) pairs."""

    def __init__(self) -> None:
        self._keys = [np.uint64(secrets.randbits(64)) for _ in range(2)]

    def sums(self, tokens: Int32Array, first: int, base: int) -> UInt64Array:
        """Running sums at positions `first...`, continuing from `base`, the sum before them."""
        positions = np.arange(first, first + len(tokens), dtype=np.uint64)
        sums = np.cumsum(self._mix((positions << np.uint64(31)) ^ tokens.astype(np.uint64), 0), dtype=np.uint64)
        sums += np.uint64(base)
        return sums

    def ids(self, sums: UInt64Array) -> Int32Array:
        """What is written for tokens with these sums."""
        ids = (self._mix(sums, 1) >> np.uint64(33)).astype(np.int32)
        return np.minimum(ids, END_MARK - 1)

    def _mix(self, values: UInt64Array, key: int) -> UInt64Array:
        mixed = (values + self._keys[key]) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31)) ^ self._keys[key]


class TraceRecorder:
    """Follows a manager from `attach` to `close` and writes a recording. `.gz` and `.zst` paths are compressed.

    The calling thread only puts the arguments into a queue; a thread of the recorder hashes and writes. The file ends
    cleanly when it reaches `max_bytes` (before compression) or the writer falls too far behind; `stopped_because` says so.
    Operations are written in the order in which calls return: drive the manager from one thread for an exact replay.
    One thing is hidden together with the tokens: their order. Where several cached blocks share equally many
    tokens with a prompt, partial matching may copy from another one of them in the replay.

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    >>> import tempfile, pathlib
    >>> manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 16)], block_size=4, gpu_blocks=64))
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "chat.kvtrace.gz"
    >>> with TraceRecorder(path).attach(manager):
    ...     for name in ("first", "again"):
    ...         handle = manager.allocate(name, list(range(12)))
    ...         manager.commit(handle)
    ...         manager.free(handle)
    >>> replay_recording(path).hit_blocks == manager.stats().hit_blocks
    True
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_bytes < 1:
            raise InvalidArgumentError(f"max_bytes is {max_bytes}; a recording needs room")
        self.path = Path(path)
        self.stopped_because: str | None = None
        self._max_bytes = max_bytes
        self._clock = clock
        self._queue: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._manager: KVCacheManager | None = None
        self._wrapped: list[str] = []
        self._writer: _Writer | None = None
        self._thread: threading.Thread | None = None

    def attach(self, manager: KVCacheManager) -> TraceRecorder:
        """Starts to follow a manager. What is cached already is not recorded: attach first for an exact replay."""
        if self._manager is not None:
            raise InvalidArgumentError("this recorder follows a manager already; make another one")
        self._manager = manager
        self._started = self._clock()
        stream = open_bytes(self.path, "wb")
        self._writer = _Writer(stream, header_of(manager), self._max_bytes)
        self._thread = threading.Thread(target=self._run, name="kvpool-recorder", daemon=True)
        self._thread.start()
        for name in (*_OBSERVERS, *_FOREIGN):
            original = getattr(manager, name)
            setattr(manager, name, update_wrapper(self._wrap(name, original), original))
            self._wrapped.append(name)
        return self

    def close(self) -> None:
        """Lets go of the manager, writes what is waiting and ends the file."""
        if self._thread is None or self._manager is None:
            return
        for name in self._wrapped:
            delattr(self._manager, name)
        self._wrapped.clear()
        self._queue.put(None)
        self._thread.join()
        self._thread = None

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        observe = _OBSERVERS.get(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.stopped_because is not None:
                return original(*args, **kwargs)
            before = _positions(args[0], args[1:], kwargs) if name == "commit_batch" else None
            result = original(*args, **kwargs)
            now = self._clock() - self._started
            if observe is None:
                self._queue.put(("foreign", now, name))
            elif (operation := observe(result, before, *args, **kwargs)) is not None:
                self._queue.put((operation[0], now, *operation[1:]))
            if self._queue.qsize() > MAX_PENDING:
                self.stopped_because = f"the writer is {MAX_PENDING} operations behind"
            return result

        return call

    def _run(self) -> None:
        assert self._writer is not None
        while (operation := self._queue.get()) is not None:
            if self.stopped_because is None:
                self.stopped_because = self._writer.write(operation)
        self._writer.end(self.stopped_because)


def _serials(batch: Any) -> tuple[int, ...]:
    handles = batch.handles if isinstance(batch, SequenceBatch) else batch
    return tuple([handle.serial for handle in handles])


def _positions(batch: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """Where each sequence of a commit stands before it, when token ids are given."""
    tokens = rest[0] if rest else kwargs.get("tokens")
    if tokens is None:
        return None
    if isinstance(batch, SequenceBatch):  # the hot path: one lookup for the whole batch
        return list(batch._state.rows.committed[batch.rows].tolist())
    handles: Sequence[KVCacheHandle] = batch
    return [handle.num_committed for handle in handles]


def _plain(counts: Any) -> Any:
    return (
        counts.tolist() if isinstance(counts, np.ndarray) else list(counts) if not isinstance(counts, int) else counts
    )


def _allocated(
    handle: KVCacheHandle, _: None, request_id: Hashable, tokens: Any = None, *, scope: ReuseScope | None = None,
    retention: object = None, session: str | None = None, **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    chosen = {key: value for key, value in more.items() if value is not None}
    ids = None if tokens is None else as_token_array(tokens).copy()
    return "a", handle.serial, ids, scope or ReuseScope(), chosen, retention is not None


# What is written for each verb: its result, the positions before it (commit_batch), then its own arguments.
_OBSERVERS: dict[str, Callable[..., tuple[Any, ...] | None]] = {
    "allocate": _allocated,
    "extend_batch": lambda result, _, batch, num_tokens=1, lookahead=0, out=None: (
        "e", _serials(batch), _plain(num_tokens), lookahead),
    "commit_batch": lambda result, before, batch, tokens, counts=None: (
        "c", _serials(batch), before, None if tokens is None else as_token_array(tokens).copy(),
        None if counts is None else _plain(counts)),
    "commit": lambda result, _, handle, tokens=None: ("p", handle.serial) if tokens is None else None,
    "mark_written": lambda result, _, batch, num_tokens=1: (
        "w", _serials([batch] if isinstance(batch, KVCacheHandle) else batch), _plain(num_tokens)),
    "rewind": lambda result, _, handle, num_tokens: ("r", handle.serial, int(num_tokens)),
    "fork": lambda result, _, handle, *request_ids: ("k", handle.serial, [child.serial for child in result]),
    "free": lambda result, _, handle, keep=True: ("f", [handle.serial], keep),
    "free_batch": lambda result, _, batch, keep=True: ("f", _serials(batch), keep),
    "swap_out": lambda result, _, *handles: ("o", _serials(handles)),
    "swap_in": lambda result, _, *handles: ("i", _serials(handles)),
    "evict": lambda result, _, num_blocks, **more: ("v", num_blocks) if not more else ("foreign", "evict"),
    "reset_prefix_cache": lambda result, _: ("z",),
}  # fmt: skip


class _Writer:
    """Runs in the recorder's thread: hashes tokens, finds shared prefixes, writes lines."""

    def __init__(self, stream: BinaryIO, header: dict[str, Any], max_bytes: int) -> None:
        self._stream, self._left = stream, max_bytes
        self._hash = _PrefixHash()
        self._block_size: int = header["block_size"]
        self._sums: dict[int, array[int]] = {}  # live sequences: the sum at each of their positions
        self._known: dict[int, int] = {}  # sum at the end of a block of a prompt -> the sequence that had it first
        self._scopes: dict[ReuseScope, int] = {ReuseScope(): 0}
        self._foreign: dict[str, int] = {}
        self._requests = 0
        self._put(header)

    def write(self, operation: tuple[Any, ...]) -> str | None:
        """One operation; returns why recording must stop, if it must."""
        kind, when, *arguments = operation
        if kind == "foreign":
            self._foreign[arguments[0]] = self._foreign.get(arguments[0], 0) + 1
            return None
        if kind == "a":
            arguments = self._prompt(*arguments)
        elif kind == "c":
            arguments = self._commit(*arguments)
        elif kind == "k":
            for child in arguments[1]:
                self._sums[child] = array("Q", self._sums[arguments[0]])
        elif kind == "f":
            for serial in arguments[0]:
                self._sums.pop(serial, None)
        self._put([kind, round(when, 6), *arguments])
        return None if self._left > 0 else "max_bytes is reached"

    def end(self, reason: str | None) -> None:
        self._put({"end": {"requests": self._requests, "stopped_because": reason, "not_recorded": self._foreign}})
        self._stream.close()

    def _put(self, value: Any) -> None:
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        self._stream.write(line)
        self._left -= len(line)

    def _prompt(
        self, serial: int, tokens: Int32Array | None, scope: ReuseScope, more: dict[str, Any], retained: bool
    ) -> list[Any]:
        self._requests += 1
        if retained:
            self._foreign["retention"] = self._foreign.get("retention", 0) + 1
        if scope != ReuseScope():
            more["scope"] = self._scopes.setdefault(scope, len(self._scopes))
        if tokens is None:
            self._sums[serial] = array("Q")
            return [serial, 0, 0, "", more]
        sums = self._hash.sums(tokens, 0, self._scopes.get(scope, 0))
        self._sums[serial] = array("Q", sums.tobytes())
        ends = sums[self._block_size - 1 :: self._block_size].tolist()
        shared_blocks, owner = self._shared(ends)
        for end in ends[shared_blocks:]:
            if len(self._known) < _KNOWN_PREFIXES:
                self._known[end] = serial
        num_shared = shared_blocks * self._block_size
        return [serial, owner, num_shared, pack(self._hash.ids(sums[num_shared:])), more]

    def _shared(self, ends: list[int]) -> tuple[int, int]:
        """How many leading blocks an earlier prompt had, and which; by bisection, since known prefixes are nested."""
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if ends[middle] in self._known:
                low = middle + 1
            else:
                high = middle
        return low, self._known[ends[low - 1]] if low else 0

    def _commit(
        self, serials: Sequence[int], before: list[int] | None, tokens: Int32Array | None, counts: list[int] | None
    ) -> list[Any]:
        if tokens is None or before is None:
            return [serials, counts, None]
        written, at = [], 0
        for serial, position, count in zip(serials, before, counts or [1] * len(serials), strict=True):
            history = self._sums[serial]
            del history[position:]
            sums = self._hash.sums(tokens[at : at + count], position, history[-1] if history else 0)
            history.frombytes(sums.tobytes())
            written.append(sums)
            at += count
        ids = self._hash.ids(np.concatenate(written)) if written else np.empty(0, np.int32)
        return [serials, counts, pack(ids)]
