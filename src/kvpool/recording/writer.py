"""Writes a recording: hashes tokens, finds prefixes that were written before, and turns operations into lines.

A token is written as a keyed hash of itself and everything before it. So equal prefixes are equal in the file, and nothing
else is visible, not even how often a word occurs. The key is random and stays in memory, as long as the recorder lives. (The
hash is a keyed 64-bit mix cut to 31 bits. It is cheap, and no cryptographic MAC.)
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvpool.core.handle import KVCacheHandle
from kvpool.pools.arrays import MAX_TOKEN_ID, Int32Array, Int64Array, as_token_array
from kvpool.pools.symbols import encoded_key
from kvpool.recording.operations import MAX_SECONDS, pack
from kvpool.scope import MultimodalItem, Retention, ReuseScope

UInt64Array = npt.NDArray[np.uint64]
Handles = Sequence[KVCacheHandle]
Items = Sequence[MultimodalItem] | None

_TOKEN_BITS, _DROPPED_BITS = np.uint64(31), np.uint64(33)
_LAST_ID = np.uint64(MAX_TOKEN_ID - 1)  # the largest id is not used, because traces end requests with it
_ROUNDS = tuple(
    (np.uint64(factor), np.uint64(shift))
    for factor, shift in ((0x9E3779B97F4A7C15, 30), (0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31))
)
_KNOWN_PREFIXES = 2**20  # block ends remembered, to write a shared prefix once
_MAX_STEPS = 256  # of a batch before its histories are brought up to date
_NOTHING = np.empty(0, np.int32)
_encode = json.JSONEncoder(separators=(",", ":"), default=lambda number: number.item()).encode  # of numpy


class PrefixHash:
    """Keyed hashes of every prefix of a token sequence, vectorised: a running sum of mixed (position, token) pairs."""

    def __init__(self) -> None:
        self._keys = [np.uint64(secrets.randbits(64)) for _ in range(2)]

    def steps(self, tokens: Int32Array, positions: UInt64Array) -> UInt64Array:
        """What each token at its position adds to the sum before it."""
        pairs = positions << _TOKEN_BITS
        pairs ^= tokens.astype(np.uint64)
        return self._mix(pairs, self._keys[0])

    def sums(self, tokens: Int32Array, first: int, base: int, items: Items = None) -> UInt64Array:
        """Running sums at positions `first...`, continuing from `base`, the sum before them.

        A multimodal item changes what its first token adds, so that everything from there on differs for another item.
        """
        steps = self.steps(tokens, np.arange(first, first + len(tokens), dtype=np.uint64))
        for item in items or ():
            steps[item.position] ^= self._named(item)
        sums = np.cumsum(steps)
        sums += np.uint64(base)
        return sums

    def _named(self, item: MultimodalItem) -> np.uint64:
        name = b"%d " % item.length + encoded_key(item.key)
        digest = hashlib.blake2b(name, digest_size=8, key=self._keys[0].tobytes()).digest()
        return np.uint64(int.from_bytes(digest, "little"))

    def ids(self, sums: UInt64Array) -> Int32Array:
        """What is written for tokens with these sums."""
        mixed = self._mix(sums.copy(), self._keys[1])
        mixed >>= _DROPPED_BITS
        return np.minimum(mixed, _LAST_ID).astype(np.int32)

    @staticmethod
    def _mix(values: UInt64Array, key: np.uint64) -> UInt64Array:
        """Mixes the values in place: multiply and shift, three times, between two additions of the key."""
        values += key
        for factor, shift in _ROUNDS:
            values *= factor
            values ^= values >> shift
        values ^= key
        return values


class _Batch:
    """The sequences that decode together. A step hashes one token of each in array operations."""

    def __init__(self, handles: Handles, histories: list[array[int]], num_tokens: Int64Array) -> None:
        self.handles = handles
        self.num_tokens = num_tokens
        lengths = num_tokens.tolist()
        self.sums = np.array([history[end] for history, end in zip(histories, lengths, strict=True)], np.uint64)
        self._histories = histories
        self._steps: list[UInt64Array] = []  # sums that the histories lack

    def append(self, sums: UInt64Array) -> None:
        self.num_tokens = self.num_tokens + 1
        self.sums = sums
        self._steps.append(sums)
        if len(self._steps) >= _MAX_STEPS:
            self.settle()

    def settle(self) -> None:
        """Brings the histories up to date."""
        if self._steps:
            ends = self.num_tokens.tolist()
            for history, end, sums in zip(self._histories, ends, np.stack(self._steps, axis=1), strict=True):
                _put_sums(history, end - len(sums), sums)
            self._steps.clear()


class RecordingWriter:
    """Writes operations in the recorder's thread. `write` takes them as `TraceRecorder` queued them, oldest first."""

    def __init__(self, stream: BinaryIO, header: dict[str, Any], max_bytes: int) -> None:
        self._stream, self._left = stream, max_bytes
        self._hash = PrefixHash()
        self._block_size: int = header["block_size"]
        # Live sequences: the running sums of their known tokens, which begin with the number of their scope.
        self._histories: dict[int, array[int]] = {}
        self._known: dict[int, int] = {}  # sum at the end of a block of a prompt -> the sequence that had it first
        self._scopes: dict[ReuseScope, int] = {ReuseScope(): 0}
        self._names: dict[tuple[str, str], int] = {("tenant", ""): 0}
        self._members: Handles | None = None  # the last batch that was written out; a later line may refer to it
        self._decoding: _Batch | None = None
        self._requests = 0
        self._put(header)

    def write(self, operation: tuple[Any, ...]) -> str | None:
        """One operation; returns why recording must stop, if it must."""
        kind, when, *arguments = operation
        prepare = _PREPARE.get(kind)
        if prepare is not None:
            arguments = prepare(self, *arguments)
        self._put([kind, round(when, 9), *arguments])
        return None if self._left > 0 else "max_bytes is reached"

    def end(self, reason: str | None) -> None:
        """The last line: how the recording ended."""
        self._put({"end": {"requests": self._requests, "stopped_because": reason}})
        self._stream.close()

    def abandon(self) -> None:
        """Gives up a file that cannot be written."""
        with suppress(OSError):
            self._stream.close()

    def _put(self, value: Any) -> None:
        line = _encode(value).encode() + b"\n"
        self._stream.write(line)
        self._left -= len(line)

    # --- names -------------------------------------------------------------------------------------------------------

    def _number(self, kind: str, name: str | None) -> int | None:
        """Names of tenants and sessions are written as numbers."""
        return None if name is None else self._names.setdefault((kind, name), len(self._names))

    def _scope(self, scope: ReuseScope) -> list[int | None] | None:
        """(tenant, scope) as numbers, followed by 1 if the scope names an encoder's input; None for the default scope."""
        if scope == ReuseScope():
            return None
        numbers = [self._number("tenant", scope.tenant), self._scopes.setdefault(scope, len(self._scopes))]
        return [*numbers, 1] if scope.encoder else numbers

    def _serials(self, handles: Handles) -> list[int] | None:
        """The sequences of an operation; None for the same ones as in the last line that named more than one."""
        if handles is self._members:
            return None
        if len(handles) > 1:
            self._members = handles
        return [handle.serial for handle in handles]

    # --- operations --------------------------------------------------------------------------------------------------

    def _allocate(self, serial: int, tokens: Any, scope: ReuseScope, more: dict[str, Any]) -> list[Any]:
        self._requests += 1
        items: Items = more.pop("multimodal", None)
        if (named := self._scope(scope)) is not None:
            more["scope"] = named
        if "session" in more:
            more["session"] = self._number("session", more["session"])
        if "retention" in more:
            more["retention"] = _plain_retention(more["retention"])
        history = self._histories[serial] = array("Q", [self._base(scope)])
        if tokens is None:
            return [serial, None, more]
        sums = self._sums(tokens, scope, items)
        _put_sums(history, 0, sums)
        return [serial, self._prefix(sums, serial), more]

    def _base(self, scope: ReuseScope) -> int:
        """The sum before the first token: scopes share nothing."""
        return self._scopes.setdefault(scope, len(self._scopes))

    def _sums(self, tokens: Any, scope: ReuseScope, items: Items) -> UInt64Array:
        return self._hash.sums(as_token_array(tokens), 0, self._base(scope), items)

    def _prefix(self, sums: UInt64Array, serial: int | None) -> list[Any]:
        """Tokens as a reference to an earlier prompt, and the rest. Later prompts may refer to them by `serial`."""
        ends = sums[self._block_size - 1 :: self._block_size].tolist()
        num_blocks, owner = self._shared(ends)
        if serial is not None and len(self._known) < _KNOWN_PREFIXES:
            self._known.update(dict.fromkeys(ends[num_blocks:], serial))
        num_shared = num_blocks * self._block_size
        return [owner, num_shared, pack(self._hash.ids(sums[num_shared:]))]

    def _shared(self, ends: list[int]) -> tuple[int, int]:
        """How many of the first blocks an earlier prompt had, and which prompt. Prefixes are nested, so it bisects."""
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if ends[middle] in self._known:
                low = middle + 1
            else:
                high = middle
        return low, self._known[ends[low - 1]] if low else 0

    def _extend(self, handles: Handles, num_tokens: Any, lookahead: int) -> list[Any]:
        return [self._serials(handles), _plain(num_tokens), lookahead]

    def _commit(self, handles: Handles, before: Int64Array | None, tokens: Any, counts: Any, items: Items) -> list[Any]:
        serials, numbers = self._serials(handles), None if counts is None else _plain(counts)
        if before is None:
            return [serials, numbers, None]
        ids = as_token_array(tokens)
        if numbers is None and not items and (sums := self._decode(handles, before, ids)) is not None:
            return [serials, None, pack(self._hash.ids(sums))]
        self._settle()
        written, at = [], 0
        for handle, position, count in zip(handles, before.tolist(), numbers or [1] * len(handles), strict=True):
            history = self._histories[handle.serial]
            own = [
                item._replace(position=item.position - at) for item in items or () if 0 <= item.position - at < count
            ]
            sums = self._hash.sums(ids[at : at + count], position, history[position], own)
            _put_sums(history, position, sums)
            written.append(sums)
            at += count
        if numbers is None and handles is self._members:
            self._decoding = _Batch(handles, [self._histories[handle.serial] for handle in handles], before + 1)
        return [serials, numbers, pack(self._hash.ids(np.concatenate(written)) if written else _NOTHING)]

    def _decode(self, handles: Handles, before: Int64Array, tokens: Int32Array) -> UInt64Array | None:
        """One token for each sequence of the last decoded batch; None if the batch is another one, or was rewound."""
        batch = self._decoding
        if batch is None or batch.handles is not handles or not np.array_equal(batch.num_tokens, before):
            return None
        sums = batch.sums + self._hash.steps(tokens, before.astype(np.uint64))
        batch.append(sums)
        return sums

    def _settle(self) -> None:
        """Ends the last decoded batch, because its histories are read or changed now."""
        if self._decoding is not None:
            self._decoding.settle()
            self._decoding = None

    def _fork(self, serial: int, children: list[int]) -> list[Any]:
        self._settle()
        for child in children:
            self._histories[child] = array("Q", self._histories[serial])
        return [serial, children]

    def _free(self, handles: Handles, keep: bool) -> list[Any]:
        for handle in handles:
            self._histories.pop(handle.serial, None)
        return [self._serials(handles), keep]

    def _pin(self, number: int, pinned: Any, scope: ReuseScope, ttl: float | None, items: Items) -> list[Any]:
        if isinstance(pinned, KVCacheHandle):
            return [number, pinned.serial, None, ttl]
        return [number, self._prefix(self._sums(pinned, scope, items), None), self._scope(scope), ttl]

    def _onboard(self, tokens: Any, scope: ReuseScope, items: Items) -> list[Any]:
        return [self._prefix(self._sums(tokens, scope, items), None), self._scope(scope)]

    def _invalidate(self, prefix: Any, scope: ReuseScope | None, session: str | None, items: Items) -> list[Any]:
        where = scope or ReuseScope()
        tokens = None if prefix is None else self._prefix(self._sums(prefix, where, items), None)
        return [tokens, self._scope(where), self._number("session", session)]

    def _session(self, verb: str, tenant: str, name: str, seconds: float | None, child: str | None) -> list[Any]:
        of_child = None if child is None else self._number("session", child)
        return [verb, self._number("tenant", tenant), self._number("session", name), seconds, of_child]


