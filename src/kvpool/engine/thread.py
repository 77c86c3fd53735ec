"""The thread of an engine: takes steps while there is work, and makes the calls of other threads between them.

The calls lie in an `Inbox`. It is apart from the thread because parts of the loop put calls in, too, and must not hold the
thread, which holds the loop.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from kvpool.engine.generation import Generation
from kvpool.engine.loop import EngineLoop
from kvpool.errors import KVPoolError, SequenceStateError
from kvpool.kernels.layout import current

_Answer = TypeVar("_Answer")
_EXIT_SECONDS = 10.0  # the end of the process waits so long for the current steps

_alive: weakref.WeakSet[EngineThread] = weakref.WeakSet()  # of those that have started
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


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


class EngineThread:
    """Starts with the first call. It ends when it is closed, or, once abandoned, when nothing is left to do."""

    def __init__(self, loop: EngineLoop, inbox: Inbox) -> None:
        self._loop = loop
        self._inbox = inbox
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._process = 0  # the process that has the thread; a fork of it does not

    @property
    def has_started(self) -> bool:
        return self._thread is not None

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more calls: it was closed, or it failed."""
        return self._inbox.closed.is_set()

    @property
    def failure(self) -> KVPoolError | None:
        """What ended it, if nobody closed it."""
        return self._inbox.failure

    @property
    def is_elsewhere(self) -> bool:
        """Whether the thread runs in another process, of which this one is a fork. Locks here may then be held for ever."""
        return self.has_started and self._process != os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def tell(self, run: Callable[[], None], fail: Callable[[KVPoolError], None]) -> None:
        """Has `run` called between two steps. If the thread ends before that, `fail` is called instead."""
        if self.is_elsewhere:
            raise SequenceStateError(
                f"this engine runs in process {self._process}, of which this one is a fork; make an engine of its own here, "
                "or start processes with the method 'spawn'"
            )
        with self._inbox.changed:
            self._inbox.put(run, fail)
            if self._thread is None:
                self._process = os.getpid()  # first: others look at both without the lock
                self._thread = threading.Thread(target=self._serve, name="kvpool-engine", daemon=True)
                _alive.add(self)
                _threads.add(self._thread)  # too, because it may outlive this object for a moment
                self._thread.start()

    def ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Calls `question` between two steps and returns its answer; raises what it raises, or what ended the thread."""
        if self.is_current:
            return question()
        answer: Future[_Answer] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # only the caller is concerned: the engine goes on
                answer.set_exception(error)

        self.tell(run, answer.set_exception)
        return answer.result()

    def cancel(self, generation: Generation) -> None:
        """Ends a request that is not over."""
        if generation.is_over:
            return
        try:
            self.tell(lambda: self._loop.cancel(generation), lambda error: None)
        except SequenceStateError:  # the engine is closed: nothing runs any more
            if self.is_elsewhere:
                raise

    def close(self) -> None:
        """Ends it after the step that it is in, and waits for that."""
        self.end_soon()
        if self._thread is not None:
            self._thread.join()

    def end_soon(self) -> None:
        """Ends it after the step that it is in."""
        if self.is_elsewhere:
            return
        self._inbox.close()

    def abandon(self) -> None:
        """The engine has no references any more. The thread ends when its requests are over, since callers may wait for them.

        If there are none, this waits for the end of the thread, so that the memory of the engine is free on return.
        """
        if self.is_elsewhere:
            return
        with self._inbox.changed:
            self._abandoned = True
            self._inbox.changed.notify_all()
            is_idle = not self._has_work and not self._loop.held
        if is_idle and self._thread is not None and not self.is_current:
            self._thread.join(_EXIT_SECONDS)

    # --- in the thread itself ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        failure: KVPoolError | None = None
        try:
            with current(self._loop.runner.device):
                while self._waited_for_work():
                    self._inbox.run_all()
                    self._loop.tend()
                    if self._loop.has_work:
                        self._loop.step()
                    elif self._loop.has_idle_work and not self._inbox:
                        self._loop.use_idle_time()
        except BaseException as error:
            failure = KVPoolError(f"the engine stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._inbox.close(failure)
        ended = failure or SequenceStateError("the engine was closed before this request was over")
        self._inbox.fail_all(ended)
        self._loop.fail(ended)

    def _waited_for_work(self) -> bool:
        """Waits until there is something to do; False at the end."""
        with self._inbox.changed:
            while not (self._has_work or self.is_closed or (self._abandoned and not self._loop.held)):
                if self._loop.has_idle_work:
                    return True
                self._inbox.changed.wait(self._loop.patience)
            return self._has_work and not self.is_closed

    @property
    def _has_work(self) -> bool:
        return bool(self._inbox) or self._loop.has_work or self._loop.patience == 0.0


@atexit.register
def _end_all() -> None:
    """Ends all threads at the end of the process: one that is inside torch would make the interpreter abort."""
    for engine_thread in list(_alive):
        engine_thread.end_soon()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
