from __future__ import annotations

from functools import partial

import pytest

import managers
from kvpool import CopyKind, KVCacheManager, LayerSpec, Retention, Tier, TokenRange
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.events.mirror import CacheMirror
from managers import FULL, cached

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)


def keeping(priority: int) -> Retention:
    return Retention([TokenRange(0, None, priority)])


make_manager = partial(managers.make_manager, gpu_blocks=4, host_blocks=4, disk_blocks=4)


def tiers(manager: KVCacheManager, tokens: list[int]) -> dict[str, int]:
    """Blocks of a prompt by the tier they lie on."""
    manager.check()
    found = manager.match_prefix([*tokens, 999_999]).tokens_by_tier
    return {tier.name: num_tokens // 4 for tier, num_tokens in found.items()}


def test_evicted_runs_go_down_one_tier_at_a_time_and_leave_at_the_bottom() -> None:
    manager = make_manager()
    prompts = [cached(manager, 16, 100 * i) for i in range(4)]
    assert [tiers(manager, prompt) for prompt in prompts] == [{}, {"DISK": 4}, {"HOST": 4}, {"GPU": 4}]


def test_without_a_host_tier_runs_go_straight_to_the_disk() -> None:
    manager = make_manager(host_blocks=0)
    first = cached(manager, 16)
    cached(manager, 16, 100)
    assert tiers(manager, first) == {"DISK": 4}


def test_without_offloading_evicted_runs_are_dropped() -> None:
    manager = make_manager(offload_on_evict=False)
    first = cached(manager, 16)
    cached(manager, 16, 100)
    assert tiers(manager, first) == {}
    assert manager.cache.offload(4) == 4  # asked for by name it still works


def test_the_tail_of_a_run_goes_first_and_the_rest_stays_matchable() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    assert manager.cache.offload(1) == 1
    assert tiers(manager, tokens) == {"GPU": 3, "HOST": 1}
    assert manager.cache.offload(2) == 2
    assert tiers(manager, tokens) == {"GPU": 1, "HOST": 3}
    assert manager.cache.offload(1, tier=Tier.HOST) == 1
    assert tiers(manager, tokens) == {"GPU": 1, "HOST": 2, "DISK": 1}


def test_every_move_plans_its_copy() -> None:
    manager = make_manager()
    cached(manager, 8)
    manager.take_copies()
    manager.cache.offload(2)
    manager.cache.offload(2, tier=Tier.HOST)
    manager.cache.onboard(list(range(8)))
    ops = manager.take_copies()
    assert [(op.kind, op.src_tier, op.dst_tier) for op in ops] == [
        (CopyKind.OFFLOAD, Tier.GPU, Tier.HOST),
        (CopyKind.OFFLOAD, Tier.HOST, Tier.DISK),
        (CopyKind.ONBOARD, Tier.DISK, Tier.GPU),
    ]
    assert ops[0].dst.tolist() == ops[1].src.tolist()
    assert ops[1].dst.tolist() == ops[2].src.tolist()


def test_offloading_moves_no_more_than_there_is_and_than_fits() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=2, disk_blocks=0)
    tokens = cached(manager, 16)
    assert manager.cache.offload(0) == 0
    assert manager.cache.offload(1) == 1
    assert manager.cache.offload(100) == 1  # of a run of three the last one: one host block is left
    assert tiers(manager, tokens) == {"GPU": 2, "HOST": 2}
    assert make_manager().cache.offload(4) == 0


def test_a_full_lower_tier_makes_room_by_its_own_order() -> None:
    manager = make_manager(disk_blocks=0)
    first, second = cached(manager, 8), cached(manager, 8, 100)
    manager.cache.offload(4)
    third = cached(manager, 8, 200)
    manager.cache.offload(2)
    assert [tiers(manager, prompt) for prompt in (first, second, third)] == [{}, {"HOST": 2}, {"HOST": 2}]


def test_of_an_evicted_run_that_is_longer_than_the_tier_below_the_first_part_goes_down() -> None:
    manager = make_manager(host_blocks=3, disk_blocks=0)
    tokens = cached(manager, 16)
    assert manager.cache.evict(4) == 4
    assert tiers(manager, tokens) == {"HOST": 3}
    assert manager.stats().evictions["explicit"] == 4


