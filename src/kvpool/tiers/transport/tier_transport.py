"""TierTransport: moves blocks between a cache and its tiers, for an engine and for a `CachePool` of transformers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from kvpool.config import Tier
from kvpool.core.handle import KVCacheHandle
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.digests import root_digest
from kvpool.scheduling import Request
from kvpool.scope import ReuseScope
from kvpool.storage import DataPlane
from kvpool.storage.memory import LinkedMemory, page_locks
from kvpool.tiers.contract import Keeper, Loan, Slots, TierStats
from kvpool.tiers.keys import KeyPattern, named, tenant_digest, tenant_tag
from kvpool.tiers.model_tiers import OpenedTiers
from kvpool.tiers.transport.block_keys import BlockKeys, Lineage, PromptKeys
from kvpool.tiers.transport.cache_blocks import Importer, Lease, Offers
from kvpool.tiers.transport.chain import GRACE_SECONDS, TierChain
from kvpool.tiers.transport.deciding import Decider, DecisionStats
from kvpool.tiers.transport.fetching import Fetch, Fetcher, FetchStats
from kvpool.tiers.transport.staging import Bytes, StagingMemory, page_aligned
from kvpool.tiers.transport.storing import Storer, StoreStats
from kvpool.tiers.transport.threads import ThreadPool

FETCH_THREADS = 2
MAX_HELD = 256  # requests that may wait; further ones are computed
STAGING_BYTES = 2**28  # for loads, and as much for stores; four times as much with a GPU
NEAR_BYTES, NEAR_SHARE = 2**29, 128  # of a GPU's memory for stores, and one part in so many of it at most
FLUSH_SECONDS = 5.0  # closing waits so long for blocks in flight
SHORTEST_WAIT = 0.05


class MeasuredTier(NamedTuple):
    """One tier: its own counters, and how fast it was lately."""

    stats: TierStats
    latency: float
    bytes_per_second: float


@dataclass
class HandoverStats:
    """Prompts that one engine computed for another, since the engine was made."""

    prefills: int = 0  # prompts that were computed here for others
    prefills_cut: int = 0  # prefills that are not all in the tier: a store failed, or they were cancelled
    prefill_blocks: int = 0  # blocks of prefills that others find
    prefetches: int = 0  # prefixes that were loaded before their request came
    prefetched_blocks: int = 0


class TieringStats(NamedTuple):
    """The state and counters of the tiers of an engine or a pool."""

    tiers: tuple[MeasuredTier, ...]
    decisions: DecisionStats
    fetches: FetchStats
    stores: StoreStats
    handovers: HandoverStats
    held: int  # requests that wait for their prefix
    joined: int  # requests that waited for a load of another one
    timed_out: int  # requests that stopped waiting
    crowded: int  # requests that were computed because too many waited
    prompt_tokens_loaded: int
    imports: int
    imports_without_room: int
    leases: tuple[Lease, ...]
    blocks_waiting: int  # in flight to tiers
    staging_bytes: int  # in use


class TierTransport:
    """Fetches prefixes, writes them into blocks, and stores blocks. `close` closes the tiers that are owned."""

    def __init__(self, opened: OpenedTiers, manager: KVCacheManager, plane: DataPlane) -> None:
        self.keys = keys = opened.keys
        self.timeout = opened.timeout
        self.chain = TierChain(opened.tiers)
        self.decider = Decider(len(opened.tiers))
        allocate = partial(_pinned, plane.device) if plane.device.type == "cuda" else page_aligned
        staging = STAGING_BYTES * (4 if plane.device.type == "cuda" else 1)
        self.memory = StagingMemory(staging, allocate)
        self.storer = Storer(self.chain.watched, StagingMemory(staging, allocate))
        self._linked = LinkedMemory(page_locks) if plane.device.type == "cuda" else None
        self.fetcher = Fetcher(
            self.chain, keys.groups, keys.block_size, self.decider, self.memory, self.storer, self._can_borrow
        )
        self.fetch_threads = ThreadPool("fetch", FETCH_THREADS, MAX_HELD, self.chain.watched)
        self._near = StagingMemory(_near_bytes(plane.device), partial(_near, plane.device))
        self.offers = Offers(plane, keys, self.storer, self._near, self._can_write, opened.min_uses)
        self.invalidator = TierInvalidator(keys, self.offers.lineage, self.storer)
        self._importer = Importer(manager, plane, keys, self.offers.lineage)
        self._copies_at_once = plane.device.type == "cpu"
        self._owned = opened.owned
        self._tokens_loaded = self._imports = self._no_room = 0
        if self._linked is not None and self.storer.has_slots:
            self.fetch_threads.submit(self._link, _nothing)

    def _link(self) -> None:
        """Begins to lock the memory of the tier for the GPU, which writes to it as soon as that is done."""
        loan = self.chain.watched[0].lend([], [], self.timeout)
        if loan is not None:
            self._can_borrow(loan)
            loan.release()

    def _can_borrow(self, loan: Loan) -> bool:
        """Whether the device can copy from there: the CPU always, a GPU once that memory is locked."""
        return self._linked is None or self._linked.has(loan.memory, loan.part_bytes, loan.views)

    def _can_write(self, slots: Slots | None) -> bool:
        """Whether the device can copy there; None: to all of the memory that it copied from or to last."""
        if self._linked is None:
            return True
        return (
            self._linked.is_locked if slots is None else self._linked.has(slots.memory, slots.part_bytes, slots.views)
        )

    def patience(self, num_tokens: int) -> float:
        """Seconds that a request waits for `num_tokens`: no longer than computing them takes, once that is measured."""
        computing = self.decider.compute_seconds(num_tokens)
        return self.timeout if computing is None else min(self.timeout, max(SHORTEST_WAIT, computing))

    def is_worth_waiting(self, num_tokens: int, make: Callable[[], Fetch]) -> bool:
        """Whether a request should wait for `num_tokens`. If not, a fetch without a waiter may measure the tiers again."""
        if self.decider.is_worth_looking(num_tokens):
            return True
        if self.decider.is_time_to_look():
            fetch = make()
            self.fetch(fetch, Fetch.release, fetch.release)
        return False

    def find(self, prompt: PromptKeys, first: int) -> dict[int, Tier]:
        """Where tiers have the blocks of a prompt from `first` on. Waits for the tiers, `timeout` at most."""
        now = time.monotonic()
        return self.fetcher.find(Fetch(prompt, first, now, now + self.timeout))

    def fetch(self, fetch: Fetch, done: Callable[[Fetch], None], drop: Callable[[], None]) -> bool:
        """Has a prefix fetched in the background; False if too many wait. Closing before that calls `drop`, not `done`."""
        return self.fetch_threads.submit(partial(self.fetcher.run, fetch, done), drop)

    def import_prefix(self, request: Request, fetch: Fetch) -> tuple[KVCacheHandle | None, list[Callable[[], None]]]:
        """Writes fetched blocks into the cache, unless they were invalidated meanwhile; returns what `Importer` returns."""
        with self.invalidator.lock:
            if fetch.num_blocks <= fetch.first or not self.invalidator.is_valid(request, fetch):
                return None, []
            handle, waits = self._importer.import_prefix(request, fetch)
        if handle is None:
            self._no_room += 1
        else:
            self._imports += 1
            self._tokens_loaded += (fetch.num_blocks - fetch.first) * self.keys.block_size
        assert fetch.decision is not None
        waited = time.monotonic() - fetch.began
        self.decider.observe_wait(fetch.decision, fetch.num_bytes, waited, fetch.loading_seconds)
        return handle, waits

    def give_back(self, fetch: Fetch, waits: Sequence[Callable[[], None]]) -> None:
        """Releases the memory of a fetch: at once, or when the device has read it."""
        if waits and not self._copies_at_once and fetch.memory is not None:
            memory = fetch.memory
            memory.share()
            release = partial(_release_after, waits, memory)
            if not self.fetch_threads.submit(release, release):
                release()
        fetch.release()

    def stats(
        self,
        *,
        held: int = 0,
        joined: int = 0,
        timed_out: int = 0,
        crowded: int = 0,
        leases: tuple[Lease, ...] = (),
        handovers: HandoverStats | None = None,
    ) -> TieringStats:
        """Counters of everything here, of each tier, and of the requests that wait, which the caller knows."""
        measured = zip(self.chain.stats(), self.decider.speeds, strict=True)
        return TieringStats(
            tuple(MeasuredTier(stats, speed.latency, speed.bytes_per_second) for stats, speed in measured),
            self.decider.stats(),
            self.fetcher.stats(),
            self.storer.stats(),
            handovers or HandoverStats(),
            held,
            joined,
            timed_out,
            crowded,
            self._tokens_loaded,
            self._imports,
            self._no_room,
            leases,
            self.storer.num_waiting,
            self.memory.lent_bytes + self.storer.memory.lent_bytes + self._near.lent_bytes,
        )

    def close(self) -> None:
        """Ends the stores in flight, within a few seconds, and closes threads and owned tiers."""
        self.fetch_threads.stop(0.0)
        self.storer.close(FLUSH_SECONDS)
        self.fetch_threads.stop(self.timeout + GRACE_SECONDS)
        if self._linked is not None:
            self._linked.close()
        for tier in self._owned:
            tier.close()


def _release_after(waits: Sequence[Callable[[], None]], memory: Keeper) -> None:
    """Releases fetched bytes when the device has read them."""
    for wait in waits:
        wait()
    memory.release()


def _pinned(device: torch.device, num_bytes: int) -> Bytes:
    """Page-locked memory, which a GPU reads by itself."""
    with torch.cuda.device(device):  # in any thread: otherwise the first GPU would be used, too
        found: Bytes = torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=True).numpy()[:num_bytes]
    return np.asarray(found)


def _near(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Memory of the device itself."""
    if device.type == "cpu":
        return torch.from_numpy(page_aligned(num_bytes))
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _near_bytes(device: torch.device) -> int:
    """How much of the device's memory blocks may wait in that are on their way to a tier."""
    if device.type == "cpu":
        return STAGING_BYTES
    return min(NEAR_BYTES, int(torch.cuda.get_device_properties(device).total_memory) // NEAR_SHARE)


def _nothing() -> None:
    """There is nothing to give back."""


# --- invalidating ----------------------------------------------------------------------------------------------------


class TierInvalidator:
    """Invalidation, here and in tiers. Each call holds `lock`.

    Who writes loaded blocks into the cache holds `lock`, too, and asks `is_valid` first.
    """

    def __init__(self, keys: BlockKeys, lineage: Lineage, storer: Storer) -> None:
        self.lock = threading.RLock()
        self._keys = keys
        self._lineage = lineage
        self._storer = storer

    def everything(self, drop: Callable[[], int], *, remove: bool = True) -> int:
        """Forgets all content. `drop` takes it out of the cache and returns how many blocks left.

        `remove=False` leaves it in the tiers: other engines, which have the weights that it was computed with, may use it.
        """
        with self.lock:
            removed = drop()
            self._keys.forgotten.forget_all()
        if remove:
            self._remove(None)
        return removed

    def content(
        self, drop: Callable[[], int], prefix: Int32Array | None, scope: ReuseScope | None, session: str | None
    ) -> int:
        """Forgets what `KVCacheManager.invalidate` forgets. `drop` calls that, which checks the arguments."""
        with self.lock:
            removed = drop()
            marks = self._beginnings(prefix, scope, session)
            old = self._names_of(marks, prefix, scope)
            if marks:
                self._keys.forgotten.forget(marks)
        self._remove(marks, old)
        if prefix is None and session is None:
            pattern = KeyPattern.of_scope(ReuseScope() if scope is None else scope, self._keys.space.prefix)
            self._storer.purge(pattern)
        return removed

    def of_tenant(self, drop: Callable[[], int], tenant: str) -> int:
        """Forgets everything of a tenant, also in scopes that only tiers know of. `drop` checks the argument."""
        with self.lock:
            removed = drop()
            self._keys.forgotten.forget([tenant_digest(tenant)])
        self._remove_named(self._lineage.take_tagged(tenant_tag(tenant)))
        self._storer.purge(KeyPattern.of_tenant(tenant, self._keys.space.prefix))
        return removed

    def is_valid(self, request: Request, fetch: Fetch) -> bool:
        """Whether nothing that was loaded for a request was forgotten meanwhile."""
        if fetch.prompt.version == self._keys.forgotten.version:
            return True
        now, end = self._keys.of_prompt(request.prompt, request.scope, request.multimodal), fetch.num_blocks
        return all(new[:end] == old[:end] for new, old in zip(now.keys, fetch.prompt.keys, strict=True))

    def _beginnings(self, prefix: Int32Array | None, scope: ReuseScope | None, session: str | None) -> list[bytes]:
        """The digests from which on content is forgotten.

        These are the last full block of a prefix, the root of a scope, or the first blocks that a session computed.
        """
        if session is not None:
            return self._lineage.of_session(session)
        root = root_digest(ReuseScope() if scope is None else scope)
        return [root] if prefix is None else self._keys.digests(root, prefix)[-1:]

    def _names_of(self, marks: Sequence[bytes], prefix: Int32Array | None, scope: ReuseScope | None) -> list[bytes]:
        """The last block of a prefix, by the names that any process stored it under. Blocks behind it need it."""
        if prefix is None or not marks:
            return []
        own = ReuseScope() if scope is None else scope
        root, forgotten = root_digest(own), self._keys.forgotten
        used, _ = forgotten.renamed(self._keys.salt_of(own, root), self._keys.digests(root, prefix))
        return named(own, {marks[-1], used[-1]})

    def _remove(self, marks: Sequence[bytes] | None, names: Sequence[bytes] = ()) -> None:
        """Removes the values whose keys are known from the tiers, in the background."""
        self._remove_named([*names, *self._lineage.take(marks)])

    def _remove_named(self, names: Sequence[bytes]) -> None:
        gone = list(dict.fromkeys(names))
        self._storer.remove([key for of_group in self._keys.of_digests(gone) for key in of_group])
