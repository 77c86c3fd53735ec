"""Seed spellings: the names that users of four earlier systems know, as thin wrappers around one `KVCacheManager`.

Each class only translates arguments and results; the manager behind it is its `manager` attribute, and both may be used
side by side. Where an earlier system was silent about a mistake, these raise the errors of `kvpool.errors`.
"""

from kvpool.compat.ferrum import CacheGcStats, FerrumKVCacheManager, FoundPrefix, PrefixCacheStats
from kvpool.compat.pyagent import PyAgentKVCacheManager, SeedKVCacheManager, create_kv_cache_manager
from kvpool.compat.trtllm import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager
from kvpool.compat.vllm_v0 import BlockManager

__all__ = [
    "BlockManager",
    "CacheGcStats",
    "FerrumKVCacheManager",
    "FoundPrefix",
    "KvCacheRetentionConfig",
    "PrefixCacheStats",
    "PyAgentKVCacheManager",
    "SeedKVCacheManager",
    "TokenRangeRetentionConfig",
    "TrtLlmKVCacheManager",
    "create_kv_cache_manager",
]
