"""What a manager was asked for: recorded by an observer, written, read, and done again."""

from kvpool.recording.playback import replay_recording
from kvpool.recording.recorder import TraceRecorder

__all__ = ["TraceRecorder", "replay_recording"]
