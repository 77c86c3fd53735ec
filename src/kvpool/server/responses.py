"""`/v1/responses`: OpenAI's newer form of a conversation."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from kvpool.engine.generation import Chunk, Generation
from kvpool.server.agent_fields import OfResponses, OfTexts, OtherTool, other_than
from kvpool.server.answer_reader import AnswerReader, ChunkReader, Part
from kvpool.server.answers import TOO_LONG, as_event, missed_field
from kvpool.server.auth import Caller
from kvpool.server.body import Body, Count, One, Text
from kvpool.server.completions import FILL_CONTEXT, dialogue
from kvpool.server.errors import Problem
from kvpool.server.exchange import Exchange, RequestContext
from kvpool.server.long_work import Asker
from kvpool.server.parameters import asker_of, sampling_params
from kvpool.server.schema import (
    Function,
    JsonSchema,
    Message,
    ResponseFormat,
    Sampling,
)
from kvpool.server.served_model import ServedModel
from kvpool.server.tool_forms import ToolCall
from kvpool.server.tools import Dialogue, new_call_id, tool_use


class TextFormat(Body):
    """The form of a text in this endpoint: the schema is beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    strict: bool = True
    of: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def as_response_format(self) -> ResponseFormat:
        """The same in the form of the other endpoints."""
        schema = None if self.of is None else JsonSchema.model_validate({"name": self.name, "schema": self.of})
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(OfTexts):
    """Options for the text of a response."""

    format: TextFormat | None = None


class ResponseTool(Function):
    """A function in this endpoint: its name is beside the type."""

    type: Literal["function"]

    def as_function(self) -> dict[str, Any]:
        """The function in the form that chat templates read."""
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


AnyTool = Annotated[Annotated[ResponseTool, Tag("own")] | Annotated[OtherTool, Tag("other")], other_than("function")]


class ResponseItem(BaseModel):
    """One item of an input: a message, a call of a tool, what the tool returned, or a thought of an earlier answer."""

    model_config = ConfigDict(extra="allow")
    type: str = "message"
    role: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None


class Responses(Sampling, OfResponses):
    """`POST /v1/responses`."""

    input: Text | Annotated[list[ResponseItem], Field(min_length=1)]
    n: One = 1
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None


async def respond(
    request: Request, body: Responses, model: ServedModel, caller: Caller, context: RequestContext
) -> Response:
    """Answers a conversation as OpenAI's endpoint does."""
    if body.previous_response_id is not None:
        raise Problem(
            400,
            "responses are not kept here: send the conversation as input instead of previous_response_id",
            code="unsupported",
            param="previous_response_id",
        )
    if body.text is not None and body.text.format is not None:
        if body.response_format is not None:
            raise Problem(
                400, "text.format and response_format: give one", code="invalid_value", param="response_format"
            )
        body.response_format = body.text.format.as_response_format()
    begun = await response_dialogue(body, model, asker_of(body, caller, context.gate))
    most = body.max_output_tokens or FILL_CONTEXT
    params = await sampling_params(body, model, caller, context.gate, most, dialogue=begun)
    answer = ResponseAnswer(model.name, body, model.answers.reader(begun))
    return await Exchange(request, body, model, caller, context, answer).answer(begun, params)


async def response_dialogue(body: Responses, model: ServedModel, asker: Asker) -> Dialogue:
    """The conversation of a body, ready for the model."""
    turns = [Message(role="user", content=body.input)] if isinstance(body.input, str) else _turns(body.input)
    if body.instructions:
        turns = [Message(role="system", content=body.instructions), *turns]
    offered = [tool.as_function() for tool in body.tools or () if isinstance(tool, ResponseTool)]
    use = tool_use(offered, body.tool_choice, body.parallel_tool_calls)
    return await dialogue(model, body, turns, use, asker)


def _turns(items: Sequence[ResponseItem]) -> list[Message]:
    """The messages of an input. Calls and thoughts belong to the message of the assistant that follows or surrounds them."""
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}

    def of_assistant() -> dict[str, Any]:
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})
        return turns[-1]

    for number, item in enumerate(items):
        if item.type == "message" and item.role is not None:
            speaks_on = item.role == "assistant" and turns and turns[-1]["role"] == "assistant"
            if speaks_on and not turns[-1]["content"]:
                turns[-1]["content"] = item.content
            else:
                turns.append({"role": item.role, "content": item.content})
        elif item.type == "function_call" and item.name and item.call_id:
            names[item.call_id] = item.name
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            call = {"id": item.call_id, "type": "function", "function": function}
            of_assistant().setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output" and item.call_id:
            told = {"tool_call_id": item.call_id, "name": names.get(item.call_id)}
            turns.append({"role": "tool", "content": item.output or "", **told})
        elif item.type == "reasoning":
            thought = item.content if isinstance(item.content, list) else []
            of_assistant()["reasoning_content"] = "".join(str(part.get("text", "")) for part in thought)
        else:
            raise Problem(
                400,
                f"input.{number} is of type {item.type!r}, or not complete: an input has messages with a role, "
                "function_call, function_call_output and reasoning",
                code="unsupported",
                param=f"input.{number}",
            )
    return [Message.model_validate(turn) for turn in turns]


