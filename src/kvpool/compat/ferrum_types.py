"""ferrum's words for devices, types, requests and tables."""

from __future__ import annotations

import uuid
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from kvpool.checks import as_count, show
from kvpool.compat.adapter import checked_settings, device_name
from kvpool.config import DType, KVCacheConfig, LayerSpec
from kvpool.config.layers import ceil_div
from kvpool.core.handle import is_among
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import as_token_array
from kvpool.scope import Retention, TokenRange


class Device(str, Enum):
    """Where blocks live. "cuda:1" names one GPU of several."""

    CPU = "cpu"
    CUDA = "cuda"


class DataType(str, Enum):
    """What is stored; any spelling that `kvpool.DType` knows will do as well."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


class Priority(IntEnum):
    """How long what a request computes should stay cached, as a priority of `Retention`."""

    LOW = 10
    NORMAL = 35
    HIGH = 70
    CRITICAL = 100


class RequestId(str):
    """A name for a request; `RequestId()` is one that nobody has had. Anything else that is hashable is a name, too."""

    __slots__ = ()

    def __new__(cls, name: str | None = None) -> RequestId:
        if name is not None and not isinstance(name, str):
            raise InvalidArgumentError(f"RequestId takes a name, or none for a new one, got {show(name)}")
        return super().__new__(cls, uuid.uuid4() if name is None else name)


def _is_same_device(asked: str, there: str) -> bool:
    """A name without a number stands for any GPU."""
    kinds = asked.partition(":")[0], there.partition(":")[0]
    return asked == there or (kinds[0] == kinds[1] and kinds[0] in (asked, there))


@dataclass(frozen=True)
class BlockTable:
    """A handle's table as it stands: which physical block each logical one is, None where there is none."""

    block_size: int
    logical_to_physical: list[int | None] = field(default_factory=list)
    sequence_length: int = 0

    @property
    def physical_blocks(self) -> list[int]:
        """The ids of the blocks."""
        return [block for block in self.logical_to_physical if block is not None]


@checked_settings
@dataclass(frozen=True)
class AllocationRequest:
    """What ferrum asks blocks for. Shape, device and type must be the manager's: they are compared, not believed.

    Give `tokens` to reuse the cached beginning of a prompt. `max_sequence_length` bounds the request.
    """

    request_id: Hashable
    initial_tokens: int
    max_sequence_length: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    device: Any = None
    dtype: Any = None
    priority: Priority = Priority.NORMAL
    tokens: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        is_among(self.request_id, {})  # refuses what cannot be an id
        as_count(self.initial_tokens, "initial_tokens")
        for name in ("max_sequence_length", "num_layers", "num_heads", "head_dim"):
            if getattr(self, name) is not None:
                as_count(getattr(self, name), name, minimum=1)
        if self.device is not None:
            object.__setattr__(self, "device", device_name(self.device))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _stored_type(self.dtype))
        if not isinstance(self.priority, Priority):
            known = ", ".join(f"Priority.{priority.name}" for priority in Priority)
            raise InvalidArgumentError(f"priority={show(self.priority)} must be one of {known}")
        if self.tokens is not None:
            object.__setattr__(self, "tokens", as_token_array(self.tokens))
            if len(self.tokens) != self.initial_tokens:
                raise InvalidArgumentError(
                    f"request {self.request_id!r} has {len(self.tokens)} tokens, initial_tokens={self.initial_tokens}"
                )
        if self.max_sequence_length is not None and self.max_sequence_length < self.initial_tokens:
            raise InvalidArgumentError(
                f"request {self.request_id!r} starts with {self.initial_tokens} tokens, more than its "
                f"max_sequence_length={self.max_sequence_length}"
            )

    def estimated_memory_bytes(self, block_size: int = 16) -> int:
        """Bytes of the blocks that the longest such sequence takes; needs the shape of the model."""
        size = as_count(block_size, "block_size", minimum=1)
        if self.num_layers is None or self.num_heads is None or self.head_dim is None:
            raise InvalidArgumentError("an estimate needs num_layers, num_heads and head_dim")
        layer = LayerSpec(self.num_heads, self.head_dim, self.dtype or DType.FLOAT16)
        longest = self.initial_tokens if self.max_sequence_length is None else self.max_sequence_length
        return ceil_div(longest, size) * size * self.num_layers * layer.bytes_per_token

    @property
    def retention(self) -> Retention | None:
        priority = int(self.priority)
        return None if priority == Priority.NORMAL else Retention([TokenRange(0, None, priority)], priority)


def check_request(request: AllocationRequest, config: KVCacheConfig, device: str) -> None:
    """Raises `InvalidArgumentError` where a request describes another model than the cache was made for."""
    layer, asked = config.attention_layer(0), request.device
    for name, given, there in (
        ("num_layers", request.num_layers, len(config.layers)),
        ("num_heads", request.num_heads, layer.kv_heads),
        ("head_dim", request.head_dim, layer.head_dim),
        ("dtype", request.dtype and request.dtype.value, layer.dtype.value),
        ("device", asked, asked if asked and _is_same_device(asked, device) else device),
    ):
        if given is not None and given != there:
            raise InvalidArgumentError(f"request {request.request_id!r} asks for {name}={given}; the cache has {there}")


def _stored_type(dtype: Any) -> DType:
    return DType.parse(dtype.value if isinstance(dtype, DataType) else dtype)
