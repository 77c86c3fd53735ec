"""Moves blocks of a cache to tiers and from tiers.

To tiers: `Offers` makes the keys of full blocks, copies the blocks, and has them stored in the background. The copies wait
in staging memory or, for a tier whose memory the device can write to, on the device. The device makes them in order, so a
block may be evicted and overwritten right after. A block that every tier has is not copied at all.

From tiers: `Importer` allocates blocks under a lease, writes them, and commits them. The lease holds them until their request
is admitted, so that nobody evicts what was just loaded. When memory is short, leases end early. The blocks stay cached then,
and can be evicted like any other.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvpool.core.handle import KVCacheHandle, note_sessions
from kvpool.errors import KVPoolError, OutOfBlocksError, SequenceStateError, TransferError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.digests import root_digest
from kvpool.quiet import QuietLog
from kvpool.scheduling import Request
from kvpool.scope import MultimodalItem, ReuseScope
from kvpool.storage import DataPlane
from kvpool.storage.moving import TakenBlocks
from kvpool.tiers.contract import Keeper, Slots, Worth
from kvpool.tiers.keys import named
from kvpool.tiers.transport.block_keys import BlockKeys, Lineage
from kvpool.tiers.transport.chain import KNOWN_KEYS
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.prefix_options import next_query
from kvpool.tiers.transport.staging import Bytes, SharedStage, StagingMemory
from kvpool.tiers.transport.storing import Storer

CHUNK_BLOCKS = 64  # allocated at a time; then windowed groups give back all blocks but those of the last window
log = logging.getLogger("kvpool")


class Lease(NamedTuple):
    """Blocks held for a request that has not been admitted yet."""

    owner: Hashable  # the id of the request
    num_blocks: int


class PrefixLeases:
    """The leases of one engine, by request; oldest first."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._handles: dict[Hashable, KVCacheHandle] = {}
        self._most = min(manager.inspect.num_blocks(pool.index) for pool in manager.config.pools) // 2

    def __len__(self) -> int:
        return len(self._handles)

    def view(self) -> tuple[Lease, ...]:
        """All leases."""
        return tuple(Lease(owner, handle.num_blocks) for owner, handle in self._handles.items())

    def keep(self, owner: Hashable, handle: KVCacheHandle) -> None:
        """Holds a handle for a request. All leases together hold at most half of a pool: older ones end for that."""
        self.end(owner)
        held = handle.num_blocks + sum(other.num_blocks for other in self._handles.values())
        for other in list(self._handles):
            if held <= self._most:
                break
            held -= self._handles[other].num_blocks
            self.end(other)
        self._handles[owner] = handle

    def end(self, owner: Hashable) -> None:
        """Ends the lease of a request, if it has one."""
        handle = self._handles.pop(owner, None)
        if handle is not None:
            self._manager.free(handle)

    def end_all(self) -> None:
        """Ends all leases, because memory is short: their blocks become evictable."""
        for owner in list(self._handles):
            self.end(owner)


