"""kvpool: a paged KV-cache manager for transformer inference. The public names; start with `KVCacheManager`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpool.config import DType, GroupKind, KVCacheConfig, LayerGroup, LayerSpec, StatePart, StateSpec, Tier
from kvpool.core.cache import Admission, AllocStatus, Pin
from kvpool.core.handle import BlockTable, CSRTable, KVCacheHandle, SequenceBatch
from kvpool.core.kind import StatePlaces
from kvpool.core.orders import TenantQuota
from kvpool.core.prompt import Prompt
from kvpool.core.sessions import SessionInfo, SessionState
from kvpool.errors import KVPoolError, NeverFitsError, OutOfBlocksError
from kvpool.events import Subscription
from kvpool.eviction import EvictionPolicy, KeyedPolicy, register_policy
from kvpool.manager import KVCacheManager
from kvpool.manager.guard import Observer, PressureChange
from kvpool.manager.inspection import BlockState, CachedRun, KVCacheBlock
from kvpool.pools.pool import CopyKind, CopyOp, ResizeResult
from kvpool.scope import MultimodalItem, Retention, ReuseHint, ReuseScope, TokenRange
from kvpool.sequences.admit import PrefixMatch
from kvpool.sequences.publish import WouldRemove
from kvpool.stats import CacheStats, EvictionReason, GroupStats, HandleStats, MemoryPressure, MissCause, PoolStats
from kvpool.version import __version__, compiled

if TYPE_CHECKING:
    from kvpool.compat import create_kv_cache_manager
    from kvpool.config.model_config import config_from_hf, layers_from_hf

__all__ = [
    "__version__",
    "Admission",
    "AllocStatus",
    "BlockState",
    "BlockTable",
    "CSRTable",
    "CacheStats",
    "CachedRun",
    "CopyKind",
    "CopyOp",
    "DType",
    "EvictionPolicy",
    "EvictionReason",
    "GroupKind",
    "GroupStats",
    "HandleStats",
    "KVCacheBlock",
    "KVCacheConfig",
    "KVCacheHandle",
    "KVCacheManager",
    "KVPoolError",
    "KeyedPolicy",
    "LayerGroup",
    "LayerSpec",
    "MemoryPressure",
    "MissCause",
    "MultimodalItem",
    "NeverFitsError",
    "Observer",
    "OutOfBlocksError",
    "Pin",
    "PoolStats",
    "PrefixMatch",
    "PressureChange",
    "Prompt",
    "ResizeResult",
    "Retention",
    "ReuseHint",
    "ReuseScope",
    "SequenceBatch",
    "SessionInfo",
    "SessionState",
    "StatePart",
    "StatePlaces",
    "StateSpec",
    "Subscription",
    "TenantQuota",
    "Tier",
    "TokenRange",
    "WouldRemove",
    "compiled",
    "config_from_hf",
    "create_kv_cache_manager",
    "layers_from_hf",
    "register_policy",
]


_LATER = {  # what not every program needs is imported when it is asked for
    "config_from_hf": "kvpool.config.model_config",
    "create_kv_cache_manager": "kvpool.compat",
    "layers_from_hf": "kvpool.config.model_config",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
