"""One log line a minute, with a count of those left out: what fails for every block or every message would fill the log."""

from __future__ import annotations

import logging
import threading
import time

QUIET_SECONDS = 60.0


class QuietLog:
    """Writes warnings of one kind to a log, one a minute. Any thread may write; of those that do at once one is written."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last_line = -QUIET_SECONDS
        self._num_left_out = 0
        self._lock = threading.Lock()

    def warning(self, message: str, *args: object) -> None:
        """Writes the line, or counts it if the last one was written less than a minute ago."""
        if (added := self.added()) is not None:
            self._log.warning(f"{message}{added}", *args)

    def added(self) -> str | None:
        """What to add to a line that is written now: how many were left out since the last one. None: leave this one out."""
        now = time.monotonic()
        with self._lock:
            if now - self._last_line < QUIET_SECONDS:
                self._num_left_out += 1
                return None
            left_out, self._num_left_out, self._last_line = self._num_left_out, 0, now
        return f" ({left_out:,} more such lines were left out before)" if left_out else ""
