"""Which keys a query sees, written out, and what an AttentionSpec refuses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvpool.config.layers import DType, LayerSpec, TokenPart
from kvpool.errors import ConfigError
from kvpool.kernels.attention_spec import AttentionSpec

PICTURES: list[tuple[dict[str, Any], str]] = [
    ({}, "x..... xx.... xxx... xxxx.. xxxxx. xxxxxx"),
    ({"causal": False}, "xxxxxx xxxxxx xxxxxx xxxxxx xxxxxx xxxxxx"),
    ({"causal": False, "window": 2}, "xxxxxx xxxxxx .xxxxx ..xxxx ...xxx ....xx"),
    ({"causal": False, "window": 2, "sink_tokens": 1}, "xxxxxx xxxxxx xxxxxx x.xxxx x..xxx x...xx"),
    ({"window": 1}, "x..... .x.... ..x... ...x.. ....x. .....x"),
    ({"window": 3}, "x..... xx.... xxx... .xxx.. ..xxx. ...xxx"),
    ({"window": 2, "sink_tokens": 1}, "x..... xx.... xxx... x.xx.. x..xx. x...xx"),
    ({"window": 2, "sink_tokens": 3}, "x..... xx.... xxx... xxxx.. xxxxx. xxx.xx"),
    ({"chunk": 2}, "x..... xx.... ..x... ..xx.. ....x. ....xx"),
    ({"chunk": 4}, "x..... xx.... xxx... xxxx.. ....x. ....xx"),
]


@pytest.mark.parametrize(("options", "picture"), PICTURES, ids=lambda value: str(value))
def test_given_a_rule_then_six_queries_see_these_keys(options: dict[str, Any], picture: str) -> None:
    positions = np.arange(6)

    seen = AttentionSpec(1, 1, 16, **options).visible(positions[:, None], positions[None, :])

    rows = ["".join("x" if visible else "." for visible in row) for row in seen]
    assert " ".join(rows) == picture


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"q_heads": 6, "kv_heads": 4}, "q_heads=6"),
        ({"q_heads": 0}, "q_heads=0"),
        ({"values": "k", "v_dim": 65}, "v_dim=65"),
        ({"window": 4, "chunk": 4}, "chunk=4"),
        ({"window": 0}, "window=0"),
        ({"sink_tokens": 2}, "sink_tokens=2"),
        ({"causal": False, "chunk": 4}, "causal=False with chunk=4"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"dtype": DType.INT8}, "dtype=int8"),
        ({"kv_dtype": "int7"}, "kv_dtype='int7'"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"sink_logits": 1}, "sink_logits=1"),
    ],
)
def test_given_a_contradiction_then_it_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 64, **options})


def test_given_a_layer_of_the_cache_then_its_attention_takes_over_what_the_cache_knows() -> None:
    layer = LayerSpec(kv_heads=2, head_dim=64, v_head_dim=32, window=9, sink_tokens=1, dtype=DType.INT8)

    spec = AttentionSpec.of(layer, 8, soft_cap=30.0, scale=0.5)

    assert (spec.q_heads, spec.kv_heads, spec.head_dim, spec.v_dim) == (8, 2, 64, 32)
    assert (spec.window, spec.sink_tokens, spec.kv_dtype) == (9, 1, DType.INT8)
    assert (spec.soft_cap, spec.scale, spec.causal, spec.group_size) == (30.0, 0.5, True, 4)


def test_given_a_cross_attention_layer_then_its_attention_is_not_causal() -> None:
    assert not AttentionSpec.of(LayerSpec(kv_heads=1, head_dim=16, cross_attention=True), 1).causal


def test_given_a_k_only_layer_then_the_size_of_v_must_be_said() -> None:
    layer = LayerSpec(kv_heads=1, head_dim=576, k_only=True)

    with pytest.raises(ConfigError, match="v_dim"):
        AttentionSpec.of(layer, 16)
    spec = AttentionSpec.of(layer, 16, v_dim=512)
    assert (spec.v_dim, spec.reads) == (512, (("k", DType.BFLOAT16, 576),))


def test_given_a_layer_that_also_keeps_an_indexer_s_keys_then_attention_reads_keys_and_values_only() -> None:
    index = TokenPart("index", DType.BFLOAT16, 1, 16)
    layer = LayerSpec(kv_heads=2, head_dim=64, v_head_dim=32, extra_parts=(index,))

    spec = AttentionSpec.of(layer, 8)

    assert spec.reads == (("k", DType.BFLOAT16, 64), ("v", DType.BFLOAT16, 32))


@pytest.mark.parametrize(("sink_tokens", "slots"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_given_sink_tokens_then_their_blocks_are_whole(sink_tokens: int, slots: int) -> None:
    assert AttentionSpec(1, 1, 16, window=9, sink_tokens=sink_tokens).sink_slots(4) == slots
