"""What a request says of tools, how an answer is held to a call, and how it is read."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvpool.engine.pictures import PicturedPrompt
from kvpool.model.vision import Pictures
from kvpool.pools.arrays import Int32Array
from kvpool.server.answer_reader import THINKING, AnswerReader, HarmonyReader, MarkedReader
from kvpool.server.errors import Problem
from kvpool.server.tool_forms import FORMS, HARMONY, Tool, ToolForm, check_tool_parser, form_in, json_rule

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, in the form that chat templates read, and how the answer may call them."""

    offered: Sequence[dict[str, Any]] = ()
    must: bool = False  # the answer is nothing but calls
    several: bool = True

    @cached_property
    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        functions = [each["function"] for each in self.offered]
        return {each["name"]: Tool(each["name"], each.get("parameters") or _ANY_ARGUMENTS) for each in functions}


class Dialogue(NamedTuple):
    """A conversation as the model gets it, and the tools that its answer may call."""

    prompt: Int32Array
    use: ToolUse
    pictures: Pictures | None = None  # behind placeholders of the prompt

    @property
    def asked(self) -> PicturedPrompt:
        """The prompt with its pictures, as the engine takes it."""
        return PicturedPrompt(self.prompt, self.pictures)


def tool_use(offered: Sequence[dict[str, Any]], choice: Any, several: bool) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a request say.

    A choice is "auto", "none", "required", or a function by name.
    """
    if choice is None or choice in ("auto", "none"):
        return ToolUse(() if choice == "none" else offered, several=several)
    if not offered:
        raise _wrong_choice("tool_choice needs tools")
    if choice == "required":
        return ToolUse(offered, must=True, several=several)
    name = _named(choice)
    chosen = [each for each in offered if each["function"]["name"] == name]
    if not chosen:
        known = ", ".join(each["function"]["name"] for each in offered)
        raise _wrong_choice(f"tool_choice names {name!r}, which is none of the tools {known}")
    return ToolUse(chosen, must=True, several=False)


def _named(choice: Any) -> str:
    """The name in OpenAI's two forms of a choice: with `function` around it, or without."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        if isinstance(name, str):
            return name
    raise _wrong_choice(
        'tool_choice is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}: '
        f"got {json.dumps(choice)[:100]}"
    )


def _wrong_choice(message: str) -> Problem:
    return Problem(400, message, code="invalid_value", param="tool_choice")


def new_call_id() -> str:
    """A name for a call: nine letters and digits, because the templates of Mistral's models take no others."""
    return uuid.uuid4().hex[:9]


class AnswerForm:
    """How the model behind a tokenizer writes answers: the marks of calls and of thoughts.

    They follow from its chat template, or from `tool_parser`, a name of `FORMS`.
    """

    def __init__(self, tokenizer: Any, tool_parser: str) -> None:
        check_tool_parser(tool_parser)
        template = _template(tokenizer)
        self._tokenizer = tokenizer
        self._name = tool_parser or form_in(template)
        self._thinking = next((marks for marks in THINKING if marks.closes in template), None)

    @property
    def skips_special_tokens(self) -> bool:
        """Whether the text of an answer can do without special tokens. It cannot if they are marks."""
        marks = [*(self._form.opens if self._form else ()), *(self._thinking or ())]
        return not any(
            mark in self._added and self._tokenizer.added_tokens_decoder[self._added[mark]].special for mark in marks
        )

    def check(self, use: ToolUse) -> None:
        """Refuses tools that the model would not see, or whose calls could not be read."""
        if not use.offered:
            return
        if not self._shows_tools:
            raise Problem(
                400,
                "the chat template of this model does not show tools to it: leave tools out, or serve a model that was "
                "trained to call them",
                code="unsupported",
                param="tools",
            )
        if self._form is None:
            raise Problem(
                400,
                f"how this model writes calls is not known from its chat template: start the server with --tool-parser, "
                f"one of {', '.join(FORMS)}",
                code="unsupported",
                param="tools",
            )

    def reader(self, dialogue: Dialogue) -> Callable[[], AnswerReader] | None:
        """Makes readers for the answers to a dialogue; None if all of an answer is plain text."""
        use = dialogue.use
        if self._name == HARMONY:
            return HarmonyReader
        if self._thinking is None and not use.offered:
            return None
        thinks = self._is_inside_a_thought(dialogue.prompt)
        return lambda: MarkedReader(self._form, use.tools, self._thinking, thinks)

    def rules(self, dialogue: Dialogue, schema: Mapping[str, Any] | None) -> str | None:
        """The grammar of an answer that must call tools, or else keep to a schema; None if the answer is free.

        A model that thinks in this answer may do so first.
        """
        use = dialogue.use
        if not use.offered or not (use.must or schema is not None):
            return None
        assert self._form is not None
        start = "calls" if use.must or schema is None else f"calls | ({json_rule(schema)})"
        think = ""
        if self._thinking is not None and self._is_inside_a_thought(dialogue.prompt):
            start, closes = f"think ({start})", self._literal(self._thinking.closes)
            think = f"think: /(?s:.*)/ {closes}\n"
            if not closes.startswith("<"):  # no token of its own
                think = f"think[suffix={closes}]: /(?s:.*)/\n"
        return f"start: {start}\n{think}{self._form.rules(list(use.tools.values()), use.several, self._literal)}"

    @property
    def _form(self) -> ToolForm | None:
        return FORMS.get(self._name)

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


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _template(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template, of all of them if it has several."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)
