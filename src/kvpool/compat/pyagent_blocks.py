"""PyAgent's configuration, blocks, allocator and transfers: single blocks of single layers, with their bytes.

Above them stand `PagedKVCache` and `KVCacheManager` (in `pyagent`), which use a real manager. This module serves code that
takes blocks one by one. Ids and counts come from `BlockPool`, memory from `BlockStore`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.compat.known_settings import checked_settings
from kvpool.compat.spelling import import_torch
from kvpool.config import KVCacheConfig as CacheConfig
from kvpool.config import LayerSpec, Tier
from kvpool.config.layers import DType as StoredType
from kvpool.config.layers import check_bool, check_int
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.pools.pool import BlockPool

if TYPE_CHECKING:
    from torch import Tensor

    from kvpool.kernels.layout import LayerCache
    from kvpool.storage import BlockStore

DEFAULT_GPU_BLOCKS = 1000


class DeviceType(str, Enum):
    """Where the GPU tier lies. MPS is a name only: stores live on CUDA devices and CPUs."""

    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


class DType(str, Enum):
    """Element types under PyAgent's names. FP8 is e4m3; INT8 has a float16 scale for every token and head beside it."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FP8 = "fp8"


def stored_type(dtype: Any) -> StoredType:
    """kvpool's element type for a name, either enum, or a numpy type."""
    if isinstance(dtype, type):
        dtype = np.dtype(dtype).name
    return StoredType.parse(dtype.value if isinstance(dtype, DType) else dtype)


@checked_settings
@dataclass(frozen=True)
class KVCacheConfig:
    """Equal layers with `num_heads` KV heads each, and blocks for them.

    The GPU gets `num_gpu_blocks` (1000), or `gpu_memory_utilization` of what is free on it; the host `num_cpu_blocks` (0)
    or `swap_space_gb`. Without `enable_chunked_prefill` a prompt takes its places all at once.

    >>> config = KVCacheConfig(num_layers=2, num_heads=4, head_dim=64, block_size=16)
    >>> config.kv_size_per_token, config.block_size_bytes
    (2048, 32768)
    """

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: DType | str = DType.FLOAT16
    device: DeviceType | str = DeviceType.CUDA
    block_size: int = 16
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    swap_space_gb: float | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        check_int("num_layers", self.num_layers, 1, 2**16)
        check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        for blocks, share in (("num_gpu_blocks", "gpu_memory_utilization"), ("num_cpu_blocks", "swap_space_gb")):
            if getattr(self, blocks) is not None and getattr(self, share) is not None:
                raise ConfigError(f"{blocks} and {share} both say how many blocks there are; give one of them")
        try:
            device = DeviceType(self.device)
        except ValueError:
            raise ConfigError(f"device={self.device!r} must be 'cuda' or 'cpu'") from None
        if device is DeviceType.MPS:
            raise ConfigError("device='mps': stores live on 'cuda' or 'cpu'")
        self._put("device", device)
        self._put("num_gpu_blocks", self._gpu_blocks())
        self._put("num_cpu_blocks", self._cpu_blocks())
        _ = self.cache_config  # refuses what remains

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _gpu_blocks(self) -> int:
        if self.gpu_memory_utilization is None:
            return DEFAULT_GPU_BLOCKS if self.num_gpu_blocks is None else self.num_gpu_blocks
        import_torch()
        from kvpool.storage import measure_budget

        return measure_budget(DeviceType(self.device).value, self.gpu_memory_utilization) // self.block_size_bytes

    def _cpu_blocks(self) -> int:
        if self.swap_space_gb is None:
            return 0 if self.num_cpu_blocks is None else self.num_cpu_blocks
        if (
            isinstance(self.swap_space_gb, bool)
            or not isinstance(self.swap_space_gb, (int, float))
            or self.swap_space_gb < 0
        ):
            raise ConfigError(f"swap_space_gb={self.swap_space_gb!r} must be a number of GiB, 0 or more")
        return int(self.swap_space_gb * 2**30) // self.block_size_bytes

    @cached_property
    def layer(self) -> LayerSpec:
        """What every layer keeps."""
        return LayerSpec(kv_heads=self.num_heads, head_dim=self.head_dim, dtype=stored_type(self.dtype))

    @property
    def kv_size_per_token(self) -> int:
        """Bytes of one token's K and V over all layers, scales included."""
        return self.num_layers * self.layer.bytes_per_token

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all layers: exactly what is allocated for it."""
        return self.block_size * self.kv_size_per_token

    @cached_property
    def cache_config(self) -> CacheConfig:
        """The same in kvpool's words."""
        return CacheConfig(
            [self.layer] * self.num_layers, self.block_size, gpu_blocks=self.num_gpu_blocks,
            host_blocks=self.num_cpu_blocks, enable_prefix_caching=self.enable_prefix_caching, offload_on_evict=False,
        )  # fmt: skip


