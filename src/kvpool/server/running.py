"""A server from its start to its end: it answers while its models are loaded, serves them, drains and ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from kvpool.engine.options import tell, tell_loading
from kvpool.errors import ConfigError
from kvpool.server.app import create_app
from kvpool.server.auth import Access
from kvpool.server.errors import Problem
from kvpool.server.limits import Gate
from kvpool.server.serve_settings import ModelSettings, ServeSettings
from kvpool.server.served_model import ServedModel
from kvpool.server.tracing import Tracing
from kvpool.version import __version__
from kvpool.web import bounded_http

GRACE_SECONDS = 30
CUT_SECONDS = 2
_RETRY_SECONDS = 5


def serve_models(settings: ServeSettings, models: Sequence[ModelSettings], access: Access, *, quiet: bool) -> None:
    """Loads the models and serves them until the process is told to end. Raises what ended an engine."""
    tracing = None if settings.traces is None else Tracing.to(settings.traces)
    logging.getLogger("kvpool").setLevel(settings.log_level.upper())
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bound(settings.host, settings.port)]
        options = http_options(settings)
        served = []
        with answering(sockets, options):
            for model in models:
                tell_loading(f"loading {model.name} ...", quiet)
                engine = stack.enter_context(model.make_engine())
                served.append(ServedModel(model.name, engine, model.tool_parser, settings.image_hosts))
        app = create_app(
            served,
            access,
            settings.limits,
            tracing,
            any_name=settings.insecure,
            allow_origins=settings.allow_origins,
        )
        # What is there now stays. A full collection would look at half a million objects and stop all requests meanwhile.
        gc.collect()
        gc.freeze()
        for each in served:
            each.engine.warm_up(wait=False)
        config = uvicorn.Config(app, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on", **options)
        announced(
            config,
            ", ".join(model.name for model in served),
            quiet,
            drain=partial(_drain, app.state.server.gate, quiet),
            is_over=lambda: any(each.engine.is_closed for each in served),
        ).run(sockets)
        for each in served:
            if (failure := each.engine.failure) is not None:
                raise failure


def http_options(settings: ServeSettings) -> dict[str, Any]:
    """What uvicorn is told about connections."""
    return {
        "log_level": settings.log_level,
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
        "access_log": False,
        "http": bounded_http(),
        "ws": "none",
    }


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
    """Sockets bound to an address. They are made before the model is loaded, and do not listen yet."""
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
    except OSError as error:
        for one in made:
            one.close()
        why = error.strerror
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there; --port 0 takes a free one"
        raise ConfigError(f"cannot listen at {host}, port {port}: {why}") from None
    return made


def announced(
    config: uvicorn.Config, name: str, quiet: bool, *, drain: Callable[[], Any], is_over: Callable[[], bool]
) -> Any:
    """A server that prints its address when it listens. It ends when `is_over`, too, and calls `drain` first."""

    class AnnouncedServer(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for server in self.servers:
                for listening in server.sockets:
                    address, port = listening.getsockname()[:2]
                    scheme = "http" if self.config.ssl_certfile is None else "https"
                    where = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
                    pages = f"{where}/ (live view), {where}/docs, {where}/metrics"
                    tell(f"{name} at {where}/v1 (API), {pages}; Ctrl-C ends it", quiet)

        async def on_tick(self, counter: int) -> bool:
            return bool(await super().on_tick(counter)) or is_over()

        async def shutdown(self, sockets: Any = None) -> None:
            drain()
            await super().shutdown(sockets)

    return AnnouncedServer(config)


def _drain(gate: Gate, quiet: bool) -> None:
    """Takes no more requests, and cuts those that are not over a little before uvicorn closes their connections."""
    gate.is_draining = True
    if gate.under_way:
        tell(f"finishing {gate.under_way} requests, for up to {GRACE_SECONDS} s; Ctrl-C ends them", quiet)
    asyncio.get_running_loop().call_later(GRACE_SECONDS - CUT_SECONDS, gate.cut_all)


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """`/health` and `/version` as ever, status 503 for everything else."""
    known = {"/health": {"status": "ok"}, "/version": {"version": __version__}}
    body, status = known.get(scope["path"]), 200
    headers = [(b"content-type", b"application/json")]
    if body is None:
        problem = Problem(503, "the models are being loaded", code="loading")
        body, status = problem.body(), problem.status
        headers.append((b"retry-after", str(_RETRY_SECONDS).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@contextmanager
def answering(sockets: Sequence[socket.socket], options: Mapping[str, Any]) -> Iterator[None]:
    """While it is open, a thread answers on these sockets, which stay open. `options` are those of uvicorn."""
    server = uvicorn.Server(uvicorn.Config(_app, lifespan="off", timeout_graceful_shutdown=1, **options))
    copies = [one.dup() for one in sockets]  # uvicorn closes what it is given
    thread = threading.Thread(target=server.run, args=(copies,), name="kvpool-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
