"""Errors of the server, in the form that OpenAI's clients understand."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.errors import (
    ConfigError,
    InvalidArgumentError,
    KVPoolError,
    NeverFitsError,
    OutOfBlocksError,
    PinBudgetError,
    SequenceStateError,
    UnknownSessionError,
    UnsupportedModelError,
)

log = logging.getLogger("kvpool")


class Problem(Exception):
    """A refused request: the HTTP status, a kind that programs compare, and a sentence for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.details = details
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    @property
    def kind(self) -> str:
        """The `type` field of OpenAI's errors."""
        known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        return known.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The body of the answer: OpenAI's form, with the top-level `type` of Anthropic's."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": error if self.details is None else {**error, "details": self.details}}


def problem_of(error: KVPoolError) -> Problem:
    """The `Problem` for an error of the library: a mistake of the caller, a lack of room, or a fault of the server.

    How full the server is, and how large, goes to the log only: one tenant is told nothing of the others.
    """
    if isinstance(error, NeverFitsError):
        log.info("a request was refused: %s", error)
        words = "the prompt and its answer need more memory than this server has: shorten the prompt or ask for fewer tokens"
        return Problem(400, words, code="context_length_exceeded")
    if isinstance(error, UnknownSessionError):
        return Problem(404, "this tenant has no such session: it begins with its first request", code="not_found")
    if isinstance(error, (InvalidArgumentError, ConfigError)):
        return Problem(400, str(error), code="invalid_value")
    if isinstance(error, UnsupportedModelError):
        return Problem(400, str(error), code="unsupported")
    if isinstance(error, PinBudgetError):
        log.info("a pin was refused: %s", error)
        words = "this server keeps no more pinned tokens: end a pin, or try again later"
        return Problem(429, words, code="out_of_memory", retry_after=1)
    if isinstance(error, OutOfBlocksError):
        log.info("a request was refused: %s", error)
        return Problem(429, "this server has no memory for that now: try again", code="out_of_memory", retry_after=1)
    if isinstance(error, SequenceStateError):
        return Problem(503, str(error), code="unavailable", retry_after=5)
    return Problem(500, str(error), code="failed")


def problem_of_body(errors: Sequence[Mapping[str, Any]], body: Any) -> Problem:
    """The `Problem` for a body that does not fit its schema: it names the field and what it should be.

    A field with several allowed forms has an error for each form. The message has those that matched furthest.

    >>> errors = [{"loc": ("body", "stop", "str"), "msg": "no text"}, {"loc": ("body", "stop", "list", 1), "msg": "too long"}]
    >>> str(problem_of_body(errors, {"stop": ["a", "b"]}))
    'stop.1: too long'
    """
    if isinstance(body, (bytes, str)):
        words = "the body is no JSON object: send one, with 'content-type: application/json'"
        return Problem(400, words, code="invalid_value")
    placed = [(_place(error["loc"], body), _message(error)) for error in errors]
    furthest = max((place for place, _ in placed), key=len)
    messages = dict.fromkeys(message for place, message in placed if place == furthest)
    where = ".".join(str(part) for part in furthest)
    what = " or ".join(messages)
    return Problem(400, f"{where}: {what}" if where else what, code="invalid_value", param=where or None)


def _message(error: Mapping[str, Any]) -> str:
    """What is wrong with a field, in words."""
    if error.get("type") == "extra_forbidden":
        name = str(error["loc"][-1])
        remedy = "use structured_outputs" if name.startswith("guided_") else "see /openapi.json"
        return f"this server has no such field or cannot do what it asks for: {remedy}"
    return str(error["msg"])


def _place(location: Sequence[str | int], body: Any) -> list[str | int]:
    """The part of an error's location that exists in the body, without the names of allowed forms."""
    found: list[str | int] = []
    for part in location[1:]:
        if isinstance(body, dict) and isinstance(part, str) and (part in body or part == location[-1]):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        found.append(part)
    return found
