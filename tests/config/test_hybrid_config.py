"""Models that mix attention with layers that keep a state: what their files say, and what cannot be read from them."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.config import DType, LayerSpec, StatePart, StateSpec
from kvpool.config.model_config import config_from_hf, layers_from_hf
from kvpool.errors import ConfigError

MIB = 2**20
QWEN3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1",
    "head_dim": 128,
    "hidden_size": 2048,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
}
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*-E",
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
}
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "qk_rope_head_dim": 64,
}
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 7,
    "num_key_value_heads": 8,
}
ZAMBA2: dict[str, Any] = {
    "model_type": "zamba2",
    "attention_head_dim": 160,
    "hidden_size": 2560,
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 80,
    "num_attention_heads": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": 32,
}


def mamba(width: int, channels: int, recurrent: tuple[int, ...], dtype: DType = DType.BFLOAT16) -> StateSpec:
    return StateSpec((StatePart("conv", (channels, width), dtype), StatePart("recurrent", recurrent, DType.FLOAT32)))


def kinds(source: dict[str, Any]) -> str:
    """`a` for each attention layer, `s` for each state."""
    return "".join("s" if isinstance(layer, StateSpec) else "a" for layer in layers_from_hf(source))


def test_gated_delta_layers_keep_a_convolution_and_a_matrix_for_each_head() -> None:
    layers = layers_from_hf(QWEN3_NEXT_80B)
    state = mamba(4, 2 * 16 * 128 + 32 * 128, (32, 128, 128))
    assert layers == (state, state, state, LayerSpec(kv_heads=2, head_dim=256)) * 12
    assert state.bytes == 65536 + 2 * MIB
    assert sum(layer.bytes for layer in layers if isinstance(layer, StateSpec)) == 36 * (65536 + 2 * MIB)


def test_states_stay_as_the_model_computes_them_whatever_the_cache_stores() -> None:
    state, *_, attention = layers_from_hf({**QWEN3_NEXT_80B, "torch_dtype": "float16"}, dtype="fp8")
    assert attention == LayerSpec(2, 256, DType.FP8_E4M3)
    assert state == mamba(4, 8192, (32, 128, 128), DType.FLOAT16)


def test_a_layer_that_attends_and_keeps_a_state_has_both() -> None:
    layers = layers_from_hf(FALCON_H1)
    assert layers == (LayerSpec(2, 128), mamba(4, 3072 + 2 * 256, (48, 64, 256))) * 24


def test_feed_forward_layers_keep_nothing() -> None:
    assert kinds(NEMOTRON_H) == "ssa"
    assert layers_from_hf(NEMOTRON_H)[0] == mamba(4, 8192 + 2 * 8 * 128, (128, 64, 128))
    listed = {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
    assert kinds(listed) == "sa"


def test_latent_attention_beside_states() -> None:
    layers = layers_from_hf(KIMI_LINEAR)
    assert kinds(KIMI_LINEAR) == "sssasssa"
    assert layers[3] == LayerSpec(kv_heads=1, head_dim=576, k_only=True)
    assert layers[0] == mamba(4, 3 * 32 * 128, (32, 128, 128))


def test_layers_that_a_rule_names() -> None:
    assert kinds(JAMBA) == "ssssasss" * 4
    assert layers_from_hf(JAMBA)[0] == mamba(4, 8192, (8192, 16))
    assert kinds(LFM2) == "ssassas"
    assert layers_from_hf(LFM2)[0] == StateSpec((StatePart("conv", (2048, 3), DType.BFLOAT16),))


def test_attention_over_the_embedding_beside_the_hidden_state_has_wide_heads() -> None:
    assert layers_from_hf(ZAMBA2)[1] == LayerSpec(kv_heads=32, head_dim=160)
    assert kinds(ZAMBA2) == "sass"


def test_a_model_without_attention_needs_no_heads() -> None:
    falcon_mamba = dict(hidden_size=4096, num_hidden_layers=64, state_size=16, conv_kernel=4, expand=16)
    source = {"model_type": "falcon_mamba", "intermediate_size": 8192, **falcon_mamba}
    assert layers_from_hf(source) == (mamba(4, 8192, (8192, 16)),) * 64
    mamba2 = dict(hidden_size=4096, num_hidden_layers=2, state_size=128, conv_kernel=4, expand=2, n_groups=8)
    source = {"model_type": "mamba2", "num_heads": 128, "head_dim": 64, **mamba2}
    assert layers_from_hf(source) == (mamba(4, 8192 + 2048, (128, 64, 128)),) * 2


def test_a_nested_text_config_leaves_out_what_transformers_assumes() -> None:
    source = {"model_type": "qwen3_5", "text_config": {"full_attention_interval": 4, "num_hidden_layers": 4}}
    assert layers_from_hf(source)[2:] == (mamba(4, 8192, (32, 128, 128)), LayerSpec(4, 256))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({**QWEN3_NEXT_80B, "full_attention_interval": None}, "which layers of model_type='qwen3_next' attend"),
        ({**QWEN3_NEXT_80B, "layer_types": ["full_attention"]}, "1 layers are listed, but num_hidden_layers=48"),
        ({**QWEN3_NEXT_80B, "layer_types": ["warped"] * 48}, "unknown kinds: warped"),
        ({**QWEN3_NEXT_80B, "linear_num_key_heads": None}, "lacks linear_num_key_heads"),
        ({**QWEN3_NEXT_80B, "linear_num_key_heads": 1.5}, "linear_num_key_heads=1.5"),
        ({**QWEN3_NEXT_80B, "num_attention_heads": None}, "lacks num_attention_heads"),
        ({**QWEN3_NEXT_80B, "torch_dtype": "int8"}, "the part 'conv' of a state is int8"),
        ({**QWEN3_NEXT_80B, "num_kv_shared_layers": 2}, "num_kv_shared_layers=2"),
        ({**FALCON_H1, "mamba_n_heads": 7}, "mamba_n_heads=7 does not divide"),
        ({**JAMBA, "attn_layer_offset": 8}, "attn_layer_offset=8"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M?"}, r"unknown kinds: \?"),
        ({**LFM2, "full_attn_idxs": [7]}, "full_attn_idxs=7"),
        ({**KIMI_LINEAR, "index_head_dim": 128}, "keeps an indexer's keys in a form of its own"),
    ],
)
def test_what_a_file_does_not_say_is_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_from_hf(source)


def test_a_config_has_a_group_for_all_states() -> None:
    config = config_from_hf(QWEN3_NEXT_80B, gpu_bytes=2**34)
    assert config.state_group is not None
    assert (len(config.state_group.layers), config.state_group.block_bytes) == (36, 77856768)
    assert config.bytes_per_token == 12 * 2048


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", (1,), "float32"), "name=''"),
        (("conv", 4, "float32"), "shape=4"),
        (("conv", (), "float32"), "no dimensions"),
        (("conv", (4, 0), "float32"), "shape=0"),
        (("conv", (4,), "fp8"), "states are kept in float32, float16, bfloat16"),
    ],
)
def test_parts_of_states_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StatePart(*arguments)


def test_parts_begin_where_a_gpu_can_load_them() -> None:
    conv, recurrent = StatePart("conv", (3, 3), "bfloat16"), StatePart("recurrent", [5], "float32")  # type: ignore[arg-type]
    assert (conv.bytes, recurrent.bytes) == (18, 20)
    assert StateSpec((conv, recurrent)).offsets == (0, 32, 64)
    for parts in ((), (conv, conv), ("conv",), 4):
        with pytest.raises(ConfigError):
            StateSpec(parts)  # type: ignore[arg-type]


def test_mixed_projections_keep_their_last_inputs_and_half_of_the_values() -> None:
    zaya = {
        "model_type": "zaya",
        "cca_time0": 2,
        "cca_time1": 3,
        "head_dim": 128,
        "hidden_size": 2048,
        "layer_types": ["linear_attention", "linear_attention"],
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    conv = StatePart("conv", ((8 + 2) * 128, 3), DType.BFLOAT16)
    late = StatePart("recurrent", (2 * 128 // 2,), DType.BFLOAT16)
    assert [layer for layer in layers_from_hf(zaya) if isinstance(layer, StateSpec)] == [StateSpec((conv, late))] * 2
