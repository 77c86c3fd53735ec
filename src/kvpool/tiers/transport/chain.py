"""TierChain: the tiers of one client, asked one after the other. Engines, pools, vLLM, SGLang and llama.cpp use it alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvpool.tiers.contract import KeyedTier, Outcome, TierStats
from kvpool.tiers.transport.prefix_options import NOWHERE
from kvpool.tiers.transport.watching import WatchedTier

SHORTEST_CALL = 0.001  # seconds; a tier is not asked with less


def seconds_left(due: float) -> float:
    """How long a call may take that must be over at `due`, by `time.monotonic`."""
    return max(due - time.monotonic(), SHORTEST_CALL)


class TierChain:
    """Tiers, fastest first. Each is asked for what those before it lack; one in which a call hangs is passed by.

    Calls end at `due`, by `time.monotonic`. A tier that fails or is late has nothing.
    """

    def __init__(self, tiers: Iterable[KeyedTier]) -> None:
        self.watched = [WatchedTier(tier) for tier in tiers]
        self.num_passed_by = 0  # tiers that were not asked because a call to them hangs

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

    def load_prefix(self, keys: Sequence[bytes], rows: Sequence[Any], due: float) -> int:
        """Loads values; returns how many from the first on are whole and right."""

        def ask(watched: WatchedTier, lacking: list[int], seconds: float) -> list[bool]:
            outcomes = watched.load([keys[index] for index in lacking], [rows[index] for index in lacking], seconds)
            return [outcome == Outcome.OK for outcome in outcomes]

        return len(_prefix(self._ask_each(len(keys), due, ask)))

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
