"""`/v1/responses`: OpenAI's newer form of a conversation, for text."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kvpool.engine.generation import Chunk, Generation
from kvpool.server.answers import as_event
from kvpool.server.auth import Caller
from kvpool.server.completions import FILL_CONTEXT, conversation_tokens, offered
from kvpool.server.errors import Problem
from kvpool.server.exchange import Exchange, RequestContext
from kvpool.server.parameters import sampling_params
from kvpool.server.schema import (
    Body,
    Conversation,
    Count,
    Function,
    JsonSchema,
    Message,
    ResponseFormat,
    Sampling,
    Text,
)
from kvpool.server.served_model import ServedModel


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


class TextOptions(Body):
    """Options for the text of a response."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] = "medium"


class ResponseTool(Function):
    """A function in this endpoint: its name is beside the type."""

    type: Literal["function"]

    def as_function(self) -> dict[str, Any]:
        """The function in the form that chat templates read."""
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class Responses(Sampling):
    """`POST /v1/responses`."""

    input: Text | Conversation
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    tools: list[ResponseTool] | None = None
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
    turns = [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if body.instructions:
        turns = [Message(role="system", content=body.instructions), *turns]
    body.n = 1
    if body.text is not None and body.text.format is not None:
        body.response_format = body.text.format.as_response_format()
    params = await sampling_params(body, model, context.gate.limits, body.max_output_tokens or FILL_CONTEXT, None)
    tools = offered([tool.as_function() for tool in body.tools or ()], body.tool_choice)
    prompt = await conversation_tokens(model, turns, tools)
    exchange = Exchange(request, body, model, caller, context, ResponseAnswer(model.name, body))
    return await exchange.run([prompt], params, offers_tools=bool(tools))


class ResponseAnswer:
    """A `response`, whole or as its events."""

    def __init__(self, model: str, body: Responses) -> None:
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._body = body
        self._number = -1

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that is over."""
        (generation,) = generations
        is_cut = generation.samples[0].finish_reason not in ("stop", None)
        status = "incomplete" if is_cut else "completed"
        return {
            **self._response(status, [self._message(status, generation.samples[0].text)]),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(generation),
        }

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The events for what one step added. The first ones begin with the events that open the response."""
        events = b""
        if self._number < 0:
            blank = self._response("in_progress", [])
            events += self._event("response.created", response=blank) + self._event(
                "response.in_progress", response=blank
            )
            item = self._message("in_progress", None)
            events += self._event("response.output_item.added", output_index=0, item=item)
            events += self._event("response.content_part.added", **self._place, part=_text(""))
        if chunk.text:
            events += self._event("response.output_text.delta", **self._place, delta=chunk.text, logprobs=[])
        return events

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The events at the end: the whole text, and its usage."""
        whole = self.whole(generations)
        (item,), text = whole["output"], generations[0].samples[0].text
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_text(text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(kind, response=whole)
        )

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that fails."""
        error = {"code": problem.code or problem.kind, "message": str(problem)}
        response = {**self._response("failed", []), "error": error}
        return self._event("error", **error, param=problem.param) + self._event("response.failed", response=response)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return as_event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_text(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "usage": None,
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(generation: Generation) -> dict[str, Any]:
    written = sum(len(sample.token_ids) for sample in generation.samples.values())
    return {
        "input_tokens": len(generation.prompt),
        "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(generation.prompt) + written,
    }
