"""Cached runs on the host: room for them, what follows them, and what stays pinned."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import KVCacheManager, LayerSpec, Tier
from kvpool.errors import OutOfBlocksError
from kvpool.events import Removed, Updated
from managers import FULL, cached, commit_all, make_manager, manager_of_pairs, manager_with


def two_pools(**options: Any) -> KVCacheManager:
    """A full and a windowed group with a pool each."""
    layers = LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=2, head_dim=8, window=8)
    return manager_with(*layers, eviction_policy="lru", **options)


def run_through(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    manager.free(commit_all(manager, manager.allocate(name, tokens)))


def test_host_ids_never_stand_in_a_gpu_table() -> None:
    manager = make_manager(gpu_blocks=2, host_blocks=8)
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("b", [50])  # no silent fallback to host blocks
    manager.swap_out(handle)
    assert handle.block_table() == [None, None]


def test_a_model_without_host_tier_works() -> None:
    assert make_manager(host_blocks=0).stats().pool().total == 16


def test_used_blocks_of_the_gpu_do_not_include_the_host() -> None:
    manager = make_manager(host_blocks=100)
    manager.allocate("a", [1])
    pool = manager.stats().pool()
    assert (pool.total, pool.referenced) == (16, 1)


def test_counters_of_both_tiers_survive_moves_to_and_fro() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=4)
    tokens = cached(manager, 16)
    for _ in range(3):
        assert manager.cache.offload(4) == 4
        assert manager.stats().pool(tier=Tier.HOST).cached == 4
        assert manager.cache.onboard([*tokens, 1]) == 4
        assert manager.stats().pool().cached == 4
        manager.check()


def test_empty_host_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=4)
    first = cached(manager, 8)
    manager.cache.offload(2)
    cached(manager, 8, first=50)
    manager.cache.offload(2)
    assert manager.match_prefix([*first, 1]).tokens_by_tier == {Tier.HOST: 8}


def test_a_replaced_block_is_copied() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    manager.commit(handle, 2)
    (child,) = manager.fork(handle, "b")
    manager.extend(child)
    assert [op.num_tokens for op in manager.take_copies()] == [2]


def test_offload_moves_no_more_than_asked_when_groups_share_a_pool() -> None:
    layers = [FULL, LayerSpec(kv_heads=1, head_dim=8, window=64)]
    manager = manager_with(*layers, gpu_blocks=16, host_blocks=16)
    manager.free(commit_all(manager, manager.allocate("a", list(range(16)))))
    assert manager.cache.offload(2) == 2
    assert manager.stats().offloaded_blocks == 1
    manager.check()


@pytest.mark.parametrize(
    ("length", "leaves"),
    [
        (
            4,
            {"updated": 2, "removed": 0},
        ),  # the held run comes up first, into free blocks, and [2] * 4 goes where it was
        (16, {"updated": 0, "removed": 6}),  # it cannot come up before something left, and all of [2] * 16 is dropped
    ],
)
def test_a_run_on_the_host_that_an_admission_holds_gives_no_room_before_it_has_come_up(
    length: int, leaves: dict[str, int]
) -> None:
    manager = two_pools(gpu_blocks=(4, 4), host_blocks=(2, 1))
    run_through(manager, "a", [1] * 4)
    assert manager.cache.offload(1) == 1
    run_through(manager, "b", [2] * length)
    feed = manager.subscribe()
    feed.poll()
    prompt = [1] * 4 + [3] * 12
    assert manager.can_allocate(prompt)
    assert manager.allocate("c", prompt).num_cached_tokens == 4
    manager.check()
    events = feed.poll().events
    moved = [(e.old_tier, e.new_tier) for e in events if isinstance(e, Updated)]
    assert moved.count((Tier.HOST, Tier.GPU)) == 2
    assert moved.count((Tier.GPU, Tier.HOST)) == leaves["updated"]
    assert [e.tier for e in events if isinstance(e, Removed)] == [Tier.GPU] * leaves["removed"]


@pytest.mark.parametrize("onboards", [False, True])
@pytest.mark.parametrize("num_pools", [1, 2])
def test_two_prompts_that_only_fit_together_on_both_tiers_take_turns_on_the_gpu(num_pools: int, onboards: bool) -> None:
    blocks = {"gpu_blocks": 512, "host_blocks": 512}
    manager = manager_of_pairs(**blocks) if num_pools == 1 else two_pools(**blocks, block_size=2)
    length, hits = 450, []
    for number in range(8):
        prompt = [number % 2] * (2 * length) + [5]
        if onboards:
            manager.cache.onboard(prompt)
        handle = manager.allocate(number, prompt)
        hits.append(handle.num_cached_blocks)
        assert handle.stats.cached_tokens_from_lower_tiers == 0 or not onboards
        manager.commit(handle)
        manager.free(handle)
        manager.check()
    assert hits == [0, 0] + [length] * 6


def test_a_partial_source_on_the_host_gives_no_room_for_what_its_copy_evicts() -> None:
    manager = two_pools(gpu_blocks=(4, 4), host_blocks=(2, 1))
    run_through(manager, "a", [1] * 4)
    assert manager.cache.offload(1) == 1
    run_through(manager, "b", [2] * 4)
    handle = manager.allocate("c", [1] * 3 + [3] * 13)
    assert handle.num_cached_tokens == 3
    manager.check()
    assert manager.match_prefix([1] * 5).num_tokens == 4


@pytest.mark.parametrize("unpin_first", [False, True])
def test_a_prefix_pinned_on_the_host_keeps_its_window_when_it_comes_up(unpin_first: bool) -> None:
    manager = two_pools(gpu_blocks=(8, 4), host_blocks=8)
    run_through(manager, "a", [1] * 8)
    assert manager.cache.offload(2) == 2
    pin = manager.cache.pin([1] * 8)
    assert manager.cache.onboard([1] * 8) == 2
    manager.check()
    if unpin_first:
        manager.cache.unpin(pin)
    assert manager.cache.evict(4, pool=1) == (2 if unpin_first else 0)
    manager.check()
    found = manager.match_prefix([1] * 9)
    assert found.tokens_by_tier == ({Tier.HOST: 8} if unpin_first else {Tier.GPU: 8})  # it goes down with its window
    if not unpin_first:
        manager.cache.unpin(pin)
        manager.check()


def test_a_prefix_pinned_on_the_host_and_computed_again_keeps_its_books() -> None:
    manager = two_pools(gpu_blocks=(8, 8), host_blocks=8)
    handle = commit_all(manager, manager.allocate("a", [1] * 3))
    run_through(manager, "b", [1] * 8)
    assert manager.cache.offload(2) == 2
    pin = manager.cache.pin([1] * 8)
    manager.extend(handle, 5)
    manager.commit(handle, [1] * 5)  # takes the place of what is on the host
    manager.check()
    manager.cache.unpin(pin)
    manager.check()
    manager.free(handle)
    manager.check()


def test_a_run_takes_no_more_along_because_what_follows_it_gave_way() -> None:
    manager = two_pools(gpu_blocks=(10, 10), host_blocks=(2, 1))
    run_through(manager, "a", list(range(40)))
    assert manager.cache.offload(1) == 1
    # On the host its own end gives way, so its last window would begin one block earlier
    assert manager.cache.offload(2) == 2
    manager.check()
    assert manager.stats().offloaded_blocks == 3
