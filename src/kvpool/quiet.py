"""A few log lines a minute, with a count of those left out: what fails for every block or message would fill the log."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

QUIET_SECONDS = 60.0


class QuietLog:
    """Writes warnings of one kind to a log, the first `lines` of a minute. Any thread may write."""

    def __init__(self, log: logging.Logger, lines: int = 1) -> None:
        self._log = log
        self._lines = lines
        self._minute_began = -QUIET_SECONDS
        self._num_written = 0
        self._num_left_out = 0
        self._lock = threading.Lock()

    @property
    def is_due(self) -> bool:
        """Whether a line would be written now."""
        return self._num_written < self._lines or time.monotonic() - self._minute_began >= QUIET_SECONDS

    def warning(self, message: str, *args: object) -> None:
        """Writes the line, or counts it if enough were written in this minute."""
        if (added := self.added()) is not None:
            self._log.warning(f"{message}{added}", *args)

    def added(self) -> str | None:
        """What to add to a line that is written now: how many were left out since the last one. None: leave this one out."""
        with self._lock:
            if not self.is_due:
                self._num_left_out += 1
                return None
            now = time.monotonic()
            if now - self._minute_began >= QUIET_SECONDS:
                self._minute_began, self._num_written = now, 0
            self._num_written += 1
            left_out, self._num_left_out = self._num_left_out, 0
        return f" ({left_out:,} more such lines were left out before)" if left_out else ""


class QuietErrors:
    """Writes errors with their tracebacks to a log, one a minute of those that the same line of code raises."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._by_place: dict[tuple[str, int], QuietLog] = {}

    def error(self, error: BaseException, message: str, *args: object) -> None:
        """Writes the line and the traceback, or counts it."""
        if (added := self.added(error)) is not None:
            self._log.error(f"{message}{added}", *args, exc_info=error)

    def added(self, error: BaseException) -> str | None:
        """As `QuietLog.added`."""
        return self._by_place.setdefault(_place(error.__traceback__), QuietLog(self._log)).added()


def _place(traceback: TracebackType | None) -> tuple[str, int]:
    """The file and the line that raised."""
    place = ("", 0)
    while traceback is not None:
        place = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return place
