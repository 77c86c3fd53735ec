"""TensorRT-LLM's spellings: sequences, retention, statistics, and every field of its events."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import AllocStatus
from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager
from kvpool.errors import ConfigError, InvalidArgumentError, OutOfBlocksError, SequenceStateError
from kvpool.prefix.retention import Retention, TokenRange

torch = pytest.importorskip("torch")

PROMPT = list(range(16))


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
    assert (stats["free_num_blocks"], stats["used_num_blocks"]) == (12, 0)
    with pytest.raises(OutOfBlocksError):
        cache.add_sequence("b", list(range(100, 152)))
    cache.manager.unpin(pin)
    assert cache.get_kv_cache_stats()["free_num_blocks"] == 16


# --- statistics -------------------------------------------------------------------------------------------------------


def test_given_windows_of_their_own_pools_then_free_blocks_are_told_for_each_and_bytes_as_allocated() -> None:
    cache = TrtLlmKVCacheManager([2, 4], 8, 4, 16, 8, max_attention_window=[64, 8], max_seq_len=64)
    cache.add_sequence("a", PROMPT)
    stats = cache.get_kv_cache_stats()
    assert stats["num_free_blocks_per_window_size"] == {64: 12, 8: 12}
    assert (stats["max_num_blocks"], stats["free_num_blocks"], stats["used_num_blocks"]) == (
        32,
        24,
        8,
    )  # no host blocks
    assert stats["allocated_bytes"] == 16 * 4 * (2 + 4) * 8 * 2 * 2
    assert stats["tokens_per_block"] == 4


def test_given_reuse_then_blocks_are_counted_as_new_or_reused_for_the_cache_and_for_each_request() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 32)
    cache.add_sequence("a", PROMPT)
    cache.store_context_blocks("a")
    cache.add_sequence("b", [*PROMPT[:8], *range(50, 58)])
    assert cache.get_request_stats("a") == dict(
        alloc_total_blocks=4, alloc_new_blocks=4, reused_blocks=0, missed_blocks=4
    )
    assert cache.get_request_stats("b") == dict(
        alloc_total_blocks=4, alloc_new_blocks=2, reused_blocks=2, missed_blocks=2
    )
    stats = cache.get_kv_cache_stats()
    assert (stats["alloc_total_blocks"], stats["alloc_new_blocks"]) == (8, 6)
    assert (stats["reused_blocks"], stats["missed_blocks"], stats["cache_hit_rate"]) == (2, 6, 0.25)


# --- events -----------------------------------------------------------------------------------------------------------


def stored_blocks(cache: TrtLlmKVCacheManager) -> list[dict[str, Any]]:
    events = [event["data"] for event in cache.get_latest_events()]
    return [block for data in events if data["type"] == "stored" for block in data["blocks"]]


def test_given_an_event_then_its_envelope_names_rank_window_and_hash_algorithm() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, max_seq_len=64, event_buffer_max_size=8, attention_dp_rank=3)
    cache.add_sequence("a", PROMPT)
    cache.store_context_blocks("a")
    events = cache.get_latest_events()
    assert [event["data"]["type"] for event in events] == ["created", "stored"]
    for event in events:
        assert (event["attention_dp_rank"], event["hash_algo"]) == (3, "kvpool_sha256")
        assert (event["window_size"], event["layer_group_id"]) == (64, 0)
    assert events[1]["event_id"] == events[0]["event_id"] + 1


@pytest.mark.parametrize(("lora", "lora_id"), [(7, 7), ("sql", "sql"), (None, None), (0, 0)])
def test_given_a_lora_and_a_salt_then_blocks_carry_them_and_are_reused_only_with_both(lora: Any, lora_id: Any) -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=64)
    cache.add_sequence("a", PROMPT, lora_task_id=lora, cache_salt="tenant")
    cache.store_context_blocks("a")
    blocks = stored_blocks(cache)
    assert [(block["lora_id"], block["cache_salt"]) for block in blocks] == [(lora_id, "tenant")] * 4
    assert {(block["cache_level"], block["priority"]) for block in blocks} == {(0, 35)}
    assert cache.add_sequence("same", PROMPT, lora_task_id=lora, cache_salt="tenant") == 15
    assert cache.add_sequence("other salt", PROMPT, lora_task_id=lora) == 0
    assert cache.add_sequence("other lora", PROMPT, lora_task_id="other", cache_salt="tenant") == 0


def test_given_extra_ids_then_tokens_carry_them_and_equal_tokens_with_others_are_not_reused() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=64)
    extras = [0, 0, 5, 5, 5, 6, 0, 0, *([9] * 8)]
    cache.add_sequence("a", PROMPT, extra_ids=extras)
    cache.store_context_blocks("a")
    for _ in range(4):
        cache.add_token("a")
    cache.store_new_block("a", [1, 2, 3, 4])
    found = [token["token_extra_id"] for block in stored_blocks(cache) for token in block["tokens"]]
    assert found == [*extras, 0, 0, 0, 0]
    assert cache.add_sequence("same", PROMPT, extra_ids=extras) == 15
    assert cache.add_sequence("none", PROMPT) == 0
    assert cache.add_sequence("others", PROMPT, extra_ids=[1] * 16) == 0
    for wrong in ([1], [-1] * 16, [1.5] * 16):
        with pytest.raises(InvalidArgumentError, match="extra_ids"):
            cache.add_sequence("wrong", PROMPT, extra_ids=wrong)


def test_given_multimodal_inputs_then_the_block_where_one_begins_names_it() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=64)
    cache.add_sequence("a", PROMPT, multimodal=[("cafe", 5), ("beef", 12)])
    cache.store_context_blocks("a")
    assert [block["mm_keys"] for block in stored_blocks(cache)] == [
        [],
        [{"type": "mm_key", "hash": "cafe", "start_offset": 1}],
        [],
        [{"type": "mm_key", "hash": "beef", "start_offset": 0}],
    ]
    assert cache.add_sequence("b", PROMPT, multimodal=[("cafe", 5), ("d00d", 12)]) < 13


def test_given_multimodal_inputs_with_lengths_then_blocks_before_another_one_are_reused() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=64)
    cache.add_sequence("a", PROMPT, multimodal=[("cafe", 5, 6), ("beef", 12, 2)])
    cache.store_context_blocks("a")
    assert [block["mm_keys"] for block in stored_blocks(cache)] == [
        [],
        [{"type": "mm_key", "hash": "cafe", "start_offset": 1}],
        [],
        [{"type": "mm_key", "hash": "beef", "start_offset": 0}],
    ]
    assert cache.add_sequence("b", PROMPT, multimodal=[("cafe", 5, 6), ("d00d", 12, 2)]) == 12
    assert cache.add_sequence("c", PROMPT, multimodal=[("d00d", 5, 6)]) == 5
    assert cache.add_sequence("d", PROMPT) == 5
    for wrong in (("cafe", 5, 99), ("cafe", 5, 6, 7), ("cafe",)):
        with pytest.raises(InvalidArgumentError, match="multimodal"):
            cache.add_sequence("wrong", PROMPT, multimodal=[wrong])  # type: ignore[list-item]


def test_given_blocks_that_go_and_come_back_then_extra_ids_stay_at_their_tokens() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 4, event_buffer_max_size=256, max_attention_window=[8], watermark=0.0)
    extras = list(range(1, 33))
    cache.add_sequence("a", list(range(8)), extra_ids=extras[:8])
    cache.store_context_blocks("a")
    for token in range(8, 40):  # the window drops blocks, and new ones take their place
        cache.add_token("a")
        cache.store_new_block("a", [token])
    blocks = stored_blocks(cache)
    assert len(blocks) == 10
    assert [t["token_extra_id"] for t in blocks[1]["tokens"]] == [5, 6, 7, 8]
    assert {t["token_extra_id"] for block in blocks[2:] for t in block["tokens"]} == {0}


# --- settings and bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_attention_windows=[8]), "no setting 'max_attention_windows'; the nearest: max_attention_window"),
        (dict(enable_block_resue=True), "the nearest: enable_block_reuse"),
        (dict(gpu_blocks=8), "no setting 'gpu_blocks'"),
        (dict(xyzzy=1), "it knows .*tokens_per_block"),
        (dict(attention_dp_rank=-1), "attention_dp_rank=-1"),
    ],
)
def test_given_a_setting_that_nobody_knows_then_the_error_names_the_nearest(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrtLlmKVCacheManager([2], 8, **settings)
    with pytest.raises(ConfigError, match="the nearest: token_end, token_start"):
        TokenRangeRetentionConfig(0, token_ends=4, priority=3)  # type: ignore[call-arg]


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
    assert tuple(cache.get_primary_pool_data(1).k.shape) == (4, 4, 2, 8)
