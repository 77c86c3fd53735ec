"""`/v1/messages`: Anthropic's form of a conversation. Its `cache_control` marks say which beginning stays cached longer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from kvpool.engine.generation import Chunk, Generation
from kvpool.engine.params import MAX_STOPS
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.retention import Retention, TokenRange
from kvpool.server.answers import HOLE, EventForm, as_event
from kvpool.server.auth import Caller
from kvpool.server.completions import conversation_tokens, offered
from kvpool.server.errors import Problem
from kvpool.server.exchange import Exchange, RequestContext
from kvpool.server.parameters import sampling_params
from kvpool.server.schema import Body, Count, Message, Sampling, Stop
from kvpool.server.served_model import ServedModel

KEPT_PRIORITY = 90
_SECONDS = {"5m": 300.0, "1h": 3600.0}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "deadline": "max_tokens", "refused": "max_tokens"}


class CacheControl(Body):
    """A mark: everything up to here stays cached, for five minutes or an hour after its last use."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Body):
    """A part of a message. Parts that are no text are refused, and the error names their type."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[TextBlock], Field(min_length=1)]


class MessageTool(Body):
    """A tool in the form of this endpoint."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    input_schema: dict[str, Any] | None = None

    def as_function(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """Whether the model may call a tool."""

    type: str = "auto"


class Messages(Sampling):
    """`POST /v1/messages`."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    max_tokens: Count
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None


async def converse(
    request: Request, body: Messages, model: ServedModel, caller: Caller, context: RequestContext
) -> Response:
    """Answers a conversation as Anthropic's endpoint does."""
    turns = [*([] if not body.system else [Turn(role="system", content=body.system)]), *body.messages]
    spoken = [Message(role=turn.role, content=_text_of(turn, number)) for number, turn in enumerate(turns)]
    choice = None if body.tool_choice is None else body.tool_choice.type
    tools = offered([tool.as_function() for tool in body.tools or ()], choice)
    prompt = await conversation_tokens(model, spoken, tools)
    body.stop, body.n = body.stop_sequences, 1
    params = await sampling_params(body, model, context.gate.limits, body.max_tokens, None)
    retention = await _retention(turns, spoken, prompt, model, tools)
    if retention is not None and body.retention:
        raise Problem(400, "give cache_control or retention, not both", code="invalid_value", param="retention")
    answer = MessageAnswer(model.name)
    exchange = Exchange(request, body, model, caller, context, answer)
    return await exchange.run([prompt], params, retention=retention, offers_tools=bool(tools))


def _text_of(turn: Turn, number: int) -> str:
    if isinstance(turn.content, str):
        return turn.content
    for part in turn.content:
        if part.type != "text" or part.text is None:
            raise Problem(
                400,
                f"message {number} has a part of type {part.type!r}; this model reads text only",
                code="unsupported",
            )
    return "".join(part.text or "" for part in turn.content)


async def _retention(
    turns: Sequence[Turn],
    spoken: Sequence[Message],
    prompt: Int32Array,
    model: ServedModel,
    tools: Sequence[dict[str, Any]],
) -> Retention | None:
    """The marks of a conversation as ranges of tokens. A mark inside a message covers the whole message."""
    ranges: list[TokenRange] = []
    start = 0
    for number, turn in enumerate(turns):
        marks = [part.cache_control for part in turn.content if not isinstance(part, str) and part.cache_control]
        if not marks:
            continue
        try:
            beginning = await conversation_tokens(model, spoken[: number + 1], tools)
        except Problem:  # a template that refuses so short a conversation
            continue
        end = _common(beginning, prompt)
        if end > start:
            ranges.append(TokenRange(start, end, KEPT_PRIORITY, _SECONDS[marks[-1].ttl]))
            start = end
    return Retention(ranges) if ranges else None


def _common(one: Int32Array, other: Int32Array) -> int:
    """How many tokens two prompts begin with in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


_DELTA = EventForm(
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": HOLE}}, "content_block_delta"
)


class MessageAnswer:
    """A `message`, whole or as Anthropic's events."""

    def __init__(self, model: str) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._begun = False

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that is over."""
        (generation,) = generations
        content = [{"type": "text", "text": generation.samples[0].text}]
        return {**self._message(generation), "content": content, **self._reason(generation)}

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The events for what one step added. The first ones begin with the event that opens the message."""
        events = b""
        if not self._begun:
            self._begun = True
            start = {"type": "message_start", "message": {**self._message(generation), "content": []}}
            block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            events = as_event(start, "message_start") + as_event(block, "content_block_start")
        return events + _DELTA.filled(chunk.text) if chunk.text else events

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The events at the end: why the message ended, and its usage."""
        (generation,) = generations
        delta = {"type": "message_delta", "delta": self._reason(generation), "usage": _usage(generation)}
        return (
            as_event({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + as_event(delta, "message_delta")
            + as_event({"type": "message_stop"}, "message_stop")
        )

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that fails."""
        return as_event(problem.body(), "error")

    def _message(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(generation),
        }

    def _reason(self, generation: Generation) -> dict[str, Any]:
        sample = generation.samples[0]
        if sample.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_string}
        return {"stop_reason": _REASONS.get(sample.finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, int]:
    cached = generation.num_cached_tokens
    return {
        "input_tokens": len(generation.prompt) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sum(len(sample.token_ids) for sample in generation.samples.values()),
    }
