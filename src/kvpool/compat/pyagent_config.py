"""PyAgent's configuration, with its names for devices and element types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from kvpool.checks import check_bool, check_int, check_number, show
from kvpool.compat.adapter import CONFIG_SETTINGS, checked_settings, import_torch
from kvpool.config import KVCacheConfig as CacheConfig
from kvpool.config import LayerSpec
from kvpool.config.layers import DType as StoredType
from kvpool.errors import ConfigError

DEFAULT_GPU_BLOCKS = 1000
MAX_LAYERS = 2**16
MORE_SETTINGS = CONFIG_SETTINGS - {"layers", "block_size", "gpu_blocks", "host_blocks", "enable_prefix_caching"}


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


class Count(int):
    """A number that may also be called: PyAgent's document lists as methods what its source has as properties."""

    def __call__(self) -> int:
        return int(self)


class Fraction(float):
    """The same with a fraction."""

    def __call__(self) -> float:
        return float(self)


def stored_type(dtype: Any) -> StoredType:
    """kvpool's element type for a name, either enum, or a numpy type."""
    if isinstance(dtype, type):
        dtype = np.dtype(dtype).name
    return StoredType.parse(dtype.value if isinstance(dtype, DType) else dtype)


def as_device(device: Any) -> DeviceType:
    """A device by its name; MPS and unknown ones are refused."""
    if not isinstance(device, str) or device not in (DeviceType.CUDA, DeviceType.CPU):
        raise ConfigError(f"device={show(device)}: stores live on 'cuda' or 'cpu'")
    return DeviceType(device)


@checked_settings
@dataclass(frozen=True)
class KVCacheConfig:
    """Equal layers with `num_heads` KV heads each, and blocks for them.

    The GPU gets `num_gpu_blocks` (1000), or `gpu_memory_utilization` of what is free on it; the host `num_cpu_blocks` (0)
    or `swap_space_gb`. Without `enable_chunked_prefill` a prompt takes its places all at once. `device` None takes a GPU if
    there is one. `more` are other fields of kvpool's `KVCacheConfig`, such as `eviction_policy`.

    >>> config = KVCacheConfig(num_layers=2, num_heads=4, head_dim=64, block_size=16)
    >>> config.kv_size_per_token, config.block_size_bytes
    (2048, 32768)
    """

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: DType | str = DType.FLOAT16
    device: DeviceType | str | None = DeviceType.CUDA
    block_size: int = 16
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    swap_space_gb: float | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._put("num_layers", check_int(self.num_layers, "num_layers", 1, MAX_LAYERS))
        check_bool(self.enable_chunked_prefill, "enable_chunked_prefill")
        for blocks, share in (("num_gpu_blocks", "gpu_memory_utilization"), ("num_cpu_blocks", "swap_space_gb")):
            if getattr(self, blocks) is not None and getattr(self, share) is not None:
                raise ConfigError(f"{blocks} and {share} both say how many blocks there are; give one of them")
        if self.device is not None:
            self._put("device", as_device(self.device))
        if not isinstance(self.more, Mapping) or not self.more.keys() <= MORE_SETTINGS:
            raise ConfigError(f"more={show(self.more)} must map names among {', '.join(sorted(MORE_SETTINGS))}")
        self._put("num_gpu_blocks", self._gpu_blocks())
        self._put("num_cpu_blocks", self._cpu_blocks())
        _ = self.cache_config  # refuses what remains

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _gpu_blocks(self) -> int:
        if self.gpu_memory_utilization is None:
            return DEFAULT_GPU_BLOCKS if self.num_gpu_blocks is None else self.num_gpu_blocks
        share = check_number(self.gpu_memory_utilization, "gpu_memory_utilization", "a fraction above 0 and up to 1")
        import_torch()
        from kvpool.storage import measure_budget
        from kvpool.storage.data_plane import checked_device

        return measure_budget(checked_device(self.place), share) // self.block_size_bytes

    def _cpu_blocks(self) -> int:
        if self.swap_space_gb is None:
            return 0 if self.num_cpu_blocks is None else self.num_cpu_blocks
        gib = check_number(self.swap_space_gb, "swap_space_gb", "a number of GiB, 0 or more")
        if gib < 0:
            raise ConfigError(f"swap_space_gb={gib} must be a number of GiB, 0 or more")
        return int(gib * 2**30) // self.block_size_bytes

    @property
    def place(self) -> str:
        """The name of the device; what `device` None stands for needs torch."""
        if self.device is None:
            return "cuda" if import_torch().cuda.is_available() else "cpu"
        return DeviceType(self.device).value

    @cached_property
    def layer(self) -> LayerSpec:
        """What every layer keeps."""
        return LayerSpec(kv_heads=self.num_heads, head_dim=self.head_dim, dtype=stored_type(self.dtype))

    @property
    def kv_size_per_token(self) -> Count:
        """Bytes of one token's K and V over all layers, scales included."""
        return Count(self.num_layers * self.layer.bytes_per_token)

    @property
    def block_size_bytes(self) -> Count:
        """Bytes of one block over all layers: exactly what is allocated for it."""
        return Count(self.block_size * self.kv_size_per_token)

    @cached_property
    def cache_config(self) -> CacheConfig:
        """The same in kvpool's words."""
        settings = {"watermark": 0.0, "offload_on_evict": False, **self.more}
        return CacheConfig(
            [self.layer] * self.num_layers,
            self.block_size,
            gpu_blocks=self.num_gpu_blocks,
            host_blocks=self.num_cpu_blocks,
            enable_prefix_caching=self.enable_prefix_caching,
            **settings,
        )


def check_config(name: str, config: KVCacheConfig) -> KVCacheConfig:
    if not isinstance(config, KVCacheConfig):
        raise ConfigError(f"{name} takes PyAgent's KVCacheConfig, got {show(config)} of type {type(config).__name__}")
    return config
