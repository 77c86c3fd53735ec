"""Write-back: the host takes blocks when the engine's own cache gives them up next, as a victim cache does.

So the host holds what the engine has lost, instead of a copy of what it has. Every block stands alone here, under the
engine's name of it, which covers all tokens before it: the host needs no beginning of a prompt that the engine still has.

The block that was lost first goes first. A block that was loaded goes before all others, because the engine has it again.
When the engine is about to lose it again and the host still has it, nothing is copied.

Blocks are stored before the engine takes their pages: those of a step beforehand, and those of a load when it is looked up.
If fewer pages are free than a step takes, those of running requests will not stay for long either: their blocks are stored as
they fill, so that no step waits for copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool.errors import InvariantError
from kvpool.integrations.connector.loading import LoadStats
from kvpool.integrations.connector.orders import NO_PAGE, Load, Orders, Store
from kvpool.integrations.connector.reports import BlockEvent
from kvpool.integrations.connector.requests import TrackedRequest
from kvpool.integrations.connector.saving import PagesInUse, SaveStats


class EngineCache(Protocol):
    """What an engine shows of its own cache. The engine's name of a block is that in `block_hashes` of requests."""

    @property
    def num_pages(self) -> int:
        """All pages; their numbers are below this."""

    def next_to_go(self, number: int) -> Iterable[int]:
        """So many pages that no request uses, in the order in which the engine takes them for others."""

    def name_of(self, page: int) -> Any | None:
        """The engine's name of the block that a page holds; None if nobody can find it there."""


@dataclass
class _Copies:
    names: list[Any]
    rows: list[int]
    page_ids: list[int]
    tracked: TrackedRequest | None = None  # who waits for a load
    is_stale: bool = False  # a reset came while they were in flight


