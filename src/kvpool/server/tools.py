"""What a request says of tools, how an answer is held to a call, and how it is read."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from kvpool.engine.pictures import PicturedPrompt
from kvpool.pools.arrays import Int32Array
from kvpool.server.agent_fields import Followed, followed
from kvpool.server.answer_reader import THINKING, AnswerReader, HarmonyReader, MarkedReader, read_whole
from kvpool.server.body import Body
from kvpool.server.errors import Problem
from kvpool.server.tool_forms import FORMS, HARMONY, Tool, check_tool_parser, form_in, json_rule

log = logging.getLogger("kvpool")

_MOST_SAID = 256  # names; clients choose some of them
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_NO_FREE_CHANNELS = (
    "this model answers in channels, which no grammar holds to strict tools or allowed_tools unless they must be called: "
    'leave "strict" out, or use tool_choice "required"'
)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, in the form that chat templates read, and how the answer may call them.

    All of them are in the prompt, whichever may be called: another choice at the next turn finds the same prompt cached.
    """

    offered: Sequence[dict[str, Any]] = ()
    must: bool = False  # the answer is nothing but calls
    several: bool = True
    allowed: Collection[str] | None = None  # the names of those that may be called; None: all

    @cached_property
    def tools(self) -> dict[str, Tool]:
        """The tools that may be called, by name."""
        functions = [each["function"] for each in self.offered]
        return {
            each["name"]: Tool(each["name"], each.get("parameters") or _ANY_ARGUMENTS)
            for each in functions
            if self.allowed is None or each["name"] in self.allowed
        }

    @cached_property
    def is_held(self) -> bool:
        """Whether a grammar holds calls to the tools that may be called, and to their schemas."""
        is_strict = any(each["function"].get("strict") is True for each in self.offered)
        return self.must or self.allowed is not None or is_strict


class Dialogue(NamedTuple):
    """A conversation as the model gets it, and the tools that its answer may call."""

    prompt: PicturedPrompt
    use: ToolUse
    template: Mapping[str, Any] = MappingProxyType({})  # variables that the chat template was given
    left_out: Sequence[str] = ()  # fields of the request that change nothing
    text: str = ""  # of the prompt; none if it has images


