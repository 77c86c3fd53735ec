"""Counters, sizes and rates: one thing, one unit, counted once."""

from __future__ import annotations

import pytest

from kvpool import AllocStatus, LayerSpec, ReuseScope, Tier
from kvpool.errors import OutOfBlocksError
from kvpool.prefix.tree import root_for
from managers import FULL, cached, computed, make_manager, manager_of_pairs

WINDOW_OF_4 = LayerSpec(kv_heads=2, head_dim=8, window=4)


def test_given_a_fork_then_the_child_counts_what_it_shares_in_tokens_and_in_whole_blocks() -> None:
    manager = manager_of_pairs()
    (child,) = manager.fork(computed(manager, "a", range(7)), "b")
    assert (child.num_cached_tokens, child.num_cached_blocks) == (7, 3)


@pytest.mark.parametrize("layers", [(FULL,), (FULL, WINDOW_OF_4)])
def test_given_an_extension_then_the_blocks_of_every_group_are_counted(layers: tuple[LayerSpec, ...]) -> None:
    manager = manager_of_pairs(*layers)
    handle = manager.allocate("a", range(4))
    before = manager.stats().blocks_allocated
    assert before == 2 * len(layers)
    manager.extend(handle, 6)
    assert manager.stats().blocks_allocated == before + 3 * len(layers)


def test_given_a_long_run_that_was_cut_short_then_the_rest_keeps_no_memory_of_it() -> None:
    manager = manager_of_pairs(gpu_blocks=64)
    manager.free(computed(manager, "a", range(128)))
    manager.cache.evict(62)
    (run,) = root_for(manager._cache, ReuseScope()).children.values()
    assert (run.num_blocks, run.ids[0].base, run.tokens.base) == (2, None, None)


def test_blocks_that_were_loaded_for_a_request_count_as_found_where_they_came_from() -> None:
    manager = make_manager()
    again = manager.allocate("again", [*cached(manager, 12)[:10], 99])
    assert (again.num_cached_tokens, again.num_cached_blocks) == (10, 2)
    manager.cache.count_loaded(again, {0: Tier.DISK, 2: Tier.REMOTE, 3: Tier.DISK})  # it has found none of the last
    stats = manager.stats()
    assert stats.hit_tokens == {"GPU": 4, "HOST": 0, "DISK": 4, "REMOTE": 2}
    assert stats.hit_blocks == {"GPU": 1, "HOST": 0, "DISK": 1, "REMOTE": 0}
    assert again.stats.cached_tokens_from_lower_tiers == 6


def test_counters_count_one_thing_in_one_unit() -> None:
    manager = make_manager(gpu_blocks=4)
    manager.allocate("a", num_tokens=12)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("b", num_tokens=8)
    stats = manager.stats()
    assert (stats.requests, stats.blocks_allocated, stats.allocation_failures) == (1, 3, 1)


def test_hits_count_contiguous_prefixes_only() -> None:
    manager = make_manager()
    cached(manager, 12)
    manager.allocate("a", [0, 1, 2, 3, 99, 99, 99, 99, 8, 9, 10, 11, 1])
    assert sum(manager.stats().hit_blocks.values()) == 1


def test_prefix_hits_count_at_admission() -> None:
    manager = make_manager(gpu_blocks=4)
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 12)
    assert manager.can_allocate([*range(12), 1])
    assert not manager.can_allocate([*range(50, 62), 1])


def test_the_hit_rate_counts_every_prompt_also_short_ones() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    manager.allocate("short", [77])
    manager.allocate("long", [*tokens, 1])
    stats = manager.stats()
    assert stats.token_hit_rate == 8 / (8 + 1 + 9)
    manager.cache.reset()
    assert manager.stats().prompt_tokens == 18  # forgetting content does not forget statistics


def test_shared_blocks_are_counted_once() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    manager.fork(handle, "b", "c")
    assert manager.stats().pool().referenced == 2
    assert manager.inspect.usage == 2 / 16


def test_free_cached_blocks_are_not_counted_twice() -> None:
    manager = make_manager(gpu_blocks=4)
    tokens = cached(manager, 12)  # three cached, one free
    answer = manager.can_allocate([*tokens, *range(50, 54)])
    assert (answer.blocks_needed, answer.blocks_available) == ((1,), (1,))
    manager.allocate("one", [90])
    assert manager.can_allocate([*tokens, *range(50, 54)]).status is AllocStatus.LATER


def test_every_pool_counts_at_admission() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=4, head_dim=8), gpu_blocks=(100, 2))
    answer = manager.can_allocate(num_tokens=9)
    assert (answer.status, answer.blocks_needed) == (AllocStatus.NEVER, (3, 3))
