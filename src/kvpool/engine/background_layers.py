"""Compiles the layers of an engine in a thread, so that it answers meanwhile, by plain layers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import MutableMapping

from kvpool.engine.inbox import Inbox
from kvpool.engine.runner import ModelRunner
from kvpool.errors import KVPoolError

log = logging.getLogger("kvpool")


class BackgroundLayers:
    """The layers of one engine, until they run compiled. The engine's thread calls its methods.

    The thread puts a call into the `inbox` when they are compiled, so steps use them from one step to the next.
    """

    def __init__(self, runner: ModelRunner, inbox: Inbox, seconds: MutableMapping[str, float]) -> None:
        self._runner = runner if runner.is_uncompiled else None
        self._inbox = inbox
        self._seconds = seconds
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._failure: Exception | None = None

    @property
    def are_left(self) -> bool:
        """Whether steps run by plain layers that are to be replaced."""
        return self._runner is not None

    @property
    def can_begin(self) -> bool:
        """Whether nobody compiles them yet."""
        return self.are_left and self._thread is None

    def begin(self) -> None:
        """Begins to compile them, if nobody has."""
        if self.can_begin:
            self._thread = threading.Thread(target=self._compile, name="kvpool-layers", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Waits until they are compiled, if somebody has begun to. Any thread may call it."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Compiles them, and has steps use them; raises KVPoolError if that failed."""
        self.begin()
        self.wait()
        self._take_over()
        if self._failure is not None:
            raise KVPoolError(f"torch.compile failed, so layers are not compiled: {self._failure}") from self._failure

    def close(self) -> None:
        """Ends the thread as soon as it has compiled what it is at."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _compile(self) -> None:
        began = time.perf_counter()
        try:
            if self._runner is not None:
                self._runner.compile(self._stopped.is_set)
        except Exception as error:
            self._failure = error
        self._seconds["compiling layers, beside requests"] = time.perf_counter() - began
        self._inbox.put_or_fail(self._take_over, lambda error: None)

    def _take_over(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if self._failure is not None:
            log.error("layers are not compiled, steps go on without: %s", self._failure)
        else:
            runner.use_compiled()
