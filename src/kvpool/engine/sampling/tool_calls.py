"""Does an answer call a tool? Its conversation then goes on as soon as the tool is done, which eviction should know.

Models write calls in forms of their own. What they have in common is a mark that nothing else begins with, or that the whole
answer is JSON with a name and arguments. A wrong guess costs little: policies learn what such answers are followed by.
"""

from __future__ import annotations

import json
from typing import Final

from kvpool.engine.sampling.text import Decoder
from kvpool.eviction.hints import ReuseHint
from kvpool.pools.arrays import Int32Array

MARKS: Final = (
    "<tool_call",
    "<|tool_call",
    "<function=",
    "<function_call",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|call|>",
    "<｜tool",
)
_CALL: Final = ReuseHint(stop="tool_calls")


class ToolCalls:
    """Asked with the tokens of an answer, says that it calls a tool; None: it does not. For `Request.hint`."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def __call__(self, answer: Int32Array) -> ReuseHint | None:
        text = self._tokenizer.decode(answer.tolist(), skip_special_tokens=False)
        if any(mark in text for mark in MARKS):
            return _CALL
        is_json = text.lstrip()[:1] in ("{", "[")
        return (
            _CALL if is_json and _are_calls(self._tokenizer.decode(answer.tolist(), skip_special_tokens=True)) else None
        )


def _are_calls(text: str) -> bool:
    """Whether a text is nothing but calls as JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    calls = found if isinstance(found, list) else [found]
    return bool(calls) and all(
        isinstance(call, dict) and "name" in call and ("arguments" in call or "parameters" in call) for call in calls
    )
