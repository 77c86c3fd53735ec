"""Every request has a name, which its answer carries in `x-request-id`: the client's own, or a new one."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OWN = re.compile(rb"[\w.:/+=-]{1,128}")


class RequestIds:
    """Names requests; routes find the name in `request.state.id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name = given if _OWN.fullmatch(given) else f"req-{uuid.uuid4().hex}".encode()
        scope.setdefault("state", {})["id"] = name.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, named)
