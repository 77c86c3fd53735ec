"""`/v1/messages`: Anthropic's form of a conversation. Its `cache_control` marks say which beginning stays cached longer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from kvpool.engine.params import MAX_STOPS
from kvpool.pools.arrays import Int32Array
from kvpool.scope import Retention, TokenRange
from kvpool.server.agent_fields import OfMarks, OfMessages, OfMessageTools, OfOutput, OtherTool, other_than
from kvpool.server.auth import Caller
from kvpool.server.body import Body, Count, One, Stop
from kvpool.server.completions import conversation_tokens, dialogue
from kvpool.server.diagnostics import Diagnosis, Diagnostics, Fingerprint
from kvpool.server.errors import Problem
from kvpool.server.exchange import Exchange, RequestContext
from kvpool.server.images import image_part
from kvpool.server.long_work import Asker
from kvpool.server.message_answer import MessageAnswer
from kvpool.server.parameters import asker_of, sampling_params
from kvpool.server.schema import JsonSchema, Message, ResponseFormat, Sampling
from kvpool.server.served_model import ServedModel
from kvpool.server.tools import Dialogue, tool_use

KEPT_PRIORITY = 90
MAX_MARKS = 4
_SECONDS = {"5m": 300.0, "1h": 3600.0}


class CacheControl(OfMarks):
    """A mark: everything up to here stays cached, for five minutes or an hour after its last use."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class ContentBlock(Body):
    """A part of a message: text, an image, a document, a thought, a call of a tool, or its result.

    Others are refused by their type.
    """

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool = False
    source: dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(min_length=1)]


class MessageTool(OfMessageTools):
    """A tool in the form of this endpoint."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str = ""
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def as_function(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | ({"strict": True} if self.strict else {})}


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


AnyTool = Annotated[Annotated[MessageTool, Tag("own")] | Annotated[OtherTool, Tag("other")], other_than("custom")]


class OutputForm(Body):
    """The form of the answer: JSON by a schema."""

    type: Literal["json_schema"]
    of: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(OfOutput):
    """The form of the answer, and how much the model thinks before."""

    format: OutputForm | None = None


class Spoken(OfMessages):
    """What a conversation consists of. `cache_control` of all of it is a mark at its end."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None


class CountTokens(Spoken):
    """`POST /v1/messages/count_tokens`."""

    model: str = ""


class Messages(Sampling, Spoken):
    """`POST /v1/messages`."""

    max_tokens: Count
    n: One = 1
    thread: dict[str, Any] | None = None
    diagnostics: Diagnostics | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None


class _Conversation(NamedTuple):
    """A conversation in the form of chat templates; `ends` has the number of messages up to the end of each turn."""

    turns: list[Turn]
    spoken: list[Message]
    ends: list[int]
    tool_marks: list[CacheControl]
    end_mark: CacheControl | None
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
    if body.output_config is not None and body.output_config.format is not None:
        if body.response_format is not None:
            words = "output_config.format and response_format: give one"
            raise Problem(400, words, code="invalid_value", param="response_format")
        schema = JsonSchema.model_validate({"schema": body.output_config.format.of})
        body.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    asker = asker_of(body, caller, context.gate)
    talk = await _conversation(body, model, asker)
    params = await sampling_params(body, model, caller, context.gate, body.max_tokens, dialogue=talk.begun)
    retention = await _retention(talk, model, asker)
    if retention is not None and body.retention:
        raise Problem(400, "give cache_control or retention, not both", code="invalid_value", param="retention")
    num_marked = 0 if retention is None else int(retention.ranges[-1].end or 0)
    diagnosis = None if body.diagnostics is None else _diagnosis(body, talk, model, caller, context)
    answer = MessageAnswer(model.name, model.answers.reader(talk.begun), num_marked, diagnosis)
    if diagnosis is not None:
        context.answered.fingerprints.keep(caller.tenant, [answer.id], diagnosis.request)
    return await Exchange(request, body, model, caller, context, answer).answer(talk.begun, params, retention=retention)


def _diagnosis(
    body: Messages, talk: _Conversation, model: ServedModel, caller: Caller, context: RequestContext
) -> Diagnosis:
    """The request beside the one whose answer it names."""
    others = body.cache_salt, body.tool_choice, body.thinking, talk.begun.template
    lines = model.keeps_varying_lines
    offered, length = talk.begun.use.offered, len(talk.begun.prompt)
    request = Fingerprint.of(model.name, talk.spoken, offered, others, length, keeps_lines=lines)
    name = body.diagnostics.previous_message_id if body.diagnostics else None
    earlier = None if name is None else context.answered.fingerprints.find(caller.tenant, name)
    return Diagnosis(request, name is not None, earlier)


async def count_tokens(body: CountTokens, model: ServedModel, asker: Asker) -> dict[str, int]:
    """How many tokens a conversation has."""
    return {"input_tokens": len((await message_dialogue(body, model, asker)).prompt)}


async def message_dialogue(body: Spoken, model: ServedModel, asker: Asker) -> Dialogue:
    """The conversation of a body, ready for the model."""
    return (await _conversation(body, model, asker)).begun


