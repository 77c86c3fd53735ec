"""The calls that users of four earlier systems know, as thin wrappers around one `KVCacheManager`.

Each class only translates arguments and results; the manager behind it is its `manager` attribute and the bytes are its
`plane`, and all of them may be used side by side. Where an earlier system was silent about a mistake, these raise the errors
of `kvpool.errors`. `KVCacheConfig`, `KVCacheManager`, `KVCacheBlock` and `DType` are PyAgent's here. All names of a system
are in `compat.pyagent`, `compat.vllm_v0` and `compat.vllm_v0_parts`, `compat.ferrum` and `compat.trtllm`.
"""

from kvpool.compat.ferrum import (
    AllocationRequest,
    CacheGcStats,
    CacheHandleStats,
    CacheManagerStats,
    FerrumKVCacheManager,
    FoundPrefix,
    PagedKvCacheConfig,
    PagedKvCacheHandle,
    PagedKvCacheManager,
    PrefixCacheStats,
    Priority,
)
from kvpool.compat.pyagent import (
    DeviceType,
    DType,
    KVCacheAllocator,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    KVCacheTransfer,
    PagedKVCache,
    create_kv_cache_manager,
)
from kvpool.compat.trtllm import (
    KvCacheRetentionConfig,
    KvCacheStats,
    TokenRangeRetentionConfig,
    TrtLlmKVCacheManager,
)
from kvpool.compat.vllm_v0 import BlockManager
from kvpool.compat.vllm_v0_parts import CacheEngine, Evictor, NaiveBlockAllocator, PrefixCachingBlockAllocator

__all__ = [
    "AllocationRequest",
    "BlockManager",
    "CacheEngine",
    "CacheGcStats",
    "CacheHandleStats",
    "CacheManagerStats",
    "Evictor",
    "DType",
    "DeviceType",
    "FerrumKVCacheManager",
    "FoundPrefix",
    "KVCacheAllocator",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheManager",
    "KVCacheTransfer",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "NaiveBlockAllocator",
    "PagedKVCache",
    "PagedKvCacheConfig",
    "PagedKvCacheHandle",
    "PagedKvCacheManager",
    "PrefixCacheStats",
    "PrefixCachingBlockAllocator",
    "Priority",
    "TokenRangeRetentionConfig",
    "TrtLlmKVCacheManager",
    "create_kv_cache_manager",
]
