"""What the prefix cache asks of an eviction policy, what it knows of a run, and the policies that rank runs by one key.

The cache is a tree of token runs. Only leaves that no request references and nobody pinned are *candidates*; the tree
says when a run becomes one (`add`) and stops being one (`remove`), and asks for the next `victim`. A policy orders
candidates and decides nothing else, so it can never evict a run that is in use or a parent before its children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError

Tokens: TypeAlias = npt.NDArray[np.int32]


class Key(Protocol):
    """A rank. Keys of one policy are compared with each other: numbers, or tuples of them."""

    def __lt__(self, other: Any, /) -> bool: ...


def checksum(tokens: memoryview | bytes, before: int) -> int:
    """Continues the checksum of tokens with those that follow them: in pieces it is the same as at once."""
    return crc32(tokens, before)


class Run:
    """A cached run of blocks as policies see it. Policies read these attributes and write only the first three."""

    __slots__ = (
        *("created", "entry", "fan_out", "hint", "hits", "key", "known_fingerprint", "last_access", "last_access_at"),
        *("num_blocks", "priority", "scope_hash", "session", "start", "tokens", "turn"),
    )

    entry: Any  # belongs to the policy that holds the run; None at first
    turn: int  # requests that went the same way alone before the one which published it: its place in a conversation
    fan_out: int  # requests that had reused the run before it by then, that one included
    hint: int  # what was said about its continuation when its request ended, as `ReuseHint.code`; 0 if nothing
    session: str | None  # of the request that published it, if it named one
    num_blocks: int
    start: int  # depth of the first block below the root, in blocks
    created: int  # serial of insertion into the cache; both parts of a split run keep it
    last_access: int  # logical tick of the last use; never newer than that of the run before it
    last_access_at: float  # when that was, in seconds on the manager's clock
    hits: int  # how many requests reused the run since it was inserted
    priority: int  # of retention, 0 (goes first) to 100
    tokens: Tokens  # those of its blocks; a policy may keep the array
    key: bytes  # those of its first block
    scope_hash: int  # of the scope in which it is found
    known_fingerprint: int | None  # once it was asked for

    @property
    def tenant(self) -> str:
        """Whose it is; "" for nobody's."""
        return ""

    @property
    def leaves(self) -> bool:
        """Whether all sessions that used it have ended: it goes before any other."""
        return False

    @property
    def above(self) -> Run | None:
        """The run that it follows; None at the top."""
        return None

    @property
    def sum_before(self) -> int:
        """The `checksum` of all tokens that precede it."""
        return 0

    @property
    def fingerprint(self) -> int:
        """Identity of the content by its scope, all that precedes it and its first block: the same when the run was evicted
        and computed again. Worked out when asked for.
        """
        known = self.known_fingerprint
        if known is None:
            known = self.known_fingerprint = self.fingerprint_of(self.start, self.sum_before, self.key)
        return known

    def fingerprint_of(self, start: int, sum_before: int, key: bytes) -> int:
        """The fingerprint of a run of this scope that begins at this depth, behind tokens of this checksum, with these."""
        return hash((self.scope_hash, start, sum_before, key))

    def sums_of(self, tokens: Tokens, num_blocks: int) -> bytes:
        """A checksum of four bytes for each of so many blocks with these tokens."""
        return b"".join(crc32(block.tobytes()).to_bytes(4, "little") for block in tokens.reshape(num_blocks, -1))


NO_CANDIDATES: Final = "no run can be evicted: every cached run is referenced, pinned or has children"
_ORDER: Final = attrgetter("order")
_SLACK: Final = 64  # discarded items tolerated beyond one per live item


class Item:
    """A run in a queue, as it was when it was pushed. Without a run it was discarded."""

    __slots__ = ("blocks", "key", "order", "run", "start")

    order: tuple[Any, int, int, int]  # of its queue, which sets it: the last number is that of the push

    def __init__(self, key: Any, run: Run) -> None:
        self.key = key
        self.run: Run | None = run
        self.start = run.start
        self.blocks = run.num_blocks


ItemT = TypeVar("ItemT", bound=Item)


