"""Tiers that find blocks by key and outlive a process: disk, memory of the machine, Redis or Valkey, Mooncake, S3, yours.

No torch needed.
"""

from kvpool.tiers.codecs import CompressionStats
from kvpool.tiers.compressed_tier import CompressedTier
from kvpool.tiers.contract import KEY_BYTES, KeyedTier, Listing, Loan, Outcome, Purged, Room, Slots, Source, TierStats
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.keys import Fingerprint, KeyPattern, KeySpace, Shard
from kvpool.tiers.memory_tier import MemoryTier
from kvpool.tiers.node.node_tier import NodeTier
from kvpool.tiers.opening import open_tier, register_tier
from kvpool.tiers.remote.mooncake import MooncakeTier
from kvpool.tiers.remote.redis import RedisTier
from kvpool.tiers.remote.s3 import S3Tier
from kvpool.tiers.settings import TierConfig, read_tiers

__all__ = [
    "open_tier",
    "register_tier",
    "read_tiers",
    "TierConfig",
    "KeyedTier",
    "Outcome",
    "Room",
    "Purged",
    "TierStats",
    "KEY_BYTES",
    "Fingerprint",
    "KeySpace",
    "KeyPattern",
    "Shard",
    "MemoryTier",
    "DiskTier",
    "NodeTier",
    "CompressedTier",
    "CompressionStats",
    "RedisTier",
    "S3Tier",
    "MooncakeTier",
    "Listing",
    "Loan",
    "Slots",
    "Source",
]
