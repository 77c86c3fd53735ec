"""Fields that clients send beside the conversation, by the form of the request: what is followed, and what is left out.

A field marked `LEFT_OUT` changes nothing here. Other marks say which variable of the chat template a field becomes, where the
template reads one. Fields that are not followed are named in the header `x-kvpool-left-out`, and once in the log. A field
that is as if it were not there, because it has its default, is not named. Fields without a mark are labels, or ask for what
every answer is anyway; other values of those are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field

from kvpool.server.body import Body, Count, No, One

LEFT_OUT_HEADER = "x-kvpool-left-out"
Level = Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]  # an effort


class Mark(Enum):
    """What happens to a field."""

    LEFT_OUT = "left out"
    EFFORT = "how much to think: a level"
    THINKING = "whether to think"
    BUDGET = "how much to think: tokens"


LEFT_OUT, EFFORT, THINKING, BUDGET = Mark


def _no_logprobs(value: str) -> str:
    if "logprobs" in value:
        raise ValueError("log probabilities come in chats and completions, not in responses")
    return value


# --- the fields, by the form of the request ---------------------------------------------------------------------------


class Thinking(Body):
    """Whether the model thinks before it answers, in Anthropic's form. An adaptive one is left to the model."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Count | None, BUDGET] = None
    display: Annotated[str | None, LEFT_OUT] = None


class Reasoning(Body):
    """The same in OpenAI's newer form. Summaries of thoughts are not written: thoughts come whole."""

    effort: Annotated[Level | None, EFFORT] = None
    summary: Annotated[str | None, LEFT_OUT] = None
    generate_summary: Annotated[str | None, LEFT_OUT] = None
    context: Annotated[str | None, LEFT_OUT] = None
    mode: Annotated[str | None, LEFT_OUT] = None


class OtherTool(BaseModel):
    """A tool that is no function: one that the API's own servers run, or of a form that models here were not taught."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


def other_than(own: str) -> Discriminator:
    """Tells tools of this type, or without one, from `OtherTool`."""

    def tag(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return "other" if isinstance(kind, str) and kind != own else "own"

    return Discriminator(tag)


class DynamoContext(Body):
    """`nvext.agent_context`: which session a request belongs to."""

    session_id: str | None = None
    parent_session_id: str | None = None
    session_final: bool = False
    session_type_id: Annotated[str | None, LEFT_OUT] = None
    trajectory_id: Annotated[str | None, LEFT_OUT] = None


class AgentContext(Body):
    """`nvext`: what Dynamo is told of agents."""

    agent_context: DynamoContext | None = None
    agent_hints: Annotated[dict[str, Any] | None, LEFT_OUT] = None


class OfEvery(Body):
    """Every form."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    nvext: AgentContext | None = None
    background: No = False
    best_of: One = 1
    use_beam_search: No = False
    length_penalty: Annotated[float, Field(ge=1, le=1)] = 1.0
    include_stop_str_in_output: No = False


class OfChats(Body):
    """`POST /v1/chat/completions`."""

    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Annotated[Level | None, EFFORT] = None
    thinking: Annotated[Thinking | None, THINKING] = None
    verbosity: Annotated[Level, LEFT_OUT] = "medium"
    prediction: Annotated[dict[str, Any] | None, LEFT_OUT] = None
    web_search_options: Annotated[dict[str, Any] | None, LEFT_OUT] = None


class OfTexts(Body):
    """`text` of `POST /v1/responses`."""

    verbosity: Annotated[Level, LEFT_OUT] = "medium"


class OfResponses(Body):
    """`POST /v1/responses`."""

    client_metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"  # a prompt that does not fit is refused
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    reasoning: Reasoning | None = None
    include: Annotated[list[Annotated[str, AfterValidator(_no_logprobs)]] | None, LEFT_OUT] = None
    max_tool_calls: Annotated[Count | None, LEFT_OUT] = None
    context_management: Annotated[list[dict[str, Any]] | None, LEFT_OUT] = None


class OfMarks(Body):
    """`cache_control` of `POST /v1/messages`."""

    scope: Annotated[str | None, LEFT_OUT] = None


class OfMessageTools(Body):
    """A tool of `POST /v1/messages`."""

    strict: bool = False
    defer_loading: Annotated[bool, LEFT_OUT] = False
    input_examples: Annotated[list[dict[str, Any]] | None, LEFT_OUT] = None
    eager_input_streaming: Annotated[bool, LEFT_OUT] = False
    allowed_callers: Annotated[list[str] | None, LEFT_OUT] = None


