"""A proxy that keeps what passes through it, and what a cache could have reused of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from talks import common, num_cached

from live_app import Live

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


class Seen(NamedTuple):
    """A request, and the answer that it got."""

    path: str
    body: dict[str, Any]
    status: int
    answer: str


class Between:
    """Stands between clients and a server at `url`."""

    def __init__(self, url: str) -> None:
        self._target = url
        self.seen: list[Seen] = []
        everything = Route("/{path:path}", self._pass_on, methods=["GET", "POST", "HEAD"])
        self.live = Live(Starlette(routes=[everything], lifespan=self._running), "critical")

    @asynccontextmanager
    async def _running(self, app: Any) -> AsyncIterator[None]:
        async with httpx.AsyncClient(trust_env=False, timeout=600) as self._client:
            yield

    async def _pass_on(self, request: Request) -> Response:
        content = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        url = f"{self._target}{request.url.path}?{request.url.query}"
        answer = await self._client.request(request.method, url, content=content, headers=headers)
        if request.method == "POST":
            body = json.loads(content)
            self.seen.append(Seen(request.url.path, body, answer.status_code, answer.text))
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    def turns(self) -> list[tuple[int, int]]:
        """For each prompt but the first: how much of it a prompt before had in common with it, and how much was cached."""
        prompts: list[list[int]] = []
        found = []
        for seen in self.seen:
            if seen.path not in PATHS:
                continue
            asked = httpx.post(
                f"{self._target}/tokenize", json={**seen.body, "endpoint": seen.path}, trust_env=False, timeout=600
            )
            tokens = asked.raise_for_status().json()["tokens"]
            if prompts:
                found.append((max(common(tokens, before) for before in prompts), num_cached(seen.answer)))
            prompts.append(tokens)
        return found

    def close(self) -> None:
        self.live.stop()
