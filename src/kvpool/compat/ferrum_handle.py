"""ferrum's requests, handles and their statistics."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool.compat.known_settings import checked_settings
from kvpool.config import DType, KVCacheConfig, LayerSpec
from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.prefix.retention import Retention, TokenRange
from kvpool.sequences.block_table import BlockTable
from kvpool.sequences.handle import KVCacheHandle

if TYPE_CHECKING:
    from torch import Tensor


class Priority(IntEnum):
    """How long what a request computes should stay cached, as a priority of `Retention`."""

    LOW = 10
    NORMAL = 35
    HIGH = 70
    CRITICAL = 100


@checked_settings
@dataclass(frozen=True)
class AllocationRequest:
    """What ferrum asks blocks for. Shape, device and type must be the manager's: they are compared, not believed.

    Give `tokens` to reuse the cached beginning of a prompt. `max_sequence_length` bounds `extend`.
    """

    request_id: Hashable
    initial_tokens: int
    max_sequence_length: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    device: str | None = None
    dtype: DType | str | None = None
    priority: Priority = Priority.NORMAL
    tokens: Any = None

    def estimated_memory_bytes(self, block_size: int = 16) -> int:
        """Bytes of the blocks that the longest such sequence takes; needs the shape of the model."""
        if self.num_layers is None or self.num_heads is None or self.head_dim is None:
            raise InvalidArgumentError("an estimate needs num_layers, num_heads and head_dim")
        layer = LayerSpec(self.num_heads, self.head_dim, DType.parse(self.dtype or DType.FLOAT16))
        longest = self.initial_tokens if self.max_sequence_length is None else self.max_sequence_length
        return ceil_div(longest, block_size) * block_size * self.num_layers * layer.bytes_per_token

    def check(self, config: KVCacheConfig, device: str) -> None:
        """Raises `InvalidArgumentError` where the request describes another model than the cache was made for."""
        layer = config.layers[0]
        dtype = None if self.dtype is None else DType.parse(self.dtype)
        for name, given, there in (
            ("num_layers", self.num_layers, len(config.layers)),
            ("num_heads", self.num_heads, layer.kv_heads),
            ("head_dim", self.head_dim, layer.head_dim),
            ("dtype", dtype, layer.dtype),
            ("device", self.device, device),
        ):
            if given is not None and given != there:
                raise InvalidArgumentError(
                    f"request {self.request_id!r} asks for {name}={given!s}; the cache has {there!s}"
                )
        if self.max_sequence_length is not None and self.max_sequence_length < self.initial_tokens:
            raise InvalidArgumentError(
                f"request {self.request_id!r} starts with {self.initial_tokens} tokens, more than its "
                f"max_sequence_length={self.max_sequence_length}"
            )

    @property
    def retention(self) -> Retention | None:
        priority = int(Priority(self.priority))
        return None if priority == Priority.NORMAL else Retention([TokenRange(0, None, priority)], priority)


class CacheHandleStats(NamedTuple):
    """What one request holds now. Blocks that forks or prefixes share count for each of their users."""

    memory_bytes: int
    blocks_allocated: int
    tokens_stored: int
    utilization: float  # tokens by places of the blocks
    last_access: float  # of this handle, by `time.monotonic`


class HandleOwner(Protocol):
    """What a handle asks of the manager that made it."""

    manager: KVCacheManager
    device: str

    def read(self, handle: KVCacheHandle, layer: int) -> tuple[Tensor, Tensor | None]: ...
    def clone(self, source: PagedKvCacheHandle) -> PagedKvCacheHandle: ...
    def handle_stats(self, handle: KVCacheHandle) -> CacheHandleStats: ...


class PagedKvCacheHandle:
    """A live request with ferrum's methods; `handle` is the same in kvpool's words."""

    def __init__(self, manager: HandleOwner, handle: KVCacheHandle, request: AllocationRequest) -> None:
        self.manager = manager
        self.handle = handle
        self.request = request
        self.last_access = time.monotonic()

    @property
    def request_id(self) -> Hashable:
        return self.handle.request_id

    def num_tokens(self) -> int:
        """Tokens that have a place."""
        return self.handle.num_reserved

    def num_blocks(self) -> int:
        return self.handle.num_blocks

    def num_layers(self) -> int:
        return len(self.manager.manager.config.layers)

    def num_heads(self) -> int:
        """KV heads of a layer."""
        return self.manager.manager.config.layers[0].kv_heads

    def head_dim(self) -> int:
        return self.manager.manager.config.layers[0].head_dim

    def device(self) -> str:
        return self.manager.device

    def required_blocks(self, num_tokens: int) -> int:
        """Blocks for a number of tokens."""
        return self.manager.manager.config.blocks_for(num_tokens)[0]

    def block_table(self) -> BlockTable:
        return self.handle.block_table()

    def get_physical_block(self, logical_id: int) -> int | None:
        """The block id behind a logical one; None past the end and while the request is swapped out. 0 is an id."""
        table = self.block_table()
        return table[logical_id] if 0 <= logical_id < len(table) else None

    def get_physical_blocks(self) -> list[int]:
        return [block for block in self.block_table() if block is not None]

    def key_cache(self, layer: int) -> Tensor:
        """The keys of all written tokens of a layer, gathered: [token, head, element]."""
        return self.manager.read(self.handle, layer)[0]

    def value_cache(self, layer: int) -> Tensor | None:
        return self.manager.read(self.handle, layer)[1]

    def clone_handle(self) -> PagedKvCacheHandle:
        """A request of its own that shares every block; whoever writes into one gets a copy of it first."""
        return self.manager.clone(self)

    def stats(self) -> CacheHandleStats:
        return self.manager.handle_stats(self.handle)._replace(last_access=self.last_access)

    def is_valid(self) -> bool:
        return self.handle.is_live

    def cache_id(self) -> str:
        return f"paged-{self.request_id}"
