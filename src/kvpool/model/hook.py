"""The attention implementation "kvpool" for transformers: a callback gets the queries, keys and values of every layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvpool.errors import KVPoolError, UnsupportedModelError
from kvpool.kernels.sparse import Choice
from kvpool.model.indexers import hand_over_choices
from kvpool.model.latents import folds_of

ATTENTION_NAME = "kvpool"
MODULES_NAME = "kvpool_modules"  # of models whose modules attend without transformers' AttentionInterface


class AttentionCall(NamedTuple):
    """The attention of one layer for the tokens of a step. Positions are already in `q` and `k`."""

    layer: int
    q: Tensor  # [token, query head, head dim]
    k: Tensor  # [token, KV head, head dim]
    v: Tensor  # [token, KV head, v dim]
    scale: float
    window: int | None  # how many tokens a query sees, its own included
    soft_cap: float | None
    sinks: Tensor | None  # learned logits [query head]
    chunk: int | None = None  # a query sees its own chunk of so many tokens
    k_only: bool = False  # `v` is the first elements of `k`: a latent of all heads
    choice: Choice | None = None  # of an indexer: a query sees the tokens of its highest scores


Attend: TypeAlias = Callable[[AttentionCall], Tensor]  # the result is [token, query head, v dim]

# A ContextVar, because some models (stablelm, nemotron) do not pass keyword arguments on to attention.
_ATTEND: ContextVar[Attend | None] = ContextVar("kvpool_attend", default=None)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """While it is open, attention of models that use "kvpool" is computed by `attend`, in this thread or task.

    with attending(lambda call: my_attention(call.q, call.k, call.v)):
        model(input_ids=..., position_ids=..., use_cache=False)
    """
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def use_kvpool_attention(model: Any) -> bool:
    """Sets the attention of a transformers model to "kvpool"; False if its code does not allow that.

    From then on the model runs only inside `attending`. `model.set_attn_implementation("sdpa")` undoes it.
    """
    register()
    if not model._can_set_attn_implementation():
        return False
    set_attention(model, ATTENTION_NAME)
    for module in model.modules():
        if _is_shared(module) and _note_layer not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_note_layer, with_kwargs=True)
    hand_over_choices(model, ATTENTION_NAME)
    return True


def register() -> None:
    """Makes the names known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # No mask function is registered under this name, so the model builds no mask.
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(MODULES_NAME, _unused_mask)


def set_attention(model: Any, name: str | None) -> None:
    """Sets the attention of the language model. An image encoder beside it keeps its own."""
    if not model._can_set_attn_implementation():
        # Its modules attend as they were built; masks, and the functions in place of its modules', follow the name.
        if name == ATTENTION_NAME:
            vars(model)["_attention_before_kvpool"] = model.config._attn_implementation
            model.config._attn_implementation = MODULES_NAME
        else:
            model.config._attn_implementation = vars(model).pop("_attention_before_kvpool", name)
        return
    text = model.config.get_text_config()
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is text]
    model.set_attn_implementation(dict.fromkeys(["", *parts], name))


def _unused_mask(*_: Any, device: Any = None, **__: Any) -> Tensor:
    """For models that convert their mask before they hand it on. Unlike transformers' eager mask, CUDA graphs can have it."""
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)


def _is_shared(module: Any) -> bool:
    """Whether a module computes several layers with the same weights. Such a module gets the layer in every call."""
    return hasattr(module, "layer_idx") and "layer_idx" in inspect.signature(module.forward).parameters


def _note_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (given := kwargs.get("layer_idx")) is not None:
        module.layer_idx = given


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers stop here and go on behind it
def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Choice | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls once per layer, with [1, head, token, dim]; it returns [1, token, head, dim]."""
    if (attention_mask is not None and indices is None) or position_bias is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a mask or bias of its own to attention, which a paged cache cannot see"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (folds := folds_of(module)) is not None:
        query = folds.absorb(query)
    call = AttentionCall(
        module.layer_idx,
        flat(query),
        flat(key),
        flat(value),
        scale,
        sliding_window,
        softcap,
        s_aux,
        chunk=_chunk_of(module),
        k_only=folds is not None,
        choice=indices,
    )
    result = attend_to(call)
    return (result if folds is None else folds.expand(result)), None


def _chunk_of(module: Any) -> int | None:
    """The chunk of a layer with chunked attention (llama4). Models put it into their mask only."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if module.layer_idx >= len(kinds) or kinds[module.layer_idx] != "chunked_attention":
        return None
    chunk: int = config.attention_chunk_size
    return chunk


def attend_to(call: AttentionCall) -> Tensor:
    """What the open `attending` computes for a call: [1, token, head, dim]."""
    attend = _ATTEND.get()
    if attend is None:
        raise KVPoolError(
            "the model's attention is kvpool's, which runs only under kvpool.engine; to use the model by itself, call "
            'model.set_attn_implementation("sdpa"), or load it again where transformers cannot set it'
        )
    return attend(call).unsqueeze(0)


def flat(part: Tensor) -> Tensor:
    """Queries, keys or values [1, head, token, dim] as [token, head, dim]."""
    return part[0].transpose(0, 1)
