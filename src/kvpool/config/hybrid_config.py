"""Which layers of a Hugging Face model keep a state, and what is in it: the families that transformers caches so.

Every family has its own names for the same few numbers. The shapes are those of `transformers`: a convolution keeps as
many inputs as its kernel is long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpool.checks import check_int, show
from kvpool.config.layers import MAX_HEAD_DIM, DType, StatePart, StateSpec
from kvpool.errors import ConfigError

Config = Mapping[str, Any]
StateReader = Callable[[Config, DType], StateSpec]

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"})
STATE_KINDS = frozenset({"linear_attention", "hybrid", "hybrid_sliding"})
_STATELESS_KINDS = frozenset({"moe", "mlp"})
_OLD_NAMES = {"mamba": "linear_attention", "conv": "linear_attention", "attention": "full_attention"}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

# What transformers assumes for a key that is absent in a nested text_config.
HYBRID_DEFAULTS: dict[str, dict[str, int]] = {
    model_type: {
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "hidden_size": hidden,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    for model_type, layers, hidden, kv_heads in (("qwen3_5_text", 32, 4096, 4), ("qwen3_5_moe_text", 40, 2048, 2))
}


def layer_kinds(config: Config, model_type: str) -> list[str]:
    """One kind for every layer: those of ATTENTION_KINDS attend, those of STATE_KINDS keep a state, the rest neither."""
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed is None and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        listed = [_PATTERN.get(letter, letter) for letter in pattern]
    if listed is None:
        kinds = _kinds_by_rule(config, model_type, _get(config, "num_hidden_layers"))
    elif not isinstance(listed, (list, tuple)) or not listed:
        raise ConfigError(f"layer_types={show(listed)} must list a kind for each layer")
    else:
        kinds = [_OLD_NAMES.get(kind, kind) if isinstance(kind, str) else show(kind) for kind in listed]
    if len(kinds) != (config.get("num_hidden_layers") or len(kinds)):
        raise ConfigError(f"{len(kinds)} layers are listed, but num_hidden_layers={show(config['num_hidden_layers'])}")
    if unknown := sorted(set(kinds) - ATTENTION_KINDS - STATE_KINDS - _STATELESS_KINDS):
        raise ConfigError(f"layers of model_type={show(model_type)} are of unknown kinds: {', '.join(unknown)}")
    return kinds


def _kinds_by_rule(config: Config, model_type: str, num_layers: int) -> list[str]:
    """The kinds of layers for a file that does not list them."""
    if (same := _ALL_ALIKE.get(model_type)) is not None:
        return [same] * num_layers
    if isinstance(lists := config.get("linear_attn_config"), Mapping) and "full_attn_layers" in lists:
        attending = {check_int(layer, "full_attn_layers", 1, num_layers) - 1 for layer in lists["full_attn_layers"]}
        return _attention_at(attending, num_layers)
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if key in config:
            return _attention_at({check_int(layer, key, 0, num_layers - 1) for layer in config[key] or ()}, num_layers)
    if config.get("full_attention_interval") is not None:
        interval = _get(config, "full_attention_interval")
        return _attention_at(set(range(interval - 1, num_layers, interval)), num_layers)
    if model_type == "jamba":
        period = _get(config, "attn_layer_period")
        offset = check_int(config.get("attn_layer_offset"), "attn_layer_offset", 0, period - 1)
        return _attention_at(set(range(offset, num_layers, period)), num_layers)
    raise ConfigError(
        f"which layers of model_type={show(model_type)} attend and which keep a state is not said; add layer_types "
        "(full_attention or linear_attention for each layer)"
    )


def _attention_at(layers: set[int], num_layers: int) -> list[str]:
    return ["full_attention" if layer in layers else "linear_attention" for layer in range(num_layers)]


def state_spec(config: Config, model_type: str, dtype: DType) -> StateSpec:
    """The state that a layer of this model keeps; `dtype` is the one in which the model computes."""
    return HYBRID_FAMILIES[model_type](config, dtype)


def _get(config: Config, key: str) -> int:
    if config.get(key) is None:
        raise ConfigError(f"the config lacks {key}, which the size of a state depends on; add it")
    return check_int(config[key], key, 1, MAX_HEAD_DIM)


def _spec(channels: int, kernel: int, recurrent: Sequence[int], dtype: DType) -> StateSpec:
    """A convolution's inputs as the model computes them, and a recurrence in float32."""
    conv = StatePart("conv", (channels, kernel), dtype)
    return StateSpec((conv, StatePart("recurrent", tuple(recurrent), DType.FLOAT32)))