class WriteBack:
    """Knows which blocks the host's rows hold, and copies blocks that leave the engine's cache into rows."""

    def __init__(self, cache: EngineCache, num_rows: int, step_pages: int, new_job: Callable[[], int]) -> None:
        """The tokens of a step fill `step_pages` pages at most."""
        self.saved, self.loaded = SaveStats(), LoadStats()
        self._cache = cache
        self._new_job = new_job
        self._step_pages = max(1, step_pages)
        self._num_rows = num_rows
        self._most = max(1, num_rows // 2)  # pages that are looked at at once
        self._num_seen = 0  # of the next pages to go, so many were looked at
        # Requests of the planned step, and how many of their tokens are computed then.
        self._filling: list[tuple[TrackedRequest, int]] = []
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[Any, int] = {}  # by the names of blocks that can be found
        self._order: OrderedDict[Any, None] = OrderedDict()  # those that no load uses; the first goes first
        self._loads_of: dict[Any, int] = {}  # by name, of those that loads use
        self._storing: set[Any] = set()
        self._turned_away: set[Any] = set()  # blocks that found no room since a block found some
        self._read = PagesInUse()
        self._jobs: dict[int, _Copies] = {}
        self._tags: dict[int, str | None] = {}  # files of adapters, which names leave out; None: not stored

    # --- pages -------------------------------------------------------------------------------------------------------

    def taken(self, tracked: TrackedRequest | None, pages: Sequence[Sequence[int]], num_found: int = 0) -> None:
        """The engine has given these pages to a request. It fills all but the first `num_found`, which hold what it needs."""
        self._num_seen = max(0, self._num_seen - len(pages[0]))
        self._fill(pages[0][num_found:], _tag_of(tracked))

    def _fill(self, pages: Sequence[int], tag: str | None) -> None:
        if tag != "":
            self._tags.update(dict.fromkeys(pages, tag))
        elif self._tags:
            for page in pages:
                self._tags.pop(page, None)

    def reads_any(self, pages: Iterable[Sequence[int]]) -> bool:
        """Whether a store in flight reads one of these pages."""
        return self._read.any_of(pages)

    def fills(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The planned step computes a request up to `num_tokens`."""
        self._filling.append((tracked, num_tokens))

    # --- loads -------------------------------------------------------------------------------------------------------

    def look_up(self, tracked: TrackedRequest, num_computed: int, orders: Orders) -> int:
        """How many tokens after the engine's own can be loaded. Orders stores of what leaves when the engine takes pages."""
        first = tracked.num_local = num_computed // tracked.block_size
        last = (tracked.num_ids - 1) // tracked.block_size  # one token must be computed
        if tracked.has_lost:
            return 0
        names = self._names(tracked, first, last)
        found = self._num_here(names)
        for name in names[:found]:  # they must not make room for others now
            if name in self._order:
                self._order.move_to_end(name)
        stays = tracked.request.block_hashes[:first]  # the engine does not take these
        self._store_next(found + self._step_pages, orders, stays)
        return self._num_here(names[:found]) * tracked.block_size

    def _names(self, tracked: TrackedRequest, first: int, last: int) -> list[Any]:
        return [_key(name, tracked.scope.adapter) for name in tracked.request.block_hashes[first:last]]

    def _num_here(self, names: Sequence[Any]) -> int:
        return next((number for number, name in enumerate(names) if name not in self._rows), len(names))

    def order_load(
        self,
        tracked: TrackedRequest,
        pages: Sequence[list[int]],
        num_tokens: int,
        orders: Orders,
        state_pages: Sequence[list[int]] = (),
    ) -> None:
        """The engine has given a request these pages, for what it had and what was looked up."""
        first = tracked.num_local
        last = first + num_tokens // tracked.block_size
        self.taken(tracked, pages, last)
        self._fill(pages[0][first:last], tracked.scope.adapter)
        names = self._names(tracked, first, last)
        names = names[: self._num_here(names)]  # the engine computes what has gone meanwhile
        rows = [self._rows[name] for name in names]
        for name in names:
            self._order.pop(name, None)
            self._loads_of[name] = self._loads_of.get(name, 0) + 1
        job = self._new_job()
        self._jobs[job] = _Copies(names, rows, [], tracked)
        tracked.hits = len(rows), 0, 0
        orders.loads.append(Load(job, tracked.request.request_id, rows, [pages[0][first:last]], len(rows)))

    # --- stores ------------------------------------------------------------------------------------------------------

    def order(self, num_requests: int, orders: Orders) -> None:
        """Orders stores of what the next step may take, of so many requests: each of them may begin a page."""
        number = self._step_pages + num_requests
        self._store_next(number, orders)
        if self._num_seen < min(number, self._most):
            self._store_running(orders)
        self._filling.clear()

    def _store_running(self, orders: Orders) -> None:
        copies = _Copies([], [], [])
        for tracked, num_tokens in self._filling:
            names, first = tracked.request.block_hashes, tracked.num_seen
            last = min(num_tokens // tracked.block_size, len(names), len(tracked.pages[0]))
            for name, page in zip(names[first:last], tracked.pages[0][first:last], strict=True):
                if (tag := self._tags.get(page, "")) is not None:
                    self._add(copies, _key(name, tag), page)
            tracked.num_seen = max(first, last)
        self._store(copies, orders, is_written=False)

    def _store_next(self, number: int, orders: Orders, stays: Sequence[Any] = ()) -> None:
        """Orders stores of the next so many pages to go, besides those with blocks that stay.

        It looks at some more, so that steps which take a few pages need not look at all of them again.
        """
        if self._num_seen >= min(number, self._most):
            return
        number = min(number + self._step_pages // 4, self._most)
        copies, staying = _Copies([], [], []), set(stays)
        self._num_seen = num_seen = num_staying = 0
        for page in self._cache.next_to_go(number + len(stays)):
            name, tag = self._cache.name_of(page), self._tags.get(page, "")
            if name in staying:
                num_staying += 1
                continue
            if num_seen == number:
                break
            num_seen += 1
            self._num_seen += not num_staying  # if the request cannot begin, the engine takes what should have stayed
            if name is None or tag is None:
                continue
            key = _key(name, tag)
            if key in self._order:
                self._order.move_to_end(key)
            else:
                self._add(copies, key, page)
        self._store(copies, orders, is_written=True)

    def _add(self, copies: _Copies, key: Any, page: int) -> None:
        """Adds a page that has not left its window, if the host lacks its block and has room."""
        if page == NO_PAGE or key in self._rows or key in self._storing:
            return
        if (row := self._take_row()) is None:
            self.saved.no_room += key not in self._turned_away
            self._turned_away.add(key)
            return
        self._turned_away.clear()
        self._storing.add(key)
        copies.names.append(key)
        copies.rows.append(row)
        copies.page_ids.append(page)

    def _store(self, copies: _Copies, orders: Orders, *, is_written: bool) -> None:
        if not copies.rows:
            return
        job = self._new_job()
        self._jobs[job] = copies
        self._read.begin(job, [copies.page_ids])
        orders.stores.append(Store(job, [copies.page_ids], copies.rows, is_written=is_written))

    def _take_row(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._order:
            return None
        name, _ = self._order.popitem(last=False)
        return self._rows.pop(name)

    # --- what the workers did ----------------------------------------------------------------------------------------

    def confirm(self, job: int, num_blocks: int) -> None:
        """All workers are done with a job; each of them moved `num_blocks` blocks or more."""
        copies = self._jobs.pop(job)
        if copies.tracked is None:
            self._stored(job, copies, num_blocks)
        else:
            self._loaded(copies, copies.tracked, num_blocks)

    def _stored(self, job: int, copies: _Copies, num_blocks: int) -> None:
        self._read.end(job, [copies.page_ids])
        if copies.is_stale or num_blocks < len(copies.rows):
            self.saved.spoiled += len(copies.rows)
            self._free += copies.rows
            if not copies.is_stale:
                self._storing.difference_update(copies.names)
            return
        self.saved.stored += len(copies.rows)
        self._storing.difference_update(copies.names)
        for name, row in zip(copies.names, copies.rows, strict=True):
            self._rows[name] = row
            self._order[name] = None

    def _loaded(self, copies: _Copies, tracked: TrackedRequest, num_blocks: int) -> None:
        came = min(num_blocks, len(copies.rows))
        self.loaded.hits += came > 0
        self.loaded.from_host += came
        self.loaded.failed += len(copies.rows) - came
        tracked.has_lost |= came < len(copies.rows)
        if copies.is_stale:
            self._free += self._released(copies)
            return
        for name in copies.names:  # the last of a prompt stands first: without it the others are of use
            self._loads_of[name] -= 1
            if not self._loads_of[name]:
                del self._loads_of[name]
                self._order[name] = None
                self._order.move_to_end(name, last=False)

    def _released(self, copies: _Copies) -> list[int]:
        """Rows of a load from before a reset that no other such load uses."""
        others = {
            row for each in self._jobs.values() if each.is_stale and each.tracked is not None for row in each.rows
        }
        return [row for row in copies.rows if row not in others]

    def forget(self) -> None:
        """Nothing that is on the host, on its way there, or in the engine's pages now, is found again."""
        for copies in self._jobs.values():
            copies.is_stale = True
        self._free += [self._rows[name] for name in self._order]
        self._rows.clear()
        self._order.clear()
        self._loads_of.clear()
        self._storing.clear()
        self._fill(range(self._cache.num_pages), None)

    def finish(self, tracked: TrackedRequest) -> None:
        """Nothing to do: no row is held for a request."""

    def take_events(self) -> Sequence[BlockEvent]:
        """Nothing: an engine that announces blocks stores them when they are computed."""
        return ()

    def check(self) -> None:
        """Raises `InvariantError` if a row is lost or used twice, or a block is both in use and about to go."""
        rows, loading = [*self._free, *self._rows.values()], set[int]()
        for copies in self._jobs.values():
            if copies.tracked is None:
                rows += copies.rows
            elif copies.is_stale:
                loading.update(copies.rows)
        if sorted([*rows, *loading]) != list(range(self._num_rows)):
            raise InvariantError(
                f"of {self._num_rows} rows, {len(rows)} are free or hold a block, {len(loading)} are loaded"
            )
        if self._rows.keys() != self._order.keys() ^ self._loads_of.keys():
            raise InvariantError("a block of the host is neither in use nor about to go, or both")

    def close(self) -> None:
        """Nothing to do: there are no tiers below."""

    @property
    def has_waiting(self) -> bool:
        """Whether a step must confirm stores in flight."""
        return any(copies.tracked is None for copies in self._jobs.values())


def _tag_of(tracked: TrackedRequest | None) -> str | None:
    """What the engine's names leave out: the files of an adapter. None: nothing of the request is stored."""
    if tracked is None:
        return ""
    options = tracked.options
    if not tracked.is_known or options.no_store or options.ttl is not None:
        return None
    return tracked.scope.adapter


def _key(name: Any, tag: str) -> Any:
    return (name, tag) if tag else name
