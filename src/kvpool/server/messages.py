"""`/v1/messages`: Anthropic's form of a conversation. Its `cache_control` marks say which beginning stays cached longer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from kvpool.engine.generation import Chunk, Generation
from kvpool.engine.params import MAX_STOPS
from kvpool.pools.arrays import Int32Array
from kvpool.scope import Retention, TokenRange
from kvpool.server.answer_reader import AnswerReader, ChunkReader, Part
from kvpool.server.answers import HOLE, EventForm, as_event
from kvpool.server.auth import Caller
from kvpool.server.completions import conversation_tokens, dialogue
from kvpool.server.errors import Problem
from kvpool.server.exchange import Exchange, RequestContext
from kvpool.server.images import image_part
from kvpool.server.long_work import WorkTurn
from kvpool.server.parameters import sampling_params
from kvpool.server.schema import Body, Count, Message, One, Sampling, Stop
from kvpool.server.served_model import ServedModel
from kvpool.server.tools import Dialogue, new_call_id, tool_use

KEPT_PRIORITY = 90
MAX_MARKS = 4
_SECONDS = {"5m": 300.0, "1h": 3600.0}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "deadline": "max_tokens", "refused": "max_tokens"}


class CacheControl(Body):
    """A mark: everything up to here stays cached, for five minutes or an hour after its last use."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class ContentBlock(Body):
    """A part of a message: text, an image, a thought, a call of a tool, or its result. Others are refused by their type."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    source: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(min_length=1)]


class MessageTool(Body):
    """A tool in the form of this endpoint."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def as_function(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """Whether the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def as_openai(self) -> Any:
        """The choice in OpenAI's form."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class Spoken(Body):
    """What a conversation consists of."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None


class CountTokens(Spoken):
    """`POST /v1/messages/count_tokens`."""

    model: str = ""


class Messages(Spoken, Sampling):
    """`POST /v1/messages`."""

    max_tokens: Count
    n: One = 1
    thread: dict[str, Any] | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None


class _Conversation(NamedTuple):
    """A conversation in the form of chat templates; `ends` has the number of messages up to the end of each turn."""

    turns: list[Turn]
    spoken: list[Message]
    ends: list[int]
    tool_marks: list[CacheControl]
    begun: Dialogue


async def converse(
    request: Request, body: Messages, model: ServedModel, caller: Caller, context: RequestContext
) -> Response:
    """Answers a conversation as Anthropic's endpoint does."""
    if body.thread is not None:
        raise Problem(
            400,
            "conversations are not kept here: send all messages, without thread",
            code="unsupported",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},  # clients then do so
        )
    if body.stop_sequences is not None:
        if body.stop is not None:
            raise Problem(400, "stop and stop_sequences: give one", code="invalid_value", param="stop")
        body.stop = body.stop_sequences
    reading = context.gate.images.of(caller.key)
    talk = await _conversation(body, model, reading)
    params = await sampling_params(body, model, caller, context.gate, body.max_tokens, dialogue=talk.begun)
    retention = await _retention(talk, model, reading)
    if retention is not None and body.retention:
        raise Problem(400, "give cache_control or retention, not both", code="invalid_value", param="retention")
    num_marked = 0 if retention is None else int(retention.ranges[-1].end or 0)
    answer = MessageAnswer(model.name, model.answers.reader(talk.begun), num_marked)
    exchange = Exchange(request, body, model, caller, context, answer)
    return await exchange.run(
        [talk.begun.asked], params, retention=retention, offers_tools=bool(talk.begun.use.offered)
    )


async def count_tokens(body: CountTokens, model: ServedModel, reading: WorkTurn) -> dict[str, int]:
    """How many tokens a conversation has."""
    return {"input_tokens": len((await message_dialogue(body, model, reading)).prompt)}


async def message_dialogue(body: Spoken, model: ServedModel, reading: WorkTurn) -> Dialogue:
    """The conversation of a request for a message."""
    return (await _conversation(body, model, reading)).begun


async def _conversation(body: Spoken, model: ServedModel, reading: WorkTurn) -> _Conversation:
    """Reads a conversation. If the assistant spoke last, the answer goes on with what it said."""
    turns = [*([] if not body.system else [Turn(role="system", content=body.system)]), *body.messages]
    names: dict[str, str] = {}  # of the tools, by the ids of calls
    spoken: list[Message] = []
    ends = []
    for number, turn in enumerate(turns):
        spoken += _messages_of(turn, number, names)
        ends.append(len(spoken))
    choice = body.tool_choice or ToolChoice()
    offered = [tool.as_function() for tool in body.tools or ()]
    use = tool_use(offered, choice.as_openai(), not choice.disable_parallel_tool_use)
    continues = turns[-1].role == "assistant" and not getattr(spoken[-1], "tool_calls", None)
    begun = await dialogue(model, spoken, use, reading, continues=continues)
    tool_marks = [tool.cache_control for tool in body.tools or () if tool.cache_control]
    return _Conversation(turns, spoken, ends, tool_marks, begun)