def _put_sums(history: array[int], position: int, sums: UInt64Array) -> None:
    """Sets the sums of tokens from `position` on; later ones stay as they are."""
    history[position + 1 : position + 1 + len(sums)] = array("Q", sums.tobytes())


def _plain(numbers: Any) -> Any:
    return numbers.tolist() if isinstance(numbers, (np.ndarray, np.integer)) else numbers


def finite(seconds: float | None) -> float | None:
    """A time as JSON, which has no infinity: the longest time of a recording stands for it."""
    return None if seconds is None else min(seconds, MAX_SECONDS)


def _plain_retention(retention: Retention) -> dict[str, Any]:
    plain = {**asdict(retention), "ranges": [asdict(part) for part in retention.ranges]}
    for part in plain["ranges"]:
        part["duration"] = finite(part["duration"])
    return {**plain, "decode_duration": finite(retention.decode_duration)}


# How the arguments of an operation are made plain, by the letter of its line (see `operations.VERBS`).
_PREPARE: dict[str, Callable[..., list[Any]]] = {
    "a": RecordingWriter._allocate,
    "e": RecordingWriter._extend,
    "c": RecordingWriter._commit,
    "k": RecordingWriter._fork,
    "f": RecordingWriter._free,
    "t": RecordingWriter._pin,
    "x": RecordingWriter._invalidate,
    "j": RecordingWriter._session,
    "m": lambda writer, tenant: [writer._number("tenant", tenant)],
    "w": lambda writer, handles, counts: [writer._serials(handles), _plain(counts)],
    "s": lambda writer, handles, start, stop: [writer._serials(handles), _plain(start), _plain(stop)],
    "o": lambda writer, handles: [writer._serials(handles)],
    "i": lambda writer, handles: [writer._serials(handles)],
    "b": RecordingWriter._onboard,
    "q": lambda writer, tenant, low, high: [writer._number("tenant", tenant), low, high],
}
