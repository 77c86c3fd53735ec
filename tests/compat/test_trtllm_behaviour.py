"""What TensorRT-LLM's own tests of its cache manager check, asked of the same calls here (one beam: beams are forks).

Where the answers differ on purpose, a row of docs/compat-tensorrt-llm.md says so, and the test names the difference.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager
from kvpool.errors import DuplicateRequestError, OutOfBlocksError


def make_cache(primary: int, secondary: int = 0, **settings: Any) -> TrtLlmKVCacheManager:
    return TrtLlmKVCacheManager([6] * 12, 16, 4, primary, secondary, **settings)


def free_blocks(cache: TrtLlmKVCacheManager) -> int:
    return cache.get_kv_cache_stats().free_num_blocks


def used_blocks(cache: TrtLlmKVCacheManager) -> int:
    return cache.get_kv_cache_stats().used_num_blocks


def run(cache: TrtLlmKVCacheManager, name: Any, prompt: list[int], generated: int = 0, **keys: Any) -> int:
    """A sequence from start to end; TensorRT-LLM never stores its last token."""
    found = cache.add_sequence(name, prompt, **keys)
    for _ in range(generated):
        cache.add_token(name)
    cache.remove_sequence(name, prompt + list(range(900, 900 + generated)))
    return found


def kept(priority: int, decode: int = 35, end: int | None = None, **durations: float) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(0, end, priority)], decode, **durations)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_given_sequences_that_fill_the_pool_then_ids_are_unique_and_another_does_not_fit() -> None:
    cache = make_cache(24, enable_block_reuse=False)
    assert (cache.tokens_per_block, cache.max_num_blocks, free_blocks(cache)) == (4, 24, 24)
    for name in range(2):
        cache.add_sequence(name, 44)
    ids = [block for [table] in cache.get_batch_cache_block_ids([0, 1]) for block in table]
    assert (len(set(ids)), free_blocks(cache)) == (22, 2)
    with pytest.raises(DuplicateRequestError):
        cache.add_sequence(0, 4)
    with pytest.raises(OutOfBlocksError):
        cache.add_sequence(2, 12)
    assert free_blocks(cache) == 2
    for name in range(2):
        cache.remove_sequence(name)
    assert free_blocks(cache) == 24


@pytest.mark.parametrize("heads", [[2, 2, 2, 2], [3, 2, 1, 2]])
def test_given_layers_then_those_with_as_many_heads_are_in_one_pool(heads: list[int]) -> None:
    cache = TrtLlmKVCacheManager(heads, 64, 64, 80, enable_block_reuse=False, watermark=0.0)
    assert cache.num_pools == len(set(heads))
    for pool in cache.block_manager.pools:
        assert [heads[layer] for layer in pool.layers] == [pool.num_kv_heads] * pool.num_layers
    assert sorted(layer for pool in cache.block_manager.pools for layer in pool.layers) == [0, 1, 2, 3]
    total = free_blocks(cache)
    blocks = cache.num_pools * -(-575 // 64)
    for name in range(2):
        cache.add_sequence(name, 575)
        assert free_blocks(cache) == total - (name + 1) * blocks - name * cache.num_pools
        cache.add_token(name)  # the last place of its block
        cache.add_token(name)
        assert free_blocks(cache) == total - (name + 1) * (blocks + cache.num_pools)
    for name in range(2):
        cache.remove_sequence(name)
    assert free_blocks(cache) == total


def test_given_tokens_that_are_taken_back_then_the_blocks_behind_are_free() -> None:
    cache = TrtLlmKVCacheManager([2, 2], 64, 64, 80, enable_block_reuse=False)
    for name in range(8):
        before = free_blocks(cache)
        cache.add_sequence(name, 575)
        assert free_blocks(cache) == before - 9
        for _ in range(5):
            cache.add_token(name)
        assert free_blocks(cache) == before - 10
        cache.rewind_kv_cache(name, 4)
        assert free_blocks(cache) == before - 9


# --- reuse ------------------------------------------------------------------------------------------------------------


def test_given_sequences_that_begin_alike_then_all_but_their_last_tokens_are_reused() -> None:
    """TensorRT-LLM finds less where a running sequence has claimed an unfilled block: here it is copied."""
    cache, prompt = make_cache(8), list(range(9))
    assert cache.add_sequence(0, prompt) == 0
    for _ in range(2):
        cache.add_token(0)
    assert (used_blocks(cache), free_blocks(cache)) == (3, 5)
    cache.remove_sequence(0, list(range(11)))
    assert (used_blocks(cache), free_blocks(cache)) == (0, 8)
    assert cache.add_sequence(1, prompt) == 8
    assert used_blocks(cache) == 3
    cache.remove_sequence(1, prompt)
    assert cache.add_sequence(0, list(range(10))) == 9
    assert cache.add_sequence(1, list(range(11))) == 10  # 8 there: sequence 0 has the block of the ninth token
    assert used_blocks(cache) == 4  # the first two are shared
    for name, length in ((0, 10), (1, 11)):
        cache.remove_sequence(name, list(range(length)))
    assert run(cache, 2, list(range(5))) == 4
    assert run(cache, 3, [*range(10), 11]) == 10
    assert run(cache, 4, [*range(10), 12]) == 10
    assert free_blocks(cache) == 8
    assert cache.add_sequence(5, [0] * 31) in (0, 1)  # the zero that all begin with, if its block can be spared
    assert free_blocks(cache) == 0
    cache.remove_sequence(5)
    assert run(cache, 6, [0]) == 0
    assert free_blocks(cache) == 8
    cache.manager.check()


@pytest.mark.parametrize("lora", [None, 0, 1])
def test_given_extra_ids_then_blocks_are_reused_up_to_the_first_that_differs(lora: int | None) -> None:
    cache, prompt = make_cache(16), [100, 101, 102, 103, 104, 105, 0, 1, 2]
    ids = [1, 1, 2, 2, 3, 3, 0, 0, 0]
    assert run(cache, 0, prompt, 2, extra_ids=ids, lora_task_id=lora) == 0
    assert run(cache, 1, prompt, 2, extra_ids=ids, lora_task_id=lora) == 8
    assert cache.add_sequence(2, prompt, extra_ids=[4, 4, 5, 5, 6, 6, 0, 0, 0], lora_task_id=lora) == 0
    assert cache.add_sequence(3, prompt, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0], lora_task_id=lora) == 4
    assert cache.add_sequence(4, prompt, extra_ids=ids, lora_task_id=2) == 0
    assert used_blocks(cache) == 9


def test_given_a_lora_then_only_sequences_with_it_reuse_its_blocks() -> None:
    cache, prompt = make_cache(16), list(range(9))
    for name, lora, found in ((0, 0, 0), (1, 0, 8), (2, 1, 0), (3, 1, 8), (4, None, 0), (5, 0, 8)):
        assert run(cache, name, prompt, 2, lora_task_id=lora) == found


def test_given_a_request_then_its_counters_are_those_of_its_prompt() -> None:
    cache, prompt = make_cache(16), list(range(9))
    cache.add_sequence(0, prompt)
    assert list(cache.get_request_stats(0).values()) == [3, 3, 0, 3]
    cache.remove_sequence(0, prompt)
    cache.add_sequence(1, prompt)
    assert list(cache.get_request_stats(1).values()) == [1, 1, 2, 1]


def test_given_tokens_over_the_window_then_they_are_reused_as_well() -> None:
    """TensorRT-LLM's buffer goes round there, and it stores nothing of such a sequence."""
    cache = TrtLlmKVCacheManager([2, 2], 64, 4, 16, max_attention_window=[16], max_seq_len=64, watermark=0.0)
    tokens = list(range(1000, 1020))
    assert run(cache, 0, tokens[:16], 2) == 0
    assert run(cache, 1, tokens[:7], 2) == 6
    assert cache.add_sequence(2, tokens) == 16
    assert free_blocks(cache) >= 16 - 5


