"""Wrong values in vLLM V0's calls; `bad_input` says what is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from bad_input import Subject, cases, check_calls, is_flag, is_id, is_int, is_number, is_tokens, kinds_in

from kvpool import LayerSpec
from kvpool.compat import vllm_v0

MODULES = ("kvpool.compat.vllm_v0", "kvpool.compat.spelling")
KNOWN_FAILURES: dict[str, str] = {
    "BlockManager(num_gpu_blocks)": "names no value",
    "BlockManager(num_cpu_blocks)": "takes wrong values",
    "BlockManager(encoder_decoder)": "raw errors, takes wrong values",
    "BlockManager.allocate(seq_id)": "raw errors",
    "BlockManager.allocate(tokens)": "names no value",
    "BlockManager.allocate(num_encoder_tokens)": "raw errors",
    "BlockManager.allocate(request_id)": "raw errors, takes wrong values",
    "BlockManager.can_allocate(tokens)": "names no value",
    "BlockManager.can_append_slots(seq_ids)": "raw errors, takes wrong values, names no value",
    "BlockManager.can_swap_in(seq_ids)": "raw errors, takes wrong values, names no value",
    "BlockManager.can_swap_out(seq_ids)": "raw errors, takes wrong values, names no value",
    "BlockManager.free_cross(request_id)": "raw errors",
    "BlockManager.get_common_computed_block_ids(seq_ids)": "raw errors, takes wrong values, names no value",
    "BlockManager.get_cross_block_table(request_id)": "raw errors",
    "BlockManager.swap_in(seq_ids)": "raw errors, takes wrong values, names no value",
    "BlockManager.swap_out(seq_ids)": "raw errors, takes wrong values, names no value",
    "CacheEngine(blocks)": "raw errors",
    "CacheEngine.copy(src_to_dst)": "raw errors, takes wrong values",
    "CacheEngine.swap_in(src_to_dst)": "raw errors, takes wrong values",
    "CacheEngine.swap_out(src_to_dst)": "raw errors, takes wrong values",
}
LAYERS = [LayerSpec(1, 4), LayerSpec(1, 4, cross_attention=True)]


def new_blocks() -> vllm_v0.BlockManager:
    blocks = vllm_v0.BlockManager(4, 32, 16, layers=LAYERS, device="cpu")
    engine = vllm_v0.CacheEngine(blocks)
    for name in ("live", "away"):
        blocks.allocate(name, [1, 2, 3, 4, 5], num_encoder_tokens=3)
        blocks.write(name, 0, 0, np.ones((5, 1, 4)), np.ones((5, 1, 4)))
        blocks.mark_blocks_as_computed(name, 5)
    engine.swap_out(blocks.swap_out(["away"]))
    return blocks


def new_engine() -> vllm_v0.CacheEngine:
    return vllm_v0.CacheEngine(new_blocks())


LIVE = ("free", "free_cross", "get_cross_block_table", "append_slots", "mark_blocks_as_computed", "get_block_table")
GOOD: dict[str, Any] = {
    **{"block_size": 4, "num_gpu_blocks": 8, "seq_id": "new", "tokens": [1, 2], "parent_seq_id": "live", "layer": 0},
    **{"child_seq_id": "child", "request": "live", "start": 0, "seq_ids": ["live"], "src_to_dst": [(0, 9)]},
    **{f"{method}.{name}": "live" for method in LIVE for name in ("seq_id", "request_id")},
    **{"write.key": lambda _: np.ones((1, 1, 4)), "write.value": lambda _: np.ones((1, 1, 4)), "table.group": 0},
    **{"commit_known.tokens": [1, 2, 3, 4, 5], "blocks": lambda _: new_blocks(), "swap_in.seq_ids": ["away"]},
    **{"allocate.num_encoder_tokens": 2},
}
TAKES: dict[str, Any] = {
    **{"block_size": is_int(1), "num_gpu_blocks": is_int(0), "num_cpu_blocks": is_int(0), "watermark": is_number},
    **{"sliding_window": is_int(1), "enable_caching": is_flag, "encoder_decoder": is_flag, "tokens": is_tokens},
    **{"num_lookahead_slots": is_int(0), "num_encoder_tokens": is_int(0), "seq_id": is_id, "request_id": is_id},
    **{"encoder_key": lambda value: isinstance(value, str), "num_tokens": is_int(0), "child_seq_id": is_id},
    "mark_blocks_as_computed.tokens": lambda value: value is None or is_tokens(value) or is_int(0)(value),
    **{"layer": is_int(0, 1), "group": is_int(0, 1), "start": is_int(0)},
}
SUBJECTS = [
    Subject(vllm_v0.BlockManager, new_blocks, GOOD, TAKES),
    Subject(vllm_v0.CacheEngine, new_engine, GOOD, TAKES),
]


def test_given_the_public_names_then_each_is_called_here() -> None:
    assert {subject.name for subject in SUBJECTS} == kinds_in("vllm_v0")


@cases(SUBJECTS, *MODULES)
def test_given_a_wrong_value_then_it_is_named_and_nothing_changes(subject: Subject, method: str) -> None:
    check_calls(subject, method, KNOWN_FAILURES)
