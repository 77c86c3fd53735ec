"""Samples a manager for the live view: a `Look` is what a viewer sees at one moment.

Every look reads blocks and live sequences. Walking all cached runs takes longer, so that is done at most every
`RUNS_SECONDS`, and so seldom that it takes at most a hundredth of the time. Between two walks, a newly cached block keeps
what is known of it: the tenant of its last holder, and the time of its last use.

A block is one number, a word. Changed blocks go to the page as spans of equal words. The upper half of a word holds, from the
lowest bit: 3 bits of state, 5 of how many live sequences hold the block (31: that many or more), 8 of priority, 16 of the
tenant's number. The lower half says when a cached block was last used, in tenths of a second by the sampler's clock. A free
block is 0. So a new pool is all zeros, and a snapshot is the difference to that.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import Tier
from kvpool.core.node import DEFAULT_PRIORITY
from kvpool.errors import InvalidArgumentError
from kvpool.events import Event, Subscription
from kvpool.manager import KVCacheManager
from kvpool.manager.snapshots import PoolSnapshot, RunsSnapshot, SequenceSnapshot, Snapshot
from kvpool.pools.arrays import Int32Array, Int64Array

Words = npt.NDArray[np.uint64]

FREE: Final = 0
REFERENCED: Final = 1
CACHED: Final = 2
PINNED: Final = 3
MAX_HOLDERS: Final = 31
MAX_TENANTS: Final = 1 << 16
RUNS_SECONDS = 0.5
SHARE_OF_TIME = 0.01  # walks along the runs may take this share of the time
MAX_EVENTS = 40  # of one look that are shown one by one
# The time when the sampler was made, in tenths of a second: half way, for times before and after
_TOUCHED_ZERO = 1 << 30


class Spans(NamedTuple):
    """Blocks `start[i]` to `start[i] + length[i] - 1` have become `word[i]`."""

    start: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint32]
    word: Words

    def to_json(self) -> dict[str, str]:
        """The arrays in base64, little-endian."""
        return {
            "start": packed(self.start, "<u4"),
            "length": packed(self.length, "<u4"),
            "word": packed(self.word, "<u8"),
        }


def pack_words(
    state: npt.NDArray[Any],
    num_holders: npt.NDArray[Any],
    priority: npt.NDArray[Any],
    tenant: npt.NDArray[Any],
    touched: npt.NDArray[Any],
) -> Words:
    """One word for each block, from arrays of the same length; 0 for free blocks."""
    upper = state.astype(np.uint32)
    upper |= np.minimum(num_holders, MAX_HOLDERS).astype(np.uint32) << np.uint32(3)
    upper |= priority.astype(np.uint32) << np.uint32(8)
    upper |= tenant.astype(np.uint32) << np.uint32(16)
    halves = np.empty((len(upper), 2), "<u4")
    halves[:, 0] = np.where(state >= CACHED, touched, 0)
    halves[:, 1] = upper
    words: Words = halves.view("<u8").reshape(-1)
    words[state == FREE] = 0
    return words


def changed_spans(old: Words | None, new: Words) -> Spans:
    """The blocks that changed, in as few spans as possible.

    If `old` is None or has another size, all blocks count as free before.
    """
    if old is None or len(old) != len(new):
        old = np.zeros(len(new), np.uint64)
    at = np.flatnonzero(new != old)
    words = new[at]
    breaks = np.flatnonzero((np.diff(at) != 1) | (words[1:] != words[:-1])) + 1
    first = np.concatenate([np.zeros(min(len(at), 1), np.int64), breaks])
    length = np.diff(np.append(first, len(at)))
    return Spans(at[first].astype(np.uint32), length.astype(np.uint32), words[first])


class IdSpans(NamedTuple):
    """Block ids of several lists as pairs (first id, number of consecutive ids), and which pairs belong to each list."""

    pairs: Int64Array  # first, count, first, count, ...; a first of -1 stands for `count` entries without a block
    at: Int64Array  # list i has the pairs `at[i]` to `at[i + 1] - 1`


def id_spans(ids: Int32Array, lengths: Int64Array) -> IdSpans:
    """Lists of block ids, one after the other, as spans."""
    ends = np.cumsum(lengths)
    if not len(ids):
        return IdSpans(np.empty(0, np.int64), np.zeros(len(lengths) + 1, np.int64))
    is_first = np.empty(len(ids), np.bool_)
    is_first[0] = True
    np.not_equal(np.diff(ids), np.where(ids[:-1] < 0, 0, 1), out=is_first[1:])
    is_first[ends[:-1][ends[:-1] < len(ids)]] = True
    first = np.flatnonzero(is_first)
    pairs = np.stack([ids[first], np.diff(np.append(first, len(ids)))], axis=1)
    return IdSpans(pairs.astype(np.int64).reshape(-1), np.searchsorted(first, np.concatenate([[0], ends])))


def packed(array: npt.NDArray[Any], kind: str) -> str:
    """An array in base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode("ascii")


