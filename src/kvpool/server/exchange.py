"""One request of a client: runs its prompts, sends the answer whole or as a stream, and ends what still runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.engine.generation import Chunk
from kvpool.engine.params import SamplingParams
from kvpool.engine.pictures import PicturedPrompt
from kvpool.pools.arrays import Int32Array
from kvpool.server.agent_fields import LEFT_OUT_HEADER
from kvpool.server.answered import Answered, AnsweredRequests, missed_header
from kvpool.server.answers import Writer
from kvpool.server.auth import Caller
from kvpool.server.errors import Problem
from kvpool.server.latencies import Latencies, RequestMeter
from kvpool.server.limits import Gate
from kvpool.server.parameters import pins_of, request_options
from kvpool.server.pins import TenantPins
from kvpool.server.schema import Sampling
from kvpool.server.served_model import LiveRequest, ServedModel
from kvpool.server.sessions import begin_session, end_session, session_of, session_of_history
from kvpool.server.tools import Dialogue
from kvpool.server.tracing import RequestTrace, Tracing
from kvpool.web import EventStream, unless_gone


class RequestContext(NamedTuple):
    """What all requests of a server share: limits, latencies, pins, what was answered, and tracing."""

    gate: Gate
    latencies: Latencies
    pins: TenantPins
    answered: AnsweredRequests
    tracing: Tracing | None = None


class Exchange:
    """One request of a client. Its prompts run together, and their samples are numbered one after the other."""

    def __init__(
        self,
        request: Request,
        body: Sampling,
        model: ServedModel,
        caller: Caller,
        context: RequestContext,
        answer: Writer,
    ) -> None:
        self._request = request
        self._body = body
        self._model = model
        self._caller = caller
        self._gate = context.gate
        self._latencies = context.latencies
        self._pins = context.pins
        self._answered = context.answered
        self._tracing = context.tracing
        self._trace: RequestTrace | None = None
        self._meter: RequestMeter | None = None
        self._trouble = ""  # why it ended early
        self._is_cut = False
        self._writer = answer
        self._headers: dict[str, str] = {}
        self._begun: Dialogue | None = None
        self._told = session_of(body, request.headers)
        self._name = self._told.name or request.state.id
        self._running: list[LiveRequest] = []
        self._stack = ExitStack()

    async def answer(self, begun: Dialogue, params: SamplingParams, **more: Any) -> Response:
        """Answers a dialogue. A header names the fields of the request that change nothing."""
        if begun.left_out:
            self._headers[LEFT_OUT_HEADER] = ", ".join(begun.left_out)
        self._begun = begun
        return await self.run([begun.prompt], params, offers_tools=bool(begun.use.tools), **more)

    async def run(
        self, prompts: Sequence[Int32Array | PicturedPrompt], params: SamplingParams, **more: Any
    ) -> Response:
        """Queues the prompts and answers, at the end or as a stream. `more` are further options for the engine."""
        limit = min(self._gate.limits.prompt_tokens, self._model.longest_prompt)
        for prompt in prompts:
            if len(prompt) > limit:
                words = self._writer.too_long.format(tokens=len(prompt), limit=limit)
                raise Problem(400, words, code="context_length_exceeded")
        options = request_options(self._body, self._caller, self._told.name or session_of_history(self._body))
        options |= {name: value for name, value in more.items() if value is not None}
        images = [
            prompt.pictures.num_bytes for prompt in prompts if isinstance(prompt, PicturedPrompt) and prompt.pictures
        ]
        if pins_of(self._body):
            if images:
                raise Problem(400, "a pin in retention takes texts only", code="unsupported", param="retention")
            if len(prompts) > 1:
                raise Problem(
                    400, "a pin in retention needs a request with one prompt", code="invalid_value", param="retention"
                )
            await self._pins.check_room(self._caller.tenant)
        self._stack.enter_context(self._gate.passed(self._caller.key, len(prompts)))
        self._stack.enter_context(self._gate.cutting(self._cut))
        try:
            if any(images):
                self._stack.enter_context(self._gate.holding(self._caller.key, sum(images)))
            self._meter = self._latencies.begin(self._model.base_name, self._caller.tenant)
            if self._tracing is not None:
                request, names = self._request, (self._request.state.id, self._model.name, self._caller.tenant)
                asked = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "seed")}
                asked |= {"max_tokens": params.max_new_tokens, "choice.count": params.n if params.n > 1 else None}
                self._trace = self._tracing.begin(request.headers, request.url.path, asked, *names)
            await begin_session(self._told, self._model, self._caller)
            await self._model.scope(self._caller.tenant, "")  # reads an adapter's files outside of the event loop
            for prompt in prompts:
                self._running.append(self._model.start(prompt, params, self._name, **options))
            if self._body.stream:
                parts = self._events()
                # an error before the first part still gets an HTTP status
                first: bytes | None = await unless_gone(self._request, anext(parts))
                if first is not None:
                    self._tell_why()
                    seconds = self._gate.limits.send_seconds
                    return EventStream(self._after(first, parts), self._leave, seconds, self._headers)
                result = None
            else:
                result = await unless_gone(self._request, self._whole())
        except BaseException as error:
            self._trouble = _in_full(error)
            self._leave()
            raise
        self._leave()
        return Response(status_code=499) if result is None else JSONResponse(result, headers=self._headers)

    def _tell_why(self) -> None:
        """Says in a header why prompts missed, and keeps it for who asks later."""
        generations = [running.generation for running in self._running]
        self._headers |= missed_header(generations)
        names = self._request.state.id, self._writer.id
        self._answered.keep(self._caller.tenant, names, Answered.of(self._model, generations))

    def _leave(self) -> None:
        """The answer is complete, or the client has left: cancels what still runs."""
        generations = [running.generation for running in self._running]
        is_over = all(generation.is_over for generation in generations)
        if self._meter is not None:
            self._tell_why()
            self._meter.end(generations, "failed" if self._trouble else "completed" if is_over else "left")
            self._meter = None
        if self._trace is not None:
            self._trace.end(generations, self._trouble or ("" if is_over else "the client left"))
            self._trace = None
        for running in self._running:
            running.cancel()
        end_session(self._told, self._model, self._caller)
        self._stack.close()

    def _cut(self) -> None:
        """The server is about to end: what still runs is cancelled, and the client is told."""
        self._is_cut = True
        for running in self._running:
            running.generation.cancel()

    def _check_cut(self) -> None:
        if self._is_cut:
            words = "the server shut down before the answer was complete; ask another one"
            raise Problem(503, words, code="draining", retry_after=5)

    async def _pin(self, running: LiveRequest) -> None:
        """Pins what the client asked for. At the first token the prompt is computed, and the request holds its blocks."""
        made: list[dict[str, Any]] = []
        tenant = self._caller.tenant
        scope = await self._model.scope(tenant, self._body.cache_salt)
        try:
            for kept in pins_of(self._body):
                prompt = PicturedPrompt(running.generation.prompt[: kept.end])
                made.append(await self._pins.pin(tenant, self._model, prompt, scope, kept.ttl_seconds))
        except (Problem, asyncio.CancelledError):  # all pins or none, because the client would not learn their names
            for pin in made:
                await self._pins.unpin(tenant, pin["id"])
            raise
        if made:
            self._headers["x-kvpool-pins"] = ",".join(pin["id"] for pin in made)

    async def _note(self, running: LiveRequest, news: Sequence[Chunk]) -> None:
        """New tokens of a request arrived."""
        if running.last is None and self._body.retention:
            await self._pin(running)
        assert self._meter is not None
        seconds = self._meter.tokens(running, news)
        if self._trace is not None and seconds is not None:
            self._trace.step(seconds)

    def _keep_answers(self) -> None:
        """The answers to a dialogue are there: its next turn may hold one of them."""
        if self._begun is not None:
            generation = self._running[0].generation
            self._model.keep_answers(self._begun, generation, self._caller.tenant, self._body.cache_salt)

    async def _whole(self) -> dict[str, Any]:
        for running in self._running:
            async for news in running:
                await self._note(running, news)
        self._check_cut()
        self._keep_answers()
        return self._writer.whole([running.generation for running in self._running])

    async def _after(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """All parts. An error after the first part goes into the stream, because the status is already sent."""
        yield first
        try:
            async for part in rest:
                yield part
        except Problem as problem:
            yield self._writer.failed(problem)

    async def _events(self) -> AsyncIterator[bytes]:
        """The events of the stream. Events that are there at the same time are sent together."""
        try:
            async for number, news in _merged(self._running):
                self._check_cut()
                running = self._running[number]
                await self._note(running, news)
                first = number * self._body.n
                yield b"".join(self._writer.part(first + chunk.sample, chunk, running.generation) for chunk in news)
            self._check_cut()
            self._keep_answers()
        except Problem as problem:
            self._trouble = _in_full(problem)
            raise
        yield self._writer.end([running.generation for running in self._running])


def _in_full(error: BaseException) -> str:
    """What went wrong, for the operator, with what the client is not told."""
    return str(error.__cause__ or error) or type(error).__name__


async def _merged(running: Sequence[LiveRequest]) -> AsyncIterator[tuple[int, list[Chunk]]]:
    """The chunks of several requests as they come, each with the number of its request."""
    if len(running) == 1:
        async for news in running[0]:
            yield 0, news
        return
    streams = {number: one.__aiter__() for number, one in enumerate(running)}
    waiting = {asyncio.ensure_future(anext(stream)): number for number, stream in streams.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    news = task.result()
                except StopAsyncIteration:
                    continue
                yield number, news
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for task in waiting:
            task.cancel()
