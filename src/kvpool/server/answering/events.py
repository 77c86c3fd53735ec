"""How a part of an answer is written into a stream of server-sent events."""

from __future__ import annotations

import json
from typing import Any


def as_event(part: dict[str, Any], name: str = "") -> bytes:
    """One part as an event; OpenAI's have no name, Anthropic's do.

    >>> as_event({"text": "é"}, "delta")
    b'event: delta\\ndata: {"text":"\\xc3\\xa9"}\\n\\n'
    """
    data = json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"
