"""Refuses bodies that are too large before they are in memory."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpool.server.asking.problems import Problem


class BodyLimit:
    """Counts the bytes of a body as they come; `refuse` makes the answer to one that is over the limit."""

    def __init__(self, app: ASGIApp, limit: int, refuse: Callable[[Problem], Response]) -> None:
        self._app = app
        self._limit = limit
        self._answer = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._limit:
            await self._refuse(scope, receive, send)
            return
        taken, is_refused = 0, False

        async def counted() -> Message:
            nonlocal taken, is_refused
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit and message["type"] == "http.request":
                is_refused = True
                return {"type": "http.disconnect"}
            return message

        async def answer(message: Message) -> None:
            if not is_refused:
                await send(message)

        try:
            await self._app(scope, counted, answer)
        finally:
            if is_refused:
                await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = Problem(
            413, f"the body is over this server's limit of {self._limit} bytes", code="too_large",
            headers={"connection": "close"},
        )  # fmt: skip
        await self._answer(problem)(scope, receive, send)
