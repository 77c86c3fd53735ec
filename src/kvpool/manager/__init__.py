"""The manager: the face of the whole control plane. Read `manager/manager.py` first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from kvpool.manager.manager import KVCacheManager
from kvpool.manager.snapshots import RunsSnapshot, Snapshot
from kvpool.sequences.missed import Departure, Divergence, Elsewhere, MissedSpan

__all__ = ["Departure", "Divergence", "Elsewhere", "KVCacheManager", "MissedSpan", "RunsSnapshot", "Snapshot"]

# Where verbs of the manager went. The old spellings still work and warn.
MOVED = {
    **{
        name: f"cache.{name}"
        for name in (
            *("pin", "unpin", "is_pinned", "set_quota", "quotas", "evict", "gc", "next_deadline", "invalidate"),
            *("offload", "onboard", "defragment", "resize"),
        )
    },
    **{name: f"inspect.{name}" for name in ("block", "num_blocks", "has_tier")},
    **{name: f"inspect.{name}" for name in ("usage", "pressure", "now", "table_shape", "policy_name")},
    "reset_prefix_cache": "cache.reset",
    "prefetch": "cache.onboard",
    "cached_runs": "inspect.runs",
    "picture": "inspect.snapshot",
    "runs_picture": "inspect.runs_snapshot",
    "get_num_free_blocks": "inspect.num_free_blocks",
}


def _getter(old: str, new: str) -> Callable[[Any], Any]:
    part, name = new.split(".")

    def get(manager: Any) -> Any:
        warnings.warn(f"manager.{old} is now manager.{new}", DeprecationWarning, stacklevel=2)
        return getattr(getattr(manager, part), name)

    get.__doc__ = f"`manager.{new}`."
    return get


for _old, _new in MOVED.items():
    setattr(KVCacheManager, _old, property(_getter(_old, _new)))
