"""An HTTP proxy in front of OpenAI servers: a request goes to the node with the least cost, and to another if that fails.

The proxy sends a request again only while its client has received nothing, and ends it when the client leaves. If a node dies
after a stream has begun, the stream ends with an error that the client can read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from kvpool.checks import is_local_name, is_loopback
from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.proxy.backends import Backend, Backends, NodeLostError, ProxyLimits
from kvpool.cluster.proxy.everywhere import address_at, ask, forgotten
from kvpool.cluster.proxy.metrics import prometheus_text
from kvpool.cluster.proxy.passing import (
    ELSEWHERE,
    NODE_HEADER,
    ElsewhereError,
    NoModelError,
    are_tokens,
    is_event_stream,
    lacks_model,
    lost,
    passed_on,
    read_routing_request,
    refusal,
)
from kvpool.cluster.proxy.prefill_pool import MIN_TOKENS, PrefillPool
from kvpool.cluster.router import Route, Router, RoutingConfig
from kvpool.errors import ConfigError, NoNodeError
from kvpool.version import __version__
from kvpool.view.frames import view_event
from kvpool.view.http import HEADERS, PREFIX, asset, has_key
from kvpool.web import BodyLimit, EventStream, LocalNames, unless_gone

KEY_VARIABLE = "KVPOOL_ROUTE_KEY"
MAX_VIEWERS = 16
_EVERY_SECONDS = 0.5
MOST_LOST = 2  # after so many servers failed with a request, it is not sent to another one
_KEPT_SECONDS = (
    2.0  # that an idle connection is kept: less than any server does, or the next request meets a closed one
)
Refuse = Callable[[Request], Response | None]  # the answer to a request that may not see something
log = logging.getLogger("kvpool")


def holders_of(key: str | None) -> Refuse:
    """Refuses those without this key; if there is none, everybody but this machine."""
    digest = hashlib.sha256(key.encode()).digest() if key else None

    def refuse(request: Request) -> Response | None:
        if digest is not None:
            if has_key(request.headers.get("authorization", ""), digest):
                return None
            return refusal(401, "this view needs its key: send 'Authorization: Bearer KEY'", "unauthorized")
        has_name = is_local_name(request.headers.get("host", ""))
        if request.client is not None and is_loopback(request.client.host) and has_name:
            return None
        return refusal(403, f"set {KEY_VARIABLE} for the proxy to look from another machine", "forbidden")

    return refuse


class ClusterView:
    """Serves the page and the stream of the cluster's state, which `look` returns.

    `refuse` answers those who may not see them.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]], send_seconds: float, refuse: Refuse) -> None:
        self._look = look
        self._send_seconds = send_seconds
        self._refused = refuse
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
        """The current state, for scripts."""
        return self._refused(request) or JSONResponse(self._look())

    async def metrics(self, request: Request) -> Response:
        """The same for Prometheus."""
        return self._refused(request) or Response(
            prometheus_text(self._look()), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def stream(self, request: Request) -> Response:
        """A stream of the state, twice a second."""
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
            yield view_event("look", self._look())
            await asyncio.sleep(_EVERY_SECONDS)


class Proxy:
    """The proxy without HTTP server: what it knows of its nodes, and how it answers."""

    def __init__(
        self,
        backends: list[Backend],
        *,
        block_size: int = 16,
        routing: RoutingConfig | None = None,
        limits: ProxyLimits | None = None,
        health_seconds: float = 1.0,
        health_patience: float = 5.0,
        tokenize_patience: float = 5.0,
        may_look: Refuse | None = None,
        prefill: list[Backend] | None = None,
        prefill_tokens: int = MIN_TOKENS,
        prefill_silence: float = 5.0,
    ) -> None:
        if not backends:
            raise ConfigError("a proxy needs a backend at least: --backend http://HOST:PORT=tcp://HOST:PORT")
        everybody = [*backends, *(prefill or ())]
        if len({backend.url for backend in everybody}) < len(everybody):
            raise ConfigError("a backend is named twice; each has a URL of its own")
        self.limits = limits or ProxyLimits()
        pool = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_KEPT_SECONDS)
        patience = httpx.Timeout(
            connect=5.0, read=self.limits.silence_seconds, write=self.limits.send_seconds, pool=None
        )
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # cookies of one client must not reach another
        self._urls = [backend.url for backend in everybody]
        self._client = httpx.AsyncClient(timeout=patience, limits=pool, trust_env=False, cookies=no_cookies)
        self._patience = tokenize_patience
        self.index = ClusterIndex(block_size)
        self.router = Router(self.index, routing)
        self.view = ClusterView(self.described, self.limits.send_seconds, may_look or holders_of(None))
        watching = {"every": health_seconds, "patience": health_patience, "lost_seconds": self.limits.lost_seconds}
        self.backends = Backends(backends, self.index, self.router, self._client, **watching)
        self.prefill = None
        if prefill:
            self.prefill = PrefillPool(
                prefill,
                self._client,
                block_size=block_size,
                routing=routing,
                min_tokens=prefill_tokens,
                silence_seconds=prefill_silence,
                watching=watching,
            )

    # --- an answer ---------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Response:
        """The answer of the best node, or of the next one if that fails. It ends if the client leaves."""
        try:
            content = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        answered: Response | None = await unless_gone(request, self._answered(request, content))
        return Response(status_code=499) if answered is None else answered

    async def invalidate(self, request: Request) -> Response:
        """Forgets something on every server, those for prefill included."""
        try:
            content = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        answers = await asyncio.gather(*(ask(self._client, url, request, content) for url in self._urls))
        return forgotten(dict(zip(self._urls, answers, strict=True)))

    async def _answered(self, request: Request, content: bytes) -> Response:
        asked = await read_routing_request(request.scope["path"], request.headers, content, self._tokenized)
        tried: list[str] = []
        num_lost = 0
        named = asked.named.get("model")
        without = self.backends.without(named)
        lacks: Response | None = None
        while True:
            skipped = [] if lacks is None and without >= self.router.nodes.keys() - set(tried) else without
            try:
                route = self.router.route(
                    asked.tokens,
                    session=asked.session,
                    lora_name=asked.lora_name,
                    extra_keys=asked.extra_keys(self.index.block_size),
                    exclude=[*tried, *skipped],
                )
            except NoNodeError as error:
                if lacks is not None:
                    return lacks
                return refusal(502 if tried else 503, f"no server could answer: {error}")
            try:
                if self.prefill is not None:
                    await self.prefill.hand_over(asked, route, request.headers)
                return await self._forward(request, content, route)
            except httpx.ReadTimeout:
                route.end()
                message = f"{route.node} said nothing for {self.limits.silence_seconds:g} seconds"
                return refusal(504, message, "silence")
            except NoModelError as error:
                route.end()
                tried.append(str(route.node))
                self.backends.note_lack(str(route.node), named)
                lacks = error.answer
            except (ElsewhereError, NodeLostError, httpx.RequestError) as error:
                route.end()
                tried.append(str(route.node))
                if not isinstance(error, ElsewhereError):
                    self.backends.note(str(route.node), is_ready=False)
                log.info("%s did not answer (%s): elsewhere", route.node, error)
                num_lost += not isinstance(error, (ElsewhereError, httpx.ConnectError, httpx.ConnectTimeout))
                if num_lost == MOST_LOST:
                    return refusal(502, f"{num_lost} servers failed while they had this request", "node_lost")
            except BaseException:
                route.end()
                raise

    async def _tokenized(self, question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        """The tokens of a prompt, and the keys of its scope if the server gives them. Empty if no server answers."""
        loads = self.router.nodes
        ready = [node for node, load in loads.items() if load.is_ready]
        ready.sort(key=lambda node: loads[node].num_requests)
        without = self.backends.without(question.get("model"))
        num_asked = 0
        for node in [node for node in ready if node not in without] or ready[:1]:
            num_asked += 1
            if num_asked > 2:
                break
            with suppress(httpx.RequestError, ValueError):
                answer = await self._client.post(
                    f"{node}/tokenize", json=question, headers=credentials, timeout=self._patience
                )
                if lacks_model(answer.status_code, answer.content):
                    self.backends.note_lack(str(node), question.get("model"))
                    num_asked -= 1
                said = answer.json() if answer.status_code == 200 else None
                if isinstance(said, dict) and are_tokens(said.get("tokens")):
                    return said
        return {}

    async def _forward(self, request: Request, content: bytes, route: Route) -> Response:
        """The answer of one node, from its first bytes on. Raises if another one may still be asked."""
        url = address_at(str(route.node), request.scope)
        if url is None:
            route.end()
            return refusal(400, "this path cannot be passed on", "invalid_value")
        sent = self._client.build_request(request.method, url, content=content, headers=passed_on(request.headers.raw))
        with self.backends.waiting(str(route.node)):
            answer = await self._client.send(sent, stream=True)
            is_stream = False
            try:
                if answer.status_code in ELSEWHERE:
                    raise ElsewhereError(f"status {answer.status_code}")
                is_stream = answer.status_code == 200 and is_event_stream(answer.headers.raw)
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
        answered: Response
        if is_stream:
            answered = _NodeStream(self._parts(first, parts, route), route, answer, self.limits.send_seconds)
        else:
            route.end()
            answered = Response(first, status_code=answer.status_code)
        own = [header for header in answered.raw_headers if header[0] == b"content-length"]
        answered.raw_headers = [*passed_on(answer.headers.raw), *own, (NODE_HEADER.encode(), str(route.node).encode())]
        if not is_stream and lacks_model(answer.status_code, first):
            raise NoModelError(answered)
        return answered

    async def _parts(self, first: bytes, parts: AsyncIterator[bytes], route: Route) -> AsyncIterator[bytes]:
        """The rest of a stream.

        If the node dies now, the client gets an error event: another node cannot continue the answer.
        """
        node, part = str(route.node), first
        while part:
            yield part
            try:
                with self.backends.waiting(node):
                    part = await anext(parts, b"")
            except (NodeLostError, httpx.RequestError) as error:
                if not isinstance(error, httpx.ReadTimeout):
                    self.backends.note(node, is_ready=False)
                yield lost(error)
                return

    # --- its life ----------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Nodes, decisions and the index, for people."""
        now = time.monotonic()
        decisions = [
            {**each._asdict(), "at": round(each.at, 2), "hit": each.hit._asdict()} for each in self.router.decisions
        ]
        return {
            "version": __version__,
            "now": now,
            "nodes": self.backends.described(),
            "router": self.router.stats()._asdict(),
            "index": self.index.stats()._asdict(),
            "decisions": decisions,
            "prefill": None if self.prefill is None else self.prefill.described(),
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watches the servers while it is open."""
        pools = [self.backends] if self.prefill is None else [self.backends, self.prefill.backends]
        watching = asyncio.gather(*(pool.watch() for pool in pools))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await self._client.aclose()
            for pool in pools:
                await asyncio.to_thread(pool.close)


class _NodeStream(EventStream):
    """A stream. When it ends for any reason, the route and the stream of the node end, too."""

    def __init__(self, parts: AsyncIterator[bytes], route: Route, answer: httpx.Response, seconds: float) -> None:
        super().__init__(parts, route.end, seconds)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.aclose()


def create_proxy_app(proxy: Proxy, *, any_name: bool = False) -> Starlette:
    """The ASGI application of a proxy. It answers `/`, `/view/...`, `/route/stats` and `/metrics`; other paths go to a
    server, and requests to forget something to all.

    A request to a loopback address must name that address in its `Host` header, unless `any_name`, because servers may have
    no keys.
    """
    view = proxy.view

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with proxy.running():
            yield

    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
    everything = Path("/{path:path}", proxy.answer, methods=methods)
    own = {
        "/route/stats": view.stats,
        "/metrics": view.metrics,
        "/view/stream": view.stream,
        "/": view.page,
        "/view/{name}": view.page,
    }
    views = [Path(path, answer) for path, answer in own.items()]
    forgets = Path("/v1/cache/invalidate", proxy.invalidate, methods=["POST"])
    app = Starlette(routes=[*views, forgets, everything], lifespan=lifespan)
    app.add_middleware(BodyLimit, limit=proxy.limits.body_bytes, seconds=proxy.limits.send_seconds, refuse=refusal)
    if not any_name:
        remedy = "start it with --insecure if a proxy in front checks who asks"
        app.add_middleware(LocalNames, refuse=refusal, remedy=remedy)
    return app
