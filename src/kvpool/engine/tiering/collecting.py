"""What steps computed goes to tiers: every block of a live request once it is full, before its windows move on.

Decoding pays for it only in steps in which a sequence fills a block.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvpool.scheduling import BatchPlan, ScheduledSequence, Scheduler
from kvpool.tiers.transport.offering import Offers, Progress


class Collector:
    """Offers the full blocks of a scheduler's sequences to tiers, each once per request."""

    def __init__(self, scheduler: Scheduler, offers: Offers) -> None:
        self._scheduler = scheduler
        self._offers = offers
        self._progress: dict[Hashable, dict[int, Progress]] = {}  # by request and sample
        self._demanded: set[Hashable] = set()

    def demand(self, request_id: Hashable) -> None:
        """All blocks of this request must go to tiers, also what it finds cached, and however seldom it was used."""
        self._demanded.add(request_id)

    def collect(self, plan: BatchPlan) -> None:
        """A step has run and is about to be completed: takes the blocks that it filled."""
        size = self._offers.block_size
        counts = np.diff(plan.query_start)
        filled = plan.kv_lengths // size > (plan.kv_lengths - counts) // size
        if self._demanded:
            filled |= np.array([sequence.request.id in self._demanded for sequence in plan.sequences], bool)
        rows = np.flatnonzero(filled & self._scheduler.current_rows(plan)) if filled.any() else ()
        for row in rows:
            self._collect_sequence(plan.sequences[int(row)], int(plan.kv_lengths[int(row)]))

    def _collect_sequence(self, sequence: ScheduledSequence, num_written: int) -> None:
        handle = sequence.live_handle()
        if not handle.publishes or sequence.group.is_finished:
            return
        request = sequence.request
        tokens = self._scheduler.token_ids(sequence)[:num_written]  # without drafts, which may be rejected
        self._offers.offer(
            handle,
            tokens,
            self._progress_of(sequence),
            request.multimodal,
            request.session,
            is_demanded=request.id in self._demanded,
        )

    def _progress_of(self, sequence: ScheduledSequence) -> Progress:
        of_request = self._progress.setdefault(sequence.request.id, {})
        found = of_request.get(sequence.index)
        if found is None:
            found = of_request[sequence.index] = self._offers.begin(sequence.request.scope)
        return found

    def forget(self, request_id: Hashable) -> None:
        """A request is over."""
        self._progress.pop(request_id, None)
        self._demanded.discard(request_id)