async def _conversation(body: Spoken, model: ServedModel, asker: Asker) -> _Conversation:
    """Reads a conversation. If the assistant spoke last, the answer goes on with what it said."""
    turns = [*([] if not body.system else [Turn(role="system", content=body.system)]), *body.messages]
    names: dict[str, str] = {}  # of the tools, by the ids of calls
    spoken: list[Message] = []
    ends = []
    for number, turn in enumerate(turns):
        spoken += _messages_of(turn, number, names)
        ends.append(len(spoken))
    choice = body.tool_choice or ToolChoice()
    tools = [tool for tool in body.tools or () if isinstance(tool, MessageTool)]
    offered = [tool.as_function() for tool in tools]
    use = tool_use(offered, choice.as_openai(), not choice.disable_parallel_tool_use)
    continues = turns[-1].role == "assistant" and not getattr(spoken[-1], "tool_calls", None)
    begun = await dialogue(model, body, spoken, use, asker, continues=continues)
    tool_marks = [tool.cache_control for tool in tools if tool.cache_control]
    return _Conversation(turns, spoken, ends, tool_marks, body.cache_control, begun)


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
        elif part.type == "document" and turn.role == "user":
            said_parts.append(_document(part.model_dump(), f"messages.{number}.content"))
        elif part.type == "tool_use" and turn.role == "assistant" and part.name and part.id:
            names[part.id] = part.name
            function = {"name": part.name, "arguments": part.input or {}}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif part.type == "tool_result" and turn.role == "user" and part.tool_use_id:
            told = {"tool_call_id": part.tool_use_id, "name": names.get(part.tool_use_id)}
            content = _result(part.content, part.is_error)
            results.append(Message.model_validate({"role": "tool", "content": content, **told}))
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


def _result(content: str | list[dict[str, Any]] | None, is_error: bool) -> str | list[dict[str, Any]]:
    """What a tool answered, in OpenAI's form. No template has a place for `is_error`, so that the text says it."""
    told = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    parts = [_result_part(part) for part in told]
    if is_error:
        says_so = parts and str(parts[0].get("text", "")).lstrip("[<").lower().startswith("error")
        parts = parts if says_so else [{"type": "text", "text": "Error: "}, *parts]
    return parts if isinstance(content, list) else "".join(part["text"] for part in parts)


def _result_part(part: dict[str, Any]) -> dict[str, Any]:
    """A part of what a tool answered, in OpenAI's form."""
    kind = part.get("type")
    if kind == "image":
        return image_part(part.get("source"))
    if kind == "document":
        return _document(part, "messages")
    if kind == "tool_reference":  # all tools are in the prompt
        return {"type": "text", "text": f"The tool {part.get('tool_name')} can be called."}
    return part


def _document(part: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A document as text, with its title and what is said of it before it."""
    source = part.get("source") or {}
    kind, told = source.get("type"), source.get("data") if source.get("type") == "text" else source.get("content")
    if isinstance(told, list):
        told = "\n".join(str(each.get("text", "")) for each in told)
    if kind not in ("text", "content") or not isinstance(told, str) or (part.get("citations") or {}).get("enabled"):
        raise Problem(
            400,
            f"a document of the source {kind!r}: this server takes documents as text, and writes no citations of them",
            code="unsupported",
            param=param,
        )
    heads = [head for head in (part.get("title"), part.get("context")) if head]
    return {"type": "text", "text": "\n".join(["<document>", *heads, told, "</document>\n"])}


async def _retention(talk: _Conversation, model: ServedModel, asker: Asker) -> Retention | None:
    """The marks of a conversation as ranges of tokens. A mark inside a message covers the whole message.

    A mark of a tool covers the first message, because templates write tools beside it. Of marks in a row that last equally
    long, only the last one is made tokens.
    """
    marked: list[tuple[int, float]] = []  # how many messages a mark covers, and for how long
    num_marks = 0
    for number, (turn, end_of_turn) in enumerate(zip(talk.turns, talk.ends, strict=True)):
        marks = [part.cache_control for part in turn.content if not isinstance(part, str) and part.cache_control]
        marks = marks if number else [*talk.tool_marks, *marks]
        if talk.end_mark is not None and number == len(talk.turns) - 1:
            marks.append(talk.end_mark)
        num_marks += len(marks)
        if marks:
            marked.append((end_of_turn, _SECONDS[marks[-1].ttl]))
    if num_marks > MAX_MARKS:
        raise Problem(400, f"a request has at most {MAX_MARKS} cache_control marks", code="invalid_value")
    ranges: list[TokenRange] = []
    start = 0
    for seconds, alike in groupby(marked, lambda mark: mark[1]):
        for end_of_turn, _ in reversed(list(alike)):
            if (end := await _covered(talk, end_of_turn, model, asker)) is not None:
                if end > start:
                    ranges.append(TokenRange(start, end, KEPT_PRIORITY, seconds))
                    start = end
                break
    return Retention(ranges) if ranges else None


async def _covered(talk: _Conversation, num_messages: int, model: ServedModel, asker: Asker) -> int | None:
    """How many tokens of the prompt its first messages are; None if the template refuses so short a conversation."""
    if num_messages == len(talk.spoken):
        return len(talk.begun.prompt)
    spoken, offered = talk.spoken[:num_messages], talk.begun.use.offered
    try:
        beginning, _ = await conversation_tokens(model, spoken, asker, offered, talk.begun.template)
    except Problem:
        return None
    return _common(beginning.token_ids, talk.begun.prompt.token_ids)


def _common(one: Int32Array, other: Int32Array) -> int:
    """How many tokens two prompts begin with in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
