"""Seed spellings: each call means what its own system promised, and mistakes raise typed errors."""

from __future__ import annotations

import pytest

from kvpool import AllocStatus, KVCacheConfig, KVCacheManager, LayerSpec, MemoryPressure, create_kv_cache_manager
from kvpool.blocks.retention import Retention, TokenRange
from kvpool.compat import (
    BlockManager,
    FerrumKVCacheManager,
    KvCacheRetentionConfig,
    SeedKVCacheManager,
    TokenRangeRetentionConfig,
    TrtLlmKVCacheManager,
)
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownRequestError,
)

PROMPT = list(range(16))


def seed(num_blocks: int = 16, **settings: object) -> SeedKVCacheManager:
    return create_kv_cache_manager(2, 2, 8, num_blocks, 4, **settings)  # type: ignore[arg-type]


# --- PyAgent ----------------------------------------------------------------------------------------------------------


def test_given_defaults_when_created_then_the_pool_has_1000_blocks_of_16_float16_tokens() -> None:
    cache = create_kv_cache_manager(num_layers=2, num_heads=4, head_dim=64)
    assert cache.get_num_free_blocks() == 1000
    assert cache.manager.config.bytes_per_token == 2 * 2 * 4 * 64 * 2
    assert cache.usage == 0.0


def test_given_a_half_full_block_when_extending_then_a_block_is_taken_only_past_its_end() -> None:
    cache = seed()
    cache.allocate("a", 6)
    assert cache.extend("a", 2).num_blocks == 2
    assert cache.extend("a", 1).num_blocks == 3
    assert cache.get_block_table("a", 1) == [0, 1, 2]
    cache.free("a")
    assert cache.get_num_free_blocks() == 16


def test_given_layers_with_and_without_a_window_then_each_layer_shows_the_table_of_its_group() -> None:
    layers = [LayerSpec(1, 8), LayerSpec(1, 8, window=4)]
    cache = SeedKVCacheManager(KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=32)))
    handle = cache.allocate("a", tokens=PROMPT)
    cache.commit(handle, 16)
    assert None not in cache.get_block_table("a", 0)
    assert cache.get_block_table("a", 1)[:3] == [None, None, None]
    with pytest.raises(InvalidArgumentError, match="outside the model's 2 layers"):
        cache.get_block_table("a", 2)


def test_given_mistakes_then_they_raise_and_change_nothing() -> None:
    cache = seed()
    cache.allocate("a", 8)
    with pytest.raises(DuplicateRequestError):
        cache.allocate("a", 8)
    with pytest.raises(OutOfBlocksError):
        cache.extend("a", 1000)
    for call in (cache.extend, cache.free, cache.get_block_table, cache.deallocate, cache.swap_out):
        with pytest.raises(UnknownRequestError):
            call("nobody")
    with pytest.raises(InvalidArgumentError):
        cache.allocate("b", -1)
    assert cache.get_num_free_blocks() == 14
    cache.manager.check()


def test_given_pressure_when_it_changes_then_every_callback_hears_it_until_stopped() -> None:
    cache = seed()
    heard: list[MemoryPressure] = []
    stop = cache.on_memory_pressure(lambda change: heard.append(change.level))
    assert cache.can_allocate(60)
    assert cache.can_allocate(64).status is AllocStatus.NEVER  # one block is the watermark
    cache.allocate("a", 64)
    stop()
    cache.free("a")
    assert heard == [MemoryPressure.CRITICAL]


# --- ferrum -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_count", [True, False])
def test_given_a_stored_prefix_when_its_request_is_gone_then_it_is_found_with_its_logits(by_count: bool) -> None:
    cache = seed()
    handle = cache.allocate("a", 16) if by_count else cache.allocate("a", tokens=PROMPT)
    assert cache.find_prefix(PROMPT) is None
    assert cache.store_prefix(PROMPT, handle, last_logits="logits")
    cache.deallocate("a")
    found = cache.find_prefix(PROMPT)
    assert found is not None
    assert (found.num_tokens, found.last_logits) == (16, "logits")
    shorter, longer = cache.find_prefix(PROMPT[:10]), cache.find_prefix([*PROMPT, 1])
    assert shorter is not None
    assert longer is not None
    assert (shorter.num_tokens, shorter.last_logits) == (9, None)
    assert (longer.num_tokens, longer.last_logits) == (16, None)
    assert longer.prefix_id == found.prefix_id
    assert cache.allocate("b", tokens=PROMPT).last_logits == "logits"


