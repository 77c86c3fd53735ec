"""Rotary embeddings that change with the longest text of a batch are held at the short one.

With the types "dynamic" and "longrope", transformers chooses the frequencies anew in every forward, from the largest
position in it. In a flattened step one long sequence would change the keys of all others, and the choice waits for the
device. Held at the frequencies of short texts, results equal transformers' up to `max_positions`, where the model
ends for us: keys in the cache were rotated with the old frequencies and could not be used beyond it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class _FixedKind(str):
    """What a rotary embedding is called while it is held, and what it was called before."""

    kind: str

    @classmethod
    def of(cls, kind: str) -> _FixedKind:
        held = cls("held by kvpool")
        held.kind = kind
        return held


def max_positions(config: Any) -> int | None:
    """How long a text may get: the model's own limit, or the length at which longrope changes its frequencies."""
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += [rope.get("original_max_position_embeddings") for rope in _longropes(config)]
    return min((limit for limit in limits if limit is not None), default=None)


def freeze(model: Any) -> None:
    """Keeps rotary embeddings as they are. The model must have run a short text last."""
    _rename(model, lambda kind: _FixedKind.of(kind) if _changes(kind) else kind)


def thaw(model: Any) -> None:
    """Lets them change again, as the model came: its owner runs it too."""
    _rename(model, lambda kind: kind.kind if isinstance(kind, _FixedKind) else kind)


def _rename(model: Any, new: Callable[[str], str]) -> None:
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # one kind per layer type
            module.rope_type = {name: new(each) for name, each in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = new(kind)


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _longropes(config: Any) -> Iterator[Mapping[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            yield rope
