"""Calls that other threads ask the thread of an engine to make between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvpool.errors import KVPoolError, SequenceStateError


class _Call(NamedTuple):
    """What to call, and whom to tell if the engine ends before that."""

    run: Callable[[], None]
    fail: Callable[[KVPoolError], None]


class Inbox:
    """A queue of calls. Any thread puts calls in; the engine's thread makes them. A closed inbox takes none."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = threading.Event()
        self.failure: KVPoolError | None = None  # what ended the engine, if nobody closed it
        self._calls: deque[_Call] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, run: Callable[[], None], fail: Callable[[KVPoolError], None]) -> None:
        """Has `run` called between two steps, or `fail` if the engine ends before that. Raises if it has ended."""
        with self.changed:
            if self.closed.is_set():
                why = "" if self.failure is None else f": {self.failure}"
                raise SequenceStateError(f"this engine is closed{why}") from self.failure
            self._calls.append(_Call(run, fail))
            self.changed.notify_all()

    def put_or_fail(self, run: Callable[[], None], fail: Callable[[KVPoolError], None]) -> None:
        """The same, but calls `fail` if the engine has ended."""
        try:
            self.put(run, fail)
        except SequenceStateError as error:
            fail(error)

    def run_all(self) -> None:
        """Makes the calls. A call leaves the queue after it was made: if it raises, `fail_all` still finds it."""
        while self._calls:
            self._calls[0].run()
            self._calls.popleft()

    def close(self, failure: KVPoolError | None = None) -> None:
        """Takes no more calls; `failure` is what ended the engine."""
        with self.changed:
            self.failure = failure or self.failure
            self.closed.set()
            self.changed.notify_all()

    def fail_all(self, error: KVPoolError) -> None:
        """Tells everybody whose call was not made. Only after `close`."""
        for call in self._calls:
            call.fail(error)
        self._calls.clear()