def _messages_of(turn: Turn, number: int, names: dict[str, str]) -> list[Message]:
    """The messages for a chat template that say what a turn says: results of tools first, each a message of its own."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    results: list[Message] = []
    calls: list[dict[str, Any]] = []
    said_parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for part in turn.content:
        if part.type == "text" and part.text is not None:
            said_parts.append({"type": "text", "text": part.text})
        elif part.type == "image" and turn.role == "user":
            said_parts.append(image_part(part.source))
        elif part.type == "tool_use" and turn.role == "assistant" and part.name and part.id:
            names[part.id] = part.name
            function = {"name": part.name, "arguments": part.input or {}}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif part.type == "tool_result" and turn.role == "user" and part.tool_use_id:
            told = {"tool_call_id": part.tool_use_id, "name": names.get(part.tool_use_id)}
            results.append(Message.model_validate({"role": "tool", "content": _result(part.content), **told}))
        elif part.type == "thinking" and turn.role == "assistant":
            thoughts.append(part.thinking or "")
        elif part.type != "redacted_thinking":
            raise Problem(
                400,
                f"message {number} has a part of type {part.type!r} that is not complete or that a turn of the "
                f"{turn.role} cannot have",
                code="unsupported",
            )
    if results and not said_parts:
        return results
    said: dict[str, Any] = {"role": turn.role, "content": said_parts}
    if calls:
        said["tool_calls"] = calls
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    return [*results, Message.model_validate(said)]


def _result(content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    """What a tool answered, in OpenAI's form."""
    if content is None or isinstance(content, str):
        return content or ""
    return [image_part(part.get("source")) if part.get("type") == "image" else part for part in content]


async def _retention(talk: _Conversation, model: ServedModel, reading: WorkTurn) -> Retention | None:
    """The marks of a conversation as ranges of tokens. A mark inside a message covers the whole message.

    A mark of a tool covers the first message, because templates write tools beside it.
    """
    ranges: list[TokenRange] = []
    start, num_marks = 0, 0
    for number, (turn, end_of_turn) in enumerate(zip(talk.turns, talk.ends, strict=True)):
        marks = [part.cache_control for part in turn.content if not isinstance(part, str) and part.cache_control]
        marks = marks if number else [*talk.tool_marks, *marks]
        num_marks += len(marks)
        if num_marks > MAX_MARKS:
            raise Problem(400, f"a request has at most {MAX_MARKS} cache_control marks", code="invalid_value")
        if not marks:
            continue
        try:
            beginning = await conversation_tokens(model, talk.spoken[:end_of_turn], reading, talk.begun.use.offered)
        except Problem:  # a template that refuses so short a conversation
            continue
        end = _common(beginning.token_ids, talk.begun.prompt)
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
_EMPTY = {"content": {"type": "text", "text": ""}, "reasoning": {"type": "thinking", "thinking": "", "signature": ""}}


class MessageAnswer:
    """A `message`, whole or as Anthropic's events. Texts, thoughts and calls are blocks of its content."""

    def __init__(self, model: str, make_reader: Callable[[], AnswerReader] | None, num_marked: int) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._reader = ChunkReader(make_reader)
        self._num_marked = num_marked  # tokens of the prompt that a mark asked to keep
        self._begun = False
        self._num_blocks = 0
        self._open = ""  # the kind of the block under way
        self._calls = False

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that is over."""
        (generation,) = generations
        content: list[dict[str, Any]] = []
        last = ""
        for part in self._reader.parts(Chunk(0, generation.samples[0].text, (), finish_reason="stop")):
            field = "thinking" if part.kind == "reasoning" else "text"
            if part.call is not None:
                content.append({**_called(part), "input": part.call.arguments})
                self._calls = True
            elif part.kind == last:
                content[-1][field] += part.text
            else:
                content.append({**_EMPTY[part.kind], field: part.text})
            last = part.kind
        return {**self._message(generation), "content": content or [_EMPTY["content"]], **self._reason(generation)}

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The events for what one step added. The first ones begin with the event that opens the message."""
        events = b""
        if not self._begun:
            self._begun = True
            start = {"type": "message_start", "message": {**self._message(generation), "content": []}}
            events = as_event(start, "message_start")
        return events + b"".join(self._added(part) for part in self._reader.parts(chunk))

    def _added(self, part: Part) -> bytes:
        """The events of one part. It goes on with the open block, or begins one."""
        if part.call is not None:
            self._calls = True
            events = self._closed() + self._opened("call", {**_called(part), "input": {}})
            arguments = json.dumps(part.call.arguments, ensure_ascii=False)
            return events + self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._closed()
        events = b"" if self._open == part.kind else self._closed() + self._opened(part.kind, _EMPTY[part.kind])
        if part.kind == "reasoning":
            return events + self._delta({"type": "thinking_delta", "thinking": part.text})
        if self._num_blocks == 1:
            return events + _DELTA.filled(part.text)
        return events + self._delta({"type": "text_delta", "text": part.text})

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._num_blocks += 1
        start = {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}
        return as_event(start, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
        return as_event(event, "content_block_delta")

    def _closed(self) -> bytes:
        """The event that ends the open block, if one is open."""
        if not self._open:
            return b""
        self._open = ""
        return as_event({"type": "content_block_stop", "index": self._num_blocks - 1}, "content_block_stop")

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The events at the end: why the message ended, and its usage."""
        (generation,) = generations
        events = b"" if self._num_blocks else self._opened("content", _EMPTY["content"])
        delta = {"type": "message_delta", "delta": self._reason(generation), "usage": self._usage(generation)}
        return (
            events
            + self._closed()
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
            "usage": self._usage(generation),
        }

    def _reason(self, generation: Generation) -> dict[str, Any]:
        sample = generation.samples[0]
        if sample.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_string}
        reason = _REASONS.get(sample.finish_reason or "", "end_turn")
        return {"stop_reason": "tool_use" if self._calls and reason == "end_turn" else reason, "stop_sequence": None}

    def _usage(self, generation: Generation) -> dict[str, int]:
        """Tokens read from the cache, tokens that marks put there, and the rest."""
        cached = generation.num_cached_tokens
        created = max(0, self._num_marked - cached)
        return {
            "input_tokens": generation.num_prompt_tokens - cached - created,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": created,
            "output_tokens": sum(len(sample.token_ids) for sample in generation.samples.values()),
        }


def _called(part: Part) -> dict[str, Any]:
    assert part.call is not None
    return {"type": "tool_use", "id": new_call_id(), "name": part.call.name}