@dataclass(eq=False)
class KVCacheBlock:
    """One block of one layer: who uses it, and its keys and values, [token, head, element]."""

    block_id: int
    layer_idx: int
    device: DeviceType = DeviceType.CPU
    is_allocated: bool = False
    ref_count: int = 0
    last_access: float = field(default_factory=time.monotonic)
    num_tokens: int = 0
    request_id: Hashable = None
    position_offset: int = 0  # of its first token in the sequence
    key_cache: Tensor | None = None
    value_cache: Tensor | None = None
    tier: Tier = Tier.GPU
    parts: tuple[Tensor, ...] = field(default=(), repr=False)  # keys, values and their scales, as they are stored

    def allocate(self, num_heads: int, head_dim: int, block_size: int, dtype: Any = DType.FLOAT16) -> None:
        """Zeroed keys and values of the block's own, for a block that no allocator handed out."""
        torch = import_torch()
        from kvpool.kernels.quantization import TORCH_DTYPES

        stored, shape, place = stored_type(dtype), (block_size, num_heads, head_dim), DeviceType(self.device).value
        self.key_cache, self.value_cache = (torch.zeros(shape, dtype=TORCH_DTYPES[stored], device=place) for _ in "kv")
        self.parts = (self.key_cache, self.value_cache)
        self.is_allocated = True

    def free(self) -> None:
        """Lets go of the bytes and of everything known about them."""
        self.key_cache = self.value_cache = None
        self.parts, self.is_allocated, self.num_tokens, self.ref_count = (), False, 0, 0
        self.request_id, self.position_offset = None, 0

    def acquire(self) -> None:
        """One more user."""
        self.ref_count += 1
        self.last_access = time.monotonic()

    def release(self) -> bool:
        """One user less; True when it was the last."""
        if not self.ref_count:
            raise InvalidArgumentError(f"block {self.block_id} of layer {self.layer_idx} has no reference to release")
        self.ref_count -= 1
        return self.ref_count == 0


@dataclass
class KVCacheBlocks:
    """The block ids of a request: on the GPU, or on the host while it is swapped out. Never both in one table."""

    gpu_blocks: list[int] = field(default_factory=list)
    cpu_blocks: list[int] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.gpu_blocks) + len(self.cpu_blocks)

    def append_gpu(self, block_id: int) -> None:
        self.gpu_blocks.append(block_id)

    def append_cpu(self, block_id: int) -> None:
        self.cpu_blocks.append(block_id)


class KVCacheAllocator:
    """Single blocks of single layers, on the GPU and on the host. Ids start at 0 on either.

    >>> allocator = KVCacheAllocator(KVCacheConfig(2, 4, 64, device="cpu", num_gpu_blocks=8))
    >>> block = allocator.allocate_gpu_block(layer_idx=1)
    >>> tuple(block.key_cache.shape), allocator.get_num_free_gpu_blocks()
    ((16, 4, 64), 7)
    """

    def __init__(self, config: KVCacheConfig) -> None:
        if not isinstance(config, KVCacheConfig):
            raise ConfigError(f"KVCacheAllocator takes PyAgent's KVCacheConfig, got {type(config).__name__}")
        import_torch()
        from kvpool.storage import BlockStore, GroupLayout
        from kvpool.storage.data_plane import checked_device

        self.config = config
        [group], [pool] = config.cache_config.groups, config.cache_config.pools
        device, layouts = checked_device(DeviceType(config.device).value), {group.index: GroupLayout(group)}
        gpu = device if device.type == "cuda" else None
        self._stores: dict[Tier, BlockStore] = {
            Tier.GPU: BlockStore(pool, Tier.GPU, layouts, device=device),
            Tier.HOST: BlockStore(pool, Tier.HOST, layouts, gpu=gpu),
        }
        self._pools = {
            (layer, tier): BlockPool(layer, tier, pool.num_blocks[tier])
            for layer in range(config.num_layers)
            for tier in self._stores
        }
        self._lock = threading.Lock()

    def allocate_gpu_block(self, layer_idx: int) -> KVCacheBlock | None:
        """A zeroed block with one reference; None when the layer has no free one."""
        return self._allocate(layer_idx, Tier.GPU)

    def allocate_cpu_block(self, layer_idx: int) -> KVCacheBlock | None:
        return self._allocate(layer_idx, Tier.HOST)

    def _allocate(self, layer_idx: int, tier: Tier) -> KVCacheBlock | None:
        pool = self._pools.get((layer_idx, tier))
        if pool is None:
            raise InvalidArgumentError(
                f"layer_idx {layer_idx!r} is outside the model's {self.config.num_layers} layers"
            )
        with self._lock:
            if not pool.num_free:
                return None
            block_id = int(pool.take_counted(1)[0])
        cache = self._stores[tier].layer_cache(0, layer_idx)
        parts = tuple(tensor[block_id] for tensor in _tensors(cache))
        for part in parts:  # whatever its last user left
            part.zero_()
        device = DeviceType(self.config.device) if tier == Tier.GPU else DeviceType.CPU
        block = KVCacheBlock(block_id, layer_idx, device, True, 1, tier=tier, parts=parts)
        assert cache.v is not None
        block.key_cache, block.value_cache = cache.k[block_id], cache.v[block_id]
        return block

    def free_block(self, block: KVCacheBlock) -> None:
        """One user less; the last one gives the block back, and its object loses the bytes."""
        pool = self._pools.get((block.layer_idx, block.tier))
        if pool is None or not any(part is not None for part in block.parts):
            raise InvalidArgumentError(
                f"block {block.block_id} of layer {block.layer_idx} is not one of this allocator"
            )
        with self._lock:
            if block.release():
                pool.release(np.array([block.block_id], np.int32))
                block.free()

    def get_num_free_gpu_blocks(self) -> int:
        """Free blocks of the layer that has the fewest."""
        return self._free(Tier.GPU)

    def get_num_free_cpu_blocks(self) -> int:
        return self._free(Tier.HOST)

    def _free(self, tier: Tier) -> int:
        with self._lock:
            return min(pool.num_free for (_, at), pool in self._pools.items() if at == tier)

    @property
    def usage(self) -> float:
        """The fraction of the GPU blocks of all layers that is taken."""
        with self._lock:
            pools = [pool for (_, tier), pool in self._pools.items() if tier == Tier.GPU]
            return 1 - sum(pool.num_free for pool in pools) / sum(pool.num_blocks for pool in pools)


