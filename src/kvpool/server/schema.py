"""The bodies of requests, as OpenAI's clients send them, with kvpool's own fields (`extra_body` in those clients)."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag, model_validator

from kvpool.engine.params import MAX_LOGPROBS, MAX_STOPS
from kvpool.server.agent_fields import OfChats, OfEvery, OtherTool, other_than
from kvpool.server.body import Body, Count, Int, Stop, Text, Token, Tokens, Yes

DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI has it; a chat may fill the context


def _object(value: Any) -> Any:
    """The object that a JSON text holds; leaves everything else, and what is no JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


_SLASHES = re.compile(r"\\.|[/\n]", re.DOTALL)  # or anything behind a backslash


def _in_slashes(found: re.Match[str]) -> str:
    """A part of a pattern as it stands between slashes."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


class StreamOptions(Body):
    """What a stream says besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding that OpenAI adds to events; there is none here


class JsonSchema(Body):
    """A schema that the answer keeps to, and its name. It is always enforced, whether `strict` or not."""

    name: str = ""
    description: str = ""
    strict: bool = True
    of: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """The form of the answer: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The form of the answer as vLLM's clients say it: one of these. A grammar has the rules of Lark."""

    of: Annotated[dict[str, Any] | None, BeforeValidator(_object), Field(alias="json")] = None
    json_object: Yes | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("give one of json, json_object, regex, choice and grammar")
        return self

    def as_response_format(self) -> ResponseFormat:
        """The same as a `response_format`; text if that has no such form."""
        if self.of is not None:
            return ResponseFormat(type="json_schema", json_schema=JsonSchema.model_validate({"schema": self.of}))
        return ResponseFormat(type="json_object" if self.json_object else "text")

    def rules(self) -> str | None:
        """The rules of a form that is not JSON, for `Engine.grammar`."""
        if self.choice is not None:
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
        if self.regex is not None:
            return f"start: /{_SLASHES.sub(_in_slashes, self.regex)}/"
        return self.grammar


class KeptTokens(Body):
    """How long tokens stay cached: by a priority from 0 (go first) to 100 (stay longest), or pinned.

    Tokens `start` to `end` of the prompt, or those of the answer. `ttl_seconds` count from the end of the request; a pin
    begins at the first token of the prompt and, without them, ends when it is ended.
    """

    part: Literal["prompt", "answer"] = "prompt"
    start: Token = 0
    end: Count | None = None
    priority: Annotated[Int, Field(ge=0, le=100)] | None = None
    ttl_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    pin: bool = False


class Sampling(OfEvery):
    """What all forms of a request share."""

    model: str = ""
    n: Annotated[Int, Field(ge=1, le=2**16)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    seed: Int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # kvpool's own
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] = 0
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    expected_seconds: Annotated[float, Field(ge=0, le=1e9)] | None = None
    deadline_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None
    retention: Annotated[list[KeptTokens], Field(max_length=64)] | None = None


class Completions(Sampling):
    """`POST /v1/completions`."""

    prompt: Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    max_tokens: Annotated[Int, Field(ge=0)] = DEFAULT_MAX_TOKENS
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    suffix: str | None = None


class Message(BaseModel):
    """One turn of a conversation; all of its fields go to the model's template."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None


Conversation = Annotated[list[Message], Field(min_length=1)]


class Function(BaseModel):
    """What a tool is called and takes; all of its fields go to the model's template."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=256)]


class Tool(BaseModel):
    """A function that the model may ask to call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


AnyTool = Annotated[Annotated[Tool, Tag("own")] | Annotated[OtherTool, Tag("other")], other_than("function")]


class ChatCompletions(Sampling, OfChats):
    """`POST /v1/chat/completions`."""

    messages: Conversation
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Body):
    """`POST /detokenize`."""

    model: str = ""
    tokens: Tokens


# --- what /openapi.json says of every path: how it refuses, and in which forms it answers ----------------------------


class RefusalDetails(BaseModel):
    """Why a request was refused: a sentence for people, kinds that programs compare, and the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None
    details: dict[str, Any] | None = None


class Refusal(BaseModel):
    """The body of every answer that is none."""

    type: Literal["error"]
    error: RefusalDetails


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Refusal, "description": "Refused: the request is wrong, not allowed, or too much at the moment."},
    "5XX": {"model": Refusal, "description": "Failed, or the server is shutting down."},
}
_EVENT = {"event": {"type": "string"}, "data": {"type": "string"}}
_STREAM = {"schema": {"type": "object", "properties": _EVENT, "required": ["data"]}}  # of each event
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` as events, while it grows.",
        "content": {"text/event-stream": _STREAM},
    }
}
