"""Known bugs of earlier systems (PyAgent, vLLM V0, ferrum, TensorRT-LLM), each done right here."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvpool import (
    AllocStatus,
    CopyKind,
    DType,
    LayerSpec,
    MemoryPressure,
    PressureChange,
    Retention,
    ReuseScope,
    Tier,
    TokenRange,
)
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    KVPoolError,
    NeverFitsError,
    OutOfBlocksError,
    UnknownRequestError,
)
from kvpool.events import Removed, Stored, Updated, to_dict
from kvpool.events.mirror import CacheMirror
from kvpool.eviction import policy_names
from managers import FULL, cached, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)


# --- allocation ------------------------------------------------------------------------------------------------------


def test_extend_grows_when_the_last_block_is_full() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2, 3, 4])
    manager.extend(handle)
    assert handle.num_blocks == 2


def test_extend_uses_the_free_slots_of_the_last_block_first() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    manager.extend(handle, 2)
    assert handle.num_blocks == 1
    manager.extend(handle, 5)
    assert handle.num_blocks == 3


@pytest.mark.parametrize("name", ["p3_allocate", "p4_extend", "v3_allocate_midway", "f30_partial_allocation"])
def test_what_does_not_fit_raises_and_takes_nothing(name: str) -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=2, head_dim=8), gpu_blocks=(4, 2))
    handle = manager.allocate("a", [1, 2, 3, 4])
    free = [pool.free for pool in manager.stats().pools]
    with pytest.raises(OutOfBlocksError):
        manager.extend(handle, 6) if "extend" in name else manager.allocate("b", num_tokens=8)
    assert [pool.free for pool in manager.stats().pools] == free
    assert [len(handle.block_ids(group)) for group in (0, 1)] == [1, 1]  # all groups stay equally long


def test_a_live_id_cannot_be_allocated_again() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    with pytest.raises(DuplicateRequestError):
        manager.allocate("a", [2])
    assert manager.handles == [handle]


def test_a_double_free_is_an_error_and_gives_no_block_two_owners() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    manager.free(handle)
    with pytest.raises(UnknownRequestError):
        manager.free(handle)
    handles = [manager.allocate(i, [100 + i]) for i in range(16)]
    assert len({int(h.block_ids()[0]) for h in handles}) == 16


def test_a_new_owner_sees_no_metadata_of_the_old_one() -> None:
    manager = make_manager(gpu_blocks=2)
    cached(manager, 8)
    handle = manager.allocate("b", num_tokens=8)
    assert (handle.num_written, handle.num_committed, handle.token_ids.tolist()) == (0, 0, [])
    assert handle.stats.cached_tokens == 0


def test_host_ids_never_stand_in_a_gpu_table() -> None:
    manager = make_manager(gpu_blocks=2, host_blocks=8)
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("b", [50])  # no silent fallback to host blocks
    manager.swap_out(handle)
    assert handle.block_table() == [None, None]


def test_can_allocate_says_ok_later_or_never() -> None:
    manager = make_manager(gpu_blocks=4)
    assert manager.can_allocate(num_tokens=16).status is AllocStatus.OK
    manager.allocate("a", [1])
    assert manager.can_allocate(num_tokens=16).status is AllocStatus.LATER
    assert manager.can_allocate(num_tokens=17).status is AllocStatus.NEVER


def test_a_table_lists_each_logical_block_once_however_many_layers_there_are() -> None:
    manager = make_manager(*[FULL] * 12)
    handle = manager.allocate("a", list(range(9)))
    assert (handle.num_blocks, len(handle.block_table())) == (3, 3)


def test_bytes_of_a_block_count_every_layer_once() -> None:
    config = make_manager(*[FULL] * 12).config
    assert config.block_bytes == 12 * 4 * FULL.bytes_per_token
    assert config.pool_bytes(Tier.GPU) == 16 * config.block_bytes


def test_kv_heads_and_k_only_layers_size_the_block() -> None:
    assert LayerSpec(kv_heads=2, head_dim=64).bytes_per_token == 2 * 64 * 2 * 2
    assert LayerSpec(kv_heads=1, head_dim=576, k_only=True).bytes_per_token == 576 * 2


def test_every_dtype_has_its_own_size() -> None:
    sizes = {dtype: LayerSpec(kv_heads=1, head_dim=8, dtype=dtype).bytes_per_token for dtype in DType}
    assert (sizes[DType.BFLOAT16], sizes[DType.FP8_E4M3], sizes[DType.FLOAT32]) == (32, 16, 64)


def test_a_field_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="default_ttl"):
        make_manager(default_ttl=3.0, enable_prefix_caching=False)


def test_threads_never_share_a_block_by_accident() -> None:
    manager = make_manager(gpu_blocks=64)
    owners: list[list[int]] = []

    def work(name: int) -> None:
        for turn in range(50):
            handle = manager.allocate((name, turn), num_tokens=8)
            manager.extend(handle)
            manager.free(handle)
        owners.append(manager.allocate((name, "last"), num_tokens=8).block_ids().tolist())

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flat = [block for blocks in owners for block in blocks]
    assert len(flat) == len(set(flat)) == 8
    manager.check()


def test_unknown_requests_are_errors_everywhere() -> None:
    manager, other = make_manager(), make_manager()
    stranger = other.allocate("a", [1])
    for operation in (manager.free, manager.fork, manager.swap_out, lambda h: manager.extend(h, 1)):
        with pytest.raises(KVPoolError):
            operation(stranger)
    with pytest.raises(UnknownRequestError):
        manager.fork(stranger, "b")


def test_the_table_that_is_handed_out_cannot_be_written() -> None:
    handle = make_manager().allocate("a", [1])
    with pytest.raises(ValueError, match="read-only"):
        handle.block_ids()[0] = 5
    table = handle.block_table()
    assert table == handle.block_table()
    assert table is not handle.block_table()


def test_recency_is_logical_and_not_the_wall_clock() -> None:
    clock = [100.0]
    manager = make_manager(gpu_blocks=4, clock=lambda: clock[0])
    old = cached(manager, 8)
    clock[0] = 0.0  # the clock jumps back; the second prompt is newer all the same
    new = cached(manager, 8, first=50)
    manager.evict(2)
    assert manager.match_prefix([*old, 1]).num_blocks == 0
    assert manager.match_prefix([*new, 1]).num_blocks == 2


def test_defragmentation_really_moves_blocks() -> None:
    manager = make_manager(gpu_blocks=8)
    first, second = manager.allocate("a", num_tokens=8), manager.allocate("b", num_tokens=8)
    manager.free(first)
    assert manager.defragment() == 2
    assert second.block_ids().tolist() == [0, 1]
    assert [op.kind for op in manager.take_copies()] == [CopyKind.DEFRAGMENT]


def test_counters_count_one_thing_in_one_unit() -> None:
    manager = make_manager(gpu_blocks=4)
    manager.allocate("a", num_tokens=12)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("b", num_tokens=8)
    stats = manager.stats()
    assert (stats.requests, stats.blocks_allocated, stats.allocation_failures) == (1, 3, 1)


@pytest.mark.parametrize("num_tokens", [0, -1, -(2**70)])
def test_a_request_needs_a_positive_number_of_tokens(num_tokens: int) -> None:
    with pytest.raises(InvalidArgumentError):
        make_manager().allocate("a", num_tokens=num_tokens)


def test_asking_for_no_blocks_takes_none() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    assert manager.extend(handle, 0).shape == (1, 0)
    assert manager.evict(0) == 0
    assert manager._state.gpu_pools[0].take(0).tolist() == []
    assert manager.get_num_free_blocks() == 15


# --- prefix reuse ----------------------------------------------------------------------------------------------------


def test_a_finished_request_leaves_its_blocks_reusable_and_evictable() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    assert manager.match_prefix([*tokens, 1]).num_tokens == 8
    assert manager.evict(2) == 2
    assert manager.get_num_free_blocks() == 16


def test_blocks_of_live_requests_are_never_evicted() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    assert manager.evict(100) == 0
    assert manager.match_prefix([*range(8), 1]).num_blocks == 2


def test_a_hit_takes_its_references_before_it_takes_new_blocks() -> None:
    manager = make_manager(gpu_blocks=3)
    tokens = cached(manager, 8)
    handle = manager.allocate("a", [*tokens, 1])
    assert handle.num_cached_tokens == 8
    assert sorted(handle.block_ids().tolist()) == [0, 1, 2]


def test_a_pin_survives_eviction_and_a_free_and_ends_with_unpin() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=32)
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 12)
    pin = manager.pin(handle)
    manager.free(handle)
    manager.evict(100)
    assert manager.match_prefix([*range(12), 1]).num_blocks == 3  # every layer group kept what it needs
    manager.unpin(pin)
    manager.evict(100)
    assert manager.stats().pool().free == 32


def test_two_equal_blocks_become_one_and_freeing_either_keeps_it() -> None:
    manager = make_manager()
    twins = [manager.allocate(name, list(range(8))) for name in "ab"]
    for twin in twins:
        manager.commit(twin, 8)
    assert twins[0].block_ids().tolist() == twins[1].block_ids().tolist()
    manager.free(twins[0])
    assert manager.match_prefix([*range(8), 1]).num_blocks == 2
    manager.check()


def test_arc_knows_content_that_comes_back() -> None:
    manager = make_manager(gpu_blocks=4, eviction_policy="arc")
    tokens = cached(manager, 8)
    manager.evict(2)
    for first in (100, 200, 300):
        cached(manager, 4, first)
    cached(manager, 8)  # a ghost hit: it was evicted and is back, so it is worth more than what came once
    manager.evict(1)
    assert manager.match_prefix([*tokens, 1]).num_blocks == 2


def test_equal_tokens_after_another_prefix_are_no_hit() -> None:
    manager = make_manager()
    cached(manager, 8)
    assert manager.match_prefix([9, 9, 9, 9, 4, 5, 6, 7, 1]).num_tokens == 0


def test_block_id_0_is_reused_released_and_never_a_hole() -> None:
    manager = make_manager(gpu_blocks=2)
    tokens = cached(manager, 4)
    handle = manager.allocate("b", [*tokens, 9])
    assert handle.block_ids().tolist() == [0, 1]
    manager.free(handle, keep=False)
    manager.evict(2)
    assert manager.get_num_free_blocks() == 2


def test_fifo_ignores_use_and_lru_does_not() -> None:
    for policy, survivor in (("fifo", 50), ("lru", 0)):
        manager = make_manager(gpu_blocks=8, eviction_policy=policy)
        cached(manager, 8)
        cached(manager, 8, first=50)
        cached(manager, 8)  # used again
        manager.evict(2)
        assert manager.match_prefix([*range(survivor, survivor + 8), 1]).num_blocks == 2, policy


def test_hits_count_contiguous_prefixes_only() -> None:
    manager = make_manager()
    cached(manager, 12)
    manager.allocate("a", [0, 1, 2, 3, 99, 99, 99, 99, 8, 9, 10, 11, 1])
    assert sum(manager.stats().hit_blocks.values()) == 1


def test_reset_under_a_live_request_keeps_its_blocks_and_publishes_nothing_below() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(16)))
    manager.commit(handle, 8)
    before = handle.block_ids().tolist()
    assert manager.reset_prefix_cache() == 2
    manager.commit(handle, 8)
    assert handle.block_ids().tolist() == before
    assert manager.match_prefix([*range(16), 1]).num_tokens == 0
    manager.free(handle)
    assert manager.get_num_free_blocks() == 16
    manager.check()


def test_long_prompts_neither_recurse_nor_confuse_a_short_query() -> None:
    manager = make_manager(block_size=1, gpu_blocks=100_000)
    tokens = np.arange(65_530, 85_530, dtype=np.int32)  # 20,000 blocks, ids above 65,535
    handle = manager.allocate("a", tokens)
    manager.commit(handle, len(tokens))
    assert len(manager.fork(handle, "b")[0].block_ids()) == 20_000
    assert manager.match_prefix(tokens[:3]).num_tokens == 2  # not what the longer entry holds
    for live in manager.handles:
        manager.free(live)
    assert manager.stats().pool().cached == 20_000


def test_an_eviction_that_cannot_free_enough_is_not_begun() -> None:
    manager = make_manager(gpu_blocks=4)
    tokens = cached(manager, 8)
    manager.allocate("live", num_tokens=8)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("b", num_tokens=12)
    assert manager.match_prefix([*tokens, 1]).num_blocks == 2


def test_a_table_longer_than_its_row_grows_and_loses_nothing() -> None:
    manager = make_manager(block_size=1, gpu_blocks=600)
    handle = manager.allocate("a", [1])
    for _ in range(500):
        manager.extend(handle)
    assert len(set(handle.block_ids().tolist())) == handle.num_blocks == 501


# --- vLLM V0 ---------------------------------------------------------------------------------------------------------


def test_touching_a_block_keeps_it_evictable() -> None:
    manager = make_manager(gpu_blocks=4)
    for _ in range(5):
        cached(manager, 16)
    assert manager.evict(4) == 4


def test_a_swap_that_does_not_fit_leaves_the_request_running() -> None:
    manager = make_manager(host_blocks=2)
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 12)
    table = handle.block_ids().tolist()
    with pytest.raises(NeverFitsError):
        manager.swap_out(handle)
    assert (handle.is_swapped, handle.block_ids().tolist()) == (False, table)
    assert manager.stats().pool(tier=Tier.HOST).free == 2
    manager.extend(handle)


def test_a_fork_behind_a_window_works() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = manager.allocate("a", list(range(40)))
    manager.commit(handle, 40)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 4)
    manager.free(handle)
    assert (child.block_ids(1)[-3:] >= 0).all()
    manager.check()


def test_lookahead_on_a_shared_tail_copies_it() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    manager.commit(handle, 2)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 0, lookahead=1)
    assert child.block_ids()[0] != handle.block_ids()[0]


def test_a_parent_is_never_evicted_before_its_child() -> None:
    manager = make_manager(gpu_blocks=6)
    cached(manager, 8)
    long = manager.allocate("a", [*range(8), 50, 51, 52, 53])
    manager.commit(long, 4)
    short = manager.allocate("b", [*range(8), 60])
    manager.free(long)  # the child is idle first, the parent is still read
    manager.free(short)
    manager.evict(1)
    assert manager.match_prefix([*range(8), 50, 51, 52, 53, 1]).num_blocks == 2


def test_forks_swapped_together_stay_shared() -> None:
    manager = make_manager(host_blocks=16)
    handle = manager.allocate("a", list(range(14)))
    manager.commit(handle, 14)
    forks = manager.fork(handle, "b", "c")
    assert manager.swap_out(handle, *forks) == 4
    assert manager.swap_in(handle, *forks) <= 4
    assert len({tuple(h.block_ids().tolist()) for h in (handle, *forks)}) == 1


def test_no_block_is_lost_to_a_placeholder_and_reset_always_works() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=8)
    cached(manager, 16)
    assert manager.reset_prefix_cache() == 4
    assert manager.stats().pool().free == 8


def test_prefix_hits_count_at_admission() -> None:
    manager = make_manager(gpu_blocks=4)
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 12)
    assert manager.can_allocate([*range(12), 1])
    assert not manager.can_allocate([*range(50, 62), 1])


def test_nothing_is_matchable_when_it_is_only_scheduled() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(16)), reserve=8)
    manager.commit(handle, 4)
    assert manager.match_prefix([*range(16), 1]).num_tokens == 4


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    handle = manager.allocate("a", tokens)
    assert (handle.num_cached_tokens, handle.num_reserved) == (7, 8)


def test_scopes_separate_what_equal_tokens_would_join() -> None:
    manager = make_manager()
    tokens = cached(manager, 8, scope=ReuseScope(adapter="lora"))
    assert manager.match_prefix([*tokens, 1]).num_tokens == 0
    assert manager.match_prefix([*tokens, 1], ReuseScope(adapter="lora")).num_tokens == 8


def test_no_host_space_is_an_answer_and_not_the_end() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    manager.commit(handle, 1)
    assert manager.can_swap_out(handle).status is AllocStatus.NEVER


def test_prefix_caching_works_with_sliding_windows_while_the_request_runs() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    assert manager.match_prefix([*range(32), 1]).num_blocks == 8


def test_a_copy_on_write_without_a_free_block_keeps_the_table() -> None:
    manager = make_manager(gpu_blocks=1)
    handle = manager.allocate("a", [1, 2])
    manager.commit(handle, 2)
    (child,) = manager.fork(handle, "b")
    with pytest.raises(OutOfBlocksError):
        manager.extend(child)
    assert child.block_ids().tolist() == handle.block_ids().tolist() == [0]
    manager.check()


def test_copies_are_handed_out_in_the_order_in_which_they_must_run() -> None:
    manager = make_manager(gpu_blocks=2, host_blocks=4, offload_on_evict=False)
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    manager.swap_out(handle)
    other = manager.allocate("b", list(range(50, 58)))
    manager.commit(other, 8)
    manager.swap_out(other)
    manager.swap_in(handle)
    kinds = [op.kind for op in manager.take_copies()]
    assert kinds == [CopyKind.SWAP_OUT, CopyKind.SWAP_OUT, CopyKind.SWAP_IN]
    assert manager.take_copies() == []


def test_the_watermark_of_a_small_pool_is_one_block() -> None:
    manager = make_manager(gpu_blocks=4, watermark=0.01)
    assert manager.can_allocate(num_tokens=12).status is AllocStatus.OK
    assert manager.can_allocate(num_tokens=13).status is AllocStatus.NEVER


def test_the_hit_rate_counts_every_prompt_also_short_ones() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    manager.allocate("short", [77])
    manager.allocate("long", [*tokens, 1])
    stats = manager.stats()
    assert stats.token_hit_rate == 8 / (8 + 1 + 9)
    manager.reset_prefix_cache()
    assert manager.stats().prompt_tokens == 18  # forgetting content does not forget statistics


# --- ferrum ----------------------------------------------------------------------------------------------------------


def test_swaps_plan_the_copies_of_their_data() -> None:
    manager = make_manager(host_blocks=8)
    handle = manager.allocate("a", [1, 2, 3])
    manager.commit(handle, 3)
    manager.swap_out(handle)
    manager.swap_in(handle)
    out, back = manager.take_copies()
    assert (out.kind, back.kind) == (CopyKind.SWAP_OUT, CopyKind.SWAP_IN)
    assert out.dst.tolist() == back.src.tolist()


def test_a_swapped_request_keeps_nothing_that_another_one_may_get() -> None:
    manager = make_manager(gpu_blocks=2, host_blocks=8, enable_prefix_caching=False)
    first = manager.allocate("a", num_tokens=8)
    manager.commit(first, 8)
    manager.swap_out(first)
    second = manager.allocate("b", num_tokens=8)  # gets the very same GPU ids
    manager.commit(second, 8)
    manager.swap_out(second)
    manager.swap_in(first)
    manager.free(first)
    manager.swap_in(second)
    manager.check()
    assert manager.stats().pool(tier=Tier.HOST).free == 8


def test_only_swapped_requests_can_be_swapped_in() -> None:
    manager = make_manager(host_blocks=4)
    handle = manager.allocate("a", [1])
    with pytest.raises(KVPoolError, match="not swapped out"):
        manager.swap_in(handle)


def test_freeing_a_swapped_request_frees_its_host_blocks() -> None:
    manager = make_manager(host_blocks=4)
    handle = manager.allocate("a", [1, 2, 3])
    manager.commit(handle, 3)
    manager.swap_out(handle)
    manager.free(handle)
    assert manager.stats().pool(tier=Tier.HOST).free == 4
    manager.check()


def test_copy_on_write_copies_one_block_with_its_data_for_whoever_writes() -> None:
    manager = make_manager()
    original = manager.allocate("a", list(range(10)))
    manager.commit(original, 10)
    (clone,) = manager.fork(original, "b")
    free = manager.get_num_free_blocks()
    manager.extend(clone)  # room in the last block: no new block, but a copy
    assert manager.get_num_free_blocks() == free - 1
    assert (clone.block_ids() != original.block_ids()).tolist() == [False, False, True]
    (op,) = manager.take_copies()
    assert (op.num_blocks, op.num_tokens) == (1, 2)
    assert manager.stats().copies_on_write == 1


def test_a_fork_outlives_its_parent() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    (child,) = manager.fork(handle, "b")
    manager.free(handle)
    assert manager.get("b") is child
    assert manager.get_num_free_blocks() == 15
    manager.free(child)
    assert manager.get_num_free_blocks() == 16


def test_a_shared_prefix_sets_lengths_and_positions_of_the_new_request() -> None:
    manager = make_manager()
    first = manager.allocate("a", list(range(8)))
    manager.commit(first, 8)
    second = manager.allocate("b", [*range(8), 50])
    assert (second.num_written, second.num_committed, second.num_reserved) == (8, 8, 9)
    assert second.block_ids()[:2].tolist() == first.block_ids().tolist()


def test_a_lookup_is_one_walk_however_many_prefixes_are_stored() -> None:
    manager = make_manager(gpu_blocks=4096)
    for first in range(0, 40_000, 40):
        cached(manager, 4, first)
    root = next(iter(manager._state.cache.tree.roots.values()))
    assert len(root.children or ()) == 1000
    assert manager.match_prefix([400, 401, 402, 403, 1]).num_blocks == 1


def test_last_logits_hit_only_at_their_exact_length() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(6)))
    manager.commit(handle, 6)
    manager.store_last_logits(handle, "logits")
    manager.extend(handle, 2)
    manager.commit(handle, [6, 7])
    assert manager.match_prefix(list(range(6))).last_logits == "logits"
    for length in (4, 5, 7, 8):
        assert not manager.match_prefix(list(range(length))).has_last_logits


def test_gc_frees_what_expired_and_says_how_much() -> None:
    clock = [0.0]
    manager = make_manager(clock=lambda: clock[0])
    cached(manager, 8, ttl=5.0)
    cached(manager, 4, first=50)
    assert manager.gc() == 0
    clock[0] = 5.0
    assert manager.gc() == 2
    assert manager.get_num_free_blocks() == 15


def test_a_fresh_pool_is_all_free_and_under_no_pressure() -> None:
    manager = make_manager()
    changes: list[PressureChange] = []
    manager.on_memory_pressure(changes.append)
    manager.allocate("a", [1])
    assert (manager.stats().pool().free, manager.pressure, changes) == (15, MemoryPressure.LOW, [])


def test_every_level_is_reached_on_every_allocation_path() -> None:
    manager = make_manager(gpu_blocks=20)
    seen: list[MemoryPressure] = []
    manager.on_memory_pressure(lambda change: seen.append(change.level))
    handle = manager.allocate("a", num_tokens=48)
    manager.extend(handle, 16)
    manager.commit(handle, 62)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 10)
    assert seen == [MemoryPressure.MEDIUM, MemoryPressure.HIGH, MemoryPressure.CRITICAL]


def test_a_model_without_host_tier_works() -> None:
    assert make_manager(host_blocks=0).stats().pool().total == 16


def test_clock_never_names_a_victim_twice() -> None:
    manager = make_manager(gpu_blocks=8, eviction_policy="clock")
    for first in range(0, 80, 10):
        cached(manager, 4, first)
    assert manager.evict(100) == 8
    assert manager.get_num_free_blocks() == 8
    manager.check()


def test_shared_blocks_are_counted_once() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    manager.fork(handle, "b", "c")
    assert manager.stats().pool().referenced == 2
    assert manager.usage == 2 / 16


# --- TensorRT-LLM ----------------------------------------------------------------------------------------------------


def test_used_blocks_of_the_gpu_do_not_include_the_host() -> None:
    manager = make_manager(host_blocks=100)
    manager.allocate("a", [1])
    pool = manager.stats().pool()
    assert (pool.total, pool.referenced) == (16, 1)


def test_descendants_and_partly_reused_leaves_never_vanish_without_an_event() -> None:
    manager = make_manager()
    subscription, mirror = manager.subscribe(), CacheMirror()
    cached(manager, 16)
    manager.allocate("partial", [0, 1, 2, 3, 4, 5, 99])  # copies from a leaf that stays in the index
    mirror.apply(subscription.poll().events)
    assert len(mirror.blocks[0]) == 4
    manager.invalidate(list(range(4)))  # the ancestor goes, its descendants with it
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
    manager.offload(1)
    manager.reset_prefix_cache()
    kinds = {to_dict(event)["type"] for event in subscription.poll().events}
    assert kinds == {"created", "stored", "removed", "updated"}


def test_counters_of_both_tiers_survive_moves_to_and_fro() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=4)
    tokens = cached(manager, 16)
    for _ in range(3):
        assert manager.offload(4) == 4
        assert manager.stats().pool(tier=Tier.HOST).cached == 4
        assert manager.onboard([*tokens, 1]) == 4
        assert manager.stats().pool().cached == 4
        manager.check()


def test_empty_host_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=4)
    first = cached(manager, 8)
    manager.offload(2)
    cached(manager, 8, first=50)
    manager.offload(2)
    assert manager.match_prefix([*first, 1]).tokens_by_tier == {Tier.HOST: 8}


def test_free_cached_blocks_are_not_counted_twice() -> None:
    manager = make_manager(gpu_blocks=4)
    tokens = cached(manager, 12)  # three cached, one free
    answer = manager.can_allocate([*tokens, *range(50, 54)])
    assert (answer.blocks_needed, answer.blocks_available) == ((1,), (1,))
    manager.allocate("one", [90])
    assert manager.can_allocate([*tokens, *range(50, 54)]).status is AllocStatus.LATER


def test_every_window_slides_at_its_own_pace() -> None:
    manager = make_manager(FULL, SLIDING, LayerSpec(kv_heads=1, head_dim=8, window=16), gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    dropped = [list(handle.block_table(group)).count(None) for group in range(3)]
    assert dropped == [0, 6, 4]


def test_a_replaced_block_is_copied() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    manager.commit(handle, 2)
    (child,) = manager.fork(handle, "b")
    manager.extend(child)
    assert [op.num_tokens for op in manager.take_copies()] == [2]


def test_sink_tokens_stay_readable_and_reusable() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4), gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    table = list(handle.block_table(1))
    assert table[0] is not None
    assert table[1] is None
    assert manager.match_prefix([*range(32), 1]).num_blocks == 8


def test_a_retention_ends_with_its_duration_also_for_runs_that_were_split_since() -> None:
    clock = [0.0]
    manager = make_manager(clock=lambda: clock[0])
    cached(manager, 16, retention=Retention([TokenRange(0, None, 90, duration=10.0)]))
    splitter = manager.allocate("b", [*range(8), 99])
    manager.free(splitter)
    clock[0] = 10.0
    manager.gc()
    assert {node.priority for node in manager._state.cache.tree.nodes()} == {35}


def test_a_parent_on_the_gpu_may_leave_while_its_children_are_on_the_host() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=2, offload_on_evict=False)
    tokens = cached(manager, 16)
    manager.offload(2)  # the last two blocks
    assert manager.evict(2) == 2  # drops their parents: nothing may stay below a hole
    assert manager.match_prefix([*tokens, 1]).num_blocks == 0
    assert manager.stats().pool(tier=Tier.HOST).free == 2
    manager.check()


def test_a_request_freed_before_it_wrote_anything_leaves_nothing_to_match() -> None:
    manager = make_manager()
    manager.free(manager.allocate("a", list(range(8))))
    assert manager.match_prefix([*range(8), 1]).num_tokens == 0
    assert manager.get_num_free_blocks() == 16


def test_a_commit_under_memory_pressure_never_detaches_its_own_blocks() -> None:
    manager = make_manager(gpu_blocks=4)
    handle = manager.allocate("a", list(range(4)))
    manager.commit(handle, 4)
    cached(manager, 8, first=50)
    for token in range(4, 15):
        manager.extend(handle)
        manager.commit_batch([handle], [token])
    assert manager.match_prefix([*range(16), 1]).num_tokens == 12
    manager.check()


def test_a_priority_level_that_ran_empty_is_passed_over() -> None:
    manager = make_manager(gpu_blocks=8, eviction_policy="priority")
    for first, priority in ((0, 10), (50, 50), (100, 90)):
        cached(manager, 4, first, retention=Retention([TokenRange(0, None, priority)]))
    assert [manager.evict(1) for _ in range(4)] == [1, 1, 1, 0]


def test_different_images_behind_equal_placeholders_never_match() -> None:
    manager = make_manager()
    cat, dog = ReuseScope(multimodal=(("cat", 0),)), ReuseScope(multimodal=(("dog", 0),))
    tokens = cached(manager, 8, scope=cat)
    assert manager.match_prefix([*tokens, 1], dog).num_tokens == 0
    assert manager.match_prefix([*tokens, 1], cat).num_tokens == 8


def test_partial_matches_are_found_among_thousands_of_children() -> None:
    manager = make_manager(gpu_blocks=4096)
    for first in range(2000):
        cached(manager, 4, first * 10)
    assert manager.match_prefix([10_000, 10_001, 7, 7]).num_partial_tokens == 2


def test_reading_events_never_waits_unless_asked_and_gaps_show() -> None:
    manager = make_manager(event_buffer_size=2)
    subscription = manager.subscribe()
    assert subscription.wait(0) is True  # the snapshot
    assert subscription.poll().missed == 0
    assert subscription.wait(0) is False
    for first in range(0, 100, 10):
        cached(manager, 4, first)
    assert subscription.poll().missed == 8


def test_forks_publish_slide_and_rewind_like_any_sequence() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 12)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 12)
    manager.commit(child, list(range(50, 62)))
    assert manager.match_prefix([*range(12), *range(50, 62), 1]).num_blocks == 6
    assert list(child.block_table(1)).count(None) == 4
    manager.rewind(child, 2)
    assert child.num_committed == 22
    manager.check()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_a_sequence_has_exactly_ceil_tokens_over_block_size_blocks(num_tokens: int) -> None:
    assert make_manager().allocate("a", num_tokens=num_tokens).num_blocks == -(-num_tokens // 4)


def test_every_pool_counts_at_admission() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=4, head_dim=8), gpu_blocks=(100, 2))
    answer = manager.can_allocate(num_tokens=9)
    assert (answer.status, answer.blocks_needed) == (AllocStatus.NEVER, (3, 3))


def test_updates_and_removals_name_the_tier_the_block_was_on() -> None:
    manager = make_manager(host_blocks=4)
    subscription = manager.subscribe()
    cached(manager, 8)
    manager.offload(2)
    manager.evict(2, tier=Tier.HOST)
    moved = [e for e in subscription.poll().events if isinstance(e, (Updated, Removed))]
    assert isinstance(moved[0], Updated)
    assert (moved[0].old_tier, moved[0].new_tier) == (Tier.GPU, Tier.HOST)
    assert isinstance(moved[-1], Removed)
    assert moved[-1].tier is Tier.HOST


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_deadlocks_or_loops_on_its_first_eviction(policy: str) -> None:
    manager = make_manager(gpu_blocks=4, eviction_policy=policy)
    for first in range(0, 100, 10):
        cached(manager, 8, first)
    manager.check()
