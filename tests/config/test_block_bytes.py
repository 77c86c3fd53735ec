"""How large a block is, and which fields of a configuration have no effect."""

from __future__ import annotations

import pytest

from kvpool import DType, LayerSpec, Tier
from kvpool.errors import ConfigError
from managers import FULL, make_manager


def test_bytes_of_a_block_count_every_layer_once() -> None:
    config = make_manager(*[FULL] * 12).config
    assert config.block_bytes == 12 * 4 * FULL.bytes_per_token
    assert config.pool_bytes(Tier.GPU) == 16 * config.block_bytes


def test_kv_heads_and_k_only_layers_size_the_block() -> None:
    assert LayerSpec(kv_heads=2, head_dim=64).bytes_per_token == 2 * 64 * 2 * 2
    assert LayerSpec(kv_heads=1, head_dim=576, k_only=True).bytes_per_token == 576 * 2


def test_every_dtype_has_its_own_size() -> None:
    sizes = {dtype: LayerSpec(kv_heads=1, head_dim=8, dtype=dtype).bytes_per_token for dtype in DType}
    assert (sizes[DType.BFLOAT16], sizes[DType.FP8_E4M3], sizes[DType.FLOAT32]) == (32, 16, 64)


def test_a_field_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="default_ttl"):
        make_manager(default_ttl=3.0, enable_prefix_caching=False)
