"""An HTTP proxy in front of OpenAI servers: a request goes to the node where it costs least, and elsewhere if that fails.

A request is sent again only while its client has got nothing. Once a stream has begun, a node that dies ends it with an error
that the client can read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

from kvpool.cluster.index.cluster_index import ClusterIndex
from kvpool.cluster.proxy.backends import Backend, Backends
from kvpool.cluster.proxy.passing import ELSEWHERE, NODE_HEADER, is_event_stream, lost, passed_on, refusal
from kvpool.cluster.proxy.prompt_tokens import are_tokens, read_asked
from kvpool.cluster.routing.router import Route, Router
from kvpool.cluster.routing.routing_config import RoutingConfig
from kvpool.errors import ConfigError, NoNodeError

log = logging.getLogger("kvpool")


class Proxy:
    """The proxy as an object: what it knows of its nodes, and how it answers."""

    def __init__(
        self,
        backends: list[Backend],
        *,
        block_size: int = 16,
        routing: RoutingConfig | None = None,
        health_seconds: float = 1.0,
        health_patience: float = 5.0,
        tokenize_patience: float = 5.0,
    ) -> None:
        if not backends:
            raise ConfigError("a proxy needs a backend at least: --backend http://HOST:PORT=tcp://HOST:PORT")
        if len({backend.url for backend in backends}) < len(backends):
            raise ConfigError("a backend is named twice; each has a URL of its own")
        httpx = _httpx()
        self._errors: tuple[type[Exception], ...] = (httpx.TransportError,)
        self._tried_elsewhere: tuple[type[Exception], ...] = (_ElsewhereError, httpx.TransportError)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # those of one client are no other's
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=limits, trust_env=False, cookies=no_cookies
        )
        self._patience = tokenize_patience
        self.index = ClusterIndex(block_size)
        self.router = Router(self.index, routing)
        self.backends = Backends(
            backends, self.index, self.router, self._client, every=health_seconds, patience=health_patience
        )

    # --- an answer ---------------------------------------------------------------------------------------------------

    async def answer(self, request: Any) -> Any:
        """The answer of the node that fits best, or of the next one."""
        content = await request.body()
        asked = await read_asked(request.url.path, request.headers, content, self._tokenized)
        tried: list[str] = []
        while True:
            try:
                route = self.router.route(
                    asked.tokens, session=asked.session, extra_keys=asked.extra_keys(), exclude=tried
                )
            except NoNodeError as error:
                return refusal(502 if tried else 503, f"no server could answer: {error}")
            try:
                return await self._forward(request, content, route)
            except self._tried_elsewhere as error:
                route.end()
                tried.append(str(route.node))
                if isinstance(error, self._errors):
                    self.backends.note(str(route.node), is_ready=False)
                log.info("%s did not answer (%s): elsewhere", route.node, error)
            except BaseException:
                route.end()
                raise

    async def _tokenized(self, question: dict[str, Any], key: str | None) -> dict[str, Any]:
        """What a server makes of a prompt: tokens, and the keys of its scope where it says so. Empty where none answers."""
        ready = [node for node, load in self.router.nodes.items() if load.is_ready]
        ready.sort(key=lambda node: self.router.nodes[node].num_requests)
        for node in ready[:2]:
            with suppress(*self._errors, ValueError):
                answer = await self._client.post(
                    f"{node}/tokenize", json=question, headers={"authorization": key} if key else {}, timeout=self._patience
                )
                said = answer.json() if answer.status_code == 200 else None
                if isinstance(said, dict) and are_tokens(said.get("tokens")):
                    return said
        return {}

    async def _forward(self, request: Any, content: bytes, route: Route) -> Any:
        """The answer of one node, from its first bytes on. Raises while another one may still be asked."""
        from starlette.responses import Response

        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = passed_on(request.headers.raw)
        sent = self._client.build_request(request.method, f"{route.node}{path}", content=content, headers=headers)
        answer = await self._client.send(sent, stream=True)
        is_stream = False
        try:
            if answer.status_code in ELSEWHERE:
                raise _ElsewhereError(f"status {answer.status_code}")
            is_stream = is_event_stream(answer.headers.raw)
            parts = answer.aiter_raw()
            # nothing is sent before there is something: all of an answer, or the first part of a stream
            first = await anext(parts, b"") if is_stream else b"".join([part async for part in parts])
        except BaseException:
            is_stream = False
            raise
        finally:
            if not is_stream:
                await answer.aclose()
        route.first_token()
        if is_stream:
            answered = self._streamed(first, parts, answer, route)
        else:
            route.end()
            answered = Response(first, status_code=answer.status_code)
        own = [header for header in answered.raw_headers if header[0] == b"content-length"]
        answered.raw_headers = [*passed_on(answer.headers.raw), *own, (NODE_HEADER.encode(), str(route.node).encode())]
        return answered

    def _streamed(self, first: bytes, parts: AsyncIterator[bytes], answer: Any, route: Route) -> Any:
        """A stream as it comes. Whatever ends it, the route ends with it."""
        from starlette.responses import StreamingResponse

        class Streamed(StreamingResponse):
            async def __call__(self, *connection: Any) -> None:
                try:
                    await super().__call__(*connection)
                finally:
                    route.end()
                    await answer.aclose()

        return Streamed(self._parts(first, parts, route), status_code=answer.status_code)

    async def _parts(self, first: bytes, parts: AsyncIterator[bytes], route: Route) -> AsyncIterator[bytes]:
        """A node that dies now has said something already, so no other can go on: the client is told."""
        yield first
        try:
            async for part in parts:
                yield part
        except self._errors as error:
            self.backends.note(str(route.node), is_ready=False)
            yield lost(error)

    # --- its life ----------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Nodes, decisions and the index, for people."""
        return {
            "nodes": self.backends.described(),
            "router": self.router.stats()._asdict(),
            "index": self.index.stats()._asdict(),
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watches the servers meanwhile."""
        watching = asyncio.create_task(self.backends.watch())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await self._client.aclose()
            await asyncio.to_thread(self.backends.close)


def create_proxy_app(proxy: Proxy) -> Any:
    """The ASGI application of a proxy: `/route/stats` is its own, everything else is for the servers."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route as Path

    async def stats(request: Any) -> Any:
        return JSONResponse(proxy.described())

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with proxy.running():
            yield

    methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
    everything = Path("/{path:path}", proxy.answer, methods=methods)
    return Starlette(routes=[Path("/route/stats", stats), everything], lifespan=lifespan)


class _ElsewhereError(Exception):
    """A node says that it cannot answer now."""


def _httpx() -> Any:
    try:
        import httpx
        import starlette  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"the proxy needs {error.name}: pip install 'kvpool[cluster]'") from None
    return httpx
