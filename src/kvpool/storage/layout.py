"""How K and V lie inside a block, and states inside a slot; and the views of them that kernels get."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpool.config import LayerSpec, StateSpec
from kvpool.config.layers import LayerGroup, ceil_div
from kvpool.errors import ConfigError
from kvpool.kernels.layout import LayerCache, Runs
from kvpool.kernels.quantization import TORCH_DTYPES

__all__ = ["GroupLayout", "LayerCache", "Part", "StateLayout"]


class Part(NamedTuple):
    """One tensor of every layer inside a block: layer i has it at byte `offset + i * layer_stride`, token after token."""

    name: str  # a field of LayerCache
    dtype: torch.dtype
    heads: int
    width: int  # stored elements of one head and token; 0 for scales, which are one number
    offset: int
    layer_stride: int

    @property
    def token_bytes(self) -> int:
        return self.heads * max(self.width, 1) * self.dtype.itemsize


class GroupLayout:
    """Where the layers of one group lie inside a block.

        block:  K of layer 0 | V of layer 0 | K of layer 1 | ... | scales of layer 0 | scales of layer 1 | ...
        K:      token 0: head 0, head 1, ... | token 1: ...

    A block is one contiguous run over all layers, so moving it is one copy. A token's K of one layer is contiguous too,
    so writing it is one copy. Nothing is padded: a block takes exactly `LayerGroup.block_bytes`.
    """

    def __init__(self, group: LayerGroup, factors: Mapping[int, tuple[float, float]] | None = None) -> None:
        self.group = group
        self.factors = factors or {}
        self.block_size = group.block_size
        self.block_bytes = group.block_bytes
        shapes, scale_shapes = [], []
        for name, dtype, heads, width in group.attention.parts:
            stored = TORCH_DTYPES[dtype]
            shapes.append((name, stored, heads, ceil_div(width * dtype.bits, 8 * stored.itemsize)))
            scales = ("scale", "zero")[: dtype.scale_bytes // 2]
            scale_shapes += [(f"{name}_{scale}", torch.float16, heads, 0) for scale in scales]
        if scale_shapes and self.block_bytes % 2:
            raise ConfigError(
                f"blocks of layer group {group.index} take {self.block_bytes} bytes: their float16 scales would start at "
                f"odd addresses; use an even block_size or head_dim"
            )
        elements = self._place(shapes, 0)
        behind = sum(part.token_bytes for part in elements) * self.block_size * len(group.layers)
        self.parts = (*elements, *self._place(scale_shapes, behind))

    def _place(self, shapes: list[tuple[str, torch.dtype, int, int]], start: int) -> list[Part]:
        """Parts one after the other from byte `start`, layer by layer."""
        sizes = [heads * max(width, 1) * dtype.itemsize * self.block_size for _, dtype, heads, width in shapes]
        offsets = [start + sum(sizes[:i]) for i in range(len(sizes))]
        return [Part(*shape, at, sum(sizes)) for shape, at in zip(shapes, offsets, strict=True)]

    def layer_cache(self, data: Tensor, index: int) -> LayerCache:
        """Layer number `index` of the group, as views into the bytes of a store, uint8 [block, byte]."""
        spec = self.group.attention
        views = {part.name: self._view(data, part, index) for part in self.parts}
        k_factor, v_factor = self.factors.get(self.group.layers[index], (1.0, 1.0))
        v = views.pop("v", None)
        return LayerCache(spec.dtype, views.pop("k"), v, **views, k_factor=k_factor, v_factor=v_factor)

    def _view(self, data: Tensor, part: Part, index: int) -> Tensor:
        item = part.dtype.itemsize
        flat = data.view(-1).view(part.dtype)
        row = max(part.width, 1)
        shape = (data.shape[0], self.block_size, part.heads, row)
        strides = (self.block_bytes // item, part.heads * row, row, 1)
        offset = flat.storage_offset() + (part.offset + index * part.layer_stride) // item
        view = flat.as_strided(shape, strides, offset)
        return view if part.width else view[..., 0]

    @property
    def runs(self) -> list[Runs]:
        """The stretches of a block that hold tokens one after the other, for copies of its first tokens."""
        layers = len(self.group.layers)
        return [Runs(part.offset, part.layer_stride, layers, part.token_bytes) for part in self.parts]


class StateLayout:
    """Where the states of a model's layers lie inside a slot, the block of a pool of states.

        slot:   parts of the first layer | parts of the second layer | ...

    One slot holds what all layers keep of one sequence at one position, so that copying a state is one copy. `specs` are
    the states by the number of their layer in the model. A part begins where its `StateSpec` says, and is contiguous.
    """

    def __init__(self, specs: Mapping[int, StateSpec]) -> None:
        self.specs = dict(sorted(specs.items()))
        self.block_bytes = sum(spec.bytes for spec in self.specs.values())

    def views(self, data: Tensor) -> dict[tuple[int, str], Tensor]:
        """Every part of every layer, [slot, *shape], as views into the bytes of a store, uint8 [slot, byte]."""
        views, start = {}, 0
        for layer, spec in self.specs.items():
            for part, offset in zip(spec.parts, spec.offsets, strict=False):
                dtype = TORCH_DTYPES[part.dtype]
                flat = data.view(-1).view(dtype)
                strides = (self.block_bytes // dtype.itemsize, *_contiguous(part.shape))
                begin = flat.storage_offset() + (start + offset) // dtype.itemsize
                views[layer, part.name] = flat.as_strided((data.shape[0], *part.shape), strides, begin)
            start += spec.bytes
        return views


def _contiguous(shape: tuple[int, ...]) -> list[int]:
    """The strides of a contiguous tensor."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def layout_of(
    group: LayerGroup, layers: Sequence[LayerSpec | StateSpec], factors: Mapping[int, tuple[float, float]] | None = None
) -> GroupLayout | StateLayout:
    """Where the bytes of a layer group lie inside its blocks; `layers` are those of the model's cache."""
    states = {layer: spec for layer in group.layers if isinstance(spec := layers[layer], StateSpec)}
    return StateLayout(states) if states else GroupLayout(group, factors)
