"""Wrong values in vLLM V0's calls; `bad_input` says what is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import Subject, cases, check_calls, is_flag, is_id, is_int, is_number, is_tokens, kinds_in

from kvpool import LayerSpec
from kvpool.compat import vllm_v0, vllm_v0_evictor, vllm_v0_parts, vllm_v0_utils

MODULES = ("kvpool.compat.vllm_v0", "kvpool.compat.adapter")
KNOWN_FAILURES: dict[str, str] = {}
LAYERS = [LayerSpec(1, 4), LayerSpec(1, 4, cross_attention=True)]


def new_blocks() -> vllm_v0.BlockManager:
    blocks = vllm_v0.BlockManager(4, 32, 16, layers=LAYERS, device="cpu")
    engine = vllm_v0_parts.CacheEngine(blocks)
    for name in ("live", "away"):
        blocks.allocate(name, [1, 2, 3, 4, 5], num_encoder_tokens=3)
        blocks.write(name, 0, 0, np.ones((5, 1, 4)), np.ones((5, 1, 4)))
        blocks.mark_blocks_as_computed(name, 5)
    engine.swap_out(blocks.swap_out(["away"]))
    return blocks


def new_engine() -> vllm_v0_parts.CacheEngine:
    return vllm_v0_parts.CacheEngine(new_blocks())


def new_evictor() -> vllm_v0_evictor.Evictor:
    evictor = vllm_v0_evictor.Evictor()
    evictor.add(0, 100, 16, 1.0)
    return evictor


ALLOCATORS = (vllm_v0_parts.NaiveBlockAllocator, vllm_v0_parts.PrefixCachingBlockAllocator)
LIVE = ("free", "free_cross", "get_cross_block_table", "append_slots", "mark_blocks_as_computed", "get_block_table")
GOOD: dict[str, Any] = {
    **{"block_size": 4, "num_gpu_blocks": 8, "seq_id": "new", "tokens": [1, 2], "parent_seq_id": "live", "layer": 0},
    **{"child_seq_id": "child", "request": "live", "start": 0, "seq_ids": ["live"], "src_to_dst": [(0, 9)]},
    **{f"{method}.{name}": "live" for method in LIVE for name in ("seq_id", "request_id")},
    **{"write.key": lambda _: np.ones((1, 1, 4)), "write.value": lambda _: np.ones((1, 1, 4)), "table.group": 0},
    **{"commit_known.tokens": [1, 2, 3, 4, 5], "blocks": lambda _: new_blocks(), "swap_in.seq_ids": ["away"]},
    **{
        "allocate.num_encoder_tokens": 2,
        "num_blocks": 8,
        "get_cache_block_size.layers": [LayerSpec(1, 4)],
        "block_id": 0,
    },
    **{"parent_block_hash": None, "token_ids": [1, 2], "layers": [LayerSpec(1, 4)], "available_memory": 2**20},
    **{"config": lambda _: new_blocks().manager.config, "max_model_len": 20},
    **{"add.block_id": 1, "content_hash": 7, "num_hashed_tokens": 16, "last_accessed": 2.0},
}
TAKES: dict[str, Any] = {
    **{"block_size": is_int(1), "num_gpu_blocks": is_int(0), "num_cpu_blocks": is_int(0), "watermark": is_number},
    **{"sliding_window": is_int(1), "enable_caching": is_flag, "encoder_decoder": is_flag, "tokens": is_tokens},
    **{"num_lookahead_slots": is_int(0), "num_encoder_tokens": is_int(0), "seq_id": is_id, "request_id": is_id},
    **{
        "encoder_key": lambda value: isinstance(value, str),
        "lora_int_id": is_int(0),
        "num_tokens": is_int(0),
        "child_seq_id": is_id,
    },
    "mark_blocks_as_computed.tokens": lambda value: value is None or is_tokens(value) or is_int(0)(value),
    **{
        "layer": is_int(0, 1),
        "group": is_int(0, 1),
        "start": is_int(0),
        "num_blocks": is_int(0),
        "block_id": is_int(0),
    },
    **{"content_hash": lambda value: type(value) is int, "num_hashed_tokens": is_int(0), "last_accessed": is_number},
    **{"seq_ids": lambda value: value in ((), []) if isinstance(value, (list, tuple)) else False},
    **{"src_to_dst": lambda value: value in ((), []) if isinstance(value, (list, tuple)) else False},
    **{"token_ids": is_tokens, "available_memory": is_int(0), "max_model_len": is_int(0, 128)},
    **{"get_max_concurrency.max_model_len": is_int(1)},
    "parent_block_hash": lambda value: value is None,
    **{"eviction_policy": lambda value: value is None},
}
SUBJECTS = [
    Subject(vllm_v0.BlockManager, new_blocks, GOOD, TAKES),
    Subject(vllm_v0_parts.CacheEngine, new_engine, GOOD, TAKES),
    *(Subject(kind, takes=TAKES, good=GOOD) for kind in ALLOCATORS),
    Subject(vllm_v0_evictor.Evictor, new_evictor, GOOD, TAKES),
    Subject(vllm_v0_utils.KVCacheUtils, vllm_v0_utils.KVCacheUtils, GOOD, TAKES),
]


def test_given_the_public_names_then_each_is_called_here() -> None:
    assert {subject.name for subject in SUBJECTS} == kinds_in("vllm_v0")


@pytest.mark.quick("BlockManager.__init__", "BlockManager.fork", "CacheEngine.copy")
@cases(SUBJECTS, *MODULES)
def test_given_a_wrong_value_then_it_is_named_and_nothing_changes(subject: Subject, method: str) -> None:
    check_calls(subject, method, KNOWN_FAILURES)
