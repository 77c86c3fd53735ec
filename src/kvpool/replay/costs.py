"""Expected costs of a model on a GPU, from the data sheet of the GPU and the parameters counted from a config.json.

Norms and biases do not count (less than 0.1 % of usual models), nor do vision towers and other parts beside the language
model. Measured costs of a machine are in `kvpool.scheduling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.checks import check_int, check_number
from kvpool.config import DType, LayerSpec, StateSpec
from kvpool.config.hybrid_config import (
    ATTENTION_KINDS,
    HYBRID_DEFAULTS,
    HYBRID_FAMILIES,
    STATE_KINDS,
    layer_kinds,
    state_spec,
)
from kvpool.config.layers import ceil_div
from kvpool.config.model_config import layers_from_hf, load_config
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.scheduling import LinearCostModel

# The share of a data-sheet figure to expect. Memory and link were measured with kvpool's engine on an H200
# (benchmarks/figures/engine.md): copies move 4.25 of 4.8 TB/s, and a compiled decode step takes 1.36 times as long as reading
# its bytes at that speed; swaps move 54.5 of 64 GB/s. Compute was not measured: long prefills usually reach half of the
# dense peak.
COMPUTE_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.65
LINK_EFFICIENCY = 0.85
DISK_BYTES_PER_SECOND = 6e9  # one good NVMe drive
TEXT_KEYS = ("text_config", "llm_config", "language_config")
_TWO_MATRIX_MLP = frozenset(
    {"gpt2", "gptj", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "opt", "phi", "codegen", "starcoder2", "nemotron_h"}
)
_GATED_ATTENTION = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})  # a gate as wide as the queries
_TIED_BY_DEFAULT = frozenset(
    {"gpt2", "gemma", "gemma2", "gemma3", "gemma3_text", "opt", "bloom", "cohere", "cohere2", "falcon", "mamba", "lfm2"}
)
_MAX_SIZE = 2**32  # of anything that is multiplied here
_BYTES = {"fp8": 1.0, "compressed-tensors": 1.0, "fbgemm_fp8": 1.0, "gptq": 0.5, "awq": 0.5, "mxfp4": 0.53}


class GPU(NamedTuple):
    """Memory in bytes; dense peak FLOP/s for 16-bit and 8-bit floats; bytes per second of memory, of the host link and of the
    links to other GPUs of the machine (both one way).
    """

    name: str
    memory_bytes: int
    flops_16bit: float
    flops_8bit: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    peer_bytes_per_second: float

    def flops(self, weight_bytes: float) -> float:
        """FLOP/s to expect of prefill, with weights of this size per element."""
        return COMPUTE_EFFICIENCY * (self.flops_8bit if weight_bytes <= 1 else self.flops_16bit)

    @property
    def decode_bytes_per_second(self) -> float:
        """Bytes per second to expect of decoding."""
        return MEMORY_EFFICIENCY * self.memory_bytes_per_second

    @property
    def swap_bytes_per_second(self) -> float:
        """Bytes per second to expect of large pinned copies to or from the host."""
        return LINK_EFFICIENCY * self.link_bytes_per_second


# Data-sheet figures, as published in NVIDIA's data sheets of the T4, L4, A10, A100, L40S, H100 SXM, H200 SXM and HGX B200, in
# its Ada white paper (RTX 4090), and in AMD's data sheet of the MI300X; checked in November 2026 against reprints of them.
# Tensor figures are dense: where a data sheet gives them with sparsity (L4, H100, H200, B200), they are halved. 8-bit is FP8;
# GPUs without it compute 8-bit weights in 16 bits. Links: PCIe 3 x16 16, PCIe 4 x16 32, PCIe 5 x16 64 GB/s one way. Links to
# other GPUs: NVLink 3 300, NVLink 4 450, NVLink 5 900, Infinity Fabric 448 GB/s one way, otherwise the same PCIe.
_GB = 10**9
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("t4", 16 * _GB, 65e12, 65e12, 0.32e12, 16e9, 16e9),
        GPU("l4", 24 * _GB, 121e12, 242e12, 0.30e12, 32e9, 32e9),
        GPU("a10", 24 * _GB, 125e12, 125e12, 0.60e12, 32e9, 32e9),
        GPU("rtx4090", 24 * _GB, 165e12, 330e12, 1.01e12, 32e9, 32e9),
        GPU("l40s", 48 * _GB, 362e12, 733e12, 0.864e12, 32e9, 32e9),
        GPU("a100-40gb", 40 * _GB, 312e12, 312e12, 1.555e12, 32e9, 300e9),
        GPU("a100", 80 * _GB, 312e12, 312e12, 2.04e12, 32e9, 300e9),
        GPU("h100", 80 * _GB, 989e12, 1979e12, 3.35e12, 64e9, 450e9),
        GPU("h200", 141 * _GB, 989e12, 1979e12, 4.8e12, 64e9, 450e9),
        GPU("b200", 180 * _GB, 2250e12, 4500e12, 7.7e12, 64e9, 900e9),
        GPU("mi300x", 192 * _GB, 1307e12, 2615e12, 5.3e12, 64e9, 448e9),
    )
}


def find_gpu(name: str) -> GPU:
    """A GPU by its name, in upper or lower case, with or without dashes."""
    key = name.strip().lower().replace("_", "-").replace(" ", "")
    found = GPUS.get(key) or GPUS.get(key.replace("-", ""))
    if found is None:
        raise InvalidArgumentError(
            f"unknown GPU {name!r}; known: {', '.join(GPUS)}; or measure yours: kvpool bench --json FILE, then --costs FILE"
        )
    return found


class Weights(NamedTuple):
    """Parameters in total, those that one token uses (fewer with experts), and their size as the file says."""

    total: int
    active: int
    bytes_per_parameter: float
    hidden_size: int
    num_attention_layers: int
    why: str


def count_weights(source: str | Path | Mapping[str, Any]) -> Weights:
    """Parameters of the language model that a config describes.

    >>> config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    ...           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    >>> round(count_weights(config).total / 1e9, 2)
    8.03
    """
    outer = load_config(source)
    text: Mapping[str, Any] = next((outer[key] for key in TEXT_KEYS if isinstance(outer.get(key), Mapping)), outer)
    kind = str(text.get("model_type") or outer.get("model_type") or "")
    text = {**HYBRID_DEFAULTS.get(kind, {}), **text}
    hidden = _need(text, "hidden_size", "n_embd", "n_embed")
    parts = _mixed_layers(text, kind, hidden) or _equal_layers(text, kind, hidden)
    vocabulary = _need({**outer, **text}, "vocab_size")
    tied = text.get("tie_word_embeddings", outer.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT))
    embeddings = vocabulary * hidden * (1 if tied else 2)
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 0
    if kind == "nemotron_h":  # has layers of experts alone, of which there is none here
        experts = 0
    common = embeddings + sum(count * size for count, size, _ in parts.mixers)
    mixers = " + ".join(f"{count} x {_m(size)} {name}" for count, size, name in parts.mixers)
    if experts <= 1:
        total = active = common + parts.feed_forwards * parts.dense
        dense = f"{parts.feed_forwards} x {_m(parts.dense)} feed-forward + " if parts.feed_forwards else ""
        why = f"{mixers} + {dense}{_m(embeddings)} embeddings"
    else:
        used = _first(text, "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk") or 1
        expert = 3 * hidden * (_first(text, "moe_intermediate_size", "intermediate_size_moe") or _inner(text, hidden))
        shared = expert * (_first(text, "n_shared_experts") or 0)
        if kind in ("llama4_text", "llama4"):
            shared = expert
        shared += 3 * hidden * (_first(text, "shared_expert_intermediate_size", "shared_intermediate_size") or 0)
        sparse = parts.feed_forwards - _dense_layers(text, parts.feed_forwards)
        router = hidden * experts
        common += (parts.feed_forwards - sparse) * parts.dense + sparse * (shared + router)
        total = common + sparse * experts * expert
        active = common + sparse * used * expert
        why = (
            f"{sparse} layers x {experts} experts x {_m(expert)} ({used} used per token) + {mixers} + {_m(embeddings)} "
            "embeddings"
        )
    return Weights(total, active, _bytes_per_parameter(outer, text), hidden, parts.attending, why)


class _Layers(NamedTuple):
    """What the layers are made of: (how many, parameters, name) of what mixes tokens, and feed-forwards if dense."""

    mixers: Sequence[tuple[int, int, str]]
    attending: int
    feed_forwards: int
    dense: int


def _equal_layers(text: Mapping[str, Any], kind: str, hidden: int) -> _Layers:
    layers = _need(text, "num_hidden_layers", "n_layer")
    dense = (2 if kind in _TWO_MATRIX_MLP else 3) * hidden * _inner(text, hidden)
    return _Layers([(layers, _attention(text, kind, hidden), "attention")], layers, layers, dense)


def _mixed_layers(text: Mapping[str, Any], kind: str, hidden: int) -> _Layers | None:
    """The layers of a model of which some keep a state; None if it is of no such family."""
    if kind not in HYBRID_FAMILIES:
        return None
    kinds = layer_kinds(text, kind)
    if kind not in _MIXERS or "moe" in kinds:
        raise ConfigError(
            f"the weights of model_type={kind!r} cannot be counted; config_from_hf(model, gpu_bytes=...).explain() sizes a "
            "cache for it"
        )
    attending, stateful = (sum(each in of for each in kinds) for of in (ATTENTION_KINDS, STATE_KINDS))
    mixers = [(stateful, _MIXERS[kind](text, kind, hidden), "layers with a state")] if stateful else []
    if attending:
        mixers.append((attending, _attention(text, kind, hidden), "attention"))
    feed_forwards = 0 if kind in _NO_FEED_FORWARD else kinds.count("mlp") or len(kinds)
    inner = _need(text, "shared_intermediate_size") if kind == "granitemoehybrid" else _inner(text, hidden)
    if kind == "lfm2" and text.get("block_auto_adjust_ff_dim", True):
        multiple = _first(text, "block_multiple_of", least=1) or 256
        factor = check_number(text.get("block_ffn_dim_multiplier") or 1.0, "block_ffn_dim_multiplier", "a number")
        inner = ceil_div(int(factor * (2 * inner // 3)), multiple) * multiple
    return _Layers(mixers, attending, feed_forwards, (2 if kind in _TWO_MATRIX_MLP else 3) * hidden * inner)


def _delta_mixer(text: Mapping[str, Any], kind: str, hidden: int) -> int:
    """Queries, keys and values, a gate, two numbers per head, a convolution, the output."""
    conv, recurrent = (part.shape for part in state_spec(text, kind, DType.BFLOAT16).parts)
    heads, inner = recurrent[0], recurrent[0] * recurrent[2]
    return hidden * (conv[0] + 2 * inner + 2 * heads) + conv[0] * conv[1]


def _mamba2_mixer(text: Mapping[str, Any], kind: str, hidden: int) -> int:
    """Inputs with B and C, a gate, a time step per head, a convolution, the output."""
    conv, recurrent = (part.shape for part in state_spec(text, kind, DType.BFLOAT16).parts)
    heads, inner = recurrent[0], recurrent[0] * recurrent[1]
    return hidden * (conv[0] + 2 * inner + heads) + conv[0] * conv[1]


def _mamba_mixer(text: Mapping[str, Any], kind: str, hidden: int) -> int:
    """Inputs and a gate, the output; a convolution, A; B, C and time steps through a narrow matrix."""
    conv, (inner, state) = (part.shape for part in state_spec(text, kind, DType.BFLOAT16).parts)
    given = text.get("time_step_rank")
    rank = ceil_div(hidden, 16) if given in (None, "auto") else check_int(given, "time_step_rank", 1, _MAX_SIZE)
    return 3 * hidden * inner + inner * conv[1] + inner * state + inner * (2 * rank + 2 * state)


def _convolution_mixer(text: Mapping[str, Any], kind: str, hidden: int) -> int:
    """Two gates and the input, a short convolution, the output."""
    (conv,) = (part.shape for part in state_spec(text, kind, DType.BFLOAT16).parts)
    return 4 * hidden * hidden + conv[0] * conv[1]


_MIXERS: Mapping[str, Callable[[Mapping[str, Any], str, int], int]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _delta_mixer),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"), _mamba2_mixer),
    **dict.fromkeys(("mamba", "falcon_mamba"), _mamba_mixer),
    "lfm2": _convolution_mixer,
}
_NO_FEED_FORWARD = frozenset({"mamba", "falcon_mamba", "mamba2"})


def _dense_layers(text: Mapping[str, Any], layers: int) -> int:
    if (first := _first(text, "first_k_dense_replace")) is not None:
        return min(layers, first)
    step = _first(text, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    return layers - layers // step


def _attention(text: Mapping[str, Any], kind: str, hidden: int) -> int:
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
    gate = hidden * head * heads if kind in _GATED_ATTENTION else 0
    return 2 * hidden * head * (heads + groups) + gate


def _inner(text: Mapping[str, Any], hidden: int) -> int:
    return _first(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden


def _bytes_per_parameter(outer: Mapping[str, Any], text: Mapping[str, Any]) -> float:
    quantised = outer.get("quantization_config") or text.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method", ""))
        bits = quantised.get("bits")
        if not bits:
            return _BYTES.get(method, 1.0)
        return check_number(bits, "bits", "a number of bits") / 8
    dtype = str(next((c[k] for c in (text, outer) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16"))
    return 4.0 if "float32" in dtype else 1.0 if "float8" in dtype else 2.0


def _first(config: Mapping[str, Any], *keys: str, least: int = 0) -> int | None:
    key = next((key for key in keys if config.get(key) is not None), None)
    value = None if key is None else config[key]
    if isinstance(value, list):
        value = value[0] if value else None
    return None if key is None or value is None else check_int(value, key, least, _MAX_SIZE)


def _need(config: Mapping[str, Any], *keys: str) -> int:
    value = _first(config, *keys, least=1)
    if value is None:
        raise ConfigError(f"the config lacks {' or '.join(keys)}; without it the weights cannot be counted: add it")
    return value


def _m(parameters: float) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def costs_for(
    model: str | Path | Mapping[str, Any],
    gpu: str,
    kv_dtype: str | None = None,
    *,
    num_gpus: int = 1,
    weight_bytes: float | None = None,
) -> tuple[LinearCostModel, tuple[LayerSpec | StateSpec, ...]]:
    """The expected costs on a GPU (prefill bound by compute, decoding by memory bandwidth), and the model's layers.

    A decode step reads K and V of all tokens of a sequence once, and reads and writes its state once.
    """
    device, weights = find_gpu(gpu), count_weights(model)
    per_parameter = weight_bytes or weights.bytes_per_parameter
    layers = layers_from_hf(model, dtype=kv_dtype)
    state_bytes = sum(layer.bytes for layer in layers if isinstance(layer, StateSpec))
    token_bytes = sum(layer.bytes_per_token for layer in layers if isinstance(layer, LayerSpec))
    flops = device.flops(per_parameter) * num_gpus
    bandwidth = device.decode_bytes_per_second * num_gpus
    costs = LinearCostModel(
        prefill_seconds_per_token=2 * weights.active / flops,
        seconds_per_token_pair=4 * weights.hidden_size * weights.num_attention_layers / flops,
        decode_seconds_per_step=weights.active * per_parameter / bandwidth,
        decode_seconds_per_sequence=2 * weights.active / flops + 2 * state_bytes / bandwidth,
        decode_seconds_per_context_token=token_bytes / bandwidth,
        transfer_bytes_per_second=device.swap_bytes_per_second * num_gpus,
    )
    return costs, layers
