"""Server-sent events: parts of an answer go out as they come; a client that leaves, or does not read, ends its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvpool.server.answering.events import as_event
from kvpool.server.asking.problems import Problem


class EventStream(Response):
    """Sends what `parts` yields. `leave` is called at the end, however it comes; each send may take `seconds`."""

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncIterator[bytes], leave: Callable[[], None], seconds: float) -> None:
        super().__init__(media_type=self.media_type, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._leave = leave
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, OSError, TimeoutError):
                    await task
            self._leave()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for body in self._parts:
                await asyncio.wait_for(
                    send({"type": "http.response.body", "body": body, "more_body": True}), self._seconds
                )
        except Problem as problem:  # the status is out already: OpenAI's clients raise on an event like this
            await send({"type": "http.response.body", "body": as_event(problem.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
            with suppress(asyncio.CancelledError, Problem):
                await task
