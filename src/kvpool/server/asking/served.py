"""A model that is served, and its requests as an event loop sees them: chunks that arrive, and an end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from kvpool.engine.engine import Engine, Prompt
from kvpool.engine.generation import Chunk, Generation
from kvpool.engine.sampling.params import SamplingParams
from kvpool.errors import KVPoolError
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from kvpool.server.asking.problems import Problem, problem_of

_T = TypeVar("_T")


class ServedModel:
    """An engine under the name that clients use."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    async def tokens(self, prompt: Prompt) -> Int32Array:
        """Token ids; in a thread, since a long text takes a while."""
        return await _of_library(asyncio.to_thread(self.engine.token_ids, prompt))

    async def chat_tokens(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> Int32Array:
        """Token ids of a conversation by the model's template."""
        return await _of_library(asyncio.to_thread(self.engine.chat_prompt, messages, **template))

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        if self.engine.tokenizer is None:
            raise Problem(400, f"the model {self.name!r} came without a tokenizer", code="no_tokenizer")
        return str(self.engine.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def start(self, tokens: Int32Array, params: SamplingParams, **options: Any) -> LiveRequest:
        """Queues a request."""
        return LiveRequest(self.engine, tokens, params, **options)


class LiveRequest:
    """One request: iterate over what it adds, several chunks at a time where they come faster than they are sent."""

    def __init__(self, engine: Engine, tokens: Int32Array, params: SamplingParams, **options: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: deque[Chunk] = deque()
        self._wake = asyncio.Event()
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
            self._call_soon(self._wake.set)

    def _on_end(self) -> None:
        self._ended = True
        self._call_soon(self._wake.set)

    def _call_soon(self, call: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            self.generation.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        """What came since the last time; at the end raises the `Problem` that ended it, if one did."""
        while True:
            await self._wake.wait()
            self._wake.clear()
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


def scope_of(tenant: str, salt: str) -> ReuseScope:
    """Whose cache a request may use: that of its tenant, and within it of those who send the same salt."""
    return ReuseScope(tenant=tenant, salt=salt)


async def _of_library(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except KVPoolError as error:
        raise problem_of(error) from error