def test_given_an_event_reader_when_a_prefix_is_found_then_its_id_is_the_digest_of_the_events() -> None:
    cache = seed()
    with cache.manager.subscribe() as events:
        cache.store_prefix(PROMPT, cache.allocate("a", tokens=PROMPT))
        stored = events.poll().events[-1]
    found = cache.find_prefix(PROMPT + [1])  # noqa: RUF005
    assert found is not None
    assert found.prefix_id == stored.digests[-1]  # type: ignore[union-attr]


def test_given_other_tokens_when_storing_a_prefix_then_it_is_refused_and_nothing_is_committed() -> None:
    cache = seed()
    handle = cache.allocate("a", tokens=PROMPT)
    with pytest.raises(InvalidArgumentError, match="holds other tokens"):
        cache.store_prefix([9] * 16, handle)
    assert handle.num_committed == 0


@pytest.mark.parametrize(("num_tokens", "copied"), [(8, 0), (10, 1), (16, 0)])
def test_given_a_source_when_sharing_its_prefix_then_full_blocks_are_shared_and_a_cut_one_is_copied(
    num_tokens: int, copied: int
) -> None:
    cache = seed()
    cache.store_prefix(PROMPT, cache.allocate("a", tokens=PROMPT))
    child = cache.share_prefix("a", "b", num_tokens)
    cache.extend("b", 1)
    full = num_tokens // 4
    assert cache.get_block_table("b")[:full] == cache.get_block_table("a")[:full]
    assert len(cache.manager.take_copies()) == copied
    assert (child.num_committed, child.num_reserved) == (num_tokens, num_tokens + 1)
    cache.deallocate("a")
    cache.manager.check()


def test_given_an_impossible_share_then_the_target_does_not_exist_afterwards() -> None:
    cache = seed(num_blocks=4)
    cache.store_prefix(PROMPT, cache.allocate("a", tokens=PROMPT))
    with pytest.raises(OutOfBlocksError):
        cache.share_prefix("a", "b", 10)  # the cut block would need a copy, and the pool is full
    with pytest.raises(SequenceStateError, match="16 written tokens"):
        cache.share_prefix("a", "b", 17)
    with pytest.raises(InvalidArgumentError):
        cache.share_prefix("a", "b", 0)
    with pytest.raises(DuplicateRequestError):
        cache.share_prefix("a", "a", 8)
    assert cache.get_handle("b") is None
    assert [name for name, _ in cache.list_handles()] == ["a"]
    cache.manager.check()


def test_given_cached_prefixes_when_evicted_collected_or_cleared_then_blocks_become_free() -> None:
    now = [0.0]
    layers = [LayerSpec(2, 8)]
    manager = KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=16, default_ttl=10.0), clock=lambda: now[0])
    cache = FerrumKVCacheManager(manager)
    for name, first in (("a", 0), ("b", 100)):
        tokens = list(range(first, first + 16))
        cache.store_prefix(tokens, cache.allocate(name, tokens=tokens))
        cache.deallocate(name)
    assert cache.evict_prefixes(3) == 3
    stats = cache.prefix_cache_stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.total_cached_tokens) == (0, 8, 3, 20)
    now[0] = 11.0
    collected = cache.gc()
    assert (collected.caches_freed, collected.memory_freed) == (5, 5 * manager.config.block_bytes)
    cache.clear_prefix_cache()
    assert manager.get_num_free_blocks() == 16


def test_given_a_second_pressure_callback_then_it_replaces_the_first() -> None:
    cache = seed()
    first: list[MemoryPressure] = []
    second: list[MemoryPressure] = []
    cache.set_pressure_callback(first.append)
    cache.set_pressure_callback(second.append)
    cache.allocate("a", 64)
    assert (first, second) == ([], [MemoryPressure.CRITICAL])
    assert cache.check_pressure() is MemoryPressure.CRITICAL