class PoolLook(NamedTuple):
    """One pool on one tier."""

    pool: int
    tier: Tier
    num_referenced: int
    num_cached: int
    num_pinned: int
    words: Words


class Look(NamedTuple):
    """The state of a manager at one moment."""

    number: int
    now: int  # in tenths of a second, as in words
    tick: int
    pools: tuple[PoolLook, ...]
    sequences: tuple[SequenceSnapshot, ...]
    runs: RunsSnapshot | None
    runs_number: int  # the number of the look that read the runs
    tenants: tuple[str, ...]
    counts: Mapping[str, int]
    events: tuple[Event, ...]
    num_events: int  # since the last look; the newest of them are in `events`
    seconds: float  # taken to read blocks and sequences, with waiting for the manager
    more: Mapping[str, Any]


@dataclass
class _LastSeen:
    """What is known of the blocks of a pool beyond their state."""

    tenant: npt.NDArray[np.uint32]
    priority: npt.NDArray[np.uint8]
    touched: npt.NDArray[np.uint32]
    is_pinned: npt.NDArray[np.bool_]  # with its run
    was_pinned: npt.NDArray[np.bool_]  # with its run or by itself, at the last look
    is_free: npt.NDArray[np.bool_]
    num_holders: npt.NDArray[np.int32]
    words: Words  # of the last look, as many as there were blocks

    @classmethod
    def of_size(cls, num_blocks: int) -> _LastSeen:
        return cls(
            np.zeros(num_blocks, np.uint32),
            np.full(num_blocks, DEFAULT_PRIORITY, np.uint8),
            np.full(num_blocks, _TOUCHED_ZERO, np.uint32),
            np.zeros(num_blocks, np.bool_),
            np.zeros(num_blocks, np.bool_),
            np.ones(num_blocks, np.bool_),
            np.zeros(num_blocks, np.int32),
            np.empty(0, np.uint64),
        )


