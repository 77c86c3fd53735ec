"""What all seed spellings share: a manager, and requests named by their ids instead of their handles."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kvpool.blocks.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager


class SeedSpelling:
    """Holds the manager that does the work."""

    def __init__(self, manager: KVCacheManager) -> None:
        if not isinstance(manager, KVCacheManager):
            raise InvalidArgumentError(f"{type(self).__name__} wraps a KVCacheManager, got {manager!r}")
        self.manager = manager

    def handle(self, request: Hashable | KVCacheHandle) -> KVCacheHandle:
        """The handle of a request, given by its id or its handle."""
        return request if isinstance(request, KVCacheHandle) else self.manager.get(request)

    def table(self, request: Hashable | KVCacheHandle, group: int) -> list[int | None]:
        """Block ids of one layer group; None where a block left its window."""
        return list(self.handle(request).block_table(group))


class CountingSpelling(SeedSpelling):
    """`allocate` and `extend` by numbers of tokens, as PyAgent and ferrum spell them."""

    def allocate(self, request_id: Hashable, num_tokens: int | None = None, *, tokens: Any = None) -> KVCacheHandle:
        """Blocks for a number of tokens; or for the prompt's `tokens`, whose cached prefix is then reused."""
        return self.manager.allocate(request_id, tokens, num_tokens=num_tokens)

    def extend(self, request_id: Hashable | KVCacheHandle, additional_tokens: int = 1) -> KVCacheHandle:
        """Places for more tokens. A new block is taken only when the last one is full; a shared one is copied first."""
        handle = self.handle(request_id)
        self.manager.extend(handle, additional_tokens)
        return handle
