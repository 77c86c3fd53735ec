"""ferrum's names: `PagedKvCacheManager` and all that its users import with it.

`X::new(...)` of ferrum is `X(...)` here, a `Result` is the value or an error of `kvpool.errors`, an `Option` is the value or
None. Enumerations are in capitals. Ids of blocks and tokens are plain integers.
"""

from kvpool.compat.ferrum_calls import CacheGcStats, CacheManagerStats, FerrumKVCacheManager
from kvpool.compat.ferrum_handle import CacheHandleStats, PagedKvCacheHandle
from kvpool.compat.ferrum_manager import PagedKvCacheConfig, PagedKvCacheManager
from kvpool.compat.ferrum_prefixes import BlockPool, BlockPoolStats, FoundPrefix, PrefixCache, PrefixCacheStats
from kvpool.compat.ferrum_types import AllocationRequest, BlockTable, DataType, Device, Priority, RequestId
from kvpool.errors import KVPoolError
from kvpool.stats import MemoryPressure

FerrumError = KVPoolError
KvCacheHandle = PagedKvCacheHandle
KvCacheManager = PagedKvCacheManager
PhysicalBlockId = TokenId = int
PrefixId = bytes

__all__ = [
    "AllocationRequest",
    "BlockPool",
    "BlockPoolStats",
    "BlockTable",
    "CacheGcStats",
    "CacheHandleStats",
    "CacheManagerStats",
    "DataType",
    "Device",
    "FerrumError",
    "FerrumKVCacheManager",
    "FoundPrefix",
    "KvCacheHandle",
    "KvCacheManager",
    "MemoryPressure",
    "PagedKvCacheConfig",
    "PagedKvCacheHandle",
    "PagedKvCacheManager",
    "PhysicalBlockId",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixId",
    "Priority",
    "RequestId",
    "TokenId",
]
