from __future__ import annotations

from typing import Any

import pytest

from kvpool import DType, KVCacheConfig, LayerSpec, StatePart, StateSpec, Tier
from kvpool.config.layers import divide_budget
from kvpool.errors import ConfigError

FULL = LayerSpec(kv_heads=1, head_dim=32)
SLIDING = LayerSpec(kv_heads=1, head_dim=32, window=512)
GEMMA = [FULL] + [SLIDING] * 5  # 2 KiB a full block, 10 KiB a windowed one
MIB = 2**20


def counts(tier: Tier = Tier.GPU, **options: Any) -> tuple[int, ...]:
    config = KVCacheConfig(GEMMA, **options)
    assert config.pool_bytes(Tier.GPU) <= options.get("gpu_bytes", 2**60)
    return tuple(pool.num_blocks[tier] for pool in config.pools)


def test_a_typical_prefix_needs_the_middle_of_its_window_and_all_its_blocks_where_it_is_written() -> None:
    full, windowed = counts(gpu_bytes=20 * MIB)
    assert windowed / full == pytest.approx((33 + 128) / 2 / 128, rel=0.01)


def test_below_the_gpu_a_prefix_needs_its_last_window_only() -> None:
    full, windowed = counts(Tier.HOST, gpu_blocks=100, host_bytes=20 * MIB)
    assert windowed / full == pytest.approx(33 / 128, rel=0.01)


def test_checkpoints_get_a_quarter_of_the_bytes_at_most() -> None:
    attention = LayerSpec(kv_heads=1, head_dim=8)  # 32 bytes per token
    small, large = (StateSpec((StatePart("state", (size, 64), DType.FLOAT32),)) for size in (1, 2048))
    budget = 2**26
    light = KVCacheConfig([attention, small], gpu_bytes=budget, host_bytes=budget)
    blocks, checkpoints = (pool.num_blocks[Tier.GPU] for pool in light.pools)
    assert checkpoints == pytest.approx(2 * blocks * 16 / 2048, abs=2)  # two for each prefix of 2,048 tokens
    heavy = KVCacheConfig([attention, large], gpu_bytes=budget, host_bytes=budget)
    for tier in (Tier.GPU, Tier.HOST):
        of_states = heavy.pools[1].num_blocks[tier] * large.bytes
        assert 0.2 < of_states / budget <= 0.26
    alone = KVCacheConfig([large], gpu_bytes=budget)
    assert alone.pools[0].num_blocks[Tier.GPU] == budget // large.bytes


def test_one_sequence_of_the_longest_length_fits_if_the_budget_can_hold_it() -> None:
    config = KVCacheConfig(GEMMA, gpu_bytes=20 * MIB, max_seq_len=65_536, watermark=0)
    assert config.longest_sequence() == 65_536
    assert config.pools[1].num_blocks[Tier.GPU] > 500  # and the rest is divided for prefixes
    assert counts(gpu_bytes=5 * MIB, max_seq_len=65_536) == counts(gpu_bytes=5 * MIB, plan_tokens=65_536)


def test_sequences_of_a_given_length_and_caches_without_prefixes_get_what_running_needs() -> None:
    needs = KVCacheConfig(GEMMA, gpu_blocks=1).pool_blocks_for(4096)
    full, windowed = counts(gpu_bytes=20 * MIB, plan_tokens=4096)
    assert windowed / full == pytest.approx(needs[1] / needs[0], rel=0.01)
    assert counts(gpu_bytes=20 * MIB, enable_prefix_caching=False) == (full, windowed)


def test_shares_of_the_bytes_can_be_given() -> None:
    full, windowed = counts(gpu_bytes=20 * MIB, pool_shares=(0.25, 0.75))
    assert (full * 2048, windowed * 10240) == (pytest.approx(5 * MIB, rel=0.01), pytest.approx(15 * MIB, rel=0.01))


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.6), (0.0, 1.0), (1.5, -0.5), "ab", 0.5, (0.5, None)])
def test_wrong_shares_are_refused(shares: Any) -> None:
    with pytest.raises(ConfigError, match="pool_shares"):
        KVCacheConfig(GEMMA, gpu_bytes=20 * MIB, pool_shares=shares)


@pytest.mark.parametrize("options", [{"gpu_blocks": 9}, {"gpu_bytes": 20 * MIB, "plan_tokens": 64}])
def test_shares_without_bytes_or_beside_a_plan_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"pool_shares=.* divides byte budgets"):
        KVCacheConfig(GEMMA, pool_shares=(0.5, 0.5), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [{"gpu_bytes": 20 * MIB}, {"gpu_fraction": 0.5, "free_gpu_bytes": 40 * MIB}])
def test_a_number_of_tokens_caps_what_a_byte_budget_takes(budget: dict[str, Any]) -> None:
    assert counts(max_gpu_tokens=1000, **budget) == (63, 63)
    assert counts(max_gpu_tokens=10**6, **budget) == counts(**budget)
    shared = KVCacheConfig([FULL, SLIDING], max_gpu_tokens=1000, **budget)
    assert shared.num_blocks(Tier.GPU) == 126  # two groups in one pool
    assert shared.longest_sequence(keep_watermark=False) >= 1000


def test_a_cap_beside_exact_counts_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_gpu_tokens=64 caps gpu_bytes or gpu_fraction"):
        KVCacheConfig(GEMMA, gpu_blocks=9, max_gpu_tokens=64)


def test_what_rounding_leaves_goes_one_block_each_to_the_pools_that_it_took_most_from() -> None:
    def divided(num_bytes: int) -> tuple[int, ...]:
        return divide_budget(num_bytes, block_bytes=(2, 10), needs=(3, 1), minimums=(0, 0))

    assert divided(32) == (6, 2)  # twice the needs
    assert [divided(num_bytes) for num_bytes in (33, 34, 44, 46)] == [(6, 2), (7, 2), (9, 2), (8, 3)]
