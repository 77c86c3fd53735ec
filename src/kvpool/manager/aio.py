"""The asyncio facade: `await allocate(...)` waits until a request fits.

Waiters are served strictly in the order of their calls: a large request at the head is not starved by small ones behind
it. (One that only waits for a prefix in flight, see `wait_for_prefix`, lets others pass.) The manager may be used from
other threads as well; any operation that may have freed blocks wakes the head of the queue. While nobody waits the
manager is not slowed down at all.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any

from kvpool.checks import as_flag
from kvpool.core.cache import Admission, AllocStatus
from kvpool.core.handle import KVCacheHandle
from kvpool.core.prompt import PROMPT_OPTIONS, Prompt
from kvpool.errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    NeverFitsError,
    OutOfBlocksError,
    UnknownRequestError,
)
from kvpool.manager import KVCacheManager

ADMISSION_OPTIONS = ("num_tokens", "reserve", "lookahead", *PROMPT_OPTIONS)  # what decides whether it fits


class _Waiter:
    """A call of `allocate` that has not been served yet."""

    __slots__ = ("future", "options", "prompt", "request_id", "wait_for_prefix")

    def __init__(self, request_id: Hashable, tokens: Any, wait_for_prefix: bool, options: dict[str, Any]) -> None:
        self.request_id = request_id
        self.wait_for_prefix = wait_for_prefix
        if tokens is not None and not isinstance(tokens, Prompt):  # asked about more than once
            described = {name: options[name] for name in PROMPT_OPTIONS if name in options}
            tokens = Prompt(tokens, may_be_cut=as_flag(options.get("lease", False), "lease"), **described)
            options = {name: value for name, value in options.items() if name not in PROMPT_OPTIONS}
        self.prompt: Prompt | None = tokens
        self.options = options
        self.future: asyncio.Future[KVCacheHandle] = asyncio.get_running_loop().create_future()

    def ask(self, manager: KVCacheManager, wait_for_prefix: bool = False) -> Admission:
        asked = {name: value for name, value in self.options.items() if name in ADMISSION_OPTIONS}
        return manager.can_allocate(self.prompt, wait_for_prefix=wait_for_prefix, **asked)


class AsyncKVCacheManager:
    """`KVCacheManager` for asyncio: `allocate` and `sequence` wait; every other verb is the manager's own.

        cache = AsyncKVCacheManager(KVCacheManager(config))
        async with cache.sequence("r1", prompt, timeout=30) as handle:
            ...
            cache.commit(handle, len(prompt))

    All waiters belong to one event loop at a time; freeing and everything else may happen in any thread. Requests that
    go to the manager directly do not stand in the queue.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        if not isinstance(manager, KVCacheManager):
            raise InvalidArgumentError(f"AsyncKVCacheManager wraps a KVCacheManager, got {manager!r}")
        self.manager = manager
        self._waiters: dict[_Waiter, None] = {}  # in order of arrival
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_planned = False
        self._stop_listening: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._serving_thread = 0  # our own calls of the manager must not wake us again

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.manager, name)

    @property
    def num_waiting(self) -> int:
        """Calls of `allocate` that wait."""
        return len(self._waiters)

    async def allocate(
        self,
        request_id: Hashable,
        tokens: Any = None,
        *,
        timeout: float | None = None,
        wait_for_prefix: bool = False,
        **options: Any,
    ) -> KVCacheHandle:
        """`KVCacheManager.allocate` as soon as `can_allocate` says OK and everybody who asked before was served.

        With `wait_for_prefix` it also waits while another request computes the next block of this prompt. Raises
        `NeverFitsError` at once when waiting cannot help, and `asyncio.TimeoutError` after `timeout` seconds. A
        cancelled call leaves nothing behind, whenever the cancellation comes.
        """
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout >= 0):
            raise InvalidArgumentError(f"timeout must be a number of seconds from 0 on, or None, got {timeout!r}")
        waiter = _Waiter(request_id, tokens, as_flag(wait_for_prefix, "wait_for_prefix"), options)
        self._refuse_hopeless(waiter)
        self._enter(waiter)
        timer = None
        try:
            self._serve()
            if timeout is not None and not waiter.future.done():
                timer = waiter.future.get_loop().call_later(timeout, self._time_out, waiter, timeout)
            return await waiter.future
        except BaseException:
            # Granted in the same tick as the cancellation: nobody will ever see the handle.
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.manager.free(waiter.future.result())
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(waiter)

    @asynccontextmanager
    async def sequence(
        self, request_id: Hashable, tokens: Any = None, *, keep: bool = True, **options: Any
    ) -> AsyncIterator[KVCacheHandle]:
        """`allocate` for the length of a block; frees the request at the end unless that was done inside."""
        keep = as_flag(keep, "keep")
        handle = await self.allocate(request_id, tokens, **options)
        try:
            yield handle
        finally:
            if handle.is_live:
                self.manager.free(handle, keep)

    # --- the queue ---------------------------------------------------------------------------------------------------

    def _refuse_hopeless(self, waiter: _Waiter) -> None:
        """Raises for mistakes and for requests that no waiting can help."""
        admission = waiter.ask(self.manager)
        if admission.status is AllocStatus.NEVER:
            raise NeverFitsError(f"request {waiter.request_id!r} {admission.reason}")
        try:
            self.manager.get(waiter.request_id)
        except UnknownRequestError:
            return
        raise DuplicateRequestError(f"request {waiter.request_id!r} is already live; free it first or use another id")

    def _enter(self, waiter: _Waiter) -> None:
        loop = waiter.future.get_loop()
        if not self._waiters:
            self._loop = loop
            self._wake_planned = False
            self._listen(True)
        elif loop is not self._loop:
            raise InvalidArgumentError("requests already wait in another event loop; use one loop for one manager")
        self._waiters[waiter] = None

    def _leave(self, waiter: _Waiter) -> None:
        """A waiter is done; those behind it may be next."""
        was_waiting = waiter in self._waiters
        self._forget(waiter)
        if was_waiting:
            self._serve()

    def _forget(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            del self._waiters[waiter]
            if not self._waiters:
                self._listen(False)

    def _listen(self, listen: bool) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
        self._stop_listening = self.manager.on_operation(self._on_operation) if listen else None

    @staticmethod
    def _time_out(waiter: _Waiter, timeout: float) -> None:
        if not waiter.future.done():
            text = f"request {waiter.request_id!r} did not fit within {timeout} s; free requests or wait longer"
            waiter.future.set_exception(asyncio.TimeoutError(text))

    def _on_operation(self) -> None:
        """Called by the manager after every operation, outside its lock, in the thread of the operation."""
        loop = self._loop
        if self._wake_planned or loop is None or threading.get_ident() == self._serving_thread:
            return
        self._wake_planned = True
        try:
            loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop was closed with its waiters
            self._wake_planned = False

    def _wake(self) -> None:
        self._wake_planned = False
        self._serve()

    def _serve(self) -> None:
        """Grants what fits, in order; again after a grant, whose pressure callbacks may have freed something."""
        previous, self._serving_thread = self._serving_thread, threading.get_ident()
        try:
            while self._serve_once():
                pass
            self._watch_the_clock()
        finally:
            self._serving_thread = previous

    def _watch_the_clock(self) -> None:
        """Time frees blocks too: look again when the next pin or cached run runs out."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay = self.manager.cache.next_deadline() if self._waiters else None
        if delay is not None and self._loop is not None:
            self._timer = self._loop.call_later(delay + 0.001, self._wake)

    def _serve_once(self) -> bool:
        """One walk along the queue, until somebody must wait for blocks. Whether anybody was served."""
        served = False
        for waiter in tuple(self._waiters):
            if waiter.future.done():
                continue
            try:
                if not self._grant(waiter):
                    break
            except Exception as error:
                waiter.future.set_exception(error)
            if waiter.future.done():
                self._forget(waiter)
                served = True
        return served

    def _grant(self, waiter: _Waiter) -> bool:
        """Serves one waiter. False when it must wait for blocks, and everybody behind it too."""
        admission = waiter.ask(self.manager)
        if admission.status is AllocStatus.NEVER:
            raise NeverFitsError(f"request {waiter.request_id!r} {admission.reason}")
        if not admission:
            return False
        if waiter.wait_for_prefix and not waiter.ask(self.manager, wait_for_prefix=True):
            return True
        try:
            handle = self.manager.allocate(waiter.request_id, waiter.prompt, **waiter.options)
        except OutOfBlocksError:  # another thread was faster
            return False
        if waiter.future.done():  # a pressure callback of this allocation cancelled the call
            self.manager.free(handle)
        else:
            waiter.future.set_result(handle)
        return True
