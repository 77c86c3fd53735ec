"""ShardKeeper: does with the tiers of one rank what rank 0 says. How ranks share tiers: `shards`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvpool.storage import DataPlane
from kvpool.tiers.contract import Worth
from kvpool.tiers.keys import KeyPattern
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.shards import ShardPart
from kvpool.tiers.transport.tier_transport import TierTransport


class ShardKeeper:
    """A rank other than 0: does with its own tiers what rank 0 says, whose keys it gets."""

    def __init__(self, transport: TierTransport, plane: DataPlane) -> None:
        self._transport = transport
        self._plane = plane
        self._space = transport.keys.space
        self._fetches: dict[int, Fetch | None] = {}  # None: not loaded yet
        self._lock = threading.Lock()

    # --- out of order ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], seconds: float, answer: Callable[[list[bool]], None]) -> None:
        """Answers which blocks are here, in another thread."""

        def look() -> None:
            found = [False] * len(keys)
            try:
                due = time.monotonic() + seconds
                found = [index >= 0 for index in self._transport.chain.find(self._space.own(keys), due)]
            finally:
                answer(found)

        nothing = partial(answer, [False] * len(keys))
        if not self._transport.fetch_threads.submit(look, nothing):
            nothing()

    def load(
        self, number: int, keys: Sequence[Sequence[bytes]], seconds: float, answer: Callable[[list[bool]], None]
    ) -> None:
        """Loads blocks in another thread, answers which came, and keeps them until `write` or `release`."""
        due = time.monotonic() + seconds
        with self._lock:
            self._fetches[number] = None
        job = partial(self._load, number, [self._space.own(of_group) for of_group in keys], due, answer)
        nothing = partial(self._loaded, number, None, [False] * sum(map(len, keys)), answer)
        if not self._transport.fetch_threads.submit(job, nothing):
            nothing()

    def _load(self, number: int, keys: list[list[bytes]], due: float, answer: Callable[[list[bool]], None]) -> None:
        fetch, came = None, [False] * sum(map(len, keys))
        try:
            fetch, came = self._transport.fetcher.load_blocks(keys, due)
        finally:
            self._loaded(number, fetch, came, answer)

    def _loaded(self, number: int, fetch: Fetch | None, came: list[bool], answer: Callable[[list[bool]], None]) -> None:
        with self._lock:
            is_wanted = number in self._fetches
            if is_wanted and fetch is not None:
                self._fetches[number] = fetch
        if not is_wanted and fetch is not None:  # rank 0 did not wait so long
            fetch.release()
        answer(came)

    def release(self, number: int) -> None:
        """Rank 0 does not need what was loaded, or does not wait for it any more."""
        with self._lock:
            fetch = self._fetches.pop(number, None)
        if fetch is not None:
            fetch.release()

    # --- in order with steps -----------------------------------------------------------------------------------------

    def write(self, number: int, parts: Sequence[ShardPart]) -> None:
        """Writes what was loaded into blocks."""
        with self._lock:
            fetch = self._fetches.pop(number)
        assert fetch is not None, "rank 0 writes what this rank has not loaded"
        groups, waits = self._transport.keys.groups, []
        for group, begin, end, blocks in parts:
            rows = fetch.groups[group].rows[begin:end]
            assert not isinstance(rows, list)
            waits.append(self._plane.write_blocks(blocks, groups[group].index, torch.from_numpy(rows)))
        self._transport.give_back(fetch, waits)

    def store(self, group: int, keys: Sequence[bytes], blocks: Sequence[int], worths: Sequence[Worth]) -> None:
        """Stores full blocks of a layer group."""
        self._transport.offers.send(group, self._space.own(keys), blocks, worths)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Removes values."""
        self._transport.storer.remove(self._space.own(keys))

    def purge(self, pattern: KeyPattern) -> None:
        """Removes all values with such keys: of this shard, unless the pattern is for all models."""
        self._transport.storer.purge(KeyPattern(None if pattern.space is None else self._space.prefix, pattern.tag))

    def close(self) -> None:
        """Releases what was loaded."""
        for number in list(self._fetches):
            self.release(number)
