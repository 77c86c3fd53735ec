"""Cached blocks leave the index: tails of idle runs, whole subtrees, and what live sequences still read."""

from __future__ import annotations

from kvpool.core.cache import Cache
from kvpool.core.node import Node
from kvpool.prefix.announcer import announce_removed
from kvpool.prefix.blocks import free_blocks
from kvpool.prefix.idle import count_positions
from kvpool.prefix.readers import offer
from kvpool.prefix.tree import remove_node, trim_logits
from kvpool.stats import EvictionReason

# --- leaving the index -----------------------------------------------------------------------------------------------


def drop_tail(
    cache: Cache, node: Node, num_blocks: int, reason: EvictionReason, evicted: bool = False, goes_on: bool = False
) -> None:
    """Removes the last `num_blocks` of an idle leaf from the index and frees them; lower-tier children go with it.

    If it `goes_on`, more of the run leaves its tier at once: the policy is told then, of all of it.
    """
    if node.children is not None:
        for child in list(node.children.values()):
            drop_subtree(cache, child, reason)
    policy = node.root.policies[node.tier]
    keep = node.num_blocks - num_blocks
    if node.host_copy is not None:
        cache.host_copies.trim(node, keep)
    if not keep and (evicted or node.is_candidate()):
        if evicted:
            policy.evicted(node)
        policy.remove(node)
    counters = cache.counters
    counters.evictions[reason._value_] += cache.num_present(node, keep)
    counters.lifetime.add(cache.now - node.created_at, num_blocks)
    counters.idle_before_eviction.add(cache.now - node.last_access_at, num_blocks)
    if node.digests and cache.events.listening:
        announce_removed(cache, node, keep, node.num_blocks, reason)
    for group in cache.full:
        group.tiers[node.tier].give(node.ids[group.index], keep)
    count_positions(cache, node, -num_blocks)
    for group in cache.by_block:
        free_blocks(cache, node, group, node.ids[group.index][keep:])
    node.num_blocks = keep
    if not keep:
        _unlink(cache, node)
        return
    rest = 2 * keep < keep + num_blocks  # a short rest must not keep the memory of a long run
    node.ids = tuple([ids[:keep].copy() if rest else ids[:keep] for ids in node.ids])
    tokens = node.tokens[: keep * cache.block_size]
    node.tokens = tokens.copy() if rest else tokens
    node.lose_end()
    if node.digests is not None:
        del node.digests[keep:]
    trim_logits(node, cache.block_size)
    if not goes_on:
        policy.trimmed(node)


def _unlink(cache: Cache, node: Node) -> None:
    """Takes a leaf out of the tree; its parent may become a leaf."""
    cache.calendar.forget(node)
    remove_node(cache, node)
    parent = node.parent
    if parent is not parent.root and parent.tier == node.tier:
        offer(cache, parent)


def drop_subtree(cache: Cache, node: Node, reason: EvictionReason) -> None:
    """Drops an idle node with everything below it, deepest first."""
    for part in reversed(list(node.subtree())):
        drop_tail(cache, part, part.num_blocks, reason)


def drop_covered(cache: Cache, parent: Node, key: bytes) -> None:
    """Drops the remainders below `parent` that hold nothing but a beginning of the block `key`, which is cached now."""
    for length in range(4, len(key), 4):
        covered = parent.children.get(key[:length]) if parent.children is not None else None
        if covered is not None and covered.is_candidate():
            drop_tail(cache, covered, 1, EvictionReason.CONTINUED)


def take_over(cache: Cache, node: Node) -> list[int]:
    """The last block of an idle leaf on the GPU leaves the index and is a request's own; returns its id per group."""
    ids = [int(of_group[-1]) for of_group in node.ids]
    drop_tail(cache, node, 1, EvictionReason.CONTINUED)
    for group, block in zip(cache.growing, ids, strict=True):
        group.gpu.take(1)  # all of them lie on top of the free stack, in some order
        group.gpu.refs[block] = group.single_owner
    return ids


def detach(cache: Cache, node: Node, reason: EvictionReason) -> int:
    """Takes a subtree out of the index, also under live sequences: they keep their blocks and publish nothing more.

    Idle nodes are dropped; nodes that are read become detached and free their blocks with their last reader. The
    caller ended the pins on them. Returns how many blocks (positions) left the index.
    """
    removed = 0
    parts = list(node.subtree())
    for part in reversed(parts):
        removed += part.num_blocks
        if not part.active:
            if part.num_blocks:
                drop_tail(cache, part, part.num_blocks, reason)
            continue
        if cache.events.listening and part.digests:
            announce_removed(cache, part, 0, part.num_blocks, reason)
        cache.counters.evictions[reason.value] += cache.num_present(part, 0)
        part.digests = part.logits = None
        cache.host_copies.drop(part)
    for part in parts:
        if part.active and not part.detached:
            _unlink(cache, part)
    return removed
