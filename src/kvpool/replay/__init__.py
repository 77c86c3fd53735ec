"""Replay and planning: what would a policy, a gigabyte or a tier buy? numpy and the standard library only."""

from __future__ import annotations

from kvpool.errors import TraceError
from kvpool.recording.playback import replay_recording
from kvpool.recording.recorder import TraceRecorder
from kvpool.replay.formats import read_trace, write_trace
from kvpool.replay.policies import (
    ARCPolicy,
    ClockPolicy,
    CostAwarePolicy,
    FIFOPolicy,
    LFUPolicy,
    S3FIFOPolicy,
    SievePolicy,
    TwoQueuePolicy,
)
from kvpool.replay.simulate import PrefillTime, ReplayConfig, ReplayResult, replay
from kvpool.replay.trace import Problems, Trace, TraceBuilder, TraceRequest

__all__ = [
    "ARCPolicy",
    "ClockPolicy",
    "CostAwarePolicy",
    "FIFOPolicy",
    "LFUPolicy",
    "PrefillTime",
    "Problems",
    "ReplayConfig",
    "ReplayResult",
    "S3FIFOPolicy",
    "SievePolicy",
    "Trace",
    "TraceBuilder",
    "TraceError",
    "TraceRecorder",
    "TraceRequest",
    "TwoQueuePolicy",
    "read_trace",
    "replay",
    "replay_recording",
    "write_trace",
]
