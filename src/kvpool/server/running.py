"""A server of models from its start to its end: it loads them, serves them, drains and ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from kvpool.cluster.publisher import check_publishing
from kvpool.engine.options import tell, tell_loading
from kvpool.errors import ConfigError
from kvpool.server.auth import Access
from kvpool.server.limits import Gate
from kvpool.server.serve_settings import ModelSettings, ServeSettings
from kvpool.server.tracing import Tracing
from kvpool.web import bounded_http

if TYPE_CHECKING:
    from starlette.types import ASGIApp

GRACE_SECONDS = 30
CUT_SECONDS = 2


def serve_models(settings: ServeSettings, models: Sequence[ModelSettings], access: Access, *, quiet: bool) -> None:
    """Loads the models and serves them until the process is told to end. Raises what ended an engine."""
    tracing = None if settings.traces is None else Tracing.to(settings.traces)
    logging.getLogger("kvpool").setLevel(settings.log_level.upper())
    for model in models:
        model.options.check_model()
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bound(settings.host, settings.port)]
        check_publishing(*(model.options.publish for model in models))
        engines = []
        for model in models:
            tell_loading(f"loading {model.name} ...", quiet)
            engines.append(stack.enter_context(model.make_engine()))
        from kvpool.server.app import create_app  # here, because FastAPI and torch take seconds
        from kvpool.server.served_model import ServedModel

        served = [
            ServedModel(
                model.name,
                engine,
                model.tool_parser,
                settings.image_hosts,
                keeps_varying_lines=model.keep_varying_lines,
            )
            for model, engine in zip(models, engines, strict=True)
        ]
        app = create_app(
            served,
            access,
            settings.limits,
            tracing,
            any_name=settings.insecure,
            allow_origins=settings.allow_origins,
        )
        for each in served:
            if each.engine.tokenizer is not None and each.answers.refusal:
                tell(
                    f"{each.name} cannot use tools, and agents need them: {each.answers.refusal}; docs/agents.md", quiet
                )
        # What is there now stays. A full collection would look at half a million objects and stop all requests meanwhile.
        gc.collect()
        gc.freeze()
        for each in served:
            each.engine.warm_up(wait=False)
        server = ModelServer(
            app,
            settings,
            tell=partial(_tell_address, ", ".join(model.name for model in served), quiet),
            drain=partial(_drain, app.state.server.gate, quiet),
            is_over=lambda: any(each.engine.is_closed for each in served),
        )
        server.run(sockets)
        for each in served:
            if (failure := each.engine.failure) is not None:
                raise failure


class ModelServer(uvicorn.Server):
    """Calls `tell` with each address when it listens, and `drain` before it waits for requests to end.

    It ends at a signal, and within a second when `is_over`.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        *,
        tell: Callable[[str], object],
        drain: Callable[[], object],
        is_over: Callable[[], bool],
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_SECONDS,
            log_level=settings.log_level,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            access_log=False,
            http=bounded_http(),
            ws="none",
            callback_notify=self._look,
            timeout_notify=0,
        )
        super().__init__(config)
        self._tell, self._drain, self._is_over = tell, drain, is_over

    async def _look(self) -> None:
        self.should_exit = self.should_exit or self._is_over()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        scheme = "http" if self.config.ssl_certfile is None else "https"
        for listening in [one for server in self.servers for one in server.sockets]:
            address, port = listening.getsockname()[:2]
            self._tell(f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        await super().shutdown(sockets)


def _tell_address(name: str, quiet: bool, where: str) -> None:
    tell(f"{name} at {where}/v1 (API), {where}/ (live view), {where}/docs, {where}/metrics; Ctrl-C ends it", quiet)


def _drain(gate: Gate, quiet: bool) -> None:
    """Takes no more requests, and cuts those that are not over a little before uvicorn closes their connections."""
    gate.is_draining = True
    if gate.under_way:
        tell(f"finishing {gate.under_way} requests, for up to {GRACE_SECONDS} s; Ctrl-C ends them", quiet)
    asyncio.get_running_loop().call_later(GRACE_SECONDS - CUT_SECONDS, gate.cut_all)


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
    """Sockets bound to an address. They are made before a model is loaded, and do not listen yet."""
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
