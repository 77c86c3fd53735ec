"""TensorRT-LLM's events: their kinds, every field of them, and what may not be mistaken for another."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager
from kvpool.errors import ConfigError, InvalidArgumentError

PROMPT = list(range(16))


def stored_blocks(cache: TrtLlmKVCacheManager) -> list[dict[str, Any]]:
    events = [event["data"] for event in cache.get_latest_events()]
    return [block for data in events if data["type"] == "stored" for block in data["blocks"]]


def test_given_events_when_blocks_come_move_and_go_then_all_four_kinds_are_told_in_order() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 4, 4, event_buffer_max_size=64, watermark=0.0)
    cache.add_sequence("a", PROMPT)
    cache.store_context_blocks("a")
    cache.remove_sequence("a")
    cache.manager.cache.offload(2)
    cache.manager.cache.reset()
    events = cache.get_latest_events(timeout_ms=10)
    created, stored, *rest = (event["data"] for event in events)
    assert created["num_blocks_per_cache_level"] == [4, 4]
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
    assert cache.add_sequence("none", PROMPT) == 2  # the tokens before the first extra id
    assert cache.add_sequence("others", PROMPT, extra_ids=[1] * 16) == 0
    for wrong in ([1], [-1] * 16, [1.5] * 16, [True] * 16, ["1"] * 16, 5, [2**64] * 16):
        with pytest.raises(InvalidArgumentError, match="extra_ids"):
            cache.add_sequence("wrong", PROMPT, extra_ids=wrong)


def test_given_multimodal_inputs_without_lengths_then_the_block_where_one_begins_names_it() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=64)
    cache.add_sequence("a", PROMPT, multimodal=[("cafe", 5), ("beef", 12)])
    cache.store_context_blocks("a")
    assert [block["mm_keys"] for block in stored_blocks(cache)] == [
        [],
        [{"type": "mm_key", "hash": "cafe", "start_offset": 0}],
        [],
        [{"type": "mm_key", "hash": "beef", "start_offset": 0}],
    ]
    assert cache.add_sequence("b", PROMPT, multimodal=[("cafe", 5), ("d00d", 12)]) == 12


def test_given_multimodal_inputs_with_lengths_then_blocks_before_another_one_are_reused() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=64)
    cache.add_sequence("a", PROMPT, multimodal=[("cafe", 5, 6), ("beef", 12, 2)])
    cache.store_context_blocks("a")
    assert [block["mm_keys"] for block in stored_blocks(cache)] == [
        [],
        [{"type": "mm_key", "hash": "cafe", "start_offset": 0}],
        [{"type": "mm_key", "hash": "cafe", "start_offset": 3}],  # counted in the image, as TensorRT-LLM does
        [{"type": "mm_key", "hash": "beef", "start_offset": 0}],
    ]
    assert cache.add_sequence("b", PROMPT, multimodal=[("cafe", 5, 6), ("d00d", 12, 2)]) == 12
    assert cache.add_sequence("c", PROMPT, multimodal=[("d00d", 5, 6)]) == 5
    assert cache.add_sequence("d", PROMPT) == 5
    for wrong in (("cafe", 5, 99), ("cafe", 5, 6, 7), ("cafe",), (7, 5, 6)):
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


@pytest.mark.parametrize(
    "keys", [dict(multimodal=[("cafe", 5)]), dict(multimodal=[("cafe", 2, 9)]), dict(extra_ids=[0] * 5 + [7] * 11), {}]
)
def test_given_more_events_than_the_buffer_holds_then_the_rest_is_told_and_ids_have_a_gap(keys: Any) -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=2)
    cache.add_sequence("a", PROMPT, **keys)
    cache.store_context_blocks("a")
    for number in range(3):
        for token in range(8):
            cache.add_token("a")
            cache.store_new_block("a", [token])
        events = cache.get_latest_events()
        assert [event["data"]["type"] for event in events][-2:] == ["stored", "stored"]
        assert [event["event_id"] for event in events][-2:] == [2 * number + 2, 2 * number + 3]
    for token in range(16):
        cache.add_token("a")
        cache.store_new_block("a", [token])
    assert [event["event_id"] for event in cache.get_latest_events()] == [10, 11]  # 8 and 9 were dropped


@pytest.mark.parametrize("key", ["extra id 5", "extra id x", b"5", "5"])
def test_given_an_image_then_no_key_of_it_can_be_taken_for_an_extra_id(key: Any) -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64, event_buffer_max_size=64)
    cache.add_sequence("image", PROMPT, multimodal=[(key, 4, 12)])
    cache.store_context_blocks("image")
    assert cache.add_sequence("tuned", PROMPT, extra_ids=[0] * 4 + [5] * 12) == 4
    cache.store_context_blocks("tuned")
    blocks = stored_blocks(cache)
    shown = key if isinstance(key, str) else key.hex()
    assert [[mm["hash"] for mm in block["mm_keys"]] for block in blocks] == [[], *[[shown]] * 3, *[[]] * 3]
    assert [block["tokens"][0]["token_extra_id"] for block in blocks] == [0, 0, 0, 0, 5, 5, 5]


def test_given_an_image_whose_tokens_have_extra_ids_then_both_are_refused_together() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 64)
    with pytest.raises(InvalidArgumentError, match="'cafe' and have the extra id 5"):
        cache.add_sequence("a", PROMPT, multimodal=[("cafe", 4, 4)], extra_ids=[0] * 7 + [5] * 9)
    assert cache.add_sequence("a", PROMPT, multimodal=[("cafe", 4, 4)], extra_ids=[0] * 8 + [5] * 8) == 0


def test_given_an_operation_on_several_blocks_then_every_event_has_an_id_of_its_own() -> None:
    cache = TrtLlmKVCacheManager([2, 4], 8, 4, 8, 8, event_buffer_max_size=64, watermark=0.0)
    cache.add_sequence("a", PROMPT)
    cache.remove_sequence("a", [*PROMPT, 1])
    cache.manager.cache.offload(4)
    events = cache.get_latest_events()
    kinds = [event["data"]["type"] for event in events]
    assert (kinds.count("created"), kinds.count("updated")) == (2, 8)
    assert [event["event_id"] for event in events] == list(range(len(events)))


def test_given_no_max_seq_len_then_the_window_of_full_attention_is_the_longest_sequence() -> None:
    cache = TrtLlmKVCacheManager([2, 2], 8, 4, 16, max_attention_window=[None, 8], event_buffer_max_size=8)
    assert [event["window_size"] for event in cache.get_latest_events()] == [52, 8]  # 16 blocks less 3 of the other
    assert cache.get_kv_cache_stats().num_free_blocks_per_window_size == {52: 16, 8: 16}


def test_given_a_retention_then_stored_events_have_its_priorities() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, event_buffer_max_size=64)
    ranges = [TokenRangeRetentionConfig(0, 8, 90), TokenRangeRetentionConfig(8, None, 20)]
    cache.add_sequence("a", PROMPT, KvCacheRetentionConfig(ranges, decode_retention_priority=10))
    for _ in range(4):
        cache.add_token("a")
    cache.remove_sequence("a", [*PROMPT, 1, 2, 3, 4, 5])
    events = cache.get_latest_events()
    assert [event["data"]["type"] for event in events] == ["created", "stored", "stored", "stored"]
    priorities = [block["priority"] for event in events[1:] for block in event["data"]["blocks"]]
    assert priorities == [90, 90, 20, 20, 10]
    assert [event["data"]["parent_hash"] for event in events[2:]] == [
        event["data"]["blocks"][-1]["block_hash"] for event in events[1:-1]
    ]


@pytest.mark.parametrize("timeout_ms", [-1, float("nan"), "5", True, [1]])
def test_given_a_timeout_that_is_none_then_it_is_refused_and_a_long_one_is_not(timeout_ms: Any) -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, event_buffer_max_size=8)
    with pytest.raises(InvalidArgumentError, match="timeout_ms"):
        cache.get_latest_events(timeout_ms)
    assert len(cache.get_latest_events(1e300)) == 1


# --- unfilled blocks --------------------------------------------------------------------------------------------------


def data_of(cache: TrtLlmKVCacheManager) -> list[dict[str, Any]]:
    return [event["data"] for event in cache.get_latest_events()]


def run_to_its_end(cache: TrtLlmKVCacheManager, name: str, tokens: list[int], num_generated: int) -> None:
    """A request as TensorRT-LLM's executor runs it: the last generated token is sampled and not computed."""
    cache.add_sequence(name, tokens)
    for _ in range(num_generated - 1):
        cache.add_token(name)
    cache.remove_sequence(name, [*tokens, *range(1000, 1000 + num_generated)])


