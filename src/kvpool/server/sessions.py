"""`/v1/sessions`: the conversations of a caller's tenant pause, go on, are forked and end, and can be looked at."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from kvpool.core.sessions import SessionInfo
from kvpool.errors import KVPoolError
from kvpool.server.auth import Caller
from kvpool.server.body import Body
from kvpool.server.errors import Problem, problem_of
from kvpool.server.schema import Sampling
from kvpool.server.served_model import ServedModel
from kvpool.told import MAX_NAME, TOP_FIELDS, Told, digest_of, short_name, told_session

log = logging.getLogger("kvpool")

SESSION_HEADER = "x-session-id"
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class OfSession(Body):
    """What is said about a session; `model` names the cache that has it."""

    model: str = ""


class PauseOfSession(OfSession):
    """A session waits; its next request is expected in so many seconds."""

    expected_seconds: Annotated[float, Field(ge=0, le=1e9)] | None = None


class ForkOfSession(OfSession):
    """A session calls a sub-agent, whose session is `child`."""

    child: Name


def session_name(caller: Caller, session_id: str) -> str:
    """The name of a session with its tenant, so that one tenant cannot name or end a session of another."""
    return f"{_prefix(caller.tenant)}{session_id}"


def told_name(info: SessionInfo) -> str:
    """The name of a session as its client gave it."""
    return info.name.removeprefix(_prefix(info.tenant))


def _prefix(tenant: str) -> str:
    return f"{len(tenant)}:{tenant}"


def session_of(body: Sampling, headers: Mapping[str, str]) -> Told:
    """What a request tells of its session."""
    told = told_session(body.model_dump(include=set(TOP_FIELDS)), headers)
    for header in (SESSION_HEADER, "x-parent-session-id"):
        if len(headers.get(header, "")) > MAX_NAME:
            raise Problem(400, f"{header} is longer than {MAX_NAME} characters", code="invalid_value")
    name, parent = (None if each is None else short_name(each) for each in (told.name, told.parent))
    return Told(name, parent if parent != name else None, told.ends)


def session_of_history(body: Sampling) -> str | None:
    """Where nobody tells: conversations that begin with the same turn of a user are one session."""
    turns = getattr(body, "messages", None) or getattr(body, "input", None)
    if not isinstance(turns, list):
        return None
    users = (turn for turn in turns if getattr(turn, "role", None) == "user")
    first = next((repr(turn.content) for turn in users), None)
    return None if first is None else f"begins-{digest_of(first)}"


async def begin_session(told: Told, model: ServedModel, caller: Caller) -> None:
    """A sub-agent's session is forked from its parent's before its first request."""
    if told.name is not None and told.parent is not None:
        names = session_name(caller, told.parent), session_name(caller, told.name)
        try:
            await asyncio.to_thread(partial(model.engine.sessions.fork, *names, tenant=caller.tenant))
        except KVPoolError as error:  # it has begun already, or is too deep: then it shares with everybody
            log.debug("a session was not forked: %s", error)


def end_session(told: Told, model: ServedModel, caller: Caller) -> None:
    """The last request of a session is over: ends it soon, in another thread."""
    if told.ends and told.name is not None:
        asyncio.get_running_loop().run_in_executor(None, _end, model, session_name(caller, told.name), caller.tenant)


def _end(model: ServedModel, name: str, tenant: str) -> None:
    try:
        model.engine.sessions.end(name, tenant=tenant)
    except KVPoolError as error:  # it is forgotten, or the engine has ended
        log.debug("a session was not ended: %s", error)


class SessionRoutes:
    """What a caller says and asks about the sessions of its tenant."""

    async def list(self, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Those that have not ended, the one used last first."""
        found = await _asked(partial(model.engine.sessions.list, tenant=caller.tenant))
        return {"sessions": [_in_json(info) for info in found]}

    async def get(self, name: str, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """What is cached of one, and what it would cost to go on."""
        named = session_name(caller, name)
        return _in_json(await _asked(partial(model.engine.sessions.get, named, tenant=caller.tenant)))

    async def pause(self, name: str, body: PauseOfSession, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """It waits for a tool or a person."""
        pause, named = model.engine.sessions.pause, session_name(caller, name)
        return {"moved_blocks": await _asked(partial(pause, named, body.expected_seconds, tenant=caller.tenant))}

    async def resume(self, name: str, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """Its next request comes soon."""
        resume, named = model.engine.sessions.resume, session_name(caller, name)
        return {"moved_blocks": await _asked(partial(resume, named, tenant=caller.tenant))}

    async def fork(self, name: str, body: ForkOfSession, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """It calls a sub-agent."""
        fork, names = model.engine.sessions.fork, (session_name(caller, name), session_name(caller, body.child))
        await _asked(partial(fork, *names, tenant=caller.tenant))
        return await self.get(body.child, model, caller)

    async def end(self, name: str, model: ServedModel, caller: Caller) -> dict[str, Any]:
        """It is over: what only it used is given up."""
        end, named = model.engine.sessions.end, session_name(caller, name)
        return {"given_up_blocks": await _asked(partial(end, named, tenant=caller.tenant))}


async def _asked(question: Any) -> Any:
    """Asks the engine in a thread, because it answers between two steps."""
    try:
        return await asyncio.to_thread(question)
    except KVPoolError as error:
        raise problem_of(error) from error


def _in_json(info: SessionInfo) -> dict[str, Any]:
    returns_in = info.returns_in
    return {
        "id": told_name(info),
        "parent": None if info.parent is None else info.parent.removeprefix(_prefix(info.tenant)),
        "state": info.state.value,
        "returns_in_seconds": None if returns_in is None or math.isinf(returns_in) else returns_in,
        "idle_seconds": info.idle_seconds,
        "requests": info.num_requests,
        "tokens": info.num_tokens,
        "tokens_by_tier": {tier.name: count for tier, count in info.tokens_by_tier.items()},
        "missing_tokens": info.missing_tokens,
        "own_tokens": info.own_tokens,
    }
