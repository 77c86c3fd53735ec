"""Sliding windows, chunks and sinks: what is read, kept and given back."""

from __future__ import annotations

import pytest

from kvpool import AllocStatus, GroupKind, KVCacheManager, LayerSpec, Tier
from kvpool.errors import OutOfBlocksError
from managers import FULL, commit_all, computed, make_manager, manager_of_pairs, manager_with, num_cached

WINDOW_OF_8 = LayerSpec(kv_heads=1, head_dim=8, window=8)
WINDOW_OF_4 = LayerSpec(kv_heads=2, head_dim=8, window=4)


def run_through(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    manager.free(commit_all(manager, manager.allocate(name, tokens)))


def test_given_a_rewound_reader_then_all_that_it_read_can_be_evicted_although_another_holds_the_run() -> None:
    manager = manager_of_pairs(WINDOW_OF_4, gpu_blocks=32)
    reader = computed(manager, "reader", range(12))
    holder = computed(manager, "holder", [*range(12), 30])
    for token in range(31, 43):  # its window moves on, block by block, behind the common run
        manager.extend(holder)
        manager.commit(holder, [token])
    manager.rewind(reader, 3)
    idle = num_cached(manager)
    assert manager.cache.evict(32) == idle
    assert num_cached(manager) == 0
    assert manager.inspect.num_free_blocks() == 32 - len(
        {*reader.block_ids().tolist(), *holder.block_ids().tolist()} - {-1}
    )
    manager.check()


def test_given_a_partial_match_of_a_windowed_block_then_its_source_is_no_room() -> None:
    manager = manager_of_pairs(WINDOW_OF_4, gpu_blocks=2)
    manager.free(computed(manager, "a", range(4)))
    assert manager.match_prefix([0, 1, 2, 9]).num_tokens == 3
    handle = manager.allocate("b", [0, 1, 2, 9])  # the block that it would copy from must give way to it
    assert handle.num_cached_tokens == 2
    manager.check()


def test_given_a_cached_prefix_beyond_the_window_then_a_prompt_longer_than_the_pool_fits() -> None:
    manager = manager_of_pairs(WINDOW_OF_4, gpu_blocks=5)
    handle = manager.allocate("a", [0, 1])
    manager.commit(handle)
    for token in range(2, 14):
        manager.extend(handle)
        manager.commit(handle, [token])
    manager.free(handle)
    cold = manager.can_allocate(range(100, 114))
    warm = manager.can_allocate(range(14))
    assert (cold.status, warm.status) == (AllocStatus.NEVER, AllocStatus.OK)
    assert manager.allocate("b", range(14)).num_cached_tokens >= 12
    manager.check()


def test_given_a_run_that_came_back_to_the_gpu_then_its_blocks_behind_the_window_can_be_evicted() -> None:
    manager = manager_of_pairs(FULL, WINDOW_OF_4, gpu_blocks=(32, 32), host_blocks=(32, 32))
    system = list(range(8))  # prompts part here, so that its end keeps windowed blocks on every tier
    for number in (1, 2):
        manager.free(computed(manager, f"chat {number}", [*system, *range(100 * number, 100 * number + 8)]))
    manager.cache.evict(32, pool=0)
    manager.cache.evict(32, pool=1)
    assert (num_cached(manager, pool=0), num_cached(manager, pool=1)) == (0, 0)
    manager.allocate("again", [*system, *range(100, 109)])
    behind = num_cached(manager, pool=1)
    assert behind > 0
    assert manager.cache.evict(32, pool=1) == behind
    assert num_cached(manager, pool=1) == 0
    manager.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_given_a_windowed_prompt_that_two_requests_computed_then_what_the_second_gives_up_is_counted(
    order: tuple[int, int],
) -> None:
    manager = manager_of_pairs(WINDOW_OF_4)
    handles = [manager.allocate(name, range(4)) for name in ("one", "two")]
    assert 0 in {int(block) for handle in handles for block in handle.block_ids()}  # an id like any other
    for number in order:
        manager.commit(handles[number])
    assert manager.stats().blocks_merged == 2
    assert manager.inspect.num_free_blocks() == 14
    manager.check()


def test_given_a_request_that_decodes_past_its_window_then_what_it_leaves_behind_stays_cached() -> None:
    manager = manager_of_pairs(FULL, WINDOW_OF_4, gpu_blocks=64)
    handle = computed(manager, "a", [0, 1])
    for token in range(2, 16):
        manager.extend(handle)
        manager.commit_batch([handle], [token])
    assert [manager.match_prefix([*range(length), 99]).num_tokens for length in (2, 6, 10, 14)] == [2, 6, 10, 14]
    manager.check()


def test_a_fork_behind_a_window_works() -> None:
    manager = make_manager(FULL, WINDOW_OF_8, gpu_blocks=64)
    handle = manager.allocate("a", list(range(40)))
    manager.commit(handle, 40)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 4)
    manager.free(handle)
    assert (child.block_ids(1)[-3:] >= 0).all()
    manager.check()