class KVCacheTransfer:
    """Moves keys and values between blocks, at once and completely or not at all."""

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config

    def swap_out(self, gpu_block: KVCacheBlock, cpu_block: KVCacheBlock) -> None:
        """The bytes of a GPU block and what is known about them, to a host block."""
        self._swap(gpu_block, cpu_block, Tier.GPU, Tier.HOST)

    def swap_in(self, cpu_block: KVCacheBlock, gpu_block: KVCacheBlock) -> None:
        """The bytes of a host block and what is known about them, to a GPU block."""
        self._swap(cpu_block, gpu_block, Tier.HOST, Tier.GPU)

    def _swap(self, source: KVCacheBlock, target: KVCacheBlock, source_tier: Tier, target_tier: Tier) -> None:
        for block, tier in ((source, source_tier), (target, target_tier)):
            if block.tier != tier:
                raise InvalidArgumentError(f"block {block.block_id} lies on {block.tier.name}, not on {tier.name}")
        self.copy_blocks([source], [target])
        target.request_id, target.position_offset = source.request_id, source.position_offset

    def copy_blocks(self, src_blocks: Sequence[KVCacheBlock], dst_blocks: Sequence[KVCacheBlock]) -> None:
        """Block by block in this order: `dst_blocks[i]` gets the bytes and the number of tokens of `src_blocks[i]`."""
        if len(src_blocks) != len(dst_blocks):
            raise InvalidArgumentError(f"{len(src_blocks)} blocks cannot be copied to {len(dst_blocks)}")
        for source, target in zip(src_blocks, dst_blocks, strict=True):
            for block in (source, target):
                if not block.parts:
                    raise InvalidArgumentError(
                        f"block {block.block_id} of layer {block.layer_idx} has no bytes; allocate it"
                    )
            if target.ref_count > 1:
                raise InvalidArgumentError(
                    f"block {target.block_id} has {target.ref_count} users; copy to one of its own"
                )
            shapes = [[(part.shape, part.dtype) for part in block.parts] for block in (source, target)]
            if shapes[0] != shapes[1]:
                raise InvalidArgumentError(f"blocks {source.block_id} and {target.block_id} differ in shape or type")
        for source, target in zip(src_blocks, dst_blocks, strict=True):
            for part, place in zip(source.parts, target.parts, strict=True):
                place.copy_(part)
            target.num_tokens = source.num_tokens
            target.last_access = time.monotonic()


def _tensors(cache: LayerCache) -> list[Tensor]:
    """Keys and values of a layer, and their scales where it has any."""
    parts = (cache.k, cache.v, cache.k_scale, cache.k_zero, cache.v_scale, cache.v_zero)
    return [part for part in parts if part is not None]
