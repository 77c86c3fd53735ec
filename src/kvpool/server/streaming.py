"""How a part of an answer is written into a stream of server-sent events."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

HOLE = "\0"
"""The text that an `EventForm` fills in."""


def as_event(part: dict[str, Any], name: str = "") -> bytes:
    """One part as an event; OpenAI's have no name, Anthropic's do.

    >>> as_event({"text": "é"}, "delta")
    b'event: delta\\ndata: {"text":"\\xc3\\xa9"}\\n\\n'
    """
    data = json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


class EventForm:
    """Events that differ in one text only: all else is written once, since a stream has an event for each token.

    >>> EventForm({"index": 0, "text": HOLE}).filled('"é"')
    b'data: {"index":0,"text":"\\\\"\\xc3\\xa9\\\\""}\\n\\n'
    """

    def __init__(self, part: dict[str, Any], name: str = "") -> None:
        self._before, self._after = as_event(part, name).rsplit(json.dumps(HOLE).encode(), 1)

    def filled(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + encode_basestring(text).encode("utf-8", "replace") + self._after
