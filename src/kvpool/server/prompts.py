"""Bodies that name a prompt in any form of the server's endpoints, and the one way from such a body to its prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from kvpool.engine.pictures import PicturedPrompt
from kvpool.server.auth import Caller
from kvpool.server.body import Body, Int
from kvpool.server.completions import chat_dialogue, prompts_in
from kvpool.server.errors import Problem, problem_of_body
from kvpool.server.limits import Gate
from kvpool.server.long_work import Asker
from kvpool.server.messages import Messages, message_dialogue
from kvpool.server.parameters import asker_of
from kvpool.server.responses import Responses, response_dialogue
from kvpool.server.schema import ChatCompletions, Completions, Sampling
from kvpool.server.served_model import ServedModel
from kvpool.server.tools import Dialogue

FORMS: Mapping[str, type[Sampling]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/completions": Completions,
}
_PROMPTS = frozenset({"prompt", "messages", "input"})  # one of them is in every body that names a prompt
_OF_MESSAGES = frozenset(Messages.model_fields) - frozenset(ChatCompletions.model_fields)
_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "document")  # parts of no other form
_CHOICES = ("auto", "any", "tool", "none")  # of tools, in the form of no other
_READERS: Mapping[type[Sampling], Callable[[Any, ServedModel, Asker], Awaitable[Dialogue]]] = {
    ChatCompletions: chat_dialogue,
    Responses: response_dialogue,
    Messages: message_dialogue,
}


def endpoint_of(body: Mapping[str, Any]) -> str:
    """The path of the endpoint that takes a body, by what it holds. Of chats, those with nothing of Anthropic's are OpenAI's.

    >>> endpoint_of({"input": "Hello"})
    '/v1/responses'
    """
    if "messages" not in body:
        return "/v1/responses" if "input" in body else "/v1/completions"
    return "/v1/messages" if _is_of_messages(body) else "/v1/chat/completions"


def _is_of_messages(body: Mapping[str, Any]) -> bool:
    """Whether a conversation has what Anthropic's form alone has."""
    choice = body.get("tool_choice")
    parts = [part for turn in _objects(body["messages"]) for part in _objects(turn.get("content"))]
    return (
        not _OF_MESSAGES.isdisjoint(body)
        or (isinstance(choice, Mapping) and choice.get("type") in _CHOICES)
        or any("name" in tool for tool in _objects(body.get("tools")))
        or any(part.get("type") in _BLOCKS or (part.get("type") == "image" and "source" in part) for part in parts)
    )


def _objects(given: Any) -> list[Mapping[str, Any]]:
    """The objects in a list; none if it is none."""
    return [each for each in given if isinstance(each, Mapping)] if isinstance(given, list) else []


class CacheQuery(Body):
    """A request as it is sent to any endpoint, here for its prompt: tools, images and all. The rest of it changes nothing.

    Its form follows from what it holds. `endpoint` names the path for which it is meant, where two forms look alike.
    """

    model_config = ConfigDict(extra="allow")
    endpoint: Literal["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"] | None = None
    model: str = ""
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @property
    def names_prompt(self) -> bool:
        """Whether there is a prompt in it."""
        return not _PROMPTS.isdisjoint(self.model_extra or ())

    def request(self) -> Sampling:
        """The request, checked as its endpoint does."""
        extra = self.model_extra or {}
        shared = self.model_fields_set & Sampling.model_fields.keys()
        given = {**extra, **{name: getattr(self, name) for name in shared}}
        form = FORMS[self.endpoint or endpoint_of(extra)]
        if form is Messages:
            given.setdefault("max_tokens", 1)  # its endpoint needs it; the prompt does not
        try:
            return form.model_validate(given)
        except ValidationError as error:
            placed = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise problem_of_body(placed, given) from None


class PinnedPrompt(CacheQuery):
    """A prompt that stays cached, for `ttl_seconds` or until the pin is ended."""

    ttl_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None


class PromptForOthers(CacheQuery):
    """`POST /v1/prefill`: a prompt that another server answers. With `stream` its progress comes as events."""

    stream: bool = False
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] = 0
    deadline_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None


class Invalidation(CacheQuery):
    """`POST /v1/cache/invalidate`; admin keys may name another tenant than their own. `everything` is all of a tenant."""

    everything: bool = False
    tenant: Annotated[str, Field(max_length=256)] | None = None


async def named_prompt(
    body: CacheQuery, model: ServedModel, caller: Caller, gate: Gate, held: ExitStack
) -> PicturedPrompt:
    """The prompt that a body names. Its images count as the caller's until `held` is closed."""
    if not body.names_prompt:
        raise Problem(400, "give a prompt, messages or an input", code="invalid_value", param="prompt")
    request = body.request()
    prompt = await prompt_of(request, model, asker_of(request, caller, gate))
    if prompt.pictures is not None:
        held.enter_context(gate.holding(caller.key, prompt.pictures.num_bytes))
    return prompt


async def prompt_of(body: Sampling, model: ServedModel, asker: Asker) -> PicturedPrompt:
    """The prompt of a request, which its endpoint computes. Images are read in a turn of who asks."""
    if not isinstance(body, Completions):
        return (await _READERS[type(body)](body, model, asker)).prompt
    prompt, *more = prompts_in(body.prompt)
    if more:
        words = f"a question is about one prompt, and this request has {1 + len(more)}: ask about each"
        raise Problem(400, words, code="invalid_value", param="prompt")
    return PicturedPrompt(await model.tokens(prompt))
