"""Values on a local disk that survive a restart: slab files, an index file for each, and a lock for the writer."""

from kvpool.tiers.disk.disk_tier import DiskOptions, DiskTier

__all__ = ["DiskOptions", "DiskTier"]
