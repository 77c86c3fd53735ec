from __future__ import annotations

import json
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError, InvariantError
from kvpool.events import Created, Event, EventLog, PoolSize, Removed, Stored, Subscription, Updated, to_dict
from kvpool.events.mirror import CacheMirror
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.scope import MultimodalItem, ReuseScope

SCOPE = ReuseScope()
BLOCK_SIZE = 2
POOLS = (PoolSize(0, Tier.GPU, 64), PoolSize(0, Tier.HOST, 128))


def digests_of(*token_ids: int) -> list[bytes]:
    """A chain of blocks, one per given token id."""
    tokens = np.repeat(np.array(token_ids, dtype=np.int32), BLOCK_SIZE)
    return chain_digests(root_digest(SCOPE), tokens, BLOCK_SIZE)


A, B, C, D = digests_of(1, 2, 3, 4)


def stored(event_id: int, parent: bytes | None, *digests: bytes, group: int = 0) -> Stored:
    tokens = np.zeros(len(digests) * BLOCK_SIZE, dtype=np.int32)
    return Stored(event_id, parent, digests, tokens, BLOCK_SIZE, SCOPE, Tier.GPU, 35, group)


def store(log: EventLog, parent: bytes | None, *digests: bytes, group: int = 0) -> None:
    tokens = np.zeros(len(digests) * BLOCK_SIZE, dtype=np.int32)
    log.stored(parent, digests, tokens, block_size=BLOCK_SIZE, scope=SCOPE, tier=Tier.GPU, priority=35, group=group)


def remove(log: EventLog, *digests: bytes, tier: Tier = Tier.GPU, group: int = 0, reason: str = "evicted") -> None:
    log.removed(digests, tier=tier, group=group, reason=reason)


def reprioritise(log: EventLog, digest: bytes = A) -> None:
    log.updated([digest], group=0, old_priority=35, new_priority=80)


