"""Reads an answer while it grows: what the model thinks, what it says, and which tools it calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvpool.engine.generation import Chunk
from kvpool.engine.text import overlap
from kvpool.server.tool_forms import ToolCall, ToolForm, Tools, arguments_in, sendable


class Part(NamedTuple):
    """A part of an answer: text that is said (`content`) or thought (`reasoning`), or a call."""

    kind: str
    text: str = ""
    call: ToolCall | None = None


class AnswerReader(ABC):
    """Gets the text of an answer piece by piece. Each part is returned as soon as it is certain, a call as a whole."""

    def __init__(self) -> None:
        self._held = ""  # text that is not certain yet

    def push(self, text: str) -> list[Part]:
        """Takes more text."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def finish(self) -> list[Part]:
        """No text follows."""

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Reads up to the next mark; False if none is there yet."""


class ReadAnswer(NamedTuple):
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[ToolCall]


def read_whole(make_reader: Callable[[], AnswerReader] | None, text: str) -> ReadAnswer:
    """Reads an answer that is complete."""
    parts = ChunkReader(make_reader).parts(Chunk(0, text, (), finish_reason="stop"))
    said = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    return ReadAnswer(said["content"], said["reasoning"], [part.call for part in parts if part.call is not None])


class ChunkReader:
    """Reads the chunks of one sample. Without a reader all of its text is said."""

    def __init__(self, make_reader: Callable[[], AnswerReader] | None) -> None:
        self._reader = None if make_reader is None else make_reader()

    def parts(self, chunk: Chunk) -> list[Part]:
        """The parts that are certain with this chunk."""
        if self._reader is None:
            return [Part("content", chunk.text)] if chunk.text else []
        found = self._reader.push(chunk.text)
        return found if chunk.finish_reason is None else [*found, *self._reader.finish()]


class Thinking(NamedTuple):
    """The marks around what a model thinks."""

    opens: str
    closes: str


THINKING = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))


class MarkedReader(AnswerReader):
    """For answers in which marks enclose calls and thoughts.

    White space beside a call or a thought is dropped. A text in the place of a call that is none, such as a call that was cut
    off, is said.
    """

    def __init__(
        self,
        form: ToolForm | None,
        tools: Tools | None,
        thinking: Thinking | None,
        thinks: bool = False,
    ) -> None:
        super().__init__()
        self._form = form
        self._tools = tools or {}
        self._thinking = thinking
        self._state = "reasoning" if thinks else "content"
        self._opened = ""  # the mark with which the call under way began
        self._has_spoken = False  # since the last call or thought
        self._trims = thinks  # whether white space before the next text is dropped

    def finish(self) -> list[Part]:
        """No text follows."""
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._state == "call":
            parts += self._calls_in(held, "")
        elif held.strip() or self._has_spoken:
            self._say(parts, held)
        return parts

    def _step(self, parts: list[Part]) -> bool:
        if self._state == "call":
            return self._read_call(parts)
        marks = self._marks()
        found = min(((self._held.find(mark), -len(mark), mark) for mark in marks if mark in self._held), default=None)
        if found is not None:
            at, _, mark = found
            self._say(parts, self._held[:at].rstrip())
            self._held = self._held[at + len(mark) :]
            if self._state == "reasoning":
                self._state = "content"
            elif self._thinking is not None and mark == self._thinking.opens:
                self._state = "reasoning"
            else:
                self._state, self._opened = "call", mark
            self._has_spoken, self._trims = False, True
            return True
        keep = max((overlap(self._held, mark) for mark in marks), default=0)
        certain = self._held[: len(self._held) - keep].rstrip()
        if certain:
            self._say(parts, certain)
            self._held = self._held[len(certain) :]
        return False

    def _marks(self) -> Sequence[str]:
        """What ends the text that is read now."""
        if self._state == "reasoning":
            assert self._thinking is not None
            return (self._thinking.closes,)
        marks = () if self._thinking is None or self._has_spoken else (self._thinking.opens,)
        if self._form is None or not self._tools:
            return marks
        if self._form.only_first and (
            self._has_spoken or self._held.lstrip()[:1] not in {mark[0] for mark in self._form.opens}
        ):
            return marks
        return (*marks, *self._form.opens)

    def _read_call(self, parts: list[Part]) -> bool:
        assert self._form is not None
        if not self._form.closes or self._form.closes not in self._held:
            return False
        text, _, self._held = self._held.partition(self._form.closes)
        parts += self._calls_in(text, self._form.closes)
        self._state = "content"
        return True

    def _calls_in(self, text: str, closes: str) -> list[Part]:
        assert self._form is not None
        try:
            return [Part("call", call=sendable(call)) for call in self._form.read(text, self._tools)]
        except (ValueError, TypeError, RecursionError):
            self._has_spoken = True
            return [Part("content", self._opened + text + closes)]

    def _say(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Part(self._state, text.lstrip() if self._trims and not self._has_spoken else text))
            self._has_spoken = True


_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class HarmonyReader(AnswerReader):
    """For answers in channels: thoughts in `analysis`, calls to `functions`, everything else is said."""

    def __init__(self) -> None:
        super().__init__()
        self._kind = ""  # of the message under way; empty in a header
        self._name = ""  # of the function that the message calls

    def finish(self) -> list[Part]:
        """No text follows."""
        held, self._held = self._held, ""
        return self._said(held) if self._kind else []

    def _step(self, parts: list[Part]) -> bool:
        if not self._kind:
            header, found, rest = self._held.partition("<|message|>")
            if not found:
                return False
            called = re.search(r"to=functions\.([\w.-]+)", header)
            self._name = "" if called is None else called[1]
            self._kind = "call" if called else "reasoning" if "analysis" in header else "content"
            self._held = rest
            return True
        found_at = min(((self._held.find(end), end) for end in _ENDS if end in self._held), default=None)
        if found_at is not None:
            at, end = found_at
            parts += self._said(self._held[:at])
            self._held, self._kind = self._held[at + len(end) :], ""
            return True
        if self._kind != "call":
            certain = len(self._held) - max(overlap(self._held, end) for end in _ENDS)
            parts += self._said(self._held[:certain])
            self._held = self._held[certain:]
        return False

    def _said(self, text: str) -> list[Part]:
        if self._kind != "call":
            return [Part(self._kind, text)] if text else []
        try:
            return [Part("call", call=sendable(ToolCall(self._name, arguments_in(text))))]
        except (ValueError, RecursionError):
            return [Part("content", text)] if text else []
