"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.engine.generation import Chunk
from kvpool.engine.sampling.params import SamplingParams
from kvpool.pools.arrays import Int32Array
from kvpool.server.access import Caller
from kvpool.server.answers import ChatAnswer, TextAnswer, Writer
from kvpool.server.limits import Gate
from kvpool.server.metrics import Latencies
from kvpool.server.parameters import request_options, sampling_params
from kvpool.server.problems import Problem
from kvpool.server.schema import ChatCompletions, Completions, Message, Sampling
from kvpool.server.served import LiveRequest, ServedModel
from kvpool.server.streams import EventStream, as_event, unless_gone

_CHAT_TOKENS = 2**31 - 1  # as many as the context has room for: the engine cuts it


async def complete(
    request: Request, body: Completions, model: ServedModel, caller: Caller, gate: Gate, latencies: Latencies
) -> Response:
    """Answers a request for completions, of one prompt or several."""
    if body.suffix is not None:
        raise Problem(400, "suffix is not supported: the model continues a prompt", code="unsupported", param="suffix")
    prompts = await asyncio.gather(*(model.tokens(prompt) for prompt in _prompts(body.prompt)))
    params = sampling_params(body, gate.limits, body.max_tokens, body.logprobs)
    echoes = [model.text_of(prompt.tolist()) for prompt in prompts] if body.echo else []
    answer = TextAnswer(model.name, _pieces(model), echoes, body.n)
    return await _Exchange(request, body, model, caller, gate, latencies, answer).run(prompts, params)


async def chat(
    request: Request, body: ChatCompletions, model: ServedModel, caller: Caller, gate: Gate, latencies: Latencies
) -> Response:
    """Answers a conversation."""
    if body.response_format is not None and body.response_format.type != "text":
        raise Problem(
            400, f"response_format {body.response_format.type!r} is not supported yet; ask for text",
            code="unsupported", param="response_format",
        )  # fmt: skip
    prompt = await conversation_tokens(model, body.messages, body.tools, body.chat_template_kwargs)
    most = body.max_completion_tokens or body.max_tokens or _CHAT_TOKENS
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, gate.limits, most, wanted)
    answer = ChatAnswer(model.name, _pieces(model))
    return await _Exchange(request, body, model, caller, gate, latencies, answer).run([prompt], params)


async def conversation_tokens(
    model: ServedModel,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    template: dict[str, Any] | None = None,
) -> Int32Array:
    """The token ids of a conversation; parts of a message that are texts are joined."""
    spoken = []
    for number, message in enumerate(messages):
        turn = message.model_dump(exclude_none=True)
        turn["content"] = _text_of(message.content, number)
        spoken.append(turn)
    more = {**(template or {}), **({"tools": tools} if tools else {})}
    return await model.chat_tokens(spoken, **more)


def _text_of(content: str | list[dict[str, Any]] | None, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise Problem(
                400, f"message {number} has a part of type {part.get('type')!r}; this model reads text only",
                code="unsupported", param=f"messages.{number}.content",
            )  # fmt: skip
    return "".join(part["text"] for part in content)


def _prompts(given: Any) -> list[Any]:
    """The prompts of a body: one text, one list of tokens, or several of either."""
    several = isinstance(given, list) and not isinstance(given[0], int)
    return given if several else [given]


def _pieces(model: ServedModel) -> Any:
    return lambda token: model.text_of([token])


class _Exchange:
    """One request of a client: its prompts run together, their samples are numbered one after the other."""

    def __init__(
        self,
        request: Request,
        body: Sampling,
        model: ServedModel,
        caller: Caller,
        gate: Gate,
        latencies: Latencies,
        answer: Writer,
    ) -> None:
        self._request = request
        self._body = body
        self._model = model
        self._caller = caller
        self._gate = gate
        self._latencies = latencies
        self._answer = answer
        self._running: list[LiveRequest] = []
        self._stack = ExitStack()

    async def run(self, prompts: Sequence[Int32Array], params: SamplingParams) -> Response:
        """Queues the prompts and answers, at the end or while they go on."""
        for prompt in prompts:
            if len(prompt) > self._gate.limits.prompt_tokens:
                limit = self._gate.limits.prompt_tokens
                raise Problem(
                    400, f"the prompt has {len(prompt)} tokens, the limit is {limit}", code="context_length_exceeded"
                )
        self._enter(self._gate.passed(self._caller.key))
        try:
            self._enter(self._latencies.request())
            options = request_options(self._body, self._caller)
            for prompt in prompts:
                self._running.append(self._model.start(prompt, params, **options))
            if self._body.stream:
                parts = self._events()
                first = await anext(parts)  # what is refused at once is refused with a status
                return EventStream(_after(first, parts), self._leave, self._gate.limits.send_seconds)
            result = await unless_gone(self._request, self._whole())
        except BaseException:
            self._leave()
            raise
        self._leave()
        return Response(status_code=499) if result is None else JSONResponse(result)

    def _enter(self, context: AbstractContextManager[Any]) -> None:
        self._stack.enter_context(context)

    def _leave(self) -> None:
        """The answer is over or nobody wants it: what still runs ends."""
        for running in self._running:
            running.cancel()
        self._stack.close()

    async def _whole(self) -> dict[str, Any]:
        for running in self._running:
            async for news in running:
                self._latencies.tokens(running, news)
        return self._answer.whole([running.generation for running in self._running])

    async def _events(self) -> AsyncIterator[bytes]:
        """The events of the stream; those that come together go out together."""
        opened: set[int] = set()
        async for number, news in _merged(self._running):
            self._latencies.tokens(self._running[number], news)
            events = []
            for chunk in news:
                index = number * self._body.n + chunk.sample
                if index not in opened:
                    opened.add(index)
                    opening = self._answer.opening(index)
                    events += [] if opening is None else [as_event(opening)]
                events.append(as_event(self._answer.part(index, chunk)))
            yield b"".join(events)
        end = b"data: [DONE]\n\n"
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            end = as_event(self._answer.usage([running.generation for running in self._running])) + end
        yield end


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


async def _merged(running: Sequence[LiveRequest]) -> AsyncIterator[tuple[int, list[Chunk]]]:
    """The chunks of several requests as they come, with the number of each."""
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
