"""Calls an ASGI application without a socket: what a replica does with a request that a front sends to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from typing import Any, NamedTuple

from kvpool.cluster.proxy.passing import is_event_stream
from kvpool.quiet import QuietErrors

_quiet = QuietErrors(logging.getLogger("kvpool"))
Message = MutableMapping[str, Any]
MOST_WAITING = 64  # messages of an answer that nobody has taken yet


class Head(NamedTuple):
    """The first part of an answer: all of it, or as far as the first part of a stream."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def scope_for(method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """The scope of a request; it can be pickled."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": headers,
        "client": None,
        "server": None,
    }


async def called(app: Any, scope: dict[str, Any], content: bytes) -> AsyncIterator[Head | bytes]:
    """An answer: its `Head`, then what follows in a stream, several parts at once where they come faster than they are taken.

    Whoever stops to listen cancels the application's work, as a client does that hangs up. Whoever does not take what comes
    makes the application wait in its `send`, as a client does that does not read.
    """
    messages = _Messages()
    given = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if given:
            return given.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # nobody hangs up this way

    async def run() -> None:
        try:
            await app(scope, receive, messages.send)
        finally:
            messages.end()

    running = asyncio.ensure_future(run())
    try:
        start = await messages.get()
        if start is None:
            await running
            raise RuntimeError(f"{scope['path']} was not answered")
        headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]
        body, is_last = await messages.next_part()
        while not is_last and (not body or not is_event_stream(headers)):
            more, is_last = await messages.next_part()
            body += more
        yield Head(start["status"], headers, body)
        while not is_last:
            body, is_last = await messages.next_part()
            if body:
                yield body
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()):
            _quiet.error(error, "%s failed", scope["path"])


class _Messages:
    """What an application has sent and nobody has taken, `MOST_WAITING` at most; its end needs no room."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_WAITING)

    async def send(self, message: Message) -> None:
        """Adds one, once there is room for it."""
        await self._room.acquire()
        self._sent.put_nowait(message)

    def end(self) -> None:
        """There will be no more."""
        self._sent.put_nowait(None)

    async def get(self) -> Message | None:
        """The next one; None at the end."""
        message = await self._sent.get()
        self._room.release()
        return message

    async def next_part(self) -> tuple[bytes, bool]:
        """All of the body that is there, and whether that was its end."""
        parts: list[bytes] = []
        while True:
            message = await self.get()
            if message is None:
                raise ConnectionError("the application ended in the middle of its answer")
            parts.append(message.get("body", b""))
            is_last = not message.get("more_body", False)
            if is_last or self._sent.empty():
                return b"".join(parts), is_last
