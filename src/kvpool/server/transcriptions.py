"""`/v1/audio/transcriptions`: what is said in a WAV file, as OpenAI's endpoint writes it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from email.message import Message
from email.parser import HeaderParser
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvpool.engine.encoding import Speech
from kvpool.engine.generation import Chunk, Generation
from kvpool.engine.pictures import PicturedPrompt
from kvpool.engine.sound import SAMPLING_RATE, Samples, read_wav, windows
from kvpool.errors import KVPoolError
from kvpool.server.answers import as_event
from kvpool.server.auth import Caller
from kvpool.server.completions import FILL_CONTEXT
from kvpool.server.errors import Problem, problem_of, problem_of_body
from kvpool.server.exchange import Exchange, RequestContext
from kvpool.server.parameters import sampling_params
from kvpool.server.schema import Body, Sampling
from kvpool.server.served_model import ServedModel, scope_for_tenant

_MAX_PARTS = 32  # of a form


class Transcription(Body):
    """The fields of a form beside its `file`. Without a language, the model says which one it hears.

    With `task: "translate"` the text is in English.
    """

    model: str = ""
    language: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    stream: bool = False
    prompt: Literal[""] = ""  # no text stands before that of a file
    chunking_strategy: Literal["auto"] = "auto"
    # kvpool's own
    task: Literal["transcribe", "translate"] = "transcribe"
    cache_salt: Annotated[str, Field(max_length=256)] = ""


class Form(NamedTuple):
    """A form that was read: its fields, and the bytes of its file."""

    fields: Transcription
    file: bytes


def form_schema() -> dict[str, Any]:
    """The body as the OpenAPI document says it."""
    schema = Transcription.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "A WAV file."}
    schema |= {"properties": {"file": file, **schema["properties"]}, "required": ["file"]}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


async def read_form(request: Request) -> Form:
    """The fields of a request, and its file."""
    fields: dict[str, Any] = form_parts(request.headers.get("content-type", ""), await request.body())
    file = fields.pop("file", None)
    if file is None:
        raise Problem(400, "the form has no part 'file': send a WAV file", code="invalid_value", param="file")
    try:
        texts = {name: content.decode() for name, content in fields.items()}
        return Form(Transcription.model_validate_strings(texts, strict=False), file)
    except UnicodeDecodeError:
        raise Problem(400, "the fields of the form must be UTF-8", code="invalid_value") from None
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise problem_of_body(found, texts) from None


def form_parts(content_type: str, body: bytes) -> dict[str, bytes]:
    r"""The parts of a form (multipart/form-data) by their names.

    >>> body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nhi\r\n--x--\r\n'
    >>> form_parts("multipart/form-data; boundary=x", body)
    {'a': b'hi'}
    """
    kind = Message()
    kind["content-type"] = content_type
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary:
        raise Problem(400, "send the file in a form: content-type multipart/form-data", code="invalid_value")
    _, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("utf-8", "replace"), _MAX_PARTS + 1)
    ends = [number for number, piece in enumerate(pieces) if piece.startswith(b"--")]
    if not ends:
        words = f"the form does not end with its boundary, or has more than {_MAX_PARTS} parts"
        raise Problem(400, words, code="invalid_value")
    parts: dict[str, bytes] = {}
    for piece in pieces[: ends[0]]:
        head, gap, content = piece.partition(b"\r\n\r\n")
        headers = HeaderParser().parsestr(head.strip().decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if not gap or not isinstance(name, str) or name in parts:
            raise Problem(400, "each part of a form needs a name of its own", code="invalid_value")
        parts[name] = content
    return parts


async def transcribe(
    request: Request, form: Form, model: ServedModel, caller: Caller, context: RequestContext
) -> Response:
    """Writes what is said in a file. Parts of a long one are computed side by side."""
    body, file = form
    try:
        speech = model.engine.speech
        clip = await asyncio.to_thread(read_wav, file)
        cuts = list(windows(clip, speech.num_samples))
        if len(cuts) > context.gate.limits.prompts:
            most = context.gate.limits.prompts * speech.num_samples // SAMPLING_RATE
            raise Problem(400, f"the file is longer than this server's limit of {most} seconds", param="file")
        heard = await asyncio.to_thread(_read, model, speech, clip, cuts)
        language = None if body.language is None else speech.language(body.language)
        if language is None and speech.languages:
            with context.gate.passed(caller.key):
                language = await _detected(model, speech, heard[0], caller, body.cache_salt)
        begin = np.array(speech.begin(language, body.task), np.int32)
    except KVPoolError as error:
        raise problem_of(error) from error
    asked = Sampling(model=body.model, temperature=body.temperature, stream=body.stream, cache_salt=body.cache_salt)
    wanted = 0 if body.response_format == "verbose_json" else None
    params = await sampling_params(asked, model, context.gate.limits, FILL_CONTEXT, wanted)
    answer = Transcript(body, language, cuts)
    exchange = Exchange(request, asked, model, caller, context, answer)
    response = await exchange.run([PicturedPrompt(begin, source=each.source) for each in heard], params)
    if body.response_format != "text" or body.stream or response.status_code != 200:
        return response
    return PlainTextResponse(answer.text + "\n")


def _read(model: ServedModel, speech: Speech, clip: Samples, cuts: Sequence[tuple[int, int]]) -> list[PicturedPrompt]:
    """The parts of a clip as the encoder reads them."""
    begin, _ = speech.detection()
    return [model.engine.read_prompt(begin, audio=[clip[start:stop]]) for start, stop in cuts]


async def _detected(model: ServedModel, speech: Speech, heard: PicturedPrompt, caller: Caller, salt: str) -> str:
    """The language that the model hears in the first part of a clip."""
    _, params = speech.detection()
    running = model.start(heard, params, scope=scope_for_tenant(caller.tenant, salt))
    try:
        async for _ in running:
            pass
        return speech.code_of(running.generation.result(0).token_ids[0])
    finally:
        running.cancel()


class Transcript:
    """Writes an answer: whole, or as events of a stream. The parts of a clip are numbered in their order."""

    def __init__(self, body: Transcription, language: str | None, cuts: Sequence[tuple[int, int]]) -> None:
        self._body = body
        self._language = language
        self._cuts = cuts
        self._written = [""] * len(cuts)  # of each part, and not sent
        self._over: set[int] = set()
        self._now = 0  # the part whose text is sent
        self.text = ""

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer as JSON."""
        texts = [generation.result(0).text for generation in generations]
        self.text = "".join(texts).strip()
        seconds = self._cuts[-1][1] / SAMPLING_RATE
        if self._body.response_format != "verbose_json":
            return {"text": self.text, "usage": {"type": "duration", "seconds": round(seconds)}}
        return {
            "task": self._body.task,
            "language": _name_of(self._language),
            "duration": seconds,
            "text": self.text,
            "segments": [self._segment(number, each) for number, each in enumerate(generations)],
        }

    def _segment(self, number: int, generation: Generation) -> dict[str, Any]:
        """A part of the clip. What OpenAI says besides is left out where the model was not asked for it."""
        start, stop = (at / SAMPLING_RATE for at in self._cuts[number])
        sample = generation.result(0).samples[0]
        text = sample.text.encode()
        return {
            **{"id": number, "seek": round(100 * start), "start": start, "end": stop, "text": sample.text},
            **{"tokens": list(sample.token_ids), "temperature": self._body.temperature},
            "avg_logprob": float(np.mean([each.logprob for each in sample.logprobs])) if sample.logprobs else 0.0,
            "compression_ratio": len(text) / len(zlib.compress(text)),
        }

    def part(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """The text that can be sent now: that of a part comes when all parts before it are complete."""
        self._written[index] += chunk.text
        if chunk.finish_reason is not None:
            self._over.add(index)
        news = ""
        while self._now < len(self._cuts):
            news += self._written[self._now]
            self._written[self._now] = ""
            if self._now not in self._over:
                break
            self._now += 1
        self.text += news
        return as_event({"type": "transcript.text.delta", "delta": news}) if news else b""

    def end(self, generations: Sequence[Generation]) -> bytes:
        """The end of a stream."""
        return as_event({"type": "transcript.text.done", "text": self.text.strip()}) + b"data: [DONE]\n\n"

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that fails."""
        return as_event(problem.body()) + b"data: [DONE]\n\n"


def _name_of(language: str | None) -> str:
    """The English name of a language, as OpenAI writes it. A model for one language was made for English."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return "english" if language is None else str(LANGUAGES.get(language, language))
