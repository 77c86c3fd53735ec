"""ferrum's block pool, to look at: who holds a block, and what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool.compat.adapter import Adapter
from kvpool.config import Tier
from kvpool.config.layers import show
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.manager import KVCacheManager
from kvpool.manager.inspection import KVCacheBlock
from kvpool.pools.arrays import as_count

if TYPE_CHECKING:
    from torch import Tensor


class BlockPoolStats(NamedTuple):
    """Blocks of the pool. All of them exist from the start; free ones include those that eviction could free."""

    total_blocks: int
    free_blocks: int
    allocated_blocks: int
    max_blocks: int


class PoolOwner(Protocol):
    """What a pool asks of the manager that it belongs to."""

    manager: KVCacheManager

    def write_kv(self, handle: Any, layer: int, token_position: int, key: Any, value: Any = None) -> None: ...
    def read_kv(self, handle: Any, layer: int, start_token: int, num_tokens: int) -> tuple[Tensor, Tensor | None]: ...


class BlockPool:
    """The GPU blocks of a manager. They are handed out and freed with requests, never one by one."""

    def __init__(self, owner: PoolOwner) -> None:
        if not isinstance(owner, Adapter):
            raise InvalidArgumentError(f"a pool belongs to a manager, whose gpu_pool() it is, got {show(owner)}")
        self._owner = owner

    def stats(self) -> BlockPoolStats:
        pool = self._owner.manager.stats().pool(0, Tier.GPU)
        return BlockPoolStats(pool.total, pool.free + pool.cached - pool.pinned, pool.referenced, pool.total)

    def get_block(self, physical_id: int) -> KVCacheBlock | None:
        """Who holds a block, with its reference count; None past the end of the pool."""
        block_id = as_count(physical_id, "physical_id")
        return self._owner.manager.block(block_id) if block_id < self._owner.manager.num_blocks() else None

    def write_kv_slot(self, physical_id: int, layer: int, slot: int, key: Any, value: Any = None) -> None:
        """`write_kv` by block and slot, for the request that holds the block."""
        request, position = self._place(physical_id, slot)
        self._owner.write_kv(request, layer, position, key, value)

    def read_kv_slot(self, physical_id: int, layer: int, slot: int) -> tuple[Tensor, Tensor | None]:
        """`read_kv` of one token by block and slot, for a request that holds the block."""
        request, position = self._place(physical_id, slot)
        return self._owner.read_kv(request, layer, position, 1)

    def _place(self, physical_id: int, slot: int) -> tuple[Any, int]:
        size = self._owner.manager.config.block_size
        slot = as_count(slot, "slot", maximum=size - 1)
        block = self.get_block(physical_id)
        if block is None or not block.request_ids or block.position is None:
            raise SequenceStateError(
                f"no live request holds block {show(physical_id)}; read and write blocks of a request"
            )
        return block.request_ids[0], block.position + slot

    def evict_blocks(self, max_blocks: int) -> int:
        """Frees up to `max_blocks` cached blocks that nobody uses; returns how many."""
        return self._owner.manager.evict(as_count(max_blocks, "max_blocks"))

    def allocate(self) -> None:
        """Refused: blocks belong to requests."""
        raise InvalidArgumentError(
            "a pool hands out no single blocks: allocate(AllocationRequest(...)) or allocate_blocks(handle, n) give them "
            "to a request"
        )

    def deallocate(self, physical_id: int) -> None:
        """Refused: blocks belong to requests."""
        raise InvalidArgumentError(
            f"a pool takes no single blocks back, such as {show(physical_id)}: deallocate(request) frees those of a request"
        )
