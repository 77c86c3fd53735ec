"""Keyed tiers behind a pool: the prefix of a call comes from them before it is computed, and what it computed goes to them.

A call waits for its prefix, `timeout` seconds at most and no longer than computing it would take once that is known. A tier
that fails, is late or hangs brings nothing, and the model computes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable

from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.scheduling import Request
from kvpool.scope import ReuseScope
from kvpool.sequences.handle import KVCacheHandle
from kvpool.storage.data_plane import DataPlane
from kvpool.tiers.model_tiers import OpenedTiers
from kvpool.tiers.transport.cache_blocks import Progress
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.lanes import Pending
from kvpool.tiers.transport.movers import Movers, TieringStats
from kvpool.tiers.transport.prefix_options import next_query

log = logging.getLogger("kvpool")


class PoolTiers:
    """Joins one pool to keyed tiers, fastest first. Several threads may call it."""

    def __init__(self, opened: OpenedTiers, manager: KVCacheManager, plane: DataPlane) -> None:
        self.movers = Movers(opened, manager, plane)
        self._manager = manager
        self._timed_out = self._crowded = 0
        self._closing = threading.Lock()
        self._closed = False

    # --- prefixes come -----------------------------------------------------------------------------------------------

    def bring(self, request_id: Hashable, tokens: Int32Array, scope: ReuseScope, latest: float) -> KVCacheHandle | None:
        """Has as much of a prompt cached as tiers can bring by a time; a lease on it, to be freed. None: nothing came."""
        if len(tokens) <= self.movers.keys.block_size:
            return None
        request = Request(request_id, tokens, 1, scope=scope)
        lease: KVCacheHandle | None = None
        while True:
            fetch = self._begin(request, latest)
            if fetch is None:
                return lease
            latest = fetch.due
            pending = Pending(fetch.due, Fetch.release)
            if not self.movers.fetch(fetch, pending.end, pending.end):
                self._crowded += 1
                return lease
            if pending.wait() is None:
                self._timed_out += 1
                return lease
            try:
                handle = self._write(request, fetch)
            except BaseException:
                self._free(lease)
                raise
            if handle is None:
                return lease
            self._free(lease)
            lease = handle
            if not fetch.is_part:  # else the rest may come, now that this is used
                return lease

    def _write(self, request: Request, fetch: Fetch) -> KVCacheHandle | None:
        """Fetched blocks are written into the pool; a lease on them. The memory that they came in goes back in any case."""
        handle: KVCacheHandle | None = None
        try:
            handle, waits = self.movers.bring(request, fetch)
            for wait in waits:
                wait()
        except BaseException:
            self._free(handle)
            raise
        finally:
            fetch.release()
        return handle

    def _free(self, lease: KVCacheHandle | None) -> None:
        if lease is not None:
            self._manager.free(lease)

    def _begin(self, request: Request, latest: float) -> Fetch | None:
        """What to ask tiers for; None: nothing, or it does not pay."""
        movers, size, now = self.movers, self.movers.keys.block_size, time.monotonic()
        match = self._manager.match_prefix(request.prompt, request.scope)
        num_tokens = len(request.prompt)
        missing = next_query(num_tokens // size, num_tokens, size) - match.num_tokens
        if missing <= 0 or self._closed or movers.lane.is_stuck or latest <= now:
            return None

        def make() -> Fetch:
            prompt = movers.keys.of_prompt(request.prompt, request.scope)
            return Fetch(prompt, match.num_blocks, now, min(latest, now + movers.patience(missing)))

        return make() if movers.is_worth_waiting(missing, make) else None

    # --- blocks go ---------------------------------------------------------------------------------------------------

    def begin_offers(self, scope: ReuseScope) -> Progress:
        """Of a sequence of which nothing was offered."""
        return self.movers.offers.begin(scope)

    def offer(self, handle: KVCacheHandle, progress: Progress) -> None:
        """Full blocks of a sequence go to tiers, in the background."""
        num_full = handle.num_committed // self.movers.keys.block_size
        if num_full <= progress.num_blocks or not handle.publishes or self._closed:
            return
        try:
            self.movers.offers.offer(handle, handle.token_ids[: handle.num_committed], progress)
        except Exception:
            log.exception("blocks could not be copied for tiers; they are not stored")

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A pass computed so many tokens of prompts in so long: what loading must beat."""
        if num_tokens >= self.movers.keys.block_size:
            self.movers.decider.observe_prompt(num_tokens, seconds)

    # --- looking at it, ending it ------------------------------------------------------------------------------------

    def stats(self) -> TieringStats:
        """Counters of everything here, and of each tier."""
        return self.movers.stats(timed_out=self._timed_out, crowded=self._crowded)

    def close(self) -> None:
        """Stores what is on its way, for a few seconds at most, and ends threads and owned tiers. May be called twice."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self.movers.close()
