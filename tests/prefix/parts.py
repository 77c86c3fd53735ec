"""The parts of the prefix cache without a manager: a small context, and runs put into a tree by hand."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvpool import KVCacheConfig, LayerSpec
from kvpool.events import EventLog
from kvpool.eviction import LRUPolicy
from kvpool.pools.groups import make_groups
from kvpool.pools.rows import SequenceRows
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import Node, Root
from kvpool.prefix.tree import RunTree
from kvpool.scope import ReuseScope
from kvpool.stats import Counters
from managers import FULL, Clock, pools_of

WINDOWED = LayerSpec(kv_heads=1, head_dim=8, window=4)
SIZE = 2  # tokens in a block


def make_context(*layers: LayerSpec, gpu_blocks: int = 16, **options: Any) -> CacheContext:
    """Blocks of two tokens; one full-attention layer unless `layers` say otherwise."""
    config = KVCacheConfig(list(layers) or [FULL], block_size=SIZE, gpu_blocks=gpu_blocks, **options)
    pools = pools_of(config)
    groups = make_groups(config.groups, SIZE, pools)
    rows: SequenceRows[Node, Any] = SequenceRows(groups, SIZE, threading.RLock())
    return CacheContext(SIZE, groups, pools, rows, Counters(), EventLog(64), [], Clock())


def make_root(scope: ReuseScope | None = None) -> Root:
    return Root(scope or ReuseScope(), [LRUPolicy() for _ in range(3)], None)


def make_tree(context: CacheContext) -> RunTree:
    return RunTree(context, make_root, lambda upper: None)


def tokens_of(*tokens: int) -> np.ndarray[Any, Any]:
    return np.array(tokens, np.int32)


def add_run(context: CacheContext, tree: RunTree, parent: Node, *tokens: int, session: str | None = None) -> Node:
    """An idle run of new GPU blocks below `parent`, in the books of nobody but the tree."""
    ids = tokens_of(*tokens)
    node = tree.new_child(parent, ids[:SIZE].tobytes(), 1, None, session)
    node.num_blocks, node.tokens = len(ids) // SIZE, ids
    node.ids = tuple(group.gpu.take(node.num_blocks) for group in context.cached)
    tree.add(node)
    return node
