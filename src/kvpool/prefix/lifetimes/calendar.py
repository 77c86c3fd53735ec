"""Deadlines: times to live, priorities and pins that end. Kept in a heap with one entry for each thing that has one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Any

from kvpool.prefix.tree.node import NEVER


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
