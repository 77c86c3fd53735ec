"""Configuration and sizing: exact bytes, every contradiction refused, every answer checked against brute force."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.config import DType, GroupKind, KVCacheConfig, LayerGroup, LayerSpec, Tier
from kvpool.config.layers import build_groups, divide_budget
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError, NeverFitsError

SPEC = LayerSpec(kv_heads=8, head_dim=128)
FULL = LayerSpec(kv_heads=2, head_dim=8)
SLIDING = dataclasses.replace(FULL, window=40)
CROSS = dataclasses.replace(FULL, cross_attention=True)


def make(layers: list[LayerSpec] | None = None, block_size: int = 16, **fields: Any) -> KVCacheConfig:
    if not {"gpu_blocks", "gpu_bytes", "gpu_fraction"} & fields.keys():
        fields["gpu_blocks"] = 100
    return KVCacheConfig([SPEC] * 4 if layers is None else layers, block_size, **fields)


def group_of(spec: LayerSpec, block_size: int) -> LayerGroup:
    return build_groups([spec], block_size)[0]


# ---- dtypes and bytes per token --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("float32", DType.FLOAT32),
        ("fp32", DType.FLOAT32),
        ("torch.float", DType.FLOAT32),
        ("half", DType.FLOAT16),
        ("FP16", DType.FLOAT16),
        ("torch.bfloat16", DType.BFLOAT16),
        ("bf16", DType.BFLOAT16),
        ("fp8", DType.FP8_E4M3),
        ("torch.float8_e4m3fn", DType.FP8_E4M3),
        ("torch.float8_e5m2", DType.FP8_E5M2),
        ("int8", DType.INT8),
        ("int4", DType.INT4),
        (np.dtype("float16"), DType.FLOAT16),
        (DType.INT4, DType.INT4),
    ],
)
def test_common_spellings_name_a_dtype(spelling: object, dtype: DType) -> None:
    assert DType.parse(spelling) is dtype
    assert LayerSpec(1, 8, spelling).dtype is dtype  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["float64", "", "auto", None, 16, "int", "uint8"])
def test_unknown_dtype_is_refused_with_the_known_ones(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"dtype=.*bfloat16"):
        LayerSpec(1, 8, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (DType.FLOAT32, 8 * 2 * 128 * 4),
        (DType.FLOAT16, 8 * 2 * 128 * 2),
        (DType.BFLOAT16, 8 * 2 * 128 * 2),
        (DType.FP8_E4M3, 8 * 2 * 128),
        (DType.FP8_E5M2, 8 * 2 * 128),
        (DType.INT8, 8 * 2 * (128 + 2)),
        (DType.INT4, 8 * (128 + 2 + 64 + 4)),
    ],
)
def test_bytes_per_token_of_a_layer_count_elements_and_scales(dtype: DType, expected: int) -> None:
    assert LayerSpec(kv_heads=8, head_dim=128, dtype=dtype).bytes_per_token == expected


def test_int4_rounds_an_odd_head_up_to_whole_bytes_per_head() -> None:
    assert LayerSpec(kv_heads=3, head_dim=5, dtype=DType.INT4).bytes_per_token == 3 * (5 + 2 + 3 + 4)


def test_value_heads_of_another_size_and_k_only_layers() -> None:
    assert LayerSpec(kv_heads=2, head_dim=192, v_head_dim=128).bytes_per_token == 2 * (192 + 128) * 2
    assert LayerSpec(kv_heads=1, head_dim=576, k_only=True).bytes_per_token == 1152
    assert LayerSpec(kv_heads=1, head_dim=576, k_only=True, dtype=DType.INT8).bytes_per_token == 578


def test_llama_3_8b_shape_has_128_kib_per_token() -> None:
    config = make([SPEC] * 32)
    assert config.bytes_per_token == 128 * 1024
    assert config.block_bytes == 2 * 1024 * 1024
    assert config.pool_bytes(Tier.GPU) == 100 * 2 * 1024 * 1024


@given(
    kv_heads=st.integers(1, 9),
    head_dim=st.integers(1, 40),
    v_head_dim=st.none() | st.integers(1, 40),
    k_only=st.booleans(),
    dtype=st.sampled_from(DType),
)
def test_bytes_per_token_equals_a_count_bit_by_bit(
    kv_heads: int, head_dim: int, v_head_dim: int | None, k_only: bool, dtype: DType
) -> None:
    spec = LayerSpec(kv_heads, head_dim, dtype, None if k_only else v_head_dim, k_only)
    bits = 0
    of_keys = DType.INT8 if dtype is DType.INT4 else dtype
    for side, dim in [(of_keys, head_dim), (dtype, v_head_dim or head_dim)][: 1 if k_only else 2]:
        for _ in range(kv_heads):
            bits += math.ceil(dim * side.bits / 8) * 8 + 16 * {DType.INT8: 1, DType.INT4: 2}.get(side, 0)
    assert spec.bytes_per_token * 8 == bits


# ---- contradictions --------------------------------------------------------------------------------------------------

HUGE = 10**5000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(kv_heads=0), "kv_heads=0"),
        (dict(kv_heads=True), "kv_heads=True"),
        (dict(kv_heads=8.0), r"kv_heads=8\.0 must be an integer"),
        (dict(kv_heads="8"), "kv_heads='8'"),
        (dict(kv_heads=HUGE), "kv_heads=.*16610 bits"),
        (dict(head_dim=-1), "head_dim=-1"),
        (dict(head_dim=-HUGE), r"head_dim=-\("),
        (dict(head_dim=None), "head_dim=None"),
        (dict(v_head_dim=0), "v_head_dim=0"),
        (dict(v_head_dim=64, k_only=True), "v_head_dim=64 with k_only"),
        (dict(extra_parts=7), "extra_parts=7 must be a list of TokenPart"),
        (dict(extra_parts=[("index", "bfloat16", 1)]), "which is no TokenPart"),
        (dict(extra_parts=[("v", "bfloat16", 1, 8)]), "names a part 'v'"),
        (dict(extra_parts=[("index", "bfloat16", 0, 8)]), "heads=0"),
        (dict(extra_parts=[("index", "bfloat16", 1, 0)]), "width=0"),
        (dict(extra_parts=[("index", "float64", 1, 8)]), "dtype='float64'"),
        (dict(extra_parts=[("index", "int8", 1, 8)] * 2), "names a part twice: index, index"),
        (dict(k_only=1), "k_only=1"),
        (dict(cross_attention="no"), "cross_attention='no'"),
        (dict(window=0), "window=0"),
        (dict(window=float("nan")), "window=nan"),
        (dict(chunk=-5), "chunk=-5"),
        (dict(window=8, chunk=8), "window=8 and chunk=8"),
        (dict(sink_tokens=4), "sink_tokens=4 needs a window"),
        (dict(sink_tokens=4, chunk=64), "sink_tokens=4 needs a window"),
        (dict(sink_tokens=-1, window=8), "sink_tokens=-1"),
        (dict(cross_attention=True, window=8), "cross_attention with a window or chunk of 8"),
        (dict(cross_attention=True, chunk=8), "cross_attention with a window or chunk of 8"),
    ],
)
def test_layer_spec_refuses_wrong_values_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerSpec(**{"kv_heads": 2, "head_dim": 8, **fields})


BLOCK = 4 * 4096 * 16  # bytes of one block of the default test model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(layers=[]), r"layers=\[\] must hold at least one"),
        (dict(layers=SPEC), "must be a list of LayerSpec"),
        (dict(layers="abc"), "must be a list of LayerSpec"),
        (dict(layers=[SPEC, 3]), r"layers\[1\]=3"),
        (dict(layers=[CROSS]), "without cross_attention"),
        (dict(block_size=0), "block_size=0"),
        (dict(block_size=True), "block_size=True"),
        (dict(block_size=16.0), "block_size=16.0"),
        (dict(block_size=HUGE), "block_size="),
        (dict(gpu_blocks=None), "exactly one of gpu_blocks, gpu_bytes, gpu_fraction; found none"),
        (dict(gpu_bytes=BLOCK), "found gpu_blocks and gpu_bytes"),
        (dict(gpu_fraction=0.5, free_gpu_bytes=10**9), "found gpu_blocks and gpu_fraction"),
        (dict(gpu_blocks=0), "gpu_blocks=0 leaves pool 0 with 0 blocks"),
        (dict(gpu_blocks=-1), "gpu_blocks=-1"),
        (dict(gpu_blocks=1.5), "gpu_blocks=1.5"),
        (dict(gpu_blocks=True), "gpu_blocks=True"),
        (dict(gpu_blocks="100"), "gpu_blocks='100'"),
        (dict(gpu_blocks=2**31), "gpu_blocks=2147483648"),
        (dict(gpu_blocks=(5, 5)), "has 2 counts; these layers form 1 pools"),
        (dict(gpu_blocks=()), "has 0 counts"),
        (dict(layers=[HUGE]), r"layers\[0\]="),
        (dict(layers=({1: HUGE},)), r"layers\[0\]=a dict that cannot be shown"),
        (dict(gpu_blocks=(-5,)), r"gpu_blocks\[0\]=-5"),
        (dict(gpu_blocks=None, gpu_bytes=BLOCK - 1), f"gpu_bytes={BLOCK - 1} .* needs {BLOCK} bytes"),
        (dict(gpu_blocks=None, gpu_bytes=0), "gpu_bytes=0"),
        (dict(gpu_blocks=None, gpu_bytes=1e9), "gpu_bytes=1000000000.0"),
        (dict(gpu_blocks=None, gpu_bytes=2**63), "gpu_bytes="),
        (dict(gpu_blocks=None, gpu_fraction=0.5), "gpu_fraction=0.5 and free_gpu_bytes=None go together"),
        (dict(free_gpu_bytes=10**9), "gpu_fraction=None and free_gpu_bytes=1000000000 go together"),
        (dict(gpu_blocks=None, gpu_fraction=0.0, free_gpu_bytes=10**9), "gpu_fraction=0.0"),
        (dict(gpu_blocks=None, gpu_fraction=1.1, free_gpu_bytes=10**9), "gpu_fraction=1.1"),
        (dict(gpu_blocks=None, gpu_fraction=float("nan"), free_gpu_bytes=10**9), "gpu_fraction=nan"),
        (dict(gpu_blocks=None, gpu_fraction=True, free_gpu_bytes=10**9), "gpu_fraction=True"),
        (dict(gpu_blocks=None, gpu_fraction="0.9", free_gpu_bytes=10**9), "gpu_fraction='0.9'"),
        (dict(gpu_blocks=None, gpu_fraction=0.5, free_gpu_bytes=BLOCK), r"gpu_fraction \* free_gpu_bytes=131072"),
        (dict(gpu_blocks=None, gpu_fraction=0.5, free_gpu_bytes=-1), "free_gpu_bytes=-1"),
        (dict(host_blocks=4, host_bytes=10**9), "host_blocks and host_bytes both"),
        (dict(disk_blocks=4, disk_bytes=10**9), "disk_blocks and disk_bytes both"),
        (dict(host_blocks=-4), "host_blocks=-4"),
        (dict(host_bytes=5), f"host_bytes=5 .* needs {BLOCK} bytes"),
        (dict(disk_bytes=-5), "disk_bytes=-5"),
        (dict(layers=[FULL, SLIDING, SLIDING], host_blocks=(3, 0)), "leaves pool 1 with 0 blocks"),
        (dict(layers=[FULL, SLIDING], gpu_blocks=1), "need at least 2"),
        (dict(plan_tokens=0), "plan_tokens=0"),
        (dict(plan_tokens=100, max_seq_len=99), "plan_tokens=100 exceeds max_seq_len=99"),
        (dict(plan_cross_tokens=5), "plan_cross_tokens=5 but no layer"),
        (dict(max_seq_len=-1), "max_seq_len=-1"),
        (dict(max_seq_len=HUGE), "max_seq_len="),
        (dict(enable_prefix_caching=1), "enable_prefix_caching=1"),
        (dict(partial_match=None), "partial_match=None"),
        (dict(cache_unfilled_blocks=True, partial_match=False), "cache_unfilled_blocks=True needs"),
        (dict(cache_unfilled_blocks=True, enable_prefix_caching=False), "cache_unfilled_blocks=True needs"),
        (dict(copy_on_partial_reuse=1), "copy_on_partial_reuse=1"),
        (dict(copy_on_partial_reuse=False, partial_match=False), "does nothing with partial_match=False"),
        (dict(offload_on_evict="yes"), "offload_on_evict='yes'"),
        (dict(offload_min_priority=101), "offload_min_priority=101"),
        (dict(offload_min_priority=1, offload_on_evict=False), "offload_min_priority=1 does nothing"),
        (dict(host_write="around"), "host_write='around' must be 'back' or 'through'"),
        (dict(host_write=2), "host_write=2 must be 'back' or 'through'; a number of uses left in 0.3"),
        (dict(host_write=True), "host_write=True"),
        (dict(host_write="through", offload_on_evict=False), "host_write='through' does nothing"),
        (dict(watermark=-0.1), "watermark=-0.1"),
        (dict(watermark=1), "watermark=1.0"),
        (dict(watermark=float("nan")), "watermark=nan"),
        (dict(watermark=None), "watermark=None"),
        (dict(eviction_policy=""), "eviction_policy=''"),
        (dict(eviction_policy=3), "eviction_policy=3"),
        (dict(default_ttl=0), "default_ttl=0"),
        (dict(default_ttl=float("inf")), "default_ttl=inf"),
        (dict(default_ttl=5, enable_prefix_caching=False), "default_ttl=5.0 does nothing"),
        (dict(max_pinned_tokens=-1), "max_pinned_tokens=-1"),
        (dict(pressure_levels=(0.5, 0.6)), "pressure_levels"),
        (dict(pressure_levels=0.5), "pressure_levels=0.5"),
        (dict(pressure_levels=(0.9, 0.8, 0.7)), "three rising fractions"),
        (dict(pressure_levels=(0.1, 0.2, 1.1)), "three rising fractions"),
        (dict(pressure_levels=(0.1, float("nan"), 0.9)), "pressure_levels=nan"),
        (dict(event_buffer_size=-1), "event_buffer_size=-1"),
        (dict(remembered_blocks=-1), "remembered_blocks=-1"),
        (dict(remembered_blocks=8, enable_prefix_caching=False), "remembered_blocks=8 does nothing"),
        (dict(layers=[LayerSpec(2**16, 2**20)], gpu_blocks=2**31 - 1), "no machine has that many"),
        (
            dict(layers=[LayerSpec(1, 1, DType.FP8_E4M3)], block_size=1, gpu_blocks=None, gpu_bytes=2**40),
            "raise block_size",
        ),
    ],
)
def test_config_refuses_wrong_values_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheConfig(**{"layers": [SPEC] * 4, "gpu_blocks": 100, **fields})


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="gpu_block"):
        KVCacheConfig([SPEC], gpu_block=5)  # type: ignore[call-arg]


# ---- groups and pools ------------------------------------------------------------------------------------------------


def test_equal_layers_form_one_group_and_one_pool() -> None:
    config = make([SPEC] * 4)
    assert [(g.kind, g.layers, g.window, g.pool) for g in config.groups] == [(GroupKind.FULL, (0, 1, 2, 3), None, 0)]
    assert [(p.block_bytes, p.groups, p.num_blocks[Tier.GPU]) for p in config.pools] == [(BLOCK, (0,), 100)]
    assert config.groups[0].block_size == 16
    assert config.groups[0].spec == SPEC


def test_groups_stand_full_first_then_by_window_then_cross() -> None:
    chunked = dataclasses.replace(FULL, chunk=64)
    wide = dataclasses.replace(FULL, window=100)
    sunk = dataclasses.replace(SLIDING, sink_tokens=4)
    fat = LayerSpec(kv_heads=4, head_dim=8)
    config = make([CROSS, wide, chunked, SLIDING, FULL, sunk, fat, FULL])
    order = [(g.kind, g.window, g.sink_tokens, g.layers) for g in config.groups]
    assert order == [
        (GroupKind.FULL, None, 0, (4, 7)),
        (GroupKind.FULL, None, 0, (6,)),
        (GroupKind.SLIDING, 40, 0, (3,)),
        (GroupKind.SLIDING, 40, 4, (5,)),
        (GroupKind.CHUNKED, 64, 0, (2,)),
        (GroupKind.SLIDING, 100, 0, (1,)),
        (GroupKind.CROSS, None, 0, (0,)),
    ]
    assert [g.index for g in config.groups] == list(range(7))
    assert config.group_of_layer == (6, 5, 4, 2, 0, 3, 1, 0)
    assert config.bytes_per_token == sum(layer.bytes_per_token for layer in config.layers)


def test_groups_of_equal_block_bytes_share_a_pool() -> None:
    config = make([FULL, SLIDING, FULL, SLIDING, CROSS])  # two full, two sliding, one cross layer
    assert [g.pool for g in config.groups] == [0, 0, 1]
    assert [p.groups for p in config.pools] == [(0, 1), (2,)]
    assert config.pools[1].block_bytes * 2 == config.pools[0].block_bytes


def test_dtypes_of_equal_width_do_not_share_a_group() -> None:
    assert len(make([SPEC, dataclasses.replace(SPEC, dtype=DType.FLOAT16)]).groups) == 2


def test_one_count_is_for_every_pool_and_a_tuple_gives_each_its_own() -> None:
    layers = [FULL, SLIDING, SLIDING]
    config = make(layers, gpu_blocks=7, host_blocks=[20, 30], disk_blocks=0)
    assert [dict(p.num_blocks) for p in config.pools] == [
        {Tier.GPU: 7, Tier.HOST: 20, Tier.DISK: 0},
        {Tier.GPU: 7, Tier.HOST: 30, Tier.DISK: 0},
    ]
    assert config.num_blocks(Tier.HOST) == 50
    assert config.pool_bytes(Tier.HOST) == 20 * 16 * FULL.bytes_per_token + 30 * 16 * 2 * FULL.bytes_per_token
    with pytest.raises(InvalidArgumentError, match="REMOTE"):
        config.num_blocks(Tier.REMOTE)


def test_byte_budgets_become_blocks_on_every_tier() -> None:
    config = make(gpu_bytes=10 * BLOCK + 5, host_bytes=7 * BLOCK, disk_bytes=BLOCK)
    assert [config.num_blocks(tier) for tier in (Tier.GPU, Tier.HOST, Tier.DISK)] == [10, 7, 1]
    assert config.blocks_in(3 * BLOCK - 1) == (2,)


def test_fraction_of_free_memory_is_exact_where_floats_are_not() -> None:
    assert int(0.29 * 100) == 28
    assert make(gpu_fraction=0.29, free_gpu_bytes=100 * BLOCK).num_blocks(Tier.GPU) == 29
    assert make(gpu_fraction=1, free_gpu_bytes=100 * BLOCK).num_blocks(Tier.GPU) == 100


def test_byte_budget_is_divided_by_what_one_planned_sequence_needs() -> None:
    layers = [FULL, SLIDING, SLIDING]  # pools: full with blocks of 1024 bytes, sliding with 2048
    probe = make(layers, plan_tokens=160)
    assert probe.pool_blocks_for(160) == (10, 4)
    budget = 3 * probe.sequence_bytes(160)
    config = make(layers, plan_tokens=160, gpu_bytes=budget, watermark=0)
    assert [p.num_blocks[Tier.GPU] for p in config.pools] == [30, 12]
    assert config.pool_bytes(Tier.GPU) == budget
    assert config.max_sequences(160) == 3


def test_plan_defaults_to_the_longest_sequence_or_4096() -> None:
    assert make().planned_tokens == 4096
    assert make(max_seq_len=100).planned_tokens == 100
    assert make(max_seq_len=100, plan_tokens=50).planned_tokens == 50
    assert make().planned_cross_tokens == 0
    assert make([FULL, CROSS]).planned_cross_tokens == 4096
    assert make([FULL, CROSS], plan_cross_tokens=7).planned_cross_tokens == 7


def test_plan_cross_tokens_shifts_the_budget() -> None:
    layers = [FULL, FULL, CROSS]
    few, many = (make(layers, gpu_bytes=10**7, plan_cross_tokens=n).pools[1].num_blocks[Tier.GPU] for n in (100, 5000))
    assert few < many


@given(data=st.data(), num_pools=st.integers(1, 4))
def test_dividing_a_budget_never_overdraws_and_keeps_minimums(data: st.DataObject, num_pools: int) -> None:
    def numbers(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=num_pools, max_size=num_pools))

    sizes, minimums = numbers(1, 1000), numbers(1, 3)
    needs = [low + more for low, more in zip(minimums, numbers(0, 400), strict=True)]
    least = sum(map(int.__mul__, sizes, minimums))
    budget = data.draw(st.integers(least, least + 10**6))
    counts = divide_budget(budget, sizes, needs, minimums)
    spent = sum(map(int.__mul__, sizes, counts))
    assert spent <= budget
    assert all(count >= low for count, low in zip(counts, minimums, strict=True))
    whole = budget // sum(map(int.__mul__, sizes, needs))
    assert all(count >= whole * need for count, need in zip(counts, needs, strict=True))
    if num_pools == 1:
        assert counts == (budget // sizes[0],)
    times = data.draw(st.integers(1, 50))
    exact = times * sum(map(int.__mul__, sizes, needs))
    assert divide_budget(exact, sizes, needs, minimums) == tuple(times * need for need in needs)


# ---- live blocks -----------------------------------------------------------------------------------------------------


def brute_peak_blocks(spec: LayerSpec, block_size: int, num_tokens: int) -> int:
    """The most blocks that hold a visible token, over every step of growing to `num_tokens`."""
    peak = 0
    for length in range(1, num_tokens + 1):
        last = length - 1
        if spec.window is not None:
            visible = {*range(max(0, length - spec.window), length), *range(min(spec.sink_tokens, length))}
        elif spec.chunk is not None:
            visible = set(range(last // spec.chunk * spec.chunk, length))
        else:
            visible = set(range(length))
        peak = max(peak, len({token // block_size for token in visible}))
    return peak


@given(block_size=st.integers(1, 9), window=st.integers(1, 30), sinks=st.integers(0, 12), num_tokens=st.integers(0, 90))
def test_sliding_group_needs_exactly_the_peak(block_size: int, window: int, sinks: int, num_tokens: int) -> None:
    spec = dataclasses.replace(FULL, window=window, sink_tokens=sinks)
    assert group_of(spec, block_size).max_live_blocks(num_tokens) == brute_peak_blocks(spec, block_size, num_tokens)


@given(block_size=st.integers(1, 9), chunk=st.integers(1, 30), num_tokens=st.integers(0, 60))
def test_chunked_group_needs_its_chunk_at_its_worst_alignment(block_size: int, chunk: int, num_tokens: int) -> None:
    spec = dataclasses.replace(FULL, chunk=chunk)
    group = group_of(spec, block_size)
    brute = brute_peak_blocks(spec, block_size, num_tokens)
    assert group.max_live_blocks(num_tokens) >= brute
    if chunk % block_size == 0:
        assert group.max_live_blocks(num_tokens) == brute
    assert group.max_live_blocks(10**6) == brute_peak_blocks(spec, block_size, chunk * (block_size + 1))


def test_full_group_needs_the_ceiling_and_not_one_more() -> None:
    group = group_of(FULL, 16)
    assert [group.max_live_blocks(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


def test_gemma_like_window_needs_its_blocks_plus_one() -> None:
    group = group_of(dataclasses.replace(FULL, window=1024), 16)
    assert [group.max_live_blocks(n) for n in (1024, 1025, 100_000)] == [64, 65, 65]


def test_cross_tokens_count_for_cross_groups_only() -> None:
    config = make([FULL, CROSS])
    assert config.blocks_for(33, cross_tokens=20) == (3, 2)
    assert config.pool_blocks_for(33, cross_tokens=20) == (5,)
    with pytest.raises(InvalidArgumentError, match="cross_tokens=20 but no layer"):
        make().blocks_for(33, cross_tokens=20)


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "4", None, pytest.param(HUGE, id="huge")])
def test_sizing_questions_refuse_wrong_token_counts(wrong: Any) -> None:
    config = make()
    for question in (config.blocks_for, config.pool_blocks_for, config.sequence_bytes, config.require_fit):
        with pytest.raises(InvalidArgumentError, match="num_tokens="):
            question(wrong)
    with pytest.raises(InvalidArgumentError, match="num_tokens="):
        config.max_sequences(wrong)
    with pytest.raises(InvalidArgumentError, match="num_bytes="):
        config.blocks_in(wrong)


# ---- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("watermark", "num_blocks", "expected"),
    [(0, 100, 0), (0.01, 1, 0), (0.01, 2, 1), (0.01, 99, 1), (0.01, 1000, 10), (0.29, 100, 29), (0.99, 4, 3)],
)
def test_watermark_is_exact_and_leaves_a_usable_block(watermark: float, num_blocks: int, expected: int) -> None:
    assert make(gpu_blocks=num_blocks, watermark=watermark).watermark_blocks(0) == expected


def test_watermark_leaves_one_block_for_each_group_of_a_shared_pool() -> None:
    config = make([FULL, SLIDING], gpu_blocks=2, watermark=0.5)
    assert config.watermark_blocks(0) == 0
    assert config.longest_sequence() == 16
    with pytest.raises(InvalidArgumentError, match="pool=1"):
        config.watermark_blocks(1)


def test_pin_limit_defaults_to_half_of_the_smallest_pool() -> None:
    assert make(gpu_blocks=100).pinned_tokens_limit == 800
    assert make([FULL, SLIDING], gpu_blocks=100).pinned_tokens_limit == 400
    assert make(max_pinned_tokens=0).pinned_tokens_limit == 0


def test_time_to_live_is_kept_in_seconds() -> None:
    assert make().default_ttl is None
    assert make(default_ttl=5).default_ttl == 5.0


def test_longest_sequence_keeps_the_watermark_unless_told_otherwise() -> None:
    config = make(gpu_blocks=100, watermark=0.1)
    assert config.longest_sequence() == 90 * 16
    assert config.longest_sequence(keep_watermark=False) == 100 * 16
    assert make(gpu_blocks=100, max_seq_len=50).longest_sequence() == 50


def test_only_windows_means_no_longest_sequence() -> None:
    assert make([SLIDING], gpu_blocks=10).longest_sequence() is None
    assert make([SLIDING], gpu_blocks=10, max_seq_len=10**6).longest_sequence() == 10**6
    assert make([SLIDING], gpu_blocks=3).longest_sequence() == 32


def test_cross_tokens_that_overflow_leave_no_room() -> None:
    assert make([FULL, CROSS], gpu_blocks=10).longest_sequence(cross_tokens=16 * 20) == 0
    assert make([FULL, CROSS], gpu_blocks=10).max_sequences(1, cross_tokens=16 * 20) == 0


def test_request_that_can_never_fit_says_what_would() -> None:
    config = make(gpu_blocks=10)
    config.require_fit(9 * 16)
    with pytest.raises(NeverFitsError) as caught:
        config.require_fit(9 * 16 + 1)
    assert str(caught.value) == (
        "a sequence of 145 tokens never fits: it needs 10 blocks of pool 0, which has 10 and keeps 1 free; "
        f"gpu_blocks=11 ({11 * BLOCK} bytes) would hold it; the longest that fits has 144 tokens"
    )
    with pytest.raises(NeverFitsError, match="max_seq_len=50 is less; the longest that fits has 50 tokens"):
        make(max_seq_len=50).require_fit(51)
    assert make(max_seq_len=50).max_sequences(51) == 0


SPECS = st.builds(
    lambda heads, window, chunk, sinks, cross: LayerSpec(
        heads,
        4,
        window=None if cross else window,
        chunk=chunk if window is None and not cross else None,
        sink_tokens=sinks if window and not cross else 0,
        cross_attention=cross,
    ),
    st.integers(1, 2),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 20),
    st.integers(0, 5),
    st.booleans(),
)


@given(
    layers=st.lists(SPECS, min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    spare=st.integers(0, 12),
    watermark=st.sampled_from([0, 0.01, 0.2, 0.5]),
    max_seq_len=st.none() | st.integers(1, 60),
    cross=st.integers(0, 12),
    num_tokens=st.integers(1, 80),
)
def test_sizing_answers_agree_with_filling_the_pools_one_by_one(
    layers: list[LayerSpec],
    block_size: int,
    spare: int,
    watermark: float,
    max_seq_len: int | None,
    cross: int,
    num_tokens: int,
) -> None:
    layers = [*layers, FULL]
    cross = cross if any(layer.cross_attention for layer in layers) else 0
    config = make(layers, block_size, gpu_blocks=5 + spare, watermark=watermark, max_seq_len=max_seq_len)

    def need(tokens: int) -> list[int]:
        needs = [0] * len(config.pools)
        for group in config.groups:
            needs[group.pool] += group.max_live_blocks(cross if group.kind is GroupKind.CROSS else tokens)
        return needs

    def sequences_that_fit(tokens: int) -> int:
        if max_seq_len is not None and tokens > max_seq_len:
            return 0
        free = [pool.num_blocks[Tier.GPU] for pool in config.pools]
        count = 0
        while all(f - n >= config.watermark_blocks(i) for i, (f, n) in enumerate(zip(free, need(tokens), strict=True))):
            free = [f - n for f, n in zip(free, need(tokens), strict=True)]
            count += 1
        return count

    assert config.max_sequences(num_tokens, cross_tokens=cross) == sequences_that_fit(num_tokens)
    longest = 0
    while sequences_that_fit(longest + 1):
        longest += 1
    assert config.longest_sequence(cross_tokens=cross) == longest
    if num_tokens <= longest:
        config.require_fit(num_tokens, cross_tokens=cross)
    else:
        with pytest.raises(NeverFitsError, match=f"longest that fits has {longest} tokens"):
            config.require_fit(num_tokens, cross_tokens=cross)


@given(num_tokens=st.integers(1, 3000), watermark=st.sampled_from([0, 0.01, 0.1, 0.29, 0.5, 0.9]))
def test_suggested_block_count_is_the_smallest_that_fits(num_tokens: int, watermark: float) -> None:
    try:
        make([FULL, SLIDING], gpu_blocks=2, watermark=watermark).require_fit(num_tokens)
    except NeverFitsError as error:
        suggested = int(str(error).split("gpu_blocks=")[1].split(" ")[0])
        make([FULL, SLIDING], gpu_blocks=suggested, watermark=watermark).require_fit(num_tokens)
        with pytest.raises(NeverFitsError):
            make([FULL, SLIDING], gpu_blocks=suggested - 1, watermark=watermark).require_fit(num_tokens)


def test_explain_shows_groups_pools_and_answers() -> None:
    sunk = dataclasses.replace(SLIDING, sink_tokens=4, v_head_dim=4)
    mla = LayerSpec(1, 576, k_only=True)
    text = make([FULL, sunk, mla], gpu_blocks=50, host_blocks=60, plan_tokens=64).explain()
    assert text.splitlines() == [
        "3 layers, 1264 bytes per token, blocks of 16 tokens and 20224 bytes",
        "group 0: full, 1 layers of 2 heads x 8 bfloat16 (K and V), 64 bytes per token, pool 0",
        "group 1: full, 1 layers of 1 heads x 576 bfloat16 (K only), 1152 bytes per token, pool 1",
        "group 2: sliding of 40 tokens + 4 sink tokens, 1 layers of 2 heads x 8 bfloat16 (V of 4), "
        "48 bytes per token, pool 2",
        "pool 0: 1024 bytes per block, blocks: GPU 50, HOST 60, 1 kept free at admission",
        "pool 1: 18432 bytes per block, blocks: GPU 50, HOST 60, 1 kept free at admission",
        "pool 2: 768 bytes per block, blocks: GPU 50, HOST 60, 1 kept free at admission",
        "bytes: GPU 1011200, HOST 1213440",
        "longest sequence: 784 tokens",
        "sequences of 64 tokens at once: 12",
    ]
    assert "longest sequence: unlimited" in make([SLIDING]).explain()


# ---- a value, not an object ------------------------------------------------------------------------------------------


def test_config_is_frozen_hashable_and_survives_copying() -> None:
    config = make([FULL, SLIDING], gpu_blocks=[9], host_blocks=9, pressure_levels=[0.1, 0.2, 0.3])
    assert config.gpu_blocks == (9,)
    assert config.pressure_levels == (0.1, 0.2, 0.3)
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert twin == config
        assert hash(twin) == hash(config)
        assert twin.pools == config.pools
        assert twin.groups == config.groups
    assert dataclasses.replace(config, host_blocks=0).num_blocks(Tier.HOST) == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 32  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.pools[0].num_blocks[Tier.GPU] = 5  # type: ignore[index]
    assert hash(config.pools[0]) == hash(copy.copy(config.pools[0]))


def test_numpy_integers_are_welcome() -> None:
    two: Any = np.int64(2)
    config = make([LayerSpec(two, two)], two, gpu_blocks=two)
    assert (type(config.block_size), type(config.layers[0].kv_heads)) == (int, int)
    assert config.num_blocks(Tier.GPU) == 2
    half: Any = np.float64(2)
    with pytest.raises(KVPoolError, match="kv_heads="):
        LayerSpec(half, 8)