class FakeManager:
    """The producer's half of the contract: one lock over its state, its events and its snapshots."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.lock = threading.RLock()
        self.log = EventLog(capacity, snapshot_source=self.snapshot)
        self.parents: dict[bytes, bytes | None] = {}  # parents before children

    def snapshot(self, mark: Callable[[], int]) -> list[Event]:
        with self.lock:
            as_of = mark()
            runs = [stored(as_of, parent, digest) for digest, parent in self.parents.items()]
            return [Created(as_of, POOLS), *runs]

    def store(self, parent: bytes | None, digest: bytes) -> None:
        with self.lock:
            self.parents[digest] = parent
            if self.log.listening:
                store(self.log, parent, digest)

    def remove(self, digest: bytes) -> None:
        with self.lock:
            del self.parents[digest]
            if self.log.listening:
                remove(self.log, digest)


@pytest.fixture
def log() -> EventLog:
    return EventLog(16)


@pytest.fixture
def subscription(log: EventLog) -> Iterator[Subscription]:
    with log.subscribe(snapshot=False) as subscription:
        yield subscription


def test_ids_grow_by_one_over_all_kinds(log: EventLog, subscription: Subscription) -> None:
    log.created(POOLS)
    store(log, None, A, B)
    reprioritise(log)
    remove(log, B)
    store(log, A, C)
    batch = subscription.poll()
    assert [type(event) for event in batch.events] == [Created, Stored, Updated, Removed, Stored]
    assert [event.event_id for event in batch.events] == [1, 2, 3, 4, 5]
    assert (batch.missed, batch.next_id) == (0, 6)
    assert subscription.poll() == ([], 0, 6)


def test_ids_are_not_reused_after_a_time_without_subscribers(log: EventLog) -> None:
    with log.subscribe(snapshot=False) as first:
        store(log, None, A)
        assert first.poll().next_id == 2
    with log.subscribe(snapshot=False) as second:
        store(log, None, B)
        assert [event.event_id for event in second.poll().events] == [2]


def test_events_carry_what_was_announced(log: EventLog, subscription: Subscription) -> None:
    scope = ReuseScope("tenant", "lora", "v2", (("image", 3),))
    tokens = np.arange(4, dtype=np.int32)
    log.stored(A, [B, C], tokens, block_size=2, scope=scope, tier=Tier.HOST, priority=80, group=1, session="chat")
    log.updated([B], group=1, old_tier=Tier.HOST, new_tier=Tier.GPU)
    event, update = subscription.poll().events
    assert event == Stored(1, A, (B, C), tokens, 2, scope, Tier.HOST, 80, 1, "chat")
    assert isinstance(event, Stored)
    assert event.tokens.tolist() == [0, 1, 2, 3]
    assert update == Updated(2, (B,), 1, Tier.HOST, Tier.GPU, None, None)


def test_the_tokens_of_an_event_cannot_be_written(log: EventLog, subscription: Subscription) -> None:
    store(log, None, A)
    (event,) = subscription.poll().events
    assert isinstance(event, Stored)
    with pytest.raises(ValueError, match="read-only"):
        event.tokens[0] = 1


def test_consecutive_removals_become_one_event(log: EventLog, subscription: Subscription) -> None:
    remove(log, D)
    remove(log, C, B)
    assert subscription.poll().events == [Removed(1, (D, C, B), Tier.GPU, 0, "evicted")]


@pytest.mark.parametrize("other", [{"tier": Tier.HOST}, {"group": 1}, {"reason": "reset"}])
def test_removals_that_differ_are_not_merged(log: EventLog, subscription: Subscription, other: dict[str, Any]) -> None:
    remove(log, A)
    remove(log, B, **other)
    remove(log, C)
    removals = [event.digests for event in subscription.poll().events if isinstance(event, Removed)]
    assert removals == [(A,), (B,), (C,)]


def test_a_removal_stays_before_a_later_store_of_the_same_block(log: EventLog, subscription: Subscription) -> None:
    store(log, None, A)
    remove(log, A)
    store(log, None, A)
    remove(log, A)
    kinds = [type(event) for event in subscription.poll().events]
    assert kinds == [Stored, Removed, Stored, Removed]


def test_reading_ends_a_merge(log: EventLog, subscription: Subscription) -> None:
    remove(log, A)
    subscription.poll()
    remove(log, B)
    assert subscription.poll().events == [Removed(2, (B,), Tier.GPU, 0, "evicted")]


def test_a_new_subscriber_does_not_receive_removals_from_before(log: EventLog, subscription: Subscription) -> None:
    remove(log, A)
    with log.subscribe(snapshot=False) as late:
        remove(log, B)
        assert late.poll().events == [Removed(2, (B,), Tier.GPU, 0, "evicted")]
    assert len(subscription.poll().events) == 2


def test_no_digests_make_no_event(log: EventLog, subscription: Subscription) -> None:
    store(log, None)
    remove(log)
    log.updated([], group=0, old_priority=1, new_priority=2)
    assert subscription.poll() == ([], 0, 1)


def test_poll_gives_at_most_max_events(log: EventLog, subscription: Subscription) -> None:
    for _ in range(5):
        reprioritise(log)
    ids = []
    while (batch := subscription.poll(max_events=2)).events:
        assert len(batch.events) <= 2
        ids += [event.event_id for event in batch.events]
    assert ids == [1, 2, 3, 4, 5]


def test_max_events_also_cuts_a_snapshot() -> None:
    manager = FakeManager()
    for digest in (A, B):
        manager.store(None, digest)
    with manager.log.subscribe() as subscription:
        manager.store(None, C)
        first, second, third = (subscription.poll(max_events=2) for _ in range(3))
        assert [len(batch.events) for batch in (first, second, third)] == [2, 2, 0]
        assert [event.event_id for event in first.events + second.events] == [0, 0, 0, 1]


@pytest.mark.parametrize("num_events", [4, 5, 11])
def test_a_slow_subscriber_learns_exactly_how_many_events_it_missed(num_events: int) -> None:
    log = EventLog(4)
    with log.subscribe(snapshot=False) as slow:
        for _ in range(num_events):
            reprioritise(log)
        batch = slow.poll()
        assert batch.missed == num_events - 4
        assert [event.event_id for event in batch.events] == list(range(num_events - 3, num_events + 1))
        assert slow.poll() == ([], 0, num_events + 1)


def test_a_slow_subscriber_does_not_disturb_a_fast_one() -> None:
    log = EventLog(4)
    with log.subscribe(snapshot=False) as slow, log.subscribe(snapshot=False) as fast:
        for event_id in range(1, 20):
            reprioritise(log)
            assert [event.event_id for event in fast.poll().events] == [event_id]
        assert slow.poll().missed == 15


def test_the_buffer_is_bounded_by_blocks_too() -> None:
    log = EventLog(100, max_blocks=4)
    with log.subscribe(snapshot=False) as subscription:
        store(log, None, A, B)
        store(log, B, C, D)
        reprioritise(log)
        batch = subscription.poll()
        assert (batch.missed, [event.event_id for event in batch.events]) == (1, [2, 3])
        remove(log, *digests_of(5, 6, 7, 8, 9))
        assert len(subscription.poll().events) == 1, "one event larger than the bound is still delivered"


def test_a_log_keeps_events_of_a_million_blocks_unless_told_otherwise(
    log: EventLog, subscription: Subscription
) -> None:
    half = [A] * 2**19
    for _ in range(2):
        log.updated(half, group=0, old_priority=35, new_priority=80)
    reprioritise(log)
    assert subscription.poll().missed == 1
    for _ in range(2):
        log.updated(half, group=0, old_priority=35, new_priority=80)
    assert subscription.poll().missed == 0


def test_events_that_everybody_has_read_are_released(log: EventLog) -> None:
    tokens = np.zeros(2, dtype=np.int32)
    kept = weakref.ref(tokens)
    with log.subscribe(snapshot=False) as one, log.subscribe(snapshot=False) as other:
        log.stored(None, [A], tokens, block_size=2, scope=SCOPE, tier=Tier.GPU, priority=35, group=0)
        del tokens
        one.poll()
        assert kept() is not None
        other.poll()
        assert kept() is None


def test_nothing_is_recorded_while_nobody_listens() -> None:
    manager = FakeManager()
    assert not manager.log.listening
    manager.log = SimpleNamespace(listening=False)  # a call of anything else would raise
    manager.store(None, A)
    manager.remove(A)


def test_listening_follows_the_number_of_subscriptions(log: EventLog) -> None:
    first, second = log.subscribe(snapshot=False), log.subscribe(snapshot=False)
    assert log.listening
    first.close()
    first.close()
    assert log.listening
    second.close()
    assert not log.listening
    remove(log, A)  # the manager tested `listening` just before the last one closed
    with log.subscribe(snapshot=False) as third:
        assert third.poll() == ([], 0, 1)


def test_closing_the_log_closes_every_subscription(log: EventLog) -> None:
    subscriptions = [log.subscribe(snapshot=False) for _ in range(3)]
    log.close()
    assert all(subscription.closed for subscription in subscriptions)
    assert not log.listening


def test_a_late_subscriber_starts_with_everything_cached() -> None:
    manager = FakeManager()
    manager.store(None, A)
    manager.store(A, B)
    with manager.log.subscribe() as subscription:
        manager.store(B, C)
        mirror = CacheMirror()
        mirror.apply(subscription.poll().events)
        assert mirror.pools == POOLS
        assert mirror.blocks[0].keys() == {A, B, C}


def test_a_snapshot_includes_removals_that_are_still_being_merged() -> None:
    manager = FakeManager()
    with manager.log.subscribe(snapshot=False):
        manager.store(None, A)
        manager.remove(A)
        with manager.log.subscribe() as late:
            assert late.poll().events == [Created(2, POOLS)]


def test_a_new_snapshot_includes_removals_that_are_still_being_merged() -> None:
    manager = FakeManager()
    with manager.log.subscribe() as subscription:
        manager.store(None, A)
        manager.remove(A)
        assert subscription.resync() == ([Created(2, POOLS)], 0, 3)
        assert subscription.poll() == ([], 0, 3)


def test_removals_that_nobody_read_are_forgotten_with_the_last_subscription(log: EventLog) -> None:
    with log.subscribe(snapshot=False) as subscription:
        store(log, None, A)
        subscription.poll()
        remove(log, A)
    with log.subscribe(snapshot=False) as subscription:
        assert subscription.poll() == ([], 0, 2)
        remove(log, B)
        [event] = subscription.poll().events
        assert (event.event_id, event.digests) == (2, (B,))


def test_after_a_gap_resync_replaces_all_unread_events() -> None:
    manager = FakeManager(capacity=4)
    mirror = CacheMirror()
    with manager.log.subscribe() as subscription:
        for digest in digests_of(*range(10)):
            manager.store(None, digest)
        assert subscription.poll(max_events=1).missed == 6
        batch = subscription.resync()
        assert (batch.missed, batch.next_id) == (0, 11)
        mirror.apply(batch.events)
        manager.store(None, A)
        mirror.apply(subscription.poll().events)
    assert mirror.blocks[0].keys() == manager.parents.keys()
    assert mirror.pools == POOLS
    mirror.clear()
    assert (mirror.pools, mirror.blocks, mirror.last_event_id) == ((), {}, None)


def test_a_failing_snapshot_leaves_nobody_listening() -> None:
    def broken(mark: Callable[[], int]) -> list[Event]:
        raise RuntimeError("no snapshot")

    log = EventLog(4, snapshot_source=broken)
    with pytest.raises(RuntimeError, match="no snapshot"):
        log.subscribe()
    assert not log.listening


def test_a_failing_resync_loses_nothing() -> None:
    broken = False

    def source(mark: Callable[[], int]) -> list[Event]:
        as_of = mark()
        if broken:
            raise RuntimeError("no snapshot")
        return [Created(as_of, POOLS)]

    log = EventLog(4, snapshot_source=source)
    with log.subscribe() as subscription:
        store(log, None, A)
        broken = True
        with pytest.raises(RuntimeError, match="no snapshot"):
            subscription.resync()
        assert [type(event) for event in subscription.poll().events] == [Created, Stored]


@pytest.mark.parametrize("num_marks", [0, 2])
def test_a_snapshot_source_must_mark_its_moment_once(num_marks: int) -> None:
    def source(mark: Callable[[], int]) -> list[Event]:
        for _ in range(num_marks):
            mark()
        return []

    with pytest.raises(InvariantError, match=f"{num_marks} times"):
        EventLog(4, snapshot_source=source).subscribe()


def test_a_log_without_a_source_refuses_snapshots(log: EventLog, subscription: Subscription) -> None:
    with pytest.raises(InvalidArgumentError, match="snapshot=False"):
        log.subscribe()
    with pytest.raises(InvalidArgumentError, match="no snapshot source"):
        subscription.resync()


def produce(manager: FakeManager, token_id: int, num_steps: int, started: threading.Barrier) -> None:
    """Grows and trims one chain at random."""
    rng = random.Random(token_id)
    chain: list[bytes] = []
    path = [token_id]
    started.wait(60)
    for _ in range(num_steps):
        if chain and rng.random() < 0.45:
            manager.remove(chain.pop())
            path.pop()
        else:
            path.append(rng.randrange(4))
            digest = digests_of(*path)[-1]
            manager.store(chain[-1] if chain else None, digest)
            chain.append(digest)


class Follower(threading.Thread):
    """Subscribes late, reads in small steps until the producers are done, and resynchronises after gaps."""

    def __init__(self, manager: FakeManager, producers_done: threading.Event, sleepy: bool) -> None:
        super().__init__()
        self.manager, self.producers_done, self.sleepy = manager, producers_done, sleepy
        self.mirror = CacheMirror()
        self.subscribed = threading.Event()
        self.num_gaps = 0
        self.finished = False

    def run(self) -> None:
        with self.manager.log.subscribe() as subscription:
            self.subscribed.set()
            if self.sleepy:
                self.producers_done.wait(60)
            while not self.producers_done.is_set() or subscription.wait(timeout=0):
                batch = subscription.poll(max_events=7)
                if batch.missed:
                    self.num_gaps += 1
                    self.mirror.clear()
                    batch = subscription.resync()
                self.mirror.apply(batch.events)
        self.finished = True


@pytest.mark.usefixtures("eager_thread_switches")
@pytest.mark.parametrize("capacity", [1 << 16, 8])
def test_every_mirror_is_exact_whenever_it_started_and_whatever_it_missed(capacity: int) -> None:
    manager = FakeManager(capacity)
    done = threading.Event()
    started = threading.Barrier(4)
    producers = [threading.Thread(target=produce, args=(manager, 10 + i, 400, started)) for i in range(3)]
    followers = [Follower(manager, done, sleepy=i == 0) for i in range(6)]
    for thread in producers:
        thread.start()
    followers[0].start()
    assert followers[0].subscribed.wait(60)
    started.wait(60)
    for follower in followers[1:]:
        follower.start()
    for thread in producers:
        thread.join(60)
    done.set()
    for follower in followers:
        follower.join(60)
    assert followers[0].num_gaps == (capacity == 8)
    for follower in followers:
        assert follower.finished
        assert follower.mirror.blocks.get(0, {}).keys() == manager.parents.keys()
    assert not manager.log.listening


def test_wait_gives_up_after_its_timeout(subscription: Subscription) -> None:
    started = time.monotonic()
    assert not subscription.wait(timeout=0.02)
    assert time.monotonic() - started > 0.015
    assert not subscription.wait(timeout=0)


def test_wait_returns_at_once_when_there_is_something(log: EventLog, subscription: Subscription) -> None:
    remove(log, A)
    assert subscription.wait(timeout=10)
    subscription.poll()
    assert not subscription.wait(timeout=0)


def test_wait_wakes_for_an_event_from_another_thread(log: EventLog, subscription: Subscription) -> None:
    thread = threading.Thread(target=remove, args=(log, A))
    thread.start()
    assert subscription.wait(timeout=60)
    thread.join()
    assert len(subscription.poll().events) == 1


def test_iteration_waits_for_every_event_until_another_thread_closes(log: EventLog, subscription: Subscription) -> None:
    seen: list[Event] = []
    received = threading.Semaphore(0)

    def consume() -> None:
        for batch in subscription:
            seen.extend(batch.events)
            received.release()

    thread = threading.Thread(target=consume)
    thread.start()
    for announce in (remove, reprioritise) * 20:
        announce(log, A)
        assert received.acquire(timeout=10), "the waiting thread was not woken"
    subscription.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [event.event_id for event in seen] == list(range(1, 41))


def test_a_closed_subscription_refuses_to_read() -> None:
    subscription = FakeManager().log.subscribe()
    subscription.close()
    assert subscription.closed
    assert not subscription.wait(timeout=None)
    for read in (subscription.poll, subscription.resync):
        with pytest.raises(InvalidArgumentError, match="this subscription is closed"):
            read()


def test_wrong_arguments_are_refused(log: EventLog, subscription: Subscription) -> None:
    with pytest.raises(InvalidArgumentError, match="capacity 0"):
        EventLog(0)
    with pytest.raises(InvalidArgumentError, match="max_blocks 0"):
        EventLog(1, max_blocks=0)
    with pytest.raises(InvalidArgumentError, match="max_events 0"):
        subscription.poll(max_events=0)
    with pytest.raises(InvalidArgumentError, match="1 blocks of 2 tokens were stored with 3 tokens"):
        Stored(1, None, (A,), np.zeros(3, dtype=np.int32), 2, SCOPE, Tier.GPU, 35, 0)
    with pytest.raises(InvalidArgumentError, match="neither"):
        log.updated([A], group=0)
    with pytest.raises(InvalidArgumentError, match="both tiers"):
        log.updated([A], group=0, old_tier=Tier.GPU)
    with pytest.raises(InvalidArgumentError, match="both priorities"):
        log.updated([A], group=0, new_priority=3)
    assert subscription.poll() == ([], 0, 1)


def test_every_event_has_a_json_form() -> None:
    scope = ReuseScope("t", "", "", (("image", 3),), "speech")
    items = (MultimodalItem(-3, 4, "cat"), MultimodalItem(1, 1, b"\x00\xff"))
    events: list[Event] = [
        Created(1, POOLS[:1]),
        Stored(2, None, (A,), np.array([5, 6], dtype=np.int32), 2, scope, Tier.GPU, 35, 0, multimodal=items),
        Removed(3, (A, B), Tier.HOST, 1, "evicted"),
        Updated(4, (A,), 0, Tier.GPU, Tier.HOST),
    ]
    assert [json.loads(json.dumps(to_dict(event))) for event in events] == [
        {"type": "created", "event_id": 1, "pools": [{"group": 0, "tier": "GPU", "num_blocks": 64}]},
        {
            "type": "stored",
            "event_id": 2,
            "parent": None,
            "digests": [A.hex()],
            "tokens": [5, 6],
            "block_size": 2,
            "scope": {
                **{"tenant": "t", "adapter": "", "weights": "", "multimodal": [["image", 3]], "encoder": "speech"},
                "salt": "",
            },
            "tier": "GPU",
            "priority": 35,
            "group": 0,
            "session": None,
            "multimodal": [[-3, 4, "cat"], [1, 1, "00ff"]],
        },
        {
            "type": "removed",
            "event_id": 3,
            "digests": [A.hex(), B.hex()],
            "tier": "HOST",
            "group": 1,
            "reason": "evicted",
        },
        {
            "type": "updated",
            "event_id": 4,
            "digests": [A.hex()],
            "group": 0,
            "old_tier": "GPU",
            "new_tier": "HOST",
            "old_priority": None,
            "new_priority": None,
        },
    ]


def test_a_mirror_follows_stores_updates_and_removals() -> None:
    mirror = CacheMirror()
    mirror.apply([Created(1, POOLS), stored(2, None, A, B, C)])
    mirror.apply([Updated(3, (B, C), 0, Tier.GPU, Tier.HOST), Updated(4, (C,), 0, None, None, 35, 80)])
    mirror.apply([Removed(5, (A,), Tier.GPU, 0, "evicted")])
    assert mirror.blocks == {0: {B: (Tier.HOST, 35), C: (Tier.HOST, 80)}}


def test_an_update_may_change_tier_and_priority_together() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, None, A), Updated(2, (A,), 0, None, None, 35, 0)])
    mirror.apply([Updated(3, (A,), 0, Tier.GPU, Tier.HOST, 0, 1)])
    assert mirror.blocks == {0: {A: (Tier.HOST, 1)}}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Removed(2, (C,), Tier.GPU, 0, "evicted"), "does not hold"),
        (Removed(2, (A,), Tier.GPU, 1, "evicted"), "group 1 does not hold"),
        (Removed(2, (B, B), Tier.GPU, 0, "evicted"), "named twice"),
        (Removed(2, (B, A), Tier.HOST, 0, "evicted"), "from HOST, but it was in GPU"),
        (Updated(2, (C,), 0, Tier.GPU, Tier.HOST), "does not hold"),
        (Updated(2, (B,), 0, Tier.HOST, Tier.DISK), "but it had"),
        (Updated(2, (B,), 0, None, None, 1, 2), "but it had"),
        (stored(2, C, D), "unknown parent"),
        (stored(2, None, A), "stored already"),
        (stored(2, B, C, C), "stored already"),
        (stored(3, B, C), "event 3 follows event 1"),
        (stored(0, B, C), "event 0 follows event 1"),
    ],
)
def test_a_mirror_refuses_an_event_that_contradicts_it(event: Event, message: str) -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, None, A, B)])
    with pytest.raises(InvariantError, match=message):
        mirror.apply([event])
    assert mirror.blocks == {0: {A: (Tier.GPU, 35), B: (Tier.GPU, 35)}}
    assert mirror.last_event_id == 1


def test_a_mirror_refuses_a_second_removal() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, None, A), Removed(2, (A,), Tier.GPU, 0, "evicted")])
    with pytest.raises(InvariantError, match=A.hex()):
        mirror.apply([Removed(3, (A,), Tier.GPU, 0, "evicted")])


def test_a_parent_may_be_held_by_another_group_only() -> None:
    mirror = CacheMirror()
    mirror.apply([stored(1, None, A, B), stored(2, A, B, group=1)])
    assert mirror.blocks[1].keys() == {B}


def test_a_window_of_no_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="got 0 for group 2"):
        CacheMirror(windows={2: 0})


def test_a_windowed_group_may_hold_a_block_without_its_parent() -> None:
    mirror = CacheMirror(windows={0: 1})
    mirror.apply([stored(1, B, C)])
    assert mirror.blocks[0].keys() == {C}


def test_longest_prefix_counts_leading_blocks_that_every_group_holds() -> None:
    mirror = CacheMirror()
    assert mirror.longest_prefix([A, B]) == 0
    mirror.apply([stored(1, None, A, B, C), stored(2, None, A, B, group=1)])
    assert mirror.longest_prefix([]) == 0
    assert mirror.longest_prefix([A, B, C, D]) == 2
    assert mirror.longest_prefix([A, B, C, D], groups=[0]) == 3
    assert mirror.longest_prefix([A, B, C, D], groups=[0, 2]) == 0
    assert mirror.longest_prefix([D, A]) == 0


def test_longest_prefix_needs_only_the_window_of_a_windowed_group() -> None:
    mirror = CacheMirror(windows={1: 2})
    mirror.apply([stored(1, None, A, B, C, D), stored(2, A, B, C, group=1)])
    assert mirror.longest_prefix([A]) == 0
    assert mirror.longest_prefix([A, B]) == 0
    assert mirror.longest_prefix([A, B, C]) == 3
    assert mirror.longest_prefix([A, B, C, D]) == 3


def test_announcing_a_128k_prompt_makes_one_event() -> None:
    log = EventLog()
    tokens = np.arange(131072, dtype=np.int32)
    with log.subscribe(snapshot=False) as subscription:
        digests = chain_digests(root_digest(SCOPE), tokens, 16)
        log.stored(None, digests, tokens, block_size=16, scope=SCOPE, tier=Tier.GPU, priority=35, group=0)
        (event,) = subscription.poll().events
    assert isinstance(event, Stored)
    assert len(set(event.digests)) == 8192
    assert event.tokens.base is tokens, "the tokens are not copied"
