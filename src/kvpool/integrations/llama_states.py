"""States of llama.cpp in tiers. They are found by the blocks of tokens that they begin with, and verified.

A state is stored as its tokens, a checksum and the bytes that llama.cpp wrote. It is cut into pieces of equal size, because
tiers work best with values of one size:

    magic and version (8) | number of tokens (8) | bytes of the state (8) | XXH3 of what follows (8) | tokens | state | zeros

Every full block of its tokens has a *signpost*: a small value that names the pieces, stored under the digest of all tokens up
to the end of the block. Signposts are written last, so a signpost always leads to a complete state. One look-up for the
blocks of a prompt finds the longest prefix that some state has. A state serves every text with a common beginning, because
llama.cpp can drop the tokens after the common part.
"""

from __future__ import annotations

import hashlib
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.config.layers import ceil_div
from kvpool.errors import ConfigError, StorageError
from kvpool.integrations.connector.orders import Introduction
from kvpool.integrations.connector.settings import ConnectorSettings, open_worker_tiers
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.scope import ReuseScope
from kvpool.tiers import CompressedTier, Fingerprint, KeyedTier, KeySpace, Outcome, TierStats
from kvpool.tiers.codecs import Fp8
from kvpool.tiers.envelope import checksum
from kvpool.tiers.keys import named
from kvpool.tiers.remote.remote_tier import RemoteTier
from kvpool.tiers.transport.chain import KnownKeys, TierChain, WatchedTier, call_seconds
from kvpool.tiers.transport.staging import Bytes

PIECE_BYTES = 2**20
SIGNPOST_BYTES = 64
_MAGIC, _SIGN = b"kvllama\1", b"kvsign\0\1"
_HEAD = struct.Struct("<8sQQQ")
_SIGNPOST = struct.Struct(f"<8s16sQQ{SIGNPOST_BYTES - 40}x")


