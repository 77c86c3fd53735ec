"""The ASGI application: its routes, and the checks that every request passes first."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpool.cluster.translator import item_name, scope_keys
from kvpool.errors import ConfigError, KVPoolError
from kvpool.server.answered import AnsweredRequests
from kvpool.server.auth import Access, Caller
from kvpool.server.cache_routes import CacheRoutes, prefill
from kvpool.server.completions import chat, complete
from kvpool.server.embeddings import Embeddings, embed
from kvpool.server.errors import Problem, problem_of, problem_of_body
from kvpool.server.exchange import RequestContext
from kvpool.server.limits import Gate, InTurns, Limits
from kvpool.server.live_view import LiveViews
from kvpool.server.messages import CountTokens, Messages, converse, count_tokens
from kvpool.server.metrics import Metrics
from kvpool.server.parameters import asker_of
from kvpool.server.pins import TenantPins
from kvpool.server.prompts import CacheQuery, Invalidation, PinnedPrompt, PromptForOthers, named_prompt
from kvpool.server.responses import Responses, respond
from kvpool.server.schema import (
    REFUSALS,
    STREAMED,
    ChatCompletions,
    Completions,
    Detokenize,
)
from kvpool.server.served_model import ServedModel
from kvpool.server.sessions import ForkOfSession, OfSession, PauseOfSession, SessionRoutes
from kvpool.server.tracing import Tracing
from kvpool.version import __version__
from kvpool.web import BodyLimit, LocalNames

_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")  # an id that a client may choose


class Server:
    """What the routes share: models, access, limits and metrics."""

    def __init__(
        self, models: Sequence[ServedModel], access: Access, limits: Limits, tracing: Tracing | None = None
    ) -> None:
        if not models:
            raise ConfigError("a server needs at least one model")
        self.models = {model.name: model for model in models}
        names = [name for model in models for name in (model.name, *model.engine.adapters)]
        if len(set(names)) < len(names):
            raise ConfigError(f"two models or adapters have the same name: {', '.join(names)}")
        for model in models:
            for tenant, quota in access.quotas.items():
                model.engine.manager.cache.set_quota(tenant, guaranteed=quota.guaranteed, maximum=quota.maximum)
        self.access = access
        self.gate = Gate(limits)
        self.metrics = Metrics(models)
        pins = TenantPins(limits.pins_per_tenant)
        answered = AnsweredRequests()
        self.cache = CacheRoutes(pins, self.gate, answered)
        self.context = RequestContext(self.gate, self.metrics.latencies, pins, answered, tracing)
        self.views = LiveViews(models, self.metrics.latencies, self.gate)

    def model(self, name: str) -> ServedModel:
        """The model of that name, or the model with the adapter of that name; the only model needs no name."""
        if not name and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name in self.models:
            return self.models[name]
        for model in self.models.values():
            if name in model.engine.adapters:
                return model.with_adapter(name)
        known = ", ".join(one["id"] for one in self.described())
        raise Problem(404, f"there is no model {name!r} here; served: {known}", code="model_not_found", param="model")

    def described(self) -> list[dict[str, Any]]:
        """All models and adapters, as clients see them."""
        found = []
        for model in self.models.values():
            found += [_described(model), *(_described(model, name) for name in model.engine.adapters)]
        return found

    def refused(self, status: int, message: str, code: str) -> JSONResponse:
        """The answer to a request that is refused before it reaches a route, for its body or its `Host` header."""
        return self.refusal(Problem(status, message, code=code))

    def refusal(self, problem: Problem) -> JSONResponse:
        """The answer to a refused request. Counts it."""
        self.metrics.latencies.refused(problem.status)
        return JSONResponse(problem.body(), problem.status, problem.headers)


def create_app(
    models: Sequence[ServedModel],
    access: Access | None = None,
    limits: Limits | None = None,
    tracing: Tracing | None = None,
    *,
    any_name: bool = False,
    allow_origins: Sequence[str] = (),
) -> FastAPI:
    """An ASGI application that serves the models. Without `access` it answers everybody.

    `tracing` sends spans of requests to OpenTelemetry; it is closed with the application. Without keys, a request to a
    loopback address must name that address in its `Host` header, unless `any_name`. Clients do so; web pages of other sites
    cannot. Pages of `allow_origins` may (CORS).
    """
    server = Server(models, access or Access(), limits or Limits(), tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.gate.is_draining = True
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="kvpool", version=__version__, lifespan=lifespan, responses=REFUSALS, docs_url=None, redoc_url=None
    )
    app.state.server = server
    bounds = server.gate.limits
    app.add_middleware(BodyLimit, limit=bounds.body_bytes, seconds=bounds.send_seconds, refuse=server.refused)
    if server.access.is_open and not any_name:
        remedy = "set keys, or start it with --insecure if a proxy in front checks who asks"
        app.add_middleware(LocalNames, refuse=server.refused, remedy=remedy)
    if allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allow_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    app.add_middleware(RequestIds)
    app.add_middleware(InTurns)
    _add_refusals(app, server)
    _add_looks(app, server)
    _add_generation(app, server)
    _add_cache(app, server)
    _add_sessions(app, server)
    _add_live_view(app, server)
    return app


def _caller_of(server: Server) -> Any:
    if server.access.is_open:

        async def anybody() -> Caller:
            return Caller()

        return Depends(anybody)

    async def caller(  # async, like the one above, because FastAPI runs other functions in a thread
        bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
        key: Annotated[str | None, Depends(APIKeyHeader(name="x-api-key", auto_error=False))],
    ) -> Caller:
        return server.access.caller(key if bearer is None else bearer.credentials)

    return Depends(caller)


def _require_admin(caller: Caller) -> None:
    if not caller.is_admin:
        raise Problem(403, "statistics tell of all tenants: they need an admin key", code="forbidden")


def _add_refusals(app: FastAPI, server: Server) -> None:
    @app.exception_handler(Problem)
    async def refuse(_: Request, problem: Problem) -> Response:
        return server.refusal(problem)

    @app.exception_handler(KVPoolError)
    async def refuse_as_the_library_did(_: Request, error: KVPoolError) -> Response:
        return server.refusal(problem_of(error))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Request, error: RequestValidationError) -> Response:
        return server.refusal(problem_of_body(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else None
        headers = {"allow": _methods_at(app, request)} if error.status_code == 405 else error.headers
        return server.refusal(Problem(error.status_code, message, code=code, headers=headers))

    @app.exception_handler(Exception)
    async def admit(request: Request, error: Exception) -> Response:  # its traceback is logged by the server
        named = {"x-request-id": request.state.id}  # `RequestIds` does not see this answer
        return server.refusal(Problem(500, f"this server failed: {type(error).__name__}", code="failed", headers=named))


def _methods_at(app: FastAPI, request: Request) -> str:
    """The methods of all routes with the path of a request. The router itself names only those of the first route."""
    found = {
        method
        for route in app.router.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return ", ".join(sorted(found))


def _add_looks(app: FastAPI, server: Server) -> None:
    caller_of = _caller_of(server)

    def check() -> None:
        if server.gate.is_draining:
            raise Problem(503, "the server is shutting down", code="draining")
        if closed := next((name for name, model in server.models.items() if model.engine.is_closed), None):
            raise Problem(503, f"the engine of {closed!r} has ended", code="unavailable")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether a request would be answered."""
        check()
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of kvpool."""
        return {"version": __version__}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        """Whether requests are accepted, and how many are under way."""
        check()
        return {"status": "ready", "under_way": server.gate.under_way}

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(caller: Caller = caller_of) -> Response:  # not async: the engines are asked in a thread
        """Everything counted, for Prometheus; for administrators, since it tells of all tenants."""
        _require_admin(caller)
        return PlainTextResponse(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def list_models(caller: Caller = caller_of) -> dict[str, Any]:
        """The models that are served, and their adapters."""
        found = server.described()
        pages = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}  # for Anthropic's clients
        return {"object": "list", "data": found, **pages}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, caller: Caller = caller_of) -> dict[str, Any]:
        """One of them."""
        server.model(name)
        return next(one for one in server.described() if one["id"] == name)

    @app.post("/tokenize")
    async def tokenize(body: CacheQuery, caller: Caller = caller_of) -> dict[str, Any]:
        """Token ids of the prompt of any request; `cache_keys`, `lora_name` and `images` are what isolates it in events."""
        model = server.model(body.model)
        with ExitStack() as held:
            prompt = await named_prompt(body, model, caller, server.gate, held)
        adapter, keys = scope_keys(await model.scope(caller.tenant, body.cache_salt))
        limit, items = model.engine.config.max_seq_len, prompt.pictures.items if prompt.pictures else ()
        told = {"max_model_len": limit, "cache_keys": list(keys), "lora_name": adapter}
        images = [[item.position, item.length, item_name(item)] for item in items]
        return {"tokens": prompt.token_ids.tolist(), "count": len(prompt), **told, "images": images}

    @app.post("/detokenize")
    async def detokenize(body: Detokenize, caller: Caller = caller_of) -> dict[str, Any]:
        """The text of token ids."""
        model = server.model(body.model)
        return {"prompt": model.text_of((await model.tokens(body.tokens)).tolist())}


def _described(model: ServedModel, adapter: str | None = None) -> dict[str, Any]:
    limit = model.engine.config.max_seq_len
    name = adapter or model.name
    told = {"id": name, "object": "model", "created": 0, "owned_by": "kvpool", "max_model_len": limit}
    told |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's fields
    return told if adapter is None else {**told, "parent": model.name}


def _add_generation(app: FastAPI, server: Server) -> None:
    caller_of = _caller_of(server)

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(request: Request, body: ChatCompletions, caller: Caller = caller_of) -> Response:
        """Answers a conversation, as OpenAI's endpoint does."""
        return await chat(request, body, server.model(body.model), caller, server.context)

    @app.post("/v1/completions", responses=STREAMED)
    async def completions(request: Request, body: Completions, caller: Caller = caller_of) -> Response:
        """Continues prompts, as OpenAI's endpoint does."""
        return await complete(request, body, server.model(body.model), caller, server.context)

    @app.post("/v1/responses", responses=STREAMED)
    async def responses(request: Request, body: Responses, caller: Caller = caller_of) -> Response:
        """Answers a conversation, as OpenAI's newer endpoint does."""
        return await respond(request, body, server.model(body.model), caller, server.context)

    @app.post("/v1/messages", responses=STREAMED)
    async def messages(request: Request, body: Messages, caller: Caller = caller_of) -> Response:
        """Answers a conversation, as Anthropic's endpoint does."""
        return await converse(request, body, server.model(body.model), caller, server.context)

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountTokens, caller: Caller = caller_of) -> dict[str, int]:
        """How many tokens a conversation has, as Anthropic's endpoint does."""
        return await count_tokens(body, server.model(body.model), asker_of(body, caller, server.gate))

    @app.post("/v1/prefill", responses=STREAMED)
    async def prefill_prompt(request: Request, body: PromptForOthers, caller: Caller = caller_of) -> Response:
        """Computes a prompt for another server, which finds its blocks in the tier that both have."""
        return await prefill(request, body, server.model(body.model), caller, server.gate)

    @app.post("/v1/embeddings")
    async def embeddings(body: Embeddings, caller: Caller = caller_of) -> dict[str, Any]:
        """A vector for each text, pooled from the model's hidden states."""
        return await embed(body, server.model(body.model), caller, server.gate)