class Queue(Generic[ItemT]):
    """Items in the order of their keys; of equal keys the deepest first, then the oldest, then the first pushed.

    Most keys arrive in ascending order (the newest access, the newest insertion), so the items are kept in an ordered
    list plus a heap for the late ones: O(1) in the usual case and O(log n) in the worst. Discarded items stay until
    they reach the front, or until they outnumber the live ones and everything is rebuilt. What left the front of the list
    gives its memory to those that come; its empty places are cut off when they are half of the list.
    """

    __slots__ = ("_front", "_heap", "_ordered", "_serial", "_stale", "num_blocks", "num_runs")

    def __init__(self) -> None:
        self._ordered: list[ItemT | None] = []
        self._front = 0  # of the ordered ones: those before it have left, and are None
        self._heap: list[tuple[tuple[Any, int, int, int], ItemT]] = []
        self.num_runs = 0
        self._stale = 0
        self._serial = 0
        self.num_blocks = 0  # of the live items, as they were when pushed

    def __len__(self) -> int:
        return self.num_runs

    def insert(self, item: ItemT) -> ItemT:
        """Takes in a new item, which is what `discard` takes."""
        run, ordered = item.run, self._ordered
        assert run is not None
        self._serial = serial = self._serial + 1
        item.order = (item.key, -run.start, run.created, serial)
        last = ordered[-1] if ordered else None
        if last is None or last.order < item.order:
            ordered.append(item)
        else:
            heappush(self._heap, (item.order, item))
        self.num_runs += 1
        self.num_blocks += item.blocks
        return item

    def discard(self, item: ItemT) -> None:
        """Take out an item that was not discarded before."""
        item.run = None
        self.num_blocks -= item.blocks
        self.num_runs = live = self.num_runs - 1
        self._stale = stale = self._stale + 1
        if stale > live + _SLACK:
            self._rebuild()

    def trim(self, item: ItemT, num_blocks: int) -> None:
        """A live item has only so many blocks left; its place stays."""
        self.num_blocks += num_blocks - item.blocks
        item.blocks = num_blocks

    def head(self) -> Run:
        """The first run; it stays. Raises `LookupError` when the queue is empty."""
        first = self.first()
        if first is None or first.run is None:
            raise LookupError(NO_CANDIDATES)
        return first.run

    def first(self) -> ItemT | None:
        """The first live item; None when there is none."""
        ordered, heap, front = self._ordered, self._heap, self._front
        first = None
        while front < len(ordered):
            item = ordered[front]
            if item is not None and item.run is not None:
                first = item
                break
            ordered[front] = None
            front += 1
        if front != self._front:
            self._stale -= front - self._front
            if front > _SLACK and 2 * front > len(ordered):
                del ordered[:front]
                front = 0
            self._front = front
        while heap:
            late = heap[0][1]
            if late.run is not None:
                return late if first is None or late.order < first.order else first
            heappop(heap)
            self._stale -= 1
        return first

    def last(self) -> ItemT | None:
        """The last of the live items that arrived in order; None when there is none."""
        ordered = self._ordered
        while ordered:
            item = ordered[-1]
            if item is None or item.run is not None:
                return item
            ordered.pop()
            self._stale -= 1
        return None

    def clear(self) -> list[Run]:
        """Empty the queue and return the runs that were in it."""
        runs: list[Run] = []
        for item in self._live():
            assert item.run is not None
            runs.append(item.run)
            item.run = None
        self._ordered.clear()
        self._heap.clear()
        self._front = self.num_runs = self._stale = self.num_blocks = 0
        return runs

    def _live(self) -> list[ItemT]:
        """All items that were not discarded."""
        items = [*self._ordered, *[late[1] for late in self._heap]]
        return [item for item in items if item is not None and item.run is not None]

    def _rebuild(self) -> None:
        self._ordered = [*sorted(self._live(), key=_ORDER)]
        self._heap = []
        self._front = self._stale = 0


# --- policies -------------------------------------------------------------------------------------------------------

MOMENTS_PER_SECOND: Final = 2**20


def moment_of(seconds: float) -> int:
    """A time as policies compute with it. Recordings write times on this grid, so that a replay decides the same again."""
    return int(seconds * MOMENTS_PER_SECOND + 0.5)


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


class KeyedPolicy(EvictionPolicy):
    """Evicts the candidate with the smallest `key`; of equal keys the deepest run, then the oldest.

    Everything a policy of one's own needs::

        @register_policy("biggest-first")
        class BiggestFirst(KeyedPolicy):
            def key(self, run: Run) -> int:
                return -run.num_blocks
    """

    def __init__(self) -> None:
        self._queue: Queue[Item] = Queue()

    @abstractmethod
    def key(self, run: Run) -> Key:
        """The rank of `run`, computed when it becomes a candidate. All keys of one policy must be comparable."""

    def add(self, run: Run) -> None:
        key = self.key(run)  # first: when a user's key() raises, nothing has changed
        if run.entry is not None:
            self._queue.discard(run.entry)
        run.entry = self._queue.insert(Item(key, run))

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


class LRUPolicy(KeyedPolicy):
    """The run that was not used for the longest time goes first: what everybody ships."""

    name: ClassVar[str] = "lru"

    def key(self, run: Run) -> int:
        return run.last_access


class PriorityPolicy(KeyedPolicy):
    """The run with the lowest retention priority goes first; of equals the least recently used."""

    name: ClassVar[str] = "priority"
    by_priority: ClassVar[bool] = True

    def key(self, run: Run) -> tuple[int, int]:
        return run.priority, run.last_access
