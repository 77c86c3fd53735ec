"""ferrum's manager made from its own configuration: allocation requests in, its own handles out."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.checks import as_count, check_bool, check_int, check_number, show
from kvpool.compat.adapter import checked_settings, device_name
from kvpool.compat.ferrum_calls import FerrumCalls
from kvpool.compat.ferrum_handle import CacheHandleStats, PagedKvCacheHandle
from kvpool.compat.ferrum_types import AllocationRequest, check_request
from kvpool.config import DType, KVCacheConfig, LayerSpec
from kvpool.config.layers import MAX_BLOCKS
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import ConfigError, InvalidArgumentError, SequenceStateError, UnknownRequestError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.stats import MemoryPressure


@checked_settings
@dataclass(frozen=True)
class PagedKvCacheConfig:
    """ferrum's configuration, with its defaults. The watermarks are fractions of free blocks.

    While less than `low_watermark` of the blocks are free, pressure is HIGH; while less than `high_watermark`, CRITICAL:
    with 0.0 never.
    Idle cached blocks count as free. `num_heads` are KV heads; `dtype` is what is stored.
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
        for name in ("enable_cow", "enable_swapping", "enable_prefix_cache"):
            check_bool(getattr(self, name), name)
        for name in ("block_size", "max_gpu_blocks", "num_heads", "head_dim"):
            check_int(getattr(self, name), name, 1, MAX_BLOCKS)
        for name in ("max_cpu_blocks", "max_prefixes", "min_prefix_length"):
            check_int(getattr(self, name), name, 0, MAX_BLOCKS)
        check_int(self.num_layers, "num_layers", 1, 2**16)
        low = check_number(self.low_watermark, "low_watermark", "a fraction of free blocks")
        high = check_number(self.high_watermark, "high_watermark", "a fraction of free blocks")
        if not 0 <= high <= low <= 1:
            raise ConfigError(
                f"watermarks are fractions of free blocks: 0 <= high_watermark={high} <= low_watermark={low} <= 1"
            )
        self.cache_config  # noqa: B018 - what it does not take is refused here, before a manager is made

    @property
    def cache_config(self) -> KVCacheConfig:
        """The same in kvpool's words."""
        layer = LayerSpec(self.num_heads, self.head_dim, DType.parse(self.dtype))
        high, critical = self._used_below(self.low_watermark), self._used_below(self.high_watermark)
        return KVCacheConfig(
            [layer] * int(self.num_layers),
            self.block_size,
            gpu_blocks=self.max_gpu_blocks,
            host_blocks=self.max_cpu_blocks if self.enable_swapping else 0,
            offload_on_evict=False,
            watermark=0.0,
            enable_prefix_caching=self.enable_prefix_cache,
            partial_match=self.enable_cow,
            pressure_levels=(high, high, critical),
        )

    def _used_below(self, watermark: float) -> float:
        """The smallest fraction of used blocks at which less than `watermark` of them are free."""
        blocks = self.max_gpu_blocks
        free = int(watermark * blocks) + 1  # rounding may leave it one off, either way
        below = ((blocks - n) / blocks for n in range(min(free, blocks), -1, -1) if n / blocks < watermark)
        return next(below, 1.0)  # nothing is below 0.0: `check_pressure` knows


