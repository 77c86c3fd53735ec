"""PoolTiers: a pool loads the prefix of a call from tiers before it computes, and stores what it computed.

A call waits for its prefix at most `timeout` seconds. Once the pool knows how long computing the prefix would take, the call
does not wait longer than that either. If a tier fails, is late or hangs, the model computes the prefix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable

from kvpool.config import Tier
from kvpool.core.handle import KVCacheHandle
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.quiet import QuietErrors
from kvpool.scheduling import Request
from kvpool.scope import ReuseScope
from kvpool.storage.data_plane import DataPlane
from kvpool.tiers.model_tiers import OpenedTiers
from kvpool.tiers.transport.cache_blocks import OfferProgress
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.prefix_options import next_query
from kvpool.tiers.transport.threads import Pending
from kvpool.tiers.transport.tier_transport import TieringStats, TierTransport

_quiet = QuietErrors(logging.getLogger("kvpool"))


class PoolTiers:
    """Joins one pool to keyed tiers, fastest first. Several threads may call it."""

    def __init__(self, opened: OpenedTiers, manager: KVCacheManager, plane: DataPlane) -> None:
        self.transport = TierTransport(opened, manager, plane)
        self._manager = manager
        self._timed_out = self._crowded = 0
        self._closing = threading.Lock()
        self._closed = False

    # --- prefixes come -----------------------------------------------------------------------------------------------

    def load_prefix(
        self, request_id: Hashable, tokens: Int32Array, scope: ReuseScope, latest: float
    ) -> tuple[KVCacheHandle | None, dict[int, Tier]]:
        """Loads what tiers have of a prompt, until `latest`. Returns a lease that the caller frees, and where its blocks
        came from; None if nothing came.
        """
        media: dict[int, Tier] = {}
        if len(tokens) <= self.transport.keys.block_size:
            return None, media
        request = Request(request_id, tokens, 1, scope=scope)
        lease: KVCacheHandle | None = None
        while True:
            fetch = self._begin(request, latest)
            if fetch is None:
                return lease, media
            latest = fetch.due
            pending = Pending(fetch.due, Fetch.release)
            if not self.transport.fetch(fetch, pending.end, pending.end):
                self._crowded += 1
                return lease, media
            if pending.wait() is None:
                self._timed_out += 1
                return lease, media
            try:
                handle = self._write(request, fetch)
            except BaseException:
                self._free(lease)
                raise
            if handle is None:
                return lease, media
            self._free(lease)
            lease = handle
            media |= fetch.media
            if not fetch.is_part:  # else fetch the rest, now that staging memory is free again
                return lease, media

    def _write(self, request: Request, fetch: Fetch) -> KVCacheHandle | None:
        """Writes fetched blocks into the pool, and returns a lease on them. Releases the memory of the fetch in any case."""
        handle: KVCacheHandle | None = None
        try:
            handle, waits = self.transport.import_prefix(request, fetch)
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
        """The fetch for a prompt; None if there is nothing to ask for, or it does not pay."""
        transport, size, now = self.transport, self.transport.keys.block_size, time.monotonic()
        match = self._manager.match_prefix(request.prompt, request.scope)
        num_tokens = len(request.prompt)
        missing = next_query(num_tokens // size, num_tokens, size) - match.num_tokens
        if missing <= 0 or self._closed or transport.fetch_threads.is_stuck or latest <= now:
            return None

        def make() -> Fetch:
            prompt = transport.keys.of_prompt(request.prompt, request.scope)
            return Fetch(prompt, match.num_blocks, now, min(latest, now + transport.patience(missing)))

        return make() if transport.is_worth_waiting(missing, make) else None

    # --- blocks go ---------------------------------------------------------------------------------------------------

    def begin_offers(self, scope: ReuseScope) -> OfferProgress:
        """The progress of a new sequence: nothing was offered."""
        return self.transport.offers.begin(scope)

    def offer(self, handle: KVCacheHandle, progress: OfferProgress) -> None:
        """Has the full blocks of a sequence stored in tiers, in the background."""
        num_full = handle.num_committed // self.transport.keys.block_size
        if num_full <= progress.num_blocks or not handle.publishes or self._closed:
            return
        try:
            self.transport.offers.offer(handle, handle.token_ids[: handle.num_committed], progress)
        except Exception as error:
            _quiet.error(error, "blocks could not be copied for tiers; they are not stored")

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns how long computing takes: a pass computed `num_tokens` of prompts in `seconds`."""
        if num_tokens >= self.transport.keys.block_size:
            self.transport.decider.observe_prompt(num_tokens, seconds)

    # --- looking at it, ending it ------------------------------------------------------------------------------------

    def stats(self) -> TieringStats:
        """Counters of everything here, and of each tier."""
        return self.transport.stats(timed_out=self._timed_out, crowded=self._crowded)

    def close(self) -> None:
        """Ends the stores in flight, within a few seconds, and closes threads and owned tiers. May be called twice."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self.transport.close()
