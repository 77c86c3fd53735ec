"""Finds out what a model needs of the cache from the tensors of a probe forward, and refuses models that would run wrong.

The tensors count, not the configuration: models with plain multi-head attention ignore `num_key_value_heads`, MLA has keys
that are longer than its values, and some models change the head size from layer to layer.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpool.config import StateSpec
from kvpool.config.layers import DType, LayerSpec, TokenPart, index_part
from kvpool.config.model_config import positions_limit
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError, StorageMemoryError, UnsupportedModelError
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.model.forward import forward
from kvpool.model.hook import ATTENTION_NAME, AttentionCall, set_attention, use_kvpool_attention
from kvpool.model.indexers import KEPT_OTHERWISE, indexers, own_indexers
from kvpool.model.latents import keep_latents, own_expansion
from kvpool.model.own_attention import adds_slopes, replace_attention, restore_attention
from kvpool.model.positions import counts_by_itself, freeze_rotary, own_positions, use_positions
from kvpool.model.private_copy import check_model
from kvpool.model.self_check import CachedLayers, ContiguousAttention, check_against_eager
from kvpool.model.state_probing import use_kvpool_states
from kvpool.model.states import StateModule, modules_with_state, own_states, state_specs

_INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
_KNOWN_LAYER_TYPES = _INDEXED | {"full_attention", "sliding_attention", "chunked_attention"}
_HYBRID_LAYER_TYPES = _KNOWN_LAYER_TYPES | {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}
_PROBE_TOKENS = 3


@dataclass(frozen=True)
class LayerShape:
    """One attention layer, as its tensors and arguments were in the probe."""

    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False  # whether each query head has a learned sink logit
    chunk: int | None = None
    k_only: bool = False  # values are the first elements of keys: a latent of all heads
    chosen: int = 0  # tokens that a query sees, which an indexer chose; 0: all
    index: TokenPart | None = None  # the keys of its own indexer
    index_heads: int = 0


@dataclass(frozen=True)
class ModelShape:
    """What the cache, the scheduler and attention need to know about a model.

    >>> shape = ModelShape("llama", (LayerShape(9, 3, 64, 64, scale=0.125),) * 30, DType.FLOAT32, 49152, 8192)
    >>> shape.layer_specs()[0].bytes_per_token
    1536
    """

    family: str  # the `model_type` of the configuration
    layers: tuple[LayerShape, ...]  # those that attend
    dtype: DType
    vocab_size: int
    max_positions: int | None  # None: the model names no limit
    attending: tuple[int, ...] = ()  # the numbers of those layers in the model
    states: Mapping[int, StateSpec] = field(default_factory=dict, hash=False)  # of layers that keep one, by number

    def depth_cost(self, num_parameters: int) -> float:
        """How much more a token costs for each token before it, relative to a first token, because attention reads them all.

        Windowed and chunked layers do not count, because they read only their window or chunk; of chosen tokens, what an
        indexer reads to choose them counts.
        """
        full = [each for each in self.layers if each.window is None and each.chunk is None and not each.chosen]
        pairs = sum(2 * layer.q_heads * (layer.k_dim + layer.v_dim) for layer in full)
        pairs += sum(2 * layer.index_heads * layer.index.width for layer in self.layers if layer.index is not None)
        return pairs / (2 * max(num_parameters, 1))

    def layer_specs(self, kv_dtype: DType | str | None = None) -> list[LayerSpec]:
        """The layers of the KV cache; `kv_dtype` is how K and V are stored, by default as the model computes."""
        dtype = self.dtype if kv_dtype is None else DType.parse(kv_dtype, "kv_dtype")
        return [
            LayerSpec(
                kv_heads=layer.kv_heads,
                head_dim=layer.k_dim,
                v_head_dim=None if layer.k_only or layer.v_dim == layer.k_dim else layer.v_dim,
                k_only=layer.k_only,
                window=layer.window,
                chunk=layer.chunk,
                dtype=dtype,
                extra_parts=() if layer.index is None else (layer.index,),
            )
            for layer in self.layers
        ]

    def attention_spec(self, layer: int, kv_dtype: DType | str | None = None) -> AttentionSpec:
        """What an attention backend computes for this layer."""
        shape = self.layers[layer]
        return AttentionSpec.of(
            self.layer_specs(kv_dtype)[layer],
            shape.q_heads,
            v_dim=shape.v_dim,
            scale=shape.scale,
            soft_cap=shape.soft_cap,
            sink_logits=shape.sinks,
            chosen=shape.chosen,
            dtype=self.dtype,
        )


def inspect_model(model: Any, *, with_states: bool = False) -> ModelShape:
    """The shape of a loaded transformers model, which from then on runs through `forward`.

    Raises UnsupportedModelError, which names what is missing, if a model keeps more than K and V of every token, hides its
    attention, or fails a self-check: its logits in flattened steps must equal those of its own eager attention. A refused
    model is unchanged. It costs a few forwards of some dozen tokens. `with_states` also accepts layers that keep a state. To
    run such a model, make slots for `ModelShape.states` and give `forward` a `StateStep`.

    >>> shape = inspect_model(AutoModelForCausalLM.from_pretrained("path"))  # doctest: +SKIP
    >>> KVCacheConfig(shape.layer_specs(), block_size=16, gpu_blocks=1000)  # doctest: +SKIP
    """
    check_model(model)
    if model.training:
        raise InvalidArgumentError(f"{type(model).__name__} is in training mode: call model.eval() first")
    _refuse_by_declaration(model, with_states)
    own_attention = model.config._attn_implementation
    try:
        if not use_kvpool_attention(model) and not replace_attention(model):
            raise UnsupportedModelError(
                f"{_name(model)} does not compute attention through transformers' AttentionInterface, so no paged cache "
                "can serve it; a newer release of transformers may have moved it there"
            )
        keep_latents(model, ATTENTION_NAME)
        use_positions(model)
        with errors_of(model):
            shape = _shape_of(model, use_kvpool_states(model, lambda: run_probe(model)))
            freeze_rotary(model)
            check_against_eager(
                model,
                shape.max_positions,
                CachedLayers(frozenset(shape.attending), shape.states),
            )
            _refuse_shorter_cache(model, shape)
    except BaseException:
        restore_attention(model)
        own_expansion(model)
        own_indexers(model)
        set_attention(model, own_attention)
        own_states(model)
        own_positions(model)
        raise
    return shape


@contextmanager
def errors_of(model: Any) -> Iterator[None]:
    """Turns what the model's own code raises into one error, with that as its cause."""
    try:
        yield
    except KVPoolError:
        raise
    except torch.OutOfMemoryError as error:
        raise StorageMemoryError(
            f"{model.device} has no memory to try {_name(model)} on a few tokens: {error}"
        ) from error
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0][:200]
        raise UnsupportedModelError(
            f"{_name(model)} cannot be run: its own forward raised {type(error).__name__} on a few tokens: {first_line}"
        ) from error


