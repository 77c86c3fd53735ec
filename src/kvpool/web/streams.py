"""Server-sent events: parts of an answer go out as they come; a client that leaves, or does not read, ends its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Sends what `parts` yields. `leave` is called at the end, however it comes.

    A send that takes more than `seconds` ends the stream, at the latest after twice as many.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        leave: Callable[[], None],
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        usual = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(media_type=self.media_type, headers={**usual, **(headers or {})})
        del self.headers["content-length"]
        self._parts = parts
        self._leave = leave
        self._seconds = seconds
        self._sends = 0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        tasks = (sending, asyncio.ensure_future(gone(receive)), asyncio.ensure_future(self._stalled()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await task
            self._leave()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for body in self._parts:
            self._sends += 1
            self._is_sending = True
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._is_sending = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stalled(self) -> None:
        """Returns when one send has taken `seconds`: the client does not read. A timer for each costs more than a send."""
        while True:
            before = self._sends
            await asyncio.sleep(self._seconds)
            if self._is_sending and self._sends == before:
                return


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of the work; a client that leaves cancels it, and None is returned, which nobody hears."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # it was raised above, or nobody hears
                await task
