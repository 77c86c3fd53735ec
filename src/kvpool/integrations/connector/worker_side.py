"""WorkerSide: the half of a connector that runs in a worker of the engine. It carries out `Orders`: it moves the bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvpool.errors import TransferError
from kvpool.integrations.connector.orders import (
    NO_PAGE,
    Introduction,
    JobProgress,
    Load,
    Orders,
    Report,
    Spill,
    Store,
)
from kvpool.integrations.connector.pages import EnginePages, HostRows, Move
from kvpool.integrations.connector.reports import Increments
from kvpool.integrations.connector.saving import CHECKPOINTS
from kvpool.integrations.connector.settings import ConnectorSettings, open_worker_tiers
from kvpool.quiet import QuietLog
from kvpool.tiers import KeySpace, TierStats
from kvpool.tiers.transport.chain import TierChain
from kvpool.tiers.transport.staging import StagingMemory, page_aligned
from kvpool.tiers.transport.storing import Storer
from kvpool.tiers.transport.threads import Pending, ThreadPool

IDLE_WAIT = 0.01  # seconds that an empty step waits for a load, because the engine would run the next one at once
CLOSE_SECONDS = 10.0
_FETCH_THREADS = 2
_STAGING_BLOCKS = 64
_STAGING_BYTES = 256 * 2**20
_COUNT_SECONDS = 1.0

_log = logging.getLogger("kvpool")


class _TierLoad(NamedTuple):
    """A load whose rows come from tiers: `rows` will say how many of the first ones are there."""

    load: Load
    rows: Pending[int]


class WorkerSide:
    """Copies between pages and rows within a step, and between rows and tiers in the background."""

    def __init__(
        self,
        settings: ConnectorSettings,
        pages: EnginePages,
        introduction: Introduction,
        *,
        states: EnginePages | None = None,
        is_reader: bool = False,
    ) -> None:
        """`states` are the pages of layers that keep a state; `pages` are those of all others."""
        self._settings = settings
        self._pages = pages
        self._host = HostRows(introduction.num_rows, pages.row_bytes, pages.gpu)
        self._states = states
        if states is not None:
            self._state_host = HostRows(introduction.num_checkpoints, states.row_bytes, states.gpu)
        largest = max(pages.row_bytes * _STAGING_BLOCKS, 0 if states is None else states.row_bytes)
        self._space = KeySpace(introduction.fingerprint)
        self._tiers = TierChain(open_worker_tiers(settings, introduction, is_reader=is_reader))
        self._memory = StagingMemory(max(_STAGING_BYTES, largest), page_aligned)
        stores = self._tiers and not is_reader and not settings.read_only
        self._storer = Storer(self._tiers.watched, self._memory) if stores else None
        self._threads = ThreadPool("fetch", _FETCH_THREADS, 4096, self._tiers.watched)
        self._fetches: list[_TierLoad] = []
        self._storing: deque[tuple[Callable[[], bool], list[Store]]] = deque()  # each with a check whether it is done
        self._ended = threading.Event()  # set when a fetch ends
        self._report = Report()
        self._loaded: set[str] = set()
        self._failed_pages: set[int] = set()
        self._failed_requests: set[str] = set()
        self._quiet = QuietLog(_log)
        self._increments = Increments()
        self._next_counts = 0.0

    # --- a step ------------------------------------------------------------------------------------------------------

    def load(self, orders: Orders) -> None:
        """Does the loads of the step, and starts the loads for which requests outside of it wait."""
        landing = []
        for load in orders.loads:
            if load.is_async:
                self._begin(load)
            else:
                landing.append((load, load.num_present if load.rows else 0))
        self._land(landing)

    def store_layer(self, orders: Orders, name: str) -> None:
        """The step has written the pages of this layer; `store` follows when it has written all."""
        if orders.stores and self._pages.gpu is not None:  # on a CPU, all layers are copied at the end
            self._pages.read_layer(name, _moves(orders), self._host)

    def store(self, orders: Orders) -> None:
        """Copies what the step has written, and has confirmed rows stored in the tiers."""
        if orders.stores:
            over = [self._pages.read(_moves(orders), self._host)]
            if self._states is not None:
                over.append(self._states.read(_state_moves(orders.stores), self._state_host))
            self._storing.append((lambda: all(each() for each in over), orders.stores))
            self._confirm_stores()
        for spill in orders.spills:
            self._spill(spill)

    def _confirm_stores(self) -> None:
        """Confirms the stores whose bytes have arrived, in their order."""
        while self._storing and self._storing[0][0]():
            for store in self._storing.popleft()[1]:
                self._done(store.job, len(store.rows))

    def poll(self, *, is_idle: bool) -> None:
        """Ends loads whose rows have come, and stores that are over."""
        self._confirm_stores()
        self._ended.clear()
        if is_idle and self._fetches and not any(fetch.rows.has_ended for fetch in self._fetches):
            self._ended.wait(IDLE_WAIT)
        over: list[_TierLoad] = []
        in_flight: list[_TierLoad] = []
        for fetch in self._fetches:
            (over if fetch.rows.has_ended else in_flight).append(fetch)
        self._fetches = in_flight
        self._land([(fetch.load, fetch.rows.value or 0) for fetch in over if not fetch.rows.is_given_up])
        for fetch in over:
            if fetch.rows.is_given_up:
                self._done(fetch.load.job, 0)
            else:
                self._loaded.add(fetch.load.request_id)
        for fetch in self._fetches:
            if fetch.rows.is_overdue and not fetch.rows.is_given_up and fetch.rows.give_up():
                self._lose(fetch.load, 0)  # its rows stay held until the tier does not use them any more
                self._loaded.add(fetch.load.request_id)

    def _land(self, landing: Sequence[tuple[Load, int]]) -> None:
        """Copies so many rows of each load into their pages and ends the load; reports the other pages as failed."""
        if self._states is not None:  # whole or not at all
            landing = [(load, number if number == len(load.pages[0]) else 0) for load, number in landing]
        moves = [Move([of_group[:number] for of_group in load.pages], load.rows[:number]) for load, number in landing]
        try:
            self._pages.write(moves, self._host)
            if self._states is not None:
                self._states.write(_state_moves([load for load, number in landing if number]), self._state_host)
        except TransferError as error:
            _log.warning("kvpool connector: %s", error)
            landing = [(load, 0) for load, _ in landing]
        for load, num_loaded in landing:
            self._lose(load, num_loaded)
            self._done(load.job, num_loaded)

    def _lose(self, load: Load, num_loaded: int) -> None:
        """Reports that pages from `num_loaded` on hold nothing."""
        if lost := load.pages[0][num_loaded:]:
            if len(load.pages) == 1 and self._states is None:
                self._failed_pages.update(page for page in lost if page != NO_PAGE)
            elif load.is_async:
                self._failed_requests.add(load.request_id)
            else:
                raise TransferError(
                    f"{len(lost)} blocks of {load.request_id} could not be loaded in a step, and an engine with several "
                    "groups of layers cannot be told to compute them again: restart it"
                )
            self._warn(f"{len(lost)} of {len(load.pages[0])} blocks of {load.request_id} could not be loaded")

    def _done(self, job: int, num_blocks: int) -> None:
        self._report.jobs[job] = JobProgress(1, num_blocks)

    # --- what the engine asks for ------------------------------------------------------------------------------------

    def take_loaded(self) -> set[str]:
        """Requests outside of steps whose loads are over, with or without success."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed_pages(self) -> set[int]:
        """Pages that were promised and hold nothing."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """The same for layers in several groups: requests that miss something."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> Report | None:
        """Jobs that ended; None if none did."""
        report, self._report = self._report, Report()
        return report if report.jobs else None

    def tier_stats(self) -> list[TierStats]:
        """Counters of the tiers."""
        return self._tiers.stats()

    def take_counts(self) -> dict[str, int]:
        """What failed in tiers since the last call, looked at once a second."""
        if not self._tiers or (now := time.monotonic()) < self._next_counts:
            return {}
        self._next_counts = now + _COUNT_SECONDS
        each = self.tier_stats()
        loads = sum(stats.load_failures + stats.late_loads for stats in each)
        stores = sum(stats.store_failures + stats.late_stores for stats in each)
        return self._increments.since({"tier_load_failures": loads, "tier_store_failures": stores})

    # --- tiers -------------------------------------------------------------------------------------------------------

    def _spill(self, spill: Spill) -> None:
        """Copies the rows at once, so that the host can reuse them. If too much waits for a tier, it gets nothing."""
        assert self._storer is not None
        self._done(spill.job, len(spill.rows))
        self._spill_rows(self._space.keys(spill.digests), spill.rows, self._host)
        if self._states is not None:
            keys = self._space.keys(spill.checkpoint_digests, CHECKPOINTS)
            self._spill_rows(keys, spill.checkpoint_rows, self._state_host)

    def _spill_rows(self, keys: Sequence[bytes], rows: Sequence[int], host: HostRows) -> None:
        assert self._storer is not None
        lacking = [index for index, key in enumerate(keys) if self._storer.wants(key)]
        row_bytes = host.array.shape[1]
        at_once = min(_STAGING_BLOCKS, self._memory.max_bytes // row_bytes)
        for begin in range(0, len(lacking), at_once):
            chosen = lacking[begin : begin + at_once]
            stage = self._storer.take_memory(len(chosen) * row_bytes, len(chosen))
            if stage is None:
                continue
            host.gather([rows[index] for index in chosen], stage.data)
            staged = list(stage.data.reshape(len(chosen), -1))
            self._storer.store([keys[index] for index in chosen], staged, stage, lambda: None)

    def _begin(self, load: Load) -> None:
        fetch = _TierLoad(load, Pending(time.monotonic() + self._settings.timeout, on_end=self._ended.set))
        self._fetches.append(fetch)
        begin, drop = partial(self._fetch, fetch), partial(self._end, fetch)
        if self._threads.is_stuck or not load.digests or not self._threads.submit(begin, drop):
            drop()

    def _fetch(self, fetch: _TierLoad) -> None:
        """Fills each row from the first tier that has it. Runs in a thread of the pool."""
        load, came = fetch.load, 0
        try:
            keys = self._space.keys(load.digests)
            self._pages.settle()  # the rows may still be copied to pages of an earlier owner
            rows = [self._host.array[row] for row in load.rows[load.num_present :]]
            if load.checkpoint is not None:
                assert self._states is not None
                self._states.settle()
                keys = keys + self._space.keys(load.digests[-1:], CHECKPOINTS)
                rows.append(self._state_host.array[load.checkpoint.row])
            came = self._tiers.load_prefix(keys, rows, fetch.rows.due)
            if load.checkpoint is not None:
                came = len(load.digests) if came == len(keys) else 0
        finally:
            self._end(fetch, came)

    def _end(self, fetch: _TierLoad, came: int = 0) -> None:
        fetch.rows.end(fetch.load.num_present + came if fetch.load.rows else 0)

    def _warn(self, what: str) -> None:
        self._quiet.warning("kvpool connector: %s; the engine computes them again", what)

    def close(self) -> None:
        """Stores what waits, within some seconds, and closes the tiers."""
        self._threads.stop(1.0)
        if self._storer is not None:
            self._storer.close(CLOSE_SECONDS)
        self._tiers.close()
        self._pages.close()
        self._host.close()
        if self._states is not None:
            self._states.close()
            self._state_host.close()


def _moves(orders: Orders) -> list[Move]:
    return [Move(store.pages, store.rows) for store in orders.stores]


def _state_moves(orders: Sequence[Load | Store]) -> list[Move]:
    checkpoints = [order.checkpoint for order in orders if order.checkpoint is not None]
    return [Move([[page] for page in each.pages], [each.row]) for each in checkpoints]
