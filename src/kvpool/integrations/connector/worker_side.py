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
_FETCH_THREADS = 4
_PART_BYTES = 64 * 2**20  # of a load that a thread fetches at a time, if there are others
_STAGING_BLOCKS = 64
_STAGING_BYTES = 256 * 2**20
_COUNT_SECONDS = 1.0
_LOOK_AGAIN = 0.0002

_log = logging.getLogger("kvpool")


class _TierLoad:
    """A load whose rows come from tiers in parts, at the same time: `rows` will say how many of the first ones are there."""

    def __init__(self, load: Load, part_blocks: int, due: float, on_end: Callable[[], None]) -> None:
        self.load = load
        self.rows = Pending[int](due, on_end=on_end)
        total = len(load.digests)
        # A checkpoint is of use behind all blocks only, so its load is not divided.
        size = total if load.checkpoint is not None else part_blocks
        self.parts = [(at, min(at + size, total)) for at in range(0, total, max(1, size))]
        self._came: list[int | None] = [None] * len(self.parts)
        self._lock = threading.Lock()

    def end(self, part: int, came: int) -> None:
        """So many of the first blocks of a part have come. With the last part, all is over."""
        with self._lock:
            self._came[part] = came
            if None in self._came:
                return
        num_there = 0
        for (first, last), number in zip(self.parts, self._came, strict=True):
            num_there += number or 0
            if number != last - first:
                break
        self.end_all(num_there)

    def end_all(self, num_there: int = 0) -> None:
        """So many of the blocks from tiers have come."""
        self.rows.end(self.load.num_present + num_there if self.load.rows else 0)


class _Copied(NamedTuple):
    """Copies between pages and rows that were begun: `is_over` says whether the bytes are there."""

    is_over: Callable[[], bool]
    loads: list[tuple[Load, int]]  # with the blocks that each of them brings
    stores: list[Store]


