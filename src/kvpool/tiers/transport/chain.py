"""TierChain: asks the tiers of one client one after the other. Engines, pools, vLLM, SGLang and llama.cpp use it.

The chain remembers which keys it saw in each tier lately. It skips a tier while one of its calls hangs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvpool.checks import show
from kvpool.tiers.contract import Keeper, KeyedTier, Loan, Outcome, Purged, Source, TierStats, Worth
from kvpool.tiers.keys import KeyPattern
from kvpool.tiers.transport.prefix_options import NOWHERE

KNOWN_KEYS = 65_536
GRACE_SECONDS = 0.1  # a call may be late by so much; then its request goes on without it, and the tier is skipped

_T = TypeVar("_T")


class KnownKeys:
    """Keys that were seen in a tier lately and need not be stored again. With too many, the oldest are forgotten."""

    def __init__(self, limit: int = KNOWN_KEYS) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._limit = limit
        self._lock = threading.Lock()

    def add(self, keys: Iterable[bytes]) -> None:
        """The tier has these keys."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """The tier does not have these keys."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def discard_matching(self, pattern: KeyPattern) -> None:
        """The tier has no keys of this pattern."""
        with self._lock:
            for key in [key for key in self._keys if pattern.matches(key)]:
                del self._keys[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)


class WatchedTier:
    """A tier, and what is known of it: keys that it has, and calls that are overdue. Threads skip it while a call is."""

    def __init__(self, tier: KeyedTier) -> None:
        self.tier = tier
        self.known = KnownKeys()
        self._calls: dict[int, float] = {}  # by thread: when its call should have been over
        self._lock = threading.Lock()

    @property
    def num_hung(self) -> int:
        """Calls that are overdue now."""
        return len(self.hung_threads())

    def hung_threads(self) -> list[int]:
        """The threads (`threading.get_ident`) in these calls."""
        now = time.monotonic()
        with self._lock:
            return [thread for thread, due in self._calls.items() if due < now]

    def contains(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        """Which keys are there. Remembers the answer."""
        found = self._call(lambda: self.tier.contains(keys, timeout=timeout), bool, len(keys), timeout)
        if found is None:
            return [False] * len(keys)
        self.known.add(key for key, there in zip(keys, found, strict=True) if there)
        self.known.discard(key for key, there in zip(keys, found, strict=True) if not there)
        return found

    def load(
        self, keys: Sequence[bytes], out: Sequence[Any], timeout: float, keeper: Keeper | None = None
    ) -> list[Outcome]:
        """Loads values. Forgets the keys of missing or broken ones, so that they are stored again when computed."""
        call = partial(self.tier.load, keys, out, timeout=timeout, keeper=keeper)
        outcomes = self._call(call, Outcome, len(keys), timeout)
        outcomes = [Outcome.FAILED] * len(keys) if outcomes is None else outcomes
        self._forget_gone(keys, outcomes)
        return outcomes

    def lend(self, keys: Sequence[bytes], sizes: Sequence[int], timeout: float) -> Loan | None:
        """Borrows values; None if the tier does not lend them."""
        found = self._call(lambda: [self.tier.lend(keys, sizes, timeout=timeout)], object, 1, timeout)
        loan = found[0] if found is not None else None
        if not isinstance(loan, Loan):
            return None
        self._forget_gone(keys, loan.outcomes)
        return loan

    def _forget_gone(self, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
        gone = (Outcome.MISS, Outcome.FAILED)
        self.known.discard(key for key, outcome in zip(keys, outcomes, strict=True) if outcome in gone)

    def store(
        self, keys: Sequence[bytes], data: Sequence[Any], timeout: float, worths: Sequence[Worth] | None = None
    ) -> list[Outcome]:
        """Stores values; remembers those that are there now."""
        call = partial(self.tier.store, keys, data, timeout=timeout)
        return self._stored(call if worths is None else partial(call, worths=worths), keys, timeout)

    def store_straight(
        self, keys: Sequence[bytes], sizes: Sequence[int], source: Source, timeout: float, worths: Sequence[Worth]
    ) -> list[Outcome]:
        """The same of values that `source` writes into the tier's memory."""
        call = partial(self.tier.store_straight, keys, sizes, source, timeout=timeout, worths=worths)
        return self._stored(call, keys, timeout)

    def _stored(self, call: Callable[[], list[Outcome]], keys: Sequence[bytes], timeout: float) -> list[Outcome]:
        outcomes = self._call(call, Outcome, len(keys), timeout)
        outcomes = [Outcome.FAILED] * len(keys) if outcomes is None else outcomes
        self.known.add(key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.OK)
        return outcomes

    def remove(self, keys: Sequence[bytes], timeout: float) -> list[Outcome]:
        """Removes values. Forgets their keys even if that fails."""
        self.known.discard(keys)
        outcomes = self._call(lambda: self.tier.remove(keys, timeout=timeout), Outcome, len(keys), timeout)
        return [Outcome.FAILED] * len(keys) if outcomes is None else outcomes

    def purge(self, pattern: KeyPattern, timeout: float) -> Purged:
        """Removes all values whose keys match a pattern."""
        self.known.discard_matching(pattern)
        purged = self._call(lambda: [self.tier.purge(pattern, timeout=timeout)], Purged, 1, timeout)
        return Purged() if purged is None else purged[0]

    def _call(self, call: Callable[[], Any], kind: type[_T], count: int, timeout: float) -> list[_T] | None:
        """What a call to the tier returns; None if it raised or broke the contract. Other threads see if it is overdue."""
        thread = threading.get_ident()
        with self._lock:
            self._calls[thread] = time.monotonic() + timeout + GRACE_SECONDS
        try:
            answer = call()
            if isinstance(answer, list) and len(answer) == count and all(isinstance(each, kind) for each in answer):
                return answer
            self.tier.report(f"it answered {show(answer)} where {count} of {kind.__name__} were due")
        except Exception as error:
            self.tier.report(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                del self._calls[thread]
        return None


SHORTEST_CALL = 0.001  # seconds; a tier is not asked if less is left


def call_seconds(due: float) -> float:
    """How long a call may take that must be over at `due`, by `time.monotonic`."""
    return max(due - time.monotonic(), SHORTEST_CALL)


class TierChain:
    """Tiers, fastest first. Each is asked for what those before it lack. A tier in which a call hangs is skipped.

    Calls end at `due`, by `time.monotonic`. If a tier fails or is late, the chain goes on as if it had nothing.
    """

    def __init__(self, tiers: Iterable[KeyedTier]) -> None:
        self.watched = [WatchedTier(tier) for tier in tiers]
        self.num_passed_by = 0  # how often a tier was skipped because one of its calls hangs

    def __len__(self) -> int:
        return len(self.watched)

    def find(self, keys: Sequence[bytes], due: float) -> list[int]:
        """The number of the first tier that has each key, or `NOWHERE`."""

        def ask(watched: WatchedTier, lacking: list[int], seconds: float) -> list[bool]:
            return watched.contains([keys[index] for index in lacking], seconds)

        return self._ask_each(len(keys), due, ask)

    def find_prefix(self, keys: Sequence[bytes], due: float) -> list[int]:
        """The same up to the first key that no tier has."""
        return _prefix(self.find(keys, due))

    def load(self, keys: Sequence[bytes], rows: Sequence[Any], due: float) -> list[int]:
        """Loads values; returns the number of the tier that each came from intact, or `NOWHERE`."""

        def ask(watched: WatchedTier, lacking: list[int], seconds: float) -> list[bool]:
            outcomes = watched.load([keys[index] for index in lacking], [rows[index] for index in lacking], seconds)
            return [outcome == Outcome.OK for outcome in outcomes]

        return self._ask_each(len(keys), due, ask)

    def load_prefix(self, keys: Sequence[bytes], rows: Sequence[Any], due: float) -> int:
        """Loads values; returns how many from the first on are whole and right."""
        return len(_prefix(self.load(keys, rows, due)))

    def _ask_each(
        self, number: int, due: float, ask: Callable[[WatchedTier, list[int], float], list[bool]]
    ) -> list[int]:
        holders = [NOWHERE] * number
        for holder, watched in enumerate(self.watched):
            lacking = [index for index, known in enumerate(holders) if known == NOWHERE]
            if not lacking:
                break
            if watched.num_hung:
                self.num_passed_by += 1
                continue
            left = due - time.monotonic()
            if left < SHORTEST_CALL:
                break
            for index, found in zip(lacking, ask(watched, lacking, left), strict=True):
                if found:
                    holders[index] = holder
        return holders

    def stats(self) -> list[TierStats]:
        """Counters of each tier."""
        return [watched.tier.stats() for watched in self.watched]

    def close(self) -> None:
        """Closes every tier."""
        for watched in self.watched:
            watched.tier.close()


def _prefix(holders: list[int]) -> list[int]:
    return holders[: holders.index(NOWHERE)] if NOWHERE in holders else holders
