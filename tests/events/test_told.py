"""What subscribers are told when blocks are stored, move and leave."""

from __future__ import annotations

from kvpool import KVCacheManager, LayerSpec, Retention, Tier, TokenRange
from kvpool.events import Removed, Stored, Subscription, Updated, to_dict
from kvpool.events.mirror import CacheMirror
from managers import FULL, cached, computed, make_manager, manager_of_pairs, num_cached

WINDOW_OF_4 = LayerSpec(kv_heads=2, head_dim=8, window=4)


def assert_subscribers_know(manager: KVCacheManager, subscription: Subscription) -> None:
    """Whoever followed every event knows the same as whoever comes now."""
    followed, fresh = CacheMirror(), CacheMirror()
    followed.apply(subscription.poll().events)
    with manager.events.subscribe() as late:
        fresh.apply(late.poll().events)
    assert followed.blocks == fresh.blocks
    manager.check()


def test_given_a_run_that_is_computed_again_while_it_is_offloaded_then_subscribers_know_every_block_of_it() -> None:
    manager = manager_of_pairs(FULL, WINDOW_OF_4, gpu_blocks=(64, 64), host_blocks=(32, 32))
    subscription = manager.events.subscribe()
    prompt = list(range(16))
    late = manager.allocate("late", prompt)
    (fork,) = manager.fork(late, "fork")
    manager.commit(late)  # published only when the fork lets go of the blocks; by then most have left the window
    # Others part at 8 tokens: that end keeps its windowed blocks
    for tokens in (prompt, [*prompt[:8], *range(50, 58)]):
        manager.free(computed(manager, "other", tokens))
    manager.cache.evict(32, pool=0)
    below = num_cached(manager, pool=1, tier=Tier.HOST)
    assert below > 4
    evicted = manager.stats().evictions["capacity"]
    manager.free(fork)
    manager.check()
    # Two ends of runs; of one the request has the blocks
    assert below - num_cached(manager, pool=1, tier=Tier.HOST) == 4
    assert manager.stats().evictions["capacity"] - evicted == 2
    assert_subscribers_know(manager, subscription)


def test_given_a_run_that_is_computed_again_with_more_blocks_than_went_down_then_subscribers_are_told_of_them() -> None:
    manager = manager_of_pairs(FULL, WINDOW_OF_4, gpu_blocks=(64, 64), host_blocks=(32, 32))
    subscription = manager.events.subscribe()
    late, other = (manager.allocate(name, range(12)) for name in ("late", "other"))
    manager.commit(other)
    manager.free(other)
    manager.cache.evict(32, pool=0)
    assert num_cached(manager, pool=1, tier=Tier.HOST) == 2  # those that the end of the run needs
    manager.commit(late)
    assert num_cached(manager, pool=1, tier=Tier.HOST) == 0
    assert_subscribers_know(manager, subscription)


def test_given_a_run_that_kept_only_the_first_block_ids_of_its_window_when_it_leaves_then_subscribers_know() -> None:
    manager = manager_of_pairs(FULL, WINDOW_OF_4, gpu_blocks=(64, 64), host_blocks=(32, 32))
    subscription = manager.events.subscribe()
    cached(manager, 16)
    manager.cache.evict(32, pool=0)
    [run] = manager.inspect.runs()
    assert run.block_ids[1].tolist() == [-1] * 6 + [0, 1]  # 0 is a block like any other
    manager.cache.evict(32, tier=Tier.HOST)
    cached(manager, 16, first=100)
    assert_subscribers_know(manager, subscription)


def test_descendants_and_partly_reused_leaves_never_vanish_without_an_event() -> None:
    manager = make_manager()
    subscription, mirror = manager.subscribe(), CacheMirror()
    cached(manager, 16)
    manager.allocate("partial", [0, 1, 2, 3, 4, 5, 99])  # copies from a leaf that stays in the index
    mirror.apply(subscription.poll().events)
    assert len(mirror.blocks[0]) == 4
    manager.cache.invalidate(list(range(4)))  # the ancestor goes, its descendants with it
    mirror.apply(subscription.poll().events)
    assert mirror.blocks[0] == {}


def test_stored_names_the_digest_of_the_block_before() -> None:
    manager = make_manager()
    subscription = manager.subscribe()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 4)
    manager.commit(handle, 4)
    first, second = (event for event in subscription.poll().events if isinstance(event, Stored))
    assert (first.parent, second.parent) == (None, first.digests[0])


def test_every_event_can_be_written_as_json_values() -> None:
    manager = make_manager(host_blocks=4)
    subscription = manager.subscribe()
    cached(manager, 8, retention=Retention([TokenRange(0, None, 80)]))
    manager.cache.offload(1)
    manager.cache.reset()
    kinds = {to_dict(event)["type"] for event in subscription.poll().events}
    assert kinds == {"created", "stored", "removed", "updated"}


def test_reading_events_never_waits_unless_asked_and_gaps_show() -> None:
    manager = make_manager(event_buffer_size=2)
    subscription = manager.subscribe()
    assert subscription.wait(0) is True  # the snapshot
    assert subscription.poll().missed == 0
    assert subscription.wait(0) is False
    for first in range(0, 100, 10):
        cached(manager, 4, first)
    assert subscription.poll().missed == 8


def test_updates_and_removals_name_the_tier_the_block_was_on() -> None:
    manager = make_manager(host_blocks=4)
    subscription = manager.subscribe()
    cached(manager, 8)
    manager.cache.offload(2)
    manager.cache.evict(2, tier=Tier.HOST)
    moved = [e for e in subscription.poll().events if isinstance(e, (Updated, Removed))]
    assert isinstance(moved[0], Updated)
    assert (moved[0].old_tier, moved[0].new_tier) == (Tier.GPU, Tier.HOST)
    assert isinstance(moved[-1], Removed)
    assert moved[-1].tier is Tier.HOST


def test_given_a_run_of_a_window_then_its_blocks_are_told_in_one_event() -> None:
    manager = make_manager(LayerSpec(kv_heads=1, head_dim=8, window=64))
    subscription = manager.events.subscribe()
    manager.free(computed(manager, "a", list(range(16))))
    stored = [event for event in subscription.poll().events if isinstance(event, Stored)]
    with manager.events.subscribe() as late:
        stored += [event for event in late.poll().events if isinstance(event, Stored)]
    assert [len(event.digests) for event in stored] == [4, 4]
