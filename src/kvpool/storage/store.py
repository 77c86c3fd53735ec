"""BlockStore: the bytes of one pool on one tier that lives in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvpool.checks import check_int
from kvpool.config import PoolSpec, Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array
from kvpool.storage.layout import BlockLayout, GroupLayout, LayerCache
from kvpool.storage.memory import HostMemory, allocate_device


class BlockStore:
    """One allocation, uint8 [block, byte]; `layer_cache` shows what a layer stores of each token, `views` all tensors.

    `device` is where the bytes are. Host memory is pinned when `gpu` names the GPU that will read it. Bytes allocated are
    bytes reported: `num_blocks * block_bytes`, and as many for each `spare` block: steps of a fixed size write into it what
    nobody reads.
    """

    def __init__(
        self,
        pool: PoolSpec,
        tier: Tier,
        layouts: Mapping[int, BlockLayout],
        num_blocks: int | None = None,
        *,
        device: torch.device | str = "cpu",
        gpu: torch.device | None = None,
        spare: int = 0,
    ) -> None:
        self.pool = pool.index
        self.tier = tier
        self.block_bytes = pool.block_bytes
        self.layouts = {group: layouts[group] for group in pool.groups}
        self.device = torch.device(device)
        self._gpu = gpu
        self._host: HostMemory | None = None
        self._spare = spare
        self.data: Tensor
        self._allocate(pool.num_blocks[tier] if num_blocks is None else num_blocks)

    def _allocate(self, num_blocks: int) -> None:
        check_int(num_blocks, "num_blocks", 0, MAX_BLOCKS, InvalidArgumentError)
        num_blocks += self._spare
        if self.device.type == "cpu":
            self._host = HostMemory(num_blocks, self.block_bytes, self._gpu, in_parts=True)
            self.data = self._host.tensor
        else:
            self.data = allocate_device(self.device, num_blocks, self.block_bytes)
        self._caches: dict[tuple[int, int], LayerCache] = {}
        self._views: dict[int, dict[tuple[int, str], Tensor]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that a manager knows; spare ones stand behind them."""
        return max(0, self.data.shape[0] - self._spare)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.data.numel()

    @property
    def pinned(self) -> bool:
        """Whether the bytes lie in page-locked host memory, which a GPU copies at full speed."""
        return self._host is not None and self._host.pinned

    @property
    def part_blocks(self) -> int:
        """How many blocks of the host were page-locked together: no copy to or from a GPU may go beyond them."""
        return max(1, self.num_blocks) if self._host is None else self._host.part_blocks

    def lock(self, blocks: Int32Array) -> bool:
        """Waits until these blocks of the host are page-locked; False if they never will be."""
        return self._host is not None and self._host.lock(blocks)

    def layer_cache(self, group: int, index: int) -> LayerCache:
        """Layer number `index` of a layer group, as views. A resize makes earlier views stale."""
        cache = self._caches.get((group, index))
        if cache is None:
            layout = self.layouts[group]
            assert isinstance(layout, GroupLayout)
            cache = self._caches[group, index] = layout.layer_cache(self.data, index)
        return cache

    def views(self, group: int) -> Mapping[tuple[int, str], Tensor]:
        """All that a group stores by layer and name, [block, *shape], as views. A resize makes earlier ones stale."""
        views = self._views.get(group)
        if views is None:
            views = self._views[group] = self.layouts[group].views(self.data)
        return views

    def resize(self, num_blocks: int) -> None:
        """Makes room for more blocks or gives memory back; the blocks that remain keep their bytes.

        Old and new memory exist together for a moment. Whoever calls waits for transfers first.
        """
        if num_blocks == self.num_blocks:
            return
        old_data, old_host = self.data, self._host
        self._allocate(num_blocks)
        kept = min(num_blocks, old_data.shape[0])
        self.data[:kept].copy_(old_data[:kept])
        if old_host is not None:
            old_host.close()

    def close(self) -> None:
        """Gives the memory back; the store is empty afterwards."""
        if self._host is not None:
            self._host.close()
        self._spare = 0
        self._allocate(0)
