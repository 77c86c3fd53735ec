"""Turns the body of a request into sampling parameters and options of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvpool.engine.grammar import Grammar
from kvpool.engine.params import SamplingParams
from kvpool.errors import InvalidArgumentError, KVPoolError
from kvpool.scope import Retention, ReuseHint, TokenRange
from kvpool.server.auth import Caller
from kvpool.server.body import Body
from kvpool.server.errors import Problem, problem_of
from kvpool.server.limits import Gate
from kvpool.server.long_work import Asker, in_thread
from kvpool.server.schema import KeptTokens, ResponseFormat, Sampling
from kvpool.server.served_model import ServedModel, scope_for_tenant
from kvpool.server.sessions import session_name
from kvpool.server.tools import Dialogue


async def sampling_params(
    body: Sampling,
    model: ServedModel,
    caller: Caller,
    gate: Gate,
    max_new_tokens: int,
    logprobs: int | None = None,
    dialogue: Dialogue | None = None,
) -> SamplingParams:
    """How the tokens of an answer are chosen. That of a dialogue may call tools."""
    if body.n > gate.limits.samples:
        raise Problem(
            400, f"n={body.n} is over this server's limit of {gate.limits.samples}", code="invalid_value", param="n"
        )
    grammar = await _grammar(body, model, caller, gate, dialogue)
    if body.min_tokens > max_new_tokens:
        words = f"min_tokens={body.min_tokens} is over the {max_new_tokens} tokens that the answer may have; lower it"
        raise Problem(400, words, code="invalid_value", param="min_tokens")
    keeps_marks = dialogue is not None and not model.answers.skips_special_tokens
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    try:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=body.min_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k == -1 else body.top_k,  # in other servers -1 turns it off
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            seed=None if body.seed is None else body.seed % 2**63,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens and not keeps_marks,
            grammar=grammar,
            logprobs=logprobs,
            n=body.n,
        )
    except KVPoolError as error:
        raise problem_of(error) from error


async def _grammar(
    body: Sampling, model: ServedModel, caller: Caller, gate: Gate, dialogue: Dialogue | None
) -> Grammar | None:
    """The grammar for the form of the answer. It is compiled in a turn of the caller, because it may take a second."""
    wanted, rules, where = body.response_format or ResponseFormat(), None, "response_format"
    if body.structured_outputs is not None:
        if wanted.type != "text":
            raise Problem(400, "response_format and structured_outputs: give one", code="invalid_value", param=where)
        where = "structured_outputs"
        wanted, rules = body.structured_outputs.as_response_format(), body.structured_outputs.rules()
    if wanted.type == "json_schema" and wanted.json_schema is None:
        raise Problem(
            400,
            "response_format 'json_schema' needs json_schema: {name, schema}",
            code="invalid_value",
            param="response_format",
        )
    schema = None if wanted.json_schema is None else wanted.json_schema.of
    if rules is not None and dialogue is not None and dialogue.use.tools:
        words = "structured_outputs beside tools: only json and json_object; or leave the tools out"
        raise Problem(400, words, code="unsupported", param=where)
    if rules is None and dialogue is not None:
        form: Mapping[str, Any] | None = None if wanted.type == "text" else schema or {"type": "object"}
        rules = model.answers.rules(dialogue, form)
        where = where if rules is None else "tools"
    if rules is None and wanted.type == "text":
        return None
    try:
        async with gate.grammars.turn(caller.key):
            if rules is not None:
                return await in_thread(partial(model.engine.grammar, rules), gate.grammar_threads)
            return await in_thread(partial(model.engine.json_grammar, schema), gate.grammar_threads)
    except InvalidArgumentError as error:
        raise Problem(400, str(error), code="invalid_json_schema", param=where) from error
    except KVPoolError as error:
        raise problem_of(error) from error


def asker_of(body: Body, caller: Caller, gate: Gate) -> Asker:
    """Who asks with this body."""
    salt = body.cache_salt if isinstance(body, Sampling) else ""
    return Asker(caller.tenant, salt, partial(gate.images.turn, caller.key))


def request_options(body: Sampling, caller: Caller, session: str | None) -> dict[str, Any]:
    """Further options for the engine, besides the prompt and the parameters."""
    return {
        "retention": _retention(body.retention or ()),
        "priority": body.priority,
        "scope": scope_for_tenant(caller.tenant, body.cache_salt),
        "session": session_name(caller, session) if session else None,
        "hint": None if body.expected_seconds is None else ReuseHint(expected_seconds=body.expected_seconds),
        "deadline": None if body.deadline_ms is None else body.deadline_ms / 1e3,
    }


def _retention(kept: Sequence[KeptTokens]) -> Retention | None:
    """How long the tokens of a request stay cached, without entries that only pin."""
    ranges, of_answer = [], []
    for number, each in enumerate(kept):
        wrong = _wrong(each)
        if wrong:
            raise Problem(400, f"retention.{number}: {wrong}", code="invalid_value", param=f"retention.{number}")
        if each.part == "answer":
            of_answer.append(each)
        elif each.priority is not None:
            ranges.append(TokenRange(each.start, each.end, each.priority, each.ttl_seconds))
    if len(of_answer) > 1:
        raise Problem(400, "retention has two entries for the answer", code="invalid_value", param="retention")
    last = of_answer[0] if of_answer else None
    try:
        if last is not None:
            return Retention(ranges, last.priority, last.ttl_seconds)
        return Retention(ranges) if ranges else None
    except KVPoolError as error:
        raise Problem(400, f"retention: {error}", code="invalid_value", param="retention") from error


def _wrong(kept: KeptTokens) -> str:
    """What is wrong with an entry of `retention`; empty if it is right."""
    if kept.priority is None and not kept.pin:
        return "give a priority, or pin"
    if kept.end is not None and kept.end <= kept.start:
        return f"tokens {kept.start} to {kept.end} are none: end is exclusive"
    if kept.part == "answer" and (kept.pin or kept.start or kept.end is not None):
        return "tokens of the answer have a priority and a time, no range and no pin"
    if kept.pin and kept.start:
        return (
            f"a pin begins at the first token of the prompt, not at {kept.start}: what follows is of no use without it"
        )
    return ""


def pins_of(body: Sampling) -> list[KeptTokens]:
    """The pins that a request asks for."""
    return [kept for kept in body.retention or () if kept.pin]
