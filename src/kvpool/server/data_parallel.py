"""`kvpool serve --data-parallel N`: engines as processes of one machine, behind one address.

The process in front loads no model. It starts the engines (`engine_process`), sends each request to the one where most of its
prompt is cached (`Proxy`), and starts an engine again that has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvpool.cluster.proxy.app import Proxy, create_proxy_app
from kvpool.cluster.proxy.backends import ProxyLimits
from kvpool.cluster.proxy.everywhere import ask, forgotten
from kvpool.cluster.proxy.passing import refusal
from kvpool.engine.options import tell
from kvpool.engine.sizing import CPU_FRACTION
from kvpool.errors import ConfigError, KVPoolError
from kvpool.model.loading import torch_device
from kvpool.server.auth import Access
from kvpool.server.early_server import GRACE_SECONDS, EarlyServer
from kvpool.server.engine_process import EngineProcess, order_of
from kvpool.server.errors import Problem
from kvpool.server.limits import Limits
from kvpool.server.serve_settings import ModelSettings, ServeSettings
from kvpool.storage.memory import free_bytes

MOST_STARTS = 3  # an engine that was never ready in so many starts is given up
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds before an engine that ended is started again: twice as long each time
_LOOK_SECONDS = 0.1
_SILENCE_SECONDS = 86_400.0  # a server without a router in front waits for ever
_HANDOVER_SECONDS = 0.5  # requests that came before the end have reached an engine by then
_KILL_SECONDS = GRACE_SECONDS + 5
log = logging.getLogger("kvpool")


class EngineFront(Proxy):
    """The router in front of engines that it starts, watches and restarts."""

    def __init__(self, engines: Sequence[EngineProcess], access: Access, limits: Limits) -> None:
        super().__init__(
            [engine.backend for engine in engines],
            limits=ProxyLimits(limits.body_bytes, float(limits.send_seconds), silence_seconds=_SILENCE_SECONDS),
            health_seconds=0.5,
            may_look=self._refuse_others,
        )
        self.engines = engines
        self._access = access
        self._restarting: asyncio.Task[None] | None = None
        self._wanted = {engine.name: asyncio.Event() for engine in engines}  # a start, of an engine that was given up
        self._is_ending = False

    @property
    def is_given_up(self) -> bool:
        """Whether no engine is left that could be started."""
        return all(engine.state == "failed" for engine in self.engines)

    def drain(self) -> None:
        """Has every engine answer what it has, and end."""
        self._is_ending = self.view.is_closing = True
        asyncio.get_running_loop().call_later(_HANDOVER_SECONDS, _drain_all, self.engines, _KILL_SECONDS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps the engines running while it is open."""
        async with super().running():
            keeping = asyncio.gather(*(self._keep(engine) for engine in self.engines))
            try:
                yield
            finally:
                keeping.cancel()
                if self._restarting is not None:
                    self._restarting.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    # --- the life of an engine -----------------------------------------------------------------------------------------

    async def _keep(self, engine: EngineProcess) -> None:
        """Starts an engine, and again whenever it ends."""
        num_vain = num_ends = 0  # starts after which it was not ready; ends after less than `_LONGEST_WAIT`
        has_been_ready = False
        while not self._is_ending:
            began = time.monotonic()
            engine.start()
            pid = engine.pid
            log.info("%s starts: pid %s, %s, %s", engine.name, pid, engine.where, engine.backend.url)
            while (how := engine.ended()) is None:
                if engine.state == "starting" and self._is_ready(engine):
                    engine.state, num_vain, has_been_ready = "running", -1, True
                await asyncio.sleep(_LOOK_SECONDS)
            self.backends.note(engine.backend.url, is_ready=False)
            if engine.state == "draining":  # it was asked to end
                num_vain = num_ends = 0
                continue
            num_vain += 1
            num_ends = 1 if time.monotonic() - began > _LONGEST_WAIT else num_ends + 1
            if num_vain == MOST_STARTS or (engine.is_refused and not has_been_ready):
                engine.state = "failed"
                times = "" if num_vain == 1 else f" at each of {num_vain} starts"
                log.error("%s (pid %s) %s%s before it was ready: it is given up", engine.name, pid, how, times)
                await self._wanted[engine.name].wait()
                self._wanted[engine.name].clear()
                num_vain = num_ends = 0
                continue
            engine.state = "waiting"
            seconds = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (num_ends - 1))
            log.error("%s (pid %s) %s: it starts again in %g s", engine.name, pid, how, seconds)
            await asyncio.sleep(seconds)

    def _is_ready(self, engine: EngineProcess) -> bool:
        return self.router.nodes[engine.backend.url].is_ready

    async def restart(self, request: Request) -> Response:
        """Restarts all engines, one after the other. Answers at once; `/route/stats` shows how far it is."""
        if (refused := self._refuse_others(request)) is not None:
            return refused
        if not request.headers.get("content-type", "").startswith("application/json"):
            return refusal(400, "send 'content-type: application/json', which pages of other sites cannot", "no_json")
        if self._restarting is not None and not self._restarting.done():
            return refusal(409, "the engines are being restarted already: /route/stats shows how far", "restarting")
        self._restarting = asyncio.create_task(self._restart_all())
        return JSONResponse({"status": "restarting", "engines": [engine.name for engine in self.engines]}, 202)

    async def _restart_all(self) -> None:
        for engine in self.engines:
            others = [each for each in self.engines if each is not engine]
            while not all(each.state == "failed" or self._is_ready(each) for each in others):
                await asyncio.sleep(_LOOK_SECONDS)
            num_starts = engine.num_starts
            if engine.state == "failed":
                self._wanted[engine.name].set()
            elif engine.state != "waiting":  # then it comes back by itself
                self.backends.note(engine.backend.url, is_ready=False)
                engine.drain(_KILL_SECONDS)
            while engine.num_starts == num_starts or not self._is_ready(engine):
                await asyncio.sleep(_LOOK_SECONDS)
                if engine.state == "failed" and engine.num_starts > num_starts:
                    log.error("%s did not come back: the engines after it are not restarted", engine.name)
                    return
        log.warning("all engines have been restarted")

    def described(self) -> dict[str, Any]:
        """As of a proxy, with the names and the processes of the engines."""
        told = super().described()
        for engine in self.engines:
            node = told["nodes"][engine.backend.url]
            own = {"name": engine.name, "pid": engine.pid, "device": engine.where, "num_starts": engine.num_starts}
            node |= own if engine.state == "running" else {**own, "state": engine.state}
        return told

    # --- what every engine is asked for ----------------------------------------------------------------------------------

    def _refuse_others(self, request: Request) -> Response | None:
        """The answer to somebody who is no administrator."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")
        try:
            if self._access.caller(key).is_admin:
                return None
        except Problem as problem:
            return JSONResponse(problem.body(), problem.status)
        return refusal(403, "this tells of all tenants: it needs an admin key", "forbidden")

    async def ready(self, request: Request) -> Response:
        """Whether an engine at least takes requests, and the state of each."""
        nodes = self.described()["nodes"]
        states = {engine.name: nodes[engine.backend.url]["state"] for engine in self.engines}
        if self._is_ending:
            return refusal(503, "the server is shutting down", "draining")
        if "ready" in states.values():
            return JSONResponse({"status": "ready", "engines": states})
        told = ", ".join(f"{name} is {state}" for name, state in states.items())
        return refusal(503, f"no engine is ready: {told}", "loading")

    async def health(self, request: Request) -> Response:
        """Whether the process in front answers."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """The metrics of all engines, told apart by the label `engine`."""
        if (refused := self._refuse_others(request)) is not None:
            return refused
        texts = [None if one is None else one.text for one in await self._everywhere(request, b"")]
        text = await asyncio.to_thread(_merged, self._own_metrics(), texts)
        return Response(text, media_type="text/plain; version=0.0.4")

    def _own_metrics(self) -> list[Metric]:
        ready = GaugeMetricFamily("kvpool_engine_ready", "1 if the engine takes requests.", labels=["engine"])
        starts = CounterMetricFamily("kvpool_engine_starts", "How often the engine was started.", labels=["engine"])
        for number, engine in enumerate(self.engines):
            ready.add_metric([str(number)], float(self._is_ready(engine)))
            starts.add_metric([str(number)], engine.num_starts)
        return [ready, starts]

    async def invalidate(self, request: Request) -> Response:
        """Forgets something in every engine. If one does not answer, the caller must ask again."""
        answers = await self._everywhere(request, await request.body())
        return forgotten({engine.name: one for engine, one in zip(self.engines, answers, strict=True)})

    async def pins(self, request: Request) -> Response:
        """The caller's own pins in every engine."""
        answers = await self._everywhere(request, b"")
        found = [one.json()["pins"] for one in answers if one is not None and one.status_code == 200]
        return _refused(answers) or JSONResponse({"pins": [pin for pins in found for pin in pins]})

    async def unpin(self, request: Request) -> Response:
        """Ends a pin, in the engine that has it."""
        answers = await self._everywhere(request, b"")
        ended = next((one for one in answers if one is not None and one.status_code == 200), None)
        return _refused(answers) or refusal(503, "no engine answers") if ended is None else _passed(ended)

    async def stats(self, request: Request) -> Response:
        """What the caches count, by engine."""
        answers = zip(self.engines, await self._everywhere(request, b""), strict=True)
        found = {engine.name: one for engine, one in answers if one is not None}
        refused = _refused(found.values())
        return refused or JSONResponse({name: one.json() for name, one in found.items() if one.status_code == 200})

    async def _everywhere(self, request: Request, content: bytes) -> list[httpx.Response | None]:
        """What every engine answers; None for one that does not."""

        async def asked(engine: EngineProcess) -> httpx.Response | None:
            return await ask(self._client, engine.backend.url, request, content) if self._is_ready(engine) else None

        return await asyncio.gather(*(asked(engine) for engine in self.engines))

    def routes(self) -> list[Route]:
        """The paths that are not passed on to one engine."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/route/restart", self.restart, methods=["POST"]),
            Route("/v1/cache/invalidate", self.invalidate, methods=["POST"]),
            Route("/v1/cache/pin", self.pins),
            Route("/v1/cache/pin/{name}", self.unpin, methods=["DELETE"]),
            Route("/v1/cache/stats", self.stats),
        ]


def _merged(own: Iterable[Metric], texts: Sequence[str | None]) -> bytes:
    """Our metrics and those of each engine in Prometheus's text form, each with its number as a label."""
    families = {metric.name: metric for metric in own}
    for number, text in enumerate(texts):
        for family in text_string_to_metric_families(text or ""):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [each._replace(labels={"engine": str(number), **each.labels}) for each in family.samples]
    registry = CollectorRegistry()
    registry.register(_Collected(families.values()))
    return bytes(generate_latest(registry))


