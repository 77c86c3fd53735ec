"""Wrong values in PyAgent's calls; `bad_input` says what is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import Subject, cases, check_calls, is_flag, is_id, is_int, is_number, is_tokens, kinds_in

from kvpool.compat import pyagent

MODULES = ("kvpool.compat.pyagent", "kvpool.compat.adapter")
KNOWN_FAILURES: dict[str, str] = {}
CONFIG = pyagent.KVCacheConfig(2, 1, 4, device="cpu", block_size=4, num_gpu_blocks=8, num_cpu_blocks=4, dtype="float32")


def used(cache: Any) -> Any:
    cache.plane  # noqa: B018 - the bytes are made now, so that no failed call makes them
    allocate = getattr(cache, "allocate", None) or cache.allocate_for_request
    allocate("live", 6)
    cache.write("live", 0, 0, np.ones((6, 1, 4)), np.ones((6, 1, 4)))
    allocate("away", 3)
    cache.write("away", 0, 0, np.ones((3, 1, 4)), np.ones((3, 1, 4)))
    cache.manager.swap_out(cache.handle("away"))
    return cache


def new_block() -> pyagent.KVCacheBlock:
    block = pyagent.KVCacheBlock(0, 0)
    block.allocate(1, 4, 4, "float32")
    return block


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and is_tokens(value)


class Allocated:
    """An allocator or a transfer, and blocks that it may use."""

    def __new__(cls, kind: Any) -> Any:
        target = kind(CONFIG)
        allocator = target if isinstance(target, pyagent.KVCacheAllocator) else pyagent.KVCacheAllocator(CONFIG)
        target.for_tests = [allocator.allocate_gpu_block(0), allocator.allocate_cpu_block(0)]
        return target


CALLS: dict[str, Any] = {
    **{"request_id": "new", "num_tokens": 2, "tokens": [1, 2], "request": "live", "layer": 0, "start": 0},
    **{"write.key": lambda _: np.ones((1, 1, 4)), "write.value": lambda _: np.ones((1, 1, 4)), "config": CONFIG},
    **{"allocate.num_tokens": 2, "allocate_for_request.num_tokens": 2, "callback": lambda _: print},
    **{f"{method}.request_id": "live" for method in ("extend", "extend_allocation", "free", "free_request", "commit")},
    **{f"{method}.request_id": "live" for method in ("get_block_table", "get_blocks")},
    **{"table.group": 0, "commit_known.tokens": lambda cache: cache.handle("live").token_ids},
}
TAKES: dict[str, Any] = {
    **{"request_id": is_id, "num_tokens": is_int(0), "tokens": is_tokens, "reserve": is_int(0), "callback": callable},
    **{"additional_tokens": is_int(0), "layer_idx": is_int(0), "start": is_int(0)},
    **{"group": is_int(0, 0), "commit.tokens": lambda value: value is None or is_tokens(value) or is_int(0)(value)},
    **{"enable_prefix_caching": is_flag, "enable_chunked_prefill": is_flag, "block_id": is_int(0)},
    **{"num_layers": is_int(1), "num_heads": is_int(1), "head_dim": is_int(1), "block_size": is_int(1)},
    **{"num_gpu_blocks": is_int(0), "num_cpu_blocks": lambda value: value is None or is_int(0)(value)},
    **{"device": lambda value: value is None, "num_blocks": is_int(0)},
    **{"more": lambda value: isinstance(value, dict) and not value},
    **{"gpu_blocks": is_ids, "cpu_blocks": is_ids, "layer": is_int(0, 1)},
    **{"gpu_memory_utilization": is_number, "swap_space_gb": is_number},
}
SUBJECTS = [
    Subject(pyagent.KVCacheConfig, good=dict(num_layers=1, num_heads=1, head_dim=4), takes=TAKES),
    Subject(
        pyagent.KVCacheBlock, new_block, dict(block_id=0, layer_idx=0, num_heads=1, head_dim=4, block_size=4), TAKES
    ),
    Subject(pyagent.KVCacheBlocks, pyagent.KVCacheBlocks, dict(block_id=0), TAKES),
    Subject(
        pyagent.KVCacheAllocator, lambda: Allocated(pyagent.KVCacheAllocator), dict(config=CONFIG, layer_idx=0), TAKES
    ),
    Subject(
        pyagent.KVCacheTransfer,
        lambda: Allocated(pyagent.KVCacheTransfer),
        {
            "config": CONFIG,
            "gpu_block": lambda target: target.for_tests[0],
            "cpu_block": lambda target: target.for_tests[1],
            "src_blocks": lambda target: target.for_tests[:1],
            "dst_blocks": lambda target: target.for_tests[1:],
        },
        TAKES,
    ),
    Subject(pyagent.PagedKVCache, lambda: used(pyagent.PagedKVCache(CONFIG)), CALLS, TAKES),
    Subject(pyagent.KVCacheManager, lambda: used(pyagent.KVCacheManager(CONFIG)), CALLS, TAKES),
    Subject(pyagent.create_kv_cache_manager, good=dict(num_layers=1, num_heads=1, head_dim=4), takes=TAKES),
]


def test_given_the_public_names_then_each_is_called_here() -> None:
    assert {subject.name for subject in SUBJECTS} == kinds_in("pyagent")


@pytest.mark.quick(
    "KVCacheConfig.__init__", "KVCacheManager.extend", "KVCacheTransfer.copy_blocks", "PagedKVCache.get_block_table"
)
@cases(SUBJECTS, *MODULES)
def test_given_a_wrong_value_then_it_is_named_and_nothing_changes(subject: Subject, method: str) -> None:
    check_calls(subject, method, KNOWN_FAILURES)
