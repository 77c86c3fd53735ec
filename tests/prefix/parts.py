"""A small cache without a manager, and runs put into its tree by hand."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvpool import KVCacheConfig, LayerSpec
from kvpool.core.cache import Cache, make_pools
from kvpool.core.handle import KVCacheHandle
from kvpool.core.node import Node
from kvpool.events import EventLog
from kvpool.eviction import LRUPolicy
from kvpool.kinds import make_groups
from kvpool.prefix.tree import new_child
from managers import FULL, Clock

WINDOWED = LayerSpec(kv_heads=1, head_dim=8, window=4)
SIZE = 2  # tokens in a block


def make_cache(*layers: LayerSpec, gpu_blocks: int = 16, **options: Any) -> Cache:
    """Blocks of two tokens; one full-attention layer unless `layers` say otherwise."""
    config = KVCacheConfig(list(layers) or [FULL], block_size=SIZE, gpu_blocks=gpu_blocks, **options)
    pools = make_pools(config)
    groups = make_groups(config.groups, SIZE, pools)
    return Cache(config, pools, groups, LRUPolicy, Clock(), EventLog(64), threading.RLock())


def tokens_of(*tokens: int) -> np.ndarray[Any, Any]:
    return np.array(tokens, np.int32)


def add_run(cache: Cache, parent: Node, *tokens: int, session: str | None = None) -> Node:
    """An idle run of new GPU blocks below `parent`, in the books of nobody but the tree."""
    ids = tokens_of(*tokens)
    handle = KVCacheHandle(cache.rows, "a", parent.root.scope)
    handle.session = session
    node = new_child(cache, parent, ids[:SIZE].tobytes(), handle)
    node.num_blocks, node.tokens = len(ids) // SIZE, ids
    node.ids = tuple(group.gpu.take(node.num_blocks) for group in cache.growing)
    return node
