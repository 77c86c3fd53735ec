"""Write-back: the host takes blocks when the engine's own cache gives them up next, as a victim cache does.

So the host holds what the engine has lost, instead of a copy of what it has. Every block stands alone here, under the
engine's name of it, which covers all tokens before it: the host needs no beginning of a prompt that the engine still has.

The block that was lost first goes first. A block that was loaded goes before all others, because the engine has it again.
When the engine is about to lose it again and the host still has it, nothing is copied.

Blocks are stored before the engine takes their pages: those of a step beforehand, and those of a load by the load itself. It
stores and loads in turns, so that what comes to the host takes the rows of what has just left it. If fewer pages are free
than a step takes, those of running requests will not stay for long either: their blocks are stored as they fill, so that no
step waits for copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpool.errors import InvariantError
from kvpool.integrations.connector.loading import LoadStats
from kvpool.integrations.connector.orders import NO_PAGE, Displaced, Load, Orders, Store
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


_MOST_AT_ONCE = 128  # pages that a load stores before it fills them
_TURNS = 16  # and at most one in so many rows of the host


@dataclass
class _Copies:
    names: list[Any]
    rows: list[int]
    page_ids: list[int]
    is_stale: bool = False  # a reset came while they were in flight


@dataclass
class _Loading:
    """A load from rows, and the rows of what it displaces. Blocks whose rows are among these are in `gone`."""

    tracked: TrackedRequest  # who waits for it
    names: list[Any]  # without those in `gone`
    rows: list[int]
    gone: set[Any] = field(default_factory=set)
    displaced: dict[Any, int] = field(default_factory=dict)
    is_stale: bool = False

    @property
    def all_rows(self) -> set[int]:
        """Rows that it reads or writes."""
        return {*self.rows, *self.displaced.values()}


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
        self._at_once = max(1, min(_MOST_AT_ONCE, num_rows // _TURNS))
        self._jobs: dict[int, _Copies] = {}
        self._loading: dict[int, _Loading] = {}
        self._going: set[Any] = set()  # names whose rows a load in flight gives to others
        # The request that was looked up last, and what the pages hold that it would get.
        self._leaving: tuple[TrackedRequest | None, dict[int, Any]] = (None, {})
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

    def look_up(self, tracked: TrackedRequest, num_computed: int) -> int | None:
        """How many tokens after the engine's own can be loaded. None: ask again, when the engine has what it loads now."""
        first = tracked.num_local = num_computed // tracked.block_size
        last = (tracked.num_ids - 1) // tracked.block_size  # one token must be computed
        if tracked.has_lost:
            return 0
        names = self._names(tracked, first, last)
        found = self._num_here(names)
        if found < len(names) and names[found] in self._going:
            return None
        if not tracked.was_looked_up:
            self.loaded.missed_absent += len(names) - found
        for name in names[:found]:  # they must not make room for others now
            if name in self._order:
                self._order.move_to_end(name)
        if found:
            stays = tracked.request.block_hashes[:first]  # the engine does not take these
            self._leaving = tracked, dict(self._next_to_go(found, stays))
        return found * tracked.block_size

    def _next_to_go(self, number: int, stays: Sequence[Any] = ()) -> Iterator[tuple[int, Any]]:
        """The next so many pages to go, besides those with blocks that stay, and what the host would call their blocks."""
        staying = set(stays)
        for page in self._cache.next_to_go(number + len(stays)):
            name, tag = self._cache.name_of(page), self._tags.get(page, "")
            if name is None or tag is None:
                yield page, None
            elif name not in staying:
                yield page, _key(name, tag)

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
        loading = self._loading[job] = _Loading(tracked, names, rows)
        tracked.hits = len(rows), 0, 0
        targets = pages[0][first:last]
        load = Load(job, tracked.request.request_id, rows, [targets], len(rows))
        whose, leaving = self._leaving
        if whose is tracked:
            load.displaced = self._in_turns(loading, targets[: len(rows)], leaving)
        orders.loads.append(load)
        self._store_next(self._step_pages, orders)

    def _in_turns(self, loading: _Loading, targets: Sequence[int], leaving: Mapping[int, Any]) -> list[Displaced]:
        """Has a load store what its pages hold, some at a time. The rows that it has read by then take the next ones."""
        lacking = {page: key for page, key in leaving.items() if key is not None and not self._has(key)}
        names, read, turns = loading.names, list[Any](), list[Displaced]()
        for begin in range(0, len(targets), self._at_once):
            end = begin + self._at_once
            turn = Displaced(begin, [], [])
            for page in targets[begin:end]:
                if (key := lacking.get(page)) is None or key in self._storing:
                    continue
                if (row := self._row_after(read, loading)) is None:
                    self.saved.no_room += 1
                    continue
                self._storing.add(key)
                loading.displaced[key] = row
                turn.pages.append(page)
                turn.rows.append(row)
            if turn.rows:
                turns.append(turn)
            read += [name for name in names[begin:end] if self._loads_of[name] == 1]
        loading.names = [name for name in names if name not in loading.gone]
        return turns

    def _has(self, key: Any) -> bool:
        """Whether the host has a block that the engine gives up. Then it stays."""
        if key in self._order:
            self._order.move_to_end(key)
        return key in self._rows

    def _row_after(self, read: list[Any], loading: _Loading) -> int | None:
        """A free row, else one of those that a load has read by then and nobody else reads, else any that is not in use."""
        if self._free or not read:
            return self._take_row()
        name = read.pop()
        loading.gone.add(name)
        self._going.add(name)
        del self._loads_of[name]
        return self._rows.pop(name)

    # --- stores ------------------------------------------------------------------------------------------------------

    def order(self, num_requests: int, orders: Orders) -> None:
        """Orders stores of what the next step may take, of so many requests: each of them may begin a page."""
        number = self._step_pages + num_requests
        self._store_next(number, orders)
        if self._num_seen < min(number, self._most):
            self._store_running(orders)
        self._filling.clear()
        self._leaving = None, {}

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

    def _store_next(self, number: int, orders: Orders) -> None:
        """Orders stores of the next so many pages to go.

        It looks at some more, so that steps which take a few pages need not look at all of them again.
        """
        if self._num_seen >= min(number, self._most):
            return
        copies = _Copies([], [], [])
        self._num_seen = 0
        for page, key in self._next_to_go(min(number + self._step_pages // 4, self._most)):
            self._num_seen += 1
            if key is not None and not self._has(key):
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
        if (loading := self._loading.pop(job, None)) is not None:
            self._loaded(loading, num_blocks)
        else:
            self._stored(job, self._jobs.pop(job), num_blocks)

    def _stored(self, job: int, copies: _Copies, num_blocks: int) -> None:
        self._read.end(job, [copies.page_ids])
        if not copies.is_stale:
            self._storing.difference_update(copies.names)
        if copies.is_stale or num_blocks < len(copies.rows):
            self.saved.spoiled += len(copies.rows)
            self._free += copies.rows
        else:
            self._found_now(zip(copies.names, copies.rows, strict=True), len(copies.rows))

    def _found_now(self, there: Iterable[tuple[Any, int]], number: int) -> None:
        self.saved.stored += number
        for name, row in there:
            self._rows[name] = row
            self._order[name] = None

    def _loaded(self, loading: _Loading, num_blocks: int) -> None:
        came = min(num_blocks, len(loading.rows))
        self.loaded.hits += came > 0
        self.loaded.from_host += came
        self.loaded.failed += len(loading.rows) - came
        loading.tracked.has_lost |= came < len(loading.rows)
        displaced = loading.displaced
        if loading.is_stale:
            self.saved.spoiled += len(displaced)
            self._free += self._released(loading)
            return
        self._going.difference_update(loading.gone)
        self._storing.difference_update(displaced)
        if came < len(loading.rows):
            self.saved.spoiled += len(displaced)
            self._free += displaced.values()
        else:
            self._found_now(displaced.items(), len(displaced))
        for name in loading.names:  # the last of a prompt stands first: without it the others are of use
            self._loads_of[name] -= 1
            if not self._loads_of[name]:
                del self._loads_of[name]
                self._order[name] = None
                self._order.move_to_end(name, last=False)

    def _released(self, loading: _Loading) -> set[int]:
        """Rows of a load from before a reset that no other such load uses."""
        others = {row for each in self._loading.values() if each.is_stale for row in each.all_rows}
        return loading.all_rows - others

    def forget(self) -> None:
        """Nothing that is on the host, on its way there, or in the engine's pages now, is found again."""
        for copies in self._jobs.values():
            copies.is_stale = True
        for loading in self._loading.values():
            loading.is_stale = True
        self._free += [self._rows[name] for name in self._order]
        self._rows.clear()
        self._order.clear()
        self._loads_of.clear()
        self._storing.clear()
        self._going.clear()
        self._leaving = None, {}
        self._fill(range(self._cache.num_pages), None)

    def finish(self, tracked: TrackedRequest) -> None:
        """Nothing to do: no row is held for a request."""

    def take_events(self) -> Sequence[BlockEvent]:
        """Nothing: an engine that announces blocks stores them when they are computed."""
        return ()

    def check(self) -> None:
        """Raises `InvariantError` if a row is lost or used twice, or a block is both in use and about to go."""
        rows, stale = [*self._free, *self._rows.values()], set[int]()
        for copies in self._jobs.values():
            rows += copies.rows
        for loading in self._loading.values():
            if loading.is_stale:
                stale |= loading.all_rows
            else:
                rows += loading.displaced.values()
        if sorted([*rows, *stale]) != list(range(self._num_rows)):
            raise InvariantError(
                f"of {self._num_rows} rows, {len(rows)} are free or hold a block, {len(stale)} are loaded"
            )
        if self._rows.keys() != self._order.keys() ^ self._loads_of.keys():
            raise InvariantError("a block of the host is neither in use nor about to go, or both")

    def close(self) -> None:
        """Nothing to do: there are no tiers below."""

    @property
    def has_waiting(self) -> bool:
        """Whether a step must confirm stores in flight."""
        return bool(self._jobs)


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
