"""Modules that find out the positions of tokens by themselves, from the place in the row and the length of a cache.

The row of a flattened step holds tokens of many sequences. While such a step runs, these modules get its positions: the
position embeddings of decoders like BART's as `position_ids`, the attention of llama4 (which scales queries by position) as
the length of a cache. The self-check compares the result with the model by itself.

With the rotary types "dynamic" and "longrope", transformers chooses the frequencies in every forward, from its largest
position. In a flattened step one long sequence would change the keys of all others, and the choice would wait for the device.
With the frequencies of short texts, results equal those of transformers up to `positions_limit`, which is the limit here.
Beyond it, cached keys could not be used, because they were rotated with the old frequencies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_POSITIONS: ContextVar[Tensor | None] = ContextVar("kvpool_positions", default=None)


@contextmanager
def placed(positions: Tensor) -> Iterator[None]:
    """While it is open, the modules of `use_positions` take these positions [token], in this thread or task."""
    token = _POSITIONS.set(positions)
    try:
        yield
    finally:
        _POSITIONS.reset(token)


def counts_by_itself(model: Any) -> bool:
    """Whether a model embeds positions that it has counted itself. Its `forward` needs no `position_ids`."""
    return any(_embeds_positions(module) for module in model.modules())


def use_positions(model: Any) -> None:
    """Lets the modules of a model that count tokens take the positions of the step."""
    for module in model.modules():
        hook = _as_position_ids if _embeds_positions(module) else None
        if type(module).__name__ == "Llama4TextAttention":
            hook = _as_past_length
        if hook is not None and hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hook, with_kwargs=True)


def own_positions(model: Any) -> None:
    """Lets them count by themselves again, and rotary embeddings change: the owner of the model may run it, too."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook in (_as_position_ids, _as_past_length):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    _rename(model, lambda kind: kind.kind if isinstance(kind, _FixedKind) else kind)


def _embeds_positions(module: Any) -> bool:
    if not type(module).__name__.endswith("PositionalEmbedding") or not isinstance(module, torch.nn.Embedding):
        return False
    return {"past_key_values_length", "position_ids"} <= inspect.signature(module.forward).parameters.keys()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _as_position_ids(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (positions := _POSITIONS.get()) is None:
        return None
    return args, {**kwargs, "position_ids": positions}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _as_past_length(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (positions := _POSITIONS.get()) is None:
        return None
    return args, {**kwargs, "past_key_values": _Past(positions)}


class _Past:
    """Stands in for a cache that holds nothing, but says how many tokens come before each token of the row."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer: int) -> Tensor:
        """What a token's place in the row lacks to its position."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of the step alone."""
        return keys, values


# --- rotary embeddings -----------------------------------------------------------------------------------------------


class _FixedKind(str):
    """The type of a rotary embedding while it is frozen, and its original type."""

    kind: str

    @classmethod
    def of(cls, kind: str) -> _FixedKind:
        held = cls("held by kvpool")
        held.kind = kind
        return held


def freeze_rotary(model: Any) -> None:
    """Freezes rotary embeddings at the frequencies of short texts. The last text that the model ran must be a short one."""
    _rename(model, lambda kind: _FixedKind.of(kind) if _changes(kind) else kind)


def _rename(model: Any, new: Callable[[str], str]) -> None:
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # one kind per layer type
            module.rope_type = {name: new(each) for name, each in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = new(kind)


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"