class Signpost(NamedTuple):
    """Names the pieces of a state, and says how large it is."""

    name: bytes
    num_tokens: int
    num_state_bytes: int

    @classmethod
    def read(cls, data: bytes | bytearray) -> Signpost | None:
        """Reads a packed signpost; None if it is none."""
        magic, name, num_tokens, num_state_bytes = _SIGNPOST.unpack(data)
        return cls(name, num_tokens, num_state_bytes) if magic == _SIGN else None

    def packed(self) -> bytes:
        """The signpost as bytes."""
        return _SIGNPOST.pack(_SIGN, *self)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces together."""
        return ceil_div(_HEAD.size + 4 * self.num_tokens + self.num_state_bytes, PIECE_BYTES) * PIECE_BYTES


class StateBlob:
    """The memory of one state. llama.cpp reads and writes `state`; tiers read and write `pieces`."""

    def __init__(self, signpost: Signpost) -> None:
        self.signpost = signpost
        self._buffer = np.zeros(signpost.num_bytes, np.uint8)
        begin = _HEAD.size + 4 * signpost.num_tokens
        self._content = self._buffer[_HEAD.size : begin + signpost.num_state_bytes]
        self.tokens: npt.NDArray[np.int32] = self._buffer[_HEAD.size : begin].view("<i4")
        self.state: Bytes = self._buffer[begin : begin + signpost.num_state_bytes]

    @classmethod
    def of(cls, tokens: npt.NDArray[np.int32], num_state_bytes: int) -> StateBlob:
        """Memory for a new state of these tokens, with a unique name, so that pieces of two states never mix."""
        blob = cls(Signpost(uuid.uuid4().bytes, len(tokens), num_state_bytes))
        blob.tokens[:] = tokens
        return blob

    @property
    def pieces(self) -> list[Bytes]:
        """All of it, in values of one size."""
        return [self._buffer[start : start + PIECE_BYTES] for start in range(0, len(self._buffer), PIECE_BYTES)]

    def seal(self) -> None:
        """Writes the header, once `state` is filled."""
        self._buffer[: _HEAD.size] = np.frombuffer(self._head(), np.uint8)

    def is_whole(self) -> bool:
        """Whether the content is what was sealed."""
        return self._buffer[: _HEAD.size].tobytes() == self._head()

    def _head(self) -> bytes:
        _, num_tokens, num_state_bytes = self.signpost
        return _HEAD.pack(_MAGIC, num_tokens, num_state_bytes, checksum(self.signpost.name, self._content.data))


def num_common(tokens: npt.NDArray[np.int32], others: npt.NDArray[np.int32]) -> int:
    """How many of their first tokens two texts have in common."""
    shorter = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:shorter] != others[:shorter])
    return int(differ[0]) if len(differ) else shorter


BLOCK_TOKENS = 64
GROUPS = ("signposts", f"pieces of {PIECE_BYTES} bytes")
_SIGNPOSTS, _PIECES = range(2)
Tokens: TypeAlias = npt.NDArray[np.int32]
_SCOPE = ReuseScope()
_AT_ONCE = 16  # pieces per call. Each call has the timeout; a large state may take longer in all
_TRIES = 2  # after so many wrong states of a tier, the prompt is computed
_MAX_REMEMBERED = 4096  # names of states


@dataclass(frozen=True)
class StateStats:
    """Counts since the start. `hits` to `late` count prompts; `stored` to `too_large` count states, once per tier."""

    lookups: int = 0
    hits: int = 0
    tokens_loaded: int = 0
    failed: int = 0
    """States that were found and could not be used: broken, cut off, of another prompt, evicted in part, refused."""
    late: int = 0
    """States that did not come within the timeout."""
    stored: int = 0
    store_failures: int = 0
    too_large: int = 0
    bytes_stored: int = 0
    tiers: tuple[TierStats, ...] = ()


class StateStore:
    """The tiers of one process. An error is a miss; nothing here raises for what a tier does."""

    def __init__(
        self,
        settings: ConnectorSettings,
        fingerprint: Fingerprint,
        *,
        min_tokens: int,
        max_bytes: int,
    ) -> None:
        self.is_reader = settings.read_only
        self._timeout = settings.timeout
        self._min_tokens = min_tokens
        self._max_bytes = max_bytes
        self._space = KeySpace(fingerprint)
        opened = open_worker_tiers(settings, Introduction(0, 1, 0, fingerprint))
        try:
            for tier in opened:
                _check_holds_pieces(tier)
        except ConfigError:
            for tier in opened:
                tier.close()
            raise
        self._tiers = TierChain(opened)
        self._too_large: set[bytes] = set()  # signposts of the last prompt that lead to states over the limit
        self._refused = KnownKeys(_MAX_REMEMBERED)  # names of states that llama.cpp did not take
        self._own = KnownKeys(_MAX_REMEMBERED)  # and of those that this process has stored
        self._stats = StateStats()

    def stats(self) -> StateStats:
        """The counters, and the state of the tiers."""
        return replace(self._stats, tiers=tuple(self._tiers.stats()))

    def count(self, **more: int) -> None:
        """Adds to counters."""
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in more.items()})

    def close(self) -> None:
        """Closes the tiers."""
        self._tiers.close()

    # --- loading -----------------------------------------------------------------------------------------------------

    def num_found(self, tokens: Tokens) -> int:
        """How many of the first tokens some tier has, in full blocks."""
        keys, due = self._signpost_keys(tokens), time.monotonic() + self._timeout
        return max((_num_tokens(self._found(watched, keys, due)) for watched in self._tiers.watched), default=0)

    def load(self, tokens: Tokens, num_live: int, take: Callable[[StateBlob], int]) -> int:
        """Loads a state with more of the prompt than the `num_live` tokens that are there, if that is worth it.

        `take` uses a state and returns how many tokens it brought; it returns 0 or raises if it could not. Returns that
        number.
        """
        self.count(lookups=1)
        self._too_large.clear()
        due = time.monotonic() + self._timeout
        wanted = _StateQuery(tokens, self._signpost_keys(tokens), num_live + self._min_tokens, due, take)
        known = [(watched, self._found(watched, wanted.keys, due)) for watched in self._tiers.watched]
        for watched, found in sorted(known, key=lambda each: -_num_tokens(each[1])):  # the fastest of equal ones first
            try:
                num_tokens = self._load_from(watched, wanted, found)
            except _LateError:
                self.count(late=1)
                watched.tier.report(f"a state did not come within {self._timeout:g} s")
                continue
            if num_tokens:
                self.count(hits=1, tokens_loaded=num_tokens)
                return num_tokens
        return 0

    def _load_from(self, watched: WatchedTier, wanted: _StateQuery, found: list[int]) -> int:
        """Takes the first usable state, longest prefix first. Removes signposts that no process can use."""
        keys, due = wanted.keys, wanted.due
        for _ in range(_TRIES):
            if _num_tokens(found) < wanted.least:
                return 0
            (signpost,) = self._signposts(watched, [keys[found[-1]]], due)
            problem: _UnusableError | None = None
            if signpost is None or signpost.name not in self._refused:
                try:
                    return self._taken(watched, wanted, signpost, _num_tokens(found))
                except _UnusableError as error:
                    problem = error
                    self.count(failed=1)
                    watched.tier.report(f"a state that begins with {_num_tokens(found)} tokens of a prompt: {error}")
            known = self._signposts(watched, [keys[index] for index in found], due)
            useless = {index for index, each in zip(found, known, strict=True) if each in (None, signpost)}
            if isinstance(problem, _TooLargeError):
                self._too_large.update(keys[index] for index in useless)
            elif problem is not None and not isinstance(problem, _RefusedError) and not self.is_reader:
                watched.remove([keys[index] for index in useless], call_seconds(due))
            found = [index for index in found if index not in useless]
        return 0

    def _taken(self, watched: WatchedTier, wanted: _StateQuery, signpost: Signpost | None, num_tokens: int) -> int:
        """How many tokens llama.cpp took of a state. A refused state is not tried again.

        The state that llama.cpp computes then replaces it. If that one is refused as well, it stays for other processes.
        """
        blob, problem = self._fetched(watched, signpost, wanted.tokens[:num_tokens], wanted.due), "llama.cpp refused it"
        try:
            if num_taken := wanted.take(blob):
                return num_taken
        except Exception as error:
            problem = f"{problem}: {type(error).__name__}: {error}"
        name = blob.signpost.name
        self._refused.add([name])
        raise (_RefusedError if name in self._own else _UnusableError)(problem)

    def _fetched(self, watched: WatchedTier, signpost: Signpost | None, tokens: Tokens, due: float) -> StateBlob:
        """The state of a signpost, if it is intact and begins with these tokens."""
        if signpost is None:
            raise _UnusableError("its signpost is gone or broken")
        if signpost.num_bytes > self._max_bytes:
            raise _TooLargeError(f"it has {signpost.num_bytes:,} bytes, more than max_bytes={self._max_bytes:,}")
        blob = StateBlob(signpost)
        outcomes = watched.load(self._piece_keys(signpost), blob.pieces, call_seconds(due))
        _check_in_time(outcomes)
        if wrong := len(outcomes) - outcomes.count(Outcome.OK):
            raise _UnusableError(f"{wrong} of its {len(outcomes)} pieces are missing or broken")
        if not blob.is_whole():
            raise _UnusableError("its checksum is wrong")
        if num_common(blob.tokens, tokens) < len(tokens):
            raise _UnusableError("it holds other tokens")
        return blob

    def _found(self, watched: WatchedTier, keys: Sequence[bytes], due: float) -> list[int]:
        """Which blocks have a signpost in a tier."""
        if not keys or watched.num_hung:
            return []
        return [index for index, there in enumerate(watched.contains(keys, call_seconds(due))) if there]

    def _signposts(self, watched: WatchedTier, keys: Sequence[bytes], due: float) -> list[Signpost | None]:
        values = [bytearray(SIGNPOST_BYTES) for _ in keys]
        outcomes = watched.load(keys, values, call_seconds(due))
        _check_in_time(outcomes)
        return [
            Signpost.read(value) if outcome == Outcome.OK else None
            for value, outcome in zip(values, outcomes, strict=True)
        ]

    # --- storing -----------------------------------------------------------------------------------------------------

    def store(self, tokens: Tokens, num_state_bytes: int, fill: Callable[[Bytes], bool]) -> None:
        """Stores a state in every tier that lacks many of its tokens. `fill` writes it, and returns whether it could."""
        keys, due = self._signpost_keys(tokens), time.monotonic() + self._timeout
        if self.is_reader or not keys:
            return
        lacking = []
        for watched in self._tiers.watched:
            if not watched.num_hung:
                found = self._found(watched, keys, due)
                useful = [index for index in found if keys[index] not in self._too_large]
                if len(tokens) - _num_tokens(useful) >= self._min_tokens:
                    lacking.append((watched, found))
        if not lacking:
            return
        num_bytes = Signpost(b"", len(tokens), num_state_bytes).num_bytes
        lacking = [(watched, found) for watched, found in lacking if self._has_room(watched, num_bytes)]
        if not lacking:
            return
        blob = StateBlob.of(tokens, num_state_bytes)
        if not fill(blob.state):
            raise StorageError(f"llama.cpp did not write its {num_state_bytes:,} bytes")
        blob.seal()
        for watched, found in lacking:
            self._store_in(watched, blob, keys, found)

    def _has_room(self, watched: WatchedTier, num_bytes: int) -> bool:
        """Whether a state is small enough for a tier. A state that takes most of it would only evict others."""
        capacity = watched.tier.stats().capacity_bytes
        if num_bytes > self._max_bytes:
            problem = f"more than max_bytes={self._max_bytes:,}"
        elif capacity is not None and num_bytes > capacity // 2:
            problem = f"more than half of the tier's {capacity:,}; give it more"
        else:
            return True
        self.count(too_large=1)
        watched.tier.report(f"a state of {num_bytes:,} bytes is not stored: {problem}")
        return False

    def _store_in(self, watched: WatchedTier, blob: StateBlob, keys: list[bytes], found: list[int]) -> None:
        """Stores the pieces first and the signposts last, so that a signpost always leads to a complete state."""
        piece_keys, pieces = self._piece_keys(blob.signpost), blob.pieces
        outcomes = [Outcome.OK]
        for start in range(0, len(pieces), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            if {*outcomes} == {Outcome.OK}:
                outcomes = watched.store(piece_keys[part], pieces[part], self._timeout)
        older = None
        if {*outcomes} == {Outcome.OK}:
            older = self._outgrown(watched, keys, found)
            # Replaces signposts to older states, because the newest state will be there longest.
            watched.remove([keys[index] for index in found], self._timeout)
            outcomes = watched.store(keys, [blob.signpost.packed()] * len(keys), self._timeout)
        if {*outcomes} != {Outcome.OK}:
            self.count(store_failures=1)
            watched.tier.report(f"a state of {len(blob.tokens)} tokens was not stored: {max(outcomes).name}")
            return
        self._own.add([blob.signpost.name])
        self.count(stored=1, bytes_stored=blob.signpost.num_bytes)
        if older is not None:
            watched.remove(self._piece_keys(older), self._timeout)

    def _outgrown(self, watched: WatchedTier, keys: list[bytes], found: list[int]) -> Signpost | None:
        """The state that a new one replaces: all its full blocks are the first blocks of the new one."""
        if not found:
            return None
        try:
            (older,) = self._signposts(watched, [keys[found[-1]]], time.monotonic() + self._timeout)
        except _LateError:
            return None
        return older if older is not None and older.num_tokens // BLOCK_TOKENS == found[-1] + 1 else None

    # --- keys --------------------------------------------------------------------------------------------------------

    def _signpost_keys(self, tokens: Tokens) -> list[bytes]:
        """The keys of all whole blocks."""
        whole = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]
        digests = chain_digests(root_digest(_SCOPE), whole, BLOCK_TOKENS)
        return self._space.keys(named(_SCOPE, digests), _SIGNPOSTS)

    def _piece_keys(self, signpost: Signpost) -> list[bytes]:
        names = (signpost.name + number.to_bytes(8, "little") for number in range(signpost.num_bytes // PIECE_BYTES))
        return self._space.keys(named(_SCOPE, (hashlib.sha256(name).digest() for name in names)), _PIECES)


class _StateQuery(NamedTuple):
    """A prompt, the keys of its blocks, how many tokens a state must bring at least, and until when."""

    tokens: Tokens
    keys: list[bytes]
    least: int
    due: float
    take: Callable[[StateBlob], int]


class _UnusableError(Exception):
    """A state that was found cannot be used."""


class _RefusedError(_UnusableError):
    """llama.cpp refused an intact state that this process has stored."""


class _TooLargeError(_UnusableError):
    """A state over the limit of this process. One with another `max_bytes` may load it."""


class _LateError(Exception):
    """A tier did not answer in time. Its values may be correct."""


def _check_in_time(outcomes: Sequence[Outcome]) -> None:
    if Outcome.LATE in outcomes:
        raise _LateError


def _num_tokens(found: Sequence[int]) -> int:
    """Tokens up to the end of the last block that was found."""
    return (found[-1] + 1) * BLOCK_TOKENS if found else 0


def _check_holds_pieces(tier: KeyedTier) -> None:
    """Refuses a tier that would change the bytes of a state, or hold none."""
    inner = tier
    if isinstance(tier, CompressedTier):
        if isinstance(tier.codec, Fp8):
            raise ConfigError(
                "compress=fp8 changes bytes, and a state of llama.cpp must stay as it is; take zstd or lz4"
            )
        inner = tier.inner
    if isinstance(inner, RemoteTier) and inner.max_value_bytes < PIECE_BYTES:
        raise ConfigError(f"max_value_bytes={inner.max_value_bytes} is too small: states come in {PIECE_BYTES} bytes")