class _Collected(NamedTuple):
    """Metrics that are there already, as prometheus_client takes them."""

    metrics: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def _refused(answers: Iterable[httpx.Response | None]) -> Response | None:
    """The first answer that says that the caller did something wrong."""
    wrong = (one for one in answers if one is not None and 400 <= one.status_code < 500)
    return next((_passed(one) for one in wrong), None)


def _passed(answer: httpx.Response) -> Response:
    return JSONResponse(json.loads(answer.content), answer.status_code)


def serve_engines(
    server: EarlyServer, settings: ServeSettings, model: ModelSettings, access: Access, asked: Any, *, quiet: bool
) -> None:
    """Starts the engines and has the server serve them until the process is told to end.

    `asked` is what `read_serve` took. Nothing of the engines is left on return.
    """
    count = settings.data_parallel
    places = engine_places(model, count)
    if not quiet:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
    log.setLevel(settings.log_level.upper())
    with ExitStack() as stack:
        events = stack.enter_context(TemporaryDirectory(prefix="kvpool-"))  # nobody else may look into it
        engines = []
        for number, (where, changes, environment) in enumerate(places):
            port = stack.enter_context(_free_port()).getsockname()[1]
            order = order_of(number, port, f"ipc://{events}/{number}", asked, **changes)
            engines.append(EngineProcess(order, where, environment))
        front = EngineFront(engines, access, settings.limits)
        app = create_proxy_app(front, any_name=settings.insecure or not access.is_open, routes=front.routes())
        tell(f"starting {count} engines of {model.name} ...", quiet)
        stack.callback(lambda: _end(engines, 0.0 if server.force_exit else _KILL_SECONDS))
        name = f"{model.name}, {count} engines,"
        server.hand_over(app, name, quiet, drain=front.drain, is_over=lambda: front.is_given_up)
        if front.is_given_up:
            raise KVPoolError(f"none of the {count} engines could be started; the lines above say why")


