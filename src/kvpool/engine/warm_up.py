"""What makes an engine's later steps faster while it answers: layers that a thread compiles, and CUDA graphs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import MutableMapping

from kvpool.engine.runner import ModelRunner
from kvpool.engine.step_part import StepPart
from kvpool.engine.thread import Inbox
from kvpool.errors import KVPoolError
from kvpool.scheduling import BatchPlan

log = logging.getLogger("kvpool")


class WarmUp(StepPart):
    """The layers of one engine until they run compiled, and the graphs of its steps until all are captured.

    Steps run by plain layers until a thread has compiled them. The thread begins when the first tokens were handed out, since
    it would have slowed them down, and puts a call into the `inbox` when it is done. So steps use compiled layers from one
    step to the next. All graphs are captured again then, so none is captured ahead of that.
    """

    def __init__(self, runner: ModelRunner, inbox: Inbox, seconds: MutableMapping[str, float]) -> None:
        self._runner = runner
        self._inbox = inbox
        self._seconds = seconds
        self._thread: threading.Thread | None = None  # that compiles
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._is_answering = False
        self.when_idle = False  # also without a request

    @property
    def _can_begin(self) -> bool:
        return self._runner.is_uncompiled and self._thread is None

    @property
    def _captures_more(self) -> bool:
        return not self._runner.is_uncompiled and self._runner.captures_more

    # --- moments of the loop -----------------------------------------------------------------------------------------

    def has_idle_work(self) -> bool:
        """Whether there is something to compile or to capture, and it may be done before a request comes."""
        return self.when_idle and (self._can_begin or self._captures_more)

    def use_idle_time(self) -> None:
        """Begins to compile layers, or captures one more CUDA graph, which takes about a tenth of a second."""
        self.begin()
        if self._captures_more:
            self._runner.capture_next()

    def planning(self) -> None:
        """Begins to compile layers once there was an answer."""
        if self._is_answering:
            self.begin()

    def done(self, plan: BatchPlan, seconds: float | None) -> None:
        """Notes that there is an answer."""
        self._is_answering = self._is_answering or len(plan.sampling_rows) > 0

    def fail(self, error: KVPoolError) -> None:
        """Ends the thread as soon as it has compiled what it is at."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    # --- for a caller that does not want to wait later ---------------------------------------------------------------

    def begin(self) -> None:
        """Begins to compile layers, if nobody has."""
        if self._can_begin:
            self._thread = threading.Thread(target=self._compile, name="kvpool-layers", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Waits until they are compiled, if somebody has begun to. Any thread may call it."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Has steps run by compiled layers, and captures all graphs; raises KVPoolError if layers are not compiled."""
        self.begin()
        self.wait()
        self._take_over()
        if self._failure is not None:
            raise KVPoolError(f"torch.compile failed, so layers are not compiled: {self._failure}") from self._failure
        while self._captures_more:
            self._runner.capture_next()

    def _compile(self) -> None:
        began = time.perf_counter()
        try:
            self._runner.compile(self._stopped.is_set)
        except Exception as error:
            self._failure = error
        self._seconds["compiling layers, beside requests"] = time.perf_counter() - began
        self._inbox.put_or_fail(self._take_over, lambda error: None)

    def _take_over(self) -> None:
        if not self._runner.is_uncompiled:
            return
        if self._failure is None:
            self._runner.use_compiled()
        else:
            log.error("layers are not compiled, steps go on without: %s", self._failure)
            self._runner.stay_plain()