def test_given_a_swapped_request_when_deallocated_then_its_host_blocks_are_free_again() -> None:
    cache = seed(num_cpu_blocks=8)
    cache.manager.commit(cache.allocate("a", 16), 16)
    assert cache.swap_out("a") == 4
    assert cache.get_block_table("a") == [None] * 4
    assert cache.get_num_free_blocks() == 16
    assert cache.swap_in("a") == 4
    cache.swap_out("a")
    cache.deallocate("a")
    assert all(pool.free == pool.total for pool in cache.manager.stats().pools)


# --- vLLM V0 ----------------------------------------------------------------------------------------------------------


def test_given_a_fork_when_both_write_then_one_block_is_copied_once() -> None:
    blocks = BlockManager(4, 16, 8)
    blocks.allocate("a", [1, 2, 3, 4, 5])
    blocks.mark_blocks_as_computed("a", 5)
    blocks.fork("a", "b")
    assert blocks.can_append_slots(["a", "b"])
    assert blocks.append_slots("b") == [(1, 2)]
    assert blocks.append_slots("a") == []
    assert blocks.get_block_table("a")[0] == blocks.get_block_table("b")[0]
    assert blocks.get_common_computed_block_ids(["a", "b"]) == [0]


def test_given_lookahead_slots_when_appending_then_drafts_get_places_of_their_own() -> None:
    blocks = BlockManager(4, 16)
    assert blocks.can_allocate([1] * 60) is AllocStatus.OK
    assert blocks.can_allocate([1] * 60, num_lookahead_slots=4) is AllocStatus.NEVER
    blocks.allocate("a", [1, 2, 3, 4], num_lookahead_slots=1)
    assert len(blocks.get_block_table("a")) == 2
    blocks.append_slots("a", num_tokens=1, num_lookahead_slots=8)
    assert len(blocks.get_block_table("a")) == 4
    blocks.free("a")
    assert blocks.get_num_free_gpu_blocks() == 16


def test_given_a_group_of_forks_when_swapped_then_shared_blocks_move_once_and_stay_shared() -> None:
    blocks = BlockManager(4, 16, 8, enable_caching=False)
    blocks.allocate("a", PROMPT)
    blocks.mark_blocks_as_computed("a", 16)
    blocks.fork("a", "b")
    assert blocks.can_swap_out(["a", "b"])
    assert [dst for _, dst in blocks.swap_out(["a", "b"])] == [0, 1, 2, 3]
    assert blocks.get_num_free_cpu_blocks() == 4
    assert blocks.can_swap_in(["a", "b"]) is AllocStatus.OK
    assert len(blocks.swap_in(["a", "b"])) == 4
    assert blocks.get_block_table("a") == blocks.get_block_table("b")
    assert blocks.get_prefix_cache_hit_rate() == -1.0
    blocks.manager.check()


def test_given_a_sliding_window_when_a_sequence_grows_then_the_blocks_before_it_are_dropped_from_its_table() -> None:
    blocks = BlockManager(4, 16, sliding_window=8)
    blocks.allocate("a", PROMPT)
    blocks.mark_blocks_as_computed("a", 16)
    for token in range(20):
        blocks.append_slots("a")
        blocks.mark_blocks_as_computed("a", [token])
    table = blocks.get_block_table("a")
    assert len(table) == 9
    assert sum(block is not None for block in table) <= 3
    assert blocks.get_num_free_gpu_blocks() >= 13
    blocks.fork("a", "b")
    blocks.free("a")
    blocks.free("b")
    assert blocks.reset_prefix_cache() is True
    assert blocks.manager.get_num_free_blocks() == 16


def test_given_live_sequences_when_resetting_the_prefix_cache_then_it_says_no() -> None:
    blocks = BlockManager(4, 16)
    blocks.allocate("a", PROMPT)
    blocks.mark_blocks_as_computed("a", 16)
    assert blocks.reset_prefix_cache() is False
    blocks.free("a")
    blocks.allocate("b", PROMPT)
    assert blocks.get_num_cached_tokens("b") == 15
    assert blocks.get_prefix_cache_hit_rate() == pytest.approx(4 / 8)
    blocks.free("b")
    assert blocks.reset_prefix_cache() is True
    assert blocks.manager.get_num_free_blocks() == 16


