"""Policies that are one sort key: least recently used, least frequently used, first in first out, priority."""

from __future__ import annotations

from typing import ClassVar

from kvpool.compiling import mypyc_attr
from kvpool.eviction.policy import KeyedPolicy
from kvpool.eviction.run import Run


@mypyc_attr(allow_interpreted_subclasses=True)
class LRUPolicy(KeyedPolicy):
    """The run that was not used for the longest time goes first: what everybody ships."""

    name: ClassVar[str] = "lru"

    def key(self, run: Run) -> int:
        return run.last_access


@mypyc_attr(allow_interpreted_subclasses=True)
class LFUPolicy(KeyedPolicy):
    """The run that the fewest requests reused goes first; of equals the least recently used."""

    name: ClassVar[str] = "lfu"

    def key(self, run: Run) -> tuple[int, int]:
        return run.hits, run.last_access


@mypyc_attr(allow_interpreted_subclasses=True)
class FIFOPolicy(KeyedPolicy):
    """The run that was inserted first goes first, however often it was used since."""

    name: ClassVar[str] = "fifo"

    def key(self, run: Run) -> int:
        return run.created


@mypyc_attr(allow_interpreted_subclasses=True)
class PriorityPolicy(KeyedPolicy):
    """The run with the lowest retention priority goes first; of equals the least recently used."""

    name: ClassVar[str] = "priority"
    by_priority: ClassVar[bool] = True

    def key(self, run: Run) -> tuple[int, int]:
        return run.priority, run.last_access
