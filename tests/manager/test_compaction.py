from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import CopyKind, KVCacheHandle, KVCacheManager, LayerSpec, Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from managers import FULL, make_manager, running

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4)


def used_ids(manager: KVCacheManager, tier: Tier = Tier.GPU) -> list[int]:
    pool = manager._cache.pools[0][tier]
    return sorted(set(range(pool.num_blocks)) - set(pool.free_ids().tolist()))


class Memory:
    """The bytes behind the blocks, as far as these tests need them: what was written where."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.contents: dict[tuple[int, Tier, int], object] = {}

    def write(self, handle: KVCacheHandle) -> None:
        for group in range(len(self.manager.config.groups)):
            for column, block in enumerate(handle.block_table(group)):
                if block is not None:
                    self.contents[group, Tier.GPU, block] = (handle.request_id, group, column)

    def run_copies(self) -> None:
        for op in self.manager.take_copies():
            moved = [self.contents.get((op.group, op.src_tier, block)) for block in op.src.tolist()]
            for block, value in zip(op.dst.tolist(), moved, strict=True):
                self.contents[op.group, op.dst_tier, block] = value

    def expect(self, handle: KVCacheHandle) -> None:
        for group in range(len(self.manager.config.groups)):
            for column, block in enumerate(handle.block_table(group)):
                if block is not None:
                    assert self.contents[group, Tier.GPU, block] == (handle.request_id, group, column)


# --- defragment ------------------------------------------------------------------------------------------------------


def test_live_blocks_move_to_the_lowest_ids_with_the_fewest_moves() -> None:
    manager = make_manager()
    handles = [running(manager, i, 8, first=100 * i) for i in range(4)]
    manager.free(handles[0], keep=False)
    manager.free(handles[2], keep=False)
    assert manager.cache.defragment() == 2  # blocks 6 and 7; 2 and 3 stay
    assert used_ids(manager) == [0, 1, 2, 3]
    assert handles[1].block_ids().tolist() == [2, 3]
    assert handles[3].block_ids().tolist() == [0, 1]
    assert manager.stats().defragmented_blocks == 2
    manager.check()


def test_a_pool_without_holes_is_left_alone_and_hands_out_low_ids_next() -> None:
    manager = make_manager()
    first, second = running(manager, "a", 8), running(manager, "b", 8, first=100)
    manager.free(second, keep=False)
    assert manager.cache.defragment() == 0
    assert manager.take_copies() == []
    assert manager.allocate("c", num_tokens=8).block_ids().tolist() == [2, 3]
    assert first.block_ids().tolist() == [0, 1]


def test_a_pool_without_holes_hands_out_low_ids_next_in_whatever_order_they_became_free() -> None:
    manager = make_manager()
    handles = [running(manager, name, 8, first=100 * i) for i, name in enumerate("abc")]
    for handle in handles[1:]:
        manager.free(handle, keep=False)
    assert manager.cache.defragment() == 0
    assert manager.allocate("d", num_tokens=16).block_ids().tolist() == [2, 3, 4, 5]


def test_the_blocks_of_a_sequence_become_neighbours_where_they_can() -> None:
    manager = make_manager(enable_prefix_caching=False)
    filler, first, second = (manager.allocate(name, num_tokens=16) for name in ("filler", "a", "b"))
    manager.free(filler)
    manager.free(first)
    manager.cache.defragment()
    assert second.block_ids().tolist() == [0, 1, 2, 3]


def test_given_two_holes_then_a_block_moves_right_behind_its_predecessor_and_not_to_the_lower_one() -> None:
    manager = make_manager(enable_prefix_caching=False)
    low, first, high, second = (manager.allocate(name, num_tokens=4) for name in ("low", "a", "high", "b"))
    manager.extend(first, 4)
    assert first.block_ids().tolist() == [1, 4]
    manager.free(low)
    manager.free(high)
    manager.cache.defragment()
    assert (first.block_ids().tolist(), second.block_ids().tolist()) == ([1, 2], [0])


def test_shared_and_cached_blocks_move_once_and_everybody_follows() -> None:
    manager = make_manager()
    memory = Memory(manager)
    filler = running(manager, "filler", 8, first=500)
    parent = running(manager, "parent", 10)
    memory.write(parent)
    (child,) = manager.fork(parent, "child")
    manager.free(filler, keep=False)
    assert manager.cache.defragment() == 2
    assert parent.block_ids().tolist() == child.block_ids().tolist()
    memory.run_copies()
    memory.expect(parent)
    assert manager.match_prefix([*range(8), 1]).num_blocks == 2
    manager.check()


def test_windowed_groups_and_their_pins_move_too() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    filler = running(manager, "filler", 24, first=500)
    handle = running(manager, "a", 24)
    pin = manager.cache.pin(handle)
    memory = Memory(manager)
    memory.write(handle)
    manager.free(filler, keep=False)
    assert manager.cache.defragment() > 0
    memory.run_copies()
    memory.expect(handle)
    manager.check()
    manager.free(handle)
    manager.cache.evict(100)
    manager.check()
    manager.cache.unpin(pin)
    assert manager.cache.evict(100) > 0
    manager.check()


@pytest.mark.parametrize("forked", [False, True])
def test_given_a_request_that_decodes_past_its_window_then_what_it_left_moves_with_its_run(forked: bool) -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=60)
    first = running(manager, "first", 32)
    handle = manager.allocate("a", list(range(100, 104)))
    manager.commit(handle)
    handles = [handle, *manager.fork(handle, "b")] if forked else [handle]
    for token in range(24):
        manager.extend_batch(handles)
        manager.commit_batch(handles, [token + number for number in range(len(handles))])
    manager.free(first, keep=False)
    manager.cache.evict(2)
    assert manager.cache.defragment() > 8
    manager.check()
    assert used_ids(manager) == list(range(len(used_ids(manager))))
    manager.free_batch(handles)
    manager.check()
    assert manager.match_prefix([*range(100, 104), *range(24), 1]).num_tokens == 28


def test_host_blocks_of_swapped_requests_and_cached_runs_move_on_the_host() -> None:
    manager = make_manager(host_blocks=16)
    first, second = running(manager, "a", 10), running(manager, "b", 10, first=100)
    memory = Memory(manager)
    memory.write(first)
    memory.write(second)
    manager.swap_out(first)
    manager.swap_out(second)
    manager.free(first)
    manager.cache.offload(4)
    manager.cache.evict(2, tier=Tier.HOST)
    assert manager.cache.defragment(Tier.HOST) > 0
    assert used_ids(manager, Tier.HOST) == list(range(len(used_ids(manager, Tier.HOST))))
    manager.check()
    manager.cache.reset()
    manager.swap_in(second)
    memory.run_copies()
    memory.expect(second)


def test_copies_planned_before_are_not_changed_by_a_later_move() -> None:
    manager = make_manager(host_blocks=8)
    for name, first in (("a", 0), ("b", 100)):
        manager.free(running(manager, name, 8, first))
    manager.cache.offload(4)
    manager.cache.evict(2, tier=Tier.HOST)
    before = [(op.src.tolist(), op.dst.tolist()) for op in manager._cache.copies]
    assert manager.cache.defragment(Tier.HOST) == 2
    after = [(op.src.tolist(), op.dst.tolist()) for op in manager.take_copies()]
    assert after[: len(before)] == before
    assert after[len(before) :] == [([2, 3], [0, 1])]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.sets(st.integers(0, 6)))
def test_after_any_frees_the_live_blocks_are_the_lowest_and_their_bytes_are_kept(
    lengths: list[int], freed: set[int]
) -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=128)
    memory = Memory(manager)
    handles = [running(manager, i, length, first=1000 * i) for i, length in enumerate(lengths)]
    for handle in handles:
        memory.write(handle)
    for index in sorted(freed & set(range(len(handles)))):
        manager.free(handles[index], keep=index % 2 == 0)
    before = used_ids(manager)
    moves = manager.cache.defragment()
    assert used_ids(manager) == list(range(len(before)))
    assert moves == sum(block >= len(before) for block in before)  # no scheme can do with fewer
    memory.run_copies()
    for handle in manager.handles:
        memory.expect(handle)
    manager.check()


# --- resize ----------------------------------------------------------------------------------------------------------


def test_a_pool_grows_under_live_requests() -> None:
    manager = make_manager(gpu_blocks=2)
    handle = running(manager, "a", 8)
    with pytest.raises(OutOfBlocksError):
        manager.extend(handle)
    assert manager.cache.resize(4) == (4, 0, 0)
    manager.extend(handle, 8)
    assert handle.num_blocks == 4
    manager.check()


def test_a_pool_shrinks_by_moving_live_blocks_and_keeping_their_bytes() -> None:
    manager = make_manager(gpu_blocks=8)
    memory = Memory(manager)
    filler, handle = running(manager, "filler", 16, first=500), running(manager, "a", 14)
    memory.write(handle)
    manager.free(filler, keep=False)
    result = manager.cache.resize(4)
    assert (result.num_blocks, result.num_evicted, result.num_moved) == (4, 0, 4)
    assert [op.kind for op in manager._cache.copies] == [CopyKind.DEFRAGMENT]
    memory.run_copies()
    memory.expect(handle)
    manager.extend(handle, 2)
    manager.check()


def test_a_pool_shrinks_by_evicting_idle_cache_tail_first() -> None:
    manager = make_manager(gpu_blocks=8)
    manager.free(running(manager, "a", 24))
    assert manager.cache.resize(4) == (4, 2, 0)
    assert manager.match_prefix([*range(24), 1]).num_blocks == 4
    assert manager.stats().evictions["resize"] == 2
    manager.check()


def test_a_pool_that_is_in_use_cannot_shrink_and_says_how_much_is() -> None:
    manager = make_manager(gpu_blocks=8, max_pinned_tokens=100)
    running(manager, "a", 12)
    manager.free(running(manager, "b", 8, first=100))
    manager.cache.pin(list(range(100, 108)))
    with pytest.raises(OutOfBlocksError, match="cannot shrink to 4 blocks: 5 are in use or pinned"):
        manager.cache.resize(4)
    assert manager.stats().pool().total == 8
    manager.check()


def test_the_host_pool_can_be_taken_away_and_given_back() -> None:
    manager = make_manager(host_blocks=8)
    manager.free(running(manager, "a", 8))
    manager.cache.offload(2)
    assert manager.cache.resize(0, tier=Tier.HOST).num_evicted == 2
    with pytest.raises(InvalidArgumentError, match="no tier below GPU"):
        manager.cache.offload(1)
    manager.free(running(manager, "b", 8, first=100))
    manager.cache.evict(1)  # nowhere to go: dropped
    manager.cache.resize(4, tier=Tier.HOST)
    assert manager.cache.offload(1) == 1
    manager.check()


def test_a_resize_is_announced() -> None:
    manager = make_manager()
    subscription = manager.subscribe()
    subscription.poll()
    manager.cache.resize(20)
    (event,) = subscription.poll().events
    assert (event.pools[0].tier, event.pools[0].num_blocks) == (Tier.GPU, 20)


def test_the_pressure_is_measured_against_the_new_size() -> None:
    manager = make_manager(gpu_blocks=100)
    running(manager, "a", 16)
    assert manager.inspect.pressure.name == "LOW"
    manager.cache.resize(4)
    assert manager.inspect.pressure.name == "CRITICAL"
    manager.cache.resize(100)
    assert manager.inspect.pressure.name == "LOW"


def test_one_pool_of_several_is_resized() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=2, head_dim=8), gpu_blocks=(8, 8))
    handle = running(manager, "a", 12)
    manager.cache.resize(4, pool=1)
    assert [pool.total for pool in manager.stats().pools] == [8, 4]
    assert (handle.block_ids(1) < 4).all()
    manager.check()


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, 2**40, 2**70, True, 4.0, "4", None])
def test_a_size_that_cannot_be_is_refused(num_blocks: Any) -> None:
    manager = make_manager()
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        manager.cache.resize(num_blocks)


def test_resizing_to_the_same_size_changes_nothing() -> None:
    manager = make_manager()
    handle = running(manager, "a", 8)
    before = handle.block_ids().copy()
    assert manager.cache.resize(16) == (16, 0, 0)
    assert np.array_equal(handle.block_ids(), before)
