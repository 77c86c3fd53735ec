"""Bounds work that takes long or much memory. Keys take turns, so none waits for all that another one asked for."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, TypeVar

from kvpool.server.errors import Problem

WorkTurn = Callable[[int], AbstractAsyncContextManager[None]]  # of one key, for a piece of work of that size


class Asker(NamedTuple):
    """Who asks for a prompt: whose answers it may hold, and the turns in which its images are read."""

    tenant: str
    salt: str
    reading: WorkTurn


_T = TypeVar("_T")


class _Piece(NamedTuple):
    size: int
    begins: asyncio.Future[None]


class LongWork:
    """Work of one kind: at most `total` is under way, and `per_key` of one key; a larger piece is under way alone.

    A key has at most `waiting` pieces that wait. One event loop uses it.
    """

    def __init__(self, total: int, per_key: int, waiting: int) -> None:
        self._total = total
        self._per_key = per_key
        self._most_waiting = waiting
        self._under_way: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Piece]] = {}  # by key, in the order of their turns

    @asynccontextmanager
    async def turn(self, key: str, size: int = 1) -> AsyncIterator[None]:
        """Waits until a piece of work may begin. It is under way until the end of the block."""
        if len(self._waiting.get(key, ())) >= self._most_waiting:
            raise Problem(
                429, "this server takes no more requests of this kind now: try again", code="busy", retry_after=1
            )
        piece = _Piece(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(key, deque()).append(piece)
        self._begin()
        try:
            await piece.begins
            yield
        finally:
            if not piece.begins.cancelled():  # else the request ended while it waited
                self._under_way[key] -= size
                self._under_way += Counter()  # forgets keys that have none
            self._begin()

    def _begin(self) -> None:
        """Lets pieces begin, one of each key in turn. If the next one has no room, those behind it wait, too."""
        self._forget_ended()
        has_begun = True
        while has_begun:
            has_begun = False
            for key in list(self._waiting):
                piece = self._waiting[key][0]
                if not _fits(self._under_way[key], piece.size, self._per_key):
                    continue
                if not _fits(self._under_way.total(), piece.size, self._total):
                    return
                queue = self._waiting.pop(key)
                queue.popleft()
                if queue:
                    self._waiting[key] = queue  # at the end of the line
                self._under_way[key] += piece.size
                piece.begins.set_result(None)
                has_begun = True

    def _forget_ended(self) -> None:
        """Leaves out pieces whose requests have ended."""
        for key, queue in list(self._waiting.items()):
            self._waiting[key] = deque(piece for piece in queue if not piece.begins.cancelled())
            if not self._waiting[key]:
                del self._waiting[key]


def _fits(held: int, size: int, limit: int) -> bool:
    return not held or held + size <= limit


async def in_thread(work: Callable[[], _T], threads: Executor | None = None) -> _T:
    """The result of work in a thread. A caller that is cancelled waits for its end, so that a turn ends no sooner."""
    working = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
