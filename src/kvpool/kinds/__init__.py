"""Kinds of layer groups: each is one class that owns its whole life, and one entry here. See `core/kind.py`.

A kind of one's own needs no more: a subclass of `LayerSpec` that names it, and `KINDS[name] = TheClass`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool.checks import show
from kvpool.config import GroupKind, LayerGroup
from kvpool.core.kind import Group
from kvpool.errors import ConfigError
from kvpool.kinds.by_block import ChunkedGroup, SlidingGroup
from kvpool.kinds.cross import CrossGroup
from kvpool.kinds.state import StateGroup
from kvpool.pools.pool import BlockPool

KINDS: dict[str, type[Group]] = {
    GroupKind.FULL: Group,
    GroupKind.SLIDING: SlidingGroup,
    GroupKind.CHUNKED: ChunkedGroup,
    GroupKind.STATE: StateGroup,
    GroupKind.CROSS: CrossGroup,
}


def kind_of(spec: LayerGroup) -> type[Group]:
    """The class of a layer group, for whoever has its description alone.

    >>> from kvpool.config import KVCacheConfig, LayerSpec
    >>> config = KVCacheConfig([LayerSpec(1, 8), LayerSpec(1, 8, window=4)], block_size=2, gpu_blocks=8)
    >>> [kind_of(spec).by_block for spec in config.groups]
    [False, True]
    """
    kind = KINDS.get(spec.kind)
    if kind is None:
        known = ", ".join(sorted(map(str, KINDS)))
        raise ConfigError(
            f"no class for layers of kind {show(spec.kind)}: add one to kvpool.kinds.KINDS; known: {known}"
        )
    return kind


def make_groups(specs: Iterable[LayerGroup], block_size: int, pools: Sequence[list[BlockPool]]) -> tuple[Group, ...]:
    """One object for each layer group of a model; `pools` are those of the model, each with one pool per tier."""
    return tuple(kind_of(spec)(spec, block_size, pools[spec.pool]) for spec in specs)
