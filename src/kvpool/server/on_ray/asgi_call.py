"""Calls an ASGI application without a socket: what a replica does with a request that a front sends to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from typing import Any, NamedTuple

from kvpool.cluster.proxy.passing import is_event_stream

log = logging.getLogger("kvpool")
Message = MutableMapping[str, Any]


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

    Whoever stops to listen cancels the application's work, as a client does that hangs up.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    given = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if given:
            return given.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # nobody hangs up this way

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        start = await messages.get()
        if start is None:
            await running
            raise RuntimeError(f"{scope['path']} was not answered")
        headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]
        body, is_last = await _next_part(messages)
        while not is_last and (not body or not is_event_stream(headers)):
            more, is_last = await _next_part(messages)
            body += more
        yield Head(start["status"], headers, body)
        while not is_last:
            body, is_last = await _next_part(messages)
            if body:
                yield body
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()):
            log.error("%s failed", scope["path"], exc_info=error)


async def _next_part(messages: asyncio.Queue[Message | None]) -> tuple[bytes, bool]:
    """All of the body that is there, and whether that was its end."""
    parts: list[bytes] = []
    while True:
        message = await messages.get()
        if message is None:
            raise ConnectionError("the application ended in the middle of its answer")
        parts.append(message.get("body", b""))
        is_last = not message.get("more_body", False)
        if is_last or messages.empty():
            return b"".join(parts), is_last