@pytest.mark.parametrize("policy", ["priority", "adaptive"])
def test_what_gives_way_to_a_run_gives_way_to_the_part_of_it_that_fits_beside_more_important_ones(policy: str) -> None:
    manager = make_manager(disk_blocks=0, eviction_policy=policy)
    important = cached(manager, 8, retention=keeping(90))
    low = cached(manager, 8, 100, retention=keeping(0))
    manager.cache.offload(4)
    usual = cached(manager, 16, 200)
    cached(manager, 16, 300)
    assert [tiers(manager, prompt) for prompt in (important, low, usual)] == [{"HOST": 2}, {}, {"HOST": 2}]


def test_offloading_uses_the_room_that_gave_way_and_leaves_the_rest_where_it_is() -> None:
    manager = make_manager(disk_blocks=0, eviction_policy="priority")
    important = cached(manager, 8, retention=keeping(90))
    low = cached(manager, 8, 100, retention=keeping(0))
    manager.cache.offload(4)
    usual = cached(manager, 16, 200)
    assert manager.cache.offload(4) == 2
    assert [tiers(manager, prompt) for prompt in (important, low)] == [{"HOST": 2}, {}]
    assert tiers(manager, usual) == {"GPU": 2, "HOST": 2}


def test_there_is_nothing_below_the_last_tier() -> None:
    manager = make_manager(disk_blocks=0)
    for tier in (Tier.HOST, Tier.DISK):
        with pytest.raises(InvalidArgumentError, match=f"no tier below {tier.name}"):
            manager.cache.offload(1, tier=tier)


# --- up --------------------------------------------------------------------------------------------------------------


def test_a_hit_on_a_lower_tier_comes_back_and_is_counted_by_its_source() -> None:
    manager = make_manager(gpu_blocks=8)
    tokens = cached(manager, 16)
    manager.cache.offload(3)
    manager.cache.offload(1, tier=Tier.HOST)
    assert tiers(manager, tokens) == {"GPU": 1, "HOST": 2, "DISK": 1}
    handle = manager.allocate("a", [*tokens, 1])
    assert handle.num_cached_tokens == 16
    stats = manager.stats()
    assert stats.hit_tokens == {"GPU": 4, "HOST": 8, "DISK": 4, "REMOTE": 0}
    assert stats.hit_blocks == {"GPU": 1, "HOST": 2, "DISK": 1, "REMOTE": 0}
    assert handle.stats.cached_tokens_from_lower_tiers == 12
    assert tiers(manager, tokens) == {"GPU": 4}


def test_a_partial_hit_is_counted_by_its_source_too() -> None:
    manager = make_manager(gpu_blocks=8)
    tokens = cached(manager, 8)
    manager.cache.offload(1)
    handle = manager.allocate("a", [*tokens[:6], 99])
    assert manager.stats().hit_tokens == {"GPU": 4, "HOST": 2, "DISK": 0, "REMOTE": 0}
    assert manager.stats().partial_hit_tokens == 2
    assert (handle.stats.partial_tokens, handle.stats.cached_tokens_from_lower_tiers) == (2, 2)


def test_a_hit_on_a_lower_tier_needs_room_on_the_gpu() -> None:
    manager = make_manager(gpu_blocks=4)
    tokens = cached(manager, 16)
    manager.cache.offload(4)
    manager.allocate("live", num_tokens=8)
    answer = manager.can_allocate([*tokens[:12], 1])
    assert (answer.blocks_needed, answer.blocks_available, bool(answer)) == ((4,), (2,), False)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("a", [*tokens[:12], 1])
    assert tiers(manager, tokens) == {"HOST": 4}


def test_onboarding_brings_a_prefix_up_ahead_of_its_request() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    manager.cache.offload(4)
    assert manager.cache.onboard(tokens[:9]) == 2  # whole blocks of the prefix only
    assert tiers(manager, tokens) == {"GPU": 2, "HOST": 2}
    assert manager.cache.onboard(tokens[:8]) == 0
    assert manager.cache.onboard([7, 7, 7, 7]) == 0
    assert manager.stats().onboarded_blocks == 2


