"""What subscribers are told: runs that became reusable, left, or moved. Nothing is computed while nobody listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from kvpool.config import Tier
from kvpool.events import Stored
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.pools.groups import Group
from kvpool.prefix.context import CacheContext
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.prefix.node import Node, Root, run_content
from kvpool.scope import MultimodalItem
from kvpool.stats import EvictionReason

# group, parent digest, digests, tokens, multimodal items
StoredRun: TypeAlias = tuple[int, "bytes | None", list[bytes], Int32Array, tuple[MultimodalItem, ...]]


class Announcer:
    """Writes to the event log what happens to runs. Whoever calls it has asked `events.listening` first."""

    def __init__(self, context: CacheContext) -> None:
        self.context = context
        self.events = context.events
        self.groups = context.cached

    # --- digests -----------------------------------------------------------------------------------------------------

    def complete_digests(self, node: Node) -> None:
        """Computes the chained digests of a node's blocks that it has not yet: once, and only when somebody listens."""
        self.context.sync(node)
        size = self.context.block_size
        missing: list[Node] = []
        at = node
        while at is not at.root and len(at.digests or ()) < at.num_blocks:
            missing.append(at)
            at = at.parent
        for part in reversed(missing):
            known = part.digests if part.digests is not None else []
            if known:
                parent = known[-1]
            elif part.parent is part.root:
                parent = _scope_digest(part.root)
            else:
                parent = _last_digest(part.parent)
            tokens, items = run_content(self.context.rows.symbols, part, len(known) * size, part.num_blocks * size)
            known.extend(chain_digests(parent, tokens, self._block_size(part), items))
            part.digests = known

    def _block_size(self, node: Node) -> int:
        """How many tokens a block of a node has: a remainder is shorter."""
        return len(node.tokens) if node.is_remainder else self.context.block_size

    def _present_digests(self, node: Node, group: Group, first: int, last: int) -> list[bytes]:
        assert node.digests is not None
        known = node.digests[first:last]
        if not group.slides:
            return known
        ids = node.ids[group.index][first : first + len(known)]
        return known if (ids >= 0).all() else [d for d, i in zip(known, ids.tolist(), strict=True) if i >= 0]

    # --- stored ------------------------------------------------------------------------------------------------------

    def stored(self, node: Node) -> None:
        """Tells of blocks of a node that were not announced yet."""
        if node.detached:
            return
        first = len(node.digests or ())
        self.complete_digests(node)
        self._emit(node, self._stored_runs(node, first))

    def stored_blocks(self, node: Node, group: Group, present: Int64Array) -> None:
        """Tells that these blocks of a node are in a group (again)."""
        self._emit(node, self._consecutive(node, group.index, present))

    def snapshot(self, roots: Iterable[Root], as_of: int) -> list[Stored]:
        """One event for every run of consecutive blocks that is cached now, parents before children."""
        events: list[Stored] = []
        for root in roots:
            for node in root.subtree():
                if node is not root and (not node.is_remainder or self.events.tells_unfilled):
                    self.complete_digests(node)
                    events.extend(
                        Stored(
                            as_of,
                            parent,
                            tuple(digests),
                            tokens,
                            self._block_size(node),
                            root.scope,
                            node.tier,
                            node.priority,
                            group,
                            node.session,
                            items,
                        )
                        for group, parent, digests, tokens, items in self._stored_runs(node, 0)
                    )
        return events

    def _stored_runs(self, node: Node, first: int) -> Iterator[StoredRun]:
        """(group, parent digest, digests, tokens, items) of consecutive blocks from `first` on; digests are known."""
        for group in self.groups:
            if group.slides:
                present = np.flatnonzero(node.ids[group.index][first : node.num_blocks] >= 0) + first
                yield from self._consecutive(node, group.index, present)
            elif first < node.num_blocks:
                yield self._stored_run(node, group.index, first, node.num_blocks)

    def _consecutive(self, node: Node, group: int, present: Int64Array) -> Iterator[StoredRun]:
        if len(present):
            for run in np.split(present, np.flatnonzero(np.diff(present) > 1) + 1):
                yield self._stored_run(node, group, int(run[0]), int(run[-1]) + 1)

    def _stored_run(self, node: Node, group: int, begin: int, end: int) -> StoredRun:
        size, digests = self.context.block_size, node.digests or []
        parent: bytes | None
        if begin:
            parent = digests[begin - 1]
        else:
            parent = None if node.parent is node.root else _last_digest(node.parent)
        tokens, items = run_content(self.context.rows.symbols, node, begin * size, end * size)
        return group, parent, digests[begin:end], tokens, items

    def _emit(self, node: Node, runs: Iterable[StoredRun]) -> None:
        for group, parent, digests, tokens, items in runs:
            self.events.stored(
                parent,
                digests,
                tokens,
                block_size=self._block_size(node),
                scope=node.root.scope,
                tier=node.tier,
                priority=node.priority,
                group=group,
                session=node.session,
                multimodal=items,
            )

    # --- removed and changed -----------------------------------------------------------------------------------------

    def removed(self, node: Node, first: int, last: int, reason: EvictionReason) -> None:
        """Tells that blocks `first..last` of a run leave the index."""
        for group in self.groups:
            gone = self._present_digests(node, group, first, last)[::-1]
            self.events.removed(gone, tier=node.tier, group=group.index, reason=reason.value)

    def removed_block(self, node: Node, group: Group, index: int, reason: EvictionReason) -> None:
        """Tells that one block of a windowed group leaves; the rest of its run stays."""
        assert node.digests is not None
        self.events.removed(node.digests[index : index + 1], tier=node.tier, group=group.index, reason=reason.value)

    def moved(self, node: Node, source: Tier, target: Tier) -> None:
        """Tells that a run changes its tier."""
        for group in self.groups:
            digests = self._present_digests(node, group, 0, node.num_blocks)
            self.events.updated(digests, group=group.index, old_tier=source, new_tier=target)

    def priority_changed(self, node: Node, old: int) -> None:
        """Tells that a run has another retention priority than `old` now."""
        for group in self.groups:
            digests = self._present_digests(node, group, 0, node.num_blocks)
            self.events.updated(digests, group=group.index, old_priority=old, new_priority=node.priority)


def _scope_digest(root: Root) -> bytes:
    """What the digests of a scope begin with, computed once."""
    if root.digest is None:
        root.digest = root_digest(root.scope)
    return root.digest


def _last_digest(node: Node) -> bytes:
    """The digest of a node's last block, already computed."""
    assert node.digests
    return node.digests[node.num_blocks - 1]