def test_given_a_prompt_shorter_than_a_block_when_its_sequence_ends_then_one_block_of_its_tokens_is_told() -> None:
    cache = TrtLlmKVCacheManager([2, 2], 128, 64, 16, max_seq_len=1024, event_buffer_max_size=1024)
    assert [data["type"] for data in data_of(cache)] == ["created"]
    cache.add_sequence(0, [1, 2, 3, 4, 5])
    cache.remove_sequence(0, [1, 2, 3, 4, 5])
    [stored] = data_of(cache)
    assert (stored["type"], stored["parent_hash"]) == ("stored", None)
    [block] = stored["blocks"]
    assert [token["token_id"] for token in block["tokens"]] == [1, 2, 3, 4]
    assert cache.add_sequence(1, [1, 2, 3, 4, 5]) == 4
    cache.remove_sequence(1, [1, 2, 3, 4, 5])
    assert data_of(cache) == []  # it is stored already


def test_given_a_sequence_that_ends_inside_a_block_then_one_event_tells_of_all_its_blocks() -> None:
    cache = TrtLlmKVCacheManager([2, 2], 16, 32, 8, event_buffer_max_size=1024, watermark=0.0)
    for number in range(3):
        run_to_its_end(cache, f"r{number}", list(range(number, 127)) + list(range(500, 500 + number)), 6)
        events = data_of(cache)
        *before, stored = events
        assert {data["type"] for data in before} == ({"removed"} if number else {"created"})
        assert stored["type"] == "stored"
        assert [len(block["tokens"]) for block in stored["blocks"]] == [32, 32, 32, 32, 4]
        assert data_of(cache) == []