def test_prefix_caching_works_with_sliding_windows_while_the_request_runs() -> None:
    manager = make_manager(FULL, WINDOW_OF_8, gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    assert manager.match_prefix([*range(32), 1]).num_blocks == 8


def test_every_window_slides_at_its_own_pace() -> None:
    manager = make_manager(FULL, WINDOW_OF_8, LayerSpec(kv_heads=1, head_dim=8, window=16), gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    dropped = [list(handle.block_table(group)).count(None) for group in range(3)]
    assert dropped == [0, 6, 4]


def test_sink_tokens_stay_readable_and_reusable() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4), gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    table = list(handle.block_table(1))
    assert table[0] is not None
    assert table[1] is None
    assert manager.match_prefix([*range(32), 1]).num_blocks == 8


def test_leftovers_of_windows_do_not_pile_up_with_requests() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=4), block_size=2)
    for number in range(2000):
        manager.free(commit_all(manager, manager.allocate(number, [number % 2] * 6)))
    pool = manager.stats().pool()
    assert all(len(queue) <= 2 * pool.total + 64 for queue in manager._cache.leftovers)
    manager.check()
    assert manager.cache.evict(pool.total) == pool.cached
    manager.check()


def test_a_rewind_into_the_sinks_lets_go_of_them() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=32, window=4, sink_tokens=3), block_size=2)
    handle = commit_all(manager, manager.allocate("a", [0, 0]))
    manager.rewind(handle, 1)
    manager.check()
    manager.free(handle)
    manager.check()


def test_an_admission_does_not_evict_windowed_blocks_that_it_is_about_to_read() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=6), block_size=2, gpu_blocks=14)
    first = [1] * 10
    manager.free(commit_all(manager, manager.allocate("first", first)))
    assert manager.cache.evict(2) == 2  # what had left its window
    manager.free(commit_all(manager, manager.allocate("second", [2] * 6)))  # younger, fills the pool
    again = manager.allocate("again", [*first, 3])
    assert again.num_cached_tokens == 10
    manager.check()


def test_a_partial_block_that_must_go_does_not_leave_a_window_with_a_hole() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2, partial_match=False)
    manager.free(commit_all(manager, manager.allocate("a", [1] * 8)))
    assert manager.cache.evict(2) == 2  # windowed blocks 1 and 2 of 4 are gone, the last one is there
    manager.allocate("b", [*[1] * 7, 2])  # its last whole block is the third: nothing to read in its window
    manager.check()


def test_defragment_ignores_what_a_table_says_about_blocks_that_left_the_window() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2, gpu_blocks=12)
    filler = manager.allocate("filler", num_tokens=4)
    manager.free(commit_all(manager, manager.allocate("a", [0] * 6)))
    commit_all(manager, manager.allocate("b", [0] * 6 + [1]))
    assert manager.cache.evict(2) == 2  # windowed blocks that "b" has passed
    manager.free(filler)
    manager.cache.defragment()
    manager.check()


def test_windowed_blocks_can_be_evicted_after_their_pin_ends() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2, gpu_blocks=20)
    commit_all(manager, manager.allocate("a", [0] * 12))
    pin = manager.cache.pin([0] * 8)
    manager.free(commit_all(manager, manager.allocate("b", [0] * 4 + [1])))  # cuts the pinned run in two
    manager.cache.evict(100)
    manager.cache.unpin(pin)
    assert manager.cache.evict(1) == 1
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


def test_idle_windowed_blocks_before_a_partial_block_of_the_same_run_are_no_supply() -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=1, head_dim=8, window=4), block_size=2, gpu_blocks=11)
    commit_all(manager, manager.allocate("a", [0] * 10))  # one block is free, three windowed ones are unread
    prompt = [0] * 7 + [1] * 3  # needs four, and reads one of the three
    assert manager.can_allocate(prompt).status is not AllocStatus.OK
    with pytest.raises(OutOfBlocksError, match="free or evictable"):
        manager.allocate("b", prompt)
    manager.check()


def test_a_windowed_group_without_leftovers_does_not_hide_those_of_another() -> None:
    layers = [LayerSpec(kv_heads=1, head_dim=8, window=window) for window in (4, 3)]
    manager = manager_with(*layers, block_size=2)
    first = commit_all(manager, manager.allocate(1, [0, 1, 0, 0, 1]))
    manager.extend(first)
    manager.commit(first, [0])
    commit_all(manager, manager.allocate(2, [0, 1, 1, 1, 1, 1]))
    manager.cache.evict(1)
    manager.allocate(3, [0, 1, 1, 1, 1])
    manager.check()


def test_pinned_leftovers_of_one_windowed_group_do_not_hide_those_of_another() -> None:
    layers = [LayerSpec(kv_heads=1, head_dim=8, window=window) for window in (2, 8)]
    manager = manager_with(*layers, block_size=2, gpu_blocks=40)
    run_through(manager, "a", [1] * 8)
    manager.cache.pin([1] * 8)
    commit_all(manager, manager.allocate("b", [1] * 8 + [2] * 12))  # still reads five blocks
    pool = manager.stats().pool(tier=Tier.GPU)
    assert (pool.cached, pool.pinned) == (15, 5)
    assert manager.cache.evict(100) == 10
    manager.check()


def test_a_chunk_ends_while_a_window_before_it_stays() -> None:
    window, chunk = LayerSpec(kv_heads=1, head_dim=8, window=6), LayerSpec(kv_heads=1, head_dim=8, chunk=16)
    manager = make_manager(window, chunk, gpu_blocks=32)
    handle = manager.allocate("a", list(range(15)))
    manager.commit(handle)
    of = {group.kind: group.index for group in manager.config.groups}
    before = handle.block_ids(of[GroupKind.SLIDING]).tolist()
    manager.extend(handle)
    manager.commit(handle, [15])
    assert handle.block_ids(of[GroupKind.SLIDING]).tolist() == before
    assert handle.block_ids(of[GroupKind.CHUNKED]).tolist() == [-1] * 4
    manager.check()
