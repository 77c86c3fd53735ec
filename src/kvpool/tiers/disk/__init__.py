"""Values on a local disk that are there again after a restart: slab files, an index beside each, and who may use them."""

from kvpool.tiers.disk.disk_tier import DiskOptions, DiskTier

__all__ = ["DiskOptions", "DiskTier"]
