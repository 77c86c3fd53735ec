"""LoopThread: an event loop in a thread of its own, for clients that are asynchronous under a contract that is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from kvpool.tiers.remote.remote_tier import NodeError

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for threads that wait for them. `close` cancels those that run; nobody waits for ever."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """What the coroutine returns or raises; `NodeError` if the loop is closed before it ends."""
        with self._lock:
            if self._closing:
                coroutine.close()
                raise NodeError("closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise NodeError("closed") from None

    def close(self) -> None:
        """Cancels what runs, and ends the thread. May be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
        self._thread.join()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()