def test_given_an_unfilled_block_when_it_leaves_then_exactly_one_event_removes_it_whatever_the_way() -> None:
    ways: dict[str, Any] = {
        "longer": lambda cache: run_to_its_end(cache, "longer", list(range(8)), 1),
        "evicted": lambda cache: cache.manager.cache.evict(16),
        "reset": lambda cache: cache.reset_reuse_state(),
    }
    for name, way in ways.items():
        cache = TrtLlmKVCacheManager([2], 8, 4, 16, 16, event_buffer_max_size=64, onboard_blocks=name != "evicted")
        run_to_its_end(cache, "short", list(range(6)), 1)
        _, stored = data_of(cache)
        unfilled = stored["blocks"][-1]["block_hash"]
        way(cache)
        removed = [block for data in data_of(cache) if data["type"] == "removed" for block in data["block_hashes"]]
        assert removed.count(unfilled) == 1, name
        cache.manager.check()


def test_given_an_unfilled_block_then_it_has_its_requests_priority_and_is_told_when_it_moves() -> None:
    cache = TrtLlmKVCacheManager([2], 8, 4, 16, 16, event_buffer_max_size=64)
    cache.add_sequence("a", list(range(6)), KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, 90)]))
    cache.remove_sequence("a", list(range(7)))
    _, stored = data_of(cache)
    assert [block["priority"] for block in stored["blocks"]] == [90, 90]
    cache.manager.cache.offload(1)
    [updated] = data_of(cache)
    assert updated["block_hash"] == stored["blocks"][-1]["block_hash"]
    assert updated["cache_level"] == {"type": "event_diff", "old_value": 0, "new_value": 1}
