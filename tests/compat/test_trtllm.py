"""TensorRT-LLM's spellings: sequences, retention, statistics, settings and bytes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kvpool import AllocStatus
from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager
from kvpool.errors import ConfigError, InvalidArgumentError, OutOfBlocksError, SequenceStateError
from kvpool.scope import Retention, TokenRange

torch = pytest.importorskip("torch")

PROMPT = list(range(16))


def test_given_retention_in_milliseconds_when_translated_then_it_is_the_same_in_seconds() -> None:
    ranges = [TokenRangeRetentionConfig(0, 64, 90, 500), TokenRangeRetentionConfig(64, None, 20)]
    config = KvCacheRetentionConfig(ranges, decode_retention_priority=10)
    assert config.retention == Retention([TokenRange(0, 64, 90, 0.5), TokenRange(64, None, 20)], decode_priority=10)
    for priority in (None, 101, 50.0):
        with pytest.raises(InvalidArgumentError, match="decode_retention_priority"):
            KvCacheRetentionConfig([], priority)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"0\.\.100"):
        _ = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 64, 101)]).retention


def test_given_retention_as_tensorrt_llm_writes_it_then_it_means_the_same() -> None:
    half_a_second = timedelta(milliseconds=500)
    ranges = [KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 64, 90, half_a_second)]
    config = KvCacheRetentionConfig(ranges, 10, half_a_second)
    assert config.retention == Retention([TokenRange(0, 64, 90, 0.5)], decode_priority=10, decode_duration=0.5)
    with pytest.raises(InvalidArgumentError, match="positive number of seconds"):
        TokenRangeRetentionConfig(0, 64, 90, timedelta(0))


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
    assert [len(ids) for ids in cache.get_cache_block_ids("a")] == [4]
    pin = cache.remove_sequence("a", pin_on_release=True)
    assert pin is not None
    assert cache.remove_sequence("b") is None
    assert cache.manager.cache.evict(16) == 0
    cache.manager.cache.unpin(pin)
    assert cache.manager.cache.evict(16) == 4
    stats = cache.get_kv_cache_stats()
    assert (stats.free_num_blocks, stats.used_num_blocks, stats.reused_blocks) == (16, 0, 4)


def test_given_a_request_over_max_seq_len_then_can_allocate_says_never() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, max_seq_len=8)
    assert cache.manager.can_allocate(num_tokens=8).status is AllocStatus.OK
    assert cache.manager.can_allocate(num_tokens=9).status is AllocStatus.NEVER


# --- storing at the end -----------------------------------------------------------------------------------------------


def test_given_all_tokens_of_a_sequence_when_it_is_removed_then_all_but_the_last_are_stored() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    cache.add_sequence("a", PROMPT[:6])
    for _ in range(6):
        cache.add_token("a")
    cache.remove_sequence("a", PROMPT[:13])  # the thirteenth was sampled, never computed
    assert cache.add_sequence("b", PROMPT) == 12


def test_given_a_sequence_that_ends_inside_a_block_when_it_is_removed_then_that_block_is_reused_in_part() -> None:
    for enable_partial_reuse, found in ((True, 11), (False, 8)):
        cache = TrtLlmKVCacheManager([2], 8, 4, 16, enable_partial_reuse=enable_partial_reuse)
        cache.add_sequence("a", PROMPT[:12])
        cache.remove_sequence("a", PROMPT[:12])  # eleven were computed
        assert cache.add_sequence("b", PROMPT) == found


def test_given_no_tokens_when_a_sequence_is_removed_then_nothing_that_may_be_unwritten_is_stored() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    cache.add_sequence("cancelled", PROMPT)
    cache.remove_sequence("cancelled")
    assert cache.add_sequence("b", PROMPT) == 0


def test_given_wrong_tokens_when_a_sequence_is_removed_then_it_is_refused_and_still_runs() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    cache.add_sequence("a", PROMPT)
    with pytest.raises(InvalidArgumentError, match="holds other tokens"):
        cache.remove_sequence("a", [9] * 17)
    with pytest.raises(SequenceStateError):
        cache.remove_sequence("a", [*PROMPT, 1, 2, 3])  # two of them have no place
    assert cache.handle("a").num_committed == 0


def test_given_pin_on_release_then_what_is_stored_at_the_end_is_pinned_and_not_free() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    cache.add_sequence("a", PROMPT)
    pin = cache.remove_sequence("a", [*PROMPT, 1], pin_on_release=True)
    assert pin is not None
    assert pin.num_tokens == 16
    stats = cache.get_kv_cache_stats()
    assert (stats.free_num_blocks, stats.used_num_blocks) == (12, 0)
    with pytest.raises(OutOfBlocksError):
        cache.add_sequence("b", list(range(100, 152)))
    cache.manager.cache.unpin(pin)
    assert cache.get_kv_cache_stats().free_num_blocks == 16


@pytest.mark.parametrize("block_reuse", [True, False])
def test_given_pin_on_release_and_nothing_to_pin_then_the_sequence_ends_without_a_pin(block_reuse: bool) -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, enable_block_reuse=block_reuse)
    cache.add_sequence("short", [1, 2])
    assert cache.remove_sequence("short", [1, 2, 3], pin_on_release=True) is None
    cache.add_sequence("cancelled", PROMPT)
    assert cache.remove_sequence("cancelled", pin_on_release=True) is None
    assert cache.manager.handles == []


def test_given_pins_of_the_whole_pool_then_they_hold_and_are_ended_by_what_made_them() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, watermark=0.0)
    cache.add_sequence("a", list(range(64)))
    pin = cache.remove_sequence("a", list(range(65)), pin_on_release=True)
    assert pin is not None
    assert (pin.num_tokens, cache.get_kv_cache_stats().free_num_blocks) == (64, 0)
    with pytest.raises(OutOfBlocksError):
        cache.add_sequence("b", [1])
    with pytest.raises(InvalidArgumentError, match="a pin is what"):
        cache.unpin_blocks_by_id([0, 1])  # type: ignore[arg-type]
    cache.unpin_blocks_by_id(pin)
    assert cache.get_kv_cache_stats().free_num_blocks == 16


def test_given_a_running_sequence_then_what_it_stored_can_be_pinned() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    cache.add_sequence("a", PROMPT)
    assert cache.pin_blocks("a") is None
    pin = cache.store_blocks_for_reuse("a", [*PROMPT, 1], pin_blocks=True)
    assert pin is not None
    cache.remove_sequence("a")
    assert cache.manager.cache.evict(16) == 0
    cache.unpin_blocks_by_id(pin)
    cache.reset_reuse_state()
    assert cache.add_sequence("b", PROMPT) == 0


def test_given_the_number_of_tokens_only_then_blocks_are_given_and_nothing_is_reused() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    cache.add_sequence("a", PROMPT)
    cache.remove_sequence("a", [*PROMPT, 1])
    assert cache.add_sequence("b", 16) == 0
    assert [len(ids) for ids in cache.get_cache_block_ids("b")] == [4]
    with pytest.raises(InvalidArgumentError, match="beam width"):
        cache.add_sequence("c", 16, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="need tokens"):
        cache.add_sequence("c", 16, extra_ids=[1] * 16)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_given_windows_of_their_own_pools_then_free_blocks_are_told_for_each_and_bytes_as_allocated() -> None:
    cache = TrtLlmKVCacheManager([2, 4], 8, 4, 16, 8, max_attention_window=[64, 8], max_seq_len=64)
    cache.add_sequence("a", PROMPT)
    stats = cache.get_kv_cache_stats()
    assert stats.num_free_blocks_per_window_size == {64: 12, 8: 12}
    counts = (stats.max_num_blocks, stats.free_num_blocks, stats.used_num_blocks)
    assert counts == (32, 24, 8)  # no host blocks
    assert stats.allocated_bytes == 16 * 4 * (2 + 4) * 8 * 2 * 2
    assert stats.tokens_per_block == 4


def test_given_reuse_then_blocks_are_counted_as_new_or_reused_for_the_cache_and_for_each_request() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 32)
    cache.add_sequence("a", PROMPT)
    cache.store_context_blocks("a")
    cache.add_sequence("b", [*PROMPT[:8], *range(50, 58)])
    assert cache.get_request_stats("a") == dict(
        alloc_total_blocks=4, alloc_new_blocks=4, reused_blocks=0, missed_blocks=4
    )
    assert cache.get_request_stats("b") == dict(
        alloc_total_blocks=2, alloc_new_blocks=2, reused_blocks=2, missed_blocks=2
    )
    stats = cache.get_kv_cache_stats()
    assert (stats.alloc_total_blocks, stats.alloc_new_blocks) == (6, 6)
    assert (stats.reused_blocks, stats.missed_blocks, stats.cache_hit_rate) == (2, 6, 0.25)


def test_given_a_prompt_that_ends_inside_a_block_then_its_last_block_is_missed_or_reused_as_any_other() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 32)
    prompt = PROMPT[:10]
    cache.add_sequence("a", prompt)
    assert cache.get_request_stats("a") == dict(
        alloc_total_blocks=3, alloc_new_blocks=3, reused_blocks=0, missed_blocks=3
    )
    cache.store_context_blocks("a")
    cache.add_sequence("b", prompt)
    assert cache.get_request_stats("b") == dict(
        alloc_total_blocks=1, alloc_new_blocks=1, reused_blocks=2, missed_blocks=1
    )
    stats = cache.get_kv_cache_stats()
    assert (stats.alloc_total_blocks, stats.reused_blocks, stats.missed_blocks) == (4, 2, 4)
    assert stats.cache_hit_rate == 2 / 6
    cache.remove_sequence("a", [*prompt, 1])
    cache.add_sequence("c", prompt)  # nine of the ten: one token of the last block is copied
    assert cache.get_request_stats("c") == dict(
        alloc_total_blocks=1, alloc_new_blocks=1, reused_blocks=3, missed_blocks=0
    )
    assert cache.get_kv_cache_stats().alloc_total_blocks == 5


@pytest.mark.parametrize("block_reuse", [True, False])
def test_given_nothing_to_look_for_then_nothing_is_missed(block_reuse: bool) -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 32, enable_block_reuse=block_reuse)
    cache.add_sequence("a", 10 if block_reuse else PROMPT[:10])
    assert cache.get_request_stats("a") == dict(
        alloc_total_blocks=3, alloc_new_blocks=3, reused_blocks=0, missed_blocks=0
    )
    stats = cache.get_kv_cache_stats()
    assert (stats.alloc_total_blocks, stats.missed_blocks, stats.cache_hit_rate) == (3, 0, 0.0)


# --- settings and bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_attention_windows=[8]), "no setting 'max_attention_windows'; the nearest: max_attention_window"),
        (dict(enable_block_resue=True), "the nearest: enable_block_reuse"),
        (dict(gpu_blocks=8), "no setting 'gpu_blocks'"),
        (dict(xyzzy=1), "it knows .*tokens_per_block"),
        (dict(attention_dp_rank=-1), "attention_dp_rank=-1"),
        (dict(max_pinned_tokens=8), "no setting 'max_pinned_tokens'"),
        (dict(max_beam_width=4), "max_beam_width=4 must be 1: .* fork"),
        (dict(cross_kv_cache_fraction=0.5), "cross_kv_cache_fraction=0.5 must be None: .*cross_attention=True"),
        (dict(use_uvm=True), "use_uvm=True must be False"),
        (dict(sink_token_length=4), "sink_token_length=4 needs a max_attention_window"),
        (dict(free_gpu_memory_fraction=1.0), "free_gpu_memory_fraction=1.0 must be above 0 and below 1"),
        (dict(free_gpu_memory_fraction=0.5, device="cpu"), "pass free_gpu_bytes"),
        (
            dict(free_gpu_memory_fraction=0.5, max_gpu_total_bytes=2**20),
            "free_gpu_memory_fraction and max_gpu_total_bytes",
        ),
        (dict(max_tokens=64, blocks_in_primary_pool=2), "blocks_in_primary_pool and max_tokens"),
        (dict(max_tokens=0), "max_tokens=0 must be at least 1"),
        (dict(blocks_in_primary_pool=0), "blocks_in_primary_pool=0"),
        (dict(max_gpu_total_bytes=1), "max_gpu_total_bytes=1 bytes is too little"),
        (dict(host_cache_size=1), "host_cache_size=1 bytes is too little"),
        (dict(host_cache_size=2**20, blocks_in_secondary_pool=2), "host_cache_size both size"),
        (dict(secondary_offload_min_priority=101), "secondary_offload_min_priority=101 must be at most 100"),
        (dict(secondary_offload_min_priority=5, onboard_blocks=False), "does nothing with onboard_blocks=False"),
        (dict(onboard_blocks=1), "onboard_blocks=1 must be True or False"),
        (dict(max_attention_window=8), "max_attention_window=8 must be a list"),
        (dict(max_attention_window="88"), "max_attention_window='88' must be a list"),
        (dict(max_attention_window=[]), r"max_attention_window=\[\] must be a list"),
        (dict(max_attention_window=[8, "x"]), "max_attention_window='x' must be an integer"),
        (dict(max_attention_window=[8.0]), "max_attention_window=8.0 must be an integer"),
        (dict(tokens_per_block="4"), "tokens_per_block='4' must be an integer"),
        (dict(tokens_per_block=0, max_tokens=8), "tokens_per_block=0 must be at least 1"),
        (dict(enable_block_reuse=1), "enable_block_reuse=1 must be True or False"),
        (dict(event_buffer_max_size=-1), "event_buffer_max_size=-1"),
    ],
)
def test_given_a_setting_that_nobody_knows_then_the_error_names_the_nearest(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrtLlmKVCacheManager([2], 8, **settings)
    with pytest.raises(ConfigError, match=r"num_kv_heads_per_layer=\(\) must be a list"):
        TrtLlmKVCacheManager((), 8)
    with pytest.raises(ConfigError, match="the nearest: token_end, token_start"):
        TokenRangeRetentionConfig(0, token_ends=4, priority=3)  # type: ignore[call-arg]


def test_given_sizes_by_their_own_names_then_pools_have_so_many_blocks() -> None:
    block = 4 * 2 * 8 * 2 * 2  # bytes of 4 tokens, 2 heads of 8, K and V, float16
    for settings, primary, secondary in (
        (dict(max_tokens=30), 8, 0),
        (dict(max_gpu_total_bytes=10 * block), 10, 0),
        (dict(max_gpu_total_bytes=10 * block, max_tokens=16), 4, 0),
        (dict(free_gpu_memory_fraction=0.5, free_gpu_bytes=40 * block), 20, 0),
        (dict(free_gpu_memory_fraction=0.5, free_gpu_bytes=40 * block, max_tokens=8), 2, 0),
        (dict(host_cache_size=6 * block), 1024, 6),
        (dict(blocks_in_primary_pool=5, blocks_in_secondary_pool=3), 5, 3),
    ):
        window = TrtLlmKVCacheManager([2], 8, 4, **settings).block_manager.get_window_block_manager()
        assert (window.num_primary_blocks, window.num_secondary_blocks) == (primary, secondary)


def test_given_a_memory_that_two_windows_share_then_max_tokens_is_what_each_can_hold() -> None:
    cache = TrtLlmKVCacheManager([2, 2], 8, 4, max_attention_window=[None, 8], max_tokens=64)
    assert cache.max_num_blocks == 32


def test_given_sink_tokens_then_windowed_layers_keep_them() -> None:
    cache = TrtLlmKVCacheManager([2, 2], 8, 4, 32, max_attention_window=[None, 8], sink_token_length=4, max_seq_len=64)
    cache.add_sequence("a", list(range(32)))
    cache.store_context_blocks("a")
    (ids,) = cache.get_cache_block_ids("a", 8)
    assert [block is not None for block in ids] == [True, *[False] * 5, True, True]


def test_given_priorities_below_the_least_one_to_offload_then_these_blocks_are_dropped() -> None:
    for settings, found in (({}, 0), (dict(secondary_offload_min_priority=20), 15), (dict(onboard_blocks=False), 0)):
        cache = TrtLlmKVCacheManager([2], 8, 4, 4, 4, watermark=0.0, **settings)
        cache.add_sequence("a", PROMPT, KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, 20)], 20))
        cache.remove_sequence("a", [*PROMPT, 1])
        cache.add_sequence("b", list(range(50, 66)))
        cache.remove_sequence("b")
        assert cache.add_sequence("again", PROMPT) == found


@pytest.mark.parametrize("lora", ["7", "", "٧", True, -1, 1.5, b"sql", 2**64])
def test_given_a_lora_that_is_no_number_and_no_name_then_it_is_refused(lora: Any) -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16)
    with pytest.raises(InvalidArgumentError, match="lora_task_id"):
        cache.add_sequence("a", PROMPT, lora_task_id=lora)
    assert cache.manager.handles == []


def test_given_its_switches_then_reuse_and_partial_reuse_can_be_off() -> None:
    for switches, cached in (({}, 9), (dict(enable_partial_reuse=False), 8), (dict(enable_block_reuse=False), 0)):
        cache = TrtLlmKVCacheManager([2], 8, 4, 32, **switches)
        cache.add_sequence("a", PROMPT)
        cache.store_context_blocks("a")
        assert cache.add_sequence("b", [*PROMPT[:9], 99, 99]) == cached


def test_given_blocks_that_move_to_the_secondary_pool_and_back_then_their_bytes_move_along() -> None:
    cache = TrtLlmKVCacheManager([2] * 2, 8, 4, 4, 4, watermark=0.0, device="cpu")
    cache.add_sequence("a", PROMPT)
    given = torch.randn(2, 2, 16, 2, 8).half()
    for layer, (k, v) in enumerate(given):
        cache.write("a", layer, 0, k, v)
    cache.remove_sequence("a", [*PROMPT, 1])
    cache.add_sequence("b", list(range(50, 66)))  # needs all primary blocks: the others move down
    for layer in range(2):
        cache.write("b", layer, 0, torch.zeros(16, 2, 8), torch.zeros(16, 2, 8))
    cache.remove_sequence("b")
    assert cache.add_sequence("again", PROMPT) == 15
    assert cache.manager.stats().onboarded_blocks == 4
    for layer, (k, v) in enumerate(given):
        found_k, found_v = cache.read("again", layer)
        assert torch.equal(found_k, k[:15])
        assert torch.equal(found_v, v[:15])
    assert tuple(cache.get_primary_pool_data(1)["k"].data.shape) == (4, 4, 2, 8)
