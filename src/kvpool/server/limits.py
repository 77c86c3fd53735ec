"""Limits of one server and of one key. Requests over a limit are refused; many at once begin one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvpool.checks import check_int
from kvpool.engine.images import PROMPT_PIXELS
from kvpool.errors import InvalidArgumentError
from kvpool.fields import setting
from kvpool.server.errors import Problem
from kvpool.server.long_work import LongWork

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_GRAMMARS = 2  # that are compiled at once
AT_ONCE = 2  # requests that begin at one turn of the event loop


@dataclass(frozen=True)
class Limits:
    """`requests` run or wait at once, `requests_per_key` of one key; `samples` is the largest `n`; bodies are in bytes.

    A request with several prompts counts as so many requests. If a client does not read for `send_seconds`, its request is
    cancelled. A tenant may have `pins_per_tenant` pins; expired and invalidated ones do not count. Images of requests under
    way may have `image_bytes` as encoders take them, and those of one key half of it.
    """

    requests: int = setting(
        512, "Requests that run or wait at once (default 512); more get status 429.", int, option="max_requests", low=1
    )
    requests_per_key: int = setting(256, kind=int, option="max_requests_per_key")
    samples: int = setting(16, kind=int)
    body_bytes: int = setting(4 << 20, kind=int)
    prompt_tokens: int = setting(1 << 20, kind=int)
    send_seconds: int = setting(30, kind=int)
    pins_per_tenant: int = setting(1024, kind=int)
    image_bytes: int = setting(4 << 30, kind=int)

    @property
    def prompts(self) -> int:
        """The most prompts of one request: with more, it could never pass the gate."""
        return min(self.requests, self.requests_per_key)

    def __post_init__(self) -> None:
        for item in fields(self):
            check_int(getattr(self, item.name), f"Limits.{item.name}", 1, 2**40, InvalidArgumentError)


class Gate:
    """Counts requests under way. One event loop uses it, so it needs no lock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.is_draining = False
        self.under_way = 0
        self.images = LongWork(PROMPT_PIXELS, PROMPT_PIXELS // 2, limits.requests_per_key)  # sizes are pixels
        self.grammars = LongWork(_GRAMMARS, 1, limits.requests_per_key)
        self.grammar_threads = ThreadPoolExecutor(_GRAMMARS, "kvpool-grammar")
        self._by_key: Counter[str] = Counter()
        self._image_bytes: Counter[str] = Counter()
        self._cuts: set[Callable[[], None]] = set()

    @contextmanager
    def passed(self, key: str, prompts: int = 1) -> Iterator[None]:
        """Counts one request, and each of its prompts, from when it is accepted to the end of its answer."""
        if self.is_draining:
            raise Problem(503, "the server is shutting down; ask another one", code="draining", retry_after=5)
        if self.under_way + prompts > self.limits.requests:
            raise Problem(429, "this server takes no more requests now: try again", code="busy", retry_after=1)
        if self._by_key[key] + prompts > self.limits.requests_per_key:
            raise Problem(
                429,
                f"this key has {self._by_key[key]} requests under way, and its limit is {self.limits.requests_per_key}",
                code="busy",
                retry_after=1,
            )
        self.under_way += prompts
        self._by_key[key] += prompts
        try:
            yield
        finally:
            self.under_way -= prompts
            self._by_key[key] -= prompts
            if not self._by_key[key]:
                del self._by_key[key]

    @contextmanager
    def holding(self, key: str, num_bytes: int) -> Iterator[None]:
        """Counts the images of a request to the end of its answer. A key without images may have one large request."""
        held, own, limit = self._image_bytes.total(), self._image_bytes[key], self.limits.image_bytes
        if (own and own + num_bytes > limit // 2) or (held and held + num_bytes > limit):
            raise Problem(429, "this server takes no more images now: try again", code="busy", retry_after=1)
        self._image_bytes[key] += num_bytes
        try:
            yield
        finally:
            self._image_bytes[key] -= num_bytes
            if not self._image_bytes[key]:
                del self._image_bytes[key]

    @contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """While a request is under way, `cut_all` calls `cut` to end it."""
        self._cuts.add(cut)
        try:
            yield
        finally:
            self._cuts.discard(cut)

    def cut_all(self) -> None:
        """Ends the requests that still run, because the server is about to end."""
        self.is_draining = True
        for cut in list(self._cuts):
            cut()


class Turns:
    """Lets a few pass at each turn of the event loop, in the order in which they came. One event loop uses it."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Returns when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next, loop)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # else the request that waited was cancelled
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._next, loop)


class InTurns:
    """Lets requests that cause work begin in turns. Others, such as /health, do not wait."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.mine()
        await self._app(scope, receive, send)
