"""What the parts of the prefix cache share: pools, live rows, layer groups, the event log, and the moment of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.counters import Counters
from kvpool.events import EventLog
from kvpool.pools.copies import CopyOp
from kvpool.pools.groups import Group
from kvpool.pools.pool import BlockPool
from kvpool.pools.rows import SequenceRows
from kvpool.prefix.node import Node
from kvpool.prefix.shadows import Shadows


class CacheContext:
    """Built once and given to every part, so that each part can be made, and tested, without the others.

    Whoever begins an operation moves `tick` on and reads the clock into `now`, which then stand still until its end.
    `version` grows before something may change, and again at the end of an operation in which it grew (see `Guard`): what was
    found in the cache holds while it stays the same.
    """

    __slots__ = (
        "block_size",
        "cached",
        "clock",
        "copies",
        "counters",
        "events",
        "full",
        "full_per_pool",
        "groups",
        "now",
        "num_tiers",
        "pools",
        "rows",
        "shadows",
        "tick",
        "version",
        "windowed",
    )

    def __init__(
        self,
        block_size: int,
        groups: tuple[Group, ...],
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
        self.version = 0
        self.num_tiers = max(len(tiers) for tiers in pools)
        # Groups whose blocks are published: those read along paths, those read block by block.
        self.cached = [group for group in groups if group.grows]
        self.full = [group for group in self.cached if not group.slides]
        self.windowed = [group for group in self.cached if group.slides]
        self.shadows = Shadows(self.cached, len(pools))
        # (pool, blocks of full groups for one position)
        counts = [(index, sum(group.pool == index for group in self.full)) for index in range(len(pools))]
        self.full_per_pool = [(index, count) for index, count in counts if count]

    def sync(self, node: Node) -> None:
        """Brings an open node up to date with the row that still writes it."""
        row = node.open_row
        if row >= 0:
            rows = self.rows
            end = int(rows.committed[row]) // self.block_size
            node.num_blocks = end - node.start
            node.tokens = rows.ids_between(row, node.start * self.block_size, end * self.block_size)
            node.ids = [rows.tables[group.index][row, node.start : end] for group in self.cached]

    def num_present(self, node: Node, first: int) -> int:
        """Blocks of all groups in a run from position `first` on."""
        count = (node.num_blocks - first) * len(self.full)
        for group in self.windowed:
            count += int((node.ids[group.index][first:] >= 0).sum())
        return count
