"""Where the start of an engine goes: its stages, their seconds, and a word about those that take long."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import ClassVar

LONG_SECONDS = 2.0
log = logging.getLogger("kvpool")


class Start:
    """The stages of a start, one after another. What takes over two seconds is told when it does, and when it is over."""

    shown: ClassVar[bool | None] = None  # commands say whether they show it on stderr

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name: str | None = None
        self._began = 0.0
        self._timer: threading.Timer | None = None

    def stage(self, name: str) -> None:
        """Ends the stage before this one, and begins it."""
        self.end()
        self._name, self._began = name, time.perf_counter()
        self._timer = threading.Timer(LONG_SECONDS, _tell, (f"{name} ...",))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Ends the last stage."""
        if self._name is None or self._timer is None:
            return
        self._timer.cancel()
        seconds = time.perf_counter() - self._began
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + seconds
        if seconds >= LONG_SECONDS:
            _tell(f"{self._name}: {seconds:.1f} s")
        self._name = None

    def __enter__(self) -> Start:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def _tell(text: str) -> None:
    """Writes to the log if somebody reads it, or to a terminal; for a command, as it was told."""
    if Start.shown is None and log.isEnabledFor(logging.INFO):
        log.info(text)
    elif Start.shown or (Start.shown is None and sys.stderr.isatty()):
        print(text if Start.shown else f"kvpool: {text}", file=sys.stderr, flush=True)