# --- who is evicted ---------------------------------------------------------------------------------------------------


def test_given_priorities_then_the_lowest_goes_first_and_of_a_sequence_its_end() -> None:
    cache = make_cache(4, watermark=0.0)
    ranges = [TokenRangeRetentionConfig(0, 4, 90), TokenRangeRetentionConfig(4, 8, 10)]
    prompts = [list(range(start, start + 8)) for start in (0, 8, 16)]
    cache.add_sequence(0, prompts[0], KvCacheRetentionConfig(ranges, 20))
    cache.add_sequence(1, prompts[1])
    for name in range(2):
        cache.remove_sequence(name, prompts[name])
    assert run(cache, 2, prompts[2], retention_config=kept(20, 20)) == 0
    assert run(cache, 3, prompts[1]) == 4
    assert free_blocks(cache) == 4
    assert cache.add_sequence(4, prompts[0]) == 4
    assert cache.add_sequence(5, prompts[2]) == 0


def test_given_priorities_of_generated_blocks_then_they_count_as_those_of_the_prompt_do() -> None:
    cache = make_cache(8, watermark=0.0)
    for name, start, config in ((0, 0, kept(5, 90)), (1, 12, kept(90, 5))):
        cache.add_sequence(name, list(range(start, start + 12)), config)
        cache.add_token(name)
    assert free_blocks(cache) == 0
    for name, start in ((0, 0), (1, 12)):
        cache.remove_sequence(name, [*range(start, start + 12), 0, 0])
    assert free_blocks(cache) == 8
    assert run(cache, 2, list(range(24, 36))) == 0  # takes the last block of 1, then two of 0
    assert cache.add_sequence(3, list(range(12))) == 8


