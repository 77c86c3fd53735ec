"""What the wild machine asked of its manager, recorded, and done again on a fresh one: both must have counted the same."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvpool import KVCacheManager
from kvpool.recording import TraceRecorder, replay_recording

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for programs that run without pytest
from managers import counted


class Recording:
    """Follows a manager from its first operation on."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "wild.kvtrace"
        self._recorder = TraceRecorder(self._path).attach(manager)

    def compare(self) -> None:
        """Ends the recording and plays it back. The operation before this one was the last of both."""
        live = self._manager.stats()
        self._recorder.close()
        assert self._recorder.stopped_because is None, self._recorder.stopped_because
        again = replay_recording(self._path)
        assert counted(again) == counted(live), "a replay of the recording differs from what happened"

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines()

    def close(self) -> None:
        self._recorder.close()
        self._folder.cleanup()
