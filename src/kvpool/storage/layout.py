"""How what layers store lies inside a block: a table of places, and the views of them that kernels get."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from kvpool.config import LayerSpec, StateSpec
from kvpool.config.layers import LayerGroup, ceil_div
from kvpool.errors import ConfigError
from kvpool.kernels.layout import LayerCache, Runs, StoredPart
from kvpool.kernels.quantization import TORCH_DTYPES

__all__ = ["BlockLayout", "GroupLayout", "LayerCache", "Place", "StateLayout", "StoredPart"]


class Place(NamedTuple):
    """Where one tensor of a layer lies inside a block: contiguous, from byte `offset` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BlockLayout:
    """The places of what the layers of one group store, by layer and name. `runs` serve copies of its first tokens."""

    def __init__(self, block_bytes: int, places: Mapping[tuple[int, str], Place], runs: Sequence[Runs] = ()) -> None:
        self.block_bytes = block_bytes
        self.places = places
        self.runs = runs  # none: a block is copied as a whole

    def views(self, data: Tensor) -> dict[tuple[int, str], Tensor]:
        """Every tensor of every layer, [block, *shape], as views into the bytes of a store, uint8 [block, byte]."""
        return {key: self.view(data, *key) for key in self.places}

    def view(self, data: Tensor, layer: int, name: str) -> Tensor:
        """One of them."""
        dtype, shape, offset = self.places[layer, name]
        flat = data.view(-1).view(dtype)
        inner = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        strides = self.block_bytes // dtype.itemsize, *inner
        return flat.as_strided((data.shape[0], *shape), strides, flat.storage_offset() + offset // dtype.itemsize)


class GroupLayout(BlockLayout):
    """Layers that store parts of each token: K and V, or whatever `LayerSpec.parts` lists.

        block:  K of layer 0 | V of layer 0 | K of layer 1 | ... | scales of layer 0 | scales of layer 1 | ...
        K:      token 0: head 0, head 1, ... | token 1: ...

    A block is one contiguous run over all layers, so moving it is one copy. A token's K of one layer is contiguous too,
    so writing it is one copy. Nothing is padded: a block takes exactly `LayerGroup.block_bytes`.
    """

    def __init__(self, group: LayerGroup, factors: Mapping[int, tuple[float, ...]] | None = None) -> None:
        self.group = group
        self.factors = factors or {}
        size, layers = group.block_size, group.layers
        elements: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        scales: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, dtype, heads, width in group.attention.parts:
            stored = TORCH_DTYPES[dtype]
            elements[name] = stored, (size, heads, ceil_div(width * dtype.bits, 8 * stored.itemsize))
            for scale in ("scale", "zero")[: dtype.scale_bytes // 2]:
                scales[f"{name}_{scale}"] = torch.float16, (size, heads)
        places, runs, at = {}, [], 0
        for tensors in (elements, scales):
            stride = sum(Place(*tensor, 0).num_bytes for tensor in tensors.values())
            for name, tensor in tensors.items():
                num_bytes = Place(*tensor, 0).num_bytes
                places.update(
                    {(layer, name): Place(*tensor, at + number * stride) for number, layer in enumerate(layers)}
                )
                runs.append(Runs(at, stride, len(layers), num_bytes // size))
                at += num_bytes
            at += stride * (len(layers) - 1)
        for (_, name), place in places.items():
            if place.offset % place.dtype.itemsize or group.block_bytes % place.dtype.itemsize:
                raise ConfigError(
                    f"blocks of layer group {group.index} take {group.block_bytes} bytes: their {name}, of "
                    f"{place.dtype.itemsize} bytes each, would start at odd addresses; use an even block_size or head_dim"
                )
        super().__init__(group.block_bytes, places, runs)

    def layer_cache(self, data: Tensor, index: int) -> LayerCache:
        """Layer number `index` of the group, as views into the bytes of a store, uint8 [block, byte]."""
        layer = self.group.layers[index]
        return LayerCache(self._parts(data, layer, self.factors.get(layer, ())))

    def _parts(self, data: Tensor, layer: int, factors: Sequence[float]) -> Iterator[tuple[str, StoredPart]]:
        for (name, dtype, _, width), factor in zip(
            self.group.attention.parts, chain(factors, repeat(1.0)), strict=False
        ):
            scale, zero = (
                self.view(data, layer, scale) if (layer, scale) in self.places else None
                for scale in (f"{name}_scale", f"{name}_zero")
            )
            yield name, StoredPart(dtype, self.view(data, layer, name), width, scale, zero, factor)


class StateLayout(BlockLayout):
    """Layers that keep a state. The block of their pool is a slot: what all of them keep of one sequence at one position.

        slot:   parts of the first layer | parts of the second layer | ...

    So copying a state is one copy. `specs` are the states by the number of their layer in the model. A part begins where its
    `StateSpec` says.
    """

    def __init__(self, specs: Mapping[int, StateSpec]) -> None:
        self.specs = dict(sorted(specs.items()))
        places, start = {}, 0
        for layer, spec in self.specs.items():
            for part, offset in zip(spec.parts, spec.offsets, strict=False):
                places[layer, part.name] = Place(TORCH_DTYPES[part.dtype], part.shape, start + offset)
            start += spec.bytes
        super().__init__(start, places)


def layout_of(
    group: LayerGroup, layers: Sequence[LayerSpec | StateSpec], factors: Mapping[int, tuple[float, ...]] | None = None
) -> BlockLayout:
    """Where the bytes of a layer group lie inside its blocks; `layers` are those of the model's cache."""
    states = {layer: spec for layer in group.layers if isinstance(spec := layers[layer], StateSpec)}
    return StateLayout(states) if states else GroupLayout(group, factors)
