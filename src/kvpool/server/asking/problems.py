"""What the server refuses, in the form that OpenAI's clients understand."""

from __future__ import annotations

from typing import Any

from kvpool.errors import (
    ConfigError,
    InvalidArgumentError,
    KVPoolError,
    NeverFitsError,
    OutOfBlocksError,
    PinBudgetError,
    SequenceStateError,
)


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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """The `type` field of OpenAI's errors."""
        known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        return known.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The answer's body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def problem_of(error: KVPoolError) -> Problem:
    """An error of the library as an answer: the caller's mistake, a lack of room, or ours."""
    if isinstance(error, NeverFitsError):
        return Problem(400, str(error), code="context_length_exceeded")
    if isinstance(error, (InvalidArgumentError, ConfigError)):
        return Problem(400, str(error), code="invalid_value")
    if isinstance(error, (OutOfBlocksError, PinBudgetError)):
        return Problem(429, str(error), code="out_of_memory", retry_after=1)
    if isinstance(error, SequenceStateError):
        return Problem(503, str(error), code="unavailable", retry_after=5)
    return Problem(500, str(error), code="failed")
