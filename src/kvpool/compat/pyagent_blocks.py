"""PyAgent's blocks, allocator and transfers: single blocks of single layers, with their bytes.

Above them stand `PagedKVCache` and `KVCacheManager` (in `pyagent`), which use a real manager. This module serves code that
takes blocks one by one. Ids and counts come from `BlockPool`, memory from `BlockStore`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.checks import as_count, check_int, show
from kvpool.compat.adapter import checked_settings, import_torch, layer_index
from kvpool.compat.pyagent_config import (
    Count,
    DeviceType,
    DType,
    Fraction,
    KVCacheConfig,
    as_device,
    check_config,
    stored_type,
)
from kvpool.config import LayerSpec, Tier
from kvpool.config.layers import MAX_BLOCK_SIZE
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.pools.pool import BlockPool

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvpool.kernels.layout import LayerCache
    from kvpool.storage import BlockStore

MAX_BLOCK_BYTES = 2**30  # of a block that is made by hand


@checked_settings
@dataclass(eq=False)
class KVCacheBlock:
    """One block of one layer: who uses it, and its keys and values, [token, head, element].

    A block that no allocator handed out has no bytes before `allocate`. `parts` are the keys, values and their scales as
    tensors; `key_cache` and `value_cache` show the first two, as numpy arrays where numpy can (`as_array`).
    """

    block_id: int
    layer_idx: int
    device: DeviceType = DeviceType.CPU
    is_allocated: bool = field(default=False, init=False)
    ref_count: int = field(default=0, init=False)
    last_access: float = field(default_factory=time.monotonic, init=False)
    num_tokens: int = field(default=0, init=False)
    request_id: Hashable = field(default=None, init=False)
    position_offset: int = field(default=0, init=False)  # of its first token in the sequence
    tier: Tier = field(default=Tier.GPU, init=False)
    parts: tuple[Tensor, ...] = field(default=(), repr=False, init=False)
    is_lent: bool = field(default=False, repr=False, init=False)  # an allocator handed it out

    def __post_init__(self) -> None:
        self.block_id = as_count(self.block_id, "block_id")
        self.layer_idx = as_count(self.layer_idx, "layer_idx")
        self.device = as_device(self.device)

    @property
    def key_cache(self) -> NDArray[Any] | Tensor | None:
        """The keys, to be read and written in place; None without bytes."""
        return as_array(self.parts[0]) if self.parts else None

    @key_cache.setter
    def key_cache(self, values: Any) -> None:
        self._set(0, values)

    @property
    def value_cache(self) -> NDArray[Any] | Tensor | None:
        return as_array(self.parts[1]) if self.parts else None

    @value_cache.setter
    def value_cache(self, values: Any) -> None:
        self._set(1, values)

    def _set(self, part: int, values: Any) -> None:
        """Copies into the block's own bytes: an array put in their place would not travel with it."""
        if not self.parts:
            raise InvalidArgumentError(f"{self} has no bytes; allocate it")
        torch, place = import_torch(), self.parts[part]
        try:
            given = torch.as_tensor(values, device=place.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(f"{self} takes numbers, got {show(values)}: {error}") from None
        if given.shape != place.shape:
            raise InvalidArgumentError(f"{self} takes shape {tuple(place.shape)}, got {tuple(given.shape)}")
        place.copy_(given)

    def __str__(self) -> str:
        return f"block {self.block_id} of layer {self.layer_idx}"

    def allocate(self, num_heads: int, head_dim: int, block_size: int, dtype: Any = DType.FLOAT16) -> None:
        """Zeroed keys and values of the block's own, for a block that no allocator handed out."""
        self._check_own("has bytes of its allocator already")
        torch = import_torch()
        from kvpool.kernels.quantization import TORCH_DTYPES

        layer = LayerSpec(num_heads, head_dim, stored_type(dtype))
        shape = (check_int(block_size, "block_size", 1, MAX_BLOCK_SIZE), layer.kv_heads, layer.head_dim)
        if shape[0] * layer.bytes_per_token > MAX_BLOCK_BYTES:
            raise ConfigError(f"a block of shape {shape} takes {shape[0] * layer.bytes_per_token} bytes, over 1 GiB")
        kind = TORCH_DTYPES[layer.dtype]
        self.parts = tuple(torch.zeros(shape, dtype=kind, device=self.device.value) for _ in "kv")
        self.is_allocated = True

    def free(self) -> None:
        """Lets go of the bytes and of everything known about them, for a block that no allocator handed out."""
        self._check_own("belongs to its allocator; give it back with KVCacheAllocator.free_block")
        self._clear()

    def _check_own(self, wrong: str) -> None:
        if self.is_lent:
            raise InvalidArgumentError(f"{self} {wrong}")

    def _clear(self) -> None:
        self.parts, self.is_allocated, self.is_lent, self.num_tokens, self.ref_count = (), False, False, 0, 0
        self.request_id, self.position_offset = None, 0

    def acquire(self) -> None:
        """One more user."""
        self.ref_count += 1
        self.last_access = time.monotonic()

    def release(self) -> bool:
        """One user less; True when it was the last."""
        if not self.ref_count:
            raise InvalidArgumentError(f"{self} has no reference to release")
        self.ref_count -= 1
        return self.ref_count == 0


@dataclass
class KVCacheBlocks:
    """The block ids of a request: on the GPU, or on the host while it is swapped out. Never both in one table."""

    gpu_blocks: list[int] = field(default_factory=list)
    cpu_blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("gpu_blocks", "cpu_blocks"):
            given = getattr(self, name)
            if not isinstance(given, list):
                raise InvalidArgumentError(f"{name} must be a list of block ids, got {show(given)}")
            setattr(self, name, [as_count(block, name) for block in given])

    @property
    def num_blocks(self) -> Count:
        return Count(len(self.gpu_blocks) + len(self.cpu_blocks))

    def append_gpu(self, block_id: int) -> None:
        self.gpu_blocks.append(as_count(block_id, "block_id"))

    def append_cpu(self, block_id: int) -> None:
        self.cpu_blocks.append(as_count(block_id, "block_id"))


class KVCacheAllocator:
    """Single blocks of single layers, on the GPU and on the host. Ids start at 0 on either.

    >>> allocator = KVCacheAllocator(KVCacheConfig(2, 4, 64, device="cpu", num_gpu_blocks=8))
    >>> block = allocator.allocate_gpu_block(layer_idx=1)
    >>> tuple(block.key_cache.shape), allocator.get_num_free_gpu_blocks()
    ((16, 4, 64), 7)
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = check_config("KVCacheAllocator", config)
        self._lent: dict[tuple[int, Tier, int], KVCacheBlock] = {}
        self._lock = threading.Lock()
        self._init_pools()

    def _init_pools(self) -> None:
        """Makes the memory and the free blocks of every layer; refused while blocks are out."""
        if self._lent:
            raise InvalidArgumentError(f"{len(self._lent)} blocks are in use; free them or make a new KVCacheAllocator")
        import_torch()
        from kvpool.storage import BlockStore, GroupLayout
        from kvpool.storage.data_plane import checked_device

        [group], [pool] = self.config.cache_config.groups, self.config.cache_config.pools
        device, layouts = checked_device(self.config.place), {group.index: GroupLayout(group)}
        gpu = device if device.type == "cuda" else None
        self._stores: dict[Tier, BlockStore] = {
            Tier.GPU: BlockStore(pool, Tier.GPU, layouts, device=device),
            Tier.HOST: BlockStore(pool, Tier.HOST, layouts, gpu=gpu),
        }
        self._pools = {
            (layer, tier): BlockPool(layer, tier, pool.num_blocks[tier])
            for layer in range(self.config.num_layers)
            for tier in self._stores
        }

    def allocate_gpu_block(self, layer_idx: int) -> KVCacheBlock | None:
        """A zeroed block with one reference; None when the layer has no free one."""
        return self._allocate(layer_idx, Tier.GPU)

    def allocate_cpu_block(self, layer_idx: int) -> KVCacheBlock | None:
        return self._allocate(layer_idx, Tier.HOST)

    def _allocate(self, layer_idx: int, tier: Tier) -> KVCacheBlock | None:
        layer_idx = layer_index(layer_idx, self.config.num_layers, "layer_idx")
        pool = self._pools[layer_idx, tier]
        with self._lock:
            return self._lend(layer_idx, tier, pool) if pool.num_free else None

    def _lend(self, layer_idx: int, tier: Tier, pool: BlockPool) -> KVCacheBlock:
        block_id = int(pool.take(1, refs=1)[0])
        parts = tuple(tensor[block_id] for tensor in _tensors(self._stores[tier].layer_cache(0, layer_idx)))
        for part in parts:  # whatever its last user left
            part.zero_()
        block = KVCacheBlock(block_id, layer_idx, as_device(self.config.place if tier == Tier.GPU else "cpu"))
        block.tier, block.parts, block.is_allocated, block.is_lent, block.ref_count = tier, parts, True, True, 1
        self._lent[layer_idx, tier, block_id] = block
        return block

    def free_block(self, block: KVCacheBlock) -> None:
        """One user less; the last one gives the block back, and its object loses the bytes.

        A block whose last user has called `release` already is given back as well.
        """
        if not isinstance(block, KVCacheBlock):
            raise InvalidArgumentError(f"free_block takes a KVCacheBlock, got {show(block)}")
        with self._lock:
            key = (block.layer_idx, block.tier, block.block_id)
            if self._lent.get(key) is not block:
                raise InvalidArgumentError(f"{block} is not one of this allocator: it was freed, or another made it")
            if not block.ref_count or block.release():
                del self._lent[key]
                self._pools[block.layer_idx, block.tier].unref(np.array([block.block_id], np.int32))
                block._clear()

    def get_num_free_gpu_blocks(self) -> int:
        """Free blocks of the layer that has the fewest."""
        return self._free(Tier.GPU)

    def get_num_free_cpu_blocks(self) -> int:
        return self._free(Tier.HOST)

    def _free(self, tier: Tier) -> int:
        with self._lock:
            return min(pool.num_free for (_, at), pool in self._pools.items() if at == tier)

    @property
    def usage(self) -> Fraction:
        """The fraction of the GPU blocks of all layers that is taken."""
        with self._lock:
            pools = [pool for (_, tier), pool in self._pools.items() if tier == Tier.GPU]
            return Fraction(1 - sum(pool.num_free for pool in pools) / sum(pool.num_blocks for pool in pools))


class KVCacheTransfer:
    """Moves keys and values between blocks, at once and completely or not at all."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = check_config("KVCacheTransfer", config)

    def swap_out(self, gpu_block: KVCacheBlock, cpu_block: KVCacheBlock) -> None:
        """The bytes of a GPU block and what is known about them, to a host block."""
        self._swap(gpu_block, cpu_block, Tier.GPU, Tier.HOST)

    def swap_in(self, cpu_block: KVCacheBlock, gpu_block: KVCacheBlock) -> None:
        """The bytes of a host block and what is known about them, to a GPU block."""
        self._swap(cpu_block, gpu_block, Tier.HOST, Tier.GPU)

    def _swap(self, source: KVCacheBlock, target: KVCacheBlock, source_tier: Tier, target_tier: Tier) -> None:
        for block, tier in ((source, source_tier), (target, target_tier)):
            if not isinstance(block, KVCacheBlock):
                raise InvalidArgumentError(f"a transfer takes KVCacheBlocks, got {show(block)}")
            if block.tier != tier:
                raise InvalidArgumentError(f"{block} lies on {block.tier.name}, not on {tier.name}")
        self.copy_blocks([source], [target])
        target.request_id, target.position_offset = source.request_id, source.position_offset

    def copy_blocks(self, src_blocks: Sequence[KVCacheBlock], dst_blocks: Sequence[KVCacheBlock]) -> None:
        """Block by block in this order: `dst_blocks[i]` gets the bytes and the number of tokens of `src_blocks[i]`."""
        sources, targets = _blocks("src_blocks", src_blocks), _blocks("dst_blocks", dst_blocks)
        if len(sources) != len(targets):
            raise InvalidArgumentError(
                f"{len(sources)} blocks cannot be copied to {len(targets)}: {show(src_blocks)}, {show(dst_blocks)}"
            )
        for source, target in zip(sources, targets, strict=True):
            for block in (source, target):
                if not block.parts:
                    raise InvalidArgumentError(f"{block} has no bytes; allocate it")
            if target.ref_count > 1:
                raise InvalidArgumentError(f"{target} has {target.ref_count} users; copy to one of its own")
            shapes = [[(part.shape, part.dtype) for part in block.parts] for block in (source, target)]
            if shapes[0] != shapes[1]:
                raise InvalidArgumentError(f"blocks {source.block_id} and {target.block_id} differ in shape or type")
        for source, target in zip(sources, targets, strict=True):
            for part, place in zip(source.parts, target.parts, strict=True):
                place.copy_(part)
            target.num_tokens = source.num_tokens
            target.last_access = time.monotonic()


def as_array(tensor: Tensor) -> NDArray[Any] | Tensor:
    """A numpy array over the same bytes; the tensor itself on a GPU, and for types that numpy has not (bfloat16, fp8)."""
    if tensor.device.type != "cpu" or str(tensor.dtype).removeprefix("torch.") not in ("float16", "float32", "int8"):
        return tensor
    array: NDArray[Any] = tensor.numpy()
    return array


def _blocks(name: str, given: Any) -> list[KVCacheBlock]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(block, KVCacheBlock) for block in given):
        raise InvalidArgumentError(f"{name} must be a list of KVCacheBlocks, got {show(given)}")
    return list(given)


def _tensors(cache: LayerCache) -> list[Tensor]:
    """Keys and values of a layer, and their scales where it has any."""
    tensors = (
        *(part.data for part in cache.values()),
        *(scale for part in cache.values() for scale in (part.scale, part.zero)),
    )
    return [tensor for tensor in tensors if tensor is not None]
