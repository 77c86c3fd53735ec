"""Recordings of the operations of a manager: records, writes, reads and replays them."""

from kvpool.recording.playback import replay_recording
from kvpool.recording.recorder import TraceRecorder

__all__ = ["TraceRecorder", "replay_recording"]
