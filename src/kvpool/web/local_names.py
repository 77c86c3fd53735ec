"""Refuses requests that reach this machine's own address under the name of somebody else (DNS rebinding)."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpool.view.http import is_local_name, is_loopback


class LocalNames:
    """Answers at a loopback address only to `localhost` and to loopback addresses; at other addresses to every name.

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
