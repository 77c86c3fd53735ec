"""The calls that users of four earlier systems know, as thin wrappers around one `KVCacheManager`.

Each class only translates arguments and results; the manager behind it is its `manager` attribute and the bytes are its
`plane`, and all of them may be used side by side. Where an earlier system was silent about a mistake, these raise the errors
of `kvpool.errors`. `KVCacheConfig`, `KVCacheManager`, `KVCacheBlock` and `DType` are PyAgent's here, `Device` and
`BlockTable` vLLM V0's. All names of a system are in `compat.pyagent`, `compat.ferrum`, `compat.trtllm`, and the
modules `compat.vllm_v0*`.
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
from kvpool.compat.vllm_v0_evictor import Evictor
from kvpool.compat.vllm_v0_parts import CacheEngine, NaiveBlockAllocator, PrefixCachingBlockAllocator
from kvpool.compat.vllm_v0_utils import Device, KVCacheUtils
from kvpool.core.cache import AllocStatus
from kvpool.core.handle import BlockTable
from kvpool.scheduling import Scheduler

__all__ = [
    "AllocStatus",
    "AllocationRequest",
    "BlockManager",
    "BlockTable",
    "CacheEngine",
    "CacheGcStats",
    "CacheHandleStats",
    "CacheManagerStats",
    "DType",
    "Device",
    "DeviceType",
    "Evictor",
    "FerrumKVCacheManager",
    "FoundPrefix",
    "KVCacheAllocator",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheManager",
    "KVCacheTransfer",
    "KVCacheUtils",
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
    "Scheduler",
    "TokenRangeRetentionConfig",
    "TrtLlmKVCacheManager",
    "create_kv_cache_manager",
]
