"""What each kind of layer group does with its blocks: one class per kind, one object per group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpool.compiling import tell_apart
from kvpool.config import GroupKind, LayerGroup
from kvpool.pools.groups.counted import CountedGroup
from kvpool.pools.groups.cross import CrossGroup
from kvpool.pools.groups.full import FullGroup
from kvpool.pools.groups.group import Group
from kvpool.pools.groups.windowed import ChunkedGroup, SlidingGroup, WindowedGroup
from kvpool.pools.pool import BlockPool

__all__ = ["Group", "FullGroup", "SlidingGroup", "ChunkedGroup", "CrossGroup", "KINDS", "kind_of", "make_groups"]

KINDS: dict[GroupKind, type[Group]] = {
    GroupKind.FULL: FullGroup,
    GroupKind.SLIDING: SlidingGroup,
    GroupKind.CHUNKED: ChunkedGroup,
    GroupKind.CROSS: CrossGroup,
}
tell_apart(CountedGroup, WindowedGroup, *KINDS.values())


def kind_of(spec: LayerGroup) -> type[Group]:
    """The class of a layer group, for whoever has its description alone.

    >>> from kvpool.config import KVCacheConfig, LayerSpec
    >>> config = KVCacheConfig([LayerSpec(1, 8), LayerSpec(1, 8, window=4)], block_size=2, gpu_blocks=8)
    >>> [kind_of(spec).slides for spec in config.groups]
    [False, True]
    """
    return KINDS[spec.kind]


def make_groups(specs: Iterable[LayerGroup], block_size: int, pools: Sequence[list[BlockPool]]) -> tuple[Group, ...]:
    """One object for each layer group of a model; `pools` are those of the model, each with one pool per tier."""
    return tuple(kind_of(spec)(spec, block_size, pools[spec.pool]) for spec in specs)
