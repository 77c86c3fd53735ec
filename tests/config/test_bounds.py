"""Every limit of a configuration: the last value that is taken, and the first that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.config import DType, KVCacheConfig, LayerSpec, StatePart, StateSpec, Tier
from kvpool.config.hybrid_config import layer_kinds
from kvpool.config.layers import build_groups, divide_by_shares
from kvpool.config.model_config import layers_from_hf
from kvpool.errors import ConfigError, InvalidArgumentError

SMALL = LayerSpec(1, 1, DType.FP8_E4M3)
STATE = StateSpec((StatePart("conv", (2, 4), DType.FLOAT32),))
CROSS = LayerSpec(1, 1, cross_attention=True)


def layer(**fields: Any) -> LayerSpec:
    return LayerSpec(**{"kv_heads": 1, "head_dim": 8, **fields})


def config(**fields: Any) -> KVCacheConfig:
    return KVCacheConfig(**{"layers": [SMALL], "gpu_blocks": 8, "block_size": 4, **fields})


def with_bytes(**fields: Any) -> KVCacheConfig:
    return config(gpu_blocks=None, **fields)


def with_states(**fields: Any) -> KVCacheConfig:
    return config(layers=[SMALL, STATE], **fields)


def with_cross(**fields: Any) -> KVCacheConfig:
    return config(layers=[SMALL, CROSS], **fields)


NUMBERS: list[tuple[Callable[..., Any], str, Any, Any]] = [
    (layer, "kv_heads", 1, 2**16),
    (layer, "head_dim", 1, 2**20),
    (layer, "v_head_dim", 1, 2**20),
    (layer, "window", 1, 2**40),
    (layer, "chunk", 1, 2**40),
    (lambda sink_tokens: layer(window=4, sink_tokens=sink_tokens), "sink_tokens", 0, 2**40),
    (lambda shape: StatePart("s", (shape,), DType.FLOAT32), "shape", 1, 2**20),
    (config, "block_size", 1, 2**20),
    (config, "gpu_blocks", 1, 2**31 - 1),
    (config, "host_blocks", 0, 2**31 - 1),
    (config, "disk_blocks", 0, 2**31 - 1),
    (lambda gpu_blocks: config(gpu_blocks=(gpu_blocks,)), "gpu_blocks", 1, 2**31 - 1),
    (with_bytes, "gpu_bytes", 8, 8 * (2**31) - 1),
    (config, "max_seq_len", 1, 2**40),
    (config, "plan_tokens", 1, 2**40),
    (with_cross, "plan_cross_tokens", 1, 2**40),
    (lambda max_gpu_tokens: with_bytes(gpu_bytes=64, max_gpu_tokens=max_gpu_tokens), "max_gpu_tokens", 1, 2**40),
    (
        lambda free_gpu_bytes: with_bytes(gpu_fraction=1e-9, free_gpu_bytes=free_gpu_bytes),
        "free_gpu_bytes",
        8 * 10**9,
        2**63 - 1,
    ),
    (config, "max_pinned_tokens", 0, 2**40),
    (config, "offload_min_priority", 0, 100),
    (config, "event_buffer_size", 0, 2**31 - 1),
    (config, "remembered_blocks", 0, 2**31 - 1),
    (with_states, "checkpoint_every", 4, 2**40),
]


@pytest.mark.parametrize(
    ("make", "name", "low", "high"), NUMBERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_number_is_taken_up_to_both_its_limits_and_refused_beyond(
    make: Callable[..., Any], name: str, low: int, high: int
) -> None:
    for good in (low, high):
        make(**{name: good})
    for bad in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=name):
            make(**{name: bad})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("watermark", (0, 0.999), (-0.001, 1)),
        ("default_ttl", (1e-9, 1e12), (0, -1)),
        ("pressure_levels", ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5), (0.1, 0.1, 1.0), (1e-9, 1, 1)), ()),
        ("pressure_levels", (), ((0.0, 0.2, 0.3), (0.3, 0.2, 0.4), (0.1, 0.3, 0.2), (0.1, 0.2, 1.001))),
        ("host_write", ("back", "through"), ("Back", "")),
        ("objective", ("blocks", "seconds"), ("Blocks", None)),
        ("checkpoint_every", (), (4, 8)),
        ("depth_cost", (), (0, 1)),
    ],
)
def test_a_setting_is_taken_up_to_its_limits_and_refused_beyond(name: str, good: Any, bad: Any) -> None:
    for value in good:
        config(**{name: value})
    for value in bad:
        with pytest.raises(ConfigError, match=name):
            config(**{name: value})


def test_combinations_that_just_agree_and_those_that_just_do_not() -> None:
    config(plan_tokens=9, max_seq_len=9)
    with_states(checkpoint_every=8)
    config(objective="seconds", depth_cost=0)
    with_bytes(gpu_fraction=1, free_gpu_bytes=8)
    config(layers=[SMALL, layer(window=4)], gpu_blocks=None, gpu_bytes=10**4, pool_shares=(0.5, 0.4999995))
    for wrong, message in (
        (lambda: config(plan_tokens=10, max_seq_len=9), "exceeds"),
        (lambda: with_states(checkpoint_every=6), "multiple of block_size=4"),
        (lambda: with_states(cache_unfilled_blocks=True), "where a block ends only"),
        (lambda: config(objective="seconds", depth_cost=-1e-9), "0 or more"),
        (lambda: config(objective="none"), "objective='none' is unknown"),
        (lambda: with_bytes(gpu_fraction=1.001, free_gpu_bytes=10**9), "gpu_fraction"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()


def test_what_a_block_costs_for_each_one_before_it() -> None:
    assert config().block_depth_cost is None
    assert config(objective="seconds").block_depth_cost == 4 * 2.5e-5
    assert config(objective="seconds", depth_cost=0.5).block_depth_cost == 2.0


def test_sizes_of_layers_and_order_of_groups() -> None:
    assert (layer(k_only=True).value_dim, layer().value_dim, layer(v_head_dim=3).value_dim) == (0, 8, 3)
    layers = [
        CROSS,
        STATE,
        layer(chunk=6),
        layer(window=5),
        layer(window=9),
        layer(),
        layer(head_dim=4),
        layer(window=1),
    ]
    groups = build_groups(layers, 4)
    assert [group.layers[0] for group in groups] == [5, 6, 7, 3, 2, 4, 1, 0]
    with pytest.raises(InvalidArgumentError, match="keep a state"):
        _ = groups[6].attention
    assert StateSpec(part for part in STATE.parts).parts == STATE.parts


def test_shares_of_bytes_are_met() -> None:
    assert divide_by_shares(10**12, (1, 1000), (0.25, 0.75), (1, 1)) == pytest.approx((25e10, 75e7), rel=1e-9)
    assert divide_by_shares(1000, (1, 1000), (0.5, 0.5), (0, 0)) == (500, 0)


def test_tokens_of_a_cache_are_counted_from_its_blocks() -> None:
    shared = config(layers=[layer(), layer(window=4)], gpu_blocks=16)
    assert shared.pinned_tokens_limit == 16 * 4 // 2 // 2
    assert config(max_pinned_tokens=3).pinned_tokens_limit == 3
    assert with_states(gpu_blocks=(10, 2)).pinned_tokens_limit == 20
    assert (shared.num_blocks(Tier.GPU), shared.num_blocks(Tier.HOST)) == (16, 0)
    for wrong in (Tier.REMOTE, None):
        with pytest.raises(InvalidArgumentError, match="has no size here"):
            shared.num_blocks(wrong)


def attends(model_type: str, **fields: Any) -> list[int]:
    """The layers of four that attend."""
    kinds = layer_kinds({"num_hidden_layers": 4, **fields}, model_type)
    return [index for index, kind in enumerate(kinds) if kind == "full_attention"]


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (lambda n: {"linear_attn_config": {"full_attn_layers": [n]}}, {1: [0], 4: [3]}, (0, 5)),
        (lambda n: {"attn_layer_indices": [n]}, {0: [0], 3: [3]}, (-1, 4)),
        (lambda n: {"full_attention_interval": n}, {1: [0, 1, 2, 3], 2: [1, 3]}, (0,)),
        (lambda n: {"attn_layer_period": 2, "attn_layer_offset": n}, {0: [0, 2], 1: [1, 3]}, (-1, 2)),
    ],
)
def test_a_rule_names_layers_up_to_both_its_limits(
    fields: Callable[[int], dict[str, Any]], good: dict[int, list[int]], bad: tuple[int, ...]
) -> None:
    assert {number: attends("jamba", **fields(number)) for number in good} == good
    for number in bad:
        with pytest.raises(ConfigError):
            attends("jamba", **fields(number))


def test_every_so_manieth_layer_of_llama_4_sees_everything() -> None:
    source = {"model_type": "llama4_text", "num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 16}
    source |= {"num_key_value_heads": 1, "attention_chunk_size": 8}
    chunks = {
        interval: [layer.chunk for layer in layers_from_hf({**source, "no_rope_layer_interval": interval})]
        for interval in (1, 2, 3)
    }
    assert chunks == {1: [None] * 4, 2: [8, None] * 2, 3: [8, 8, None, 8]}
    with pytest.raises(ConfigError, match="no_rope_layer_interval=0"):
        layers_from_hf({**source, "no_rope_layer_interval": 0})
