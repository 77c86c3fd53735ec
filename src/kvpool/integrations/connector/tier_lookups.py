"""Which blocks do the tiers below the host have? Asked in the background; one counts if every worker has its part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.step_orders import Introduction
from kvpool.integrations.connector.tiers import open_tiers, prefix_from
from kvpool.integrations.connector.tracked_request import TrackedRequest
from kvpool.tiers import KeyedTier, KeySpace
from kvpool.tiers.transport.lanes import Lane
from kvpool.tiers.transport.watching import GRACE_SECONDS, WatchedTier

_THREADS = 2


class TierLookups:
    """Asks tiers by key. The scheduler never waits: `num_blocks` answers None until it is known, or late."""

    def __init__(self, settings: ConnectorSettings, workers: Sequence[Introduction]) -> None:
        self._timeout = settings.timeout
        self.patience = settings.timeout + GRACE_SECONDS  # seconds after which a tier is taken to hang
        self._spaces = [KeySpace(worker.fingerprint) for worker in workers]
        self._tiers = [
            [WatchedTier(tier) for tier in open_tiers(settings, worker, is_reader=True)] for worker in workers
        ]
        self._lane = Lane("look-up", num_threads=_THREADS, max_waiting=1024)

    def num_blocks(self, tracked: TrackedRequest, first: int, last: int) -> int | None:
        """How many blocks from the prompt's beginning on could be had, if the `first` ones are here; None: ask again."""
        if tracked.num_below is not None and first >= tracked.asked_from:
            return tracked.num_below
        if not tracked.is_asking:
            digests = tracked.tier_digests(first, last)
            tracked.num_below, tracked.asked_from, tracked.is_asking = None, first, True
            tracked.answer_due = time.monotonic() + self.patience
            nothing = partial(self._answer, tracked, [])
            if self._are_all_hung() or not self._lane.submit(lambda: self._ask(tracked, digests), nothing):
                nothing()
        elif time.monotonic() > tracked.answer_due:  # a tier hangs, and knows nothing of deadlines
            return first
        return tracked.num_below

    def _are_all_hung(self) -> bool:
        """Whether every thread is in a call that does not come back, so that nobody would ask."""
        return sum(watched.num_hung for tiers in self._tiers for watched in tiers) >= _THREADS

    def _ask(self, tracked: TrackedRequest, digests: list[bytes]) -> None:
        """In a thread of its own."""
        holders: list[int] = []
        try:
            due, common = time.monotonic() + self._timeout, [0] * len(digests)
            for space, tiers in zip(self._spaces, self._tiers, strict=True):
                found = _holders(tiers, space.keys(digests[: len(common)]), due)
                common = [max(pair) for pair in zip(common, found, strict=False)]  # the slowest of all workers
            holders = common
        finally:
            self._answer(tracked, holders)

    def _answer(self, tracked: TrackedRequest, holders: list[int]) -> None:
        tracked.holders = holders
        tracked.num_below, tracked.is_asking = tracked.asked_from + len(holders), False

    def tiers(self) -> list[KeyedTier]:
        """The tiers of the first worker."""
        return [watched.tier for watched in self._tiers[0]]

    def close(self) -> None:
        """Lets go of the tiers."""
        self._lane.stop(1.0)
        for watched in {id(watched.tier): watched for tiers in self._tiers for watched in tiers}.values():
            watched.tier.close()


def _holders(tiers: Sequence[WatchedTier], keys: Sequence[bytes], due: float) -> list[int]:
    """Which tier has each key, from the first on that any has."""

    def ask(watched: WatchedTier, lacking: list[int], seconds: float) -> list[bool]:
        return watched.contains([keys[index] for index in lacking], seconds)

    return prefix_from(tiers, len(keys), due, ask)
