"""Behind: the tiers that a node owns, a disk or a store. What memory lacks comes from them, what is stored goes to them.

Their calls run in threads of their own. Each job hands what it brought to `post`, which runs it in the node's thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from kvpool.tiers.contract import PURGE_TIMEOUT, KeyedTier, Outcome
from kvpool.tiers.envelope import checksum
from kvpool.tiers.keys import KeyPattern, KeySpace
from kvpool.tiers.transport.chain import TierChain
from kvpool.tiers.transport.prefix_options import NOWHERE
from kvpool.tiers.transport.threads import Job, ThreadPool

FETCH_THREADS = 4
MAX_FETCHES = 256
MAX_STORES = 256
STORE_SECONDS = 30.0
CLOSE_SECONDS = 10.0


class Behind:
    """A chain of tiers, fastest first. Stores, removals and purges happen in the order in which they were asked for."""

    def __init__(self, tiers: Sequence[KeyedTier], post: Callable[[Job], None]) -> None:
        self._chain = TierChain(tiers)
        self._post = post
        self._fetching = ThreadPool("node-fetch", FETCH_THREADS, MAX_FETCHES, self._chain.watched)
        self._storing = ThreadPool("node-store", 1, MAX_STORES, self._chain.watched)

    def __bool__(self) -> bool:
        return bool(len(self._chain))

    def find(self, keys: Sequence[bytes], due: float, done: Callable[[list[bool]], None]) -> None:
        """Whether each key is there."""

        def job() -> None:
            found = [False] * len(keys)
            try:
                found = [holder != NOWHERE for holder in self._chain.find(keys, due)]
            finally:
                self._post(partial(done, found))

        self._submit(self._fetching, job, partial(done, [False] * len(keys)))

    def load(
        self,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        due: float,
        done: Callable[[list[int | None]], None],
    ) -> None:
        """Loads values that fill their rows; brings their checksums, None for what is not there."""

        def job() -> None:
            checks: list[int | None] = [None] * len(keys)
            try:
                checks = self._loaded(keys, rows, due)
            finally:
                self._post(partial(done, checks))

        self._submit(self._fetching, job, partial(done, [None] * len(keys)))

    def _loaded(self, keys: Sequence[bytes], rows: Sequence[memoryview], due: float) -> list[int | None]:
        """A tier does not say how long a value is. One that fills its row has written the last byte of it."""
        mark = secrets.randbelow(256)
        are_filled = self._are_filled(keys, rows, mark, due)
        doubtful = [i for i, is_filled in enumerate(are_filled) if is_filled is None]  # it may end like the mark
        if doubtful:
            again = self._are_filled([keys[i] for i in doubtful], [rows[i] for i in doubtful], mark ^ 1, due)
            for i, is_filled in zip(doubtful, again, strict=True):
                are_filled[i] = is_filled
        return [
            checksum(key, row) if is_filled else None
            for key, row, is_filled in zip(keys, rows, are_filled, strict=True)
        ]

    def _are_filled(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], mark: int, due: float
    ) -> list[bool | None]:
        """Loads values into rows that end with a mark; None for a row that still does."""
        for row in rows:
            row[-1] = mark
        holders = self._chain.load(keys, rows, due)
        return [
            False if holder == NOWHERE else True if row[-1] != mark else None
            for row, holder in zip(rows, holders, strict=True)
        ]

    def store(self, keys: Sequence[bytes], rows: Sequence[memoryview], done: Callable[[], None]) -> bool:
        """Stores values in all tiers; False if too much waits already: then they are not stored."""

        def job() -> None:
            try:
                for watched in self._chain.watched:
                    watched.store(keys, rows, STORE_SECONDS)
            finally:
                self._post(done)

        return self._storing.submit(job, partial(self._post, done))

    def remove(self, keys: Sequence[bytes], due: float, done: Callable[[list[bool]], None]) -> None:
        """Removes values; brings whether each was there."""

        def job() -> None:
            found = [False] * len(keys)
            try:
                for watched in self._chain.watched:
                    outcomes = watched.remove(keys, max(0.001, due - time.monotonic()))
                    found = [had or now == Outcome.OK for had, now in zip(found, outcomes, strict=True)]
            finally:
                self._post(partial(done, found))

        self._submit(self._storing, job, partial(done, [False] * len(keys)))

    def purge(self, pattern: KeyPattern, done: Callable[[int, bool], None]) -> None:
        """Removes all values that are alike; brings how many, and whether nothing is left."""

        def job() -> None:
            removed, is_complete = 0, False
            try:
                found = [watched.purge(pattern, PURGE_TIMEOUT) for watched in self._chain.watched]
                removed, is_complete = sum(each.removed for each in found), all(each.is_complete for each in found)
            finally:
                self._post(partial(done, removed, is_complete))

        self._submit(self._storing, job, partial(done, 0, False))

    def introduce(self, space: KeySpace) -> None:
        """Tells the tiers whose keys will come."""

        def job() -> None:
            for watched in self._chain.watched:
                watched.tier.introduce(space)

        self._storing.submit(job, lambda: None)

    def stats(self) -> list[dict[str, Any]]:
        """Counters of each tier."""
        return [asdict(each) for each in self._chain.stats()]

    def close(self) -> None:
        """Stores what waits, and closes the tiers."""
        self._storing.flush(CLOSE_SECONDS)
        for pool in (self._fetching, self._storing):
            pool.stop(CLOSE_SECONDS)
        self._chain.close()

    def _submit(self, pool: ThreadPool, job: Job, drop: Job) -> None:
        """Without a thread that could begin it, a job brings nothing at once."""
        drop = partial(self._post, drop)
        if pool.is_stuck or not pool.submit(job, drop):
            drop()