def _add_cache(app: FastAPI, server: Server) -> None:
    caller_of, cache = _caller_of(server), server.cache

    @app.post("/v1/cache/query")
    async def query(body: CacheQuery, caller: Caller = caller_of) -> dict[str, Any]:
        """How much of a prompt is cached."""
        return await cache.query(body, server.model(body.model), caller)

    @app.get("/v1/cache/requests/{name:path}")
    async def request(name: str, caller: Caller = caller_of) -> dict[str, Any]:
        """Why the prompt of a request missed that was answered lately; by its id, or that of its answer."""
        return cache.request(name, caller)

    @app.post("/v1/cache/pin")
    async def pin(body: PinnedPrompt, caller: Caller = caller_of) -> dict[str, Any]:
        """Keeps a cached prompt."""
        return await cache.pin(body, server.model(body.model), caller)

    @app.get("/v1/cache/pin")
    async def pins(caller: Caller = caller_of) -> dict[str, Any]:
        """The caller's own pins."""
        return await cache.pins(caller)

    @app.delete("/v1/cache/pin/{name}")
    async def unpin(name: str, caller: Caller = caller_of) -> dict[str, Any]:
        """Ends a pin."""
        return await cache.unpin(name, caller)

    @app.post("/v1/cache/invalidate")
    async def invalidate(body: Invalidation, caller: Caller = caller_of) -> dict[str, Any]:
        """Forgets a prompt, a session, or everything of the caller's; of another tenant's with an admin key."""
        return await cache.invalidate(body, server.model(body.model), caller)

    @app.post("/v1/cache/warm")
    async def warm(body: CacheQuery, caller: Caller = caller_of) -> dict[str, Any]:
        """Computes a prompt ahead of its use."""
        with server.gate.passed(caller.key):
            return await cache.warm(body, server.model(body.model), caller)

    @app.post("/v1/cache/prefetch")
    async def prefetch_prompt(body: CacheQuery, caller: Caller = caller_of) -> dict[str, Any]:
        """Brings what tiers have of a prompt into the cache."""
        with server.gate.passed(caller.key):
            return await cache.prefetch(body, server.model(body.model), caller)

    @app.get("/v1/cache/stats")
    def stats(caller: Caller = caller_of) -> dict[str, Any]:  # not async: the engines are asked in a thread
        """What the caches count; for administrators, since it tells of all tenants."""
        _require_admin(caller)
        return cache.stats(list(server.models.values()))