def test_onboarding_needs_room_for_whole_blocks_also_where_a_part_of_the_next_one_is_cached() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=8, copy_on_partial_reuse=False)
    tokens = cached(manager, 16)
    manager.cache.offload(4)
    manager.take_copies()
    manager.allocate("a", num_tokens=8)
    with pytest.raises(OutOfBlocksError, match="onboarding"):
        manager.cache.onboard(tokens[:14])  # three blocks, and half of a fourth
    assert manager.stats().pool().cached == 0
    manager.check()


def test_onboarding_that_does_not_fit_moves_nothing() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    manager.cache.offload(4)
    manager.allocate("live", num_tokens=12)
    with pytest.raises(OutOfBlocksError, match="onboarding"):
        manager.cache.onboard(tokens)
    assert tiers(manager, tokens) == {"HOST": 4}


def test_a_run_that_is_computed_again_takes_the_new_blocks_and_frees_the_old() -> None:
    manager = make_manager(gpu_blocks=8)
    tokens = cached(manager, 8)
    handle = manager.allocate("a", [50])
    manager.commit(handle, 1)
    manager.rewind(handle, 1)
    manager.extend(handle, 4)
    manager.cache.offload(2)
    manager.take_copies()
    manager.commit(handle, tokens[:4])  # what the host holds, but nobody looked for it
    assert tiers(manager, tokens) == {"GPU": 1, "HOST": 1}
    assert manager.take_copies() == []  # the data is here already
    assert manager.stats().pool(tier=Tier.HOST).free == 3


# --- windows ---------------------------------------------------------------------------------------------------------


def test_windowed_runs_move_what_they_still_have() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=16, host_blocks=16, disk_blocks=0)
    handle = manager.allocate("a", list(range(24)))
    manager.commit(handle, 24)
    manager.cache.evict(4)
    manager.free(handle)
    manager.cache.offload(100)
    pool = manager.stats().pool(tier=Tier.HOST)
    assert pool.cached == 6 + 2
    assert tiers(manager, list(range(24))) == {"HOST": 6}
    again = manager.allocate("b", [*range(24), 1])
    assert again.num_cached_tokens == 24
    manager.check()
    manager.free(again)
    assert manager.cache.evict(100) > 0
    manager.check()


def test_given_the_first_block_of_a_pool_outside_the_window_then_it_does_not_move_down_either() -> None:
    manager = make_manager(LayerSpec(1, 8), LayerSpec(1, 16, window=4), gpu_blocks=(8, 8), host_blocks=(8, 8))
    handle = manager.allocate("a", list(range(16)))
    assert handle.block_ids(1).tolist() == [0, 1, 2, 3]
    manager.commit(handle, 16)
    manager.free(handle)
    assert manager.cache.offload(4) == 4
    assert manager.stats().pool(1, Tier.HOST).cached == 1  # the last window
    assert manager.stats().pool(1).free == 8
    manager.check()


def test_unread_windowed_blocks_above_an_offloaded_part_can_still_be_evicted() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=40, host_blocks=40)
    whole = manager.allocate("whole", list(range(40)))
    manager.commit(whole, 40)
    manager.allocate("half", [*range(20), 99])
    manager.free(whole)
    manager.cache.offload(8)
    pool = manager.stats().pool()
    # all that counts as supply can really be had
    manager.allocate("rest", num_tokens=(pool.free + pool.cached) // 2 * 4)
    manager.check()


def test_a_mirror_follows_windowed_runs_through_all_tiers() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=40, host_blocks=40)
    subscription, mirror = manager.subscribe(), CacheMirror(windows={1: 2})
    handle = manager.allocate("a", list(range(40)))
    manager.commit(handle, 40)
    manager.cache.evict(4)
    manager.free(handle)
    manager.cache.offload(30)
    mirror.apply(subscription.poll().events)
    again = manager.allocate("b", list(range(21)))  # it parts from the run inside it, where no window went along
    assert again.num_cached_tokens == 0
    manager.commit(again)
    mirror.apply(subscription.poll().events)
    assert tiers(manager, list(range(20))) == {"GPU": 5}
    manager.cache.reset()
    mirror.apply(subscription.poll().events)
    assert [len(blocks) for blocks in mirror.blocks.values()] == [0, 0]


