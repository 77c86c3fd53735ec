"""kvpool: a paged KV-cache manager for transformer inference. The public names; start with `KVCacheManager`."""

from kvpool.blocks.admission import PrefixMatch
from kvpool.blocks.batch import CSRTable, SequenceBatch
from kvpool.blocks.compaction import ResizeResult
from kvpool.blocks.copies import CopyKind, CopyOp
from kvpool.blocks.eviction import EvictionPolicy, KeyedPolicy, register_policy
from kvpool.blocks.handle import BlockTable, KVCacheHandle
from kvpool.blocks.hashing import ReuseScope
from kvpool.blocks.pins import Pin
from kvpool.blocks.retention import Retention, TokenRange
from kvpool.blocks.state import Admission, AllocStatus
from kvpool.compat import create_kv_cache_manager
from kvpool.config import DType, GroupKind, KVCacheConfig, LayerGroup, LayerSpec, Tier
from kvpool.errors import KVPoolError
from kvpool.guard import PressureChange
from kvpool.manager import KVCacheManager
from kvpool.model_config import config_from_hf, layers_from_hf
from kvpool.stats import CacheStats, EvictionReason, HandleStats, MemoryPressure

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "AllocStatus",
    "BlockTable",
    "CSRTable",
    "CacheStats",
    "CopyKind",
    "CopyOp",
    "DType",
    "EvictionPolicy",
    "EvictionReason",
    "GroupKind",
    "HandleStats",
    "KVCacheConfig",
    "KVCacheHandle",
    "KVCacheManager",
    "KVPoolError",
    "KeyedPolicy",
    "LayerGroup",
    "LayerSpec",
    "MemoryPressure",
    "Pin",
    "PrefixMatch",
    "PressureChange",
    "ResizeResult",
    "Retention",
    "ReuseScope",
    "SequenceBatch",
    "Tier",
    "TokenRange",
    "config_from_hf",
    "create_kv_cache_manager",
    "layers_from_hf",
    "register_policy",
]
