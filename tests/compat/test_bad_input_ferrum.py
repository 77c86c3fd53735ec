"""Wrong values in ferrum's calls; `bad_input` says what is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import Subject, cases, check_calls, is_flag, is_id, is_int, is_number, is_tokens, kinds_in

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.compat.ferrum import (
    AllocationRequest,
    BlockPool,
    FerrumKVCacheManager,
    PagedKvCacheConfig,
    PagedKvCacheHandle,
    PagedKvCacheManager,
    PrefixCache,
    RequestId,
)

MODULES = ("kvpool.compat.ferrum", "kvpool.compat.adapter")
CONFIG = PagedKvCacheConfig(
    block_size=4, max_gpu_blocks=16, max_cpu_blocks=8, num_layers=2, num_heads=1, head_dim=4, min_prefix_length=4
)


def used(cache: Any) -> Any:
    """Two requests with written tokens, one of them swapped out, and a stored prefix."""
    for name in ("live", "away"):
        prompt = [1, 2, 3, 4, 5]
        if isinstance(cache, PagedKvCacheManager):
            cache.allocate(AllocationRequest(name, 5, tokens=prompt))
        else:
            cache.allocate(name, tokens=prompt)
        if name == "live":
            cache.write(name, 0, 0, np.ones((5, 1, 4)), np.ones((5, 1, 4)))
        cache.store_prefix(prompt, name)
    cache.swap_out("away")
    cache.plane.run_copies()
    return cache


def new_manager() -> PagedKvCacheManager:
    return used(PagedKvCacheManager("cpu", CONFIG))


def new_ferrum() -> FerrumKVCacheManager:
    config = KVCacheConfig([LayerSpec(1, 4)] * 2, 4, gpu_blocks=16, host_blocks=8, offload_on_evict=False)
    return used(FerrumKVCacheManager(KVCacheManager(config), device="cpu"))


def new_handle() -> PagedKvCacheHandle:
    handle = new_manager().get_handle("live")
    assert handle is not None
    return handle


GOOD: dict[str, Any] = {
    **{"request_id": "live", "initial_tokens": 4, "device": "cpu", "block_size": 4, "max_blocks": 8, "handle": "live"},
    **{"layer": 0, "start": 0, "token_position": 4, "start_token": 0, "num_tokens": 2, "tokens": [1, 2, 3, 4, 5]},
    **{
        "source": "live",
        "target": "new",
        "num_prefix_blocks": 1,
        "count": 1,
        "num_blocks": 1,
        "callback": lambda _: print,
    },
    **{"manager": lambda _: new_ferrum().manager, "request": lambda _: AllocationRequest("new", 4), "logical_id": 0},
    **{"write_kv.key": [1.0] * 4, "write_kv.value": [1.0] * 4, "write.key": [1.0] * 4, "write.value": [1.0] * 4},
    **{"write.request": "live", "read.request": "live", "table.request": "live", "commit_known.request": "live"},
    **{"write.start": 4, "handle_stats.request": "live", "table.group": 0, "allocate.num_tokens": 3},
    **{"allocate.request_id": "new", "estimated_memory_bytes.block_size": 4},
    **{
        "kv_handle": "live",
        "num_layers": 2,
        "num_heads": 1,
        "head_dim": 4,
        "physical_id": 0,
        "slot": 0,
        "kind": object,
    },
    **{"set_num_tokens.tokens": 2, "block_ids": [0], "additional_tokens": 1, "max_prefixes": 2, "min_length": 4},
    **{"adapter": lambda _: new_ferrum(), "owner": lambda _: new_ferrum(), "name": "r"},
    **{"write_kv_slot.physical_id": 1, "write_kv_slot.key": [1.0] * 4, "write_kv_slot.value": [1.0] * 4},
}
TAKES: dict[str, Any] = {
    **{"request_id": is_id, "initial_tokens": is_int(0), "max_sequence_length": is_int(0), "tokens": is_tokens},
    **{"num_tokens": is_int(0), "additional_tokens": is_int(0), "target": is_id, "num_prefix_blocks": is_int(0)},
    **{"count": is_int(0), "num_blocks": is_int(0), "layer": is_int(0, 1), "start": is_int(0), "group": is_int(0, 0)},
    **{"token_position": is_int(0), "start_token": is_int(0), "logical_id": is_int(0), "callback": callable},
    **{"last_logits": lambda value: True, "block_size": is_int(1), "max_blocks": is_int(1)},
    **{name: is_int(0) for name in ("max_gpu_blocks", "max_cpu_blocks", "max_prefixes", "min_prefix_length")},
    **{name: is_int(1) for name in ("num_layers", "num_heads", "head_dim")},
    **dict.fromkeys(("enable_cow", "enable_swapping", "enable_prefix_cache"), is_flag),
    **dict.fromkeys(("low_watermark", "high_watermark"), is_number),
    **{"set_num_tokens.tokens": is_int(0), "evict_blocks.max_blocks": is_int(0), "min_length": is_int(0)},
    **{"physical_id": is_int(0), "slot": is_int(0, 3), "kind": lambda value: isinstance(value, type)},
    **{"name": lambda value: isinstance(value, str)},
}
SUBJECTS = [
    Subject(PagedKvCacheConfig, good=GOOD, takes=TAKES),
    Subject(
        AllocationRequest,
        lambda: AllocationRequest("r", 4, num_layers=2, num_heads=1, head_dim=4),
        {"request_id": "new", "initial_tokens": 4},
        TAKES,
    ),
    Subject(PagedKvCacheManager, new_manager, GOOD, TAKES),
    Subject(FerrumKVCacheManager, new_ferrum, GOOD, TAKES),
    Subject(PagedKvCacheHandle, new_handle, GOOD, TAKES),
    Subject(BlockPool, lambda: new_manager().gpu_pool(), GOOD, TAKES),
    Subject(
        PrefixCache,
        lambda: new_manager().prefix_cache(),
        GOOD,
        {**TAKES, "max_prefixes": lambda value: value is None or is_int(0)(value)},
    ),
    Subject(RequestId, lambda: RequestId(), GOOD, TAKES),
]


def test_given_the_public_names_then_each_is_called_here() -> None:
    assert {subject.name for subject in SUBJECTS} == kinds_in("ferrum") - {"BlockTable"}  # which is an answer


@pytest.mark.quick(
    "AllocationRequest.__init__",
    "PagedKvCacheManager.allocate",
    "PagedKvCacheManager.write_kv",
    "PagedKvCacheHandle.set_num_tokens",
)
@cases(SUBJECTS, *MODULES)
def test_given_a_wrong_value_then_it_is_named_and_nothing_changes(subject: Subject, method: str) -> None:
    check_calls(subject, method, {})
