"""Announces what the prefix cache holds to routers, publishers and tests, and costs nothing while nobody listens.

The manager is the producer: under its own lock, and only if `log.listening`, it calls `created`, `stored`, `removed` or
`updated`. Every subscriber reads the one bounded buffer at its own pace. One that falls too far behind loses the oldest
events, is told how many, and resynchronises from a snapshot; it never makes the producer wait.

Locks are taken in one order only, manager then log: the log calls the manager's snapshot source without its own lock.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvpool.blocks.hashing import ReuseScope
from kvpool.errors import InvalidArgumentError, InvariantError

if TYPE_CHECKING:
    from kvpool.config import Tier


class PoolSize(NamedTuple):
    """How many blocks one layer group can hold in one tier."""

    group: int
    tier: Tier
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Created:
    """The pools were created or resized. Says nothing about their contents."""

    event_id: int
    pools: tuple[PoolSize, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence became reusable in one layer group, each the parent of the next.

    `parent` is the digest of the block before the first one, None at the start of a sequence. `tokens` holds the tokens
    of all these blocks; it shares memory with what the producer passed and is read-only.
    """

    event_id: int
    parent: bytes | None
    digests: tuple[bytes, ...]
    tokens: npt.NDArray[np.int32] = field(compare=False, repr=False)  # the digests identify them
    block_size: int
    scope: ReuseScope
    tier: Tier
    priority: int
    group: int
    session: str | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.digests) * self.block_size:
            raise InvalidArgumentError(
                f"{len(self.digests)} blocks of {self.block_size} tokens were stored with {len(self.tokens)} tokens"
            )
        tokens = self.tokens.view()
        tokens.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks of one layer group left the cache, in this order; `tier` is where they were last."""

    event_id: int
    digests: tuple[bytes, ...]
    tier: Tier
    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Updated:
    """Blocks of one layer group moved to another tier, or got another priority, or both. An unchanged pair is None."""

    event_id: int
    digests: tuple[bytes, ...]
    group: int
    old_tier: Tier | None = None
    new_tier: Tier | None = None
    old_priority: int | None = None
    new_priority: int | None = None

    def __post_init__(self) -> None:
        if (self.old_tier is None) != (self.new_tier is None):
            raise InvalidArgumentError(f"an update needs both tiers or none, got {self.old_tier} -> {self.new_tier}")
        if (self.old_priority is None) != (self.new_priority is None):
            raise InvalidArgumentError(
                f"an update needs both priorities or none, got {self.old_priority} -> {self.new_priority}"
            )
        if self.old_tier is None and self.old_priority is None:
            raise InvalidArgumentError("an update changes a tier or a priority, got neither")


Event: TypeAlias = Created | Stored | Removed | Updated


def to_dict(event: Event) -> dict[str, Any]:
    """An event as JSON-able values: digests in hexadecimal, tiers by name, its kind under "type".

    >>> to_dict(Updated(7, (bytes(2),), group=0, old_priority=35, new_priority=80))["digests"]
    ['0000']
    """
    values = {item.name: _jsonable(getattr(event, item.name)) for item in fields(event)}
    return {"type": type(event).__name__.lower(), **values}


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.name if isinstance(value, int) else value.value
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, PoolSize):
        return {"group": value.group, "tier": value.tier.name, "num_blocks": value.num_blocks}
    if isinstance(value, ReuseScope):
        return {item.name: _jsonable(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return value


SnapshotSource: TypeAlias = Callable[[Callable[[], int]], Sequence[Event]]
"""Describes everything that is cached now: a `Created`, then `Stored` events with parents before their children.

Called as `source(mark)`. Under the lock that also covers every producer call, the source calls `mark()` exactly once
and reads its state; `mark()` returns the id of the last event that the snapshot includes, and all its events carry that
id. So the live events that follow are exactly those the snapshot does not include:

    def event_snapshot(self, mark: Callable[[], int]) -> list[Event]:
        with self._lock:
            as_of = mark()
            return [Created(as_of, ...), *(Stored(as_of, ...) for run in self._runs_parents_first())]
