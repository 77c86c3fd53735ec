"""Runs that are copied to the host before they are evicted: write-through, and after so many uses."""

from __future__ import annotations

from functools import partial

import pytest

import managers
from kvpool import CopyKind, CopyOp, KVCacheManager, LayerSpec, Retention, Tier, TokenRange
from managers import FULL, cached, running

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)

make_manager = partial(managers.make_manager, gpu_blocks=4, host_blocks=8, host_write="through")


def keeping(priority: int) -> Retention:
    return Retention([TokenRange(0, None, priority)])


def tiers(manager: KVCacheManager, tokens: list[int]) -> dict[str, int]:
    """Blocks of a prompt by the tier they lie on."""
    manager.check()
    found = manager.match_prefix([*tokens, 999_999]).tokens_by_tier
    return {tier.name: num_tokens // 4 for tier, num_tokens in found.items()}


def moves(manager: KVCacheManager) -> list[tuple[CopyKind, Tier, Tier, int]]:
    """The planned copies, and how many blocks each has."""
    manager.check()
    return [(op.kind, op.src_tier, op.dst_tier, op.num_blocks) for op in manager.take_copies()]


def host(manager: KVCacheManager) -> tuple[int, int]:
    """Free and cached blocks of the host."""
    pool = manager.stats().pool(tier=Tier.HOST)
    return pool.free, pool.cached


def test_a_run_is_copied_when_its_last_reader_leaves_and_evicted_without_a_copy() -> None:
    manager = make_manager()
    handle = running(manager, "a", 16)
    assert moves(manager) == []
    manager.free(handle)
    assert moves(manager) == [(CopyKind.OFFLOAD, Tier.GPU, Tier.HOST, 4)]
    assert tiers(manager, list(range(16))) == {"GPU": 4}
    assert host(manager) == (4, 4)
    assert manager.cache.evict(4) == 4
    assert moves(manager) == []
    assert tiers(manager, list(range(16))) == {"HOST": 4}
    assert host(manager) == (4, 4)
    assert manager.stats().blocks_copied_ahead == 4


def test_what_comes_back_from_the_host_leaves_its_copy_there() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    manager.cache.evict(4)
    manager.take_copies()
    cached(manager, 16)
    assert moves(manager) == [(CopyKind.ONBOARD, Tier.HOST, Tier.GPU, 4)]
    assert tiers(manager, tokens) == {"GPU": 4}
    manager.cache.evict(4)
    assert moves(manager) == []
    assert tiers(manager, tokens) == {"HOST": 4}


def test_written_back_runs_are_copied_when_they_are_evicted_and_not_before() -> None:
    manager = make_manager(host_write="back")
    cached(manager, 16)
    assert moves(manager) == []
    manager.cache.evict(4)
    assert moves(manager) == [(CopyKind.OFFLOAD, Tier.GPU, Tier.HOST, 4)]
    assert manager.stats().blocks_copied_ahead == 0


def test_a_run_whose_copy_was_evicted_is_written_back() -> None:
    manager = make_manager(host_blocks=4)
    tokens = cached(manager, 16)
    cached(manager, 16)
    assert manager.cache.evict(4, tier=Tier.HOST) == 4  # its host copy
    manager.take_copies()
    manager.cache.evict(4)
    assert moves(manager) == [(CopyKind.OFFLOAD, Tier.GPU, Tier.HOST, 4)]
    assert tiers(manager, tokens) == {"HOST": 4}


# --- who gives way ---------------------------------------------------------------------------------------------------


def test_host_copies_are_room_for_swapped_requests_and_nothing_is_lost_with_them() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=4)
    tokens = cached(manager, 16)
    live = running(manager, "live", 16, 100)
    assert host(manager) == (0, 4)
    assert manager.can_swap_out(live)
    assert manager.swap_out(live) == 4
    assert tiers(manager, tokens) == {"GPU": 4}
    assert host(manager) == (0, 0)


def test_a_swapped_request_is_no_room_for_host_copies() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=4)
    live = running(manager, "live", 16, 100)
    manager.swap_out(live)
    manager.take_copies()
    cached(manager, 16)
    assert moves(manager) == []
    assert host(manager) == (0, 0)


