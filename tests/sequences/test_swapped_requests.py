"""Requests on the host: what they share, what they give up, and what comes back with them."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import AllocStatus, CopyKind, KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.errors import KVPoolError, NeverFitsError, OutOfBlocksError
from managers import FULL, commit_all, computed, make_manager, manager_of_pairs, manager_with, num_cached

CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)


def two_pools(**options: Any) -> KVCacheManager:
    """A full and a windowed group with a pool each."""
    layers = LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=2, head_dim=8, window=8)
    return manager_with(*layers, eviction_policy="lru", **options)


def run_through(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    manager.free(commit_all(manager, manager.allocate(name, tokens)))


def test_given_a_swapped_request_whose_prefix_is_cached_then_that_prefix_is_no_room_for_the_rest_of_it() -> None:
    manager = manager_of_pairs(gpu_blocks=8, host_blocks=8)
    computed(manager, "branch", [0, 1, 2, 3, 90, 91])  # so that the prefix is two runs
    away = computed(manager, "away", range(9))
    manager.free(manager.get("branch"), keep=False)
    manager.cache.evict(1)
    manager.swap_out(away)  # four full blocks stay num_cached, one goes to the host
    others = computed(manager, "others", range(50, 58))
    assert (num_cached(manager), manager.inspect.num_free_blocks()) == (4, 0)
    admission = manager.can_swap_in(away)
    assert (admission.status, admission.blocks_needed, admission.blocks_available) == (AllocStatus.LATER, (1,), (0,))
    with pytest.raises(OutOfBlocksError):
        manager.swap_in(away)
    manager.check()
    manager.free(others)
    assert manager.swap_in(away) == 1
    manager.check()


def test_given_forks_that_share_host_block_0_when_they_come_back_then_they_share_it_again() -> None:
    manager = manager_of_pairs(host_blocks=3)
    others = [computed(manager, name, [number, number]) for number, name in enumerate(("a", "b", "c"), 1)]
    for other in others:
        manager.swap_out(other)
    manager.free_batch(others[::-1])
    manager.cache.reset()
    one = manager.allocate("one", [0] * 6)
    manager.mark_written(one, 6)
    manager.commit(one, 2)
    (fork,) = manager.fork(one, "fork")
    manager.commit(one, 4)
    manager.swap_out(one, fork)
    assert one.swapped is not None
    assert one.swapped[0].tolist() == [2, 1, 0]
    manager.cache.evict(1)  # "one" has two blocks left in the cache, its fork may take one of them: both miss the last
    manager.swap_in(one, fork)
    manager.check()
    manager.commit(fork, 4)
    manager.check()
    assert one.block_table() == fork.block_table()


def test_given_a_longer_cached_run_than_a_swapped_request_had_then_its_tail_is_room() -> None:
    manager = manager_of_pairs(gpu_blocks=8, host_blocks=8)
    away = computed(manager, "away", range(9))
    manager.swap_out(away)
    manager.cache.evict(8)
    manager.free(computed(manager, "branch", [0, 1, 2, 3, 90, 91]))
    manager.cache.evict(1)
    manager.free(computed(manager, "longer", range(12)))  # its second run begins inside what the request had
    computed(manager, "others", range(50, 54))
    assert (num_cached(manager), manager.inspect.num_free_blocks()) == (6, 0)
    admission = manager.can_swap_in(away)
    assert (admission.status, admission.blocks_needed, admission.blocks_available) == (AllocStatus.OK, (1,), (2,))
    assert manager.swap_in(away) == 1
    assert num_cached(manager) == 1
    manager.check()


def test_given_places_that_were_never_written_when_a_request_comes_back_then_the_encoders_table_gets_none() -> None:
    manager = manager_of_pairs(FULL, CROSS, host_blocks=16)
    handle = computed(manager, "a", range(5), cross_tokens=6, lookahead=6)
    before = [handle.block_ids(group) for group in (0, 1)]
    free = manager.inspect.num_free_blocks()
    manager.swap_out(handle)
    manager.swap_in(handle)
    after = [handle.block_ids(group) for group in (0, 1)]
    assert [len(table) for table in after] == [len(table) for table in before] == [6, 3]
    assert manager.inspect.num_free_blocks() == free
    manager.check()


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


def test_forks_swapped_together_stay_shared() -> None:
    manager = make_manager(host_blocks=16)
    handle = manager.allocate("a", list(range(14)))
    manager.commit(handle, 14)
    forks = manager.fork(handle, "b", "c")
    assert manager.swap_out(handle, *forks) == 4
    assert manager.swap_in(handle, *forks) <= 4
    assert len({tuple(h.block_ids().tolist()) for h in (handle, *forks)}) == 1


def test_no_host_space_is_an_answer_and_not_the_end() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    manager.commit(handle, 1)
    assert manager.can_swap_out(handle).status is AllocStatus.NEVER


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


def test_freeing_a_swapped_request_without_keeping_drops_what_it_published() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8, host_blocks=8))
    handle = commit_all(manager, manager.allocate("a", [0] * 4))
    manager.swap_out(handle)
    manager.free(handle, keep=False)
    assert manager.match_prefix([0] * 5).num_tokens == 0
    manager.check()


@pytest.mark.parametrize("num_shared", [2, 4])  # one block, which is number 0 on the host, or two
def test_requests_swapped_together_share_their_prefix_like_forks_when_they_come_back(num_shared: int) -> None:
    manager = manager_with(block_size=2, host_blocks=10)
    handles = [
        commit_all(manager, manager.allocate(name, [1] * num_shared + [last])) for name, last in (("a", 2), ("b", 3))
    ]
    manager.swap_out(*handles)
    manager.cache.reset()  # the common prefix must come back from the host
    manager.swap_in(*handles)
    manager.check()
    for handle in handles:
        manager.free(handle)
        manager.check()


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
    assert manager.cache.evict(1) == 1  # one of the two blocks that both have in common
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
    assert manager.cache.evict(1) == 1  # "one" has two blocks left in the cache, "other" may take one of them
    manager.swap_in(one, other)
    manager.check()
    manager.commit(other, 4)
    manager.check()
    assert one.block_table() == other.block_table()


def test_a_pinned_run_on_the_host_gives_no_room_to_swapped_requests() -> None:
    manager = two_pools(gpu_blocks=(8, 8), host_blocks=(8, 3))
    run_through(manager, "a", [1] * 8)
    assert manager.cache.offload(2) == 2
    pin = manager.cache.pin([1] * 8)
    handle = commit_all(manager, manager.allocate("b", [2] * 8))
    assert manager.can_swap_out(handle).status is AllocStatus.LATER
    with pytest.raises(OutOfBlocksError, match="pool 1 on HOST; 1 of 3"):
        manager.swap_out(handle)
    manager.check()
    manager.cache.unpin(pin)
    assert manager.can_swap_out(handle)
    manager.swap_out(handle)
    manager.check()
