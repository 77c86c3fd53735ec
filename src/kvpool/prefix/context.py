"""What the parts of the prefix cache share: pools, live rows, layer groups, the event log, and the moment of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.config import LayerGroup, Tier
from kvpool.events import EventLog
from kvpool.pools.arrays import Int32Array
from kvpool.pools.copies import CopyOp
from kvpool.pools.groups import is_cross, is_windowed
from kvpool.pools.pool import GPU, BlockPool
from kvpool.pools.rows import SequenceRows
from kvpool.prefix.node import Node
from kvpool.stats import Counters


class CacheContext:
    """Built once and given to every part, so that each part can be made, and tested, without the others.

    Whoever begins an operation moves `tick` on and reads the clock into `now`, which then stand still until its end.
    """

    __slots__ = (
        "block_size",
        "clock",
        "copies",
        "counters",
        "events",
        "full",
        "full_per_pool",
        "groups",
        "now",
        "num_cached_groups",
        "num_tiers",
        "pools",
        "rows",
        "tick",
        "windowed",
    )

    def __init__(
        self,
        block_size: int,
        groups: tuple[LayerGroup, ...],
        pools: list[list[BlockPool]],
        rows: SequenceRows[Node, Any],
        counters: Counters,
        events: EventLog,
        copies: list[CopyOp],
        clock: Callable[[], float],
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self.pools = pools
        self.rows = rows
        self.counters = counters
        self.events = events
        self.copies = copies
        self.clock = clock
        self.now = clock()
        self.tick = 0
        self.num_tiers = max(len(tiers) for tiers in pools)
        # Groups whose blocks are published, those of them with a window, and blocks of full groups per pool and position.
        self.num_cached_groups = sum(not is_cross(group) for group in groups)
        self.windowed = [g.index for g in groups if is_windowed(g)]
        self.full = [g.index for g in groups if not is_windowed(g) and not is_cross(g)]
        self.full_per_pool = [
            (index, sum(groups[g].pool == index for g in self.full))
            for index in range(len(pools))
            if any(groups[g].pool == index for g in self.full)
        ]

    def pool(self, group: int, tier: Tier) -> BlockPool:
        """The pool that holds a group's blocks on a tier."""
        return self.pools[self.groups[group].pool][tier]

    def sync(self, node: Node) -> None:
        """Brings an open node up to date with the row that still writes it."""
        row = node.open_row
        if row >= 0:
            rows = self.rows
            end = int(rows.committed[row]) // self.block_size
            node.num_blocks = end - node.start
            node.tokens = rows.ids_between(row, node.start * self.block_size, end * self.block_size)
            node.ids = [rows.tables[g][row, node.start : end] for g in range(self.num_cached_groups)]

    def give_back(self, group: int, ids: Int32Array, shared: bool) -> None:
        """Private GPU blocks of a full group lose an owner; `shared` says whether forks may hold them too."""
        pool = self.pool(group, GPU)
        if shared:
            pool.unshare(ids)
        else:
            pool.give(ids)

    def num_present(self, node: Node, first: int) -> int:
        """Blocks of all groups in a run from position `first` on."""
        count = (node.num_blocks - first) * len(self.full)
        for group in self.windowed:
            count += int((node.ids[group][first:] >= 0).sum())
        return count
