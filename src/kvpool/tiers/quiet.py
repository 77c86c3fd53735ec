"""One log line a minute: what fails for every block of every request would fill the log."""

from __future__ import annotations

import threading
import time

QUIET_SECONDS = 60.0


class QuietMinute:
    """Says whether a line may be written now. Any thread may ask; of those that ask at once one is told yes."""

    def __init__(self) -> None:
        self._last_line = -QUIET_SECONDS
        self._lock = threading.Lock()

    def is_over(self) -> bool:
        """Whether the last line was written a minute ago or more; if so, the next minute begins."""
        now = time.monotonic()
        with self._lock:
            if now - self._last_line < QUIET_SECONDS:
                return False
            self._last_line = now
            return True
