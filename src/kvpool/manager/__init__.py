"""The manager: the face of the whole control plane. Read `manager/manager.py` first."""

from kvpool.manager.inspection import RunsSnapshot, Snapshot
from kvpool.manager.manager import KVCacheManager
from kvpool.manager.old_names import add_old_names

__all__ = ["KVCacheManager", "RunsSnapshot", "Snapshot"]

add_old_names(KVCacheManager)
