"""Where `make mutants` once found a change that no test noticed: how much exactly is counted, kept, told and given back."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import managers
from kvpool import AllocStatus, KVCacheHandle, KVCacheManager, LayerSpec, Retention, ReuseScope, Tier, TokenRange
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.events import Subscription
from kvpool.events.mirror import CacheMirror
from kvpool.eviction import LRUPolicy
from managers import FULL

SLIDING = LayerSpec(kv_heads=2, head_dim=8, window=4)
CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)

make_manager = partial(managers.make_manager, block_size=2)


def running(manager: KVCacheManager, name: str, tokens: Any, **options: Any) -> KVCacheHandle:
    handle = manager.allocate(name, list(tokens), **options)
    manager.commit(handle)
    return handle


def cached(manager: KVCacheManager, pool: int = 0, tier: Tier = Tier.GPU) -> int:
    return manager.stats().pool(pool, tier).cached


# --- swapping ---------------------------------------------------------------------------------------------------------


def test_given_a_swapped_request_whose_prefix_is_cached_then_that_prefix_is_no_room_for_the_rest_of_it() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=8)
    running(manager, "branch", [0, 1, 2, 3, 90, 91])  # so that the prefix is two runs
    away = running(manager, "away", range(9))
    manager.free(manager.get("branch"), keep=False)
    manager.evict(1)
    manager.swap_out(away)  # four full blocks stay cached, one goes to the host
    others = running(manager, "others", range(50, 58))
    assert (cached(manager), manager.get_num_free_blocks()) == (4, 0)
    admission = manager.can_swap_in(away)
    assert (admission.status, admission.blocks_needed, admission.blocks_available) == (AllocStatus.LATER, (1,), (0,))
    with pytest.raises(OutOfBlocksError):
        manager.swap_in(away)
    manager.check()
    manager.free(others)
    assert manager.swap_in(away) == 1
    manager.check()


def test_given_forks_that_share_host_block_0_when_they_come_back_then_they_share_it_again() -> None:
    manager = make_manager(host_blocks=3)
    others = [running(manager, name, [number, number]) for number, name in enumerate(("a", "b", "c"), 1)]
    for other in others:
        manager.swap_out(other)
    manager.free_batch(others[::-1])
    manager.reset_prefix_cache()
    one = manager.allocate("one", [0] * 6)
    manager.mark_written(one, 6)
    manager.commit(one, 2)
    (fork,) = manager.fork(one, "fork")
    manager.commit(one, 4)
    manager.swap_out(one, fork)
    assert one.swapped is not None
    assert one.swapped.ids[0].tolist() == [2, 1, 0]
    manager.evict(1)  # "one" has two blocks left in the cache, its fork may take one of them: both miss the last
    manager.swap_in(one, fork)
    manager.check()
    manager.commit(fork, 4)
    manager.check()
    assert one.block_table() == fork.block_table()


def test_given_a_longer_cached_run_than_a_swapped_request_had_then_its_tail_is_room() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=8)
    away = running(manager, "away", range(9))
    manager.swap_out(away)
    manager.evict(8)
    manager.free(running(manager, "branch", [0, 1, 2, 3, 90, 91]))
    manager.evict(1)
    manager.free(running(manager, "longer", range(12)))  # its second run begins inside what the request had
    running(manager, "others", range(50, 54))
    assert (cached(manager), manager.get_num_free_blocks()) == (6, 0)
    admission = manager.can_swap_in(away)
    assert (admission.status, admission.blocks_needed, admission.blocks_available) == (AllocStatus.OK, (1,), (2,))
    assert manager.swap_in(away) == 1
    assert cached(manager) == 1
    manager.check()


def test_given_places_that_were_never_written_when_a_request_comes_back_then_the_encoders_table_gets_none() -> None:
    manager = make_manager(FULL, CROSS, host_blocks=16)
    handle = running(manager, "a", range(5), cross_tokens=6, lookahead=6)
    before = [handle.block_ids(group) for group in (0, 1)]
    free = manager.get_num_free_blocks()
    manager.swap_out(handle)
    manager.swap_in(handle)
    after = [handle.block_ids(group) for group in (0, 1)]
    assert [len(table) for table in after] == [len(table) for table in before] == [6, 3]
    assert manager.get_num_free_blocks() == free
    manager.check()


# --- windows ----------------------------------------------------------------------------------------------------------


def test_given_a_rewound_reader_then_all_that_it_read_can_be_evicted_although_another_holds_the_run() -> None:
    manager = make_manager(SLIDING, gpu_blocks=32)
    reader = running(manager, "reader", range(12))
    holder = running(manager, "holder", [*range(12), 30])
    for token in range(31, 43):  # its window moves on, block by block, behind the common run
        manager.extend(holder)
        manager.commit(holder, [token])
    manager.rewind(reader, 3)
    idle = cached(manager)
    assert manager.evict(32) == idle
    assert cached(manager) == 0
    assert manager.get_num_free_blocks() == 32 - len(
        {*reader.block_ids().tolist(), *holder.block_ids().tolist()} - {-1}
    )
    manager.check()


def test_given_a_partial_match_of_a_windowed_block_then_its_source_is_no_room() -> None:
    manager = make_manager(SLIDING, gpu_blocks=2)
    manager.free(running(manager, "a", range(4)))
    assert manager.match_prefix([0, 1, 2, 9]).num_tokens == 3
    handle = manager.allocate("b", [0, 1, 2, 9])  # the block that it would copy from must give way to it
    assert handle.num_cached_tokens == 2
    manager.check()


def test_given_a_cached_prefix_beyond_the_window_then_a_prompt_longer_than_the_pool_fits() -> None:
    manager = make_manager(SLIDING, gpu_blocks=5)
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


# --- tiers ------------------------------------------------------------------------------------------------------------


class Listening(LRUPolicy):
    """Notes which runs it was told to have lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[int] = []

    def evicted(self, run: Any) -> None:
        self.lost.append(run.num_blocks)
        super().evicted(run)