def _add_sessions(app: FastAPI, server: Server) -> None:
    caller_of, sessions = _caller_of(server), SessionRoutes()

    @app.get("/v1/sessions")
    async def all_sessions(model: str = "", caller: Caller = caller_of) -> dict[str, Any]:
        """The caller's own sessions that have not ended."""
        return await sessions.list(server.model(model), caller)

    @app.get("/v1/sessions/{name:path}")
    async def session(name: str, model: str = "", caller: Caller = caller_of) -> dict[str, Any]:
        """What is cached of a session, and what it would cost to go on."""
        return await sessions.get(name, server.model(model), caller)

    @app.post("/v1/sessions/{name:path}/pause")
    async def pause(name: str, body: PauseOfSession | None = None, caller: Caller = caller_of) -> dict[str, Any]:
        """A session waits for a tool or a person; it may move to the host."""
        body = body or PauseOfSession()
        return await sessions.pause(name, body, server.model(body.model), caller)

    @app.post("/v1/sessions/{name:path}/resume")
    async def resume(name: str, body: OfSession | None = None, caller: Caller = caller_of) -> dict[str, Any]:
        """A session goes on soon: brings it to the GPU."""
        return await sessions.resume(name, server.model((body or OfSession()).model), caller)

    @app.post("/v1/sessions/{name:path}/fork")
    async def fork(name: str, body: ForkOfSession, caller: Caller = caller_of) -> dict[str, Any]:
        """A session calls a sub-agent."""
        return await sessions.fork(name, body, server.model(body.model), caller)

    @app.post("/v1/sessions/{name:path}/end")
    async def end(name: str, body: OfSession | None = None, caller: Caller = caller_of) -> dict[str, Any]:
        """A session is over: gives up what only it used."""
        return await sessions.end(name, server.model((body or OfSession()).model), caller)


