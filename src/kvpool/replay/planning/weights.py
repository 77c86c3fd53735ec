"""How many parameters a model has, from its config.json alone: embeddings, attention, feed-forward, experts.

Norms and biases are left out (below 0.1 % of any model that matters); vision towers and other parts beside the language
model are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.config.layers import check_int, check_number
from kvpool.config.model_config import load_config
from kvpool.errors import ConfigError

_TEXT_KEYS = ("text_config", "llm_config", "language_config")
_TWO_MATRIX_MLP = frozenset(
    {"gpt2", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "opt", "phi", "codegen", "starcoder2"}
)
_TIED_BY_DEFAULT = frozenset(
    {"gpt2", "gemma", "gemma2", "gemma3", "gemma3_text", "opt", "bloom", "cohere", "cohere2", "falcon"}
)
_MAX_SIZE = 2**32  # of anything that is multiplied here
_BYTES = {"fp8": 1.0, "compressed-tensors": 1.0, "fbgemm_fp8": 1.0, "gptq": 0.5, "awq": 0.5, "mxfp4": 0.53}


class Weights(NamedTuple):
    """Parameters in total, those that one token uses (fewer with experts), and what the file says about their size."""

    total: int
    active: int
    bytes_per_parameter: float
    hidden_size: int
    num_layers: int
    why: str


def count_weights(source: str | Path | Mapping[str, Any]) -> Weights:
    """Parameters of the language model that a config describes.

    >>> config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    ...           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    >>> round(count_weights(config).total / 1e9, 2)
    8.03
    """
    outer = load_config(source)
    text: Mapping[str, Any] = next((outer[key] for key in _TEXT_KEYS if isinstance(outer.get(key), Mapping)), outer)
    kind = str(text.get("model_type") or outer.get("model_type") or "")
    hidden = _need(text, "hidden_size", "n_embd", "n_embed")
    layers = _need(text, "num_hidden_layers", "n_layer")
    vocabulary = _need({**outer, **text}, "vocab_size")
    tied = text.get("tie_word_embeddings", outer.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT))
    embeddings = vocabulary * hidden * (1 if tied else 2)
    attention = _attention(text, hidden)
    dense_mlp = (2 if kind in _TWO_MATRIX_MLP else 3) * hidden * _inner(text, hidden)
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 0
    if experts <= 1:
        total = active = embeddings + layers * (attention + dense_mlp)
        why = f"{layers} layers x ({_m(attention)} attention + {_m(dense_mlp)} feed-forward) + {_m(embeddings)} embeddings"
    else:
        used = _first(text, "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk") or 1
        expert = 3 * hidden * (_first(text, "moe_intermediate_size", "intermediate_size_moe") or _inner(text, hidden))
        shared = expert * (_first(text, "n_shared_experts") or 0)
        if kind in ("llama4_text", "llama4"):
            shared = expert
        shared += 3 * hidden * (_first(text, "shared_expert_intermediate_size") or 0)
        sparse = layers - _dense_layers(text, layers)
        router = hidden * experts
        common = embeddings + layers * attention + (layers - sparse) * dense_mlp + sparse * (shared + router)
        total = common + sparse * experts * expert
        active = common + sparse * used * expert
        why = (
            f"{sparse} layers x {experts} experts x {_m(expert)} ({used} used per token) + {layers} x {_m(attention)} "
            f"attention + {_m(embeddings)} embeddings"
        )
    return Weights(total, active, _bytes_per_parameter(outer, text), hidden, layers, why)


def _dense_layers(text: Mapping[str, Any], layers: int) -> int:
    if (first := _first(text, "first_k_dense_replace")) is not None:
        return min(layers, first)
    step = _first(text, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    return layers - layers // step


def _attention(text: Mapping[str, Any], hidden: int) -> int:
    heads = _need(text, "num_attention_heads", "n_head")
    if text.get("kv_lora_rank"):
        rope, nope = _need(text, "qk_rope_head_dim"), _need(text, "qk_nope_head_dim")
        value, rank = _need(text, "v_head_dim"), _need(text, "kv_lora_rank")
        query = _first(text, "q_lora_rank")
        q = hidden * query + query * heads * (rope + nope) if query else hidden * heads * (rope + nope)
        return q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    head = _first(text, "head_dim") or hidden // heads
    groups = _first(text, "num_key_value_heads", "num_kv_heads") or heads
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        groups = 1
    return 2 * hidden * head * (heads + groups)


def _inner(text: Mapping[str, Any], hidden: int) -> int:
    return _first(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden


def _bytes_per_parameter(outer: Mapping[str, Any], text: Mapping[str, Any]) -> float:
    quantised = outer.get("quantization_config") or text.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method", ""))
        bits = quantised.get("bits")
        if not bits:
            return _BYTES.get(method, 1.0)
        return check_number("bits", bits, "a number of bits") / 8
    dtype = str(next((c[k] for c in (text, outer) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16"))
    return 4.0 if "float32" in dtype else 1.0 if "float8" in dtype else 2.0


def _first(config: Mapping[str, Any], *keys: str, least: int = 0) -> int | None:
    key = next((key for key in keys if config.get(key) is not None), None)
    value = None if key is None else config[key]
    if isinstance(value, list):
        value = value[0] if value else None
    return None if key is None or value is None else check_int(key, value, least, _MAX_SIZE)


def _need(config: Mapping[str, Any], *keys: str) -> int:
    value = _first(config, *keys, least=1)
    if value is None:
        raise ConfigError(f"the config lacks {' or '.join(keys)}; without it the weights cannot be counted: add it")
    return value


def _m(parameters: float) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
