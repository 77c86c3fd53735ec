"""Pages by the keys of another engine, in the tiers of kvpool: whole and verified, or not there."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence

from kvpool.integrations.connector.connector_settings import ConnectorSettings
from kvpool.integrations.connector.connector_tiers import open_tiers, prefix_from
from kvpool.integrations.connector.step_orders import Introduction
from kvpool.integrations.connector.worker_side import load_prefix
from kvpool.tiers import KeySpace, Outcome
from kvpool.tiers.transport.staging import Bytes
from kvpool.tiers.transport.watching import WatchedTier


class PageStore:
    """The tiers of one worker. An error is a miss; nothing here raises for what a tier does."""

    def __init__(self, settings: ConnectorSettings, worker: Introduction, *, is_reader: bool = False) -> None:
        self.is_reader = is_reader or settings.read_only
        self._timeout = settings.timeout
        self._space = KeySpace(worker.fingerprint)
        self._tiers = [WatchedTier(tier) for tier in open_tiers(settings, worker, is_reader=is_reader)]
        self._epoch = ""

    def num_found(self, names: Sequence[str]) -> int:
        """How many pages from the first on some tier has."""
        keys = self._keys(names)

        def ask(watched: WatchedTier, lacking: list[int], seconds: float) -> list[bool]:
            return watched.contains([keys[index] for index in lacking], seconds)

        return len(prefix_from(self._tiers, len(keys), time.monotonic() + self._timeout, ask))

    def load(self, names: Sequence[str], pages: Sequence[Bytes]) -> int:
        """Fills pages; returns how many from the first on are whole and right. What lies behind them is undefined."""
        return load_prefix(self._tiers, self._keys(names), pages, time.monotonic() + self._timeout)

    def store(self, names: Sequence[str], pages: Sequence[Bytes]) -> list[bool]:
        """Which pages are in some tier now."""
        if self.is_reader:
            return [False] * len(names)
        keys, stored = self._keys(names), [False] * len(names)
        for watched in self._tiers:
            if not watched.num_hung:
                outcomes = watched.store(keys, pages, self._timeout)
                stored = [had or outcome == Outcome.OK for had, outcome in zip(stored, outcomes, strict=True)]
        return stored

    def forget(self) -> None:
        """Nothing that was stored before is found by this process any more."""
        self._epoch = uuid.uuid4().hex

    def close(self) -> None:
        """Lets go of the tiers."""
        for watched in self._tiers:
            watched.tier.close()

    def _keys(self, names: Sequence[str]) -> list[bytes]:
        return self._space.keys(hashlib.sha256(f"{self._epoch}\0{name}".encode()).digest() for name in names)
