"""Deadlines: times to live, priorities for some time, pins. What is due is done by the first operation after its time."""

from __future__ import annotations

from kvpool.core.cache import Cache, Pin
from kvpool.core.node import DEFAULT_PRIORITY, NEVER, Node
from kvpool.prefix.announcer import announce_priority
from kvpool.prefix.evict import drop_tail
from kvpool.prefix.pins import unpin
from kvpool.prefix.tree import watch
from kvpool.stats import EvictionReason


def expire(cache: Cache) -> int:
    """Drops idle leaves whose time to live is over, ends pins and priorities; returns positions dropped."""
    dropped = 0
    while (key := cache.calendar.due(cache.now)) is not None:
        if not isinstance(key, Pin):
            dropped += _time_is_up(cache, key)
        elif key.pin_id in cache.pins:
            unpin(cache, key)
    return dropped


def _time_is_up(cache: Cache, node: Node) -> int:
    """A deadline of a node has passed; returns the positions that left the tree."""
    now, dropped = cache.now, 0
    if node.priority_until <= now:
        set_priority(cache, node, DEFAULT_PRIORITY, NEVER)
    while node.expires_at <= now and node.is_candidate():
        dropped += node.num_blocks
        parent = node.parent
        drop_tail(cache, node, node.num_blocks, EvictionReason.EXPIRED)
        node = parent
    for when in (node.expires_at, node.priority_until):
        if now < when < NEVER and not node.detached:
            cache.calendar.schedule(node, when)
    return dropped


def set_priority(cache: Cache, node: Node, priority: int, until: float) -> None:
    """Changes the retention priority of a node, in the policy and for subscribers."""
    old = node.priority
    node.priority_until = until
    watch(cache, node)
    if priority == old:
        return
    policy = node.root.policies[node.tier]
    candidate = node.is_candidate()
    if candidate:
        policy.remove(node)
    node.priority = priority
    if candidate:
        policy.add(node)
    if cache.events.listening and node.digests:
        announce_priority(cache, node, old)
