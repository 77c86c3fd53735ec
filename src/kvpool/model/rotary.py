"""Keeps rotary embeddings at the frequencies of short texts, if they would change with the longest text of a batch.

With the types "dynamic" and "longrope", transformers chooses the frequencies in every forward, from its largest position. In
a flattened step one long sequence would change the keys of all others, and the choice would wait for the device. With the
frequencies of short texts, results equal those of transformers up to `max_positions`, which is the limit here. Beyond it,
cached keys could not be used, because they were rotated with the old frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class _FixedKind(str):
    """The type of a rotary embedding while it is frozen, and its original type."""

    kind: str

    @classmethod
    def of(cls, kind: str) -> _FixedKind:
        held = cls("held by kvpool")
        held.kind = kind
        return held


def max_positions(config: Any) -> int | None:
    """The longest text: the model's own limit, or the length at which longrope changes its frequencies."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    limits += [rope.get("original_max_position_embeddings") for rope in _longropes(config)]
    return min((limit for limit in limits if limit is not None), default=None)


def freeze(model: Any) -> None:
    """Freezes rotary embeddings as they are. The last text that the model ran must be a short one."""
    _rename(model, lambda kind: _FixedKind.of(kind) if _changes(kind) else kind)


def thaw(model: Any) -> None:
    """Lets them change again, because the owner of the model may run it, too."""
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