def test_several_pools_move_together() -> None:
    wide = LayerSpec(kv_heads=2, head_dim=8)
    manager = make_manager(FULL, wide, gpu_blocks=(8, 8), host_blocks=(8, 2), disk_blocks=0)
    tokens = cached(manager, 16)
    assert manager.cache.offload(3) == 2  # the second pool of the host has room for two
    assert tiers(manager, tokens) == {"GPU": 2, "HOST": 2}


def test_a_dropped_parent_takes_its_children_on_lower_tiers_along() -> None:
    manager = make_manager(offload_on_evict=False)
    tokens = cached(manager, 16)
    manager.cache.offload(2)
    manager.cache.offload(1, tier=Tier.HOST)
    assert tiers(manager, tokens) == {"GPU": 2, "HOST": 1, "DISK": 1}
    manager.cache.evict(1)
    assert tiers(manager, tokens) == {"GPU": 1}
    assert manager.stats().pool(tier=Tier.HOST).free == 4
    assert manager.stats().pool(tier=Tier.DISK).free == 4


def test_the_last_window_of_a_run_stays_and_moves_with_it() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=40, host_blocks=20, disk_blocks=0)
    tokens = cached(manager, 40)
    assert manager.cache.evict(8) == 8  # what lies before the last window goes first, and alone
    assert tiers(manager, tokens) == {"GPU": 10}
    manager.cache.evict(12)
    assert tiers(manager, tokens) == {"HOST": 10}
    again = manager.allocate("again", [*tokens, 1])
    assert again.num_cached_tokens == 40
    copies = [(op.kind, op.group, len(op.src)) for op in manager.take_copies() if op.kind is CopyKind.ONBOARD]
    assert sum(num for _, group, num in copies if group == 0) == 10
    assert sum(num for _, group, num in copies if group == 1) == 2
    manager.check()


def test_the_window_before_a_place_where_prompts_part_stays() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=60, host_blocks=0, disk_blocks=0)
    cached(manager, 40)
    parting = manager.allocate("parts", [*range(20), *range(100, 120)])
    manager.commit(parting)
    manager.free(parting)
    while manager.cache.evict(1) and manager.match_prefix([*range(40), 1]).num_tokens == 40:
        assert manager.match_prefix([*range(20), 1]).num_tokens == 20
    manager.check()


def test_a_conversation_that_goes_on_gives_up_the_window_of_its_last_turn() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=40, host_blocks=0, disk_blocks=0)
    cached(manager, 20)
    cached(manager, 40)
    # window of 8 tokens: of ten blocks the last two are needed, not the two at the end of the first turn
    assert manager.cache.evict(8) == 8
    assert tiers(manager, list(range(40))) == {"GPU": 10}
    assert tiers(manager, list(range(20))) == {}


def test_a_run_without_its_window_is_not_offloaded() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=20, host_blocks=20, disk_blocks=0)
    first = cached(manager, 20)
    live = manager.allocate("live", list(range(40)))
    manager.commit(live)
    manager.cache.evict(manager.stats().pool().cached)  # the conversation went on: the window in its middle goes alone
    manager.free(live, keep=False)
    assert tiers(manager, first) == {}
    assert manager.cache.evict(5) == 5
    assert manager.stats().offloaded_blocks == 0
    manager.check()


def test_given_a_host_tier_cut_to_nothing_then_no_run_goes_to_the_disk_above_one_that_has_no_blocks() -> None:
    ends_chunks = LayerSpec(kv_heads=1, head_dim=8, chunk=4)  # nothing before the end of a block is read behind it
    manager = make_manager(ends_chunks)
    cached(manager, 12)
    assert manager.cache.offload(1) == 1
    manager.cache.resize(0, tier=Tier.HOST)
    assert manager.cache.offload(2) == 0
    manager.check()
    assert manager.cache.evict(2) == 2
    manager.check()
