"""Attention modules that compute by themselves, without transformers' AttentionInterface.

A module of a class in `_FAMILIES` gets a function of kvpool's in place of one method. While the model's attention is set to
"kvpool", that function hands queries, keys and values to it; otherwise the module's own method runs. The self-check compares
both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpool.model.hook import ATTENTION_NAME, MODULES_NAME, AttentionCall, attend_to, flat, set_attention


def replace_attention(model: Any) -> bool:
    """Lets the attention modules of a model ask kvpool while it attends; False if it has none of a known class."""
    found = list(_known(model))
    for module, (method, prepare) in found:
        own = getattr(type(module), method).__get__(module)
        setattr(module, method, partial(_switched, model.config, own, prepare(module)))
    if found:
        set_attention(model, ATTENTION_NAME)  # its modules follow it, and it builds no mask
    return bool(found)


def restore_attention(model: Any) -> None:
    """Gives the modules of a model their own methods back."""
    for module, (method, _) in _known(model):
        vars(module).pop(method, None)


def adds_slopes(model: Any) -> bool:
    """Whether positions enter a model by ALiBi: a key counts less by its distance."""
    return model.config.model_type in ("bloom", "mpt") or bool(getattr(model.config, "alibi", False))


def _known(model: Any) -> Iterator[tuple[Any, tuple[str, Callable[[Any], Callable[..., Any]]]]]:
    for module in model.modules():
        if (family := _FAMILIES.get(type(module).__name__)) is not None:
            yield module, family


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers stop here and go on behind it
def _switched(config: Any, own: Callable[..., Any], ours: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (ours if config._attn_implementation == MODULES_NAME else own)(*args, **kwargs)


# --- families --------------------------------------------------------------------------------------------------------


def _falcon(module: Any) -> Callable[..., Any]:
    scale, rotate = 1 / math.sqrt(module.head_dim), sys.modules[type(module).__module__].apply_rotary_pos_emb

    def split(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The module's own way takes heads by a list of indices, which a CUDA graph cannot have, and repeats K and V.
        if module.new_decoder_architecture:  # each KV head after the query heads of its group
            groups = mixed.view(*mixed.shape[:2], module.num_kv_heads, -1, module.head_dim)
            return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        if module.multi_query:
            heads = mixed.view(*mixed.shape[:2], module.num_heads + 2, module.head_dim)
            return heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]
        q, k, v = mixed.view(*mixed.shape[:2], module.num_heads, 3, module.head_dim).unbind(3)
        return q, k, v

    def forward(hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in split(module.query_key_value(hidden_states)))
        q, k = rotate(q, k, *position_embeddings)
        call = AttentionCall(module.layer_idx, flat(q), flat(k), flat(v), scale, None, None, None)
        return module.dense(attend_to(call).flatten(2)), None

    return forward


def _by_heads(scale_of: Callable[[Any], float], module: Any) -> Callable[..., Any]:
    """Of modules with a method `_attn` for [1, head, token, dim]. Some rotate in float32."""
    layer = module.layer_idx if hasattr(module, "layer_idx") else module.layer_id
    scale, window = scale_of(module), None
    if getattr(module, "attention_type", None) == "local":  # what its last query sees
        window = int(module.bias[0, 0, -1].sum())

    def attn(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        call = AttentionCall(layer, flat(q.to(v.dtype)), flat(k.to(v.dtype)), flat(v), scale, window, None, None)
        return attend_to(call).transpose(1, 2), None

    return attn


_FAMILIES: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", partial(_by_heads, lambda module: 1 / float(module.scale_attn))),
    "CodeGenAttention": ("_attn", partial(_by_heads, lambda module: 1 / float(module.scale_attn))),
    "GPTNeoSelfAttention": ("_attn", partial(_by_heads, lambda module: 1.0)),
    "GPTNeoXJapaneseAttention": ("_attn", partial(_by_heads, lambda module: 1 / float(module.norm_factor))),
}
