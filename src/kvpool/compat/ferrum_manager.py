"""ferrum's manager made from its own configuration: allocation requests in, its own handles out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from kvpool.compat.ferrum import FerrumCalls
from kvpool.compat.ferrum_handle import AllocationRequest, PagedKvCacheHandle
from kvpool.compat.known_settings import checked_settings
from kvpool.config import DType, KVCacheConfig, LayerSpec
from kvpool.config.layers import check_bool, check_int, check_number
from kvpool.errors import ConfigError, InvalidArgumentError, SequenceStateError
from kvpool.manager import KVCacheManager
from kvpool.sequences.handle import KVCacheHandle


@checked_settings
@dataclass(frozen=True)
class PagedKvCacheConfig:
    """ferrum's configuration, with its defaults. The watermarks are fractions of free blocks.

    Below `low_watermark` pressure is HIGH, below `high_watermark` CRITICAL (MEDIUM comes at three quarters of the way to
    HIGH). `num_heads` are KV heads; `dtype` is what is stored.
    """

    block_size: int = 16
    max_gpu_blocks: int = 1024
    max_cpu_blocks: int = 512
    enable_cow: bool = True
    enable_swapping: bool = True
    low_watermark: float = 0.3
    high_watermark: float = 0.1
    num_layers: int = 32
    num_heads: int = 32
    head_dim: int = 128
    enable_prefix_cache: bool = True
    max_prefixes: int = 100
    min_prefix_length: int = 16
    dtype: DType | str = DType.FLOAT16

    def __post_init__(self) -> None:
        check_bool("enable_cow", self.enable_cow)
        check_bool("enable_swapping", self.enable_swapping)
        check_int("num_layers", self.num_layers, 1, 2**16)
        low = check_number("low_watermark", self.low_watermark, "a fraction of free blocks")
        high = check_number("high_watermark", self.high_watermark, "a fraction of free blocks")
        if not 0 <= high < low < 1:
            raise ConfigError(
                f"watermarks are fractions of free blocks: 0 <= high_watermark={high} < low_watermark={low} < 1"
            )

    @property
    def cache_config(self) -> KVCacheConfig:
        """The same in kvpool's words."""
        layer = LayerSpec(self.num_heads, self.head_dim, DType.parse(self.dtype))
        high = 1 - self.low_watermark
        return KVCacheConfig(
            [layer] * self.num_layers, self.block_size, gpu_blocks=self.max_gpu_blocks,
            host_blocks=self.max_cpu_blocks if self.enable_swapping else 0, offload_on_evict=False, watermark=0.0,
            enable_prefix_caching=self.enable_prefix_cache, partial_match=self.enable_cow,
            pressure_levels=(0.75 * high, high, 1 - self.high_watermark),
        )  # fmt: skip


