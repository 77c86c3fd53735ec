"""Conversations in every form of a request: what an agent or a chat sends, turn after turn."""

from __future__ import annotations

import json
import random
import re
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


def claude_code(who: int, turns: Turns) -> dict[str, Any]:
    """As Claude Code sends it: a line that differs by conversation, a system turn in between, and fields of betas."""
    body = message(who, turns)
    reminder = {"type": "text", "text": "<system-reminder>The project has rules.</system-reminder>"}
    body["messages"][0]["content"].insert(0, reminder)
    body["messages"].insert(1, {"role": "system", "content": "These skills are there: review, tidy."})
    body["messages"][-1]["content"][-1]["is_error"] = len(turns) % 2 == 0
    body["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    billed = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{who}ab; cc_entrypoint=cli;"}
    session = {"device_id": "d", "account_uuid": "", "session_id": f"session-{who}"}
    return {
        **body,
        "system": [billed, *body["system"]],
        "metadata": {"user_id": json.dumps(session)},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def codex(who: int, turns: Turns) -> dict[str, Any]:
    """As Codex sends it: instructions as turns of a developer, thoughts without text, and tools of the server's side."""
    body = response(who, turns)
    told = [body.pop("instructions"), "<permissions>Ask before you write.</permissions>"]
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": each}]} for each in told
    ]
    for item in body["input"]:
        if item["type"] == "function_call":
            items.append({"type": "reasoning", "summary": [], "content": None, "encrypted_content": None})
        items.append({**item, "id": f"item_{len(items)}"} if item["type"] == "message" else item)
    spaces = {"type": "namespace", "name": "several", "description": "More of us.", "tools": body["tools"][:1]}
    return {
        **body,
        "input": items,
        "tools": [*({**tool, "strict": False} for tool in body["tools"]), spaces, {"type": "web_search"}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": f"session-{who}",
        "client_metadata": {"session_id": f"session-{who}", "turn_id": f"turn-{len(turns)}"},
        "stream": True,
    }


def agents_sdk(who: int, turns: Turns) -> dict[str, Any]:
    """As OpenAI's Agents SDK sends it: items as the server gave them, with their ids and states."""
    body = response(who, turns)
    items: list[dict[str, Any]] = []
    for item in body["input"]:
        if item.get("role") == "user":
            items.append({"role": "user", "content": item["content"][0]["text"]})
        elif item.get("role") == "assistant":
            parts = [{**part, "annotations": [], "logprobs": []} for part in item["content"]]
            items.append({**item, "id": f"msg_{len(items)}", "content": parts, "status": "completed"})
        elif item["type"] == "function_call":
            items.append({**item, "id": f"fc_{len(items)}", "status": "completed"})
        else:
            items.append(item)
    tools = [{**tool, "strict": True} for tool in body["tools"]]
    return {**body, "input": items, "tools": tools, "include": [], "parallel_tool_calls": True, "stream": False}


def langgraph(who: int, turns: Turns) -> dict[str, Any]:
    """As LangGraph sends it through `langchain-openai`: chats whose calls have no text beside them."""
    body = tool_chat(who, turns)
    system, *rest = body["messages"]
    spoken = [{**system, "content": SYSTEM}, *rest]
    return {**body, "messages": spoken, "model": "tiny", "tool_choice": "none", "stream": False}


def litellm(who: int, turns: Turns) -> dict[str, Any]:
    """As litellm sends a chat to Anthropic's endpoint."""
    body = message(who, turns)
    for turn in body["messages"]:
        if isinstance(turn["content"], str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    tools = [{**tool, "type": "custom"} for tool in body["tools"]]
    return {**body, "tools": tools, "tool_choice": {"type": "none"}, "model": "tiny"}


FORMS: dict[str, tuple[str, Callable[[int, Turns], dict[str, Any]]]] = {
    "plain chats": ("/v1/chat/completions", plain_chat),
    "chats with tools": ("/v1/chat/completions", tool_chat),
    "responses": ("/v1/responses", response),
    "messages": ("/v1/messages", message),
}
PROGRAMS: dict[str, tuple[str, Callable[[int, Turns], dict[str, Any]]]] = {
    "Claude Code": ("/v1/messages", claude_code),
    "Codex": ("/v1/responses", codex),
    "Agents SDK": ("/v1/responses", agents_sdk),
    "LangGraph": ("/v1/chat/completions", langgraph),
    "litellm": ("/v1/messages", litellm),
}
_CACHED = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)')


class Talks:
    """Some conversations in one form: how much of their prompts was cached, and how often one changed its node."""

    def __init__(self, form: str, talks: int = 6, salt: str = "") -> None:
        self.path, self._body = {**FORMS, **PROGRAMS}[form]
        self._salt, self._dice = salt, random.Random(form)
        self._turns: list[Turns] = [[] for _ in range(talks)]
        self._prompts: list[list[int]] = [[] for _ in range(talks)]  # of their last turns
        self._nodes: list[str | None] = [None] * talks
        self.num_tokens = self.num_cached = self.num_changes = 0
        self.missed: list[
            tuple[int, int]
        ] = []  # turns that hit less than nine tenths: what they had in common, and hit

    def turn(self, post: Callable[[str, dict[str, Any]], Any]) -> None:
        """One more turn of each. `post` sends a body to a path and returns the answer."""
        for who in self._dice.sample(range(len(self._turns)), len(self._turns)):
            turns = self._turns[who]
            turns.append(_spoken(who, len(turns)))
            body = {**self._body(who, turns), "cache_salt": self._salt}
            tokens = post("/tokenize", {**body, "endpoint": self.path}).json()["tokens"]
            answer = post(self.path, body)
            assert answer.status_code == 200, answer.text
            cached = num_cached(answer.text)
            self.num_tokens += len(tokens)
            self.num_cached += cached
            shared = common(tokens, self._prompts[who])
            if cached < 0.9 * shared:
                self.missed.append((shared, cached))
            self._prompts[who] = tokens
            node = answer.headers.get("x-kvpool-node")
            self.num_changes += self._nodes[who] not in (None, node)
            self._nodes[who] = node

    def forget_counts(self) -> None:
        """What `share` says begins here."""
        self.num_tokens = self.num_cached = 0

    @property
    def share(self) -> float:
        """How much was cached."""
        return self.num_cached / self.num_tokens


def num_cached(answer: str) -> int:
    """The cached tokens of a prompt, as the last part of an answer of any form says it."""
    return int(_CACHED.findall(answer)[-1])


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two prompts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(one), len(other)))
