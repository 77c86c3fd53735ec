"""A model that is served, and its requests as an event loop sees them: chunks that arrive, and an end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvpool.engine.engine import Engine, Prompt
from kvpool.engine.generation import Chunk, Generation
from kvpool.engine.params import SamplingParams
from kvpool.errors import KVPoolError
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from kvpool.server.errors import Problem, problem_of

_T = TypeVar("_T")
_SHORT = 2048  # characters or tokens: some tenths of a millisecond
_TURN = 16  # requests that are woken before the event loop looks at other things


class ServedModel:
    """An engine under the name that clients use."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._notifier: LoopNotifier | None = None

    async def tokens(self, prompt: Prompt) -> Int32Array:
        """Token ids."""
        return await _of_library(len(prompt), partial(self.engine.token_ids, prompt))

    async def chat_tokens(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> Int32Array:
        """Token ids of a conversation by the model's template."""
        length = sum(len(message["content"]) for message in messages) + (_SHORT if template else 0)
        return await _of_library(length, partial(self.engine.chat_prompt, messages, **template))

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        if self.engine.tokenizer is None:
            raise Problem(400, f"the model {self.name!r} came without a tokenizer", code="no_tokenizer")
        return str(self.engine.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def start(self, tokens: Int32Array, params: SamplingParams, **options: Any) -> LiveRequest:
        """Queues a request."""
        loop = asyncio.get_running_loop()
        if self._notifier is None or self._notifier.loop is not loop:
            self._notifier = LoopNotifier(loop, self.engine)
        return LiveRequest(self._notifier, self.engine, tokens, params, **options)


class LoopNotifier:
    """From an engine's thread to the event loop: one call for all requests that a step has news for.

    They are woken some at a turn, so that what else the loop has to do, such as /health, never waits for all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self.loop = loop
        self._engine = engine
        self._waiting: deque[LiveRequest] = deque()
        self._is_called = False

    def put(self, request: LiveRequest) -> None:
        """Wakes a request once the step is over; in the engine's thread."""
        if self.loop.is_closed():  # nobody is left to hear it
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
        self._is_called = False  # before the look: what is put after it calls again
        if self._waiting:
            self._is_called = True
            self.loop.call_soon(self._wake_some)


class LiveRequest:
    """One request: iterate over what it adds, several chunks at a time where they come faster than they are sent."""

    def __init__(
        self, notifier: LoopNotifier, engine: Engine, tokens: Int32Array, params: SamplingParams, **options: Any
    ) -> None:
        self._notifier = notifier
        self._news: deque[Chunk] = deque()
        self.wake = asyncio.Event()
        self._woken = False
        self._ended = False
        self.began = time.perf_counter()
        self.last: float | None = None  # when its newest tokens came
        try:
            self.generation: Generation = engine.submit(
                tokens, params, on_chunk=self._on_chunk, on_end=self._on_end, **options
            )
        except KVPoolError as error:
            raise problem_of(error) from error

    def _on_chunk(self, chunk: Chunk) -> None:  # in the engine's thread
        self._news.append(chunk)
        if not self._woken:  # once for all that is there when the event loop comes to look
            self._woken = True
            self._notifier.put(self)

    def _on_end(self) -> None:
        self._ended = True
        self._notifier.put(self)

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        """What came since the last time; at the end raises the `Problem` that ended it, if one did."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            self._woken = False  # first: what is appended from here on wakes us again
            ended = self._ended  # and this before the chunks, all of which come before the end
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
        """Ends it if it is not over: its blocks are free after the step that it is in."""
        self.generation.cancel()


def scope_for_tenant(tenant: str, salt: str) -> ReuseScope:
    """Whose cache a request may use: that of its tenant, and within it of those who send the same salt."""
    return ReuseScope(tenant=tenant, salt=salt)


async def _of_library(length: int, work: Callable[[], _T]) -> _T:
    """The result of work on a text: in a thread where it is long, which for a short one takes longer than the work."""
    try:
        return work() if length < _SHORT else await asyncio.to_thread(work)
    except KVPoolError as error:
        raise problem_of(error) from error
