"""A cached run as policies see it, and the two containers that policies are made of."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvpool.compiling import mypyc_attr

Tokens: TypeAlias = npt.NDArray[np.int32]


class Key(Protocol):
    """A rank. Keys of one policy are compared with each other: numbers, or tuples of them."""

    def __lt__(self, other: Any, /) -> bool: ...


def checksum(tokens: memoryview | bytes, before: int) -> int:
    """Continues the checksum of tokens with those that follow them: in pieces it is the same as at once."""
    return crc32(tokens, before)


@mypyc_attr(allow_interpreted_subclasses=True)
class Run:
    """A cached run of blocks as policies see it. Policies read these attributes and write only the first three.

    It is a class, and no protocol, so that compiled policies read them from its memory: looking one up by its name costs more
    than most of what is done with it.
    """

    __slots__ = (
        *("_fingerprint", "created", "entry", "fan_out", "hint", "hits", "key", "last_access", "last_access_at"),
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
    _fingerprint: int | None  # once it was asked for

    @property
    def tenant(self) -> str:
        """Whose it is; "" for nobody's."""
        return ""

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
        known = self._fingerprint
        if known is None:
            known = self._fingerprint = self.fingerprint_of(self.start, self.sum_before, self.key)
        return known

    def fingerprint_of(self, start: int, sum_before: int, key: bytes) -> int:
        """The fingerprint of a run of this scope that begins at this depth, behind tokens of this checksum, with these."""
        return hash((self.scope_hash, start, sum_before, key))

    def sums_of(self, tokens: Tokens, num_blocks: int) -> bytes:
        """A checksum of four bytes for each of so many blocks with these tokens."""
        return b"".join(crc32(block.tobytes()).to_bytes(4, "little") for block in tokens.reshape(num_blocks, -1))


NO_CANDIDATES: Final = "no run can be evicted: every cached run is referenced, pinned or has children"
_SLACK: Final = 64  # discarded items tolerated beyond one per live item


class Item:
    """A run in a queue, as it was when it was pushed. Without a run it was discarded."""

    __slots__ = ("blocks", "created", "key", "run", "serial", "start")

    def __init__(self, key: Any, run: Run) -> None:
        self.key = key
        self.run: Run | None = run
        self.start = run.start
        self.created = run.created
        self.blocks = run.num_blocks
        self.serial = 0  # of the push

    def is_before(self, other: Item) -> bool:
        """Whether it comes before another item of its queue."""
        if self.key < other.key:
            return True
        if other.key < self.key:
            return False
        if self.start != other.start:
            return self.start > other.start
        if self.created != other.created:
            return self.created < other.created
        return self.serial < other.serial


ItemT = TypeVar("ItemT", bound=Item)


def _order(item: Item) -> tuple[Any, int, int, int]:
    """What `Item.is_before` compares, for those who compare much: C compares tuples."""
    return item.key, -item.start, item.created, item.serial


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

    def insert(self, item: ItemT) -> None:
        """Takes in a new item."""
        self._serial = serial = self._serial + 1
        item.serial = serial
        ordered = self._ordered
        last = ordered[-1] if ordered else None
        if last is None or last.key < item.key or last.is_before(item):
            ordered.append(item)
        else:
            heappush(self._heap, (_order(item), item))
        self.num_runs += 1
        self.num_blocks += item.blocks

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
            self._leave_behind(front)
        while heap:
            late = heap[0][1]
            if late.run is not None:
                return late if first is None or late.is_before(first) else first
            heappop(heap)
            self._stale -= 1
        return first

    def _leave_behind(self, front: int) -> None:
        """The ordered items before this one have left."""
        self._stale -= front - self._front
        self._front = front
        if front > _SLACK and 2 * front > len(self._ordered):
            del self._ordered[:front]
            self._front = 0

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
        self._ordered = [*sorted(self._live(), key=_order)]
        self._heap = []
        self._front = self._stale = 0


class RunQueue(Queue[Item]):
    """Runs in the order of keys of any kind."""

    __slots__ = ()

    def push(self, key: Key, run: Run) -> Item:
        """Insert `run`; the returned item is what `discard` takes."""
        item = Item(key, run)
        self.insert(item)
        return item
