"""The calls that users of four earlier systems know, as thin wrappers around one `KVCacheManager`.

Each class only translates arguments and results; the manager behind it is its `manager` attribute and the bytes are its
`plane`, and all of them may be used side by side. Where an earlier system was silent about a mistake, these raise the errors
of `kvpool.errors`. PyAgent's own `KVCacheConfig`, `KVCacheManager`, `KVCacheBlock` and `DType` are in `compat.pyagent`,
all of ferrum's names in `compat.ferrum`, all of TensorRT-LLM's in `compat.trtllm`.
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
from kvpool.compat.pyagent import CompatKVCacheManager, PagedKVCache, PyAgentKVCacheManager, create_kv_cache_manager
from kvpool.compat.pyagent_blocks import DeviceType, KVCacheAllocator, KVCacheBlocks, KVCacheTransfer
from kvpool.compat.trtllm import (
    KvCacheRetentionConfig,
    KvCacheStats,
    TokenRangeRetentionConfig,
    TrtLlmKVCacheManager,
)
from kvpool.compat.vllm_v0 import BlockManager, CacheEngine

__all__ = [
    "AllocationRequest",
    "BlockManager",
    "CacheEngine",
    "CacheGcStats",
    "CacheHandleStats",
    "CacheManagerStats",
    "CompatKVCacheManager",
    "DeviceType",
    "FerrumKVCacheManager",
    "FoundPrefix",
    "KVCacheAllocator",
    "KVCacheBlocks",
    "KVCacheTransfer",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "PagedKVCache",
    "PagedKvCacheConfig",
    "PagedKvCacheHandle",
    "PagedKvCacheManager",
    "PrefixCacheStats",
    "Priority",
    "PyAgentKVCacheManager",
    "TokenRangeRetentionConfig",
    "TrtLlmKVCacheManager",
    "create_kv_cache_manager",
]
