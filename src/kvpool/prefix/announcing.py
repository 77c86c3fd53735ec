"""What the tree tells subscribers: runs that became reusable, left, or moved. Nothing is computed while nobody listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from kvpool.config import Tier
from kvpool.events import Stored
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.prefix.node import Node
from kvpool.prefix.tree import PrefixTree
from kvpool.stats import EvictionReason

StoredRun: TypeAlias = tuple[int, "bytes | None", list[bytes], Int32Array]  # group, parent digest, digests, tokens


class AnnouncedTree(PrefixTree):
    """The tree plus its events."""

    def announce(self, node: Node) -> None:
        """Tells subscribers about blocks of a node that were not announced yet."""
        if node.detached:
            return
        first = len(node.digests or ())
        self.digests(node)
        self._emit(node, self.stored_runs(node, first))

    def stored_events(self, as_of: int) -> list[Stored]:
        """One event for every run of consecutive blocks that is cached now, parents before children."""
        events: list[Stored] = []
        for root in self.roots.values():
            for node in root.subtree():
                if node is not root and not node.is_remainder:  # only whole blocks have a digest
                    self.digests(node)
                    events.extend(
                        Stored(as_of, parent, tuple(digests), tokens, self.block_size, root.scope, node.tier,
                               node.priority, group, node.session)
                        for group, parent, digests, tokens in self.stored_runs(node, 0)
                    )  # fmt: skip
        return events

    def stored_runs(self, node: Node, first: int) -> Iterator[StoredRun]:
        """(group, parent digest, digests, tokens) of consecutive blocks from `first` on; digests are known."""
        for group in range(self.num_cached_groups):
            if group in self.windowed:
                present = np.flatnonzero(node.ids[group][first : node.num_blocks] >= 0) + first
                yield from self._consecutive(node, group, present)
            elif first < node.num_blocks:
                yield self._stored_run(node, group, first, node.num_blocks)

    def _consecutive(self, node: Node, group: int, present: Int64Array) -> Iterator[StoredRun]:
        if len(present):
            for run in np.split(present, np.flatnonzero(np.diff(present) > 1) + 1):
                yield self._stored_run(node, group, int(run[0]), int(run[-1]) + 1)

    def _stored_run(self, node: Node, group: int, begin: int, end: int) -> StoredRun:
        size, digests = self.block_size, node.digests or []
        parent: bytes | None
        if begin:
            parent = digests[begin - 1]
        else:
            parent = None if node.parent is node.root else self.digests_end(node.parent)
        return group, parent, digests[begin:end], node.tokens[begin * size : end * size]

    def announce_blocks(self, node: Node, group: int, present: Int64Array) -> None:
        """Tells subscribers that these blocks of a node are in a group (again)."""
        self._emit(node, self._consecutive(node, group, present))

    def _emit(self, node: Node, runs: Iterable[StoredRun]) -> None:
        for group, parent, digests, tokens in runs:
            self.events.stored(
                parent,
                digests,
                tokens,
                block_size=self.block_size,
                scope=node.root.scope,
                tier=node.tier,
                priority=node.priority,
                group=group,
                session=node.session,
            )

    def present_digests(self, node: Node, group: int, first: int, last: int) -> list[bytes]:
        assert node.digests is not None
        known = node.digests[first:last]
        if group not in self.windowed:
            return known
        ids = node.ids[group][first : first + len(known)]
        return known if (ids >= 0).all() else [d for d, i in zip(known, ids.tolist(), strict=True) if i >= 0]

    def announce_removal(self, node: Node, first: int, last: int, reason: EvictionReason) -> None:
        for group in range(self.num_cached_groups):
            gone = self.present_digests(node, group, first, last)[::-1]
            self.events.removed(gone, tier=node.tier, group=group, reason=reason.value)

    def announce_move(self, node: Node, source: Tier, target: Tier) -> None:
        for group in range(self.num_cached_groups):
            moved = self.present_digests(node, group, 0, node.num_blocks)
            self.events.updated(moved, group=group, old_tier=source, new_tier=target)
