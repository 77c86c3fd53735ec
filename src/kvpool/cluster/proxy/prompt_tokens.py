"""The token ids of a request, as the server that gets it will see them: the servers themselves say, by `/tokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class Asked(NamedTuple):
    """What routing needs of a request: its first prompt, what isolates it besides tokens, and its session."""

    tokens: Sequence[int]
    first_keys: tuple[Any, ...]
    session: str | None

    def extra_keys(self) -> list[Any] | None:
        """The keys of its blocks in the form of the wire; only the first one can have some here."""
        return [list(self.first_keys)] if self.first_keys else None


def tokenize_body(body: dict[str, Any]) -> dict[str, Any] | None:
    """The question to `/tokenize` for a request, None where it needs none or has none."""
    base = {name: body[name] for name in ("model", "cache_salt") if isinstance(body.get(name), str)}
    if isinstance(messages := body.get("messages"), list):
        system = body.get("system")  # Anthropic's form
        spoken = [{"role": "system", "content": system}, *messages] if isinstance(system, str) else messages
        return {**base, "messages": spoken}
    prompt = body.get("prompt", body.get("input"))
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    return {**base, "prompt": first} if isinstance(first, str) else None


def given_tokens(body: dict[str, Any]) -> Sequence[int]:
    """The token ids that a request brought itself; those of the first prompt where it has several."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    return prompt if are_tokens(prompt) else []


def are_tokens(given: object) -> TypeGuard[list[int]]:
    """Whether this is a list of token ids; anything else is for a server to refuse."""
    return isinstance(given, list) and all(type(token) is int and 0 <= token < 2**31 for token in given)


def session_of(body: dict[str, Any], headers: Any) -> str | None:
    """Whose request it is, in the words of the field, so that one follows the other; with the key, so that no two mix."""
    named = headers.get("x-session-id") or body.get("session_id") or body.get("user")
    return f"{headers.get('authorization', '')} {named}" if isinstance(named, str) else None
