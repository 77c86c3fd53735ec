"""A crowd that comes at once: a few requests begin at each turn of the event loop, and other work comes between."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

AT_ONCE = 2


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
            if not turn.done():  # whoever waited was cancelled
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._next, loop)


class InTurns:
    """Requests that bring work begin in turns; a look such as /health does not stand in line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.mine()
        await self._app(scope, receive, send)
