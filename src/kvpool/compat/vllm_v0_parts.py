"""What stands around vLLM V0's `BlockManager`: the worker's cache engine, the two allocators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvpool.checks import as_count, show
from kvpool.compat.vllm_v0 import BlockManager, Pairs
from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import CopyKind, CopyOp

if TYPE_CHECKING:
    from torch import Tensor


class CacheEngine:
    """The worker's side: the tensors behind a `BlockManager` with `layers`, and the pairs carried out on them."""

    def __init__(self, blocks: BlockManager) -> None:
        if not isinstance(blocks, BlockManager):
            raise InvalidArgumentError(f"CacheEngine takes a BlockManager, got {show(blocks)}")
        self.plane = blocks.plane

    @property
    def gpu_cache(self) -> list[tuple[Tensor, Tensor | None]]:
        """Keys and values of every layer on the GPU, [block, token, head, element] each."""
        return self._caches(Tier.GPU)

    @property
    def cpu_cache(self) -> list[tuple[Tensor, Tensor | None]]:
        return self._caches(Tier.HOST)

    def _caches(self, tier: Tier) -> list[tuple[Tensor, Tensor | None]]:
        caches = []
        for layer, group in enumerate(self.plane.config.group_of_layer):
            store: Any = self.plane.stores[0, tier]  # a BlockStore: torch need not be there to import this
            cache = store.layer_cache(group, self.plane.config.groups[group].layers.index(layer))
            keys, *values = (part.data for part in cache.values())
            caches.append((keys, values[0] if values else None))
        return caches

    def copy(self, src_to_dst: Pairs) -> None:
        """Copies-on-write inside the GPU, as `append_slots` returned them."""
        self._run(CopyKind.COPY_ON_WRITE, src_to_dst, Tier.GPU, Tier.GPU)

    def swap_out(self, src_to_dst: Pairs) -> None:
        """GPU to CPU, as `BlockManager.swap_out` returned them."""
        self._run(CopyKind.SWAP_OUT, src_to_dst, Tier.GPU, Tier.HOST)

    def swap_in(self, src_to_dst: Pairs) -> None:
        """CPU to GPU, as `BlockManager.swap_in` returned them."""
        self._run(CopyKind.SWAP_IN, src_to_dst, Tier.HOST, Tier.GPU)

    def _run(self, kind: CopyKind, pairs: Pairs, source: Tier, target: Tier) -> None:
        ops = [CopyOp(kind, 0, source, target, *_block_ids(pair)) for pair in _as_pairs(pairs)]
        self.plane.run_copies(ops).wait()

    @staticmethod
    def get_cache_block_size(block_size: int, layers: Sequence[LayerSpec]) -> int:
        """Bytes of one block over all these layers, before there is an engine."""
        config = KVCacheConfig(layers, block_size, gpu_blocks=1)
        return sum(group.block_bytes for group in config.groups)


def _as_pairs(pairs: Any) -> list[Any]:
    if getattr(pairs, "ndim", None) == 2:  # V0 handed its worker a tensor of pairs; arrays will do
        return list(pairs.tolist() if pairs.shape[1] == 2 else pairs)
    if not isinstance(pairs, (list, tuple)):
        raise InvalidArgumentError(f"src_to_dst must be a list of (source, destination), got {show(pairs)}")
    return list(pairs)


def _block_ids(pair: Any) -> tuple[Int32Array, Int32Array]:
    """Source and destination of one copy, as arrays; checked against the stores by the data plane."""
    if not isinstance(pair, (list, tuple, np.ndarray)) or len(pair) != 2:
        raise InvalidArgumentError(f"a copy is a pair (source, destination) of block ids, got {show(pair)}")
    ids = [as_count(block, "a block id", maximum=MAX_BLOCKS) for block in pair]
    return np.array(ids[:1], np.int32), np.array(ids[1:], np.int32)


class _BlockAllocator(BlockManager):
    """An allocator of V0 by itself. Its blocks belong to sequences: the calls are those of `BlockManager`."""

    def get_num_free_blocks(self) -> int:
        return self.get_num_free_gpu_blocks()

    def get_num_total_blocks(self) -> int:
        return self.manager.config.pools[0].num_blocks[Tier.GPU]

    def _refuse(self, name: str, way: str) -> NoReturn:
        raise InvalidArgumentError(f"{name}: blocks belong to sequences here; {way}")

    def allocate_mutable_block(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("allocate_mutable_block", "allocate(seq_id, tokens) or append_slots(seq_id) gives them")

    def allocate_immutable_block(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("allocate_immutable_block", "allocate(seq_id, tokens) finds full blocks that are cached")

    def promote_to_immutable_block(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("promote_to_immutable_block", "mark_blocks_as_computed(seq_id, tokens) makes full ones reusable")

    def cow_block_if_not_appendable(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("cow_block_if_not_appendable", "append_slots(seq_id) copies a shared block and returns the pair")

    def clear_copy_on_writes(self) -> NoReturn:
        self._refuse("clear_copy_on_writes", "append_slots(seq_id) returns the pairs to copy")


class NaiveBlockAllocator(_BlockAllocator):
    """Blocks with reference counts and copy-on-write, without a prefix cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(block_size, num_blocks, watermark=0.0)


class PrefixCachingBlockAllocator(_BlockAllocator):
    """The same with a prefix cache; `eviction_policy` is a name, a class or a function that makes one."""

    def __init__(self, num_blocks: int, block_size: int, eviction_policy: Any = "lru") -> None:
        super().__init__(block_size, num_blocks, watermark=0.0, enable_caching=True, eviction_policy=eviction_policy)
