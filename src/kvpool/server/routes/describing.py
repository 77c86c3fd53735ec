"""What the document at /openapi.json says of every path: how it refuses, and in which forms it answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class RefusalDetails(BaseModel):
    """Why a request was refused: a sentence for people, kinds that programs compare, and the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """The body of every answer that is none."""

    type: Literal["error"]
    error: RefusalDetails


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Refusal, "description": "Refused: the request is wrong, not allowed, or too much at the moment."},
    "5XX": {"model": Refusal, "description": "Failed, or the server is shutting down."},
}
_EVENT = {"event": {"type": "string"}, "data": {"type": "string"}}
_STREAM = {"schema": {"type": "object", "properties": _EVENT, "required": ["data"]}}  # of each event
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream` as events, while it grows.", "content": {"text/event-stream": _STREAM}}
}
