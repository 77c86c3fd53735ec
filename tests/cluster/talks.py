"""Conversations in every form of a request: what an agent or a chat sends, turn after turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

SYSTEM = "You help with code. Read before you write, write little, and say what you did. " * 2
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "Where it is."}}}
READ = {"name": "read", "description": "Reads a file and gives its lines.", "parameters": SCHEMA}
LIST = {"name": "list", "description": "Lists the files of a folder, one a line.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": each} for each in (READ, LIST)]

Turns = list[tuple[str, str, str]]  # what the user said, the file that was read, and the answer


def _spoken(who: int, number: int) -> tuple[str, str, str]:
    name = f"module_{who}_{number}.py"
    return f"What does {name} do, and who calls it?", name, f"It has the part {number} of the feature {who}."


def _result(name: str) -> str:
    return f"def main_of_{name[:-3]}(): return {name!r}  # nobody calls it"


def plain_chat(who: int, turns: Turns) -> dict[str, Any]:
    """A chat without tools, as most programs send it."""
    messages = [{"role": "system", "content": SYSTEM}]
    for said, _, answer in turns:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    return {"messages": messages[:-1], "max_tokens": 1}


def tool_chat(who: int, turns: Turns) -> dict[str, Any]:
    """A chat with tools, with parts instead of texts."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}]
    for number, (said, name, answer) in enumerate(turns):
        call = {"name": "read", "arguments": f'{{"path": "{name}"}}'}
        messages += [
            {"role": "user", "content": [{"type": "text", "text": said}]},
            {"role": "assistant", "content": None, "tool_calls": [_call(who, number, call)]},
            {"role": "tool", "tool_call_id": f"c{who}x{number}", "content": _result(name)},
            {"role": "assistant", "content": answer},
        ]
    return {"messages": messages[:-1], "tools": TOOLS, "max_tokens": 1}


def _call(who: int, number: int, call: dict[str, str]) -> dict[str, Any]:
    return {"id": f"c{who}x{number}", "type": "function", "function": call}


def response(who: int, turns: Turns) -> dict[str, Any]:
    """A request for a response, with its conversation as a list of items."""
    items: list[dict[str, Any]] = []
    for number, (said, name, answer) in enumerate(turns):
        named = {"call_id": f"c{who}x{number}"}
        items += [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": said}]},
            {"type": "function_call", "name": "read", "arguments": f'{{"path": "{name}"}}', **named},
            {"type": "function_call_output", "output": _result(name), **named},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]},
        ]
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    return {"instructions": SYSTEM, "input": items[:-1], "tools": tools, "max_output_tokens": 1}


def message(who: int, turns: Turns) -> dict[str, Any]:
    """A request for a message, with a system text in parts."""
    spoken: list[dict[str, Any]] = []
    for number, (said, name, answer) in enumerate(turns):
        used = {"type": "tool_use", "id": f"c{who}x{number}", "name": "read", "input": {"path": name}}
        result = {"type": "tool_result", "tool_use_id": f"c{who}x{number}", "content": _result(name)}
        spoken += [
            {"role": "user", "content": [{"type": "text", "text": said}]},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": answer},
        ]
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": SCHEMA} for each in (READ, LIST)
    ]
    return {
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "messages": spoken[:-1],
        "tools": tools,
        "max_tokens": 1,
    }


FORMS: dict[str, tuple[str, Callable[[int, Turns], dict[str, Any]]]] = {
    "plain chats": ("/v1/chat/completions", plain_chat),
    "chats with tools": ("/v1/chat/completions", tool_chat),
    "responses": ("/v1/responses", response),
    "messages": ("/v1/messages", message),
}


class Talks:
    """Some conversations in one form: how much of their prompts was cached, and how often one changed its node."""

    def __init__(self, form: str, talks: int = 6, salt: str = "") -> None:
        self.path, self._body = FORMS[form]
        self._salt, self._dice = salt, random.Random(form)
        self._turns: list[Turns] = [[] for _ in range(talks)]
        self._nodes: list[str | None] = [None] * talks
        self.num_tokens = self.num_cached = self.num_changes = 0

    def turn(self, post: Callable[[str, dict[str, Any]], Any]) -> None:
        """One more turn of each. `post` sends a body to a path and returns the answer."""
        for who in self._dice.sample(range(len(self._turns)), len(self._turns)):
            turns = self._turns[who]
            turns.append(_spoken(who, len(turns)))
            answer = post(self.path, {**self._body(who, turns), "cache_salt": self._salt})
            assert answer.status_code == 200, answer.text
            tokens, cached = usage(answer.json())
            self.num_tokens += tokens
            self.num_cached += cached
            node = answer.headers.get("x-kvpool-node")
            self.num_changes += self._nodes[who] not in (None, node)
            self._nodes[who] = node

    @property
    def share(self) -> float:
        """How much was cached."""
        return self.num_cached / self.num_tokens


def usage(answer: dict[str, Any]) -> tuple[int, int]:
    """All and cached tokens of a prompt, as any endpoint says them."""
    told = answer["usage"]
    if "cache_read_input_tokens" in told:
        cached, created = told["cache_read_input_tokens"], told["cache_creation_input_tokens"]
        return told["input_tokens"] + cached + created, cached
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details")
    return told.get("prompt_tokens") or told["input_tokens"], details["cached_tokens"]