def test_given_a_duration_when_it_is_over_then_the_priority_is_the_usual_one() -> None:
    now, cache = [0.0], make_cache(8, watermark=0.0)
    cache.manager._cache.clock = lambda: now[0]
    short = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, 80, 10)], 80)
    assert run(cache, 0, list(range(12)), retention_config=short) == 0
    assert run(cache, 1, list(range(12, 24)), retention_config=kept(50, 80)) == 0
    now[0] = 0.05
    cache.refresh_blocks()
    run(cache, 2, [1] * 12)
    assert cache.add_sequence(3, list(range(12, 24))) == 11


def test_given_a_duration_of_generated_blocks_when_it_is_over_then_the_prompts_of_others_stay() -> None:
    now, cache = [0.0], make_cache(8, watermark=0.0)
    cache.manager._cache.clock = lambda: now[0]
    first, second = [1, *range(1, 12)], list(range(12))
    run(cache, 0, first, 3, retention_config=kept(50, 50))
    run(cache, 1, second, 3, retention_config=KvCacheRetentionConfig([], 100, 20))
    now[0] = 0.05
    cache.refresh_blocks()
    run(cache, 2, [77] * 8)
    assert cache.add_sequence(3, second) == 8


def test_given_an_unfilled_block_then_it_is_found_until_the_pool_needs_it() -> None:
    cache = make_cache(4, watermark=0.0)
    assert run(cache, 0, list(range(4)), 1) == 0
    cache.add_sequence(1, [1, 1, 2, 3])
    prompt = [2, 1, *range(2, 12)]
    cache.add_sequence(2, prompt)
    assert free_blocks(cache) == 0
    for name, tokens in ((1, [1, 1, 2, 3]), (2, prompt)):
        cache.remove_sequence(name, tokens)
    assert cache.add_sequence(3, prompt) == 11
    assert free_blocks(cache) == 1
    cache.add_token(3)
    assert free_blocks(cache) == 0
    with pytest.raises(OutOfBlocksError):
        cache.add_sequence(4, [42])


def test_given_a_parent_on_the_host_then_what_was_computed_behind_it_is_found() -> None:
    cache = make_cache(4, 4, watermark=0.0)
    run(cache, 0, list(range(12)))
    run(cache, 1, [1, *range(1, 12)])
    assert cache.add_sequence(2, [0, 1, 2, 3]) == 3
    cache.store_context_blocks(2)
    for _ in range(6):
        cache.add_token(2)
    cache.remove_sequence(2, [*range(8), 0, 0])
    assert cache.add_sequence(3, [*range(8), 0, 0]) == 9
    cache.manager.check()


@pytest.mark.parametrize(("last", "found"), [(0, 4), (35, 12)])
def test_given_a_priority_below_the_least_for_the_host_then_a_block_is_dropped_unless_a_higher_one_follows(
    last: int, found: int
) -> None:
    """TensorRT-LLM drops it with what follows, as it ranks each block by itself."""
    cache = make_cache(4, 2, event_buffer_max_size=64, watermark=0.0)
    ranges = [TokenRangeRetentionConfig(4, 8, 0), TokenRangeRetentionConfig(8, None, last)]
    cache.add_sequence(0, list(range(12)), KvCacheRetentionConfig(ranges))
    cache.remove_sequence(0, list(range(13)))
    data_of(cache)
    cache.add_sequence(1, [100] * 12)
    removed = [block for data in data_of(cache) if data["type"] == "removed" for block in data["block_hashes"]]
    assert len(removed) == 3 - found // 4
    assert cache.manager.match_prefix(list(range(13))).num_tokens == found


# --- events -----------------------------------------------------------------------------------------------------------


def data_of(cache: TrtLlmKVCacheManager) -> list[dict[str, Any]]:
    return [event["data"] for event in cache.get_latest_events(timeout_ms=100)]