def _mamba(kernel: str, state: str, expand: str, *, inner: str | None = None, heads: str | None = None) -> StateReader:
    """Mamba 1, with the names of its kernel length, state size and factor or width; `heads` divide the width."""

    def read(config: Config, dtype: DType) -> StateSpec:
        given = None if inner is None else config.get(inner)
        width = _get(config, expand) * _get(config, "hidden_size") if given is None else _get(config, str(inner))
        shape = [width] if heads is None else [_get(config, heads), _divided(width, heads, config)]
        return _spec(width, _get(config, kernel), [*shape, _get(config, state)], dtype)

    return read


def _mamba2(heads: str, width: Sequence[str], groups: str, state: str, kernel: str) -> StateReader:
    """Mamba 2, with the names of its numbers; its width is the product of those of `width`."""

    def read(config: Config, dtype: DType) -> StateSpec:
        inner = config.get("mamba_d_ssm")  # Falcon-H1 names it, if it is no multiple of the hidden size
        inner = _get(config, width[0]) * _get(config, width[1]) if inner is None else _get(config, "mamba_d_ssm")
        size = _get(config, state)
        recurrent = [_get(config, heads), _divided(inner, heads, config), size]
        return _spec(inner + 2 * _get(config, groups) * size, _get(config, kernel), recurrent, dtype)

    return read


def _divided(width: int, heads: str, config: Config) -> int:
    if width % _get(config, heads):
        raise ConfigError(f"{heads}={config[heads]} does not divide the width of its layers, {width}")
    return width // _get(config, heads)


def _gated_delta(config: Config, dtype: DType) -> StateSpec:
    key_dim, value_dim = _get(config, "linear_key_head_dim"), _get(config, "linear_value_head_dim")
    key_heads, value_heads = _get(config, "linear_num_key_heads"), _get(config, "linear_num_value_heads")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return _spec(channels, _get(config, "linear_conv_kernel_dim"), [value_heads, key_dim, value_dim], dtype)


def _kimi_delta(config: Config, dtype: DType) -> StateSpec:
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    inner = config.get("linear_attn_config")  # as the checkpoint has it; transformers saves the numbers themselves
    merged = {**config, **{names.get(key, key): value for key, value in (inner or {}).items()}}
    heads, dim = _get(merged, "linear_num_heads"), _get(merged, "linear_head_dim")
    return _spec(3 * heads * dim, _get(merged, "linear_conv_kernel_dim"), [heads, dim, dim], dtype)


def _short_convolution(config: Config, dtype: DType) -> StateSpec:
    return StateSpec((StatePart("conv", (_get(config, "hidden_size"), _get(config, "conv_L_cache")), dtype),))


def _mixed_projections(config: Config, dtype: DType) -> StateSpec:
    """Zaya: convolutions over queries and keys, and the half of the values that is a token late."""
    dim, kv_heads = _get(config, "head_dim"), _get(config, "num_key_value_heads")
    kernel = _get(config, "cca_time0") + _get(config, "cca_time1") - 2
    conv = StatePart("conv", ((_get(config, "num_attention_heads") + kv_heads) * dim, kernel), dtype)
    return StateSpec((conv, StatePart("recurrent", (kv_heads * dim // 2,), dtype)))


_MAMBA_1 = _mamba("conv_kernel", "state_size", "expand", inner="intermediate_size")
_MAMBA_2 = _mamba2("mamba_n_heads", ("mamba_expand", "hidden_size"), "mamba_n_groups", "mamba_d_state", "mamba_d_conv")

HYBRID_FAMILIES: Mapping[str, StateReader] = {
    "mamba": _MAMBA_1,
    "falcon_mamba": _MAMBA_1,
    "jamba": _mamba("mamba_d_conv", "mamba_d_state", "mamba_expand"),
    "zamba": _mamba("mamba_d_conv", "mamba_d_state", "mamba_expand", heads="n_mamba_heads"),
    "mamba2": _mamba2("num_heads", ("expand", "hidden_size"), "n_groups", "state_size", "conv_kernel"),
    "bamba": _MAMBA_2,
    "granitemoehybrid": _MAMBA_2,
    "falcon_h1": _MAMBA_2,
    "nemotron_h": _mamba2(
        "mamba_num_heads", ("mamba_num_heads", "mamba_head_dim"), "n_groups", "ssm_state_size", "conv_kernel"
    ),
    "zamba2": _mamba2(
        "n_mamba_heads", ("mamba_expand", "hidden_size"), "mamba_ngroups", "mamba_d_state", "mamba_d_conv"
    ),
    "qwen3_next": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "olmo_hybrid": _gated_delta,
    "kimi_linear": _kimi_delta,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "zaya": _mixed_projections,
}
_ALL_ALIKE = {
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "falcon_mamba": "linear_attention",
    "falcon_h1": "hybrid",
}