class PagedKvCacheManager(FerrumCalls):
    """`PagedKvCacheManager(device, config)` with ferrum's `AllocationRequest` and handles.

    >>> manager = PagedKvCacheManager.with_defaults("cpu", block_size=16, max_blocks=100)
    >>> handle = manager.allocate(AllocationRequest("r", initial_tokens=64, num_layers=32, num_heads=32, head_dim=128))
    >>> handle.num_tokens(), handle.stats().blocks_allocated
    (64, 4)
    """

    def __init__(self, device: str = "cuda", config: PagedKvCacheConfig | None = None) -> None:
        self.config = PagedKvCacheConfig() if config is None else config
        if not isinstance(self.config, PagedKvCacheConfig):
            raise ConfigError(f"PagedKvCacheManager takes a PagedKvCacheConfig, got {type(config).__name__}")
        self.device = str(device)
        super().__init__(
            KVCacheManager(self.config.cache_config),
            device=self.device,
            max_prefixes=self.config.max_prefixes,
            min_prefix_length=self.config.min_prefix_length,
        )
        self._clones = itertools.count(1)
        self._handles: dict[Hashable, PagedKvCacheHandle] = {}

    @classmethod
    def with_defaults(cls, device: str, block_size: int, max_blocks: int) -> PagedKvCacheManager:
        """ferrum's default model with blocks of this size, half as many of them on the host."""
        return cls(device, PagedKvCacheConfig(block_size, max_gpu_blocks=max_blocks, max_cpu_blocks=max_blocks // 2))

    def handle(self, request: Any) -> KVCacheHandle:
        """The manager's handle of a request, given by its id or by either handle."""
        if isinstance(request, PagedKvCacheHandle):
            request.last_access = time.monotonic()
            return request.handle
        return super().handle(request)

    # --- the life of a request ---------------------------------------------------------------------------------------

    def can_allocate(self, request: AllocationRequest) -> bool:
        """Whether the request's first tokens fit now."""
        request.check(self.manager.config, self.device)
        return bool(self.manager.can_allocate(request.tokens, num_tokens=self._num_tokens(request)))

    def allocate(self, request: AllocationRequest) -> PagedKvCacheHandle:
        """Blocks for the request's first tokens, all or none."""
        if not isinstance(request, AllocationRequest):
            raise InvalidArgumentError(f"allocate takes an AllocationRequest, got {request!r}")
        request.check(self.manager.config, self.device)
        handle = self.manager.allocate(
            request.request_id, request.tokens, num_tokens=self._num_tokens(request), retention=request.retention
        )
        return self._wrap(handle, request)

    def _num_tokens(self, request: AllocationRequest) -> int | None:
        if request.tokens is None:
            return request.initial_tokens
        if len(request.tokens) != request.initial_tokens:
            raise InvalidArgumentError(
                f"request {request.request_id!r} has {len(request.tokens)} tokens, initial_tokens={request.initial_tokens}"
            )
        return None

    def extend(self, handle: Hashable | PagedKvCacheHandle, additional_tokens: int = 1) -> PagedKvCacheHandle:
        """Places for more tokens, up to the request's `max_sequence_length`."""
        found = self.handle(handle)
        wrapped = self._handles[found.request_id]
        limit, wanted = wrapped.request.max_sequence_length, found.num_reserved + additional_tokens
        if limit is not None and wanted > limit:
            raise SequenceStateError(
                f"request {found.request_id!r} cannot grow to {wanted} tokens: its limit is {limit}"
            )
        self.manager.extend(found, additional_tokens)
        return wrapped

    def deallocate(self, request_id: Any) -> None:
        handle = self.handle(request_id)
        name = handle.request_id
        super().deallocate(handle)
        self._handles.pop(name, None)

    def get_handle(self, request_id: Hashable) -> PagedKvCacheHandle | None:
        """The handle of a live request; None where there is none."""
        handle = self._handles.get(request_id)
        return handle if handle is not None and handle.is_valid() else None

    def list_handles(self) -> list[tuple[Hashable, PagedKvCacheHandle]]:
        return [(name, handle) for name, handle in self._handles.items() if handle.is_valid()]

    def swap_out(self, *requests: Any) -> int:
        """Moves whole requests to the host; refused where swapping is off."""
        if not self.config.enable_swapping:
            raise ConfigError("enable_swapping is False: there are no host blocks to swap to")
        return super().swap_out(*requests)

    # --- sharing -----------------------------------------------------------------------------------------------------

    def clone(self, source: PagedKvCacheHandle) -> PagedKvCacheHandle:
        """A request of its own, with an id of its own, that shares every block of another."""
        self._check_cow()
        name = f"{source.request_id}-clone-{next(self._clones)}"
        [child] = self.manager.fork(self.handle(source), name)
        return self._wrap(child, source.request)

    def share_prefix(
        self, source: Hashable | PagedKvCacheHandle, target: Hashable, num_tokens: int
    ) -> PagedKvCacheHandle:
        """A new request `target` that starts with the first `num_tokens` written tokens of `source`, in its blocks."""
        self._check_cow()
        parent = self.handle(source)
        return self._wrap(self._share_prefix(parent, target, num_tokens), self._handles[parent.request_id].request)

    def share_prefix_blocks(
        self, source: Hashable | PagedKvCacheHandle, target: Hashable, num_prefix_blocks: int
    ) -> PagedKvCacheHandle:
        """`share_prefix` by whole blocks, at most as many as `source` has written."""
        return self.share_prefix(source, target, self._tokens_in(self.handle(source), num_prefix_blocks))

    def _check_cow(self) -> None:
        if not self.config.enable_cow:
            raise ConfigError("enable_cow is False: live requests share no blocks, since writing to one needs a copy")

    def _wrap(self, handle: KVCacheHandle, request: AllocationRequest) -> PagedKvCacheHandle:
        wrapped = self._handles[handle.request_id] = PagedKvCacheHandle(self, handle, request)
        return wrapped
