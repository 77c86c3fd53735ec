"""From a Hugging Face config.json to the layers of a KV cache, without transformers.

A file that does not say enough is refused, naming what is missing. Nothing is guessed: a model that keeps anything but
K and V per token and the states of the families in `hybrid_config` (shared or compressed caches, other states) is
refused too, naming the key that says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpool.checks import check_bool, check_int, show
from kvpool.config import KVCacheConfig
from kvpool.config.hybrid_config import (
    ATTENTION_KINDS,
    HYBRID_DEFAULTS,
    HYBRID_FAMILIES,
    STATE_KINDS,
    layer_kinds,
    state_spec,
)
from kvpool.config.layers import MAX_HEAD_DIM, MAX_HEADS, MAX_TOKENS, DType, LayerSpec, StateSpec, index_part
from kvpool.errors import ConfigError
from kvpool.files import read_json

Source = Mapping[str, Any] | str | os.PathLike[str]

_MAX_LAYERS = 2**16
_STANDARD_KEYS = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


def _sizes(layers: int, heads: int, hidden: int, **rest: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, **rest}


# What transformers assumes for a key that is absent. A nested text_config is saved without the keys that have these
# values (gemma-3-4b's has no head counts); a top-level file always has the three standard keys, so there they are
# required.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": _sizes(32, 32, 4096),
    "mistral": _sizes(32, 32, 4096, num_key_value_heads=8, sliding_window=4096),
    "mixtral": _sizes(32, 32, 4096, num_key_value_heads=8),
    "qwen2": _sizes(32, 32, 4096, num_key_value_heads=32, sliding_window=4096, max_window_layers=28),
    "qwen3": _sizes(32, 32, 4096, num_key_value_heads=32, head_dim=128, sliding_window=4096, max_window_layers=28),
    "qwen2_moe": _sizes(24, 16, 2048, num_key_value_heads=16, sliding_window=4096),
    "qwen3_moe": _sizes(24, 32, 2048, num_key_value_heads=4, sliding_window=4096),
    "gemma": _sizes(28, 16, 3072, num_key_value_heads=16, head_dim=256),
    "gemma2": _sizes(26, 8, 2304, num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gemma3_text": _sizes(26, 8, 2304, num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gpt_oss": _sizes(36, 64, 2880, num_key_value_heads=8, head_dim=64, sliding_window=128),
    "llama4_text": _sizes(48, 40, 5120, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192),
    "cohere2": _sizes(40, 64, 8192, sliding_window=4096),
    "phi": _sizes(24, 32, 2048),
    "phi3": _sizes(32, 32, 3072),
    **HYBRID_DEFAULTS,
}
_NESTED_TYPES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
}
_DECODER_TYPES = frozenset({"bart", "bigbird_pegasus", "blenderbot", "marian", "mbart", "pegasus", "plbart"})
_ALIASED_TYPES = frozenset(
    {
        *("gpt2", "gptj", "codegen", "gpt_bigcode", "bloom", "falcon", "ctrl", "dbrx", "gpt_neo"),
        *(*_DECODER_TYPES, "blenderbot-small"),
    }
)
_MHA_TYPES = frozenset({"gpt2", "gptj", "codegen", "bloom", "gpt_neox", "opt", "persimmon"})
_MLA_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"})
_DOUBLE_HEADS_SLIDE = frozenset({"mimo_v2_flash"})  # sliding layers have twice the K/V heads
_DOUBLE_WIDTH_TYPES = frozenset({"zamba", "zamba2"})  # attention sees the embedding beside the hidden state

_ALL_LAYERS_SLIDE = frozenset({"mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2"})
_TOP_LAYERS_SLIDE = frozenset({"qwen2", "qwen3"})  # those from max_window_layers on
# Versions of transformers disagree on which layers of a mixture slide, so these need layer_types to say it.
_SLIDE_ONLY_IF_SWITCHED_ON = frozenset({*_TOP_LAYERS_SLIDE, "qwen2_moe", "qwen3_moe"})
_EVERY_NTH_IS_FULL = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}
_NO_LAYER_SLIDES = frozenset({"llama", "gemma", "phi", "falcon", *_MHA_TYPES, *_MLA_TYPES})

_INDEXED = frozenset({"full_attention", "indexed_attention", "deepseek_sparse_attention"})  # where there is an indexer
_LAYERS_PER_INDEXER = {"hy_v4": 4}
# Signs that a layer keeps a state; and those that it keeps something else than K and V of every token.
_STATE_PREFIXES = ("mamba_", "ssm_", "rwkv_", "conv_", "linear_num_", "linear_conv_", "linear_attn", "lru_")
_STATE_KEYS = frozenset(
    {
        *("ssm_cfg", "state_size", "d_state", "time_step_rank", "hybrid_override_pattern", "hybrid_layer_pattern"),
        *("layers_block_type", "block_types", "_block_types", "attn_layer_period", "attn_layer_indices"),
        *("attn_type_list", "full_attn_idxs", "full_attention_interval"),
    }
)
_FOREIGN_KEYS = frozenset(
    {
        *("num_kv_shared_layers", "use_cla", "block_configs", "num_key_value_heads_per_layer", "global_head_dim"),
        *("index_head_dim", "compress_ratios", "per_layer_config"),
        *("is_encoder_decoder", "type_vocab_size"),
    }
)


def config_from_hf(
    source: Source, *, dtype: DType | str | None = None, block_size: int = 16, **budget: Any
) -> KVCacheConfig:
    """The KVCacheConfig of a Hugging Face model: `layers_from_hf` plus the memory for it.

    `budget` are the other fields of KVCacheConfig, at least one of `gpu_blocks`, `gpu_bytes` or `gpu_fraction`:
    `config_from_hf("models/llama", gpu_bytes=20 * 2**30, dtype="fp8")`.
    """
    return KVCacheConfig(layers_from_hf(source, dtype=dtype), block_size, **budget)


def layers_from_hf(source: Source, *, dtype: DType | str | None = None) -> tuple[LayerSpec | StateSpec, ...]:
    """What the layers keep that a Hugging Face config describes, in the order of the layers.

    A layer that attends keeps K and V of every token (LayerSpec), a recurrent one a state of the whole sequence (StateSpec),
    one that does both keeps both, its attention first. `source` is the parsed config, or the path of a config.json or of
    the folder that holds it. `dtype` is what the cache stores of K and V; by default the dtype of the model (`dtype` or
    `torch_dtype` in the file), else bfloat16. States are kept as the model computes them.
    """
    outer = load_config(source)
    text, model_type = _text_config(outer)
    _refuse_foreign(text, model_type)
    config = _with_defaults(text, model_type, nested=text is not outer)
    own = next((c[key] for c in (config, outer) for key in ("dtype", "torch_dtype") if c.get(key)), DType.BFLOAT16)
    stored = DType.parse(own if dtype is None else dtype)
    if model_type in HYBRID_FAMILIES:
        return _hybrid_layers(config, model_type, stored, own)
    num_layers = _get_int(config, "num_hidden_layers", _MAX_LAYERS, "number of layers")
    shape = _attention_shape(config, model_type, stored)
    layers = [_layer(shape, kind, config, model_type) for kind in _layer_types(config, model_type, num_layers)]
    if config.get("index_head_dim") is not None:
        index = index_part(_get_int(config, "index_head_dim", MAX_HEAD_DIM, "width of an indexer's keys"), own)
        own_indexer = zip(layers, _indexed(config, model_type, num_layers), strict=True)
        layers = [replace(layer, extra_parts=(index,)) if indexed else layer for layer, indexed in own_indexer]
    return tuple(layers)


def _indexed(config: Mapping[str, Any], model_type: str, num_layers: int) -> list[bool]:
    """Which layers choose tokens by an indexer of their own; others use what one before them has chosen, or see all."""
    given = config.get("indexer_types")
    if given is None and isinstance(pattern := config.get("index_topk_pattern"), str):
        given = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if given is None:
        freq = config.get("index_topk_freq", _LAYERS_PER_INDEXER.get(model_type, 1))
        freq = check_int(freq, "index_topk_freq", 1, _MAX_LAYERS)
        first = check_int(config.get("index_skip_topk_offset", 2), "index_skip_topk_offset", 0, _MAX_LAYERS)
        given = ["shared" if max(layer - first + 1, 0) % freq else "full" for layer in range(num_layers)]
    if not isinstance(given, (list, tuple)) or len(given) != num_layers or not {"full", "shared"}.issuperset(given):
        raise ConfigError(f"indexer_types={show(given)} must hold full or shared for each of {num_layers} layers")
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    return [mode == "full" and kind in _INDEXED for mode, kind in zip(given, kinds, strict=True)]


def _hybrid_layers(
    config: Mapping[str, Any], model_type: str, stored: DType, own: object
) -> tuple[LayerSpec | StateSpec, ...]:
    kinds = layer_kinds(config, model_type)
    state = None
    if STATE_KINDS.intersection(kinds):
        state = state_spec(config, model_type, DType.parse(own))
    shape = _attention_shape(config, model_type, stored) if ATTENTION_KINDS.intersection(kinds) else {}
    layers: list[LayerSpec | StateSpec] = []
    for kind in kinds:
        if kind in ATTENTION_KINDS:
            attention = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}.get(kind, kind)
            layers.append(_layer(shape, attention, config, model_type))
        if state is not None and kind in STATE_KINDS:
            layers.append(state)
    return tuple(layers)


def _attention_shape(config: Mapping[str, Any], model_type: str, stored: DType) -> dict[str, Any]:
    """The arguments of LayerSpec that all layers of the model which attend have in common."""
    if config.get("kv_lora_rank") is not None or model_type in _MLA_TYPES:
        head_dim = sum(_get_int(config, key, MAX_HEAD_DIM, "MLA width") for key in ("kv_lora_rank", "qk_rope_head_dim"))
        return {"kv_heads": 1, "head_dim": head_dim, "k_only": True, "dtype": stored}
    shape: dict[str, Any] = {**_head_shape(config, model_type), "dtype": stored}
    if config.get("v_head_dim") is not None:
        shape["v_head_dim"] = _get_int(config, "v_head_dim", MAX_HEAD_DIM, "width of values")
    return shape


def max_positions(source: Source) -> int | None:
    """The longest text that a model of this configuration serves; None if it names no limit."""
    config, _ = _text_config(load_config(source))
    return positions_limit(config.get)


def positions_limit(get: Callable[[str], Any]) -> int | None:
    """The longest text, by the values of a configuration: its own limit, or the length at which longrope changes."""
    limits = [get(name) for name in ("max_position_embeddings", "model_max_length", "n_positions", "max_seq_len")]
    ropes = get("rope_parameters") or get("rope_scaling") or {}
    limits += [
        rope.get("original_max_position_embeddings") or get("original_max_position_embeddings")
        for rope in (ropes, *ropes.values())
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "longrope"
    ]
    return min((limit for limit in limits if type(limit) is int and limit > 0), default=None)


def load_config(source: Source) -> Mapping[str, Any]:
    """The parsed config, or the one in a config.json or in the folder that holds it."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"source={show(source)} must be a dict or the path of a config.json or its folder")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    loaded = read_json(path, ConfigError, "nothing is downloaded: give a local file or folder")
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {show(loaded)}")
    return loaded