def _add_live_view(app: FastAPI, server: Server) -> None:
    caller_of, views = _caller_of(server), server.views

    @app.get("/view/stream", include_in_schema=False)
    async def stream(model: str = "", caller: Caller = caller_of) -> Response:
        """What the cache of a model does, as it does it; for administrators."""
        return await views.stream(server.model(model or next(iter(server.models))), caller)

    @app.get("/view/block", include_in_schema=False)
    def block(
        id: int, pool: int = 0, tier: str = "GPU", model: str = "", caller: Caller = caller_of
    ) -> dict[str, Any]:  # not async: the manager is asked in a thread
        """Whose a block is; for administrators."""
        return views.block(server.model(model or next(iter(server.models))), caller, pool, tier, id)

    @app.post("/view/prompt", include_in_schema=False)
    async def prompt(body: CacheQuery, caller: Caller = caller_of) -> dict[str, Any]:
        """Which tokens of a prompt come from the cache."""
        return await views.prompt(body, server.model(body.model), caller)

    @app.head("/", include_in_schema=False)  # agents ask so whether anybody is there
    @app.get("/", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    @app.get("/view/{name}", include_in_schema=False)
    async def page(request: Request) -> Response:
        """The page of the live view, that of the API, and the files that they load."""
        return views.page(request.url.path)


class RequestIds:
    """Gives each request an id: the client's, or a new one.

    Routes find it in `request.state.id`, and the answer has it in `x-request-id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}".encode()
        scope.setdefault("state", {})["id"] = name.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, named)
