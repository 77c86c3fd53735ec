"""What a lower tier is worth: conversations through the real manager, with and without it. Rates are exact, not measured."""

from __future__ import annotations

from functools import cache

import pytest
from chats import FULL, MIB, hit_rate, hybrid

from kvpool import KVCacheConfig, LayerSpec

MODELS: dict[str, list[LayerSpec]] = {
    "full": [FULL] * 6,
    "1:1": hybrid(3, 3, window=256),
    "1:5": hybrid(1, 5, window=256),
    "mixed": [
        *hybrid(2, 2, window=128),
        LayerSpec(kv_heads=1, head_dim=32, window=256, sink_tokens=20),
        LayerSpec(kv_heads=1, head_dim=32, chunk=256),
    ],
}
MEMORY = {
    "none": {},
    "host": {"host_bytes": 20 * MIB},
    "disk": {"host_bytes": 5 * MIB, "disk_bytes": 15 * MIB},
}


@cache
def rate(model: str, below: str, policy: str) -> float:
    return hit_rate(MODELS[model], gpu_bytes=7 * MIB, plan_tokens=1024, eviction_policy=policy, **MEMORY[below])


@pytest.mark.parametrize(("below", "policy"), [("host", "lru"), ("host", "adaptive"), ("disk", "lru")])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "full"])
def test_windows_come_back_with_their_prefix_so_a_lower_tier_pays_as_for_full_attention(
    model: str, below: str, policy: str
) -> None:
    full_gain = rate("full", below, policy) - rate("full", "none", policy)
    assert full_gain > 0.1
    assert rate(model, below, policy) >= rate("full", below, policy) - 0.02
    assert rate(model, below, policy) - rate(model, "none", policy) > 0.6 * full_gain


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_bytes_are_divided_so_that_the_ends_of_prefixes_keep_their_windows(policy: str) -> None:
    layers, budget = hybrid(1, 5, window=256), 7 * MIB
    equal = budget // KVCacheConfig(layers, gpu_blocks=1).block_bytes
    by_sequences = hit_rate(layers, gpu_bytes=budget, plan_tokens=4096, eviction_policy=policy)
    by_prefixes = hit_rate(layers, gpu_bytes=budget, eviction_policy=policy)
    assert by_prefixes > by_sequences + 0.05
    assert by_prefixes > hit_rate(layers, gpu_blocks=equal, eviction_policy=policy) - 0.01
