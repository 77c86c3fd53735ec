"""Which blocks do the tiers below the host have? Asked in the background; one counts if every worker has its part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from kvpool.integrations.connector.settings import ConnectorSettings, open_tiers
from kvpool.integrations.connector.step_orders import Introduction
from kvpool.integrations.connector.tracked_request import TrackedRequest
from kvpool.tiers import KeyedTier, KeySpace
from kvpool.tiers.transport.chain import TierChain
from kvpool.tiers.transport.lanes import Lane
from kvpool.tiers.transport.watching import GRACE_SECONDS

_THREADS = 2


class TierLookups:
    """Asks tiers by key. The scheduler never waits: `num_blocks` answers None until it is known, or late."""

    def __init__(self, settings: ConnectorSettings, workers: Sequence[Introduction]) -> None:
        self._timeout = settings.timeout
        self.patience = settings.timeout + GRACE_SECONDS  # seconds after which a tier is taken to hang
        self._spaces = [KeySpace(worker.fingerprint) for worker in workers]
        self._chains = [TierChain(open_tiers(settings, worker, is_reader=True)) for worker in workers]
        watched = [each for chain in self._chains for each in chain.watched]
        self._lane = Lane("look-up", _THREADS, 1024, watched)

    def num_blocks(self, tracked: TrackedRequest, first: int, last: int) -> int | None:
        """How many blocks from the prompt's beginning on could be had, if the `first` ones are here; None: ask again."""
        if tracked.num_below is not None and first >= tracked.asked_from:
            return tracked.num_below
        if not tracked.is_asking:
            digests = tracked.tier_digests(first, last)
            tracked.num_below, tracked.asked_from, tracked.is_asking = None, first, True
            tracked.answer_due = time.monotonic() + self.patience
            nothing = partial(self._answer, tracked, [])
            if self._lane.is_stuck or not self._lane.submit(lambda: self._ask(tracked, digests), nothing):
                nothing()
        elif time.monotonic() > tracked.answer_due:  # a tier hangs, and knows nothing of deadlines
            return first
        return tracked.num_below

    def _ask(self, tracked: TrackedRequest, digests: list[bytes]) -> None:
        """In a thread of its own."""
        holders: list[int] = []
        try:
            due, common = time.monotonic() + self._timeout, [0] * len(digests)
            for space, chain in zip(self._spaces, self._chains, strict=True):
                found = chain.find_prefix(space.keys(digests[: len(common)]), due)
                common = [max(pair) for pair in zip(common, found, strict=False)]  # the slowest of all workers
            holders = common
        finally:
            self._answer(tracked, holders)

    def _answer(self, tracked: TrackedRequest, holders: list[int]) -> None:
        tracked.holders = holders
        tracked.num_below, tracked.is_asking = tracked.asked_from + len(holders), False

    def tiers(self) -> list[KeyedTier]:
        """The tiers of the first worker."""
        return [watched.tier for watched in self._chains[0].watched]

    def close(self) -> None:
        """Lets go of the tiers."""
        self._lane.stop(1.0)
        for chain in self._chains:
            chain.close()
