"""ferrum's handles: a live request with its methods, or one by itself that a manager has given no blocks yet."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpool.checks import as_count, show
from kvpool.compat.adapter import device_name
from kvpool.compat.ferrum_types import BlockTable
from kvpool.config import DType, LayerSpec
from kvpool.config.layers import ceil_div
from kvpool.core.handle import KVCacheHandle, is_among
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.manager import KVCacheManager

if TYPE_CHECKING:
    from torch import Tensor


class CacheHandleStats(NamedTuple):
    """What one request holds now. Blocks that forks or prefixes share count for each of their users."""

    memory_bytes: int
    blocks_allocated: int
    tokens_stored: int
    utilization: float  # tokens by places of the blocks
    last_access: float  # of this handle, by `time.monotonic`


class HandleOwner(Protocol):
    """What a handle asks of the manager that gave it blocks."""

    manager: KVCacheManager

    def read(self, request: Any, layer: int) -> tuple[Tensor, Tensor | None]: ...
    def _clone(self, source: PagedKvCacheHandle) -> PagedKvCacheHandle: ...
    def _count_tokens(self, handle: PagedKvCacheHandle, num_tokens: int) -> None: ...
    def _num_sharing(self, handle: PagedKvCacheHandle) -> int: ...


class PagedKvCacheHandle:
    """A request with ferrum's methods. While it is live, `handle` is the same in kvpool's words.

    `PagedKvCacheHandle(request_id, device, block_size, num_layers, num_heads, head_dim)` is one by itself, with a table that
    `add_block` fills in. One without blocks becomes live when a manager first gives it some: `allocate_blocks`, `extend`,
    `share_prefix_blocks`.

    >>> handle = PagedKvCacheHandle("r", "cpu", 16, 32, 32, 128)
    >>> handle.add_block(0, 5)
    >>> handle.get_physical_block(0), handle.num_blocks(), handle.required_blocks(17)
    (5, 1, 2)
    """

    def __init__(
        self, request_id: Hashable, device: Any, block_size: int, num_layers: int, num_heads: int, head_dim: int
    ) -> None:
        is_among(request_id, {})  # refuses what cannot be an id
        self.request_id = request_id
        self.last_access = time.monotonic()
        self._device = device_name(device)
        self._block_size = as_count(block_size, "block_size", minimum=1)
        self._num_layers = as_count(num_layers, "num_layers", minimum=1)
        self._num_heads = as_count(num_heads, "num_heads", minimum=1)
        self._head_dim = as_count(head_dim, "head_dim", minimum=1)
        self._table: list[int | None] = []  # of a handle by itself, and its tokens
        self._num_tokens = 0
        self._owner: HandleOwner | None = None
        self._live: KVCacheHandle | None = None
        self.limit: int | None = None  # the request's max_sequence_length
        self.uncounted = 0  # places that were written before `extend` or `set_num_tokens` counted them

    def _begin(self, owner: HandleOwner, live: KVCacheHandle, limit: int | None = None, uncounted: int = 0) -> None:
        """A manager has given it blocks."""
        self._owner, self._live = owner, live
        self.limit, self.uncounted = limit, uncounted

    def _end(self) -> None:
        """It is by itself again: the manager's request was not to be."""
        self._owner = self._live = None

    @property
    def is_attached(self) -> bool:
        """Whether a manager has ever given it blocks."""
        return self._live is not None

    @property
    def handle(self) -> KVCacheHandle:
        """The manager's handle of the request."""
        return self._attached()[1]

    def _attached(self) -> tuple[HandleOwner, KVCacheHandle]:
        if self._owner is None or self._live is None:
            raise SequenceStateError(
                f"the handle of request {show(self.request_id)} has no blocks in a manager: allocate(AllocationRequest(...)) "
                "makes handles that have, and allocate_blocks(handle, n) gives it some"
            )
        return self._owner, self._live

    # --- the shape ---------------------------------------------------------------------------------------------------

    def num_layers(self) -> int:
        return self._num_layers

    def num_heads(self) -> int:
        """KV heads of a layer."""
        return self._num_heads

    def head_dim(self) -> int:
        return self._head_dim

    def device(self) -> str:
        return self._device

    def required_blocks(self, num_tokens: int) -> int:
        """Blocks for a number of tokens."""
        return ceil_div(as_count(num_tokens, "num_tokens"), self._block_size)

    # --- tokens and blocks -------------------------------------------------------------------------------------------

    def num_tokens(self) -> int:
        """Tokens that the caller counted: at the start, by `extend`, or by `set_num_tokens`."""
        return self._num_tokens if self._live is None else max(0, self._live.num_reserved - self.uncounted)

    def set_num_tokens(self, tokens: int) -> None:
        """Sets the number of tokens, at most as many as the blocks hold. Nothing is freed or forgotten when it falls."""
        tokens = as_count(tokens, "tokens")
        if self._owner is None:
            self._num_tokens = tokens
        else:
            self._owner._count_tokens(self, tokens)

    def num_blocks(self) -> int:
        return len(self.get_physical_blocks()) if self._live is None else self._live.num_blocks

    def block_table(self) -> BlockTable:
        """A copy of the table as it stands. All are None while the request is swapped out."""
        ids = self._table[:] if self._live is None else list(self._live.block_table())
        return BlockTable(self._block_size, ids, self.num_tokens())

    def get_physical_block(self, logical_id: int) -> int | None:
        """The block id behind a logical one; None past the end and while the request is swapped out. 0 is an id."""
        table, index = self.block_table().logical_to_physical, as_count(logical_id, "logical_id")
        return table[index] if index < len(table) else None

    def get_physical_blocks(self) -> list[int]:
        return self.block_table().physical_blocks

    def add_block(self, logical_id: int, physical_id: int) -> None:
        """Writes an entry into the table of a handle by itself; a live one gets its blocks from the manager."""
        index, block = as_count(logical_id, "logical_id", maximum=2**31), as_count(physical_id, "physical_id")
        if self._live is not None:
            raise InvalidArgumentError(
                f"request {show(self.request_id)} is live, so its blocks come from the manager: allocate_blocks(handle, n), "
                f"not add_block({index}, {block})"
            )
        self._table += [None] * (index + 1 - len(self._table))
        self._table[index] = block

    def block_table_mut(self) -> None:
        """Refused: the manager keeps the table."""
        raise InvalidArgumentError(
            "block_table() is a copy, because only the manager changes tables: allocate_blocks, extend, share_prefix_blocks "
            "and deallocate do, and add_block for a handle by itself"
        )

    # --- references --------------------------------------------------------------------------------------------------

    def ref_count(self) -> int:
        """Live requests that hold some of its blocks, itself included; 0 when it has ended."""
        return self._owner._num_sharing(self) if self._owner is not None else 1

    def is_cow(self) -> bool:
        """Whether another live request holds some of its blocks, so that these are copied before they are written."""
        return self.ref_count() > 1

    def add_ref(self) -> None:
        """Refused: every holder is a request."""
        raise InvalidArgumentError(
            "references are not counted by hand: clone_handle() makes a second holder of the blocks"
        )

    def remove_ref(self) -> None:
        """Refused: every holder is a request."""
        raise InvalidArgumentError(
            "references are not counted by hand: deallocate(handle) ends this holder of the blocks"
        )

    def clone_handle(self) -> PagedKvCacheHandle:
        """A request of its own that shares every block; whoever writes into one gets a copy of it first."""
        return self._attached()[0]._clone(self)

    # --- what it holds -----------------------------------------------------------------------------------------------

    def key_cache(self, layer: int) -> Tensor:
        """The keys of all written tokens of a layer, gathered: [token, head, element]."""
        owner, live = self._attached()
        return owner.read(live, layer)[0]

    def value_cache(self, layer: int) -> Tensor | None:
        owner, live = self._attached()
        return owner.read(live, layer)[1]

    def stats(self) -> CacheHandleStats:
        """What it holds now. A handle by itself counts as float16."""
        blocks, tokens, places = self.num_blocks(), self.num_tokens(), self.num_blocks() * self._block_size
        used = tokens / places if places else 0.0
        if self._owner is not None:
            block_bytes = self._owner.manager.config.block_bytes
        else:
            layer = LayerSpec(self._num_heads, self._head_dim, DType.FLOAT16)
            block_bytes = self._block_size * self._num_layers * layer.bytes_per_token
        return CacheHandleStats(blocks * block_bytes, blocks, tokens, used, self.last_access)

    def is_valid(self) -> bool:
        return self._live is None or self._live.is_live

    def cache_id(self) -> str:
        return f"paged-{self.request_id}"

    def as_any(self) -> PagedKvCacheHandle:
        return self

    def downcast_ref(self, kind: type) -> PagedKvCacheHandle | None:
        """Itself, if it is of that kind."""
        if not isinstance(kind, type):
            raise InvalidArgumentError(f"downcast_ref takes a class, such as PagedKvCacheHandle, got {show(kind)}")
        return self if isinstance(self, kind) else None

    def __await__(self) -> Generator[None, None, PagedKvCacheHandle]:
        """ferrum's `allocate`, `extend` and `deallocate` are awaited. They are done when they return."""
        return self
        yield

    def __repr__(self) -> str:
        state = "by itself" if self._live is None else "live" if self._live.is_live else "ended"
        return f"<PagedKvCacheHandle {show(self.request_id)} {state}>"