def _refuse_by_declaration(model: Any, with_states: bool) -> None:
    """Refuses a model by its configuration and code, before it runs."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{_name(model)} has an encoder beside its decoder, which only transformers or vLLM run"
        )
    if adds_slopes(model):
        raise UnsupportedModelError(
            f"{_name(model)} adds slopes by distance (ALiBi) to the scores of its attention, which kvpool does not compute: "
            "transformers runs it"
        )
    if any(type(getattr(module, "index_topk", None)) is not int for module in indexers(model)):
        raise UnsupportedModelError(f"{_name(model)} {KEPT_OTHERWISE}: it names no index_topk")
    recurrent = sorted({type(module).__name__ for module in modules_with_state(model)})
    if recurrent and not with_states:
        raise UnsupportedModelError(
            f"{_name(model)} keeps a state of each sequence ({', '.join(recurrent)}), for which there is no memory: the "
            "cache keeps K and V only"
        )
    known = _HYBRID_LAYER_TYPES if recurrent else _KNOWN_LAYER_TYPES
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        raise UnsupportedModelError(
            f"{_name(model)} has layers of type {', '.join(unknown)}; the cache keeps K and V of full, sliding and "
            "chunked attention"
        )
    if model._is_stateful and not recurrent:
        raise UnsupportedModelError(
            f"{_name(model)} keeps a recurrent state by itself, and not in transformers' cache: it cannot be restored or "
            "shared"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{_name(model)} has no language-model head, so it gives no logits to choose tokens by; load it with "
            "AutoModelForCausalLM"
        )
    accepted = inspect.signature(model.forward).parameters
    needed = ["logits_to_keep"]
    if not recurrent and not counts_by_itself(model):  # nor does Mamba
        needed.append("position_ids")
    if missing := [name for name in needed if name not in accepted]:
        raise UnsupportedModelError(
            f"forward() of {_name(model)} takes no {' and no '.join(missing)}: sequences cannot share a step"
        )


def run_probe(model: Any) -> tuple[Tensor, list[AttentionCall]]:
    """Runs one forward of a few tokens; returns their logits, and the attention call of every layer."""
    calls: list[AttentionCall] = []
    compute = ContiguousAttention().step({0: _PROBE_TOKENS})

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        return compute(call)

    input_ids = torch.arange(_PROBE_TOKENS, device=model.device)
    return forward(model, input_ids, input_ids, None, attend), calls


def _shape_of(model: Any, modules: Sequence[StateModule]) -> ModelShape:
    """The shape of a model, from the tensors of a probe."""
    logits, calls = run_probe(model)
    config = model.config.get_text_config()
    _check_one_call_per_layer(model, config.num_hidden_layers, calls, bool(modules))
    calls.sort(key=lambda call: call.layer)
    return ModelShape(
        family=config.model_type,
        layers=tuple(layer_shape(model, call) for call in calls),
        dtype=common_dtype(model, calls),
        vocab_size=logits.shape[-1],
        max_positions=positions_limit(lambda name: getattr(config, name, None)),
        attending=tuple(call.layer for call in calls),
        states=state_specs(modules),
    )


def _check_one_call_per_layer(model: Any, num_layers: int, calls: list[AttentionCall], hybrid: bool) -> None:
    """Every layer attends once; in a hybrid model some do not attend."""
    counts = Counter(call.layer for call in calls)
    if wrong := {
        layer: counts[layer]
        for layer in {*range(num_layers), *counts}
        if counts[layer] != (0 <= layer < num_layers) and not (hybrid and not counts[layer])
    }:
        layer, count = min(wrong.items())
        raise UnsupportedModelError(
            f"layer {layer} of {_name(model)} computed attention {count} times in one forward ({len(wrong)} of {num_layers} "
            "layers are like that); the cache keeps one K and one V per layer and needs exactly one call in each"
        )


def _refuse_shorter_cache(model: Any, shape: ModelShape) -> None:
    """Refuses a model whose `generate` forgets keys and values that its attention would see.

    The cache of transformers slides where the configuration has a window, also if no mask does. The self-check cannot tell:
    it compares with forwards of whole texts.
    """
    from transformers import DynamicCache

    cached = DynamicCache(config=model.config).layers
    for number, layer in zip(shape.attending, shape.layers, strict=True):
        kept = getattr(cached[number], "sliding_window", None) if number < len(cached) else None
        if kept is None or kept >= (shape.max_positions or kept + 1):
            continue
        seen = layer.window or layer.chunk
        if seen is None or seen > kept:
            raise UnsupportedModelError(
                f"layer {number} of {_name(model)} attends to {seen or 'all'} earlier tokens, and transformers' cache keeps "
                f"the last {kept}, as the configuration says: its generate answers otherwise than its forward; set the "
                "window of the configuration to None if the model was trained without one"
            )


def layer_shape(model: Any, call: AttentionCall) -> LayerShape:
    """The shape of a layer, from its call in a probe."""
    q_heads, kv_heads = call.q.shape[1], call.k.shape[1]
    if call.q.shape[2] != call.k.shape[2] or call.v.shape[1] != kv_heads or q_heads % kv_heads:
        shapes = ", ".join(f"{name} {tuple(x.shape[1:])}" for name, x in (("Q", call.q), ("K", call.k), ("V", call.v)))
        raise UnsupportedModelError(
            f"layer {call.layer} of {_name(model)} attends with heads of {shapes}, which do not pair"
        )
    if call.sinks is not None and call.sinks.shape != (q_heads,):
        raise UnsupportedModelError(
            f"layer {call.layer} of {_name(model)} has sinks of shape {tuple(call.sinks.shape)}; needed is one per query head"
        )
    return LayerShape(
        q_heads=q_heads,
        kv_heads=kv_heads,
        k_dim=call.k.shape[2],
        v_dim=call.v.shape[2],
        scale=float(call.scale),
        window=call.window,
        soft_cap=call.soft_cap,
        sinks=call.sinks is not None,
        chunk=call.chunk,
        k_only=call.k_only,
        **_chosen_by(call),
    )


def _chosen_by(call: AttentionCall) -> dict[str, Any]:
    """The fields of a layer whose tokens an indexer chooses, of its own or of a layer before it."""
    if (choice := call.choice) is None:
        return {}
    if choice.layer != call.layer:
        return {"chosen": choice.most}
    index = index_part(choice.k.shape[2], choice.k.dtype)
    return {"chosen": choice.most, "index": index, "index_heads": choice.q.shape[1]}


def common_dtype(model: Any, calls: list[AttentionCall]) -> DType:
    """The type in which all layers attend."""
    dtypes = {tensor.dtype for call in calls for tensor in (call.q, call.k, call.v)} or {model.dtype}
    try:
        (dtype,) = {DType.parse(dtype) for dtype in dtypes}
    except (ConfigError, ValueError):
        names = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedModelError(
            f"{_name(model)} attends in {names}; load it in one of float32, bfloat16, float16"
        ) from None
    return dtype


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"
