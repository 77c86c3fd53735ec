"""What both HTTP applications need: limits for the heads and bodies of requests, refusal of foreign names, event streams.

`BodyLimit` refuses bodies that are too large before they are in memory, and clients that stop in the middle of one.
`bounded_http` is uvicorn's protocol with limits for the head. `LocalNames` refuses requests that reach a loopback address
under a foreign name (DNS rebinding). `EventStream` ends a request when its client leaves or does not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpool.checks import is_local_name, is_loopback
from kvpool.quiet import QuietErrors, QuietLog

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class LocalNames:
    """At a loopback address, answers only requests for `localhost` or a loopback address; elsewhere, for every name.

    `refuse(status, message, code)` makes the answer to others. `remedy` tells the operator what to do about it.
    """

    def __init__(self, app: ASGIApp, refuse: Callable[[int, str, str], Response], remedy: str) -> None:
        self._app = app
        self._refuse = refuse
        self._remedy = remedy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _has_foreign_name(scope):
            message = f"this server answers to the names of its own machine only, such as localhost; {self._remedy}"
            await self._refuse(403, message, "foreign_name")(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _has_foreign_name(scope: Scope) -> bool:
    address = scope.get("server")
    if not address or not is_loopback(str(address[0])):
        return False
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return not is_local_name(host.decode("latin-1"))


class BodyLimit:
    """Counts the bytes of a body as they come. Each part must come within `seconds`.

    `refuse(status, message, code)` makes the answer to a body that is over the limit (413) or stops (408). Nothing more is
    read from that connection.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float, refuse: Callable[[int, str, str], Response]) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds
        self._answer = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._limit:
            await self._too_large()(scope, receive, send)
            return
        taken, is_whole = 0, False
        refused: Response | None = None

        async def counted() -> Message:
            nonlocal taken, is_whole, refused
            if is_whole:
                return await receive()  # returns when the client leaves
            try:
                message = await asyncio.wait_for(receive(), self._seconds)
            except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
                refused = self._too_slow()
                return {"type": "http.disconnect"}
            taken += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if taken > self._limit and message["type"] == "http.request":
                refused = self._too_large()
                return {"type": "http.disconnect"}
            return message

        async def answer(message: Message) -> None:
            if refused is None:
                await send(message)

        try:
            await self._app(scope, counted, answer)
        finally:
            if refused is not None:
                await refused(scope, receive, send)

    def _too_large(self) -> Response:
        return self._refusal(413, f"the body is over this server's limit of {self._limit} bytes", "too_large")

    def _too_slow(self) -> Response:
        return self._refusal(408, f"the body did not go on for {self._seconds:g} seconds", "too_slow")

    def _refusal(self, status: int, message: str, code: str) -> Response:
        refused = self._answer(status, message, code)
        refused.headers["connection"] = "close"
        return refused


class _LogLimit(logging.Filter):
    """Limits log lines of uvicorn that a client can cause to one a minute: requests that are no HTTP, errors in answers."""

    def __init__(self) -> None:
        super().__init__()
        log = logging.getLogger("uvicorn.error")
        self._invalid, self._errors = QuietLog(log), QuietErrors(log)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            added = self._errors.added(error)
        elif str(record.msg).startswith("Invalid HTTP"):
            added = self._invalid.added()
        else:
            return True
        record.msg = f"{str(record.msg).rstrip()}{added or ''}"
        return added is not None


_few_lines = _LogLimit()


def bounded_http(head_seconds: float = HEAD_SECONDS) -> type[asyncio.Protocol]:
    """A protocol for `uvicorn.Config(http=...)`. It closes a connection that sends no complete head within `head_seconds`,
    and one whose head is over `HEAD_BYTES`, by more than what is read at once. Requests that are no HTTP are logged once a
    minute, and so is the traceback of an answer that fails.
    """
    base = _base()
    logging.getLogger("uvicorn.error").addFilter(_few_lines)  # the same object is added once

    class Bounded(base):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_bytes = 0
            self._overdue: asyncio.TimerHandle | None = self.loop.call_later(head_seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # the head was complete
                self._head_bytes = 0
                self._in_time()
                return
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                if self.cycle is None and not self.transport.is_closing():
                    self.transport.write(_TOO_LARGE)
                self.transport.close()
            elif self._overdue is None:
                self._overdue = self.loop.call_later(head_seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            super().connection_lost(exc)

        def _in_time(self) -> None:
            if self._overdue is not None:
                self._overdue.cancel()
                self._overdue = None

    return Bounded


def _base() -> Any:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError:  # httptools is faster, and need not be there
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return HttpToolsProtocol


class EventStream(Response):
    """Sends what `parts` yields. It always calls `leave` at the end.

    A send that takes more than `seconds` ends the stream, after at most twice that time.
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
        """Returns when one send has taken `seconds`: the client does not read. A timer per send would cost more than it."""
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
    """The result of the work. If the client leaves, the work is cancelled and the result is None."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # it was raised above, or nobody is there to get it
                await task