_TYPES = {"content": "output_text", "reasoning": "reasoning_text"}  # the type of the one part that an item holds


class ResponseAnswer:
    """A `response`, whole or as its events. Texts, thoughts and calls are items of its output."""

    too_long = TOO_LONG

    def __init__(self, model: str, body: Responses, make_reader: Callable[[], AnswerReader] | None) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._reader = ChunkReader(make_reader)
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._open = ""  # the kind of the last item, while it grows

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that is over."""
        self._added(self._reader.parts(Chunk(0, generations[0].samples[0].text, (), finish_reason="stop")))
        return self._ended(generations)[1]

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The events for what one step added. The first ones begin with the events that open the response."""
        events = b""
        if self._number < 0:
            blank = self._response("in_progress", [])
            events += self._event("response.created", response=blank)
            events += self._event("response.in_progress", response=blank)
        return events + self._added(self._reader.parts(chunk))

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The events at the end: the last item, and the response with its usage."""
        events, whole = self._ended(generations)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return events + self._event(kind, response=whole)

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that fails."""
        error = {"code": problem.code or problem.kind, "message": str(problem)}
        response = {**self._response("failed", []), "error": error}
        return self._event("error", **error, param=problem.param) + self._event("response.failed", response=response)

    def _ended(self, generations: Sequence[Generation]) -> tuple[bytes, dict[str, Any]]:
        """The last events, and the whole response."""
        (generation,) = generations
        is_cut = generation.samples[0].finish_reason not in ("stop", None)
        status = "incomplete" if is_cut else "completed"
        events = self._closed(status) if self._items else self._opened("content") + self._closed(status)
        whole = {
            **self._response(status, self._items),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(generation),
        }
        return events, whole

    def _added(self, parts: Sequence[Part]) -> bytes:
        """The events of parts. A text goes on with the open item, or begins one; a call is an item."""
        events = b""
        for part in parts:
            if part.call is not None:
                events += self._closed() + self._called(part.call)
                continue
            if self._open != part.kind:
                events += self._closed() + self._opened(part.kind)
            self._items[-1]["content"][0]["text"] += part.text
            logprobs = _logprobs(part.kind)
            events += self._event(f"response.{_TYPES[part.kind]}.delta", **self._place, delta=part.text, **logprobs)
        return events

    def _opened(self, kind: str) -> bytes:
        """Begins an item that holds one text."""
        self._open = kind
        item: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
        }
        if kind == "reasoning":
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "status": "in_progress"}
        self._items.append({**item, "content": [_text("", kind)]})
        blank = {**item, "content": []}
        events = self._event("response.output_item.added", output_index=len(self._items) - 1, item=blank)
        return events + self._event("response.content_part.added", **self._place, part=_text("", kind))

    def _closed(self, status: str = "completed") -> bytes:
        """Ends the open item, if one is open."""
        if not self._open:
            return b""
        kind, item, self._open = self._open, self._items[-1], ""
        item["status"] = status
        (part,) = item["content"]
        logprobs = _logprobs(kind)
        return (
            self._event(f"response.{_TYPES[kind]}.done", **self._place, text=part["text"], **logprobs)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        )

    def _called(self, call: ToolCall) -> bytes:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        named = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": new_call_id(), "name": call.name}
        item = {**named, "arguments": arguments, "status": "completed"}
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        blank, at = {**named, "arguments": "", "status": "in_progress"}, place["output_index"]
        return (
            self._event("response.output_item.added", output_index=at, item=blank)
            + self._event("response.function_call_arguments.delta", **place, delta=arguments)
            + self._event("response.function_call_arguments.done", **place, name=call.name, arguments=arguments)
            + self._event("response.output_item.done", output_index=at, item=item)
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return as_event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "usage": None,
        }


def _text(text: str, kind: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if kind == "content" else {}
    return {"type": _TYPES[kind], "text": text, **more, **_logprobs(kind)}


def _logprobs(kind: str) -> dict[str, Any]:
    """The field for log probabilities that every form of a text has, and no form of a thought."""
    return {"logprobs": []} if kind == "content" else {}


def _usage(generation: Generation) -> dict[str, Any]:
    written = sum(len(sample.token_ids) for sample in generation.samples.values())
    return {
        "input_tokens": generation.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": generation.num_cached_tokens,
            **missed_field("missed_tokens", [generation]),
        },
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": generation.num_prompt_tokens + written,
    }
