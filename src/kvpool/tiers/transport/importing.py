"""Bytes from tiers become cached blocks: a lease takes blocks, they are written whole, and the commit publishes them.

The lease holds them until their request has been admitted, so that nobody evicts what was just loaded. It is only a
favour: when memory is short, leases end first, and what they held stays cached like anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch

from kvpool.errors import KVPoolError, OutOfBlocksError, SequenceStateError
from kvpool.manager import KVCacheManager
from kvpool.quiet import QuietLog
from kvpool.scheduling import Request
from kvpool.sequences.handle import KVCacheHandle
from kvpool.storage import DataPlane
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.prefix_options import BlockKeys, next_query

CHUNK_BLOCKS = 64  # taken at a time: of windowed groups all but the last window is given back before the next ones
log = logging.getLogger("kvpool")


class Lease(NamedTuple):
    """Blocks held for a request that has not been admitted yet."""

    owner: Hashable  # the id of the request
    num_blocks: int


class Leases:
    """The leases of one engine, by the request that each is for; oldest first."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._handles: dict[Hashable, KVCacheHandle] = {}
        self._most = min(manager.num_blocks(pool.index) for pool in manager.config.pools) // 2

    def __len__(self) -> int:
        return len(self._handles)

    def view(self) -> tuple[Lease, ...]:
        """Who has which leases."""
        return tuple(Lease(owner, handle.num_blocks) for owner, handle in self._handles.items())

    def keep(self, owner: Hashable, handle: KVCacheHandle) -> None:
        """Holds a handle for a request. Together, leases hold no more than half of the pool: older ones give way."""
        self.end(owner)
        held = handle.num_blocks + sum(other.num_blocks for other in self._handles.values())
        for other in list(self._handles):
            if held <= self._most:
                break
            held -= self._handles[other].num_blocks
            self.end(other)
        self._handles[owner] = handle

    def end(self, owner: Hashable) -> None:
        """Lets go of what is held for a request, if anything is."""
        handle = self._handles.pop(owner, None)
        if handle is not None:
            self._manager.free(handle)

    def end_all(self) -> None:
        """Memory is short: everything that is held becomes evictable."""
        for owner in list(self._handles):
            self.end(owner)


class Importer:
    """Writes what was fetched into blocks of the cache. Runs in the engine's thread."""

    def __init__(self, manager: KVCacheManager, plane: DataPlane, keys: BlockKeys) -> None:
        self._manager = manager
        self._plane = plane
        self._groups = keys.groups
        self._size = keys.block_size
        self._quiet = QuietLog(log)

    def bring(self, request: Request, fetch: Fetch) -> tuple[KVCacheHandle | None, list[Callable[[], None]]]:
        """A lease on the prefix of a request, now cached, and what to wait for before the fetched bytes go.

        None if there is no room, or if what the fetched blocks follow was evicted meanwhile: the request is then computed.
        """
        waits: list[Callable[[], None]] = []
        handle: KVCacheHandle | None = None
        try:
            handle = self._lease(request, fetch)
            if handle.num_cached_blocks < fetch.first:
                self._give_up(handle)
                return None, waits
            self._take_blocks(handle, request, fetch)
            self._write(handle, fetch, waits)
            self._manager.commit(handle)
        except KVPoolError as error:
            if not isinstance(error, OutOfBlocksError):
                self._quiet.warning("a prefix from a tier could not be used and is computed: %s", error)
            self._give_up(handle)
            handle = None
        return handle, waits

    def _lease(self, request: Request, fetch: Fetch) -> KVCacheHandle:
        """Holds what is cached of the prefix, and the first of the blocks behind it."""
        end = fetch.num_blocks * self._size
        return self._manager.allocate(
            ("lease", request.id, fetch.first),
            request.prompt[:end],
            scope=request.scope,
            reserve=min(end, (fetch.first + CHUNK_BLOCKS) * self._size),
            ttl=request.ttl,
            session=request.session,
            lease=True,
            multimodal=[item for item in request.multimodal if item.position < end] or None,
        )

    def _take_blocks(self, handle: KVCacheHandle, request: Request, fetch: Fetch) -> None:
        """Takes the other blocks, part by part, and gives back those that no later query reads."""
        end = fetch.num_blocks * self._size
        position = next_query(fetch.num_blocks, len(request.prompt), self._size)
        while handle.num_reserved < end:
            self._manager.narrow(handle, position)
            self._manager.extend(handle, min(CHUNK_BLOCKS * self._size, end - handle.num_reserved))
        self._manager.narrow(handle, min(position, end))

    def _write(self, handle: KVCacheHandle, fetch: Fetch, waits: list[Callable[[], None]]) -> None:
        """Writes the blocks that the cache did not have: exactly those that the lease holds there, or none."""
        first, parts = handle.num_cached_blocks, []
        for group, (columns, rows) in zip(self._groups, fetch.groups, strict=True):
            ids = handle.block_ids(group.index)
            begin, end = np.searchsorted(columns, [first, fetch.num_blocks]).tolist()
            if not np.array_equal(columns[begin:end], first + np.flatnonzero(ids[first:] >= 0)):
                raise SequenceStateError(f"what was loaded for layer group {group.index} is not what its window reads")
            if end > begin:
                parts.append((ids[columns[begin:end]].copy(), group.index, torch.from_numpy(rows[begin:end])))
        waits += [self._plane.write_blocks(*part) for part in parts]

    def _give_up(self, handle: KVCacheHandle | None) -> None:
        """What the lease holds that is not committed becomes free."""
        if handle is not None and handle.is_live:
            self._manager.free(handle)
