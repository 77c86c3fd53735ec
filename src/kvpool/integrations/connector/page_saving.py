"""Stores: which pages go to the host, what becomes visible when the workers confirm it, what then goes on to the tiers.

    ordered    the step that writes the pages carries the copy; the rows are held, nobody can find them
    confirmed  by all workers: published, and ordered to the tiers below, if there are any
    done       the tiers' side has its own copy of the bytes: the rows are let go, and stay cached
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import OutOfBlocksError
from kvpool.integrations.connector.step_orders import Orders, Spill, Store
from kvpool.integrations.connector.tracked_request import Saving, TrackedRequest
from kvpool.manager import KVCacheManager


@dataclass
class SaveStats:
    """Blocks since the connector was made."""

    stored: int = 0
    no_room: int = 0  # not stored because everything on the host was in use
    spoiled: int = 0  # stored and not published: a load before them had failed, or a worker could not


@dataclass
class _StoreJob:
    saving: Saving
    first: int
    last: int


class Saver:
    """Everything that goes from the engine's pages into the host's rows."""

    def __init__(self, manager: KVCacheManager, block_size: int, has_tiers: bool) -> None:
        self.stats = SaveStats()
        self._manager = manager
        self._block_size = block_size
        self._has_tiers = has_tiers
        self._stores: dict[int, _StoreJob] = {}
        self._spills: dict[int, Saving] = {}
        self._waiting: list[Spill] = []

    @property
    def has_waiting(self) -> bool:
        """Whether something is on its way that a further step must carry or confirm."""
        return bool(self._waiting or self._spills)

    def save(self, tracked: TrackedRequest, num_tokens: int, job: int, orders: Orders) -> None:
        """Orders the copies of whole blocks below `num_tokens` that the host lacks; the step that is planned writes them."""
        tokens = tracked.tokens()
        last = min(num_tokens, len(tokens)) // self._block_size
        if last <= tracked.num_seen or last > len(tracked.pages):
            return
        saving = tracked.saving
        if saving is None:
            saving = self._begin(tracked, last)
        elif last <= saving.num_ordered:  # it was preempted and computes again what is on its way
            tracked.num_seen = last
            return
        elif saving.is_spoiled or not self._grow(saving, last):
            return  # looked at again in the next step
        tracked.num_seen = last
        if saving is None:
            return
        first, saving.num_ordered = saving.num_ordered, last
        rows = saving.handle.block_ids()[first:last].tolist()
        saving.num_jobs += 1
        self._stores[job] = _StoreJob(saving, first, last)
        orders.stores.append(Store(job, tracked.pages[first:last], rows))

    def _begin(self, tracked: TrackedRequest, last: int) -> Saving | None:
        """Takes rows for what the host lacks; None if it lacks nothing, or has no room."""
        tokens, places = tracked.tokens(), last * self._block_size
        try:
            handle = self._manager.allocate(
                object(), tokens, scope=tracked.scope, reserve=places, lease=True, multimodal=tracked.items or None
            )
        except OutOfBlocksError:
            self.stats.no_room += last - tracked.num_seen
            return None
        if handle.num_cached_blocks >= last:
            self._manager.free(handle)
            return None
        tracked.saving = Saving(tracked, handle, handle.num_cached_blocks)
        return tracked.saving

    def _grow(self, saving: Saving, last: int) -> bool:
        """Takes rows for further blocks of the prompt; False if that must wait for what is on its way."""
        handle, places = saving.handle, last * self._block_size
        if places > handle.num_prompt_tokens:  # ids that it does not know: a new lease will
            return False
        try:
            self._manager.extend(handle, places - handle.num_reserved)
        except OutOfBlocksError:
            return False
        return True

    def confirm(self, job: int, num_blocks: int) -> bool:
        """All workers are done with a job; whether it was one of ours."""
        if job in self._spills:
            self._let_go(self._spills.pop(job))
            return True
        done = self._stores.pop(job, None)
        if done is None:
            return False
        saving = done.saving
        if num_blocks < done.last - done.first:
            saving.is_spoiled = True
        if saving.is_spoiled:
            self.stats.spoiled += done.last - done.first
        else:
            handle = saving.handle
            self._manager.commit(handle, done.last * self._block_size - handle.num_committed)
            self.stats.stored += done.last - done.first
            if self._has_tiers:
                self._spill(done, job)
                return True
        self._let_go(saving)
        return True

    def _spill(self, done: _StoreJob, job: int) -> None:
        """The rows as they are now: publishing may have put a block that was there already in place of ours."""
        rows = done.saving.handle.block_ids()[done.first : done.last].tolist()
        owner = done.saving.owner
        self._waiting.append(Spill(job, rows, owner.digests(done.last)[done.first :]))
        self._spills[job] = done.saving
        if owner.saving is done.saving and done.saving.num_jobs == 1:
            owner.saving = None  # what comes next begins anew, and finds this

    def _let_go(self, saving: Saving) -> None:
        saving.num_jobs -= 1
        if saving.num_jobs:
            return
        self._manager.free(saving.handle)
        owner = saving.owner
        if owner.saving is saving:
            owner.saving = None
            if saving.is_spoiled:
                owner.num_seen = 0  # the pages are looked at again, and were computed again where they were wrong

    def order_spills(self, orders: Orders) -> None:
        """Hands what was confirmed over to the tiers' side."""
        orders.spills, self._waiting = self._waiting, []

    def spoil(self) -> None:
        """What is on its way may be computed from pages that were not loaded, or is out of date: it is not published."""
        for job in self._stores.values():
            job.saving.is_spoiled = True