def test_the_youngest_host_copies_give_way_first() -> None:
    manager = make_manager(gpu_blocks=12, host_blocks=8)
    old, young = cached(manager, 16), cached(manager, 16, 100)
    live = running(manager, "live", 16, 200)
    manager.swap_out(live)
    manager.take_copies()
    assert manager.cache.evict(4) == 4
    assert moves(manager) == []  # the old one's host copy is there
    assert [tiers(manager, prompt) for prompt in (old, young)] == [{"HOST": 4}, {"GPU": 4}]


def test_a_host_copy_pushes_out_runs_of_the_host_in_their_order_but_no_other_host_copy() -> None:
    manager = make_manager(gpu_blocks=12, host_blocks=8)
    first, second = cached(manager, 16), cached(manager, 16, 100)
    manager.cache.evict(8)
    assert [tiers(manager, prompt) for prompt in (first, second)] == [{"HOST": 4}, {"HOST": 4}]
    copied = [cached(manager, 16, 100 * i) for i in (2, 3, 4)]
    assert [tiers(manager, prompt) for prompt in (first, second)] == [{}, {}]
    manager.take_copies()
    assert manager.cache.evict(4) == 4
    assert moves(manager) == []
    assert tiers(manager, copied[0]) == {"HOST": 4}
    assert manager.stats().blocks_copied_ahead == 16  # the last one found no room


@pytest.mark.parametrize("policy", ["priority", "adaptive"])
def test_the_host_copy_of_an_unimportant_run_pushes_no_important_one_out(policy: str) -> None:
    manager = make_manager(host_blocks=4, eviction_policy=policy)
    important = cached(manager, 16, retention=keeping(90))
    manager.cache.evict(4)
    cached(manager, 16, 100, retention=keeping(0))
    assert tiers(manager, important) == {"HOST": 4}


def test_runs_below_the_least_priority_for_offloading_are_not_copied() -> None:
    manager = make_manager(offload_min_priority=35)
    cached(manager, 16, retention=keeping(34))
    assert moves(manager) == []


def test_a_run_that_finds_no_room_on_the_disk_costs_no_host_copy_on_the_host() -> None:
    manager = make_manager(gpu_blocks=12, host_blocks=12, disk_blocks=4, eviction_policy="priority")
    important = cached(manager, 16, retention=keeping(90))
    manager.cache.evict(4)
    manager.cache.evict(4, tier=Tier.HOST)
    below = cached(manager, 16, 100, retention=keeping(20))
    manager.cache.evict(4)
    assert [tiers(manager, prompt) for prompt in (important, below)] == [{"DISK": 4}, {"HOST": 4}]
    cached(manager, 16, 200, retention=keeping(10))
    cached(manager, 32, 300, retention=keeping(30))  # its host copy takes the place of the run on the host
    assert [tiers(manager, prompt) for prompt in (important, below)] == [{"DISK": 4}, {}]
    manager.take_copies()
    manager.cache.evict(4)
    assert moves(manager) == []  # the host copy of the least important one is still there


def test_a_host_copy_pushes_out_no_other_host_copy_also_where_important_runs_stay() -> None:
    manager = make_manager(gpu_blocks=12, eviction_policy="priority")
    cached(manager, 16, retention=keeping(90))
    manager.cache.evict(4)
    cached(manager, 16, 200, retention=keeping(10))
    cached(manager, 16, 300, retention=keeping(30))
    assert moves(manager)[1:] == [(CopyKind.OFFLOAD, Tier.GPU, Tier.HOST, 4)]  # for the second one alone
    manager.cache.evict(4)
    assert moves(manager) == []


def test_without_a_host_tier_nothing_is_copied_ahead() -> None:
    manager = make_manager(host_blocks=0, disk_blocks=8)
    tokens = cached(manager, 16)
    assert moves(manager) == []
    manager.cache.evict(4)
    assert tiers(manager, tokens) == {"DISK": 4}


# --- what happens to a run happens to its host copy ---------------------------------------------------------------------


