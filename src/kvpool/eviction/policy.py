"""What the prefix cache asks of an eviction policy, and the policies that rank runs by one key.

The cache is a tree of token runs. Only leaves that no request references and nobody pinned are *candidates*; the tree
says when a run becomes one (`add`) and stops being one (`remove`), and asks for the next `victim`. A policy orders
candidates and decides nothing else, so it can never evict a run that is in use or a parent before its children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from typing import ClassVar, Final

from kvpool.compiling import mypyc_attr
from kvpool.errors import ConfigError, InvalidArgumentError
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


_MAX_CHECKPOINTS = 4096


@mypyc_attr(allow_interpreted_subclasses=True)
class CostAwarePolicy(KeyedPolicy):
    """Greedy-dual: value = the aging clock when the run was last used + the cost per block of computing it again.

    A block at depth d (in blocks) costs `base_cost + depth_cost * d`: the projections and the MLP cost the same at any
    position, attention reads everything before it. The n blocks of a run that starts at depth s thus cost
    `base_cost + depth_cost * (s + (n - 1) / 2)` each on average: more with position and with length. The least valuable
    run is the victim and the clock rises to its value, so an expensive run that is not used any more is overtaken by
    the fresh ones in the end. Of equal values the least recently used goes.

    The defaults are the ratio of a dense 8B model with blocks of 16 tokens: 4 * layers * hidden FLOPs of attention for
    each token before it against 2 * parameters, about 5e-4 per block of depth.

    The clock is looked up by `last_access`, not taken when the run is added: a parent that becomes a candidate because
    its last child left, or a run that was trimmed, is as old as its last use.
    """

    name: ClassVar[str] = "cost"
    weighs: ClassVar[bool] = True

    def __init__(self, base_cost: float = 1.0, depth_cost: float = 5e-4) -> None:
        if not base_cost > 0.0 or not depth_cost >= 0.0:
            raise InvalidArgumentError(
                f"base_cost is {base_cost} and depth_cost is {depth_cost}; the first must be > 0, the second >= 0"
            )
        super().__init__()
        self._base_cost = base_cost
        self._depth_cost = depth_cost
        self._latest = 0  # newest access seen
        # The clock rose to _clocks[i] after tick _ticks[i]; accesses after it see that value.
        self._ticks: list[int] = []
        self._clocks: list[float] = []

    def weigh(self, depth_cost: float) -> None:
        self._depth_cost = self._base_cost * depth_cost

    def recompute_cost(self, run: Run) -> float:
        """Average cost of computing one block of `run` again, in units of a block at depth 0."""
        return self._base_cost + self._depth_cost * (run.start + (run.num_blocks - 1) / 2)

    def key(self, run: Run) -> tuple[float, int]:
        last_access = run.last_access
        self._latest = max(self._latest, last_access)
        rises_before = bisect_left(self._ticks, last_access)
        clock = self._clocks[rises_before - 1] if rises_before else 0.0
        return clock + self.recompute_cost(run), last_access

    def victim(self) -> Run:
        run = super().victim()
        value: float = run.entry.key[0]
        if not self._clocks or value > self._clocks[-1]:
            self._raise_clock(value)
        return run

    def clear(self) -> None:
        super().clear()
        self._latest = 0
        self._ticks.clear()
        self._clocks.clear()

    def _raise_clock(self, value: float) -> None:
        if self._ticks and self._ticks[-1] == self._latest:
            self._clocks[-1] = value
            return
        self._ticks.append(self._latest)
        self._clocks.append(value)
        if len(self._ticks) > _MAX_CHECKPOINTS:  # the older half is kept at half the resolution
            del self._ticks[1 : _MAX_CHECKPOINTS // 2 : 2]
            del self._clocks[1 : _MAX_CHECKPOINTS // 2 : 2]
