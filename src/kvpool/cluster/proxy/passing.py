"""What a proxy reads of a request and passes on of an answer.

Of a request: its token ids (from `/tokenize` of a server), its session and its keys. Of an answer: which headers pass, when
another server is asked, and the errors for clients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from starlette.responses import JSONResponse, Response

NODE_HEADER = "x-kvpool-node"
ELSEWHERE = {502, 503, 504}  # this node cannot, another one may
_HOP_BY_HOP = {
    *(
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"transfer-encoding",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
    ),
    *(b"host", b"content-length"),
}
WITH_PROMPT = (  # paths whose requests go where their prompt is cached
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/cache/query", "/v1/cache/pin", "/v1/cache/warm", "/v1/cache/prefetch"),
)
_CREDENTIALS = ("authorization", "x-api-key")  # OpenAI's clients send the one, Anthropic's the other
_ANY_TEXT = "a"  # for a question that only asks for `cache_keys`


class ElsewhereError(Exception):
    """A server says that it cannot answer now: another one is asked."""


class NoModelError(Exception):
    """A server does not have the model or adapter of a request. If no other has it, its answer is the client's."""

    def __init__(self, answer: Response) -> None:
        super().__init__("it does not have the model")
        self.answer = answer


def passed_on(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are not about one connection, also repeated ones.

    Blanks around a value are allowed and say nothing; a client of HTTP would refuse to send them.
    """
    named = [value for name, value in headers if name.lower() == b"connection"]
    dropped = _HOP_BY_HOP.union(each.strip().lower() for value in named for each in value.split(b","))
    return [(name, value.strip(b" \t")) for name, value in headers if name.lower() not in dropped]


def is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether an answer comes part by part."""
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def lost(error: Exception) -> bytes:
    """The end of a stream whose node failed in the middle of it, for the client to read."""
    problem = {"message": f"the server of this stream failed: {type(error).__name__}", "type": "server_error"}
    return b"\n\ndata: " + json.dumps({"error": {**problem, "code": "node_lost"}}).encode() + b"\n\n"


def refusal(status: int, message: str, code: str = "no_node") -> Response:
    """The answer if no node can give one, or none should be asked."""
    problem = {"message": message, "type": "server_error" if status >= 500 else "invalid_request_error", "code": code}
    headers = {"retry-after": "1"} if status in (502, 503) else None
    return JSONResponse({"error": problem}, status_code=status, headers=headers)


class RoutingRequest(NamedTuple):
    """What routing needs of a request: its first prompt, the keys of its scope, and its session.

    `named` are the model and the salt that the request names.
    """

    tokens: Sequence[int]
    first_keys: tuple[Any, ...]
    session: str | None
    named: Mapping[str, str] = {}
    lora_name: str | None = None  # the adapter of its model in published events

    def extra_keys(self) -> list[Any] | None:
        """The keys of its blocks in the form of the wire; only the first one can have some here."""
        return [list(self.first_keys)] if self.first_keys else None


NOTHING = RoutingRequest((), (), None)


async def read_routing_request(
    path: str,
    headers: Mapping[str, str],
    content: bytes,
    tokenize: Callable[[dict[str, Any], dict[str, str]], Awaitable[dict[str, Any]]],
) -> RoutingRequest:
    """Reads what routing needs of a request. An unreadable body passes, because its server will refuse it.

    `tokenize` sends a question to `/tokenize` of a node, with the credentials of the caller; it returns {} if none answers.
    """
    if path not in WITH_PROMPT:
        return NOTHING
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return NOTHING
    session = session_of(body, headers)
    salt = body.get("cache_salt")
    keys = (salt,) if isinstance(salt, str) and salt else ()
    named, caller = named_in(body), credentials(headers)
    tokens, question = given_tokens(body), tokenize_body(body)
    if tokens and (keys or caller):  # the tokens are known, but only a server knows the keys of the scope
        question = {**named, "prompt": _ANY_TEXT}
    if question is None:
        return RoutingRequest(tokens, keys, session, named)
    try:
        said = await tokenize(question, caller)
    except RecursionError:  # it could just be read, but is nested too deeply to be written
        said = {}
    said_keys = said.get("cache_keys")
    if isinstance(said_keys, list) and all(isinstance(each, str) for each in said_keys):
        keys = tuple(said_keys)
    adapter = said.get("lora_name")
    adapter = adapter if isinstance(adapter, str) else None
    return RoutingRequest(tokens or said.get("tokens", ()), keys, session, named, adapter)


def lacks_model(status: int, content: bytes) -> bool:
    """Whether an answer of a server says that it does not have the model of a request. Another server may have it."""
    if status != 404:
        return False
    try:
        problem = json.loads(content)["error"]
        return bool(problem.get("code") == "model_not_found" or problem.get("param") == "model")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return False


def credentials(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request that say who asks."""
    return {name: value.strip(" \t") for name in _CREDENTIALS if (value := headers.get(name)) is not None}


def tokenize_body(body: dict[str, Any]) -> dict[str, Any] | None:
    """The body for `/tokenize` for a request; None if it needs none or has no prompt."""
    base = named_in(body)
    if isinstance(messages := body.get("messages"), list):
        system = body.get("system")  # Anthropic's form
        spoken = [{"role": "system", "content": system}, *messages] if isinstance(system, str) else messages
        return {**base, "messages": spoken}
    prompt = body.get("prompt", body.get("input"))
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    return {**base, "prompt": first} if isinstance(first, str) else None


def named_in(body: dict[str, Any]) -> dict[str, str]:
    """The model and the salt of a request, if it names them."""
    return {name: body[name] for name in ("model", "cache_salt") if isinstance(body.get(name), str)}


def given_tokens(body: dict[str, Any]) -> Sequence[int]:
    """The token ids in a request; if it has several prompts, those of the first."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    return prompt if are_tokens(prompt) else []


def are_tokens(given: object) -> TypeGuard[list[int]]:
    """Whether this is a list of token ids. A server will refuse anything else."""
    return isinstance(given, list) and all(type(token) is int and 0 <= token < 2**31 for token in given)


def session_of(body: dict[str, Any], headers: Any) -> str | None:
    """The session of a request, from the fields and headers that clients use.

    The caller's key is part of it, so two callers never share a session. It is a digest, because many are remembered, names
    may be long, and keys must not be kept.
    """
    named = headers.get("x-session-id") or body.get("session_id") or body.get("user")
    if not isinstance(named, str):
        return None
    whose = f"{' '.join(credentials(headers).values())} {named}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(whose, digest_size=16).hexdigest()
