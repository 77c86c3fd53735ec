"""Runs in time: when their time to live or their priority ends, and what happens then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvpool.prefix.announcing.announcer import Announcer
from kvpool.prefix.lifetimes.calendar import Calendar
from kvpool.prefix.tree.context import CacheContext
from kvpool.prefix.tree.node import DEFAULT_PRIORITY, NEVER, Node


class Expiry:
    """Deadlines of runs. `drop` takes an idle leaf whose time is over out of the index."""

    def __init__(self, context: CacheContext, announcer: Announcer, drop: Callable[[Node], None]) -> None:
        self.context = context
        self.announcer = announcer
        self.events = context.events
        self.drop = drop
        self.calendar = Calendar()

    def run(self) -> int:
        """Drops idle leaves whose time to live is over, ends pins and priorities; returns positions dropped."""
        return self.calendar.run_due(self.context.now)

    def watch(self, node: Node) -> None:
        """Notes when a node's time to live or priority ends, if it does."""
        if node.expires_at != NEVER:
            self.calendar.schedule(node, node.expires_at, partial(self._time_is_up, node))
        if node.priority_until != NEVER:
            self.calendar.schedule(node, node.priority_until, partial(self._time_is_up, node))

    def forget(self, node: Node) -> None:
        """Watches a node no more: it left the tree."""
        if self.calendar.actions:
            self.calendar.forget(node)

    def _time_is_up(self, node: Node) -> int:
        """A deadline of a node has passed; returns the positions that left the tree."""
        now, dropped = self.context.now, 0
        if node.priority_until <= now:
            self.set_priority(node, DEFAULT_PRIORITY, NEVER)
        while node.expires_at <= now and node.is_candidate():
            dropped += node.num_blocks
            parent = node.parent
            self.drop(node)
            node = parent
        for when in (node.expires_at, node.priority_until):
            if now < when < NEVER and not node.detached:
                self.calendar.schedule(node, when, partial(self._time_is_up, node))
        return dropped

    def set_priority(self, node: Node, priority: int, until: float) -> None:
        """Changes the retention priority of a node, in the policy and for subscribers."""
        old = node.priority
        node.priority_until = until
        self.watch(node)
        if priority == old:
            return
        policy = node.root.policies[node.tier]
        candidate = node.is_candidate()
        if candidate:
            policy.remove(node)
        node.priority = priority
        if candidate:
            policy.add(node)
        if self.events.listening and node.digests:
            self.announcer.priority_changed(node, old)
