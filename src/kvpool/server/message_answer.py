"""Answers in Anthropic's form, whole or as its events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.engine.generation import Chunk, Generation
from kvpool.server.answer_reader import AnswerReader, ChunkReader, Part
from kvpool.server.answers import HOLE, EventForm, as_event, missed_field
from kvpool.server.diagnostics import Diagnosis
from kvpool.server.errors import Problem
from kvpool.server.tools import new_call_id

_REASONS = {"stop": "end_turn", "length": "max_tokens", "deadline": "max_tokens", "refused": "max_tokens"}
_DELTA = EventForm(
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": HOLE}}, "content_block_delta"
)
_EMPTY = {"content": {"type": "text", "text": ""}, "reasoning": {"type": "thinking", "thinking": "", "signature": ""}}


class MessageAnswer:
    """A `message`, whole or as Anthropic's events. Texts, thoughts and calls are blocks of its content."""

    too_long = "prompt is too long: {tokens} tokens > {limit} maximum"  # Claude Code reads both numbers, without commas

    def __init__(
        self,
        model: str,
        make_reader: Callable[[], AnswerReader] | None,
        num_marked: int,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._reader = ChunkReader(make_reader)
        self._num_marked = num_marked  # tokens of the prompt that a mark asked to keep
        self._diagnosis = diagnosis
        self._begun = False
        self._num_blocks = 0
        self._open = ""  # the kind of the block under way
        self._calls = False

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that is over."""
        (generation,) = generations
        content: list[dict[str, Any]] = []
        last = ""
        for part in self._reader.parts(Chunk(0, generation.samples[0].text, (), finish_reason="stop")):
            field = "thinking" if part.kind == "reasoning" else "text"
            if part.call is not None:
                content.append({**_called(part), "input": part.call.arguments})
                self._calls = True
            elif part.kind == last:
                content[-1][field] += part.text
            else:
                content.append({**_EMPTY[part.kind], field: part.text})
            last = part.kind
        return {**self._message(generation), "content": content or [_EMPTY["content"]], **self._reason(generation)}

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The events for what one step added. The first ones begin with the event that opens the message."""
        events = b""
        if not self._begun:
            self._begun = True
            start = {"type": "message_start", "message": {**self._message(generation), "content": []}}
            events = as_event(start, "message_start")
        return events + b"".join(self._added(part) for part in self._reader.parts(chunk))

    def _added(self, part: Part) -> bytes:
        """The events of one part. It goes on with the open block, or begins one."""
        if part.call is not None:
            self._calls = True
            events = self._closed() + self._opened("call", {**_called(part), "input": {}})
            arguments = json.dumps(part.call.arguments, ensure_ascii=False)
            return events + self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._closed()
        events = b"" if self._open == part.kind else self._closed() + self._opened(part.kind, _EMPTY[part.kind])
        if part.kind == "reasoning":
            return events + self._delta({"type": "thinking_delta", "thinking": part.text})
        if self._num_blocks == 1:
            return events + _DELTA.filled(part.text)
        return events + self._delta({"type": "text_delta", "text": part.text})

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._num_blocks += 1
        start = {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}
        return as_event(start, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
        return as_event(event, "content_block_delta")

    def _closed(self) -> bytes:
        """The event that ends the open block, if one is open."""
        if not self._open:
            return b""
        self._open = ""
        return as_event({"type": "content_block_stop", "index": self._num_blocks - 1}, "content_block_stop")

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The events at the end: why the message ended, and its usage."""
        (generation,) = generations
        events = b"" if self._num_blocks else self._opened("content", _EMPTY["content"])
        delta = {"type": "message_delta", "delta": self._reason(generation), "usage": self._usage(generation)}
        return (
            events
            + self._closed()
            + as_event(delta, "message_delta")
            + as_event({"type": "message_stop"}, "message_stop")
        )

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that fails."""
        return as_event(problem.body(), "error")

    def _message(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(generation),
            **({} if self._diagnosis is None else {"diagnostics": self._diagnosis.told(generation)}),
        }

    def _reason(self, generation: Generation) -> dict[str, Any]:
        sample = generation.samples[0]
        if sample.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_string}
        reason = _REASONS.get(sample.finish_reason or "", "end_turn")
        return {"stop_reason": "tool_use" if self._calls and reason == "end_turn" else reason, "stop_sequence": None}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """Tokens read from the cache, tokens that marks put there, and the rest."""
        cached = generation.num_cached_tokens
        created = max(0, self._num_marked - cached)
        return {
            "input_tokens": generation.num_prompt_tokens - cached - created,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": created,
            **missed_field("cache_missed_input_tokens", [generation]),
            "output_tokens": sum(len(sample.token_ids) for sample in generation.samples.values()),
        }


def _called(part: Part) -> dict[str, Any]:
    assert part.call is not None
    return {"type": "tool_use", "id": new_call_id(), "name": part.call.name}