"""


class EventBatch(NamedTuple):
    events: list[Event]
    missed: int  # events dropped before this subscriber read them: > 0 means its mirror is stale, call resync()
    next_id: int  # id of the next live event that this subscriber will read


class _Buffer:
    """The newest events, found by id: at most `capacity` of them, naming at most `max_blocks` blocks (or one event)."""

    __slots__ = ("_blocks_before", "_capacity", "_events", "_max_blocks", "_num_blocks", "first_id", "next_id")

    def __init__(self, capacity: int, max_blocks: int, next_id: int) -> None:
        self.first_id = self.next_id = next_id
        self._capacity = capacity
        self._max_blocks = max_blocks
        self._events: list[Event | None] = [None] * capacity  # event i is at i % capacity
        self._blocks_before = [0] * capacity  # how many blocks all events before this one named
        self._num_blocks = 0

    def append(self, event: Event, num_blocks: int) -> None:
        capacity = self._capacity
        if self.next_id - self.first_id == capacity:
            self.first_id += 1
        slot = self.next_id % capacity
        self._events[slot] = event
        self._blocks_before[slot] = self._num_blocks
        self._num_blocks += num_blocks
        self.next_id += 1
        while (
            self._num_blocks - self._blocks_before[self.first_id % capacity] > self._max_blocks
            and self.first_id < self.next_id - 1
        ):
            self.discard_before(self.first_id + 1)

    def read(self, start_id: int, stop_id: int) -> list[Event]:
        events: list[Event | None] = []
        for span in self._spans(start_id, stop_id):
            events += self._events[span]
        return cast("list[Event]", events)

    def discard_before(self, event_id: int) -> None:
        if event_id > self.first_id:
            for span in self._spans(self.first_id, event_id):
                self._events[span] = [None] * (span.stop - span.start)
            self.first_id = event_id

    def _spans(self, start_id: int, stop_id: int) -> tuple[slice, ...]:
        start = start_id % self._capacity
        stop = start + stop_id - start_id
        if stop <= self._capacity:
            return (slice(start, stop),)
        return (slice(start, self._capacity), slice(0, stop - self._capacity))


class EventLog:
    """Numbers events, keeps the newest ones, and hands them to any number of independent subscribers.

    `capacity` bounds the events kept for subscribers that have not read them, `max_blocks` the blocks these may name
    (a single `Stored` can name thousands). Ids grow by one from 1 and are never reused, not even after a time without
    subscribers. The producer tests `listening` and otherwise does nothing:

        if self.events.listening:
            self.events.stored(parent, digests, tokens, ...)
    """

    def __init__(
        self, capacity: int = 65536, *, snapshot_source: SnapshotSource | None = None, max_blocks: int = 1 << 20
    ) -> None:
        if capacity < 1:
            raise InvalidArgumentError(f"an event log keeps at least 1 event, got capacity {capacity}")
        if max_blocks < 1:
            raise InvalidArgumentError(f"an event log keeps events of at least 1 block, got max_blocks {max_blocks}")
        self.listening = False
        self._capacity = capacity
        self._max_blocks = max_blocks
        self._snapshot_source = snapshot_source
        self._lock = threading.Lock()  # guards everything below and every subscription
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0
        self._buffer = _Buffer(1, 1, next_id=1)  # of full size only while somebody listens
        self._subscriptions: list[Subscription] = []
        self._removal_key: tuple[Tier, int, str] | None = None
        self._removed_digests: list[bytes] = []

    # -- producer: called under the manager's lock

    def created(self, pools: Iterable[PoolSize]) -> None:
        """The pools were created or resized."""
        with self._lock:
            if self.listening:
                self._append(Created(self._new_id(), tuple(pools)), 0)

    def stored(
        self,
        parent: bytes | None,
        digests: Sequence[bytes],
        tokens: npt.NDArray[np.int32],
        *,
        block_size: int,
        scope: ReuseScope,
        tier: Tier,
        priority: int,
        group: int,
        session: str | None = None,
    ) -> None:
        """Blocks became reusable. The array is kept, not copied: nobody may write to it later."""
        if not digests:
            return
        with self._lock:
            if self.listening:
                event = Stored(
                    self._new_id(), parent, tuple(digests), tokens, block_size, scope, tier, priority, group, session
                )
                self._append(event, len(digests))

    def removed(self, digests: Sequence[bytes], *, tier: Tier, group: int, reason: str) -> None:
        """Blocks left the cache. Merged with the removal just before it if only the digests differ."""
        if not digests:
            return
        with self._lock:
            if self.listening:
                key = (tier, group, reason)
                if key != self._removal_key:
                    self._flush_removals()
                    self._removal_key = key
                    self._wake()
                self._removed_digests += digests

    def updated(
        self,
        digests: Sequence[bytes],
        *,
        group: int,
        old_tier: Tier | None = None,
        new_tier: Tier | None = None,
        old_priority: int | None = None,
        new_priority: int | None = None,
    ) -> None:
        """Blocks changed their tier or priority; leave out the pair that did not change."""
        if not digests:
            return
        with self._lock:
            if self.listening:
                event = Updated(self._new_id(), tuple(digests), group, old_tier, new_tier, old_priority, new_priority)
                self._append(event, len(digests))

    def _new_id(self) -> int:
        self._flush_removals()
        return self._buffer.next_id

    def _append(self, event: Event, num_blocks: int) -> None:
        self._buffer.append(event, num_blocks)
        self._wake()

    def _wake(self) -> None:
        if self._num_waiting:
            self._changed.notify_all()

    def _flush_removals(self) -> None:
        if self._removal_key is not None:
            tier, group, reason = self._removal_key
            event = Removed(self._buffer.next_id, tuple(self._removed_digests), tier, group, reason)
            self._removal_key = None
            self._removed_digests = []
            self._append(event, len(event.digests))

    # -- subscribers: called from any thread

    def subscribe(self, snapshot: bool = True) -> Subscription:
        """A new subscription; with `snapshot`, its first events describe everything that is cached already.

        Close it, or use it in a `with` statement: an abandoned subscription keeps the log listening.
        """
        if snapshot and self._snapshot_source is None:
            raise InvalidArgumentError("this event log has no snapshot source: use subscribe(snapshot=False)")
        with self._lock:
            if not self._subscriptions:
                self._buffer = _Buffer(self._capacity, self._max_blocks, self._buffer.next_id)
            self._flush_removals()
            subscription = Subscription(self, self._buffer.next_id)
            self._subscriptions.append(subscription)
            self.listening = True
        if snapshot:
            try:
                self._synchronise(subscription)
            except BaseException:
                subscription.close()
                raise
        return subscription

    def close(self) -> None:
        """Closes every subscription and wakes those that wait."""
        with self._lock:
            subscriptions = tuple(self._subscriptions)
        for subscription in subscriptions:
            subscription.close()

    def _synchronise(self, subscription: Subscription) -> None:
        if self._snapshot_source is None:
            raise InvalidArgumentError("this event log has no snapshot source: a gap cannot be closed")
        marks: list[int] = []

        def mark() -> int:
            with self._lock:
                self._flush_removals()
                marks.append(self._buffer.next_id - 1)
            return marks[-1]

        # Meanwhile the cursor stays at an older event, which keeps all events after the mark.
        events = self._snapshot_source(mark)
        if len(marks) != 1:
            raise InvariantError(f"a snapshot source calls mark() exactly once, this one did {len(marks)} times")
        with self._lock:
            subscription._snapshot = list(events)
            subscription._cursor = marks[0] + 1

    def _wait(self, subscription: Subscription, timeout: float | None) -> bool:
        def ready() -> bool:
            has_events = self._buffer.next_id > subscription._cursor or self._removal_key is not None
            return subscription._closed or has_events or bool(subscription._snapshot)

        with self._lock:
            self._num_waiting += 1
            try:
                return self._changed.wait_for(ready, timeout) and not subscription._closed
            finally:
                self._num_waiting -= 1

    def _read(self, subscription: Subscription, max_events: int | None) -> EventBatch | None:
        with self._lock:
            if subscription._closed:
                return None
            self._flush_removals()
            buffer = self._buffer
            limit = sys.maxsize if max_events is None else max_events
            events = subscription._snapshot[:limit]
            del subscription._snapshot[:limit]
            start_id = max(subscription._cursor, buffer.first_id)
            missed = start_id - subscription._cursor
            stop_id = min(buffer.next_id, start_id + limit - len(events))
            events += buffer.read(start_id, stop_id)
            subscription._cursor = stop_id
            buffer.discard_before(min(other._cursor for other in self._subscriptions))
            return EventBatch(events, missed, stop_id)

    def _close(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription._closed:
                return
            subscription._closed = True
            subscription._snapshot = []
            self._subscriptions.remove(subscription)
            if not self._subscriptions:
                self.listening = False
                self._removal_key = None
                self._removed_digests = []
                self._buffer = _Buffer(1, 1, self._buffer.next_id)
            self._wake()


class Subscription:
    """One reader of an `EventLog`, with its own place in it. One thread reads it; any thread may close it.

    >>> log = EventLog(snapshot_source=lambda mark: [Created(mark(), ())])
    >>> with log.subscribe() as subscription:
    ...     log.updated([bytes(32)], group=0, old_priority=35, new_priority=80)
    ...     [type(event).__name__ for event in subscription.poll().events]
    ['Created', 'Updated']
    """

    __slots__ = ("_closed", "_cursor", "_log", "_snapshot")

    def __init__(self, log: EventLog, next_id: int) -> None:
        self._log = log
        self._cursor = next_id
        self._snapshot: list[Event] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def poll(self, max_events: int | None = None) -> EventBatch:
        """The events since the last call, at most `max_events` of them. Does not wait."""
        if max_events is not None and max_events < 1:
            raise InvalidArgumentError(f"poll() takes at least 1 event, got max_events {max_events}")
        batch = self._log._read(self, max_events)
        if batch is None:
            raise InvalidArgumentError("this subscription is closed; subscribe again")
        return batch

    def wait(self, timeout: float | None) -> bool:
        """Waits until `poll()` has something, at most `timeout` seconds; None waits as long as it takes.

        False after the timeout, and at once when the subscription is closed.
        """
        return self._log._wait(self, timeout)

    def resync(self) -> EventBatch:
        """A new snapshot, in place of all unread events: clear the mirror, apply this, go on with `poll()`."""
        if self._closed:
            raise InvalidArgumentError("this subscription is closed; subscribe again")
        self._log._synchronise(self)
        with self._log._lock:
            events, self._snapshot = self._snapshot, []
            return EventBatch(events, 0, self._cursor)

    def close(self) -> None:
        """Stops reading and wakes a thread that waits. The last one to close turns the log's `listening` off."""
        self._log._close(self)

    def __iter__(self) -> Iterator[EventBatch]:
        """Batches as they come, waiting between them, until the subscription is closed."""
        while self.wait(None) and (batch := self._log._read(self, None)) is not None:
            yield batch

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockState(NamedTuple):
    tier: Tier
    priority: int


