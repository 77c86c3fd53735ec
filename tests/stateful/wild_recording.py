"""What the wild machine asked of its manager, recorded, and done again on a fresh one: both must have counted the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from kvpool import KVCacheManager
from kvpool.recording import TraceRecorder, replay_recording
from kvpool.stats import CacheStats

COUNTERS = (
    "requests",
    "prompt_tokens",
    "prompt_blocks",
    "hit_blocks",
    "hit_tokens",
    "partial_hit_tokens",
    "full_hits_with_logits",
    "blocks_allocated",
    "blocks_merged",
    "copies_on_write",
    "evictions",
    "forks",
    "rewinds",
    "swaps_out",
    "swaps_in",
    "swapped_blocks",
    "offloaded_blocks",
    "onboarded_blocks",
    "shadowed_blocks",
    "defragmented_blocks",
    "num_cached_runs",
)


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
        assert _seen(again) == _seen(live), "a replay of the recording differs from what happened"

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines()

    def close(self) -> None:
        self._recorder.close()
        self._folder.cleanup()


def _seen(stats: CacheStats) -> dict[str, Any]:
    pools = [(pool.tier, pool.free, pool.cached, pool.referenced) for pool in stats.pools]
    return {name: getattr(stats, name) for name in COUNTERS} | {"pools": pools}