def _text_config(outer: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The part that describes the language model, and its model_type ("" when the file has none)."""
    while isinstance(thinker := outer.get("thinker_config"), Mapping):
        outer = thinker
    outer_type = _model_type(outer)
    text = next((outer[key] for key in _TEXT_KEYS if isinstance(outer.get(key), Mapping)), outer)
    return text, _model_type(text) or _NESTED_TYPES.get(outer_type, outer_type)


def _model_type(config: Mapping[str, Any]) -> str:
    found = config.get("model_type") or ""
    if not isinstance(found, str):
        raise ConfigError(f"model_type={show(found)} must be a string")
    return found


def _refuse_foreign(config: Mapping[str, Any], model_type: str) -> None:
    signs = sorted(key for key, value in config.items() if value and key in _FOREIGN_KEYS)
    latent = config.get("kv_lora_rank") is not None and model_type not in HYBRID_FAMILIES
    if latent and config.get("index_topk") is not None and config.get("index_kpool") is None:
        signs = [key for key in signs if key != "index_head_dim"]
    if model_type not in HYBRID_FAMILIES:
        signs += sorted(k for k, v in config.items() if v and (k in _STATE_KEYS or k.startswith(_STATE_PREFIXES)))
    if config.get("is_decoder") is True and not config.get("is_encoder_decoder"):
        signs = [key for key in signs if key != "type_vocab_size"]
    if signs:
        found = ", ".join(f"{key}={show(config[key])}" for key in sorted(signs))
        kept = "more or less than K and V of every token in every layer"
        if "index_head_dim" in signs:
            kept = "an indexer's keys in a form of its own"
        raise ConfigError(
            f"model_type={show(model_type)} keeps {kept} ({found}); describe its attention layers with LayerSpec yourself"
        )


def _with_defaults(config: Mapping[str, Any], model_type: str, *, nested: bool) -> dict[str, Any]:
    full = dict(config)
    if model_type in _ALIASED_TYPES:
        for key, others in _ALIASES.items():
            found = next((config[other] for other in others if other in config), None)
            if key not in full and found is not None:
                full[key] = found
    if isinstance(attention := config.get("attn_config"), Mapping) and "kv_n_heads" in attention:  # dbrx
        full.setdefault("num_key_value_heads", attention["kv_n_heads"])
    if model_type == "longcat_flash" and isinstance(config.get("num_layers"), int):  # each layer attends twice
        full.setdefault("num_hidden_layers", 2 * config["num_layers"])
    if config.get("kv_channels") is not None:  # jetmoe: each expert that a token goes to attends with all heads
        full["head_dim"] = config["kv_channels"]
        full["num_key_value_heads"] = full.get("num_attention_heads")
    if isinstance(kinds := config.get("attention_layers"), (list, tuple)):  # gpt_neo
        full["layer_types"] = [f"{'sliding' if kind == 'local' else 'full'}_attention" for kind in kinds]
        full["sliding_window"] = config.get("window_size")
    for key, value in _DEFAULTS.get(model_type, {}).items():
        if nested or key not in _STANDARD_KEYS:
            full.setdefault(key, value)
    if model_type in HYBRID_FAMILIES:  # which keys it must have depends on its layers
        return full
    required = _STANDARD_KEYS if full.get("head_dim") is None else _STANDARD_KEYS[:2]
    missing = [key for key in required if full.get(key) is None]
    if missing:
        raise ConfigError(
            f"the config of model_type={show(model_type)} lacks {', '.join(missing)}; add the missing keys"
        )
    return full


def _get_int(config: Mapping[str, Any], key: str, high: int, meaning: str) -> int:
    if config.get(key) is None:
        raise ConfigError(f"the config lacks {key} ({meaning}); add it")
    return check_int(config[key], key, 1, high)


def _head_shape(config: Mapping[str, Any], model_type: str) -> dict[str, int]:
    num_heads = _get_int(config, "num_attention_heads", MAX_HEADS, "number of query heads")
    kv_heads = num_heads
    if model_type in ("falcon", "gpt_bigcode"):
        one = config.get("multi_query", True) and not config.get("new_decoder_architecture")
        kv_heads = 1 if one else check_int(config.get("num_kv_heads") or num_heads, "num_kv_heads", 1, MAX_HEADS)
    elif model_type not in _MHA_TYPES and config.get("num_key_value_heads") is not None:
        kv_heads = _get_int(config, "num_key_value_heads", MAX_HEADS, "number of K/V heads")
    if num_heads % kv_heads:
        raise ConfigError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={num_heads}")
    if model_type not in _DOUBLE_WIDTH_TYPES and config.get("head_dim") is not None:
        return {"kv_heads": kv_heads, "head_dim": _get_int(config, "head_dim", MAX_HEAD_DIM, "head size")}
    hidden_size = _get_int(config, "hidden_size", MAX_HEADS * MAX_HEAD_DIM, "width of the model")
    hidden_size *= 2 if model_type in _DOUBLE_WIDTH_TYPES else 1
    if hidden_size % num_heads:
        raise ConfigError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}; add head_dim")
    return {"kv_heads": kv_heads, "head_dim": hidden_size // num_heads}


def _layer_types(config: Mapping[str, Any], model_type: str, num_layers: int) -> list[str]:
    """One of full_attention, sliding_attention, chunked_attention for every layer."""
    given = config.get("layer_types")
    if given is not None:
        if not isinstance(given, (list, tuple)) or len(given) != num_layers:
            raise ConfigError(f"layer_types={show(given)} must list a type for each of num_hidden_layers={num_layers}")
        known = ("full_attention", "sliding_attention", "chunked_attention")
        if config.get("index_head_dim") is not None:
            given = ["full_attention" if kind in _INDEXED else kind for kind in given]
        other = sorted({show(kind) for kind in given if kind not in known})
        if other:
            raise ConfigError(f"layer_types holds {', '.join(other)}; a KV cache serves only {', '.join(known)}")
        if config.get("use_sliding_window") is False and "sliding_attention" in given:
            raise ConfigError("use_sliding_window=False, but layer_types holds sliding_attention; correct one of them")
        return list(given)
    if model_type == "llama4_text":
        return _llama4_layer_types(config, num_layers)
    slides = _sliding_layers(config, model_type, num_layers)
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _llama4_layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Layers with rotary positions (those marked 1 in `no_rope_layers`) are chunked, the others see everything."""
    if config.get("attention_chunk_size") is None:
        return ["full_attention"] * num_layers
    ropes = config.get("no_rope_layers")
    if not ropes:
        interval = check_int(config.get("no_rope_layer_interval", 4), "no_rope_layer_interval", 1, _MAX_LAYERS)
        ropes = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(ropes, (list, tuple)) or len(ropes) < num_layers or any(rope not in (0, 1) for rope in ropes):
        raise ConfigError(f"no_rope_layers={show(ropes)} must hold 0 or 1 for each of num_hidden_layers={num_layers}")
    return ["chunked_attention" if rope else "full_attention" for rope in ropes[:num_layers]]


def _sliding_layers(config: Mapping[str, Any], model_type: str, num_layers: int) -> list[bool]:
    """Which layers slide, for a file without layer_types."""
    if config.get("use_sliding_window") is True and "sliding_window" not in config:
        raise ConfigError("use_sliding_window=True, but the config lacks sliding_window (its length, or null); add it")
    if model_type in _NO_LAYER_SLIDES or not config.get("sliding_window") or not _may_slide(config, model_type):
        return [False] * num_layers
    if model_type in _ALL_LAYERS_SLIDE:
        return [True] * num_layers
    if model_type in _TOP_LAYERS_SLIDE:
        first = check_int(config.get("max_window_layers"), "max_window_layers", 0, _MAX_LAYERS)
        return [layer >= first for layer in range(num_layers)]
    period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    period = _EVERY_NTH_IS_FULL.get(model_type) if period is None else period
    if period is None:
        raise ConfigError(
            f"sliding_window={show(config['sliding_window'])}, but which layers of model_type={show(model_type)} slide "
            "is not known; add layer_types (full_attention or sliding_attention for each layer)"
        )
    period = check_int(period, "sliding_window_pattern", 1, _MAX_LAYERS)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _may_slide(config: Mapping[str, Any], model_type: str) -> bool:
    switch = config.get("use_sliding_window")
    return model_type not in _SLIDE_ONLY_IF_SWITCHED_ON if switch is None else check_bool(switch, "use_sliding_window")


def _layer(shape: Mapping[str, Any], kind: str, config: Mapping[str, Any], model_type: str) -> LayerSpec:
    if kind == "sliding_attention":
        if model_type in _DOUBLE_HEADS_SLIDE:
            shape = {**shape, "kv_heads": 2 * shape["kv_heads"]}
        return LayerSpec(**shape, window=_get_int(config, "sliding_window", MAX_TOKENS, f"window of {model_type}"))
    if kind == "chunked_attention":
        return LayerSpec(**shape, chunk=_get_int(config, "attention_chunk_size", MAX_TOKENS, f"chunk of {model_type}"))
    return LayerSpec(**shape)
