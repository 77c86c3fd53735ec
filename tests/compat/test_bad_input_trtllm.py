"""Wrong values in TensorRT-LLM's calls; `bad_input` says what is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import Subject, cases, check_calls, is_flag, is_id, is_int, is_number, is_tokens, kinds_in

from kvpool.compat import KvCacheRetentionConfig, TokenRangeRetentionConfig, TrtLlmKVCacheManager

MODULES = ("kvpool.compat.trtllm", "kvpool.compat.adapter")
KNOWN_FAILURES: dict[str, str] = {}


def are_counts(value: Any) -> bool:
    """Numbers, one for every layer or window; a window may be None."""
    try:
        return not isinstance(value, (str, bytes)) and len(list(value)) > 0 and all(map(is_int(1), value))
    except Exception:
        return False


def are_windows(value: Any) -> bool:
    return are_counts(value) or (isinstance(value, (list, np.ndarray)) and str(value) == "[None]")


def is_empty(value: Any) -> bool:
    return (
        value.shape == (0,)
        if isinstance(value, np.ndarray)
        else isinstance(value, (list, tuple, dict, set)) and not value
    )


def is_empty_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not value


def new_manager() -> TrtLlmKVCacheManager:
    cache = TrtLlmKVCacheManager([1, 1], 4, 4, 32, 8, device="cpu", event_buffer_max_size=64)
    for name in ("live", "away"):
        cache.add_sequence(name, [1, 2, 3, 4, 5])
        if name == "live":
            cache.write(name, 0, 0, np.ones((5, 1, 4)), np.ones((5, 1, 4)))
        cache.store_context_blocks(name)
    cache.manager.swap_out(cache.handle("away"))
    cache.plane.run_copies()
    return cache


GOOD: dict[str, Any] = {
    **{
        "num_kv_heads_per_layer": [1],
        "size_per_head": 4,
        "request_id": "live",
        "tokens": [1, 2, 3, 4, 5],
        "layer_idx": 0,
    },
    **{
        "rewind_lengths": 0,
        "request": "live",
        "layer": 0,
        "start": 0,
        "add_sequence.request_id": "new",
        "table.group": 0,
    },
    **{"token_start": 0, "token_end": 4, "priority": 50, "store_new_block.tokens": []},
    **{"request_ids": ["live"], "write.start": 4, "write.key": [1.0] * 4, "write.value": [1.0] * 4},
}
TAKES: dict[str, Any] = {
    **{"request_id": is_id, "tokens": is_tokens, "rewind_lengths": is_int(0), "pool_idx": is_int(0, 0)},
    **{"add_sequence.tokens": lambda value: is_tokens(value) or is_int(1)(value), "pin_blocks": is_flag},
    **{"num_kv_heads_per_layer": are_counts, "max_attention_window": are_windows, "multimodal": is_empty},
    **{"token_range_retention_configs": is_empty_list, "request_ids": is_empty_list},
    **{
        "layer": is_int(0, 1),
        "layer_idx": is_int(0, 1),
        "start": is_int(0),
        "group": is_int(0, 0),
        "num_tokens": is_int(0),
    },
    **{
        "size_per_head": is_int(1),
        "tokens_per_block": is_int(1),
        "max_seq_len": is_int(1),
        "attention_dp_rank": is_int(0),
    },
    **{name: is_int(0) for name in ("blocks_in_primary_pool", "blocks_in_secondary_pool", "event_buffer_max_size")},
    **dict.fromkeys(("enable_block_reuse", "enable_partial_reuse", "pin_on_release"), is_flag),
    **{name: is_int(0) for name in ("max_gpu_total_bytes", "max_tokens", "host_cache_size", "sink_token_length")},
    **{"secondary_offload_min_priority": is_int(0), "onboard_blocks": is_flag, "free_gpu_memory_fraction": is_number},
    **{"token_end": lambda v: v is None or is_int(1, 2**80)(v), "timeout_ms": lambda v: v is None or is_number(v)},
    **{"token_start": is_int(0), "priority": is_int(0, 100), "duration_ms": is_number},
    **{"decode_retention_priority": is_int(0, 100), "decode_duration_ms": is_number},
    **{
        "cache_salt": lambda value: isinstance(value, str),
        "lora_task_id": lambda v: isinstance(v, str) or is_int(0)(v),
    },
}
SUBJECTS = [
    Subject(TokenRangeRetentionConfig, good=GOOD, takes=TAKES),
    Subject(KvCacheRetentionConfig, good=GOOD, takes=TAKES),
    Subject(TrtLlmKVCacheManager, new_manager, GOOD, TAKES),
]


def test_given_the_public_names_then_each_is_called_here() -> None:
    assert {subject.name for subject in SUBJECTS} == kinds_in("trtllm")


@pytest.mark.quick(
    "KvCacheRetentionConfig.__init__", "TrtLlmKVCacheManager.remove_sequence", "TrtLlmKVCacheManager.add_token"
)
@cases(SUBJECTS, *MODULES)
def test_given_a_wrong_value_then_it_is_named_and_nothing_changes(subject: Subject, method: str) -> None:
    check_calls(subject, method, KNOWN_FAILURES)
