"""A server that answers at once: `/health` before FastAPI, torch and the models are imported, everything when they are there.

It imports only what is light.
"""

from __future__ import annotations

import asyncio
import errno
import html
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import uvicorn

from kvpool.engine.options import tell
from kvpool.engine.starting import Start
from kvpool.errors import ConfigError
from kvpool.server.errors import Problem
from kvpool.server.serve_settings import ServeSettings
from kvpool.version import __version__
from kvpool.web import bounded_http

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

GRACE_SECONDS = 30
_RETRY_SECONDS = 5
_LOOK_SECONDS = 2  # a browser that shows the page asks again


class EarlyServer(uvicorn.Server):
    """Listens as the settings say while it is open, in a thread of its own. `hand_over` gives it the application.

    The main thread loads the models meanwhile: it alone hears signals, which end that at once.
    """

    def __init__(self, settings: ServeSettings, grace_seconds: int) -> None:
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            lifespan="off",  # the application has one, in `_take_over`
            timeout_graceful_shutdown=grace_seconds,
            log_level=settings.log_level,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            access_log=False,
            http=bounded_http(),
            ws="none",
        )
        config.load()  # raises for a certificate that is none
        super().__init__(config)
        self.doing = "it imports its packages"
        self._address = settings.host, settings.port
        self._sockets: list[socket.socket] = []
        self._app: ASGIApp = self._refuse
        self._drain: Callable[[], Any] = bool
        self._is_over: Callable[[], bool] = bool
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._ended: Future[None]
        self._open: ExitStack

    def __enter__(self) -> EarlyServer:
        with ExitStack() as opening:
            self._sockets = [opening.enter_context(one) for one in bound(*self._address)]
            thread = opening.enter_context(ThreadPoolExecutor(1, "kvpool-http"))
            opening.callback(self._stop)
            self._ended = thread.submit(self.run, self._sockets)
            either: tuple[Future[Any], ...] = (self._loop, self._ended)
            wait(either, return_when=FIRST_COMPLETED)
            if self._ended.done():  # it could not start
                self._ended.result()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def _stop(self) -> None:
        self.should_exit = self.force_exit = True

    def hand_over(
        self, app: ASGIApp, name: str, quiet: bool, *, drain: Callable[[], Any], is_over: Callable[[], bool]
    ) -> None:
        """Hands over to the application, and prints the address. Returns when a signal or `is_over` has ended the server.

        Calls `drain` before it waits for requests to end.
        """
        addresses = [each.getsockname()[:2] for each in self._sockets]
        asyncio.run_coroutine_threadsafe(self._take_over(app, drain, is_over), self._loop.result()).result()
        for address, port in addresses:
            scheme = "http" if self.config.ssl_certfile is None else "https"
            where = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
            pages = f"{where}/ (live view), {where}/docs, {where}/metrics"
            tell(f"{name} at {where}/v1 (API), {pages}; Ctrl-C ends it", quiet)
        with self.capture_signals():
            self._ended.result()

    async def _take_over(self, app: ASGIApp, drain: Callable[[], Any], is_over: Callable[[], bool]) -> None:
        config = uvicorn.Config(app, lifespan="on", log_config=None)
        config.load()
        lifespan = config.lifespan_class(config)
        await lifespan.startup()
        if lifespan.should_exit:
            raise RuntimeError("the application could not start; the lines above say why")
        self.lifespan = lifespan  # uvicorn ends it with the server
        self._app, self._drain, self._is_over = app, drain, is_over

    # --- what uvicorn calls ----------------------------------------------------------------------------------------------

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop.set_result(asyncio.get_running_loop())

    async def on_tick(self, counter: int) -> bool:
        return bool(await super().on_tick(counter)) or self._is_over()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        await super().shutdown(sockets)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`/health` and `/version` as ever, status 503 for everything else; `/` looks again by itself."""
        known = {"/health": {"status": "ok"}, "/version": {"version": __version__}}
        body, status, kind = known.get(scope["path"]), 200, b"application/json"
        headers = []
        if body is None:
            stage = "" if Start.now is None else f" ({Start.now})"
            problem = Problem(503, f"the server starts: {self.doing}{stage}", code="loading")
            body, status = problem.body(), problem.status
            headers.append((b"retry-after", str(_RETRY_SECONDS).encode()))
        text = json.dumps(body)
        if scope["path"] == "/":
            text, kind = f"<!doctype html><title>kvpool</title><p>{html.escape(str(problem))}</p>", b"text/html"
            headers.append((b"refresh", str(_LOOK_SECONDS).encode()))
        headers.append((b"content-type", kind))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Has SIGTERM raise `SystemExit`, so that what is open is closed. uvicorn raises the signal again when it has ended."""
    if threading.current_thread() is not threading.main_thread():  # only there Python lets us
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at an address."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            taken = made[0].getsockname()[1]  # with port 0, all sockets take the port of the first
            one.bind((address[0], port or (taken if len(made) > 1 else 0), *address[2:]))
            one.listen()
    except OSError as error:
        for one in made:
            one.close()
        why = error.strerror
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there; --port 0 takes a free one"
        raise ConfigError(f"cannot listen at {host}, port {port}: {why}") from None
    return made
