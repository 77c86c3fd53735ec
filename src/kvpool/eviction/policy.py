"""What the prefix cache asks of an eviction policy, and the policies that rank runs by one key.

The cache is a tree of token runs. Only leaves that no request references and nobody pinned are *candidates*; the tree
says when a run becomes one (`add`) and stops being one (`remove`), and asks for the next `victim`. A policy orders
candidates and decides nothing else, so it can never evict a run that is in use or a parent before its children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from kvpool.compiling import mypyc_attr
from kvpool.errors import ConfigError
from kvpool.eviction.run import Item, Key, Run, RunQueue

MOMENTS_PER_SECOND: Final = 2**20


def moment_of(seconds: float) -> int:
    """A time as policies compute with it. Recordings write times on this grid, so that a replay decides the same again."""
    return int(seconds * MOMENTS_PER_SECOND + 0.5)


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy(ABC):
    """Orders the candidates. One instance serves one cache, and a run is a candidate of one policy at a time.

    `add` and `remove` are idempotent. A run comes and goes many times in its life (reused and released, pinned and
    unpinned, trimmed), so an order that must survive this is derived from the run's own attributes or kept in
    `run.entry`, never from the moment of `add`.
    """

    name: ClassVar[str] = ""
    by_priority: ClassVar[bool] = False  # a run of a lower retention priority always goes before one of a higher

    weighs: ClassVar[bool] = False  # whether it can value blocks by what computing them costs: `weigh`

    def weigh(self, depth_cost: float) -> None:
        """From now on what counts is the time that blocks save, not their number; called before anything is added.

        A block behind n others takes 1 + n * `depth_cost` times as long to compute as a first one.
        """
        raise ConfigError(f"policy {self.name!r} does not know what blocks cost; take 'adaptive' or 'cost'")

    @abstractmethod
    def add(self, run: Run) -> None:
        """`run` may be evicted from now on: it is a leaf, unreferenced and unpinned."""

    @abstractmethod
    def remove(self, run: Run) -> None:
        """`run` may not be evicted any more: it was reused, pinned, extended by a child, invalidated or evicted."""

    @abstractmethod
    def victim(self) -> Run:
        """The candidate whose tail goes next; it stays a candidate. Raises `LookupError` when there is none.

        Whatever a policy raises is logged once the manager's lock is given back. The runs that it failed for leave in the
        order of their last use.
        """

    def trimmed(self, run: Run) -> None:
        """`run`, a candidate, has lost blocks at its end, and remains one. Most policies rank it anew."""
        self.remove(run)
        self.add(run)

    def evicted(self, run: Run) -> None:  # noqa: B027 - most policies remember nothing of what has left
        """`run` has left the cache by eviction (not by invalidation); `remove(run)` follows."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every candidate and everything learned about runs that left."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of candidates."""

    @abstractmethod
    def __contains__(self, run: object) -> bool:
        """Whether `run` is a candidate."""


@mypyc_attr(allow_interpreted_subclasses=True)
class KeyedPolicy(EvictionPolicy):
    """Evicts the candidate with the smallest `key`; of equal keys the deepest run, then the oldest.

    Everything a policy of one's own needs::

        @register_policy("biggest-first")
        class BiggestFirst(KeyedPolicy):
            def key(self, run: Run) -> int:
                return -run.num_blocks
    """

    def __init__(self) -> None:
        self._queue = RunQueue()

    @abstractmethod
    def key(self, run: Run) -> Key:
        """The rank of `run`, computed when it becomes a candidate. All keys of one policy must be comparable."""

    def add(self, run: Run) -> None:
        key = self.key(run)  # first: when a user's key() raises, nothing has changed
        if run.entry is not None:
            self._queue.discard(run.entry)
        run.entry = self._queue.push(key, run)

    def remove(self, run: Run) -> None:
        if run.entry is not None:
            self._queue.discard(run.entry)
            run.entry = None

    def victim(self) -> Run:
        return self._queue.head()

    def clear(self) -> None:
        for run in self._queue.clear():
            run.entry = None

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, run: object) -> bool:
        item = getattr(run, "entry", None)
        return isinstance(item, Item) and item.run is run


@mypyc_attr(allow_interpreted_subclasses=True)
class LRUPolicy(KeyedPolicy):
    """The run that was not used for the longest time goes first: what everybody ships."""

    name: ClassVar[str] = "lru"

    def key(self, run: Run) -> int:
        return run.last_access


@mypyc_attr(allow_interpreted_subclasses=True)
class PriorityPolicy(KeyedPolicy):
    """The run with the lowest retention priority goes first; of equals the least recently used."""

    name: ClassVar[str] = "priority"
    by_priority: ClassVar[bool] = True

    def key(self, run: Run) -> tuple[int, int]:
        return run.priority, run.last_access
