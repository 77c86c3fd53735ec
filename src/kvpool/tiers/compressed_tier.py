"""CompressedTier: encodes values before another tier stores them, and decodes them when they are loaded."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpool.checks import show
from kvpool.errors import ConfigError
from kvpool.tiers.codecs import ITEM_BYTES, Codec, CompressionStats, Fp8, Planes, UnreadableValueError
from kvpool.tiers.contract import KeyedTier, Outcome, Purged, Room
from kvpool.tiers.keys import SPACE_BYTES, TAG_BYTES, KeyPattern, KeySpace
from kvpool.tiers.options import choice, option

AT_ONCE_BYTES = 2**26
"""Values that are encoded or decoded together: memory beside the caller's."""

SLACK_BYTES = 160
"""What an encoded value may be longer than the value: its lengths, and what a codec adds, such as lengths of planes."""

_LENGTH_BYTES = 8
CODECS = ("zstd", "lz4", "fp8")


@dataclass(frozen=True)
class CompressionOptions:
    """The options that any address of a tier may have for compression."""

    compress: str = option(choice(*CODECS), "")
    dtype: str = option(choice(*ITEM_BYTES), "bfloat16")


def make_codec(name: str, dtype: str = "bfloat16") -> Codec:
    """`zstd` or `lz4` for planes of bytes (exact), `fp8`; `dtype` is that of keys and values."""
    if name not in CODECS:
        raise ConfigError(f"codec={show(name)} must be one of {', '.join(CODECS)}")
    return Fp8(dtype) if name == "fp8" else Planes(dtype, name)


class CompressedTier(KeyedTier):
    """Stores values in `inner`, encoded by a codec. Keys depend on the codec: values of other codecs, or none, are not found.

    >>> from kvpool.tiers import MemoryTier
    >>> tier = CompressedTier(MemoryTier(2**20), "zstd")
    >>> tier.store([bytes(32)], [bytes(100_000)])
    [<Outcome.OK: 0>]
    >>> tier.stats().used_bytes < 1000
    True
    """

    def __init__(self, inner: KeyedTier, codec: Codec | str, *, dtype: str = "bfloat16") -> None:
        if not isinstance(inner, KeyedTier):
            raise ConfigError(f"a CompressedTier needs a tier to store in, got {show(inner)}")
        super().__init__(inner.name, timeout=inner.timeout)
        self.inner = inner
        self.medium = inner.medium
        self.codec = codec if isinstance(codec, Codec) else make_codec(codec, dtype)
        self._root = hashlib.sha256(b"kvpool codec\0" + self.codec.identity.encode() + b"\0")
        self._sums = CompressionStats(self.codec.identity)
        self._adding = threading.Lock()

    def introduce(self, space: KeySpace) -> None:
        """Tells the inner tier: its keys begin with the same bytes."""
        self.inner.introduce(space)

    def compression(self) -> CompressionStats:
        """How much smaller values became, how long it took, and what was lost."""
        with self._adding:
            return replace(self._sums, largest_error=self.codec.error())

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self.inner.contains(self._own(keys), timeout=_left(deadline))

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        own = self._own(keys)
        outcomes = [
            Outcome.OK if found else Outcome.LATE for found in self.inner.contains(own, timeout=_left(deadline))
        ]
        new = [index for index, outcome in enumerate(outcomes) if outcome == Outcome.LATE]
        for part in _parts(new, data):
            if time.monotonic() >= deadline:
                break
            started = time.monotonic()
            encoded = [self._encoded(data[index]) for index in part]
            self._add("encoding", started, sum(data[index].nbytes for index in part), sum(map(len, encoded)))
            stored = self.inner.store([own[index] for index in part], encoded, timeout=_left(deadline))
            for index, outcome in zip(part, stored, strict=True):
                outcomes[index] = outcome
        return outcomes

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        own, outcomes = self._own(keys), [Outcome.LATE] * len(keys)
        for part in _parts(list(range(len(keys))), out):
            if time.monotonic() >= deadline:
                break
            buffers = [bytearray(out[index].nbytes + SLACK_BYTES) for index in part]
            loaded = self.inner.load([own[index] for index in part], buffers, timeout=_left(deadline))
            started = time.monotonic()
            for index, buffer, outcome in zip(part, buffers, loaded, strict=True):
                outcomes[index] = self._decoded(memoryview(buffer), out[index]) if outcome == Outcome.OK else outcome
            self._add("decoding", started)
        return outcomes

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        return self.inner.remove(self._own(keys), timeout=_left(deadline))

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        return self.inner.purge(pattern, timeout=_left(deadline))

    def _look(self) -> Room:
        stats = self.inner.stats()
        return Room(stats.num_values, stats.used_bytes, stats.capacity_bytes, stats.problem)

    def _close(self) -> None:
        self.inner.close()

    def _own(self, keys: Sequence[bytes]) -> list[bytes]:
        own = []
        for key in keys:
            hashed = self._root.copy()
            hashed.update(key)
            own.append(key[:_SHOWN_BYTES] + hashed.digest()[_SHOWN_BYTES:])
        return own

    def _encoded(self, data: memoryview) -> bytes:
        """Both lengths, then the encoded value."""
        pieces: list[Any] = self.codec.encode(data)
        body = b"".join(pieces)
        return data.nbytes.to_bytes(_LENGTH_BYTES, "little") + len(body).to_bytes(_LENGTH_BYTES, "little") + body

    def _decoded(self, encoded: memoryview, out: memoryview) -> Outcome:
        length, packed = (
            int.from_bytes(encoded[start : start + _LENGTH_BYTES], "little") for start in (0, _LENGTH_BYTES)
        )
        body = encoded[2 * _LENGTH_BYTES :][:packed]
        if length > out.nbytes:
            return Outcome.FAILED
        try:
            self.codec.decode(body, out[:length])
        except Exception as error:  # a codec of a user may raise anything
            if not isinstance(error, UnreadableValueError):
                self.report(f"{type(error).__name__}: {error}")
            return Outcome.FAILED
        self.left_unfilled(out.nbytes - length)
        return Outcome.OK

    def _add(self, what: str, started: float, before: int = 0, after: int = 0) -> None:
        name = f"seconds_{what}"
        with self._adding:
            sums = self._sums
            spent = {name: getattr(sums, name) + time.monotonic() - started}
            self._sums = replace(
                sums, bytes_before=sums.bytes_before + before, bytes_after=sums.bytes_after + after, **spent
            )


_SHOWN_BYTES = SPACE_BYTES + TAG_BYTES  # the first bytes of a key, by which `purge` finds values


def _parts(indices: list[int], buffers: Sequence[memoryview]) -> list[list[int]]:
    """Indices in parts of at most `AT_ONCE_BYTES`, or one value."""
    parts: list[list[int]] = []
    size = 0
    for index in indices:
        if not parts or size + buffers[index].nbytes > AT_ONCE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(index)
        size += buffers[index].nbytes
    return parts


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)
