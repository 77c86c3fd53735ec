"""TensorRT-LLM's windows, pools and blocks as objects."""

from __future__ import annotations

import pytest

from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager
from kvpool.errors import InvalidArgumentError

PROMPT = list(range(16))


def test_given_layers_of_two_windows_and_two_shapes_then_the_hierarchy_can_be_asked() -> None:
    cache = TrtLlmKVCacheManager([2, 2, 4, 2], 8, 4, 16, 8, max_attention_window=[None, 8], max_seq_len=64)
    blocks = cache.block_manager
    assert (blocks.window_sizes, blocks.is_variable_window, blocks.num_pools, cache.num_pools) == ((64, 8), True, 3, 3)
    full, sliding = blocks.window_block_managers
    assert (full.window_size, full.is_swa, full.layers, full.num_pools) == (64, False, (0, 2), 2)
    assert (sliding.window_size, sliding.is_swa, sliding.layers) == (8, True, (1, 3))
    pool = full.get_pool(1)
    assert (pool.layers, pool.num_layers, pool.kv_factor, pool.num_kv_heads, pool.size_per_head) == ((2,), 1, 2, 4, 8)
    assert (pool.tokens_per_block, pool.block_size, pool.block_bytes) == (4, 4 * 8 * 4, 4 * 8 * 4 * 2 * 2)
    assert (full.get_layer_pool_idx(2), sliding.get_pool_layer_idx(3)) == (1, 1)
    assert (pool.num_primary_blocks, pool.num_secondary_blocks, full.num_secondary_blocks) == (16, 8, 8)
    cache.add_sequence("a", PROMPT)
    assert pool.memory == sliding.pools[0].memory  # one layer of 4 heads takes as much as two of 2
    assert (full.num_allocated_blocks, full.num_free_blocks) == (4, 8)
    assert (full.has_free_blocks(8), full.has_free_blocks(9)) == (True, False)
    assert len(cache.get_cache_block_ids("a", 64, 1)[0]) == 4
    assert cache.get_batch_cache_block_ids(["a"], 8) == [cache.get_cache_block_ids("a", 8)]
    for wrong in (None, 16, 64.0, "64"):
        with pytest.raises(InvalidArgumentError, match=r"window_size=.* must be one of \(64, 8\)"):
            cache.get_cache_block_ids("a", wrong)  # type: ignore[arg-type]
    for call in (full.get_pool, full.get_layer_pool_idx, full.get_pool_layer_idx):
        with pytest.raises(InvalidArgumentError, match="3"):
            call(3)
        with pytest.raises(InvalidArgumentError, match="True"):
            call(True)


def test_given_a_block_then_it_tells_who_holds_it_and_what_it_is_worth() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 8, 8, watermark=0.0)
    window = cache.block_manager.get_window_block_manager()
    cache.add_sequence("a", PROMPT, KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 8, 90)]))
    (ids,) = cache.get_cache_block_ids("a")
    first = ids[0]
    assert first is not None
    block = window.get_block_by_id(first)
    assert (block.is_primary, block.ref_count, block.is_shared) == (True, 1, False)
    assert (block.is_cached, block.priority) == (False, None)
    cache.store_context_blocks("a")
    cache.add_sequence("b", PROMPT)
    assert window.get_block_by_id(first).is_shared
    cache.remove_sequence("b")
    pin = cache.remove_sequence("a", pin_on_release=True)
    assert pin is not None
    block = window.get_block_by_id(first)
    assert (block.has_refs, block.is_cached, block.is_pinned, block.priority, block.position) == (
        False,
        True,
        True,
        90,
        0,
    )
    cache.unpin_blocks_by_id(pin)
    cache.manager.cache.offload(4)
    moved = [window.get_block_by_id(index, is_primary=False) for index in range(8)]
    assert sorted(block.priority or 0 for block in moved if block.is_cached) == [35, 35, 90, 90]
    for wrong in (8, -1, 1.0, None, True):
        with pytest.raises(InvalidArgumentError, match="block_id"):
            window.get_block_by_id(wrong)  # type: ignore[arg-type]


def test_given_no_secondary_pool_then_asking_for_its_blocks_says_so() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 8)
    with pytest.raises(InvalidArgumentError, match="no secondary pool"):
        cache.block_manager.pools[0].get_block_by_id(0, is_primary=False)
