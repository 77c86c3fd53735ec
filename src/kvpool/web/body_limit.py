"""Refuses bodies that are too large before they are in memory, and clients that stop in the middle of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Counts the bytes of a body as they come; each part must come within `seconds`.

    `refuse(status, message, code)` makes the answer to a body that is over the limit (413) or does not go on (408). Nothing
    more is read from that connection.
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
                return await receive()  # that the client leaves
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
