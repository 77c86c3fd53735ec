"""How K and V lie in a block: nothing overlaps, nothing is padded, everything is aligned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvpool import DType, KVCacheConfig, LayerSpec  # noqa: E402
from kvpool.config.layers import TokenPart  # noqa: E402
from kvpool.errors import ConfigError  # noqa: E402
from kvpool.storage.layout import GroupLayout  # noqa: E402


def layout_of(layers: list[LayerSpec], block_size: int = 4, **options: Any) -> GroupLayout:
    return GroupLayout(KVCacheConfig(layers, block_size, gpu_blocks=4).groups[0], **options)


@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec(2, 8),
        LayerSpec(2, 6, v_head_dim=2),
        LayerSpec(2, 5, k_only=True),
        LayerSpec(2, 4, k_only=True, extra_parts=(TokenPart("index", DType.FLOAT32, 1, 4),)),
        LayerSpec(1, 6, extra_parts=(TokenPart("index", DType.BFLOAT16, 1, 16), TokenPart("more", DType.INT8, 2, 3))),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", list(DType))
def test_given_a_layout_when_every_view_is_filled_then_every_byte_is_hit_exactly_once(
    dtype: DType, layer: LayerSpec
) -> None:
    layout = layout_of([replace(layer, dtype=dtype)] * 3)
    hits = torch.zeros((4, layout.block_bytes), dtype=torch.uint8)
    caches = [layout.layer_cache(hits, number) for number in range(3)]
    for view in [each for cache in caches for part in cache.values() for each in (part.data, part.scale, part.zero)]:
        if view is not None:
            item = view.element_size()
            bytes_of = torch.zeros(1, dtype=torch.uint8).set_(  # the same bytes, one by one
                view.untyped_storage(),
                view.storage_offset() * item,
                (*view.shape, item),
                (*(stride * item for stride in view.stride()), 1),
            )
            bytes_of += 1
    assert (hits == 1).all()


def test_given_a_layer_then_its_views_have_the_order_block_token_head_element() -> None:
    layout = layout_of([LayerSpec(kv_heads=3, head_dim=8, v_head_dim=2, dtype="int4")] * 2)
    cache = layout.layer_cache(torch.zeros((4, layout.block_bytes), dtype=torch.uint8), 1)
    keys, values = cache["k"], cache["v"]
    assert keys.data.shape == (4, 4, 3, 8)  # K of int4 is int8
    assert values.data.shape == (4, 4, 3, 1)
    assert keys.scale is not None
    assert values.zero is not None
    assert keys.scale.shape == values.zero.shape == (4, 4, 3)
    assert (cache.num_blocks, cache.block_size) == (4, 4)


def test_given_a_k_only_layer_then_there_is_no_v() -> None:
    layout = layout_of([LayerSpec(kv_heads=1, head_dim=8, k_only=True)])
    assert layout.layer_cache(torch.zeros((1, layout.block_bytes), dtype=torch.uint8), 0).keys() == {"k"}


def test_given_fp8_factors_then_each_layer_carries_its_own() -> None:
    layout = layout_of([LayerSpec(kv_heads=1, head_dim=8, dtype="fp8")] * 2, factors={1: (0.5, 2.0)})
    data = torch.zeros((1, layout.block_bytes), dtype=torch.uint8)
    caches = [layout.layer_cache(data, number) for number in range(2)]
    assert [[part.factor for part in cache.values()] for cache in caches] == [[1.0, 1.0], [0.5, 2.0]]


def test_given_scales_at_odd_addresses_when_a_layout_is_made_then_it_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="even block_size or head_dim"):
        layout_of([LayerSpec(kv_heads=1, head_dim=3, dtype="int8", k_only=True)], block_size=1)
