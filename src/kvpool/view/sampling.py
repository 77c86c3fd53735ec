"""Looks at a manager, at most so often and for at most so long: what a viewer sees of it at one moment.

Blocks and live sequences are read at every look. Walking along all cached runs takes longer, so that is done at most every
`RUNS_SECONDS`, and so seldom that it takes at most a hundredth of the time. In between, a block that became cached keeps
what is known of it: its tenant is that of who held it last, and it was last used then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.events import Event, Subscription
from kvpool.manager import KVCacheManager
from kvpool.manager.picture import Picture, PoolPicture, RunsPicture, SequencePicture
from kvpool.prefix.node import DEFAULT_PRIORITY
from kvpool.view.words import CACHED, FREE, MAX_TENANTS, PINNED, REFERENCED, Words, pack_words

RUNS_SECONDS = 0.5
SHARE_OF_TIME = 0.01  # that walks along the runs may take
MAX_EVENTS = 40  # of one look that are told one by one
_TOUCHED_ZERO = 1 << 30  # when the sampler was made, in tenths of a second: there is as much before it as behind it


class PoolLook(NamedTuple):
    """One pool on one tier."""

    pool: int
    tier: Tier
    num_referenced: int
    num_cached: int
    num_pinned: int
    words: Words


class Look(NamedTuple):
    """Everything at one moment."""

    number: int
    now: int  # in tenths of a second, as in words
    tick: int
    pools: tuple[PoolLook, ...]
    sequences: tuple[SequencePicture, ...]
    runs: RunsPicture | None
    runs_number: int  # of the look that saw them
    tenants: tuple[str, ...]
    counts: Mapping[str, int]
    events: tuple[Event, ...]
    num_events: int  # all since the look before; the last of them are in `events`
    seconds: float  # that it took to read blocks and sequences, waiting for the manager included
    more: Mapping[str, Any]


@dataclass
class _Known:
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
    def of_size(cls, num_blocks: int) -> _Known:
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
    _known: dict[tuple[int, Tier], _Known] = field(default_factory=dict)
    _tenants: dict[str, int] = field(default_factory=lambda: {"": 0})
    _subscription: Subscription | None = None
    _number: int = 0
    _runs: RunsPicture | None = None
    _runs_number: int = 0
    _runs_tick: int = -1
    _runs_due: float = 0.0

    def __post_init__(self) -> None:
        self._origin = self.manager.now

    def start(self) -> None:
        """Somebody watches: follows the manager's events, if it keeps any."""
        if self.with_events and self._subscription is None:
            with suppress(InvalidArgumentError):  # events are off
                self._subscription = self.manager.subscribe(snapshot=False)

    def stop(self) -> None:
        """Nobody watches: what is known stays, and nothing is followed."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def look(self, more: Mapping[str, Any] | None = None) -> Look:
        """One look. `more` is what else is known of this moment, for the page."""
        self._number += 1
        began = time.perf_counter()
        picture = self.manager.picture()
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
        """Reads the runs anew."""
        began = time.thread_time()
        runs = self.manager.runs_picture()
        seconds = time.thread_time() - began
        self._runs, self._runs_number, self._runs_tick = runs, self._number, tick
        self._runs_due = time.perf_counter() + max(self.runs_seconds, seconds / SHARE_OF_TIME)
        tenants = np.array([self._tenant(scope.tenant) for scope in runs.scopes], np.uint32)[runs.scope]
        touched = self._tenths(runs.last_access_at)
        block_run = np.repeat(np.arange(len(runs.number)), runs.num_blocks)
        for pool, slides, ids in zip(runs.pools, runs.slides, runs.block_ids, strict=True):
            for tier in np.unique(runs.tier).tolist():
                chosen = np.flatnonzero((runs.tier[block_run] == tier) & (ids >= 0))
                known = self._known_of(pool, Tier(tier), int(ids[chosen].max(initial=-1)) + 1)
                run, at = block_run[chosen], ids[chosen]
                known.tenant[at] = tenants[run]
                known.priority[at] = runs.priority[run]
                known.touched[at] = touched[run]
                known.is_pinned[at] = runs.is_pinned[run] if tier != Tier.GPU or not slides else False

    def _known_of(self, pool: int, tier: Tier, num_blocks: int) -> _Known:
        """What is known of a pool, for at least so many blocks; what is new has the usual values."""
        known = self._known.get((pool, tier))
        if known is None or len(known.tenant) < num_blocks:
            grown = _Known.of_size(num_blocks)
            if known is not None:
                for name, old in vars(known).items():
                    if name != "words":
                        getattr(grown, name)[: len(old)] = old
            known = self._known[pool, tier] = grown
        return known

    def _pool(self, pool: PoolPicture, picture: Picture) -> PoolLook:
        """The words of a pool: those of the look before, and new ones for the blocks that changed."""
        size, now = pool.num_blocks, self._tenths(picture.now)
        known = self._known_of(pool.pool, pool.tier, size)
        is_held = pool.num_holders > 0
        changed = (pool.num_holders != known.num_holders[:size]) | (pool.is_free != known.is_free[:size])
        if self._runs_number != self._number:  # the walk did not see what became idle since the last look
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
        if pool.tier == Tier.GPU and (kept := [ids for index, ids in picture.pinned_windows if index == pool.pool]):
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
        """The number of a tenant; what is beyond the last number shares it."""
        if name not in self._tenants and len(self._tenants) < MAX_TENANTS:
            self._tenants[name] = len(self._tenants)
        return self._tenants.get(name, MAX_TENANTS - 1)

    def _tenths(self, seconds: Any) -> Any:
        """Times by the manager's clock as they stand in words."""
        tenths = np.clip((np.asarray(seconds) - self._origin) * 10 + _TOUCHED_ZERO, 1, 2**32 - 1)
        return tenths.astype(np.uint32) if tenths.ndim else int(tenths)
