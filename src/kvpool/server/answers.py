"""Answers in OpenAI's form, whole or as a stream of server-sent events: one writer for chats, one for completions."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from kvpool.engine.generation import Chunk, Generation, Sample
from kvpool.engine.scoring import TokenLogprob
from kvpool.engine.text import Decoder, TextStream
from kvpool.server.answer_reader import AnswerReader, ChunkReader, Part, read_whole
from kvpool.server.errors import Problem
from kvpool.server.schema import ChatCompletions, Completions, Sampling
from kvpool.server.served_model import ServedModel
from kvpool.server.tool_forms import ToolCall
from kvpool.server.tools import new_call_id

HOLE = "\0"
"""The text that an `EventForm` fills in."""
# Why a sample ended, in OpenAI's words. "length" also stands for requests that were cut off.
_FINISHES = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "stop", "refused": "length"}

TOO_LONG = (
    "This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens. "
    "Please reduce the length of the messages."
)
"""The refusal of a prompt in OpenAI's words."""


def as_event(part: dict[str, Any], name: str = "") -> bytes:
    """One part as an event; OpenAI's have no name, Anthropic's do.

    >>> as_event({"text": "é"}, "delta")
    b'event: delta\\ndata: {"text":"\\xc3\\xa9"}\\n\\n'
    """
    data = json.dumps(part, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


class EventForm:
    """Events that differ only in one text. The rest is encoded once, because a stream has an event for each token.

    >>> EventForm({"index": 0, "text": HOLE}).filled('"é"')
    b'data: {"index":0,"text":"\\\\"\\xc3\\xa9\\\\""}\\n\\n'
    """

    def __init__(self, part: dict[str, Any], name: str = "") -> None:
        self._before, self._after = as_event(part, name).rsplit(json.dumps(HOLE).encode(), 1)

    def filled(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + encode_basestring(text).encode("utf-8", "replace") + self._after


class Writer(Protocol):
    """Writes one kind of answer: whole, or as events of a stream. Samples are numbered over all prompts.

    `too_long` is the refusal of a prompt as the API says it: agents read it, and shorten the conversation.
    """

    too_long: str
    id: str  # of the answer

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]: ...
    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes: ...
    def end(self, generations: Sequence[Generation]) -> bytes: ...
    def failed(self, problem: Problem) -> bytes: ...


class _Answer:
    """What both kinds share: a name, a time, and token counts."""

    too_long = TOO_LONG
    prefix: str
    kind: str
    kind_of_part: str

    def __init__(self, model: ServedModel, body: Sampling) -> None:
        self._model = model
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._forms: dict[int, EventForm] = {}  # by open sample: the form of an event with text only
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model.name, "choices": choices}

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The end of a stream, with the usage if the client asked for it."""
        usage = {**self._frame(self.kind_of_part, []), "usage": self._usage(generations)}
        return (as_event(usage) if self._include_usage else b"") + b"data: [DONE]\n\n"

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        return _counts(generations)

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that fails. Clients raise when they get such an event."""
        return as_event(problem.body()) + b"data: [DONE]\n\n"