class WorkerSide:
    """Copies between pages and rows beside the steps, and between rows and tiers in the background."""

    def __init__(
        self,
        settings: ConnectorSettings,
        pages: EnginePages,
        introduction: Introduction,
        *,
        states: EnginePages | None = None,
        is_reader: bool = False,
        stores_at_once: bool = False,
    ) -> None:
        """`states` are the pages of layers that keep a state; `pages` are those of all others.

        `stores_at_once`: the engine may write a page again before it begins the next step, as it does with states, so
        everything behind a step waits for its stores.
        """
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
        self._part_blocks = max(1, _PART_BYTES // pages.row_bytes)
        self._spilling = ThreadPool("spill", max_waiting=4096)
        self._num_spilling = 0
        self._spilled: deque[Spill] = deque()  # whose rows were copied
        self._due: list[Store] = []  # of the step before, which has written their pages
        self._loading: deque[_Copied] = deque()
        self._storing: deque[_Copied] = deque()
        self._ended = threading.Event()  # set when a fetch ends
        self._report = Report()
        self._loaded: set[str] = set()
        self._failed_pages: set[int] = set()
        self._failed_requests: set[str] = set()
        self._quiet = QuietLog(_log)
        self._increments = Increments()
        self._stores_at_once = stores_at_once or states is not None or not pages.copies_later
        self._next_counts = 0.0

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, orders: Orders) -> None:
        """Before the step computes: stores of pages that are written begin now, behind the work that the GPU has."""
        self._due += [store for store in orders.stores if store.is_written]
        self._store_due()
        if orders.fence:
            self._fence()
        if orders.settles:
            for pages in self._each_pages():
                pages.settle()
        if orders.loads:
            for pages in self._each_pages():
                pages.begin_step(fences_loads=orders.fences_loads)

    def load(self, orders: Orders) -> None:
        """Starts loads, for which requests wait outside of steps."""
        here = []
        for load in orders.loads:
            if load.rows and load.num_present == len(load.rows):
                here.append((load, load.num_present))
            else:
                self._begin(load)
        self._land(here)

    def store(self, orders: Orders) -> None:
        """Takes the stores of what the step writes, and has confirmed rows stored in the tiers."""
        self._due += [store for store in orders.stores if not store.is_written]
        if self._stores_at_once or orders.is_idle:
            self._store_due()
            self._fence()
            self._end_copies()
        for spill in orders.spills:
            self._spill(spill)

    def _store_due(self) -> None:
        stores, self._due = self._due, []
        if not stores:
            return
        try:
            over = [self._pages.read(_moves(stores), self._host)]
            if self._states is not None:
                over.append(self._states.read(_state_moves(stores), self._state_host))
        except TransferError as error:
            _log.warning("kvpool connector: %s", error)
            for store in stores:
                self._done(store.job, 0)
            return
        self._storing.append(_Copied(lambda: all(each() for each in over), [], stores))

    def _fence(self) -> None:
        for pages in self._each_pages():
            pages.fence()

    def _each_pages(self) -> list[EnginePages]:
        return [self._pages] if self._states is None else [self._pages, self._states]

    def _end_copies(self) -> None:
        """Ends loads and stores whose bytes have arrived, in their order."""
        while self._storing and self._storing[0].is_over():
            for store in self._storing.popleft().stores:
                self._done(store.job, len(store.rows))
        while self._loading and self._loading[0].is_over():
            for load, num_loaded in self._loading.popleft().loads:
                self._end_load(load, num_loaded)

    def _end_load(self, load: Load, num_loaded: int) -> None:
        """So many blocks of a load are in their pages. The request goes on, and computes the others."""
        self._lose(load, num_loaded)
        self._done(load.job, num_loaded)
        self._loaded.add(load.request_id)

    def poll(self, *, is_idle: bool) -> None:
        """Ends loads whose rows have come, and stores that are over."""
        self._ended.clear()
        self._end_copies()
        if is_idle and not self._loaded and not any(fetch.rows.has_ended for fetch in self._fetches):
            self._wait()
        while self._spilled:
            self._num_spilling -= 1
            spill = self._spilled.popleft()
            self._done(spill.job, len(spill.rows))
        over: list[_TierLoad] = []
        in_flight: list[_TierLoad] = []
        for fetch in self._fetches:
            (over if fetch.rows.has_ended else in_flight).append(fetch)
        self._fetches = in_flight
        self._land([(fetch.load, fetch.rows.value or 0) for fetch in over if not fetch.rows.is_given_up])
        for fetch in over:
            if fetch.rows.is_given_up:
                self._done(fetch.load.job, 0)
        for fetch in self._fetches:
            if fetch.rows.is_overdue and not fetch.rows.is_given_up and fetch.rows.give_up():
                self._lose(fetch.load, 0)  # its rows stay held until the tier does not use them any more
                self._loaded.add(fetch.load.request_id)

    def _wait(self) -> None:
        """Waits for the first copy or the first tier, for a short while: the step computes nothing."""
        if self._loading:
            due = time.monotonic() + IDLE_WAIT
            while not self._loading[0].is_over() and time.monotonic() < due:
                time.sleep(_LOOK_AGAIN)
            self._end_copies()
        elif self._fetches or (self._num_spilling and not self._spilled):
            self._ended.wait(IDLE_WAIT)

    def _land(self, landing: Sequence[tuple[Load, int]]) -> None:
        """Begins to copy so many rows of each load into their pages; reports the other pages as failed when that is over."""
        if not landing:
            return
        if self._states is not None:  # whole or not at all
            landing = [(load, number if number == len(load.pages[0]) else 0) for load, number in landing]
        moves = [move for load, number in landing for move in _load_moves(load, number)]
        try:
            over = [self._pages.write(moves, self._host)]
            if self._states is not None:
                checkpoints = _state_moves([load for load, number in landing if number])
                over.append(self._states.write(checkpoints, self._state_host))
        except TransferError as error:
            _log.warning("kvpool connector: %s", error)
            over, landing = [], [(load, 0) for load, _ in landing]
        self._loading.append(_Copied(lambda: all(each() for each in over), list(landing), []))
        self._end_copies()

    def _lose(self, load: Load, num_loaded: int) -> None:
        """Reports that pages from `num_loaded` on hold nothing."""
        if lost := load.pages[0][num_loaded:]:
            if len(load.pages) == 1 and self._states is None:
                self._failed_pages.update(page for page in lost if page != NO_PAGE)
            else:
                self._failed_requests.add(load.request_id)
            self._warn(f"{len(lost)} of {len(load.pages[0])} blocks of {load.request_id} could not be loaded")

    def _done(self, job: int, num_blocks: int) -> None:
        self._report.jobs[job] = JobProgress(1, num_blocks)

    # --- what the engine asks for ------------------------------------------------------------------------------------

    def take_loaded(self) -> set[str]:
        """Requests whose loads are over, with or without success."""
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
        """Has the rows copied in the background; then the host can reuse them. If too much waits, tiers get nothing."""
        self._num_spilling += 1
        over = partial(self._end_spill, spill)
        if not self._spilling.submit(partial(self._copy_spill, spill), over):
            over()

    def _end_spill(self, spill: Spill) -> None:
        self._spilled.append(spill)
        self._ended.set()

    def _copy_spill(self, spill: Spill) -> None:
        """Runs in a thread, because a step must not wait for it."""
        try:
            self._spill_rows(self._space.keys(spill.digests), spill.rows, self._host)
            if self._states is not None:
                keys = self._space.keys(spill.checkpoint_digests, CHECKPOINTS)
                self._spill_rows(keys, spill.checkpoint_rows, self._state_host)
        finally:
            self._end_spill(spill)

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
        due = time.monotonic() + self._settings.timeout
        fetch = _TierLoad(load, self._part_blocks, due, self._ended.set)
        self._fetches.append(fetch)
        if not fetch.parts:
            fetch.end_all()
        for number in range(len(fetch.parts)):
            begin, drop = partial(self._fetch, fetch, number), partial(fetch.end, number, 0)
            if self._threads.is_stuck or not self._threads.submit(begin, drop):
                drop()

    def _fetch(self, fetch: _TierLoad, part: int) -> None:
        """Fills each row of a part from the first tier that has it. Runs in a thread of the pool."""
        load, came = fetch.load, 0
        first, last = fetch.parts[part]
        try:
            keys = self._space.keys(load.digests[first:last])
            rows = [self._host.array[row] for row in load.rows[load.num_present :][first:last]]
            if load.checkpoint is not None:
                assert self._states is not None
                keys = keys + self._space.keys(load.digests[-1:], CHECKPOINTS)
                rows.append(self._state_host.array[load.checkpoint.row])
            came = self._tiers.load_prefix(keys, rows, fetch.rows.due)
            if load.checkpoint is not None:
                came = len(load.digests) if came == len(keys) else 0
        finally:
            fetch.end(part, came)

    def _warn(self, what: str) -> None:
        self._quiet.warning("kvpool connector: %s; the engine computes them again", what)

    def close(self) -> None:
        """Stores what waits, within some seconds, and closes the tiers."""
        self._threads.stop(1.0)
        self._spilling.flush(CLOSE_SECONDS)
        self._spilling.stop(1.0)
        if self._storer is not None:
            self._storer.close(CLOSE_SECONDS)
        self._tiers.close()
        self._pages.close()
        self._host.close()
        if self._states is not None:
            self._states.close()
            self._state_host.close()


def _load_moves(load: Load, number: int) -> list[Move]:
    """The first so many rows of a load into its pages, in turns with what it displaces."""
    moves, done = list[Move](), 0
    for before, pages, rows in load.displaced:
        moves += [_part_of(load, done, before), Move([pages], rows, is_back=True)]
        done = before
    return [*moves, _part_of(load, done, number)]


def _part_of(load: Load, first: int, last: int) -> Move:
    return Move([of_group[first:last] for of_group in load.pages], load.rows[first:last])


def _moves(stores: Sequence[Store]) -> list[Move]:
    return [Move(store.pages, store.rows) for store in stores]


def _state_moves(orders: Sequence[Load | Store]) -> list[Move]:
    checkpoints = [order.checkpoint for order in orders if order.checkpoint is not None]
    return [Move([[page] for page in each.pages], [each.row]) for each in checkpoints]