def test_a_run_is_cut_with_its_host_copy() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    manager.take_copies()
    assert manager.cache.evict(1) == 1
    assert tiers(manager, tokens) == {"GPU": 3, "HOST": 1}
    assert moves(manager) == []
    parting = manager.allocate("parts", [*tokens[:4], 77])
    manager.free(parting)
    manager.cache.evict(4)
    assert moves(manager) == []
    assert tiers(manager, tokens) == {"HOST": 4}


@pytest.mark.parametrize("reads", [False, True])
def test_invalidated_runs_lose_their_host_copy_at_once(reads: bool) -> None:
    manager = make_manager(gpu_blocks=8)
    tokens = cached(manager, 16)
    if reads:
        manager.allocate("reader", [*tokens, 1])
    assert manager.cache.invalidate(tokens[:8]) == 3
    manager.check()
    assert host(manager) == (7, 1)
    assert manager.cache.reset() == 1
    manager.check()
    assert host(manager) == (8, 0)


def test_a_pinned_run_keeps_its_place_and_its_host_copy_may_go() -> None:
    manager = make_manager(max_pinned_tokens=64)
    tokens = cached(manager, 16)
    manager.cache.pin(tokens)
    assert manager.stats().pool(tier=Tier.HOST).pinned == 0
    assert manager.cache.resize(2, tier=Tier.HOST).num_evicted == 4
    assert tiers(manager, tokens) == {"GPU": 4}
    assert host(manager) == (2, 0)


def test_host_copies_move_with_their_pool() -> None:
    manager = make_manager(host_blocks=12)
    first = cached(manager, 16)
    manager.cache.evict(4)
    second = cached(manager, 16, 100)
    manager.take_copies()
    manager.cache.invalidate(first)
    manager.cache.invalidate(first[:4])
    assert manager.cache.defragment(Tier.HOST) == 4
    (move,) = manager.take_copies()
    manager.cache.evict(4)
    assert moves(manager) == []
    (run,) = [run for run in manager.inspect.runs() if run.tier == Tier.HOST]
    assert run.block_ids[0].tolist() == move.dst.tolist() == [0, 1, 2, 3]
    assert tiers(manager, second) == {"HOST": 4}


def test_a_host_copy_is_seen_as_cached_blocks_of_the_host() -> None:
    manager = make_manager()
    cached(manager, 16)
    (op,) = manager.take_copies()
    block = manager.inspect.block(int(op.dst[1]), tier=Tier.HOST)
    assert (block.state.value, block.position, block.is_published) == ("cached", 4, True)


def test_subscribers_hear_of_a_host_copy_when_its_run_is_evicted() -> None:
    manager = make_manager()
    subscription = manager.subscribe()
    cached(manager, 16)
    kinds = [type(event).__name__ for event in subscription.poll().events]
    assert kinds == ["Created", "Stored"]
    manager.cache.evict(4)
    (moved,) = subscription.poll().events
    assert (type(moved).__name__, moved.old_tier, moved.new_tier, len(moved.digests)) == (
        "Updated",
        Tier.GPU,
        Tier.HOST,
        4,
    )


# --- windows ---------------------------------------------------------------------------------------------------------


def copied(ops: list[CopyOp], group: int) -> int:
    return sum(op.num_blocks for op in ops if op.group == group)


def test_of_windows_only_what_the_end_of_a_run_needs_is_copied() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=24, host_blocks=24)
    tokens = cached(manager, 24)
    ops = manager.take_copies()
    assert (copied(ops, 0), copied(ops, 1)) == (6, 2)
    manager.cache.evict(12)
    assert moves(manager) == []
    assert tiers(manager, tokens) == {"HOST": 6}
    again = manager.allocate("again", [*tokens, 1])
    assert again.num_cached_tokens == 24
    manager.check()


def test_windowed_blocks_that_leave_the_gpu_alone_leave_the_host_copy_too() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=24, host_blocks=24)
    first = cached(manager, 20)
    ops = manager.take_copies()
    assert copied(ops, 1) == 2
    live = manager.allocate("live", list(range(40)))
    manager.commit(live)
    free, _ = host(manager)
    manager.cache.evict(manager.stats().pool().cached)  # the conversation went on: the window in its middle goes alone
    manager.check()
    assert host(manager)[0] == free + 2
    assert tiers(manager, first) == {}