def test_given_runs_that_change_their_tier_then_a_policy_is_told_of_those_that_it_lost_only() -> None:
    made: list[Listening] = []

    def make() -> Listening:
        made.append(Listening())
        return made[-1]

    manager = make_manager(host_blocks=16, policy=make)
    manager.free(running(manager, "a", range(6)))
    assert manager.offload(3) == 3
    assert [lost for policy in made for lost in policy.lost] == [3]
    manager.onboard(range(6))
    assert cached(manager) == 3
    assert [lost for policy in made for lost in policy.lost] == [3]


def test_given_a_run_that_is_computed_again_while_it_is_offloaded_then_subscribers_know_every_block_of_it() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=(64, 64), host_blocks=(32, 32))
    subscription = manager.events.subscribe()
    prompt = list(range(16))
    late = manager.allocate("late", prompt)
    (fork,) = manager.fork(late, "fork")
    manager.commit(late)  # published only when the fork lets go of the blocks; by then most have left the window
    for tokens in (
        prompt,
        [*prompt[:8], *range(50, 58)],
    ):  # others part at 8 tokens: that end keeps its windowed blocks
        manager.free(running(manager, "other", tokens))
    manager.evict(32, pool=0)
    below = cached(manager, pool=1, tier=Tier.HOST)
    assert below > 4
    evicted = manager.stats().evictions["capacity"]
    manager.free(fork)
    manager.check()
    assert below - cached(manager, pool=1, tier=Tier.HOST) == 4  # two ends of runs; of one the request has the blocks
    assert manager.stats().evictions["capacity"] - evicted == 2
    assert_subscribers_know(manager, subscription)


def test_given_a_run_that_is_computed_again_with_more_blocks_than_went_down_then_subscribers_are_told_of_them() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=(64, 64), host_blocks=(32, 32))
    subscription = manager.events.subscribe()
    late, other = (manager.allocate(name, range(12)) for name in ("late", "other"))
    manager.commit(other)
    manager.free(other)
    manager.evict(32, pool=0)
    assert cached(manager, pool=1, tier=Tier.HOST) == 2  # those that the end of the run needs
    manager.commit(late)
    assert cached(manager, pool=1, tier=Tier.HOST) == 0
    assert_subscribers_know(manager, subscription)


def assert_subscribers_know(manager: KVCacheManager, subscription: Subscription) -> None:
    """Whoever followed every event knows the same as whoever comes now."""
    followed, fresh = CacheMirror(), CacheMirror()
    followed.apply(subscription.poll().events)
    with manager.events.subscribe() as late:
        fresh.apply(late.poll().events)
    assert followed.blocks == fresh.blocks
    manager.check()


