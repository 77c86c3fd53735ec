"""The live view of a proxy: all nodes of its cluster, what they hold and do, and why requests went where they went."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.cluster.proxy.passing import refusal
from kvpool.view.frames import as_event
from kvpool.view.http import has_key, is_local_name, is_loopback
from kvpool.view.pages import HEADERS, PREFIX, asset
from kvpool.web.streams import EventStream

KEY_VARIABLE = "KVPOOL_ROUTE_KEY"
MAX_VIEWERS = 16
_EVERY_SECONDS = 0.5


class ClusterView:
    """Shows what `look` says. With a key, for whoever brings it; without one, for this machine alone."""

    def __init__(self, look: Callable[[], Mapping[str, Any]], send_seconds: float, key: str | None = None) -> None:
        self._look = look
        self._send_seconds = send_seconds
        self._digest = hashlib.sha256(key.encode()).digest() if key else None
        self._num_viewers = 0
        self.is_closing = False  # ends all streams

    async def page(self, request: Request) -> Response:
        """The page, or a file that it loads."""
        path = request.scope["path"]
        found = asset(f"{PREFIX}cluster.html" if path == "/" else path)
        if found is None:
            return refusal(404, f"there is nothing at {path}", "not_found")
        return Response(found.content, media_type=found.kind, headers=HEADERS)

    async def stats(self, request: Request) -> Response:
        """The newest look, for scripts."""
        return self._refused(request) or JSONResponse(self._look())

    async def stream(self, request: Request) -> Response:
        """A look, twice a second."""
        if (refused := self._refused(request)) is not None:
            return refused
        if self._num_viewers == MAX_VIEWERS:
            return refusal(503, f"{MAX_VIEWERS} pages watch already; close one of them", "too_many_viewers")
        self._num_viewers += 1
        return EventStream(self._looks(), self._leave, self._send_seconds)

    def _leave(self) -> None:
        self._num_viewers -= 1

    async def _looks(self) -> AsyncIterator[bytes]:
        while not self.is_closing:
            yield as_event("look", self._look())
            await asyncio.sleep(_EVERY_SECONDS)

    def _refused(self, request: Request) -> Response | None:
        if self._digest is not None:
            if has_key(request.headers.get("authorization", ""), self._digest):
                return None
            return refusal(401, "this view needs its key: send 'Authorization: Bearer KEY'", "unauthorized")
        has_name = is_local_name(request.headers.get("host", ""))
        if request.client is not None and is_loopback(request.client.host) and has_name:
            return None
        return refusal(403, f"set {KEY_VARIABLE} for the proxy to look from another machine", "forbidden")
