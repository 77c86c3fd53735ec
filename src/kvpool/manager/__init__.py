"""The facade over the whole control plane. Read `manager/manager.py` first."""

from kvpool.manager.manager import KVCacheManager

__all__ = ["KVCacheManager"]
