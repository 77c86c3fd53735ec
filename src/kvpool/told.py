"""What a request tells of its session: one table of the headers and fields that clients use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

MAX_NAME: Final = 256  # characters of a session's name


class Told(NamedTuple):
    """What a request tells of its session."""

    name: str | None = None
    parent: str | None = None  # the session that it was forked from
    ends: bool = False  # this is its last request


class _Headers(NamedTuple):
    """Headers of one kind of client. A sub-agent's session is named by the session and the agent."""

    session: str
    parent: str = ""
    ends: str = ""
    agent: str = ""
    parent_agent: str = ""


_HEADERS: Final = (
    _Headers("x-session-id", "x-parent-session-id", "x-session-end"),  # OpenCode, and whoever asks us
    _Headers("x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final"),
    _Headers("x-claude-code-session-id", agent="x-claude-code-agent-id", parent_agent="x-claude-code-parent-agent-id"),
    _Headers("session-id"),  # Codex
)
_FIRST: Final = ("session_id",)  # kvpool's own field, which counts before headers
# Fields of bodies, the surest first: those of conversations, then those of users
_FIELDS: Final = (
    ("nvext", "agent_context", "session_id"),  # Dynamo
    ("prompt_cache_key",),  # OpenAI
    ("metadata", "session_id"),
    ("client_metadata", "session_id"),  # Codex
    ("metadata", "user_id"),  # Anthropic; Claude Code writes its session there
    ("safety_identifier",),  # OpenAI
    ("user",),
)
_PARENTS: Final = (("nvext", "agent_context", "parent_session_id"), ("metadata", "parent_session_id"))
_ENDS: Final = (("nvext", "agent_context", "session_final"), ("metadata", "session_end"))
# The fields of bodies that are looked at
TOP_FIELDS: Final = tuple(dict.fromkeys(path[0] for path in (_FIRST, *_FIELDS, *_PARENTS, *_ENDS)))


def told_session(body: Mapping[str, Any], headers: Mapping[str, str]) -> Told:
    """What the body and the headers (with names in lower case) of a request tell of its session.

    >>> told_session({"prompt_cache_key": "chat 7"}, {})
    Told(name='chat 7', parent=None, ends=False)
    >>> told_session({}, {"x-session-id": "helper", "x-parent-session-id": "main", "x-session-end": "true"})
    Told(name='helper', parent='main', ends=True)
    """
    ends = any(_is_true(headers.get(each.ends)) for each in _HEADERS if each.ends)
    ends = ends or any(_is_true(_at(body, path)) for path in _ENDS)
    own = _at(body, _FIRST)
    if isinstance(own, str) and own:
        return Told(own, headers.get("x-parent-session-id") or _text(body, _PARENTS), ends)
    for kind in _HEADERS:
        if named := headers.get(kind.session):
            agent, caller = headers.get(kind.agent), headers.get(kind.parent_agent)
            if agent:
                return Told(f"{named}/{agent}", f"{named}/{caller}" if caller else named, ends)
            return Told(named, headers.get(kind.parent) or None, ends)
    name = _text(body, _FIELDS)
    return Told(name, None if name is None else _text(body, _PARENTS), ends)


def short_name(name: str) -> str:
    """A name of at most `MAX_NAME` characters: a longer one becomes its digest."""
    if len(name) <= MAX_NAME:
        return name
    return digest_of(name)


def digest_of(text: str) -> str:
    """A short name for a long text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _at(body: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = body
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _text(body: Mapping[str, Any], paths: tuple[tuple[str, ...], ...]) -> str | None:
    """The first text at one of these places."""
    for path in paths:
        found = _at(body, path)
        if isinstance(found, str) and found:
            found = _of_claude_code(found) if path == ("metadata", "user_id") else found
            if found:
                return found
    return None


def _of_claude_code(user: str) -> str:
    """The session in `metadata.user_id`, in the two forms in which Claude Code writes it; else the user."""
    with suppress(ValueError, RecursionError):
        said = json.loads(user)
        if isinstance(said, dict) and isinstance(said.get("session_id"), str):
            return str(said["session_id"])
    return user.rpartition("_session_")[2]


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.strip().lower() in ("1", "true", "yes"))