class OfOutput(Body):
    """`output_config` of `POST /v1/messages`."""

    effort: Annotated[Level | None, EFFORT] = None


class OfMessages(Body):
    """`POST /v1/messages` and the same with `/count_tokens`."""

    thinking: Annotated[Thinking | None, THINKING] = None
    context_management: Annotated[dict[str, Any] | None, LEFT_OUT] = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


# --- what becomes of them ---------------------------------------------------------------------------------------------


class Followed(NamedTuple):
    """What a request asks of the chat template, and the names of the fields that change nothing."""

    template: dict[str, Any]
    left_out: tuple[str, ...]


def followed(body: Body, template: str, thinks: bool) -> Followed:
    """What becomes of the marked fields of a body for a model with this chat template.

    `thinks` says whether the model may think: one that never does follows who asks for no thoughts.

    >>> followed(OfChats(reasoning_effort="high", verbosity="low"), "{{ reasoning_effort }}", False)
    Followed(template={'reasoning_effort': 'high'}, left_out=('verbosity',))
    >>> followed(OfChats(thinking={"type": "disabled"}), "{% if enable_thinking %}", True).template
    {'enable_thinking': False}
    """
    read = _names_in(template)
    variables: dict[str, Any] = {}
    left_out = dict[str, None]()
    for name, mark, value in _marked(body):
        asked = _variables(mark, value, template)
        taken = {variable: each for variable, each in asked.items() if variable in read}
        variables |= taken
        if not taken and (mark is LEFT_OUT or (asked and (thinks or False not in asked.values()))):
            left_out[name] = None
    return Followed(variables, tuple(left_out))


_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that are true or false
_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}


def _variables(mark: Mark, value: Any, template: str) -> dict[str, Any]:
    """A marked field as the variables that templates know for it; none if the model may choose.

    Most templates know the efforts low, medium and high. They are given another one if they name it.
    """
    if mark is THINKING and value.type != "adaptive":
        return dict.fromkeys(_SWITCHES, value.type == "enabled")
    if mark is BUDGET:
        return {"thinking_budget": value}
    if mark is not EFFORT:
        return {}
    is_named = f"'{value}'" in template or f'"{value}"' in template
    effort = {"reasoning_effort": value if is_named else _NEAREST.get(value, value)}
    return effort | dict.fromkeys(_SWITCHES, False) if value == "none" else effort


def _marked(body: BaseModel, path: str = "") -> Iterator[tuple[str, Mark, Any]]:
    """The marked fields of a body that ask for something, with their names and values."""
    for name in sorted(body.model_fields_set & type(body).model_fields.keys()):
        field, value = type(body).model_fields[name], getattr(body, name)
        for mark in field.metadata:
            if isinstance(mark, Mark) and value != field.default and value not in ([], {}):
                yield path + name, mark, value
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, OtherTool):
                yield f"{path}{name}[{each.type}]", LEFT_OUT, each
            elif isinstance(each, Body):
                yield from _marked(each, f"{path}{name}.")


def _names_in(template: str) -> Collection[str]:
    """The names in the code of a chat template, without attributes and texts.

    >>> sorted(_names_in("thinking {{ a.thinking }} {%- if enable_thinking and 'effort' %}"))
    ['a', 'and', 'enable_thinking', 'if']
    """
    code = " ".join(re.findall(r"\{[{%](.*?)[%}]\}", template, re.DOTALL))
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", re.sub(r"'[^']*'|\"[^\"]*\"", "''", code)))


# --- lines that differ for nothing, and after which no prefix could be shared -------------------------------------------

# Each is a whole line at the beginning of a text of the system. The first is Claude Code's: a hash of the conversation.
VARYING_LINES = ("x-anthropic-billing-header:",)
_LINES = re.compile(rf"\A(?:(?:{'|'.join(map(re.escape, VARYING_LINES))})[^\n]*(?:\n+|\Z))+")


def without_varying_lines(content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
    """What the system says, without such lines at the beginning of its text or of a part.

    >>> without_varying_lines("x-anthropic-billing-header: cc_version=2.1.0.8a5;\\nYou are an agent.")
    'You are an agent.'
    """
    if isinstance(content, str):
        return _LINES.sub("", content)
    if content is None:
        return None
    return [
        {**part, "text": _LINES.sub("", part["text"])} if isinstance(part.get("text"), str) else part
        for part in content
    ]
