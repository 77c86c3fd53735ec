"""Bugs that were found once, each named after the behaviour it broke and reduced to the few calls that showed it."""

from __future__ import annotations

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
    TokenRange,
)
from kvpool.errors import InvalidArgumentError, OutOfBlocksError

FULL = LayerSpec(kv_heads=1, head_dim=8)


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
    assert len(manager._state.cache.calendar._heap) < 200


def test_leftovers_of_windows_do_not_pile_up_with_requests() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=4), block_size=2)
    for number in range(2000):
        manager.free(commit_all(manager, manager.allocate(number, [number % 2] * 6)))
    pool = manager.stats().pool()
    assert all(len(queue) <= 2 * pool.total + 64 for queue in manager._state.cache.leftovers)
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