def test_given_a_run_that_came_back_to_the_gpu_then_its_blocks_behind_the_window_can_be_evicted() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=(32, 32), host_blocks=(32, 32))
    system = list(range(8))  # prompts part here, so that its end keeps windowed blocks on every tier
    for number in (1, 2):
        manager.free(running(manager, f"chat {number}", [*system, *range(100 * number, 100 * number + 8)]))
    manager.evict(32, pool=0)
    manager.evict(32, pool=1)
    assert (cached(manager, pool=0), cached(manager, pool=1)) == (0, 0)
    manager.allocate("again", [*system, *range(100, 109)])
    behind = cached(manager, pool=1)
    assert behind > 0
    assert manager.evict(32, pool=1) == behind
    assert cached(manager, pool=1) == 0
    manager.check()


# --- counters ---------------------------------------------------------------------------------------------------------


def test_given_a_fork_then_the_child_counts_what_it_shares_in_tokens_and_in_whole_blocks() -> None:
    manager = make_manager()
    (child,) = manager.fork(running(manager, "a", range(7)), "b")
    assert (child.num_cached_tokens, child.num_cached_blocks) == (7, 3)


@pytest.mark.parametrize("layers", [(FULL,), (FULL, SLIDING)])
def test_given_an_extension_then_the_blocks_of_every_group_are_counted(layers: tuple[LayerSpec, ...]) -> None:
    manager = make_manager(*layers)
    handle = manager.allocate("a", range(4))
    before = manager.stats().blocks_allocated
    assert before == 2 * len(layers)
    manager.extend(handle, 6)
    assert manager.stats().blocks_allocated == before + 3 * len(layers)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_given_a_windowed_prompt_that_two_requests_computed_then_what_the_second_gives_up_is_counted(
    order: tuple[int, int],
) -> None:
    manager = make_manager(SLIDING)
    handles = [manager.allocate(name, range(4)) for name in ("one", "two")]
    assert 0 in {int(block) for handle in handles for block in handle.block_ids()}  # an id like any other
    for number in order:
        manager.commit(handles[number])
    assert manager.stats().blocks_merged == 2
    assert manager.get_num_free_blocks() == 14
    manager.check()


# --- tokens, ranges, memory -------------------------------------------------------------------------------------------


def test_given_tokens_one_by_one_and_then_several_then_all_of_them_are_known() -> None:
    manager = make_manager(block_size=8)  # so that nothing is published in between
    handle = running(manager, "a", range(3))
    batch = manager.batch([handle])
    for token in (30, 31):
        manager.extend_batch(batch)
        manager.commit_batch(batch, [token])
    rows = manager._state.rows
    rows.append_token_ids(handle.row, np.array([40, 41, 42], np.int32))
    assert rows.token_ids(handle.row).tolist() == [0, 1, 2, 30, 31, 40, 41, 42]


def test_given_one_huge_count_among_small_ones_then_it_is_refused() -> None:
    manager = make_manager()
    handles = [running(manager, name, range(3)) for name in ("a", "b")]
    for counts in ([1, 2**40 + 1], [2**40 + 1, 1], [1, -1]):
        with pytest.raises(InvalidArgumentError, match="must not be negative or huge"):
            manager.extend_batch(handles, counts)
    manager.extend_batch(handles, [1, 0])
    assert [handle.num_reserved for handle in handles] == [4, 3]


def test_given_a_range_of_tokens_then_the_priority_ends_with_it() -> None:
    retention = Retention([TokenRange(0, 4, priority=90)])
    assert retention.cuts(num_prompt_tokens=12, block_size=2) == [2, 6]
    manager = make_manager(gpu_blocks=8, policy="priority")
    manager.free(running(manager, "a", range(12), retention=retention))
    manager.free(running(manager, "b", range(50, 54)))
    manager.evict(6)
    assert manager.match_prefix([*range(12), 99]).num_blocks == 2  # what the range holds, and nothing behind it


def test_given_a_long_run_that_was_cut_short_then_the_rest_keeps_no_memory_of_it() -> None:
    manager = make_manager(gpu_blocks=64)
    manager.free(running(manager, "a", range(128)))
    manager.evict(62)
    (run,) = manager._state.cache.tree.root_for(ReuseScope()).children.values()
    assert (run.num_blocks, run.ids[0].base, run.tokens.base) == (2, None, None)


# --- windows ----------------------------------------------------------------------------------------------------------


def test_given_a_request_that_decodes_past_its_window_then_what_it_leaves_behind_stays_cached() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = running(manager, "a", [0, 1])
    for token in range(2, 16):
        manager.extend(handle)
        manager.commit_batch([handle], [token])
    assert [manager.match_prefix([*range(length), 99]).num_tokens for length in (2, 6, 10, 14)] == [2, 6, 10, 14]
    manager.check()
