"""What a proxy reads of a request and passes on of an answer.

Of a request: its prompt (from `/tokenize` of a server), its session and its keys. Of an answer: which headers pass, when
another server is asked, and the errors for clients.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from starlette.responses import JSONResponse, Response

from kvpool.cluster.translator import item_keys
from kvpool.told import digest_of, told_session

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
_ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
WITH_PROMPT = (  # paths whose requests go where their prompt is cached
    *_ENDPOINTS,
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

    `named` are the model and the salt that the request names. `images` are those of the prompt: where their placeholders
    begin, how many there are, and what they are called in published events.
    """

    tokens: Sequence[int]
    first_keys: tuple[Any, ...]
    session: str | None
    named: Mapping[str, str] = {}
    lora_name: str | None = None  # the adapter of its model in published events
    images: Sequence[tuple[int, int, str]] = ()

    def extra_keys(self, block_size: int) -> list[Any] | None:
        """The keys of its blocks in the form of the wire."""
        if not self.images:
            return [list(self.first_keys)] if self.first_keys else None
        first, *rest = item_keys(self.images, block_size, max(1, len(self.tokens) // block_size))
        return [[*self.first_keys, *first], *rest]


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
    tokens, question = given_tokens(body), tokenize_body(path, body)
    if tokens and (keys or caller):  # the tokens are known, but only a server knows the keys of the scope
        question = {**named, "prompt": _ANY_TEXT}
    if question is None:
        return RoutingRequest(tokens, keys, session, named)
    try:
        said = await tokenize(question, caller)
        if "cache_keys" not in said and (plain := as_chat(body)) is not None:  # this server reads chats only
            said = await tokenize(plain, caller)
    except RecursionError:  # it could just be read, but is nested too deeply to be written
        said = {}
    said_keys = said.get("cache_keys")
    if isinstance(said_keys, list) and all(isinstance(each, str) for each in said_keys):
        keys = tuple(said_keys)
    adapter = said.get("lora_name")
    adapter = adapter if isinstance(adapter, str) else None
    tokens = tokens or said.get("tokens", ())
    if not tokens and session is None:
        session = beginning_of(body, caller)
    return RoutingRequest(tokens, keys, session, named, adapter, _images_in(said))


def _images_in(said: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """The images of a prompt that an answer of `/tokenize` tells."""
    images = said.get("images")
    return [(place, length, name) for place, length, name in images] if isinstance(images, list) else []


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


def tokenize_body(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The body for `/tokenize` for a request; None if it needs none or has no prompt.

    It is the request itself: a server of kvpool reads it as its endpoint does. Of several prompts it has the first.
    """
    if "messages" in body or "input" in body:
        return {**body, "endpoint": path} if path in _ENDPOINTS else body
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    return {**named_in(body), "prompt": first} if isinstance(first, str) else None


def as_chat(body: dict[str, Any]) -> dict[str, Any] | None:
    """The beginning of a response or of one of Anthropic's messages as a chat; None if the body is neither.

    It has the system text, the tools and the turns of text before the first one of another kind: so much of the prompt is
    known to a server that reads chats only.
    """
    if not ("input" in body or "system" in body):
        return None
    given = body.get("input", body.get("messages"))
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    system = _text(body.get("instructions", body.get("system")))
    spoken = [{"role": "system", "content": system}] if system else []
    for turn in turns if isinstance(turns, list) else ():
        text = _text(turn.get("content")) if isinstance(turn, dict) else None
        if text is None:
            break
        spoken.append({"role": turn.get("role"), "content": text})
    tools = body.get("tools")
    functions = [_function(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return {**named_in(body), "messages": spoken, **({"tools": functions} if functions else {})}


def _text(content: object) -> str | None:
    """The text of a turn; None if there is something else in it."""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return content if isinstance(content, str) else None


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of a response or a message as that of a chat."""
    function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


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


def session_of(body: dict[str, Any], headers: Mapping[str, str]) -> str | None:
    """The session of a request, from the fields and headers that clients use.

    The caller's key is part of it, so two callers never share a session. It is a digest, because many are remembered, names
    may be long, and keys must not be kept.
    """
    name = told_session(body, headers).name
    return None if name is None else _session(name, credentials(headers))


def beginning_of(body: dict[str, Any], caller: Mapping[str, str]) -> str | None:
    """A session for a conversation whose tokens no server tells: what its first turn of a user says."""
    turns = body.get("messages", body.get("input"))
    if not isinstance(turns, list):
        return None
    first = next((turn for turn in turns if isinstance(turn, dict) and turn.get("role") == "user"), None)
    return None if first is None else _session(json.dumps(first.get("content")), caller)


def _session(name: str, caller: Mapping[str, str]) -> str:
    return digest_of(f"{' '.join(caller.values())} {name}")