def test_given_a_stream_of_events_then_it_tells_what_is_stored_moved_and_gone() -> None:
    cache = make_cache(8, 2, event_buffer_max_size=1024, watermark=0.0)
    [created] = data_of(cache)
    assert (created["type"], created["num_blocks_per_cache_level"]) == ("created", [8, 2])
    assert data_of(cache) == []
    cache.add_sequence(0, list(range(10)), lora_task_id=42)
    cache.store_context_blocks(0)
    [first] = data_of(cache)
    assert (first["type"], first["parent_hash"], len(first["blocks"])) == ("stored", None, 2)
    assert (first["blocks"][0]["lora_id"], first["blocks"][0]["cache_level"]) == (42, 0)
    cache.add_token(0)
    cache.remove_sequence(0, [*range(10), 0])
    [second] = data_of(cache)
    assert (second["parent_hash"], len(second["blocks"])) == (first["blocks"][-1]["block_hash"], 1)
    run(cache, 1, list(range(9)), lora_task_id=42)
    assert data_of(cache) == []  # all of it is stored already
    prompts = {name: [name - 1, *range(1, 13)] for name in (2, 3)}
    for name, prompt in prompts.items():
        cache.add_sequence(name, prompt)
    moved = data_of(cache)
    stored = {block["block_hash"] for data in (first, second) for block in data["blocks"]}
    to_host = {data["block_hash"] for data in moved if data["type"] == "updated"}
    removed = {block for data in moved if data["type"] == "removed" for block in data["block_hashes"]}
    assert to_host | removed == stored  # three blocks had to leave, and the host takes two
    assert len(removed) == 1
    for name, prompt in prompts.items():
        cache.remove_sequence(name, prompt)
    events = data_of(cache)
    assert [(data["type"], data["parent_hash"], len(data["blocks"])) for data in events] == [("stored", None, 3)] * 2
    assert cache.add_sequence(4, [0, 1, 2, 3, 1, 1, 1, 1, 0], lora_task_id=42) == 4
    levels = [data["cache_level"] for data in data_of(cache) if data["type"] == "updated"]
    assert any((level["old_value"], level["new_value"]) == (1, 0) for level in levels)
    cache.store_context_blocks(4)
    assert data_of(cache)[0]["type"] == "stored"
    cache.manager.check()


def test_given_a_buffer_of_one_event_then_the_last_one_is_there() -> None:
    cache = make_cache(8, 2, event_buffer_max_size=1)
    cache.add_sequence(0, list(range(10)), lora_task_id=42)
    cache.store_context_blocks(0)
    *_, stored = data_of(cache)
    assert (stored["type"], stored["parent_hash"]) == ("stored", None)
    cache.add_token(0)
    assert data_of(cache) == []
    cache.remove_sequence(0, [*range(10), 0])
    [unfilled] = data_of(cache)
    assert (unfilled["type"], unfilled["parent_hash"]) == ("stored", stored["blocks"][-1]["block_hash"])


def test_given_priorities_then_events_have_them_and_a_request_changes_them_when_it_ends() -> None:
    """TensorRT-LLM tells of it when the request begins."""
    cache, prompt = make_cache(8, 2, event_buffer_max_size=1024), list(range(9))
    run(cache, 0, prompt, retention_config=kept(50))
    created, stored = data_of(cache)
    assert created["type"] == "created"
    assert [block["priority"] for block in stored["blocks"]] == [50, 50]
    run(cache, 1, prompt)
    assert not [data for data in data_of(cache) if data["type"] == "updated"]
    run(cache, 2, prompt, retention_config=kept(10))
    updated = [data["priority"] for data in data_of(cache) if data["type"] == "updated"]
    assert [(diff["old_value"], diff["new_value"]) for diff in updated] == [(50, 10)] * 2


def test_given_windows_then_each_has_events_of_its_own() -> None:
    cache = TrtLlmKVCacheManager(
        [6, 6], 16, 4, 8, 2, max_attention_window=[16, 12], max_seq_len=16, event_buffer_max_size=1024, watermark=0.0
    )
    events = cache.get_latest_events()
    assert {event["window_size"] for event in events} == {12, 16}
    assert [event["data"]["type"] for event in events] == ["created"] * 2
    cache.add_sequence(0, list(range(8)))
    cache.store_context_blocks(0)
    events = cache.get_latest_events()
    assert [(event["data"]["type"], event["window_size"]) for event in events] == [("stored", 16), ("stored", 12)]
