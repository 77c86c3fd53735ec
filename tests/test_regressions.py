"""Bugs that were found once, each named after the behaviour it broke and reduced to the few calls that showed it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvpool import (
    AllocStatus,
    KVCacheConfig,
    KVCacheHandle,
    KVCacheManager,
    LayerSpec,
    Retention,
    ReuseScope,
    Tier,
    TokenRange,
)
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.events import Removed, Updated
from managers import FULL


def manager_with(*layers: LayerSpec, **options: Any) -> KVCacheManager:
    chosen = {"block_size": 4, "gpu_blocks": 10, "watermark": 0.0, **options}
    return KVCacheManager(KVCacheConfig(list(layers or (FULL,)), **chosen))


def commit_all(manager: KVCacheManager, handle: KVCacheHandle) -> KVCacheHandle:
    manager.commit(handle, handle.num_reserved - handle.num_committed)
    return handle


def test_extend_into_an_array_of_the_wrong_shape_reserves_nothing() -> None:
    manager = manager_with()
    handle = manager.allocate("a", num_tokens=1)
    with pytest.raises(InvalidArgumentError):
        manager.extend_batch([handle], 2, out=np.zeros((1, 5), np.int32))
    assert handle.num_reserved == 1


def test_slot_mapping_of_an_empty_batch_is_empty() -> None:
    assert manager_with().slot_mapping([], [], []).shape == (1, 0)


def test_a_count_past_the_known_ids_publishes_what_is_known() -> None:
    manager = manager_with(block_size=1)
    handle = manager.allocate("a", [0])
    manager.commit(handle, 1)
    manager.extend(handle)
    manager.commit(handle, 1)  # its id is not known
    manager.check()
    assert manager.match_prefix([0, 0, 0]).num_tokens == 1


def test_a_fork_that_follows_what_its_sibling_published_is_no_longer_in_flight() -> None:
    manager = manager_with()
    parent = manager.allocate("parent", [0, 0, 0, 0])
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "child")
    manager.commit(child, 4)
    manager.check()


def test_a_fork_keeps_its_bytes_when_its_sibling_rewinds_and_writes_again() -> None:
    manager = manager_with(enable_prefix_caching=False)
    parent = manager.allocate("parent", [0] * 8)
    manager.commit(parent, 8)
    (child,) = manager.fork(parent, "child")
    manager.extend(parent)
    manager.rewind(parent, 4)
    slots = manager.extend(parent)
    assert int(slots[0, 0]) // 4 != child.block_table()[1]


def test_a_refused_extend_of_two_forks_leaves_both_careful() -> None:
    manager = manager_with(gpu_blocks=2, enable_prefix_caching=False)
    parent = manager.allocate("parent", [0, 0])
    manager.commit(parent, 2)
    (child,) = manager.fork(parent, "child")
    filler = manager.allocate("filler", [1])
    with pytest.raises(Exception, match="needs"):
        manager.extend_batch([parent, child])
    manager.free(filler)
    slots = manager.extend(child)
    assert int(slots[0, 0]) // 4 != parent.block_table()[0]


def test_what_has_expired_is_neither_matched_nor_evicted_again() -> None:
    now = [0.0]
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4), clock=lambda: now[0])
    manager.free(commit_all(manager, manager.allocate("a", [0, 0], ttl=5.0)))
    now[0] = 6.0
    assert manager.match_prefix([0, 0, 1]).num_tokens == 0
    assert (manager.evict(1), manager.get_num_free_blocks()) == (0, 4)
    assert manager.stats().evictions["expired"] == 1


def test_a_pin_whose_time_is_over_does_not_block_an_admission() -> None:
    now = [0.0]
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4), clock=lambda: now[0])
    manager.free(commit_all(manager, manager.allocate("a", [0] * 4)))
    manager.pin([0] * 4, ttl=5.0)
    now[0] = 6.0
    manager.allocate("b", [1] * 8)
    manager.check()


def test_deadlines_do_not_pile_up_with_requests() -> None:
    now = [0.0]
    manager = KVCacheManager(
        KVCacheConfig([FULL], block_size=2, gpu_blocks=8, default_ttl=1000.0), clock=lambda: now[0]
    )
    for number in range(500):
        now[0] = number
        manager.free(commit_all(manager, manager.allocate(number, [number % 3] * 4)))
    assert len(manager._state.cache.expiry.calendar._heap) < 200


def test_leftovers_of_windows_do_not_pile_up_with_requests() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=4), block_size=2)
    for number in range(2000):
        manager.free(commit_all(manager, manager.allocate(number, [number % 2] * 6)))
    pool = manager.stats().pool()
    assert all(len(queue) <= 2 * pool.total + 64 for queue in manager._state.cache.windows.leftovers)
    manager.check()
    assert manager.evict(pool.total) == pool.cached
    manager.check()


def test_freeing_a_swapped_request_without_keeping_drops_what_it_published() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8, host_blocks=8))
    handle = commit_all(manager, manager.allocate("a", [0] * 4))
    manager.swap_out(handle)
    manager.free(handle, keep=False)
    assert manager.match_prefix([0] * 5).num_tokens == 0
    manager.check()


def test_forks_that_share_written_blocks_cannot_commit_different_tokens() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8))
    parent = manager.allocate("a", num_tokens=4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "b")
    manager.commit(parent, [0, 1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="token 2"):
        manager.commit(child, [0, 1, 9, 3])
    manager.check()
    manager.commit(child, [0, 1, 2, 3])
    manager.check()


def test_a_prompt_over_the_limit_is_refused_even_if_less_is_reserved() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8, max_seq_len=6))
    assert manager.can_allocate([0] * 8, reserve=2).status is AllocStatus.NEVER
    with pytest.raises(InvalidArgumentError, match="max_seq_len=6"):
        manager.allocate("a", [0] * 8, reserve=2)


def test_a_batch_of_several_tenants_does_not_use_the_guarantee_of_one() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8, watermark=0.0))
    manager.set_quota("a", guaranteed=4)
    manager.free(commit_all(manager, manager.allocate("old", [0] * 8, scope=ReuseScope(tenant="a"))))
    first = commit_all(manager, manager.allocate("a", [1] * 4, scope=ReuseScope(tenant="a")))
    second = commit_all(manager, manager.allocate("b", [2] * 4, scope=ReuseScope(tenant="b")))
    with pytest.raises(OutOfBlocksError):
        manager.extend_batch([first, second])
    manager.extend(first)
    manager.check()


def test_invalidating_a_pinned_prefix_unpins_its_windowed_blocks() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=4), block_size=2)
    retention = Retention([TokenRange(0, 2, priority=5)])
    handle = commit_all(manager, manager.allocate("a", [0] * 4, retention=retention))
    manager.pin(handle)
    manager.free(handle)  # retention cuts the pinned run in two
    manager.invalidate([0] * 4)  # only the lower half goes
    manager.check()
    manager.reset_prefix_cache()
    manager.check()
    assert manager.stats().pool().pinned == 0


def test_a_rewind_into_the_sinks_lets_go_of_them() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=32, window=4, sink_tokens=3), block_size=2)
    handle = commit_all(manager, manager.allocate("a", [0, 0]))
    manager.rewind(handle, 1)
    manager.check()
    manager.free(handle)
    manager.check()


def test_a_quota_can_be_removed_after_the_pool_shrank_below_the_guarantees() -> None:
    manager = manager_with(gpu_blocks=8)
    manager.set_quota("a", guaranteed=4)
    manager.set_quota("b", guaranteed=4)
    manager.resize(3)
    manager.set_quota("a")
    manager.set_quota("b")
    assert manager.stats().tenants == {}


def test_requests_swapped_together_share_their_prefix_like_forks_when_they_come_back() -> None:
    manager = manager_with(block_size=2, host_blocks=10)
    handles = [commit_all(manager, manager.allocate(name, [1, 1, 1, 1, last])) for name, last in (("a", 2), ("b", 3))]
    manager.swap_out(*handles)
    manager.reset_prefix_cache()  # the common prefix must come back from the host
    manager.swap_in(*handles)
    manager.check()
    for handle in handles:
        manager.free(handle)
        manager.check()


def slots_of_step(manager: KVCacheManager, handle: KVCacheHandle, slots: Any) -> None:
    """The slot of the last reserved position must be the one that the table names."""
    column, offset = divmod(handle.num_reserved - 1, manager.config.block_size)
    assert slots.tolist() == [[int(handle.block_ids()[column]) * manager.config.block_size + offset]]


def test_decoding_enters_blocks_that_lookahead_reserved() -> None:
    manager = manager_with(block_size=2)
    other = manager.allocate("other", [9])
    handle = commit_all(manager, manager.allocate("a", [0]))
    manager.free(other)
    manager.extend_batch([handle], 0, lookahead=4)  # its next blocks do not follow its first one
    batch = manager.batch([handle])
    for _ in range(4):
        slots_of_step(manager, handle, manager.extend_batch(batch))


def test_two_batches_may_step_the_same_sequence_in_turn() -> None:
    manager = manager_with()
    handle = commit_all(manager, manager.allocate("a", [0]))
    batch = manager.batch([handle])
    slots_of_step(manager, handle, manager.extend_batch(batch))
    slots_of_step(manager, handle, manager.extend(handle))
    slots_of_step(manager, handle, manager.extend_batch(batch))


def test_an_admission_does_not_evict_windowed_blocks_that_it_is_about_to_read() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=6), block_size=2, gpu_blocks=14)
    first = [1] * 10
    manager.free(commit_all(manager, manager.allocate("first", first)))
    assert manager.evict(2) == 2  # what had left its window
    manager.free(commit_all(manager, manager.allocate("second", [2] * 6)))  # younger, fills the pool
    again = manager.allocate("again", [*first, 3])
    assert again.num_cached_tokens == 10
    manager.check()


def test_a_partial_block_that_must_go_does_not_leave_a_window_with_a_hole() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2, partial_match=False)
    manager.free(commit_all(manager, manager.allocate("a", [1] * 8)))
    assert manager.evict(2) == 2  # windowed blocks 1 and 2 of 4 are gone, the last one is there
    manager.allocate("b", [*[1] * 7, 2])  # its last whole block is the third: nothing to read in its window
    manager.check()


def test_defragment_ignores_what_a_table_says_about_blocks_that_left_the_window() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2, gpu_blocks=12)
    filler = manager.allocate("filler", num_tokens=4)
    manager.free(commit_all(manager, manager.allocate("a", [0] * 6)))
    commit_all(manager, manager.allocate("b", [0] * 6 + [1]))
    assert manager.evict(2) == 2  # windowed blocks that "b" has passed
    manager.free(filler)
    manager.defragment()
    manager.check()


def test_windowed_blocks_can_be_evicted_after_their_pin_ends() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2, gpu_blocks=20)
    commit_all(manager, manager.allocate("a", [0] * 12))
    pin = manager.pin([0] * 8)
    manager.free(commit_all(manager, manager.allocate("b", [0] * 4 + [1])))  # cuts the pinned run in two
    manager.evict(100)
    manager.unpin(pin)
    assert manager.evict(1) == 1
    manager.check()


def test_a_fork_that_was_rewound_keeps_its_share_of_a_block_that_its_sibling_commits() -> None:
    manager = manager_with()
    parent = commit_all(manager, manager.allocate("p", [1, 2, 3, 4]))
    manager.extend(parent, 4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "c")
    manager.rewind(parent, 3)
    manager.commit(child, [5, 6, 7, 8])
    shared = int(child.block_ids()[1])
    slots = manager.extend(parent)
    (copy,) = manager.take_copies()
    assert (int(copy.src[0]), int(copy.dst[0]), copy.num_tokens) == (shared, int(slots[0, 0]) // 4, 1)
    assert manager.match_prefix([*range(1, 9), 0]).num_tokens == 8  # published as soon as the parent let go
    manager.check()


def test_forks_that_commit_different_tokens_in_one_batch_share_nothing_they_disagree_about() -> None:
    manager = manager_with()
    parent = manager.allocate("p", num_tokens=4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "c")
    manager.commit_batch([parent, child], [5, 6, 7, 8, 9, 10, 11, 12], [4, 4])
    manager.check()
    manager.free_batch([parent, child])
    manager.check()


def test_the_source_of_a_partial_block_is_not_counted_as_supply_in_windows() -> None:
    layers = [FULL, LayerSpec(kv_heads=1, head_dim=8, window=64)]
    manager = manager_with(*layers, gpu_blocks=16)
    manager.free(commit_all(manager, manager.allocate("a", list(range(24)))))
    prompt = list(range(14)) + [99] * 14
    if manager.can_allocate(prompt):
        manager.allocate("b", prompt)
    else:
        with pytest.raises(OutOfBlocksError):
            manager.allocate("b", prompt)
    manager.check()


def test_a_rewind_of_nothing_in_a_full_pool_changes_nothing() -> None:
    manager = manager_with(gpu_blocks=3)
    parent = commit_all(manager, manager.allocate("p", [1, 2, 3, 4]))
    manager.extend(parent, 4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "c")
    manager.commit(parent, [5, 6, 7, 8])
    manager.allocate("other", [9])
    manager.rewind(child, 0)
    manager.check()
    with pytest.raises(OutOfBlocksError):
        manager.rewind(child, 1)
    manager.check()


def test_a_clock_that_raises_leaves_the_lock_free() -> None:
    broken = []

    def clock() -> float:
        if broken:
            raise RuntimeError("no time")
        return 0.0

    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4), clock=clock)
    broken.append(True)
    with pytest.raises(RuntimeError):
        manager.stats()
    broken.clear()
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(manager.stats().num_sequences))
    thread.start()
    thread.join(timeout=10)
    assert seen == [0]


def test_what_is_pinned_and_guaranteed_is_protected_once() -> None:
    manager = manager_with(gpu_blocks=12, block_size=1)
    scope = ReuseScope(tenant="a")
    manager.set_quota("a", guaranteed=4)
    manager.free(commit_all(manager, manager.allocate("old", [0] * 12, scope=scope)))
    manager.pin([0] * 4, scope=scope)
    assert manager.can_allocate([1] * 8)
    manager.allocate("new", [1] * 8)
    manager.check()


def test_pressure_changes_are_told_in_the_order_in_which_they_happened() -> None:
    manager = manager_with(gpu_blocks=10, block_size=1)
    handles: list[KVCacheHandle] = []
    manager.on_memory_pressure(lambda change: manager.free(handles.pop(), keep=False) if handles else None)
    seen: list[tuple[int, int]] = []
    manager.on_memory_pressure(lambda change: seen.append((int(change.previous), int(change.level))))
    handles.append(manager.allocate("a", num_tokens=5))
    manager.allocate("b", num_tokens=4)
    assert seen == [(0, 2), (2, 0)]


def test_dropping_a_request_does_not_drop_what_another_published() -> None:
    manager = manager_with()
    first = manager.allocate("a", [1, 2, 3, 4])
    second = commit_all(manager, manager.allocate("b", [1, 2, 3, 4]))
    commit_all(manager, first)  # merged with what b published
    manager.free(second)
    manager.free(first, keep=False)
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 4


def test_the_next_producer_of_a_prefix_is_known_when_the_first_one_ends() -> None:
    manager = manager_with(gpu_blocks=40)
    first = manager.allocate("a", [1] * 8)
    manager.allocate("b", [1] * 8)
    manager.free(first)
    assert "'b'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason
    manager.check()


def test_offload_moves_no_more_than_asked_when_groups_share_a_pool() -> None:
    layers = [FULL, LayerSpec(kv_heads=1, head_dim=8, window=64)]
    manager = manager_with(*layers, gpu_blocks=16, host_blocks=16)
    manager.free(commit_all(manager, manager.allocate("a", list(range(16)))))
    assert manager.offload(2) == 2
    assert manager.stats().offloaded_blocks == 1
    manager.check()


def test_token_ids_can_be_read_while_another_thread_decodes() -> None:
    manager = manager_with(gpu_blocks=400)
    handle = commit_all(manager, manager.allocate("a", [1] * 4))
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                ids = handle.token_ids
                assert (ids[4:] == np.arange(4, len(ids))).all()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    batch = manager.batch([handle])
    for token in range(4, 1200):
        manager.extend_batch(batch)
        manager.commit_batch(batch, [token])
    done.set()
    reader.join(timeout=10)
    assert failures == []


def test_a_fork_that_went_another_way_does_not_follow_into_a_block_it_has_passed() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2)
    slow = commit_all(manager, manager.allocate("slow", [0, 0]))
    (fast,) = manager.fork(slow, "fast")
    manager.extend(fast, 4)
    manager.commit(fast, [1, 1, 1, 1])
    manager.fork(fast, "closes its run")
    assert manager.evict(10) == 1  # the second block of "fast", which has left its window; its table is not told
    manager.extend(slow, 2)  # takes the same block, at the same place
    manager.commit(slow, [0, 0])
    manager.check()
    assert manager.match_prefix([0, 0, 1, 1, 1, 1, 2]).num_tokens == 6


@pytest.mark.parametrize("is_fork", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_requests_swapped_in_together_share_blocks_though_only_one_publishes(is_fork: bool, first: int) -> None:
    manager = manager_with(block_size=2, host_blocks=8)
    one = commit_all(manager, manager.allocate("one", [0, 0, 0, 0, 0]))
    other = manager.fork(one, "other")[0] if is_fork else manager.allocate("other", [0, 0, 0, 0, 1])
    commit_all(manager, other)
    manager.extend(other)
    manager.commit(other, 1)  # its id is not known: it publishes nothing more
    manager.swap_out(one, other)
    assert manager.evict(1) == 1  # one of the two blocks that both have in common
    manager.swap_in(*[one, other][:: 1 if first == 0 else -1])
    manager.check()
    manager.free_batch([one, other])
    manager.check()


def test_requests_swapped_in_together_share_blocks_though_only_one_committed_them() -> None:
    manager = manager_with(block_size=2, host_blocks=8)
    one = manager.allocate("one", [0] * 6)
    manager.mark_written(one, 6)
    manager.commit(one, 2)
    (other,) = manager.fork(one, "other")
    manager.commit(one, 4)
    manager.swap_out(one, other)
    assert manager.evict(1) == 1  # "one" has two blocks left in the cache, "other" may take one of them
    manager.swap_in(one, other)
    manager.check()
    manager.commit(other, 4)
    manager.check()
    assert one.block_table() == other.block_table()


@pytest.mark.parametrize("swapped_first", [True, False])
@pytest.mark.parametrize("how", ["prefix", "scope", "session", "reset"])
def test_what_was_invalidated_does_not_come_back_with_a_swapped_request(swapped_first: bool, how: str) -> None:
    manager = manager_with(block_size=2, host_blocks=8)
    handle = commit_all(manager, manager.allocate("a", [0] * 5, session="s"))
    if swapped_first:
        manager.swap_out(handle)
    if how == "prefix":
        manager.invalidate([0, 0])
    elif how == "scope":
        manager.invalidate(scope=ReuseScope())
    elif how == "session":
        manager.invalidate(session="s")
    else:
        manager.reset_prefix_cache()
    if not swapped_first:
        manager.swap_out(handle)
    manager.swap_in(handle)
    assert manager.match_prefix([0] * 5).num_tokens == 0
    manager.check()


def test_idle_windowed_blocks_before_a_partial_block_of_the_same_run_are_no_supply() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=4), block_size=2, gpu_blocks=11)
    commit_all(manager, manager.allocate("a", [0] * 10))  # one block is free, three windowed ones are unread
    prompt = [0] * 7 + [1] * 3  # needs four, and reads one of the three
    assert manager.can_allocate(prompt).status is not AllocStatus.OK
    with pytest.raises(OutOfBlocksError, match="free or evictable"):
        manager.allocate("b", prompt)
    manager.check()


@pytest.mark.parametrize("lookahead", [0, 3])
def test_can_allocate_says_what_allocate_reuses_also_below_the_watermark(lookahead: int) -> None:
    manager = manager_with(block_size=2, gpu_blocks=12, watermark=0.1)
    commit_all(manager, manager.allocate("a", [1, 1, *[0] * 15]))
    answer = manager.can_allocate([1, 0], lookahead=lookahead)
    assert manager.allocate("b", [1, 0], lookahead=lookahead).num_cached_tokens == answer.num_cached_tokens == 1


def test_requests_freed_together_while_in_flight_leave_nothing_tracked() -> None:
    manager = manager_with(gpu_blocks=40)
    handles = [manager.allocate(name, [1] * 8) for name in ("a", "b", "c")]
    manager.free_batch([handles[1], handles[0]])
    manager.check()
    assert "'c'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason
    manager.free(handles[2])
    assert manager.can_allocate([1] * 8, wait_for_prefix=True)
    manager.check()


WINDOW = LayerSpec(kv_heads=1, head_dim=8, window=4096)
CHUNK = LayerSpec(kv_heads=1, head_dim=8, chunk=4096)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("layers", [(FULL, WINDOW), (WINDOW,), (FULL, CHUNK), (WINDOW, CHUNK, FULL)])
def test_a_fork_of_a_fully_cached_prompt_copies_no_published_block(
    layers: tuple[LayerSpec, ...], block_size: int
) -> None:
    manager = manager_with(*layers, block_size=block_size, gpu_blocks=200)
    manager.free(commit_all(manager, manager.allocate("a", range(16))))
    parent = manager.allocate("b", range(16))
    assert parent.num_cached_tokens == 15
    (child,) = manager.fork(parent, "c")
    needed = manager.blocks_needed(child, 1)
    free = [manager.get_num_free_blocks(pool) for pool in range(len(needed))]
    manager.extend(child)
    assert [f - manager.get_num_free_blocks(pool) for pool, f in enumerate(free)] == list(needed)
    manager.check()
    assert manager.take_copies() == []
    for handle in (parent, child):
        if handle is parent:
            manager.extend(handle)
        manager.commit(handle, [15, 16])
        manager.check()
    for group in range(len(manager.config.groups)):
        shared = 16 // block_size
        assert (parent.block_ids(group)[:shared] == child.block_ids(group)[:shared]).all()
        assert (manager.slot_mapping([child], 0, 16)[group] >= 0).all()


def two_pools(**options: Any) -> KVCacheManager:
    """A full and a windowed group with a pool each."""
    layers = LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=2, head_dim=8, window=8)
    return manager_with(*layers, eviction_policy="lru", **options)


def run_through(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    manager.free(commit_all(manager, manager.allocate(name, tokens)))


def test_a_run_on_the_host_that_an_admission_holds_gives_no_room_for_what_it_evicts() -> None:
    manager = two_pools(gpu_blocks=(4, 4), host_blocks=(2, 1))
    run_through(manager, "a", [1] * 4)
    assert manager.offload(1) == 1
    run_through(manager, "b", [2] * 4)
    feed = manager.subscribe()
    feed.poll()
    prompt = [1] * 4 + [3] * 12
    assert manager.can_allocate(prompt)
    assert manager.allocate("c", prompt).num_cached_tokens == 4
    manager.check()
    events = feed.poll().events
    assert [(e.old_tier, e.new_tier) for e in events if isinstance(e, Updated)] == [(Tier.HOST, Tier.GPU)] * 2
    assert [e.tier for e in events if isinstance(e, Removed)] == [Tier.GPU] * 2  # no room on the host: [2] * 4 is dropped


def test_a_partial_source_on_the_host_gives_no_room_for_what_its_copy_evicts() -> None:
    manager = two_pools(gpu_blocks=(4, 4), host_blocks=(2, 1))
    run_through(manager, "a", [1] * 4)
    assert manager.offload(1) == 1
    run_through(manager, "b", [2] * 4)
    handle = manager.allocate("c", [1] * 3 + [3] * 13)
    assert handle.num_cached_tokens == 3
    manager.check()
    assert manager.match_prefix([1] * 5).num_tokens == 4


def test_a_pinned_run_on_the_host_gives_no_room_to_swapped_requests() -> None:
    manager = two_pools(gpu_blocks=(8, 8), host_blocks=(8, 3))
    run_through(manager, "a", [1] * 8)
    assert manager.offload(2) == 2
    pin = manager.pin([1] * 8)
    handle = commit_all(manager, manager.allocate("b", [2] * 8))
    assert manager.can_swap_out(handle).status is AllocStatus.LATER
    with pytest.raises(OutOfBlocksError, match="pool 1 on HOST; 1 of 3"):
        manager.swap_out(handle)
    manager.check()
    manager.unpin(pin)
    assert manager.can_swap_out(handle)
    manager.swap_out(handle)
    manager.check()


@pytest.mark.parametrize("unpin_first", [False, True])
def test_a_prefix_pinned_on_the_host_keeps_its_window_when_it_comes_up(unpin_first: bool) -> None:
    manager = two_pools(gpu_blocks=(8, 4), host_blocks=8)
    run_through(manager, "a", [1] * 8)
    assert manager.offload(2) == 2
    pin = manager.pin([1] * 8)
    assert manager.onboard([1] * 8) == 2
    manager.check()
    if unpin_first:
        manager.unpin(pin)
    assert manager.evict(4, pool=1) == (2 if unpin_first else 0)
    manager.check()
    found = manager.match_prefix([1] * 9)
    assert found.tokens_by_tier == ({Tier.HOST: 8} if unpin_first else {Tier.GPU: 8})  # it goes down with its window
    if not unpin_first:
        manager.unpin(pin)
        manager.check()


def test_a_prefix_pinned_on_the_host_and_computed_again_keeps_its_books() -> None:
    manager = two_pools(gpu_blocks=(8, 8), host_blocks=8)
    handle = commit_all(manager, manager.allocate("a", [1] * 3))
    run_through(manager, "b", [1] * 8)
    assert manager.offload(2) == 2
    pin = manager.pin([1] * 8)
    manager.extend(handle, 5)
    manager.commit(handle, [1] * 5)  # takes the place of what is on the host
    manager.check()
    manager.unpin(pin)
    manager.check()
    manager.free(handle)
    manager.check()


def test_a_windowed_group_without_leftovers_does_not_hide_those_of_another() -> None:
    layers = [LayerSpec(kv_heads=1, head_dim=8, window=window) for window in (4, 3)]
    manager = manager_with(*layers, block_size=2)
    first = commit_all(manager, manager.allocate(1, [0, 1, 0, 0, 1]))
    manager.extend(first)
    manager.commit(first, [0])
    commit_all(manager, manager.allocate(2, [0, 1, 1, 1, 1, 1]))
    manager.evict(1)
    manager.allocate(3, [0, 1, 1, 1, 1])
    manager.check()


def test_pinned_leftovers_of_one_windowed_group_do_not_hide_those_of_another() -> None:
    layers = [LayerSpec(kv_heads=1, head_dim=8, window=window) for window in (2, 8)]
    manager = manager_with(*layers, block_size=2, gpu_blocks=40)
    run_through(manager, "a", [1] * 8)
    manager.pin([1] * 8)
    commit_all(manager, manager.allocate("b", [1] * 8 + [2] * 12))  # still reads five blocks
    pool = manager.stats().pool(tier=Tier.GPU)
    assert (pool.cached, pool.pinned) == (15, 5)
    assert manager.evict(100) == 10
    manager.check()


def forget(manager: KVCacheManager, how: str, prefix: list[int]) -> None:
    """Invalidates what begins with `prefix`, each in its way."""
    if how == "prefix":
        manager.invalidate(prefix)
    elif how == "scope":
        manager.invalidate(scope=ReuseScope())
    elif how == "session":
        manager.invalidate(session="s")
    else:
        manager.reset_prefix_cache()
    manager.check()


HOW = pytest.mark.parametrize("how", ["prefix", "scope", "session", "reset"])


@HOW
@pytest.mark.parametrize("layers", [(FULL,), (FULL, LayerSpec(kv_heads=1, head_dim=8, window=8))])
def test_what_a_request_copied_before_an_invalidation_is_not_published(layers: tuple[LayerSpec, ...], how: str) -> None:
    manager = manager_with(*layers, gpu_blocks=40)
    commit_all(manager, manager.allocate("a", [1, 2, 3, 4], session="s"))
    handle = manager.allocate("b", [1, 2, 3, 9])
    assert handle.num_cached_tokens == 3
    (child,) = manager.fork(handle, "c")
    forget(manager, how, [1, 2, 3, 4])
    for live in (handle, child):
        manager.commit(live)
        manager.check()
        assert manager.match_prefix([1, 2, 3, 9, 5]).num_tokens == 0
        manager.extend(live, 5)
        manager.commit(live, [5, 6, 7, 8, 9])
        manager.free(live)
        manager.check()
    assert manager.match_prefix([1, 2, 3, 9, 5]).num_tokens == 0


@HOW
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("written", [0, 3])
def test_what_a_request_wrote_or_computes_during_an_invalidation_is_not_published(
    how: str, swapped: bool, written: int
) -> None:
    manager = manager_with(host_blocks=8)
    handle = manager.allocate("a", [1, 2, 3, 4, 5], session="s")  # nothing is cached, so nothing can be detached
    manager.commit(handle, written)
    if swapped:
        manager.swap_out(handle)
    forget(manager, how, [1, 2, 3, 4])
    assert not manager.match_prefix([1, 2, 3, 4]).in_flight
    if swapped:
        manager.swap_in(handle)
    manager.commit(handle)
    manager.free(handle)
    manager.check()
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 0


def test_an_invalidation_leaves_requests_alone_that_hold_nothing_of_it() -> None:
    manager = manager_with(gpu_blocks=40)
    others = [
        manager.allocate("another prefix", [9, 2, 3, 4], session="t"),
        manager.allocate("not yet there", [1, 2, 3, 4], session="t"),
        manager.allocate("another scope", [1, 2, 3, 4, 5, 6, 7, 8], scope=ReuseScope(tenant="t"), session="t"),
    ]
    manager.invalidate([1, 2, 3, 4, 5, 6, 7, 8])
    manager.invalidate(session="s")
    manager.invalidate(scope=ReuseScope(tenant="s"))
    for handle in others:
        commit_all(manager, handle)
        assert manager.match_prefix([*handle.token_ids.tolist(), 0], handle.scope).num_tokens == len(handle.token_ids)


def test_a_request_that_falls_silent_hands_over_what_it_was_computing() -> None:
    manager = manager_with(gpu_blocks=40)
    manager.allocate("a", [1] * 8, session="s")
    manager.allocate("b", [1] * 8)
    assert "'a'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason
    manager.invalidate(session="s")
    manager.check()
    assert "'b'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason


def test_a_silent_request_goes_on_without_ids() -> None:
    manager = manager_with(gpu_blocks=40)
    handle = commit_all(manager, manager.allocate("a", [1] * 9))
    manager.reset_prefix_cache()
    manager.extend(handle, 8)
    manager.commit(handle, 8)
    manager.check()
    manager.free(handle)
    manager.check()


@HOW
def test_logits_are_forgotten_with_the_block_that_their_prompt_ends_in(how: str) -> None:
    manager = manager_with(gpu_blocks=40)
    manager.allocate("other", [7] * 5)  # so that the scope stays in use
    handle = manager.allocate("a", [1, 2], session="s")
    manager.commit(handle)
    manager.store_last_logits(handle, "old")
    manager.extend(handle, 2)
    manager.commit(handle, [3, 4])
    assert manager.match_prefix([1, 2]).last_logits == "old"
    forget(manager, how, [1, 2, 3, 4])
    manager.free(handle)
    run_through(manager, "b", [1, 2, 3, 4])
    assert manager.match_prefix([1, 2]).last_logits is None


def test_a_request_that_publishes_because_its_fork_ended_is_in_flight_where_it_goes_on() -> None:
    manager = manager_with(block_size=1, gpu_blocks=12)
    handle = manager.allocate("a", [0, 0, 0, 0, 1, 0])
    manager.commit(handle, 2)
    (fork,) = manager.fork(handle, "b")
    manager.commit(handle, 3)  # not published while the fork, which has not written them, holds the same blocks
    manager.free(fork)
    manager.check()
    assert manager.match_prefix([0, 0, 0, 0, 1, 1]).num_tokens == 5
    assert "'a'" in manager.can_allocate([0, 0, 0, 0, 1, 0], wait_for_prefix=True).reason


def test_a_request_whose_fork_shares_blocks_further_on_does_not_grow_into_them() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=1), block_size=1, gpu_blocks=16)
    first = manager.allocate("a", [0] * 9)
    second, third = manager.fork(first, "b", "c")
    manager.commit(second, 5)  # its window has left these blocks, the forks have not written them
    manager.free(third)
    manager.check()
    manager.commit(second, 4)
    manager.check()
    manager.commit(first)
    manager.check()
    for handle in (first, second):
        manager.free(handle)
        manager.check()


@pytest.mark.parametrize("keep", [np.array([True, False]), np.array([]), None, 1, "no"])
def test_a_request_is_not_freed_with_a_flag_that_is_none(keep: Any) -> None:
    manager = manager_with()
    handle = commit_all(manager, manager.allocate("a", [1] * 5))
    for free in (lambda: manager.free(handle, keep=keep), lambda: manager.free_batch([handle], keep=keep)):
        with pytest.raises(InvalidArgumentError, match="keep must be True or False"):
            free()
        manager.check()
    manager.free(handle, keep=np.bool_(False))
    assert manager.stats().num_cached_runs == 0


def test_a_run_takes_no_more_along_because_what_follows_it_gave_way() -> None:
    manager = two_pools(gpu_blocks=(10, 10), host_blocks=(2, 1))
    run_through(manager, "a", list(range(40)))
    assert manager.offload(1) == 1
    assert manager.offload(2) == 2  # on the host its own end gives way, so its last window would begin one block earlier
    manager.check()
    assert manager.stats().offloaded_blocks == 3


def test_forks_publish_shared_blocks_only_after_another_has_copied_all_of_them() -> None:
    manager = manager_with(block_size=2, gpu_blocks=12)
    first = manager.allocate("a", [0] * 9)
    manager.commit(first, 5)
    second, third = manager.fork(first, "b", "c")
    manager.commit(first, 4)  # not published: the others hold the same blocks and have not written them
    manager.commit(third, 3)
    manager.extend(second, 0)  # copies three blocks
    manager.check()
    assert not set(second.block_ids()[2:].tolist()) & set(first.block_ids().tolist())
    assert manager.match_prefix([0] * 9).num_tokens == 8
