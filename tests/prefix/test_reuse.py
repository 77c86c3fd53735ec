"""What a prompt shares with the cache: exact, contiguous, and within its scope."""

from __future__ import annotations

import numpy as np

from kvpool import ReuseScope
from managers import cached, make_manager


def test_a_finished_request_leaves_its_blocks_reusable_and_evictable() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    assert manager.match_prefix([*tokens, 1]).num_tokens == 8
    assert manager.cache.evict(2) == 2
    assert manager.inspect.num_free_blocks() == 16


def test_a_hit_takes_its_references_before_it_takes_new_blocks() -> None:
    manager = make_manager(gpu_blocks=3)
    tokens = cached(manager, 8)
    handle = manager.allocate("a", [*tokens, 1])
    assert handle.num_cached_tokens == 8
    assert sorted(handle.block_ids().tolist()) == [0, 1, 2]


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
    manager.cache.evict(2)
    assert manager.inspect.num_free_blocks() == 2


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
    root = next(iter(manager._cache.roots.values()))
    assert len(root.children.values()) == 1000
    assert manager.match_prefix([400, 401, 402, 403, 1]).num_blocks == 1


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