def tool_use(offered: Sequence[dict[str, Any]], choice: Any, several: bool) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a request say.

    A choice is "auto", "none", "required", a function by name, or "auto" or "required" among some of them.
    """
    if choice is None or choice == "auto":
        return ToolUse(offered, several=several)
    if choice == "none":
        return ToolUse(offered, allowed=())
    if not offered:
        raise _wrong_choice("tool_choice needs tools that are functions")
    if choice == "required":
        return ToolUse(offered, must=True, several=several)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _among(offered, choice.get("allowed_tools") or choice, several)
    return ToolUse(offered, must=True, several=False, allowed=[_name_in(choice, offered)])


def _among(offered: Sequence[dict[str, Any]], choice: Any, several: bool) -> ToolUse:
    """The choice `allowed_tools`, in both of OpenAI's forms: with the mode and the tools in it, or beside its type."""
    mode, named = (choice.get("mode"), choice.get("tools")) if isinstance(choice, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise _wrong_choice('tool_choice allowed_tools has the mode "auto" or "required", and one of the tools or more')
    return ToolUse(offered, mode == "required", several, [_name_in(each, offered) for each in named])


def _name_in(choice: Any, offered: Sequence[dict[str, Any]]) -> str:
    """The name of an offered tool in OpenAI's two forms of a choice: with `function` around it, or without."""
    name = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice.get("name") or (choice.get("function") or {}).get("name")
    if not isinstance(name, str):
        raise _wrong_choice(
            'tool_choice is "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
            f'{{"type": "allowed_tools", ...}}: got {json.dumps(choice)[:100]}'
        )
    known = [each["function"]["name"] for each in offered]
    if name not in known:
        raise _wrong_choice(f"tool_choice names {name!r}, which is none of the tools {', '.join(known)}")
    return name


def _wrong_choice(message: str) -> Problem:
    return Problem(400, message, code="invalid_value", param="tool_choice")


def new_call_id() -> str:
    """A name for a call: nine letters and digits, because the templates of Mistral's models take no others."""
    return uuid.uuid4().hex[:9]


class AnswerForm:
    """How the model behind a tokenizer writes answers: the marks of calls and of thoughts.

    They follow from its chat template, or from `tool_parser`, a name of `FORMS`. An answer ends with one of `end_ids`.
    """

    def __init__(self, tokenizer: Any, tool_parser: str, end_ids: Collection[int] = ()) -> None:
        check_tool_parser(tool_parser)
        self._template = _template(tokenizer)
        self._tokenizer = tokenizer
        self._name = tool_parser or form_in(self._template)
        self._form = FORMS.get(self._name)
        self._thinking = next((marks for marks in THINKING if marks.closes in self._template), None)
        self.end_ids = end_ids
        self._said: set[str] = set()  # fields of requests of which the log has said that they change nothing

    @cached_property
    def skips_special_tokens(self) -> bool:
        """Whether the text of an answer can do without special tokens. It cannot if they are marks."""
        marks = [*(self._form.opens if self._form else ()), *(self._thinking or ())]
        return not any(
            mark in self._added and self._tokenizer.added_tokens_decoder[self._added[mark]].special for mark in marks
        )

    @cached_property
    def ends(self) -> list[str]:
        """The marks at the end of an answer that are tokens of their own wherever they stand in a text."""
        return [text for text, number in self._added.items() if number in self.end_ids]

    def follow(self, body: Body) -> Followed:
        """What a request asks of the chat template, and its fields that change nothing, of which the log says so once."""
        asked = followed(body, self._template, self._thinking is not None or self._name == HARMONY)
        for name in asked.left_out:
            if name not in self._said and len(self._said) < _MOST_SAID:
                self._said.add(name)
                log.warning("requests have %s, which changes nothing for this model (said once)", name)
        return asked

    def role(self, role: str) -> str:
        """The role of a message as the chat template knows it: few know OpenAI's developers."""
        return "system" if role == "developer" and role not in self._template else role

    @cached_property
    def refusal(self) -> str:
        """Why no request may offer tools: the model does not see them, or nobody can read its calls; else empty."""
        if not self._shows_tools:
            return (
                "the chat template of this model does not show tools to it: leave tools out, or serve a model that was "
                "trained to call them"
            )
        if self._form is None:
            return (
                "how this model writes calls is not known from its chat template: start the server with --tool-parser, "
                f"one of {', '.join(FORMS)}"
            )
        return ""

    def in_order(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation in an order that the chat template takes.

        Agents speak as the system in the middle, and twice in a row. Where a template refuses that, the system speaks
        first and once, and what it says later is the user's.
        """
        if self._takes_any_order:
            return list(messages)
        ordered: list[dict[str, Any]] = []
        for message in messages:
            is_late = message["role"] == "system" and any(each["role"] != "system" for each in ordered)
            role = "user" if is_late else message["role"]
            if role in ("system", "user") and ordered and ordered[-1]["role"] == role:
                ordered[-1] = {**ordered[-1], "content": _joined(ordered[-1]["content"], message["content"])}
            else:
                ordered.append({**message, "role": role})
        return ordered

    @cached_property
    def _takes_any_order(self) -> bool:
        roles = ("system", "system", "user", "user", "system", "assistant", "user")
        try:
            self._tokenizer.apply_chat_template([{"role": role, "content": "x"} for role in roles], tokenize=False)
        except Exception:  # a template is a program and may fail in many ways
            return False
        return True

    def check(self, use: ToolUse) -> None:
        """Refuses tools that the model cannot use."""
        if use.tools and self.refusal:
            raise Problem(400, self.refusal, code="unsupported", param="tools")

    def reader(self, dialogue: Dialogue) -> Callable[[], AnswerReader] | None:
        """Makes readers for the answers to a dialogue; None if all of an answer is plain text."""
        use = dialogue.use
        if self._name == HARMONY:
            return HarmonyReader
        if self._thinking is None and not use.tools:
            return None
        thinks = self._is_inside_a_thought(dialogue.prompt.token_ids)
        return lambda: self._marked_reader(use, thinks)

    def same(self, one: str, other: str, prompt: str, tools: Sequence[dict[str, Any]]) -> bool:
        """Whether two texts are the same answer to a prompt: what they think, say and call, apart from white space."""
        if one.strip() == other.strip():
            return True
        thinks = self._thinking is not None and prompt.rstrip().endswith(self._thinking.opens)
        use = ToolUse(tools)
        make = HarmonyReader if self._name == HARMONY else lambda: self._marked_reader(use, thinks)
        read = [read_whole(make, text) for text in (one, other)]
        first, second = ((each.content.strip(), each.reasoning.strip(), each.calls) for each in read)
        return first == second

    def rules(self, dialogue: Dialogue, schema: Mapping[str, Any] | None) -> str | None:
        """The grammar of an answer whose calls, or else its text, keep to schemas; None if nothing holds it.

        A model that thinks in this answer may do so first.
        """
        use = dialogue.use
        if not use.tools or not (use.is_held or schema is not None):
            return None
        assert self._form is not None
        think = free = ""
        if use.must:
            start = "calls"
        elif schema is not None:
            start = f"calls | ({json_rule(schema)})"
        elif self._name == HARMONY:
            raise Problem(400, _NO_FREE_CHANNELS, code="unsupported", param="tools")
        else:
            start, free = "free", self._form.free_rules(use.several, self._literal)
        if self._thinking is not None and self._is_inside_a_thought(dialogue.prompt.token_ids):
            start, closes = f"think ({start})", self._literal(self._thinking.closes)
            think = f"think: /(?s:.*)/ {closes}\n"
            if not closes.startswith("<"):  # no token of its own
                think = f"think[suffix={closes}]: /(?s:.*)/\n"
        rules = self._form.rules(list(use.tools.values()), use.several, self._literal)
        return f"start: {start}\n{think}{free}{rules}"

    def _marked_reader(self, use: ToolUse, thinks: bool) -> MarkedReader:
        return MarkedReader(self._form, use.tools, self._thinking, thinks)

    @cached_property
    def _added(self) -> dict[str, int]:
        """Tokens that the tokenizer was given by name; text of a grammar never becomes one of them."""
        return {token.content: number for number, token in getattr(self._tokenizer, "added_tokens_decoder", {}).items()}

    @cached_property
    def _apart(self) -> re.Pattern[str]:
        """Finds what stands for itself in a text for a grammar."""
        return re.compile(f"({'|'.join(map(re.escape, sorted([chr(10), *self._added], key=len, reverse=True)))})")

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the chat template puts tools into a prompt."""
        probe = {"name": "kvpool_probe", "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}], tools=[{"type": "function", "function": probe}], tokenize=False
            )
        except Exception:  # a template is a program and may fail in many ways; the request itself will say how
            return True
        return "kvpool_probe" in text

    def _is_inside_a_thought(self, prompt: Int32Array) -> bool:
        """Whether the prompt ends with the mark that opens a thought, as templates of models do that always think."""
        if self._thinking is None:
            return False
        end = self._tokenizer.decode(prompt[-16:].tolist(), skip_special_tokens=False)
        return str(end).rstrip().endswith(self._thinking.opens)

    def _literal(self, text: str) -> str:
        """A text for a grammar. Tokens that were given by name stand for themselves, line breaks for themselves, too, since
        the lexer of llguidance takes the longest match.
        """
        parts = [part for part in self._apart.split(text) if part]
        return " ".join(f"<[{self._added[part]}]>" if part in self._added else _quoted(part) for part in parts)


def _joined(one: Any, other: Any) -> Any:
    """The contents of two messages as one: texts, or lists of parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = [content if isinstance(content, list) else [{"type": "text", "text": content}] for content in (one, other)]
    return [*parts[0], *parts[1]]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _template(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template, of all of them if it has several."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
