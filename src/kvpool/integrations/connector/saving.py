"""Stores: copies pages to the host, publishes them when the workers confirm, and then has them stored in the tiers.

    ordered    the copy runs beside the step behind the one that writes the pages; the rows are held, nobody can find them
    confirmed  all workers have done it; blocks are published together, at the latest before the next look-up
    published  blocks can be found, and are ordered to the tiers below, if there are any
    done       the tiers have their own copy of the bytes: no job uses the rows any more

A running request keeps its rows, and a few more for its next blocks, so that a step which fills blocks needs no look-up
(`HeldRows`). It loses them when it ends, when another request needs the room, and when all requests together hold more than
a quarter of the host.

If layers keep states, blocks are stored up to a checkpoint, when the engine says that it has one: what lies behind the last
one is of no use. Rows are held only while jobs use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvpool.core.handle import KVCacheHandle
from kvpool.errors import OutOfBlocksError
from kvpool.integrations.connector.orders import NO_PAGE, Checkpoint, Orders, Spill, Store
from kvpool.integrations.connector.reports import BlockEvents
from kvpool.integrations.connector.requests import Saving, TrackedRequest
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array

CHECKPOINTS = 1  # the group of states in the manager and in keys; blocks are group 0
_MANY = 32  # so many confirmed blocks are published even before a look-up


@dataclass
class SaveStats:
    """Counts of blocks since the connector was made."""

    stored: int = 0
    no_room: int = 0  # not stored because everything on the host was in use
    spoiled: int = 0  # stored and not published: a worker could not copy them, or a reset came before


@dataclass
class _StoreJob:
    number: int
    saving: Saving
    first: int
    last: int
    pages: list[list[int]]
    lease: KVCacheHandle | None = None  # holds its checkpoint until the tiers have it


class PagesInUse:
    """Pages that stores in flight read."""

    def __init__(self) -> None:
        self._stores: dict[int, int] = {}  # the last store of each page

    def begin(self, job: int, pages: Iterable[Sequence[int]]) -> None:
        """A store of these pages, of each group, is ordered."""
        for of_group in pages:
            self._stores.update(dict.fromkeys(of_group, job))

    def end(self, job: int, pages: Iterable[Sequence[int]]) -> None:
        """A store is over."""
        for page in {page for of_group in pages for page in of_group}:
            if self._stores.get(page) == job:
                del self._stores[page]

    def any_of(self, pages: Iterable[Sequence[int]]) -> bool:
        """Whether a store in flight reads one of these pages."""
        stores = self._stores
        return bool(stores) and not all(stores.keys().isdisjoint(of_group) for of_group in pages)


class Saver:
    """Copies from the engine's pages into the host's rows."""

    def __init__(
        self,
        manager: KVCacheManager,
        block_size: int,
        num_rows: int,
        new_job: Callable[[], int],
        *,
        has_tiers: bool,
        has_states: bool,
        events: BlockEvents | None,
    ) -> None:
        self.stats = SaveStats()
        self._manager = manager
        self._has_states = has_states
        self._held = HeldRows(manager, block_size, num_rows, keeps=not has_states)
        self._block_size = block_size
        self._has_tiers = has_tiers
        self._new_job = new_job
        self._events = events
        self._due: list[tuple[TrackedRequest, int]] = []  # requests that the planned step fills blocks of
        self._stores: dict[int, _StoreJob] = {}
        self._read = PagesInUse()
        self._confirmed: list[_StoreJob] = []
        self._num_confirmed = 0  # blocks of them
        self._spills: dict[int, list[_StoreJob]] = {}
        self._waiting: list[Spill] = []

    @property
    def has_waiting(self) -> bool:
        """Whether something is in flight that a further step must carry or confirm."""
        return bool(self._stores or self._waiting or self._spills or (self._has_tiers and self._confirmed))

    # --- a step ------------------------------------------------------------------------------------------------------

    def save(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Stores full blocks of a request that the planned step computes up to `num_tokens`."""
        last = min(num_tokens, tracked.num_ids) // self._block_size
        if tracked.num_seen < last <= min(map(len, tracked.pages)) and tracked.is_known:
            self._due.append((tracked, last))

    def reads_any(self, pages: Iterable[Sequence[int]]) -> bool:
        """Whether a store in flight reads one of these pages."""
        return self._read.any_of(pages)

    def order(self, orders: Orders) -> None:
        """Orders copies of what the host lacks, and has published blocks stored in the tiers."""
        if orders.is_idle or self._has_states or self._num_confirmed >= _MANY:
            self.publish()
        orders.spills, self._waiting = self._waiting, []
        due, self._due = self._due, []
        growing: list[tuple[Saving, int]] = []
        beginning: list[tuple[TrackedRequest, int]] = []
        for tracked, last in due:
            saving = tracked.saving
            if saving is None:
                beginning.append((tracked, last))
            elif last <= saving.num_ordered:  # it was preempted, and computes blocks again that are there or in flight
                tracked.num_seen = last
            elif not saving.is_spoiled:  # otherwise it is looked at again in the next step
                growing.append((saving, last))
        if growing:
            self._held.grow(growing)
        for saving, last in growing:
            if last <= len(saving.rows):
                saving.owner.num_seen = last
                self._order(saving, last, orders)
        for tracked, last in beginning:  # these may take rows that others hold but no job uses
            if (saving := self._begin(tracked, last)) is not None:
                self._order(saving, last, orders)
            tracked.num_seen = last

    def _begin(self, tracked: TrackedRequest, last: int) -> Saving | None:
        """Takes rows for what the host lacks; None if it lacks nothing, or has no room."""
        self.publish()
        num_tokens = last * self._block_size
        # The last token counts as not computed, so one more is needed to find a checkpoint behind all of these.
        tokens = tracked.tokens(min(num_tokens + self._has_states, tracked.num_ids))
        try:
            handle = self._held.take(tracked, tokens, num_tokens)
        except OutOfBlocksError:
            self.stats.no_room += last - tracked.num_seen
            return None
        if handle.num_cached_blocks >= last:
            self._manager.free(handle)
            return None
        return self._held.keep(tracked, handle)

    def _order(self, saving: Saving, last: int, orders: Orders) -> None:
        first = saving.num_ordered
        pages = [of_group[first:last] for of_group in saving.owner.pages]
        if any(NO_PAGE in of_group for of_group in pages):  # they left their window before they could be stored
            saving.owner.is_cached = False
            self._held.rest(saving)
            return
        saving.num_ordered = last
        job = _StoreJob(self._new_job(), saving, first, last, pages)
        saving.num_jobs += 1
        self._stores[job.number] = job
        self._read.begin(job.number, pages)
        store = Store(job.number, pages, saving.rows[first:last])
        if self._has_states:
            row = saving.handle.block_ids(CHECKPOINTS).item(last - 1)
            store.checkpoint = Checkpoint(row, saving.owner.state_pages)
        orders.stores.append(store)

    # --- what the workers did ----------------------------------------------------------------------------------------

    def confirm(self, job: int, num_blocks: int) -> None:
        """All workers are done with a job; each of them moved `num_blocks` blocks or more."""
        if job in self._spills:
            for spilled in self._spills.pop(job):
                if self._events is not None and not spilled.saving.is_spoiled:
                    self._events.stored_in_tiers(spilled.saving.owner, spilled.first, spilled.last)
                if spilled.lease is not None:
                    self._manager.free(spilled.lease)
                self._let_go(spilled.saving)
            return
        done = self._stores.pop(job)
        self._read.end(job, done.pages)
        if num_blocks < done.last - done.first:
            done.saving.is_spoiled = True
        if done.saving.is_spoiled:
            self._drop(done)
        else:
            self._confirmed.append(done)
            self._num_confirmed += done.last - done.first

    def publish(self) -> None:
        """Publishes confirmed blocks of all requests at once, and orders them to the tiers."""
        if not self._confirmed:
            return
        confirmed, self._confirmed, self._num_confirmed = self._confirmed, [], 0
        spilled = [done for done in confirmed if self._has_tiers and done.saving.owner.options.ttl is None]
        if self._has_states:
            for done in confirmed:  # a commit keeps one checkpoint of a request
                self._commit([done])
                if done in spilled:
                    self._hold(done)
        else:
            self._commit(list({id(done.saving): done for done in confirmed}.values()))  # the last of each
        if spilled:
            self._spill(spilled)
        for done in confirmed:
            self.stats.stored += done.last - done.first
            if not self._has_tiers or done.saving.owner.options.ttl is not None:
                self._let_go(done.saving)

    def _commit(self, confirmed: list[_StoreJob]) -> None:
        """Publishes one job of each request, and what was ordered before it."""
        ids, counts = [], []
        for done in confirmed:
            start, end = done.saving.num_published * self._block_size, done.last * self._block_size
            if self._events is not None:
                self._events.name(done.saving.owner, done.saving.num_published, done.last)
            ids.append(done.saving.owner.tokens(end)[start:])
            counts.append(end - start)
            done.saving.num_published = done.last
        self._manager.commit_batch([done.saving.handle for done in confirmed], np.concatenate(ids), counts)

    def _hold(self, done: _StoreJob) -> None:
        """Holds the checkpoint that was just published: the request's own handle holds the last one only."""
        tokens = done.saving.owner.tokens(done.last * self._block_size)
        longer = np.append(tokens, tokens[:1])  # by any token, because the last one counts as not computed
        with suppress(OutOfBlocksError):  # it is gone already, as a quota may want it
            done.lease = take_rows(self._manager, done.saving.owner, longer, len(tokens), lambda: False)

    def _spill(self, spilled: list[_StoreJob]) -> None:
        """Orders the current rows to the tiers. Publishing may have replaced ours by an equal block that was there."""
        spill = Spill(self._new_job(), [], [])
        for done in spilled:
            digests = done.saving.owner.tier_digests(done.first, done.last)
            spill.rows += done.saving.handle.block_ids()[done.first : done.last].tolist()
            spill.digests += digests
            if done.lease is not None and done.lease.num_cached_blocks == done.last:
                spill.checkpoint_rows.append(done.lease.block_ids(CHECKPOINTS).item(done.last - 1))
                spill.checkpoint_digests.append(digests[-1])
        self._waiting.append(spill)
        self._spills[spill.job] = spilled

    def forget(self) -> None:
        """After a reset: nothing in flight is published, or reported as stored in tiers."""
        self.make_room()  # publishes confirmed blocks one last time
        for job in self._stores.values():
            job.saving.is_spoiled = True
        for spilled in self._spills.values():
            for done in spilled:
                done.saving.is_spoiled = True

    def _drop(self, done: _StoreJob) -> None:
        self.stats.spoiled += done.last - done.first
        self._let_go(done.saving)

    def _let_go(self, saving: Saving) -> None:
        """One job less uses these rows."""
        saving.num_jobs -= 1
        self._held.rest(saving)

    def make_room(self) -> bool:
        """Frees rows that are only held for later blocks; returns whether there were any."""
        self.publish()
        return self._held.make_room()

    def finish(self, tracked: TrackedRequest) -> None:
        """A request has ended. Copies of its pages in flight go on."""
        tracked.is_over = True
        if tracked.saving is not None:
            if tracked.hint is not None:
                self._manager.hint(tracked.saving.handle, tracked.hint)
            self.publish()
        if tracked.saving is not None:
            self._held.rest(tracked.saving)


