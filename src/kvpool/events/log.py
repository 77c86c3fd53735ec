"""Tells routers, publishers and tests what the prefix cache holds. It costs nothing while nobody listens.

The manager is the producer: under its own lock, and only if `log.listening`, it calls `created`, `stored`, `removed` or
`updated`. Every subscriber reads the one bounded buffer at its own pace. A subscriber that falls too far behind loses the
oldest events, is told how many, and resynchronises from a snapshot. It never makes the producer wait.

Locks are taken in one order only, manager then log. So the log does not hold its own when it asks the manager for a snapshot.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgumentError, InvariantError
from kvpool.events.kinds import Created, Event, PoolSize, Removed, Stored, Updated
from kvpool.scope import MultimodalItem, ReuseScope

if TYPE_CHECKING:
    from kvpool.config import Tier

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


class _NewestEvents:
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
        # Whether last blocks that are not full are events too, with fewer tokens than others
        self.tells_unfilled = False
        self._capacity = capacity
        self._max_blocks = max_blocks
        self._snapshot_source = snapshot_source
        self._lock = threading.Lock()  # guards everything below and every subscription
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0
        self._buffer = _NewestEvents(1, 1, next_id=1)  # gets its full size only while somebody listens
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
        multimodal: tuple[MultimodalItem, ...] = (),
    ) -> None:
        """Blocks became reusable. The array is kept, not copied: nobody may write to it later."""
        if not digests:
            return
        with self._lock:
            if self.listening:
                event = Stored(
                    self._new_id(),
                    parent,
                    tuple(digests),
                    tokens,
                    block_size,
                    scope,
                    tier,
                    priority,
                    group,
                    session,
                    multimodal,
                )
                self._append(event, len(digests))

    def removed(self, digests: Sequence[bytes], *, tier: Tier, group: int, reason: str) -> None:
        """Blocks left the cache. The event is merged with the removal just before it if only the digests differ."""
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
                self._buffer = _NewestEvents(self._capacity, self._max_blocks, self._buffer.next_id)
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
                self._buffer = _NewestEvents(1, 1, self._buffer.next_id)
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
