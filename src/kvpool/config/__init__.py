"""What a model keeps and how memory is divided: layers and budgets in; groups, pools and sizing answers out."""

from kvpool.config.cache_config import KVCacheConfig
from kvpool.config.layers import (
    DType,
    GroupKind,
    LayerGroup,
    LayerSpec,
    PoolSpec,
    StatePart,
    StateSpec,
    Tier,
    TokenPart,
)

__all__ = [
    "DType",
    "GroupKind",
    "KVCacheConfig",
    "LayerGroup",
    "LayerSpec",
    "PoolSpec",
    "StatePart",
    "StateSpec",
    "Tier",
    "TokenPart",
]
