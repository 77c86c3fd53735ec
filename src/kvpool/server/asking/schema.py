"""The bodies of requests, as OpenAI's clients send them, with kvpool's own fields (`extra_body` in those clients)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvpool.engine.sampling.params import MAX_LOGPROBS, MAX_STOPS

DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI has it; a chat may fill the context
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class Body(BaseModel):
    """Fields that we do not know are ignored, as other servers do: clients send many."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    """What a stream says besides the text."""

    include_usage: bool = False


class JsonSchema(Body):
    """A schema that the answer keeps to, and its name."""

    name: str = ""
    of: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """The form of the answer: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class Sampling(Body):
    """What completions and chats share."""

    model: str = ""
    n: Annotated[int, Field(ge=1, le=2**16)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    user: str | None = None
    # kvpool's own
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None


class Completions(Sampling):
    """`POST /v1/completions`."""

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    suffix: str | None = None


class Message(BaseModel):
    """One turn of a conversation; all of its fields go to the model's template."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None


class ChatCompletions(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenize(Body):
    """`POST /tokenize`: a text, or a conversation by the model's template."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None


class Detokenize(Body):
    """`POST /detokenize`."""

    model: str = ""
    tokens: Tokens


class CacheQuery(Body):
    """A prompt whose place in the cache is asked for, or changed."""

    model: str = ""
    prompt: str | Tokens | None = None
    messages: list[Message] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    ttl_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
