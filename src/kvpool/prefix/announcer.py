"""What subscribers are told: runs that became reusable, left, or moved. Nothing is computed while nobody listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.kind import Group
from kvpool.core.node import Node, Root, run_content
from kvpool.events import Stored
from kvpool.pools.arrays import Int64Array
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.stats import EvictionReason

StoredRun: TypeAlias = dict[str, Any]  # the fields of a `Stored`, but for its number


# --- digests ---------------------------------------------------------------------------------------------------------


def complete_digests(cache: Cache, node: Node) -> None:
    """Computes the chained digests of a node's blocks that it has not yet: once, and only when somebody listens."""
    size = cache.block_size
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
            root = part.root
            if root.digest is None:
                root.digest = root_digest(root.scope)
            parent = root.digest
        else:
            parent = _last_digest(part.parent)
        tokens, items = run_content(cache.rows.symbols, part, len(known) * size, part.num_blocks * size)
        known.extend(chain_digests(parent, tokens, _tokens_in_block(cache, part), items))
        part.digests = known


def _tokens_in_block(cache: Cache, node: Node) -> int:
    """How many tokens a block of a node has: a remainder is shorter."""
    return len(node.tokens) if node.is_remainder else cache.block_size


def _present_digests(cache: Cache, node: Node, group: Group, first: int, last: int) -> list[bytes]:
    assert node.digests is not None
    known = node.digests[first:last]
    if not group.by_block:
        return known
    ids = node.ids[group.index][first : first + len(known)]
    return known if (ids >= 0).all() else [d for d, i in zip(known, ids.tolist(), strict=True) if i >= 0]


# --- stored ----------------------------------------------------------------------------------------------------------


def announce_stored(cache: Cache, node: Node) -> None:
    """Tells of blocks of a node that were not announced yet."""
    if node.detached:
        return
    first = len(node.digests or ())
    complete_digests(cache, node)
    for run in _stored_runs(cache, node, first):
        cache.events.stored(**run)


def announce_blocks(cache: Cache, node: Node, group: Group, present: Int64Array) -> None:
    """Tells that these blocks of a node are in a group (again)."""
    for run in _consecutive(cache, node, group.index, present):
        cache.events.stored(**run)


def stored_now(cache: Cache, roots: Iterable[Root], as_of: int) -> list[Stored]:
    """One event for every run of consecutive blocks that is cached now, parents before children."""
    events: list[Stored] = []
    for root in roots:
        for node in root.subtree():
            if node is not root and (not node.is_remainder or cache.events.tells_unfilled):
                complete_digests(cache, node)
                runs = _stored_runs(cache, node, 0)
                events.extend(Stored(as_of, **{**run, "digests": tuple(run["digests"])}) for run in runs)
    return events


def _stored_runs(cache: Cache, node: Node, first: int) -> Iterator[StoredRun]:
    """Consecutive blocks from `first` on; digests are known."""
    for group in cache.growing:
        if group.by_block:
            present = np.flatnonzero(node.ids[group.index][first : node.num_blocks] >= 0) + first
            yield from _consecutive(cache, node, group.index, present)
        elif first < node.num_blocks:
            yield _stored_run(cache, node, group.index, first, node.num_blocks)


def _consecutive(cache: Cache, node: Node, group: int, present: Int64Array) -> Iterator[StoredRun]:
    if len(present):
        for run in np.split(present, np.flatnonzero(np.diff(present) > 1) + 1):
            yield _stored_run(cache, node, group, int(run[0]), int(run[-1]) + 1)


def _stored_run(cache: Cache, node: Node, group: int, begin: int, end: int) -> StoredRun:
    size, digests = cache.block_size, node.digests or []
    parent: bytes | None
    if begin:
        parent = digests[begin - 1]
    else:
        parent = None if node.parent is node.root else _last_digest(node.parent)
    tokens, items = run_content(cache.rows.symbols, node, begin * size, end * size)
    return {
        "parent": parent,
        "digests": digests[begin:end],
        "tokens": tokens,
        "block_size": _tokens_in_block(cache, node),
        "scope": node.root.scope,
        "tier": node.tier,
        "priority": node.priority,
        "group": group,
        "session": node.session,
        "multimodal": items,
    }


# --- removed and changed ---------------------------------------------------------------------------------------------


def announce_removed(cache: Cache, node: Node, first: int, last: int, reason: EvictionReason) -> None:
    """Tells that blocks `first..last` of a run leave the index."""
    for group in cache.growing:
        gone = _present_digests(cache, node, group, first, last)[::-1]
        cache.events.removed(gone, tier=node.tier, group=group.index, reason=reason.value)


def announce_removed_block(cache: Cache, node: Node, group: Group, index: int, reason: EvictionReason) -> None:
    """Tells that one block of a group read block by block leaves; the rest of its run stays."""
    assert node.digests is not None
    cache.events.removed(node.digests[index : index + 1], tier=node.tier, group=group.index, reason=reason.value)


def announce_moved(cache: Cache, node: Node, source: Tier, target: Tier) -> None:
    """Tells that a run changes its tier."""
    for group in cache.growing:
        digests = _present_digests(cache, node, group, 0, node.num_blocks)
        cache.events.updated(digests, group=group.index, old_tier=source, new_tier=target)


def announce_priority(cache: Cache, node: Node, old: int) -> None:
    """Tells that a run has another retention priority than `old` now."""
    for group in cache.growing:
        digests = _present_digests(cache, node, group, 0, node.num_blocks)
        cache.events.updated(digests, group=group.index, old_priority=old, new_priority=node.priority)


def _last_digest(node: Node) -> bytes:
    """The digest of a node's last block, already computed."""
    assert node.digests
    return node.digests[node.num_blocks - 1]
