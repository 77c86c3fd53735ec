"""A served model, and its requests for an event loop: chunks that arrive, then an end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import copy
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from kvpool.engine.engine import Engine, Prompt
from kvpool.engine.generation import Chunk, Generation
from kvpool.engine.params import SamplingParams, eos_token_ids
from kvpool.engine.pictures import PicturedPrompt
from kvpool.engine.prompts import images_of
from kvpool.engine.text import bytes_of
from kvpool.errors import KVPoolError
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from kvpool.server.errors import Problem, problem_of
from kvpool.server.given_answers import AnswerScope, GivenAnswers
from kvpool.server.images import ImageSource
from kvpool.server.long_work import Asker, in_thread
from kvpool.server.tools import AnswerForm, Dialogue
from kvpool.view.frames import request_name

_T = TypeVar("_T")
_SHORT = 2048  # characters or tokens; shorter texts take less than a millisecond
_FEW_PIXELS = 2**24  # what a request with images counts at least; it keeps one thread busy
_TURN = 16  # requests that are woken before the event loop does other things


class ServedModel:
    """An engine under the name that clients use. `tool_parser` names how its model calls tools (`tool_forms.FORMS`).

    Images in messages may be at addresses of `image_hosts`. With an `adapter`, requests run with that adapter of the engine.
    With `keeps_varying_lines` prompts keep the lines that `without_varying_lines` leaves out.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tool_parser: str = "",
        image_hosts: Sequence[str] = (),
        adapter: str | None = None,
        *,
        keeps_varying_lines: bool = False,
    ) -> None:
        self.name = self.base_name = name  # the second one stays if an adapter lends its name
        self.engine = engine
        self.adapter = adapter
        self.answers = AnswerForm(engine.tokenizer, tool_parser, eos_token_ids(engine.model))
        self.given = GivenAnswers()
        self.images = ImageSource(image_hosts)
        self.keeps_varying_lines = keeps_varying_lines
        self.named: dict[Hashable, tuple[str, Generation]] = {}  # running requests with their names for people
        self._notifier: LoopNotifier | None = None

    @cached_property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that the context and the memory hold."""
        longest = self.engine.config.longest_sequence(keep_watermark=False)
        return 2**31 if longest is None else longest

    def with_adapter(self, name: str) -> ServedModel:
        """The model with one of its engine's adapters; clients call it by the adapter's name."""
        adapted = copy(self)
        adapted.name = adapted.adapter = name
        return adapted

    async def scope(self, tenant: str, salt: str) -> ReuseScope:
        """The scope in which requests of a tenant find prefixes. The first call for an adapter may read its files."""
        own = scope_for_tenant(tenant, salt)
        if self.adapter is None:
            return own
        return await _of_library(_SHORT, partial(self.engine.scope_of, self.adapter, own))

    async def tokens(self, prompt: Prompt) -> Int32Array:
        """Token ids."""
        return await _of_library(len(prompt), partial(self.engine.token_ids, prompt))

    async def chat_tokens(
        self, messages: Sequence[Mapping[str, Any]], asker: Asker, **template: Any
    ) -> tuple[PicturedPrompt, str]:
        """A conversation by the model's template as token ids, and as text. One with images has pictures, and no text.

        Images are read in a turn of who asks.
        """
        if not images_of(messages):
            length = _SHORT if template else sum(len(message["content"]) for message in messages)
            return await _of_library(length, partial(self._chat_tokens, messages, asker, template))
        async with AsyncExitStack() as stack:
            pixels = await _of_library(_SHORT, partial(self.engine.prompts.num_pixels, messages))
            await stack.enter_async_context(asker.reading(max(pixels, _FEW_PIXELS)))
            found = await _of_library(_SHORT, partial(self.engine.chat_prompt, messages, **template))
        return found if isinstance(found, PicturedPrompt) else PicturedPrompt(found), ""

    def _chat_tokens(
        self, messages: Sequence[Mapping[str, Any]], asker: Asker, template: Mapping[str, Any]
    ) -> tuple[PicturedPrompt, str]:
        """The token ids and the text of a conversation. Answers in it are the tokens that the model wrote."""
        prompts = self.engine.prompts
        text = prompts.chat_text(messages, **template)
        same = partial(self.answers.same, tools=template.get("tools", ()))
        scope = AnswerScope(asker.tenant, asker.salt, self.adapter)
        found = self.given.recall(scope, text, self.answers.ends, same)
        if found is None:
            return prompts.read(prompts.chat_text_tokens(text)), text
        begin, end = found
        rest = prompts.chat_text_tokens(text[end:], begins=False)
        return prompts.read(np.concatenate([begin, rest])), text

    def keep_answers(self, begun: Dialogue, generation: Generation, tenant: str, salt: str) -> None:
        """Keeps the token ids of answers that ended by themselves or at their limit, for the next turn."""
        scope = AnswerScope(tenant, salt, self.adapter)
        for sample in generation.samples.values():
            is_whole = sample.finish_reason in ("stop", "length") and sample.stop_string is None
            written = sample.token_ids
            if written and written[-1] in self.answers.end_ids:
                written = written[:-1]
            if is_whole and written and begun.text:
                self.given.keep(scope, begun.text, begun.prompt.token_ids, self.text_of(written), written)

    def decoder(self) -> Any:
        """The tokenizer, which turns tokens into text."""
        if self.engine.tokenizer is None:
            raise Problem(400, f"the model {self.name!r} came without a tokenizer", code="no_tokenizer")
        return self.engine.tokenizer

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self.decoder().decode(list(tokens), skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        return bytes_of(self.decoder(), token)

    def start(self, tokens: Prompt, params: SamplingParams, name: str = "", **options: Any) -> LiveRequest:
        """Queues a request. The live view shows its name until it is cancelled, also if it has ended before."""
        loop = asyncio.get_running_loop()
        if self._notifier is None or self._notifier.loop is not loop:
            self._notifier = LoopNotifier(loop, self.engine)
        running = LiveRequest(self._notifier, self.engine, tokens, params, adapter=self.adapter, **options)
        if name:
            self.named[running.generation.id] = name, running.generation
            running.on_cancel = partial(self.named.pop, running.generation.id, None)
        return running

    def name_of(self, request_id: Hashable) -> str:
        """The name of a request or of one of its sequences, as the client gave it."""
        own, sample = request_id if isinstance(request_id, tuple) and len(request_id) == 2 else (request_id, 0)
        name, _ = self.named.get(own, (own, None))
        return request_name((name, sample))

    def missed_of(self, request_id: Hashable) -> dict[str, int]:
        """What the prompt of a request missed, by cause."""
        own = request_id[0] if isinstance(request_id, tuple) and len(request_id) == 2 else request_id
        _, generation = self.named.get(own, ("", None))
        return {} if generation is None else {cause.value: count for cause, count in generation.missed_tokens.items()}


class LoopNotifier:
    """Wakes requests in the event loop after a step of the engine, with one call for all of them.

    It wakes only some requests at a turn of the loop, so that other work, such as /health, does not wait for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self.loop = loop
        self._engine = engine
        self._waiting: deque[LiveRequest] = deque()
        self._is_called = False

    def put(self, request: LiveRequest) -> None:
        """Wakes a request once the step is over. Called in the engine's thread."""
        if self.loop.is_closed():  # nobody is left to get the answer
            request.cancel()
            return
        self._waiting.append(request)
        if not self._is_called:
            self._is_called = True
            self._engine.after_step(self._call)

    def _call(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._wake_some)
        except RuntimeError:  # it was closed in the meantime
            self._is_called = False
            while self._waiting:
                self._waiting.popleft().cancel()

    def _wake_some(self) -> None:  # in the event loop
        for _ in range(min(_TURN, len(self._waiting))):
            self._waiting.popleft().wake.set()
        self._is_called = False  # before the next line, so that `put` calls again if it comes later
        if self._waiting:
            self._is_called = True
            self.loop.call_soon(self._wake_some)


