"""The facade over the whole control plane. Read `manager/manager.py` first."""

from kvpool.manager.manager import KVCacheManager
from kvpool.manager.picture import Picture, RunsPicture

__all__ = ["KVCacheManager", "Picture", "RunsPicture"]