class CacheMirror:
    """What a cache holds, rebuilt from its events: {group: {digest: (tier, priority)}}. Not thread-safe.

    A router keeps one per worker and sends a request where `longest_prefix` is largest. It checks what the producer
    promises and raises `InvariantError` when an event contradicts the ones before it; that event changes nothing.

    `windows` gives, for each group of sliding-window layers, how many blocks before the next token must be held.
    Such a group may hold a block whose parent has left the cache.
    """

    def __init__(self, windows: Mapping[int, int] | None = None) -> None:
        self._windows = dict(windows or {})
        for group, num_blocks in self._windows.items():
            if num_blocks < 1:
                raise InvalidArgumentError(f"a window is at least 1 block, got {num_blocks} for group {group}")
        self.pools: tuple[PoolSize, ...] = ()
        self.blocks: dict[int, dict[bytes, BlockState]] = {}
        self.last_event_id: int | None = None

    def clear(self) -> None:
        """Forgets everything, before a new snapshot is applied."""
        self.pools = ()
        self.blocks = {}
        self.last_event_id = None

    def apply(self, events: Iterable[Event]) -> None:
        """Follows these events, which must continue the ones applied before."""
        for event in events:
            # all events of a snapshot carry the id of the last event it includes
            if self.last_event_id is not None and event.event_id - self.last_event_id not in (0, 1):
                raise InvariantError(f"event {event.event_id} follows event {self.last_event_id}: resync() first")
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            elif isinstance(event, Updated):
                self._update(event)
            else:
                self.pools = event.pools
            self.last_event_id = event.event_id

    def longest_prefix(self, digests: Sequence[bytes], groups: Collection[int] | None = None) -> int:
        """How many leading blocks of a prompt could be reused: the groups (all that ever stored) hold what they need.

        Sink blocks of a windowed group are not looked for.
        """
        chosen = self.blocks if groups is None else groups
        num_tried = len(digests)
        num_blocks = np.arange(1, num_tried + 1)  # of every prefix that is tried
        usable = np.full(num_tried, bool(chosen))
        for group in chosen:
            held = self.blocks.get(group, {})
            is_held = np.fromiter(map(held.__contains__, digests), dtype=np.bool_, count=num_tried)
            last_missing = np.maximum.accumulate(np.where(is_held, 0, num_blocks))
            usable &= num_blocks - last_missing >= np.minimum(num_blocks, self._windows.get(group, num_tried))
        return int(num_blocks[usable].max(initial=0))

    def _store(self, event: Stored) -> None:
        parent, group = event.parent, event.group
        if parent is not None and group not in self._windows and not any(parent in g for g in self.blocks.values()):
            raise InvariantError(f"event {event.event_id} stored blocks below an unknown parent {parent.hex()}")
        held = self.blocks.get(group, {})
        added = dict.fromkeys(event.digests, BlockState(event.tier, event.priority))
        if len(added) < len(event.digests) or not held.keys().isdisjoint(added):
            raise InvariantError(f"event {event.event_id} stored a block of group {group} that was stored already")
        self.blocks.setdefault(group, held).update(added)

    def _remove(self, event: Removed) -> None:
        held = self._check_held(event)
        for digest in event.digests:
            if held[digest].tier != event.tier:
                raise InvariantError(
                    f"event {event.event_id} removed block {digest.hex()} of group {event.group} "
                    f"from {event.tier.name}, but it was in {held[digest].tier.name}"
                )
        for digest in event.digests:
            del held[digest]

    def _update(self, event: Updated) -> None:
        held = self._check_held(event)
        changed: dict[bytes, BlockState] = {}
        for digest in event.digests:
            tier, priority = held[digest]
            if event.old_tier not in (None, tier) or event.old_priority not in (None, priority):
                raise InvariantError(
                    f"event {event.event_id} updated block {digest.hex()} of group {event.group} from "
                    f"{(event.old_tier, event.old_priority)}, but it had {(tier, priority)}"
                )
            new_tier = tier if event.new_tier is None else event.new_tier
            new_priority = priority if event.new_priority is None else event.new_priority
            changed[digest] = BlockState(new_tier, new_priority)
        held.update(changed)

    def _check_held(self, event: Removed | Updated) -> dict[bytes, BlockState]:
        held = self.blocks.get(event.group, {})
        named = set(event.digests)
        if len(named) < len(event.digests) or not held.keys() >= named:
            unknown = next((digest.hex() for digest in event.digests if digest not in held), "named twice")
            raise InvariantError(
                f"event {event.event_id} {type(event).__name__.lower()} a block that group {event.group} "
                f"does not hold: {unknown}"
            )
        return held
