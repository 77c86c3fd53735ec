"""Where verbs of the manager went. The old spellings still work and warn; this file is all there is of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

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


def add_old_names(manager_class: type) -> None:
    """Gives the class a property for every old name: it warns, and returns what stands under the new one."""
    for old, new in MOVED.items():
        setattr(manager_class, old, property(_getter(old, new)))


def _getter(old: str, new: str) -> Callable[[Any], Any]:
    part, name = new.split(".")

    def get(manager: Any) -> Any:
        warnings.warn(f"manager.{old} is now manager.{new}", DeprecationWarning, stacklevel=2)
        return getattr(getattr(manager, part), name)

    get.__doc__ = f"`manager.{new}`."
    return get