def engine_places(model: ModelSettings, count: int) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """Where each engine runs: in words, as changes of its options, and as variables of its environment."""
    options = model.options
    device = torch_device(options.device)
    if device.type == "cpu":
        threads = max(1, torch.get_num_threads() // count)
        memory = options.memory or str(int(free_bytes("cpu") * CPU_FRACTION) // count)
        environment = {"OMP_NUM_THREADS": str(threads)}
        return [(f"cpu with {threads} threads", {"memory": memory}, environment)] * count
    if device.index is not None:
        if options.memory is None:
            raise ConfigError(
                f"--device {device} is for all {count} engines: give --memory, what the cache of each takes"
            )
        return [(str(device), {}, {})] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = torch.cuda.device_count()
    if found < count:
        raise ConfigError(
            f"--data-parallel {count} needs {count} GPUs, but torch finds {found}; use fewer engines, or --device cpu"
        )
    names = visible.split(",") if visible else [str(number) for number in range(found)]
    return [(f"cuda:{number}", {"device": "cuda"}, {"CUDA_VISIBLE_DEVICES": names[number]}) for number in range(count)]


def _free_port() -> socket.socket:
    """A socket at a free port of this machine. It does not listen: an engine may bind the same port, others may not."""
    one = socket.socket()
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    except BaseException:
        one.close()
        raise
    return one


def _drain_all(engines: Sequence[EngineProcess], seconds: float) -> None:
    for engine in engines:
        engine.drain(seconds)


def _end(engines: Sequence[EngineProcess], seconds: float) -> None:
    """Ends the engines that still run; kills them if that takes so long."""
    _drain_all(engines, seconds)
    for engine in engines:
        engine.wait()
