"""`/v1/completions` and `/v1/chat/completions`: from a body to an answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvpool.engine.pictures import PicturedPrompt
from kvpool.server.agent_fields import without_varying_lines
from kvpool.server.answers import ChatAnswer, TextAnswer
from kvpool.server.auth import Caller
from kvpool.server.body import Body
from kvpool.server.errors import Problem
from kvpool.server.exchange import Exchange, RequestContext
from kvpool.server.long_work import Asker
from kvpool.server.parameters import asker_of, sampling_params
from kvpool.server.schema import ChatCompletions, Completions, Message, Tool
from kvpool.server.served_model import ServedModel
from kvpool.server.tools import Dialogue, ToolUse, tool_use

FILL_CONTEXT = 2**31 - 1  # tokens; the engine cuts this to what the context has room for


async def complete(
    request: Request, body: Completions, model: ServedModel, caller: Caller, context: RequestContext
) -> Response:
    """Answers a request for completions, of one prompt or several."""
    if body.suffix is not None:
        raise Problem(400, "suffix is not supported: the model continues a prompt", code="unsupported", param="suffix")
    given = prompts_in(body.prompt)
    most = context.gate.limits.prompts
    if len(given) > most:
        raise Problem(
            400,
            f"{len(given)} prompts are over this server's limit of {most} at once",
            code="invalid_value",
            param="prompt",
        )
    prompts = await asyncio.gather(*(model.tokens(prompt) for prompt in given))
    params = await sampling_params(body, model, caller, context.gate, max(1, body.max_tokens), body.logprobs)
    if body.echo:
        params = replace(params, prompt_logprobs=body.logprobs)
    return await Exchange(request, body, model, caller, context, TextAnswer(model, body)).run(prompts, params)


async def chat(
    request: Request, body: ChatCompletions, model: ServedModel, caller: Caller, context: RequestContext
) -> Response:
    """Answers a conversation."""
    _refuse_contradictions(body)
    begun = await chat_dialogue(body, model, asker_of(body, caller, context.gate))
    most = body.max_completion_tokens or body.max_tokens or FILL_CONTEXT
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    params = await sampling_params(body, model, caller, context.gate, most, wanted, begun)
    answer = ChatAnswer(model, body, model.answers.reader(begun))
    return await Exchange(request, body, model, caller, context, answer).answer(begun, params)


async def chat_dialogue(body: ChatCompletions, model: ServedModel, asker: Asker) -> Dialogue:
    """The conversation of a body, ready for the model."""
    offered = [tool.model_dump(exclude_none=True) for tool in body.tools or () if isinstance(tool, Tool)]
    use = tool_use(offered, body.tool_choice, body.parallel_tool_calls)
    return await dialogue(
        model,
        body,
        body.messages,
        use,
        asker,
        body.chat_template_kwargs,
        begins=body.add_generation_prompt,
        continues=body.continue_final_message,
    )


def _refuse_contradictions(body: ChatCompletions) -> None:
    """Refuses contradictory fields."""
    if body.top_logprobs and not body.logprobs:
        raise Problem(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    if body.max_tokens and body.max_completion_tokens not in (None, body.max_tokens):
        words = "max_tokens and max_completion_tokens are the same limit: give one"
        raise Problem(400, words, code="invalid_value", param="max_tokens")


async def dialogue(
    model: ServedModel,
    body: Body,
    messages: Sequence[Message],
    use: ToolUse,
    asker: Asker,
    template: Mapping[str, Any] | None = None,
    *,
    begins: bool = True,
    continues: bool = False,
) -> Dialogue:
    """The conversation of a body with its tools, ready for the model. `template` has variables that the body sets itself.

    If it `continues`, the answer goes on with the last message; else the prompt ends where the assistant `begins` to speak.
    Images are read in a turn of who asks.
    """
    model.answers.check(use)
    asked = model.answers.follow(body)
    variables = {**asked.template, **(template or {})}
    prompt, text = await conversation_tokens(
        model, messages, asker, use.offered, variables, begins=begins, continues=continues
    )
    return Dialogue(prompt, use, variables, asked.left_out, text)


async def conversation_tokens(
    model: ServedModel,
    messages: Sequence[Message],
    asker: Asker,
    tools: Sequence[dict[str, Any]] = (),
    template: Mapping[str, Any] | None = None,
    *,
    begins: bool = True,
    continues: bool = False,
) -> tuple[PicturedPrompt, str]:
    """A conversation as the model gets it, and its text, as of `ServedModel.chat_tokens`.

    Text parts of a message without images are joined.
    """
    spoken = []
    for number, message in enumerate(messages):
        turn = message.model_dump(exclude_none=True)
        content = message.content
        if message.role in ("system", "developer") and not model.keeps_varying_lines:
            content = without_varying_lines(content)
        turn["role"] = model.answers.role(message.role)
        turn["content"] = await model.images.content(content, number)
        if "tool_calls" in turn:
            turn["tool_calls"] = _calls_for_template(turn["tool_calls"], number)
        spoken.append(turn)
    for name in template or ():
        if name in _reserved():
            raise Problem(
                400,
                f"chat_template_kwargs are what the model's template reads; {name!r} is not for clients to set",
                code="invalid_value",
                param="chat_template_kwargs",
            )
    more = {**(template or {}), **({"tools": list(tools)} if tools else {})}
    if continues:
        more["continue_final_message"] = True
    if not begins:
        more["add_generation_prompt"] = False
    return await model.chat_tokens(model.answers.in_order(spoken), asker, **more)


def _calls_for_template(calls: Any, number: int) -> list[dict[str, Any]]:
    """Calls of an earlier answer. Clients send their arguments as JSON text, templates read them as objects."""
    try:
        read = []
        for call in calls:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            read.append({**call, "function": {**call["function"], "arguments": dict(arguments)}})
        return read
    except (TypeError, KeyError, ValueError, RecursionError):
        raise Problem(
            400,
            f"message {number} has tool_calls that are no calls: each needs function.name and, as JSON, function.arguments",
            code="invalid_value",
            param=f"messages.{number}.tool_calls",
        ) from None


@lru_cache
def _reserved() -> frozenset[str]:
    """Arguments of the tokenizer itself, such as another template. Clients may only set variables of the template."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"} | {"messages"}


def prompts_in(given: Any) -> list[Any]:
    """The prompts of a body: one text, one list of tokens, or several of either."""
    several = isinstance(given, list) and not isinstance(given[0], int)
    return given if several else [given]
