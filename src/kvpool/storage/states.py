"""StateSlots: the states of sequences as the layers of a model read and write them, by slot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvpool.config import PoolSpec, StateSpec, Tier
from kvpool.errors import InvalidArgumentError
from kvpool.kernels.layout import SlotStates
from kvpool.pools.arrays import Int32Array
from kvpool.storage.layout import StateLayout
from kvpool.storage.store import BlockStore


class StateSlots:
    """The states of one layer group in a store. Slots are that store's blocks: `CopyOp`s, tiers and checksums know them.

    Gathering and scattering are one operation each on the current stream, of fixed shapes for a fixed number of slots, and
    wait for nothing; they may stand in a CUDA graph.
    """

    def __init__(self, store: BlockStore, group: int = 0, numbers: Mapping[int, int] | None = None) -> None:
        layout = store.layouts[group]
        if not isinstance(layout, StateLayout):
            raise InvalidArgumentError(f"layer group {group} of pool {store.pool} keeps keys and values, no states")
        self.store = store
        self.group = group
        self._numbers = {layer: layer for layer in layout.specs} | dict(numbers or {})
        # By the number of the layer in the model
        self.specs: Mapping[int, StateSpec] = {self._numbers[layer]: spec for layer, spec in layout.specs.items()}
        self._stored: Mapping[tuple[int, str], Tensor] = {}
        self._tensors: dict[tuple[int, str], Tensor] = {}

    @classmethod
    def allocate(cls, specs: Mapping[int, StateSpec], num_slots: int, device: torch.device | str = "cpu") -> StateSlots:
        """Slots on a device in a store of their own, which no manager knows."""
        layout = StateLayout(specs)
        pool = PoolSpec(0, layout.block_bytes, (0,), {Tier.GPU: num_slots})
        return cls(BlockStore(pool, Tier.GPU, {0: layout}, device=device))

    @property
    def device(self) -> torch.device:
        return self.store.device

    @property
    def spare(self) -> int:
        """A slot that no manager knows: rows that only fill a graph up leave their states there."""
        return self.store.num_blocks

    @property
    def tensors(self) -> Mapping[tuple[int, str], Tensor]:
        """The parts of all states by the number of their layer in the model and their name, [slot, *shape], as views."""
        stored = self.store.views(self.group)
        if stored is not self._stored:  # the store has new memory
            self._stored = stored
            self._tensors = {(self._numbers[layer], part): tensor for (layer, part), tensor in stored.items()}
        return self._tensors

    def at(self, layer: int, part: str, sources: Tensor, targets: Tensor) -> SlotStates:
        """A part of a layer's states for kernels that read and write it in place; slots are int64 on the device."""
        return SlotStates(self.tensors[layer, part], sources, targets)

    def gather(self, layer: int, part: str, slots: Tensor) -> Tensor:
        """A contiguous copy [slot, *shape] of a part of a layer's states; `slots` is int64 on the device."""
        return self.at(layer, part, slots, slots).gather()

    def scatter(self, layer: int, part: str, slots: Tensor, values: Tensor) -> None:
        """Writes a part of a layer's states, [slot, *shape], into distinct slots."""
        self.at(layer, part, slots, slots).scatter(values)

    def check(self, sources: Int32Array, targets: Int32Array) -> None:
        """InvalidArgumentError unless a step may read the states in `sources` (-1: none) and write those in `targets`.

        Two sequences may read the same state. What one writes, no other may read or write: all of them run at once.
        """
        limit = self.store.num_blocks
        for name, slots, lowest in (("sources", sources, -1), ("targets", targets, 0)):
            if len(slots) and not lowest <= int(slots.min()) <= int(slots.max()) < limit:
                raise InvalidArgumentError(
                    f"{name} {slots.tolist()[:8]} are not all among the {limit} slots of the store"
                )
        if len(np.unique(targets)) < len(targets):
            raise InvalidArgumentError(f"targets {targets.tolist()[:8]} name a slot twice: each sequence needs its own")
        foreign = np.flatnonzero(np.isin(sources, targets) & (sources != targets))
        if len(foreign):
            raise InvalidArgumentError(
                f"slot {int(sources[foreign[0]])} is read for one sequence and written for another in the same step; write "
                "into a free slot"
            )
