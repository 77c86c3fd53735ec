"""Runs in time: when their time to live or their priority ends, and what happens then."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from kvpool.prefix.announcer import Announcer
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import DEFAULT_PRIORITY, NEVER, Node


class Calendar:
    """Runs actions when their time has come.

    An action is run once, at the earliest time asked for since it last ran; it schedules itself again if it finds that it
    came too early. `next` is when the first one is due: whoever starts an operation compares it with the clock.

    >>> calendar, done = Calendar(), []
    >>> calendar.schedule("tea", 5.0, lambda: done.append("tea") or 1)
    >>> calendar.run_due(4.0), calendar.run_due(5.0), done
    (0, 1, ['tea'])
    """

    __slots__ = ("actions", "_heap", "_serial", "next")

    def __init__(self) -> None:
        self.next = NEVER
        self.actions: dict[Hashable, tuple[float, Callable[[], int]]] = {}
        self._heap: list[tuple[float, int, Any]] = []
        self._serial = 0  # entries of one time run in the order in which they were made

    def __len__(self) -> int:
        return len(self.actions)

    def schedule(self, key: Hashable, when: float, action: Callable[[], int]) -> None:
        """Runs `action` at `when`, unless something earlier is planned for `key` already."""
        planned = self.actions.get(key)
        if planned is not None and planned[0] <= when:
            return
        self.actions[key] = (when, action)
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, key))
        if len(self._heap) > 2 * len(self.actions) + 64:
            self._rebuild()
        self.next = self._heap[0][0]

    def forget(self, key: Hashable) -> None:
        """Plans nothing more for `key`."""
        self.actions.pop(key, None)

    def run_due(self, now: float) -> int:
        """Runs everything that is due and returns the sum of what the actions return."""
        total = 0
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            planned = self.actions.get(key)
            if planned is not None and planned[0] == when:
                del self.actions[key]
                total += planned[1]()
        self.next = self._heap[0][0] if self._heap else NEVER
        return total

    def _rebuild(self) -> None:
        """Drops entries that were forgotten or replaced by earlier ones."""
        live = {(when, key) for key, (when, _) in self.actions.items()}
        self._heap = [entry for entry in self._heap if (entry[0], entry[2]) in live]
        heapq.heapify(self._heap)


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
