"""A 64-bit sum per block that travels with it through the tiers."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from kvpool.config import Tier
from kvpool.kernels.layout import widest_view
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.storage.store import BlockStore
from kvpool.storage.transfer_steps import Store, TransferStep

_CHUNK_BYTES = 1 << 26  # of temporary memory
_ODD = -7046029254386353131  # 2**64 over the golden ratio, as a signed number


def block_checksums(data: Tensor, blocks: Int32Array) -> Tensor:
    """int64 [block]: the words of each block, each times an odd number that depends on its place, added up modulo 2**64.

    Any single changed word changes the sum, and so do two words that changed places (unless they differ by a multiple of
    a high power of two). It is meant to find faults, not forgeries.
    """
    rows = widest_view(data)
    weights = (torch.arange(rows.shape[1], dtype=torch.int64, device=data.device) * 2 + 1) * _ODD
    step = max(1, _CHUNK_BYTES // (8 * rows.shape[1]))
    ids = torch.from_numpy(blocks).long().to(data.device)
    sums = [(rows.index_select(0, ids[i : i + step]).long() * weights).sum(1) for i in range(0, len(ids), step)]
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=data.device)


class TravellingChecksums:
    """The sums of blocks that left the GPU tier, kept beside their ids on the lower tiers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()  # the disk worker takes part
        self._sums: dict[tuple[int, Tier], Tensor] = {}
        self._known: dict[tuple[int, Tier], BoolArray] = {}

    def before(self, step: TransferStep) -> None:
        """Notes the sums that the blocks of a step go with. Runs where their bytes are final."""
        if step.target.tier == Tier.GPU:
            return
        if step.source.tier == Tier.GPU:
            assert isinstance(step.source, BlockStore)
            values, are_known = block_checksums(step.source.data, step.src), np.ones(len(step.src), np.bool_)
        with self._lock:
            if step.source.tier != Tier.GPU:
                sums, known = self._of(step.source)
                values, are_known = sums[self._ids(step.src)], known[step.src]
            sums, known = self._of(step.target)
            sums[self._ids(step.dst)] = values
            known[step.dst] = are_known

    def after(self, step: TransferStep) -> Tensor | None:
        """Which blocks of a step came back to the GPU tier with other bytes than they left with; None: no such step."""
        if step.target.tier != Tier.GPU or step.source.tier == Tier.GPU or step.num_tokens is not None:
            return None
        assert isinstance(step.target, BlockStore)
        with self._lock:
            sums, known = self._of(step.source)
        differ = sums[self._ids(step.src)] != block_checksums(step.target.data, step.dst)
        return differ & torch.from_numpy(known[step.src]).to(self._device)

    def _of(self, store: Store) -> tuple[Tensor, BoolArray]:
        key = store.pool, store.tier
        missing = store.num_blocks - (len(self._known[key]) if key in self._known else 0)
        if key not in self._known:
            self._sums[key] = torch.zeros(0, dtype=torch.int64, device=self._device)
            self._known[key] = np.zeros(0, np.bool_)
        if missing > 0:
            self._sums[key] = torch.cat([self._sums[key], self._sums[key].new_zeros(missing)])
            self._known[key] = np.concatenate([self._known[key], np.zeros(missing, np.bool_)])
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # other streams use it too; happens once per size
        return self._sums[key], self._known[key]

    def _ids(self, blocks: Int32Array) -> Tensor:
        return torch.from_numpy(blocks).long().to(self._device)
