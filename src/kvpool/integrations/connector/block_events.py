"""What the host and the tiers below it hold, told under the engine's own names of blocks, for those who route by them.

Inside, a block's identity is a digest of ours. The engine has hashes of its own, which routers already know from its events
of the GPU; a block gets its name here before it can be found, and keeps it as long as it is on the host, or is thought to be
in a tier. Tiers evict on their own: a block that one does not have any more is told when somebody looks for it. If events
were lost because nobody took them for long, all of the host is told to be gone, and then what is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpool.events import Removed, Stored
from kvpool.integrations.connector.tracked_request import TrackedRequest
from kvpool.manager import KVCacheManager

HOST, STORAGE = "CPU", "STORAGE"
_MAX_IN_TIERS = 262_144  # blocks that are remembered as told; the oldest are told to be gone
_MAX_NAMED = 65_536  # blocks that may be about to be published; of older ones nothing came


class BlocksStored(NamedTuple):
    """Consecutive blocks of one prompt are in a medium."""

    names: list[Any]
    parent: Any | None
    tokens: list[int]
    medium: str
    adapter: str | None
    group: int


class BlocksRemoved(NamedTuple):
    """Blocks are not in a medium any more."""

    names: list[Any]
    medium: str
    group: int


BlockEvent = BlocksStored | BlocksRemoved


class BlockEvents:
    """Collects events of a connector until the engine takes them."""

    def __init__(self, manager: KVCacheManager, block_size: int, hash_size: int) -> None:
        self._block_size = block_size
        self._hash_size = hash_size  # tokens of each of the engine's hashes
        self._subscription = manager.events.subscribe()
        self._named: OrderedDict[bytes, Any] = OrderedDict()  # blocks that are about to be on the host
        self._on_host: dict[bytes, Any] = {}  # blocks that were told
        self._in_tiers: OrderedDict[bytes, Any] = OrderedDict()
        self._of_tiers: list[BlockEvent] = []

    def name(self, tracked: TrackedRequest, first: int, last: int) -> None:
        """These blocks of a request are about to be published."""
        for digest, name in zip(tracked.digests(first, last), self._engine_names(tracked, first, last), strict=False):
            self._named[digest] = name
        while len(self._named) > _MAX_NAMED:
            self._named.popitem(last=False)

    def _engine_names(self, tracked: TrackedRequest, first: int, last: int) -> list[Any]:
        step, hashes = self._block_size // self._hash_size, tracked.request.block_hashes
        return [hashes[end - 1] for end in range((first + 1) * step, last * step + 1, step) if end <= len(hashes)]

    def stored_in_tiers(self, tracked: TrackedRequest, first: int, last: int) -> None:
        """Tiers got these blocks, or were found to have them."""
        names, digests = self._engine_names(tracked, first, last), tracked.digests(0, last)
        start = first
        while start < last and start - first < len(names) and digests[start] in self._in_tiers:
            start += 1
        new = names[start - first :]
        if not new:
            return
        for digest, name in zip(digests[start:], new, strict=False):
            self._in_tiers[digest] = name
        parent = self._engine_names(tracked, start - 1, start)[0] if start else None
        tokens = tracked.tokens(last * self._block_size)[start * self._block_size :]
        known = tokens[: len(new) * self._block_size].tolist()
        self._of_tiers.append(BlocksStored(new, parent, known, STORAGE, _adapter(tracked.scope.adapter), 0))
        gone = [self._in_tiers.popitem(last=False)[1] for _ in range(len(self._in_tiers) - _MAX_IN_TIERS)]
        self._removed_from_tiers(gone)

    def missing_in_tiers(self, tracked: TrackedRequest, first: int, last: int) -> None:
        """Tiers do not have the first of these blocks, so that those behind it are of no use."""
        gone = [self._in_tiers.pop(digest, None) for digest in tracked.digests(first, last)]
        self._removed_from_tiers([name for name in gone if name is not None])

    def _removed_from_tiers(self, names: list[Any]) -> None:
        if names:
            self._of_tiers.append(BlocksRemoved(names, STORAGE, 0))

    def forget_tiers(self) -> None:
        """After a reset nothing in tiers can be found."""
        self._removed_from_tiers(list(self._in_tiers.values()))
        self._in_tiers.clear()

    def take(self) -> Sequence[BlockEvent]:
        """Everything that happened since the last call."""
        told: list[BlockEvent] = []
        batch = self._subscription.poll()
        if batch.missed:
            told += self._forget_host()
            batch = self._subscription.resync()
        for event in batch.events:
            if isinstance(event, Stored):
                told += self._stored(event)
            elif isinstance(event, Removed):
                names = [self._on_host.pop(digest) for digest in event.digests if digest in self._on_host]
                if names:
                    told.append(BlocksRemoved(names, HOST, event.group))
        of_tiers, self._of_tiers = self._of_tiers, []
        return told + of_tiers

    def _stored(self, event: Stored) -> list[BlockEvent]:
        if not all(digest in self._named for digest in event.digests):  # the engine has no hash for one of them
            return []
        names = [self._named.pop(digest) for digest in event.digests]
        self._on_host.update(zip(event.digests, names, strict=True))
        parent = None if event.parent is None else self._on_host.get(event.parent)
        return [BlocksStored(names, parent, event.tokens.tolist(), HOST, _adapter(event.scope.adapter), event.group)]

    def _forget_host(self) -> list[BlockEvent]:
        """Nothing is known of the host any more but the names of what was there."""
        names = list(self._on_host.values())
        self._named.update(self._on_host)
        self._on_host.clear()
        return [BlocksRemoved(names, HOST, 0)] if names else []


def _adapter(adapter: str) -> str | None:
    """The name of an adapter, without the digest of its files."""
    return adapter.split("\0")[0] or None