@dataclass
class Sampler:
    """Looks at one manager. `runs_seconds` is the least time between two walks along its runs."""

    manager: KVCacheManager
    with_events: bool = True
    runs_seconds: float = RUNS_SECONDS
    _known: dict[tuple[int, Tier], _LastSeen] = field(default_factory=dict)
    _tenants: dict[str, int] = field(default_factory=lambda: {"": 0})
    _subscription: Subscription | None = None
    _number: int = 0
    _runs: RunsSnapshot | None = None
    _runs_number: int = 0
    _runs_tick: int = -1
    _runs_due: float = 0.0

    def __post_init__(self) -> None:
        self._origin = self.manager.inspect.now

    def start(self) -> None:
        """Called when somebody begins to watch: follows the manager's events, if it keeps any."""
        if self.with_events and self._subscription is None:
            with suppress(InvalidArgumentError):  # events are off
                self._subscription = self.manager.subscribe(snapshot=False)

    def stop(self) -> None:
        """Called when nobody watches any more: stops following, and keeps what is known."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def look(self, more: Mapping[str, Any] | None = None) -> Look:
        """Takes one look. `more` is further data for the page."""
        self._number += 1
        began = time.perf_counter()
        picture = self.manager.inspect.snapshot()
        seconds = time.perf_counter() - began
        if began >= self._runs_due and picture.tick != self._runs_tick:
            self._walk(picture.tick)
        pools = tuple(self._pool(pool, picture) for pool in picture.pools)
        events, num_events = self._events()
        return Look(
            self._number,
            self._tenths(picture.now),
            picture.tick,
            pools,
            picture.sequences,
            self._runs,
            self._runs_number,
            tuple(self._tenants),
            picture.counts,
            events,
            num_events,
            seconds,
            more or {},
        )

    def _walk(self, tick: int) -> None:
        """Reads all runs again."""
        began = time.thread_time()
        runs = self.manager.inspect.runs_snapshot()
        seconds = time.thread_time() - began
        self._runs, self._runs_number, self._runs_tick = runs, self._number, tick
        self._runs_due = time.perf_counter() + max(self.runs_seconds, seconds / SHARE_OF_TIME)
        tenants = np.array([self._tenant(scope.tenant) for scope in runs.scopes], np.uint32)[runs.scope]
        touched = self._tenths(runs.last_access_at)
        block_run = np.repeat(np.arange(len(runs.number)), runs.num_blocks)
        for pool, slides, ids in zip(runs.pools, runs.by_block, runs.block_ids, strict=True):
            for tier in np.unique(runs.tier).tolist():
                chosen = np.flatnonzero((runs.tier[block_run] == tier) & (ids >= 0))
                known = self._known_of(pool, Tier(tier), int(ids[chosen].max(initial=-1)) + 1)
                run, at = block_run[chosen], ids[chosen]
                known.tenant[at] = tenants[run]
                known.priority[at] = runs.priority[run]
                known.touched[at] = touched[run]
                known.is_pinned[at] = runs.is_pinned[run] if tier != Tier.GPU or not slides else False

    def _known_of(self, pool: int, tier: Tier, num_blocks: int) -> _LastSeen:
        """What is known of a pool, for at least so many blocks; new blocks have default values."""
        known = self._known.get((pool, tier))
        if known is None or len(known.tenant) < num_blocks:
            grown = _LastSeen.of_size(num_blocks)
            if known is not None:
                for name, old in vars(known).items():
                    if name != "words":
                        getattr(grown, name)[: len(old)] = old
            known = self._known[pool, tier] = grown
        return known

    def _pool(self, pool: PoolSnapshot, picture: Snapshot) -> PoolLook:
        """The words of a pool: those of the last look, with new ones for blocks that changed."""
        size, now = pool.num_blocks, self._tenths(picture.now)
        known = self._known_of(pool.pool, pool.tier, size)
        is_held = pool.num_holders > 0
        changed = (pool.num_holders != known.num_holders[:size]) | (pool.is_free != known.is_free[:size])
        if self._runs_number != self._number:  # the last walk did not see blocks that became idle since then
            left = np.flatnonzero((known.num_holders[:size] > 0) & ~is_held)
            known.touched[left] = np.maximum(known.touched[left], now)
        held = np.flatnonzero(is_held)
        if len(held):
            names = [self._tenant(sequence.scope.tenant) for sequence in picture.sequences]
            tenants = np.array(names, np.uint32)[pool.holder[held]]
            changed[held] |= tenants != known.tenant[held]
            known.tenant[held] = tenants
        known.num_holders[:size] = pool.num_holders
        known.is_free[:size] = pool.is_free
        known.is_pinned[:size][pool.is_free] = False
        is_pinned = known.is_pinned[:size]
        if pool.tier == Tier.GPU and (kept := [ids for index, ids in picture.pinned_blocks if index == pool.pool]):
            is_pinned = is_pinned.copy()
            is_pinned[kept[0]] = True
        changed |= is_pinned != known.was_pinned[:size]
        known.was_pinned[:size] = is_pinned
        at = (
            np.arange(size)
            if self._runs_number == self._number or len(known.words) != size
            else np.flatnonzero(changed)
        )
        state = np.where(is_pinned[at], PINNED, CACHED)
        state[is_held[at]] = REFERENCED
        state[pool.is_free[at]] = FREE
        words = known.words.copy() if len(known.words) == size else np.zeros(size, np.uint64)
        words[at] = pack_words(state, pool.num_holders[at], known.priority[at], known.tenant[at], known.touched[at])
        known.words = words
        return PoolLook(pool.pool, pool.tier, pool.num_referenced, pool.num_cached, pool.num_pinned, words)

    def _events(self) -> tuple[tuple[Event, ...], int]:
        if self._subscription is None:
            return (), 0
        batch = self._subscription.poll()
        return tuple(batch.events[-MAX_EVENTS:]), len(batch.events) + batch.missed

    def _tenant(self, name: str) -> int:
        """The number of a tenant. Tenants beyond the largest number share it."""
        if name not in self._tenants and len(self._tenants) < MAX_TENANTS:
            self._tenants[name] = len(self._tenants)
        return self._tenants.get(name, MAX_TENANTS - 1)

    def _tenths(self, seconds: Any) -> Any:
        """Times of the manager's clock in the units of words."""
        tenths = np.clip((np.asarray(seconds) - self._origin) * 10 + _TOUCHED_ZERO, 1, 2**32 - 1)
        return tenths.astype(np.uint32) if tenths.ndim else int(tenths)