class ChatAnswer(_Answer):
    """`chat.completion` and its chunks. With a reader, thoughts and calls have fields of their own."""

    prefix, kind, kind_of_part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: ServedModel, body: ChatCompletions, make_reader: Callable[[], AnswerReader] | None
    ) -> None:
        super().__init__(model, body)
        self._make_reader = make_reader
        self._readers: dict[int, ChunkReader] = {}
        self._num_calls: Counter[int] = Counter()

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that is over: the samples of its prompts, one prompt after the other."""
        samples = [generation.samples[at] for generation in generations for at in sorted(generation.samples)]
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        return {**self._frame(self.kind, choices), "usage": self._usage(generations)}

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The events for what one step added to a sample. The first ones of a sample begin with its role."""
        if self._make_reader is None:
            return self._plain_part(index, chunk)
        events: list[dict[str, Any]] = []
        if index not in self._readers:
            self._readers[index] = ChunkReader(self._make_reader)
            events.append(self._opening(index))
        deltas = [self._delta(index, part) for part in self._readers[index].parts(chunk)]
        if chunk.finish_reason is not None or (chunk.logprobs and not deltas):
            deltas.append({})
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            reason = _why(chunk.finish_reason, self._num_calls[index]) if is_last else None
            events.append(self._part(index, delta, None if number else self._logprobs(chunk.logprobs), reason))
        return b"".join(as_event(event) for event in events)

    def _plain_part(self, index: int, chunk: Chunk) -> bytes:
        form, opening = self._forms.get(index), None
        if form is None:
            form = self._forms[index] = EventForm(self._added(index, Chunk(index, HOLE, ())))
            opening = self._opening(index)
        is_plain = not chunk.logprobs and chunk.finish_reason is None
        added = form.filled(chunk.text) if is_plain else as_event(self._added(index, chunk))
        return added if opening is None else as_event(opening) + added

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        """A part of an answer as the change that a chunk brings."""
        if part.call is None:
            return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}
        number = self._num_calls[index]
        self._num_calls[index] += 1
        return {"tool_calls": [{"index": number, **called(part.call)}]}

    def _opening(self, index: int) -> dict[str, Any]:
        """The role of the speaker."""
        return self._part(index, {"role": "assistant", "content": ""}, None, None)

    def _added(self, index: int, chunk: Chunk) -> dict[str, Any]:
        delta = {"content": chunk.text} if chunk.text or chunk.finish_reason is None else {}
        return self._part(index, delta, self._logprobs(chunk.logprobs), finish(chunk.finish_reason))

    def _part(self, index: int, delta: dict[str, Any], logprobs: Any, finished: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finished}
        return self._frame(self.kind_of_part, [choice])

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        read = read_whole(self._make_reader, sample.text)
        content = None if read.calls and not read.content else read.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = [called(call) for call in read.calls]
        reason = _why(sample.finish_reason, len(read.calls))
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(sample.logprobs),
            "finish_reason": reason,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        content = [
            {**self._logprob(entry), "top_logprobs": [self._logprob(TokenLogprob(*pair)) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        return {
            "token": self._model.text_of([entry.token]),
            "logprob": entry.logprob,
            "bytes": list(self._model.bytes_of(entry.token)),
        }


class _Offsets:
    """Where the texts of tokens begin in the text of a choice, which grows token by token."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._stream = TextStream(decoder, skip_special_tokens=False)
        self._start = 0

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        found = []
        for token in tokens:
            found.append(self._start + len(self._stream.text))
            self._stream.push(token)
        return found

    def goes_on(self, length: int, skip_special_tokens: bool) -> None:
        """What has `length` characters is over, and another text begins behind it."""
        self._start = length
        self._stream = TextStream(self._decoder, skip_special_tokens=skip_special_tokens)


class TextAnswer(_Answer):
    """`text_completion`; whole answers and parts have the same form. With `echo` a sample begins with its prompt.

    With `max_tokens` 0 there is nothing else. The engine then samples a token, which nobody sees.
    """

    prefix, kind, kind_of_part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: ServedModel, body: Completions) -> None:
        super().__init__(model, body)
        # None: neither the prompt nor log probabilities are part of the answer
        self._decoder: Decoder | None = model.decoder() if body.echo or body.logprobs is not None else None
        self._echoes, self._skips = body.echo, body.skip_special_tokens
        self._is_empty = body.max_tokens == 0
        self._offsets: dict[int, _Offsets | None] = {}  # by sample of a stream

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request that is over."""
        choices: list[dict[str, Any]] = []
        for generation in generations:
            for at in sorted(generation.samples):
                choices.append(self._whole_choice(len(choices), generation, generation.samples[at]))
        return {**self._frame(self.kind, choices), "usage": self._usage(generations)}

    def _whole_choice(self, index: int, generation: Generation, sample: Sample) -> dict[str, Any]:
        offsets = self._new_offsets()
        text, logprobs = self._prompt(generation, offsets)
        if not self._is_empty:
            text += sample.text
            logprobs = _joined(logprobs, self._logprobs(generation, sample.logprobs, offsets))
        reason = "length" if self._is_empty else finish(sample.finish_reason)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _new_offsets(self) -> _Offsets | None:
        return None if self._decoder is None else _Offsets(self._decoder)

    def _prompt(self, generation: Generation, offsets: _Offsets | None) -> tuple[str, dict[str, Any] | None]:
        """The text of a prompt that is repeated, and the log probabilities of its tokens."""
        text, logprobs = "", None
        if self._echoes and self._decoder is not None:
            text = str(self._decoder.decode(generation.prompt.tolist(), skip_special_tokens=False))
            logprobs = self._logprobs(generation, generation.prompt_logprobs, offsets)
        if offsets is not None:
            offsets.goes_on(len(text), self._skips)
        return text, logprobs

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The events for what one step added to a sample; its first ones begin with the prompt, if that is repeated."""
        before = b""
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets()
            text, logprobs = self._prompt(generation, self._offsets[index])
            before = as_event(self._part(index, text, logprobs, None)) if text else b""
        if self._is_empty:
            is_over = chunk.finish_reason is not None
            return before + (as_event(self._part(index, "", None, "length")) if is_over else b"")
        if not chunk.logprobs and chunk.finish_reason is None:
            form = self._forms.get(index)
            if form is None:
                form = self._forms[index] = EventForm(self._part(index, HOLE, None, None))
            return before + form.filled(chunk.text)
        logprobs = self._logprobs(generation, chunk.logprobs, self._offsets[index])
        return before + as_event(self._part(index, chunk.text, logprobs, finish(chunk.finish_reason)))

    def _usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        counts = super()._usage(generations)
        if self._is_empty:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts

    def _part(self, index: int, text: str, logprobs: Any, finished: str | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finished}
        return self._frame(self.kind_of_part, [choice])

    def _logprobs(
        self, generation: Generation, entries: Sequence[TokenLogprob | None], offsets: _Offsets | None
    ) -> dict[str, Any] | None:
        """In OpenAI's form. Only the first token of a prompt has no entry, because nothing comes before it."""
        if not entries or offsets is None:
            return None
        tokens = [int(generation.prompt[0]) if entry is None else entry.token for entry in entries]
        best = [None if entry is None else entry.top for entry in entries]
        return {
            "tokens": [self._model.text_of([token]) for token in tokens],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if top is None else self._by_piece(top) for top in best],
            "text_offset": offsets.of(tokens),
        }

    def _by_piece(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The best tokens by their texts. Of tokens with equal texts, such as parts of a character, the best counts."""
        found: dict[str, float] = {}
        for token, value in top:
            found.setdefault(self._model.text_of([token]), value)
        return found


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Log probabilities of a prompt and of its answer as one."""
    if first is None or second is None:
        return first or second
    return {name: [*values, *second[name]] for name, values in first.items()}


def called(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form, with a new id."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": new_call_id(), "type": "function", "function": function}


def _why(reason: str | None, num_calls: int) -> str | None:
    """Why a sample ended, in OpenAI's words, if it may have called tools."""
    return "tool_calls" if reason == "stop" and num_calls else finish(reason)


def finish(reason: str | None) -> str | None:
    """Why a sample ended, in OpenAI's words."""
    return None if reason is None else _FINISHES.get(reason, "stop")


def _counts(generations: Sequence[Generation]) -> dict[str, Any]:
    prompt = sum(generation.num_prompt_tokens for generation in generations)
    cached = sum(generation.num_cached_tokens for generation in generations)
    written = sum(len(sample.token_ids) for generation in generations for sample in generation.samples.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached, **missed_field("missed_tokens", generations)},
    }


def missed_by_cause(generations: Iterable[Generation]) -> Counter[str]:
    """Tokens that were not cached, by cause; none where that is not remembered."""
    missed: Counter[str] = Counter()
    for generation in generations:
        missed.update({cause.value: count for cause, count in generation.missed_tokens.items()})
    return missed


def missed_field(name: str, generations: Iterable[Generation]) -> dict[str, dict[str, int]]:
    """The same as a field of `usage`; no field where there are none."""
    missed = missed_by_cause(generations)
    return {name: dict(missed)} if missed else {}