# --- rows ------------------------------------------------------------------------------------------------------------


_SHARE = 4  # requests hold at most one row in so many of the host, besides rows that jobs use
_AHEAD = 8  # a request gets rows for so many blocks before it fills them


class HeldRows:
    """Allocates rows, many at a time, and frees them."""

    def __init__(self, manager: KVCacheManager, block_size: int, num_rows: int, *, keeps: bool) -> None:
        """`keeps`: a running request keeps rows that no job uses, and gets some before it needs them."""
        self._manager = manager
        self._block_size = block_size
        self._ahead = _AHEAD if keeps else 0
        self._keeps = keeps
        self._most = num_rows // _SHARE
        self._all: dict[int, Saving] = {}  # by id
        self._num_rows = 0  # of all of them

    def take(self, tracked: TrackedRequest, tokens: Int32Array, num_tokens: int) -> KVCacheHandle:
        """Holds what the host has of a prefix, and rows for the rest; raises `OutOfBlocksError` if there are too few."""
        return take_rows(self._manager, tracked, tokens, num_tokens, self.make_room)

    def keep(self, tracked: TrackedRequest, handle: KVCacheHandle) -> Saving:
        """Keeps the rows of a running request."""
        found = handle.num_cached_blocks
        saving = Saving(tracked, handle, found, found, handle.block_ids().tolist())
        self._all[id(saving)] = saving
        self._num_rows += len(saving.rows)
        tracked.saving = saving
        return saving

    def grow(self, growing: Sequence[tuple[Saving, int]]) -> None:
        """Allocates rows up to the given number of blocks. A request that cannot have them stays as it is."""
        short = {id(saving): last for saving, last in growing if last > len(saving.rows)}
        if not short:
            return
        ahead = min(self._ahead, self._most // (2 * len(self._all)))
        wanted = {key: last + ahead for key, last in short.items()}
        for key, saving in self._all.items():  # requests that will soon need rows get them in the same call
            if key not in wanted and not saving.is_spoiled and len(saving.rows) < saving.num_ordered + ahead // 2:
                wanted[key] = saving.num_ordered + ahead
        try:
            self._extend(wanted)
        except OutOfBlocksError:
            self._grow_each(short)

    def _grow_each(self, short: dict[int, int]) -> None:
        """Allocates only what is needed now, one by one: a request that gets no rows must not stop the others."""
        self.make_room({*short})
        for key, last in short.items():
            try:
                self._extend({key: last})
            except OutOfBlocksError:
                continue

    def _extend(self, wanted: dict[int, int]) -> None:
        chosen = [(self._all[key], last) for key, last in wanted.items()]
        counts = [(last - len(saving.rows)) * self._block_size for saving, last in chosen]
        self._manager.extend_batch([saving.handle for saving, _ in chosen], counts)
        for saving, last in chosen:
            have = len(saving.rows)
            saving.rows += saving.handle.block_ids()[have:last].tolist()
            self._num_rows += last - have

    def rest(self, saving: Saving) -> None:
        """If no job uses the rows any more, keeps them for the request's next block, or frees them."""
        if saving.num_jobs:
            return
        if saving.owner.is_over or saving.is_spoiled or not self._keeps:
            self._free(saving)
            if saving.is_spoiled:
                saving.owner.num_seen = 0  # its pages are considered for storing again
        elif self._num_rows > self._most:
            self.make_room()

    def make_room(self, spared: frozenset[int] | set[int] = frozenset()) -> bool:
        """Frees all rows that no job uses; returns whether there were any."""
        idle = [saving for key, saving in self._all.items() if not saving.num_jobs and key not in spared]
        for saving in idle:
            self._free(saving)
        return bool(idle)

    def _free(self, saving: Saving) -> None:
        del self._all[id(saving)]
        self._num_rows -= len(saving.rows)
        self._manager.free(saving.handle)
        saving.owner.saving = None


def take_rows(
    manager: KVCacheManager,
    tracked: TrackedRequest,
    tokens: Int32Array,
    num_reserved: int,
    make_room: Callable[[], bool],
) -> KVCacheHandle:
    """Holds what the host has of a request's first tokens, and rows up to `num_reserved` tokens.

    While there are too few rows and `make_room` frees some, it tries again. Then it raises `OutOfBlocksError`.
    """
    while True:
        try:
            return manager.allocate(
                object(),
                tokens,
                scope=tracked.scope,
                reserve=num_reserved,
                lease=True,
                multimodal=tracked.items_within(len(tokens)),
                retention=tracked.options.retention(),
                ttl=tracked.options.ttl,
                hint=tracked.options.hint(),
            )
        except OutOfBlocksError:
            if not make_room():
                raise