class Importer:
    """Writes what was fetched into blocks of the cache. Runs in the engine's thread."""

    def __init__(self, manager: KVCacheManager, plane: DataPlane, keys: BlockKeys, lineage: Lineage) -> None:
        self._manager = manager
        self._plane = plane
        self._keys = keys
        self._lineage = lineage
        self._groups = keys.groups
        self._size = keys.block_size
        self._quiet = QuietLog(log)

    def import_prefix(self, request: Request, fetch: Fetch) -> tuple[KVCacheHandle | None, list[Callable[[], None]]]:
        """A lease on the prefix of a request, now cached, and calls that wait until the fetched bytes have been read.

        None if there is no room, or if blocks before the fetched ones were evicted meanwhile. Then the request is computed.
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
            if fetch.is_lent:
                _finish(waits)
                if not fetch.is_held():
                    raise TransferError("the tier that lent it left while it was copied")
            self._manager.commit(handle)
        except KVPoolError as error:
            if not isinstance(error, OutOfBlocksError):
                self._quiet.warning("a prefix from a tier could not be used and is computed: %s", error)
            self._give_up(handle)
            handle = None
        return handle, waits

    def _lease(self, request: Request, fetch: Fetch) -> KVCacheHandle:
        """Holds the cached part of the prefix, and the first blocks behind it."""
        end = fetch.num_blocks * self._size
        tokens, items = request.prompt[:end], [item for item in request.multimodal if item.position < end]
        sessions = self._sessions_of(request, tokens, items)
        handle = self._manager.allocate(
            ("lease", request.id, fetch.first),
            tokens,
            scope=request.scope,
            reserve=min(end, (fetch.first + CHUNK_BLOCKS) * self._size),
            ttl=request.ttl,
            session=sessions[0] if sessions else request.session,
            lease=True,
            multimodal=items or None,
        )
        note_sessions(handle, sessions)
        return handle

    def _sessions_of(self, request: Request, tokens: Int32Array, items: Sequence[MultimodalItem]) -> tuple[str, ...]:
        """The sessions that computed what was loaded, as far as this process knows: they can be invalidated."""
        if not self._lineage.has_sessions:
            return ()
        return self._lineage.sessions_of(self._keys.digests(root_digest(request.scope), tokens, items))

    def _take_blocks(self, handle: KVCacheHandle, request: Request, fetch: Fetch) -> None:
        """Allocates the other blocks, part by part, and gives back those that no later query reads."""
        end = fetch.num_blocks * self._size
        position = next_query(fetch.num_blocks, len(request.prompt), self._size)
        while handle.num_reserved < end:
            self._manager.narrow(handle, position)
            self._manager.extend(handle, min(CHUNK_BLOCKS * self._size, end - handle.num_reserved))
        self._manager.narrow(handle, position)

    def _write(self, handle: KVCacheHandle, fetch: Fetch, waits: list[Callable[[], None]]) -> None:
        """Writes the blocks that were not cached. They must be exactly those that the lease holds there."""
        first, parts = handle.num_cached_blocks, []
        for group, (columns, rows) in zip(self._groups, fetch.groups, strict=True):
            ids = handle.block_ids(group.index)
            begin, end = np.searchsorted(columns, [first, fetch.num_blocks]).tolist()
            if not np.array_equal(columns[begin:end], first + np.flatnonzero(ids[first:] >= 0)):
                raise SequenceStateError(f"what was loaded for layer group {group.index} is not what its window reads")
            if end > begin:
                part = rows[begin:end]
                data = part if isinstance(part, list) else torch.from_numpy(part)
                parts.append((ids[columns[begin:end]].copy(), group.index, data))
        waits += [self._plane.write_blocks(*part) for part in parts]

    def _give_up(self, handle: KVCacheHandle | None) -> None:
        """Frees a lease. Blocks that are not committed become free."""
        if handle is not None and handle.is_live:
            self._manager.free(handle)


def _finish(waits: list[Callable[[], None]]) -> None:
    """Waits until the device has read everything."""
    while waits:
        waits.pop(0)()


BATCH_BYTES = 2**25  # go to a tier in one call


@dataclass
class OfferProgress:
    """How many blocks of a sequence were offered, the digest of the last one, and the salt for the next ones."""

    num_blocks: int
    digest: bytes
    salt: bytes | None


class Offers:
    """Offers a block to tiers once `min_uses` requests have used it."""

    def __init__(
        self,
        plane: DataPlane,
        keys: BlockKeys,
        storer: Storer,
        near: StagingMemory[torch.Tensor],
        may_write: Callable[[Slots | None], bool],
        min_uses: int = 1,
    ) -> None:
        self.lineage = Lineage()
        self._plane = plane
        self._near = near  # of the device: blocks wait there for slots of a tier
        self._may_write = may_write  # whether the device can copy there; None: everywhere in the memory of the tier
        self._keys = keys
        self._storer = storer
        self._min_uses = min_uses
        self._uses: OrderedDict[bytes, int] = OrderedDict()  # by digest, of blocks used lately

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._keys.block_size

    def begin(self, scope: ReuseScope) -> OfferProgress:
        """The progress of a new sequence: nothing was offered."""
        root = root_digest(scope)
        return OfferProgress(0, root, self._keys.salt_of(scope, root))

    def offer(
        self,
        handle: KVCacheHandle,
        tokens: Int32Array,
        progress: OfferProgress,
        multimodal: Sequence[MultimodalItem] = (),
        session: str | None = None,
        *,
        is_demanded: bool = False,
    ) -> None:
        """Offers the full blocks of `tokens` that were not offered before. All of them must be written.

        `is_demanded` offers them whatever the number of uses.
        """
        size = self.block_size
        start, stop = progress.num_blocks, len(tokens) // size
        if stop <= start:
            return
        items = [item._replace(position=item.position - start * size) for item in multimodal]
        digests = self._keys.digests(progress.digest, tokens[start * size : stop * size], items)
        renamed, salt = self._keys.forgotten.renamed(progress.salt, digests)
        names = named(handle.scope, renamed)
        self.lineage.note(progress.digest, digests, names)
        own = handle.num_cached_blocks  # the first block that it computed
        if start <= own < stop:
            for each in (session, *handle.copied_sessions):
                if each is not None:
                    self.lineage.begin(each, digests[own - start])
        progress.num_blocks, progress.digest, progress.salt = stop, digests[-1], salt
        worths = [_worth(handle, column, size) for column in range(start, stop)]
        used = [self._min_uses == 1 or self._count_use(digest) >= self._min_uses or is_demanded for digest in digests]
        for group, keys in zip(self._keys.groups, self._keys.of_digests(names), strict=True):
            ids = handle.block_ids(group.index)[start:stop].tolist()
            wanted = [i for i, key in enumerate(keys) if used[i] and ids[i] >= 0 and self._storer.wants(key)]
            step = max(1, BATCH_BYTES // group.spec.block_bytes)
            for at in range(0, len(wanted), step):
                part = wanted[at : at + step]
                self.send(group.index, [keys[i] for i in part], [ids[i] for i in part], [worths[i] for i in part])

    def _count_use(self, digest: bytes) -> int:
        uses = self._uses.pop(digest, 0) + 1
        self._uses[digest] = uses
        if len(self._uses) > KNOWN_KEYS:
            self._uses.popitem(last=False)
        return uses

    def send(self, group: int, keys: Sequence[bytes], ids: Sequence[int], worths: Sequence[Worth]) -> None:
        """Copies blocks of a layer group where they may wait, and has them stored."""
        blocks: Int32Array = np.array(ids, np.int32)
        block_bytes = self._plane.config.groups[group].block_bytes
        shape = len(blocks), block_bytes
        near = self._take_near(len(blocks) * block_bytes)
        if near is not None:
            with _released_after_errors(near):
                taken = self._plane.take_blocks(blocks, group, near.data.view(shape))
            source = _TakenSource(taken, self._may_write)
            self._storer.store_straight(keys, block_bytes, near, taken.wait, source, worths)
            return
        stage = self._storer.take_memory(len(blocks) * block_bytes, len(blocks))
        if stage is None:
            return
        rows = stage.data.reshape(shape)
        with _released_after_errors(stage):
            wait: Callable[[], None] = self._plane.read_blocks(blocks, group, torch.from_numpy(rows))
        self._storer.store(keys, list(rows), stage, wait, worths=worths)

    def _take_near(self, num_bytes: int) -> SharedStage[torch.Tensor] | None:
        """Memory of the device, if blocks can go from there straight to a tier, and not too much waits."""
        if not self._storer.has_slots or not self._may_write(None):
            return None
        try:
            staged = self._near.take(num_bytes)
        except torch.OutOfMemoryError:
            return None
        return None if staged is None else SharedStage(self._near, staged)


class _TakenSource(NamedTuple):
    """Blocks that wait on the device for slots of a tier."""

    taken: TakenBlocks
    may_write: Callable[[Slots], bool]

    def write(self, slots: Slots) -> None:
        if not self.may_write(slots):
            raise TransferError("the memory of the tier is not locked for the GPU yet")
        self.taken.copy_to(_rows(slots), slots.numbers)

    def is_in(self, slots: Slots) -> bool:
        return self.taken.are_in(_rows(slots), slots.numbers)


def _rows(slots: Slots) -> list[Bytes]:
    return [np.frombuffer(view, np.uint8) for view in slots.views]


@contextmanager
def _released_after_errors(memory: Keeper) -> Iterator[None]:
    try:
        yield
    except BaseException:
        memory.release()
        raise


def _worth(handle: KVCacheHandle, column: int, size: int) -> Worth:
    """What is known of a block: the priority of its first token, which ranks it in the cache, too, and its depth."""
    if handle.retention is None:
        return Worth(depth=column)
    priority, seconds = handle.retention.priority_at(column * size, handle.num_prompt_tokens)
    return Worth(depth=column) if priority is None else Worth(priority, column, seconds)