def test_given_a_manager_whose_copies_pairs_cannot_express_when_wrapped_then_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="one layer group"):
        BlockManager(4, 16, manager=seed().manager)
    with pytest.raises(InvalidArgumentError, match="wraps a KVCacheManager"):
        SeedKVCacheManager("manager")  # type: ignore[arg-type]


# --- TensorRT-LLM -----------------------------------------------------------------------------------------------------


def test_given_retention_in_milliseconds_when_translated_then_it_is_the_same_in_seconds() -> None:
    ranges = [TokenRangeRetentionConfig(0, 64, 90, 500), TokenRangeRetentionConfig(64, None, 20)]
    config = KvCacheRetentionConfig(ranges, decode_retention_priority=10)
    assert config.retention == Retention([TokenRange(0, 64, 90, 0.5), TokenRange(64, None, 20)], decode_priority=10)
    with pytest.raises(InvalidArgumentError, match=r"0\.\.100"):
        _ = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 64, 101)]).retention


def test_given_windows_that_repeat_over_the_layers_then_there_is_one_group_for_each() -> None:
    cache = TrtLlmKVCacheManager([2] * 4, 8, 4, 32, max_attention_window=[64, 8], max_seq_len=64)
    assert [(group.window, group.layers) for group in cache.manager.config.groups] == [(None, (0, 2)), (8, (1, 3))]
    with pytest.raises(ConfigError, match="max_attention_window"):
        TrtLlmKVCacheManager([2], 8, max_attention_window=[])


def test_given_a_sequence_when_it_runs_then_reuse_rewind_and_pins_do_what_they_say() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    assert cache.add_sequence("a", PROMPT) == 0
    cache.store_context_blocks("a")
    cache.store_context_blocks("a")  # nothing new: nothing happens
    assert cache.add_sequence("b", PROMPT) == 15
    assert cache.add_sequence("salted", PROMPT, cache_salt="tenant") == 0
    assert cache.add_sequence("tuned", PROMPT, lora_task_id="adapter") == 0
    cache.remove_sequence("salted")
    cache.remove_sequence("tuned")
    for _ in range(4):
        cache.add_token("a")
    cache.rewind_kv_cache("a", 4)
    assert len(cache.get_cache_block_ids("a")) == 4
    pin = cache.remove_sequence("a", pin_on_release=True)
    assert pin is not None
    assert cache.remove_sequence("b") is None
    assert cache.manager.evict(16) == 0
    cache.manager.unpin(pin)
    assert cache.manager.evict(16) == 4
    stats = cache.get_kv_cache_stats()
    assert (stats["free_num_blocks"], stats["used_num_blocks"], stats["reused_blocks"]) == (16, 0, 4)


def test_given_events_when_blocks_come_move_and_go_then_all_four_kinds_are_told_in_order() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 4, 4, event_buffer_max_size=64, watermark=0.0)
    cache.add_sequence("a", PROMPT)
    cache.store_context_blocks("a")
    cache.remove_sequence("a")
    cache.manager.offload(2)
    cache.manager.reset_prefix_cache()
    events = cache.get_latest_events(timeout_ms=10)
    created, stored, *rest = (event["data"] for event in events)
    assert created["num_blocks_per_cache_level"] == [4, 4, 0]
    assert stored["parent_hash"] is None
    assert [[token["token_id"] for token in block["tokens"]] for block in stored["blocks"]][1] == [4, 5, 6, 7]
    updated = [data for data in rest if data["type"] == "updated"]
    assert [data["cache_level"]["new_value"] for data in updated] == [1, 1]
    assert [data["priority"] for data in updated] == [None, None]
    removed = [block for data in rest if data["type"] == "removed" for block in data["block_hashes"]]
    assert sorted(removed) == sorted(block["block_hash"] for block in stored["blocks"])
    assert cache.get_latest_events() == []


def test_given_no_event_buffer_then_events_are_off_and_asking_for_them_says_so() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    with pytest.raises(ConfigError, match="events are off"):
        cache.get_latest_events()
    with pytest.raises(InvalidArgumentError, match="event_buffer_size is 0"):
        cache.manager.subscribe()


def test_given_a_request_over_max_seq_len_then_can_allocate_says_never() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, max_seq_len=8)
    assert cache.manager.can_allocate(num_tokens=8).status is AllocStatus.OK
    assert cache.manager.can_allocate(num_tokens=9).status is AllocStatus.NEVER