class LiveRequest:
    """One request. Iterating over it gives new chunks, several at a time if they come faster than they are sent."""

    def __init__(
        self, notifier: LoopNotifier, engine: Engine, tokens: Prompt, params: SamplingParams, **options: Any
    ) -> None:
        self._notifier = notifier
        self._news: deque[Chunk] = deque()
        self.wake = asyncio.Event()
        self._woken = False
        self._ended = False
        self.began = time.perf_counter()
        self.last: float | None = None  # when its newest tokens came
        self.on_cancel: Callable[[], Any] = bool
        try:
            self.generation: Generation = engine.submit(
                tokens, params, on_chunk=self._on_chunk, on_end=self._on_end, **options
            )
        except KVPoolError as error:
            raise problem_of(error) from error

    def _on_chunk(self, chunk: Chunk) -> None:  # in the engine's thread
        self._news.append(chunk)
        if not self._woken:  # one wake-up serves all chunks until the event loop takes them
            self._woken = True
            self._notifier.put(self)

    def _on_end(self) -> None:
        self._ended = True
        self._notifier.put(self)

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        """The chunks since the last time. At the end raises the `Problem` that ended the request, if there was one."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            self._woken = False  # first: chunks that come from here on wake us again
            ended = self._ended  # read before the chunks: then all chunks are there if it has ended
            news = [self._news.popleft() for _ in range(len(self._news))]
            if news:
                yield news
            if ended:
                break
        try:
            self.generation.result(0)
        except KVPoolError as error:
            raise problem_of(error) from error

    def cancel(self) -> None:
        """Ends it if it is not over. Its blocks are free after the current step."""
        self.generation.cancel()
        self.on_cancel()


def scope_for_tenant(tenant: str, salt: str) -> ReuseScope:
    """The scope of a request: it shares prefixes with requests of its tenant that have the same salt."""
    return ReuseScope(tenant=tenant, salt=salt)


async def _of_library(length: int, work: Callable[[], _T]) -> _T:
    """The result of work on a text. Long texts are handled in a thread; for short ones, that would take longer."""
    try:
        return work() if length < _SHORT else await in_thread(work)
    except KVPoolError as error:
        raise problem_of(error) from error
