"""Lines that clients put before their instructions, that differ for nothing, and after which no prefix could be shared."""

from __future__ import annotations

import re
from typing import Any

# Each is a whole line at the beginning of a text of the system. The first is Claude Code's: a hash of the conversation.
VARYING_LINES = ("x-anthropic-billing-header:",)
_LINES = re.compile(rf"\A(?:(?:{'|'.join(map(re.escape, VARYING_LINES))})[^\n]*(?:\n+|\Z))+")


def without_varying_lines(content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
    """What the system says, without such lines at the beginning of its text or of a part.

    >>> without_varying_lines("x-anthropic-billing-header: cc_version=2.1.0.8a5;\\nYou are an agent.")
    'You are an agent.'
    """
    if isinstance(content, str):
        return _LINES.sub("", content)
    if content is None:
        return None
    return [
        {**part, "text": _LINES.sub("", part["text"])} if isinstance(part.get("text"), str) else part
        for part in content
    ]
