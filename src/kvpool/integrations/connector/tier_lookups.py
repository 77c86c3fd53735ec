"""Which blocks do the tiers below the host have? Asked in the background; one counts if every worker has its part."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpool.integrations.connector.connector_settings import ConnectorSettings
from kvpool.integrations.connector.connector_tiers import open_tiers, prefix_from
from kvpool.integrations.connector.step_orders import Introduction
from kvpool.integrations.requests.tracked_request import TrackedRequest
from kvpool.tiers import KeyedTier, KeySpace
from kvpool.tiers.transport.lanes import Lane
from kvpool.tiers.transport.watching import WatchedTier


class TierLookups:
    """Asks tiers by key. The scheduler never waits: `num_blocks` answers None until it is known."""

    def __init__(self, settings: ConnectorSettings, workers: Sequence[Introduction]) -> None:
        self._timeout = settings.timeout
        self._spaces = [KeySpace(worker.fingerprint) for worker in workers]
        self._tiers = [
            [WatchedTier(tier) for tier in open_tiers(settings, worker, is_reader=True)] for worker in workers
        ]
        self._lane = Lane("look-up", num_threads=2, max_waiting=1024)

    def num_blocks(self, tracked: TrackedRequest, first: int, last: int) -> int | None:
        """How many blocks from the prompt's beginning on could be had, if the `first` ones are here; None: ask again."""
        if tracked.num_below is not None and first >= tracked.asked_from:
            return tracked.num_below
        if not tracked.is_asking:
            digests = tracked.tier_digests(first, last)
            tracked.num_below, tracked.asked_from, tracked.is_asking = None, first, True
            if not self._lane.submit(lambda: self._ask(tracked, first, digests), lambda: self._answer(tracked, first)):
                self._answer(tracked, first)
        return tracked.num_below

    def _ask(self, tracked: TrackedRequest, first: int, digests: list[bytes]) -> None:
        """In a thread of its own."""
        found = 0
        try:
            due = time.monotonic() + self._timeout
            found = len(digests)
            for space, tiers in zip(self._spaces, self._tiers, strict=True):
                found = min(found, _num_found(tiers, space.keys(digests[:found]), due))
        finally:
            self._answer(tracked, first + found)

    def _answer(self, tracked: TrackedRequest, num_blocks: int) -> None:
        tracked.num_below, tracked.is_asking = num_blocks, False

    def tiers(self) -> list[KeyedTier]:
        """The tiers of the first worker."""
        return [watched.tier for watched in self._tiers[0]]

    def close(self) -> None:
        """Lets go of the tiers."""
        self._lane.stop(1.0)
        for watched in {id(watched.tier): watched for tiers in self._tiers for watched in tiers}.values():
            watched.tier.close()


def _num_found(tiers: Sequence[WatchedTier], keys: Sequence[bytes], due: float) -> int:
    """How many keys from the first on some tier has."""

    def ask(watched: WatchedTier, lacking: list[int], seconds: float) -> list[bool]:
        return watched.contains([keys[index] for index in lacking], seconds)

    return prefix_from(tiers, len(keys), due, ask)