class PagedKvCacheManager(FerrumCalls):
    """`PagedKvCacheManager(device, config)` with ferrum's `AllocationRequest` and handles.

    What is `async` in ferrum may be awaited here, and need not be: it is done when it returns.

    >>> manager = PagedKvCacheManager.with_defaults("cpu", block_size=16, max_blocks=100)
    >>> handle = manager.allocate(AllocationRequest("r", initial_tokens=64, num_layers=32, num_heads=32, head_dim=128))
    >>> handle.num_tokens(), handle.stats().blocks_allocated
    (64, 4)
    """

    def __init__(self, device: Any = "cuda", config: PagedKvCacheConfig | None = None) -> None:
        self.config = PagedKvCacheConfig() if config is None else config
        if not isinstance(self.config, PagedKvCacheConfig):
            raise ConfigError(f"PagedKvCacheManager takes a PagedKvCacheConfig, got {type(config).__name__}")
        self.device = device_name(device)
        super().__init__(
            KVCacheManager(self.config.cache_config),
            device=self.device,
            max_prefixes=self.config.max_prefixes,
            min_prefix_length=self.config.min_prefix_length,
        )
        self._clones = itertools.count(1)
        self._naming = threading.Lock()  # nobody asks the manager under it
        self._handles: dict[Hashable, PagedKvCacheHandle] = {}

    @classmethod
    def with_defaults(cls, device: Any, block_size: int, max_blocks: int) -> PagedKvCacheManager:
        """ferrum's default model with blocks of this size, half as many of them on the host."""
        half = check_int(max_blocks, "max_blocks", 1, MAX_BLOCKS) // 2
        return cls(device, PagedKvCacheConfig(block_size, max_gpu_blocks=max_blocks, max_cpu_blocks=half))

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<PagedKvCacheManager block_size={self.config.block_size} total_gpu_blocks={stats.total_blocks} "
            f"free_gpu_blocks={stats.free_blocks} active_handles={stats.active_caches}>"
        )

    # --- handles -----------------------------------------------------------------------------------------------------

    def handle(self, request: Any) -> KVCacheHandle:
        """The manager's handle of a request, given by its id or by either handle."""
        if isinstance(request, PagedKvCacheHandle):
            request.last_access = time.monotonic()
            request = request.handle
        return super().handle(request)

    def get_handle(self, request_id: Hashable) -> PagedKvCacheHandle | None:
        """The handle of a live request; None where there is none."""
        try:
            return self._handle_of(self.manager.get(request_id))
        except UnknownRequestError:
            return None

    def list_handles(self) -> list[tuple[Hashable, PagedKvCacheHandle]]:
        return [(live.request_id, self._handle_of(live)) for live in self.manager.handles]

    def _handle_of(self, live: KVCacheHandle) -> PagedKvCacheHandle:
        """ferrum's handle of a live request, also of one that the manager was asked for directly."""
        known = self._handles.get(live.request_id)
        if known is not None and known.is_attached and known.handle is live:
            return known
        return self._register(self._new_handle(live.request_id), live)

    def _new_handle(self, request_id: Hashable) -> PagedKvCacheHandle:
        config = self.config
        return PagedKvCacheHandle(
            request_id, self.device, config.block_size, config.num_layers, config.num_heads, config.head_dim
        )

    def _register(
        self, handle: PagedKvCacheHandle, live: KVCacheHandle, limit: int | None = None, uncounted: int = 0
    ) -> PagedKvCacheHandle:
        handle._begin(self, live, limit, uncounted)
        is_large = len(self._handles) > 2 * self.manager.stats().num_sequences + 64
        with self._naming:
            if is_large:  # some were freed behind our back
                self._handles = {name: known for name, known in self._handles.items() if known.is_valid()}
            self._handles[live.request_id] = handle
        return handle

    def _begun(self, request: Any) -> tuple[PagedKvCacheHandle, bool]:
        """ferrum's handle of a request, and whether it was by itself until now: then it is a live one without blocks."""
        if not isinstance(request, PagedKvCacheHandle) or request.is_attached:
            return self._handle_of(self.handle(request)), False
        if request.num_blocks() or request.num_tokens():
            raise SequenceStateError(
                f"the table of request {show(request.request_id)} was filled in by hand; a manager gives blocks to handles "
                "that have none"
            )
        shape = request.num_layers(), request.num_heads(), request.head_dim(), request.device()
        check_request(AllocationRequest(request.request_id, 0, None, *shape), self.manager.config, self.device)
        if request.block_table().block_size != self.config.block_size:
            raise InvalidArgumentError(
                f"the handle of request {show(request.request_id)} has block_size={request.block_table().block_size}; the "
                f"cache has {self.config.block_size}"
            )
        return self._register(request, self.manager.allocate(request.request_id, num_tokens=1, reserve=0)), True

    def _undo(self, handle: PagedKvCacheHandle) -> None:
        """It was by itself, and what it became live for failed."""
        self.manager.free(handle.handle)
        handle._end()

    # --- the life of a request ---------------------------------------------------------------------------------------

    def can_allocate(self, request: AllocationRequest) -> bool:
        """Whether the request's first tokens fit now."""
        self._check(request)
        return bool(self.manager.can_allocate(**_prompt(request)))

    def allocate(self, request: AllocationRequest) -> PagedKvCacheHandle:
        """Blocks for the request's first tokens, all or none."""
        self._check(request)
        self._notify_pressure()
        live = self.manager.allocate(request.request_id, retention=request.retention, **_prompt(request))
        return self._register(self._new_handle(request.request_id), live, request.max_sequence_length)

    def _check(self, request: AllocationRequest) -> None:
        if not isinstance(request, AllocationRequest):
            raise InvalidArgumentError(f"an AllocationRequest is asked for, got {show(request)}")
        if isinstance(request.request_id, PagedKvCacheHandle):
            raise InvalidArgumentError(f"a request id was asked for, got {show(request.request_id)}; give an id")
        check_request(request, self.manager.config, self.device)

    def extend(self, handle: Any, additional_tokens: int = 1) -> PagedKvCacheHandle:
        """Places for more tokens, up to the request's `max_sequence_length`."""
        count = as_count(additional_tokens, "additional_tokens")
        known, fresh = self._begun(handle)
        try:
            self._set_tokens(known, known.num_tokens() + count)
        except Exception:
            if fresh:
                self._undo(known)
            raise
        return known

    def _count_tokens(self, handle: PagedKvCacheHandle, num_tokens: int) -> None:
        """`handle.set_num_tokens`: at most as many as its blocks hold."""
        places = self.handle(handle).num_blocks * self.config.block_size
        if num_tokens > places:
            raise SequenceStateError(
                f"request {handle.request_id!r} has blocks for {places} tokens, not for {num_tokens}; "
                "extend(handle, n) and allocate_blocks(handle, n) take more"
            )
        self._set_tokens(handle, num_tokens)

    def _set_tokens(self, handle: PagedKvCacheHandle, num_tokens: int) -> None:
        live = self.handle(handle)
        self._check_limit(handle, num_tokens)
        if num_tokens > live.num_reserved:
            self.manager.extend(live, num_tokens - live.num_reserved)
        handle.uncounted = live.num_reserved - num_tokens

    def _check_limit(self, handle: PagedKvCacheHandle, num_tokens: int) -> None:
        if handle.limit is not None and num_tokens > handle.limit:
            raise SequenceStateError(
                f"request {handle.request_id!r} cannot grow to {num_tokens} tokens: its max_sequence_length is {handle.limit}"
            )

    def allocate_blocks(self, handle: Any, num_blocks: int) -> list[int]:
        """More blocks behind those of a request, without counting tokens; returns their ids."""
        count, size = as_count(num_blocks, "num_blocks"), self.config.block_size
        known, fresh = self._begun(handle)
        try:
            self._check_limit(known, (known.num_blocks() + count - 1) * size + 1 if count else 0)
            return super().allocate_blocks(known, count)
        except Exception:
            if fresh:
                self._undo(known)
            raise

    def _make_places(self, handle: KVCacheHandle, stop: int) -> None:
        """What has a block can be written, though nobody has counted it yet."""
        if stop > handle.num_blocks * self.config.block_size:
            super()._make_places(handle, stop)
        known = self._handle_of(handle)
        self._check_limit(known, stop)
        count = stop - handle.num_reserved
        self.manager.extend(handle, count)
        known.uncounted += count

    def deallocate(self, request_id: Any) -> PagedKvCacheHandle:
        """Ends a request, given by its id or a handle. What it stored stays cached; an unknown id is refused."""
        known = self._handle_of(self.handle(request_id))
        self.manager.free(known.handle)
        with self._naming:
            self._handles.pop(known.request_id, None)
        return known

    def handle_stats(self, request: Any) -> CacheHandleStats:
        """What one request holds now, wherever it is."""
        return self._handle_of(self.handle(request)).stats()

    def swap_out(self, *requests: Any) -> int:
        """Moves whole requests to the host; refused where swapping is off."""
        self._check_swapping()
        return super().swap_out(*requests)

    def swap_in(self, *requests: Any) -> int:
        """Brings requests back; refused where swapping is off."""
        self._check_swapping()
        return super().swap_in(*requests)

    def _check_swapping(self) -> None:
        if not self.config.enable_swapping:
            raise ConfigError("enable_swapping is False: there are no host blocks to swap to")

    def check_pressure(self) -> MemoryPressure:
        level = super().check_pressure()
        if level is MemoryPressure.CRITICAL and not self.config.high_watermark:
            level = MemoryPressure.HIGH
        return MemoryPressure.LOW if level is MemoryPressure.HIGH and not self.config.low_watermark else level

    # --- sharing -----------------------------------------------------------------------------------------------------

    def _num_sharing(self, handle: PagedKvCacheHandle) -> int:
        """Live requests that hold some of its blocks, itself included."""
        live = handle.handle
        if not live.is_live:
            return 0
        own, swapped = _blocks(live), live.is_swapped
        others = (other for other in self.manager.handles if other is not live and other.is_swapped == swapped)
        return 1 + sum(bool(np.isin(own, _blocks(other)).any()) for other in others)

    def _clone(self, source: PagedKvCacheHandle) -> PagedKvCacheHandle:
        """A request of its own, with an id of its own, that shares every block of another."""
        self._check_cow()
        known = self._handle_of(self.handle(source))
        name = f"{known.request_id}-clone-{next(self._clones)}"
        [child] = self.manager.fork(known.handle, name)
        return self._register(self._new_handle(name), child, known.limit, known.uncounted)

    def share_prefix(self, source: Any, target: Any, num_tokens: int) -> PagedKvCacheHandle:
        """`target` starts with the first `num_tokens` written tokens of `source`, in its blocks.

        The target is the id of a new request, or a handle that has written nothing yet: its own blocks are freed, and as many
        as it had behind the shared ones are taken before. Share first and extend then, and none are needed.
        """
        self._check_cow()
        name = target.request_id if isinstance(target, PagedKvCacheHandle) else target
        with self._source(source, name) as parent:
            return self._share(parent, target, num_tokens)

    def share_prefix_blocks(self, source: Any, target: Any, num_prefix_blocks: int) -> PagedKvCacheHandle:
        """`share_prefix` by whole blocks, at most as many as `source` has written."""
        self._check_cow()
        name = target.request_id if isinstance(target, PagedKvCacheHandle) else target
        with self._source(source, name) as parent:
            return self._share(parent, target, self._tokens_in(parent, num_prefix_blocks))

    def _share(self, parent: KVCacheHandle, target: Any, num_tokens: int) -> PagedKvCacheHandle:
        if not isinstance(target, PagedKvCacheHandle):
            known = self._handles.get(parent.request_id)
            return self._register(
                self._new_handle(target),
                self._share_prefix_with_new(parent, target, num_tokens),
                None if known is None else known.limit,
            )
        handle, fresh = self._begun(target)
        try:
            live = self._share_into(parent, handle, num_tokens)
        except Exception:
            if fresh:
                self._undo(handle)
            raise
        return self._register(handle, live, handle.limit)

    def _share_into(self, parent: KVCacheHandle, handle: PagedKvCacheHandle, num_tokens: int) -> KVCacheHandle:
        """Puts another request in the place of one that has written nothing: it starts with the parent's tokens."""
        manager, old, size = self.manager, self.handle(handle), self.config.block_size
        if old is parent or old.num_written:
            raise SequenceStateError(
                f"request {handle.request_id!r} has {old.num_written} written tokens, which shared blocks would replace; "
                "share into a request that has written nothing"
            )
        self._check_limit(handle, num_tokens)
        tokens, places = max(handle.num_tokens(), num_tokens), old.num_blocks * size
        new = self._share_prefix(parent, ("shared with", handle.request_id), num_tokens)
        try:
            manager.extend(new, tokens - num_tokens, lookahead=max(0, places - tokens))
        except Exception:
            manager.free(new)
            raise
        manager.free(old)
        [live] = manager.fork(new, handle.request_id)
        manager.free(new)
        live.retention = old.retention
        return live

    def _check_cow(self) -> None:
        if not self.config.enable_cow:
            raise ConfigError("enable_cow is False: live requests share no blocks, since writing to one needs a copy")


def _prompt(request: AllocationRequest) -> dict[str, Any]:
    """A request's first tokens as the manager's arguments. It may begin with none."""
    if not request.initial_tokens:
        return {"num_tokens": 1, "reserve": 0}
    return {"num_tokens": request.initial_tokens} if request.tokens is None else {"tokens": request.tokens}


def _blocks(handle: KVCacheHandle) -> Int32Array:
    """The ids of a request's blocks, on the GPU or, while it is swapped out, on the host."""
    ids = handle.block_ids() if handle.swapped is None else handle.swapped[0]
    return ids[ids >= 0]
