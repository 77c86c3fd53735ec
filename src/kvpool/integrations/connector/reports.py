"""What a connector reports: block events for routers, counters for the engine's metrics, and a warning if it never helps.

Events name blocks by the engine's own hashes, which routers know from its events about the GPU. Inside kvpool, a digest
identifies a block. A block gets its engine hash here before it can be found. It keeps the hash as long as it is on the host
or counts as stored in a tier. Tiers evict by themselves, so the loss of a block is reported when a request looks for it. If
events were lost because nobody took them for long, all blocks of the host are reported as removed, then those that are there
as stored.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvpool.events import Removed, Stored
from kvpool.integrations.connector.requests import TrackedRequest
from kvpool.manager import KVCacheManager

HOST, STORAGE = "CPU", "STORAGE"
_MAX_IN_TIERS = 262_144  # reported blocks that are remembered; beyond that, the oldest are reported as removed
_MAX_NAMED = 65_536  # blocks that may be published soon; older ones were not


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
        self._on_host: dict[bytes, Any] = {}  # blocks that were reported
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
        """Tiers do not have the first of these blocks, so the others are useless."""
        gone = [self._in_tiers.pop(digest, None) for digest in tracked.digests(first, last)]
        self._removed_from_tiers([name for name in gone if name is not None])

    def _removed_from_tiers(self, names: list[Any]) -> None:
        if names:
            self._of_tiers.append(BlocksRemoved(names, STORAGE, 0))

    def forget_tiers(self) -> None:
        """After a reset nothing in tiers is found."""
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
            if not isinstance(event, (Stored, Removed)) or event.group:  # checkpoints have no name in the engine
                continue
            if isinstance(event, Stored):
                told += self._stored(event)
            else:
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
        """Forgets all reports about the host, but keeps the names of the blocks that were there."""
        names = list(self._on_host.values())
        self._named.update(self._on_host)
        self._on_host.clear()
        return [BlocksRemoved(names, HOST, 0)] if names else []


def _adapter(adapter: str) -> str | None:
    """The name of an adapter, without the digest of its files."""
    return adapter.split("\0")[0] or None


# --- a warning -------------------------------------------------------------------------------------------------------


REPEATS = 8  # after so many prompts that should have been found, it warns
SHORT_PROMPTS = 32  # after so many prompts without a full block, it warns
_REMEMBERED = 4096

_log = logging.getLogger("kvpool")


class NoHitWarning:
    """Warns once if prompts begin like earlier ones and nothing was ever found for them, and says why."""

    def __init__(self, block_size: int, num_rows: int, counts: Callable[[], Mapping[str, int]]) -> None:
        self._block_size = block_size
        self._num_rows = num_rows
        self._counts = counts
        self._ended: OrderedDict[tuple[object, bytes], None] = OrderedDict()
        self._repeats = 0
        self._short = 0
        self._is_settled = False  # something was found, or it has warned

    def looked(self, tracked: TrackedRequest, num_local: int, num_found: int) -> None:
        """A request was looked up for the first time: the engine had `num_local` blocks, and `num_found` more were found."""
        if self._is_settled:
            return
        if num_found:
            self._is_settled = True
            self._ended.clear()
        elif tracked.num_ids <= self._block_size:
            self._short += 1
            if self._short == SHORT_PROMPTS:
                self._warn(
                    f"none of {SHORT_PROMPTS} prompts is longer than a block of {self._block_size} tokens, and only whole "
                    "blocks are kept; a smaller --block-size would help"
                )
        elif not num_local and self._key(tracked) in self._ended:
            self._repeats += 1
            if self._repeats == REPEATS:
                self._warn(self._reason())

    def ended(self, tracked: TrackedRequest) -> None:
        """A request is over: others should find what it computed from now on."""
        if self._is_settled or not tracked.is_known or tracked.num_ids <= self._block_size:
            return
        self._short = -(2**60)  # there are long prompts, so it never warns
        self._ended[self._key(tracked)] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def forget(self) -> None:
        """After a reset nothing is expected to be found."""
        self._ended.clear()

    def _key(self, tracked: TrackedRequest) -> tuple[object, bytes]:
        return (tracked.scope, tracked.items_within(self._block_size)), tracked.tokens(self._block_size).tobytes()

    def _reason(self) -> str:
        counts = self._counts()
        if counts["slower"]:
            return f"{counts['slower']} prompts computed what a tier had, because it was slower than computing"
        said = f"{REPEATS} prompts began like earlier ones, and nothing was ever found for them: "
        said += f"{counts['stored']} blocks were stored, {counts['no_room']} had no room on a host of {self._num_rows} blocks"
        if counts["no_room"] or counts["stored"]:
            return f"{said}; a larger host_bytes would help"
        return f"{said}; do requests ask for no_store, or is kv_role kv_consumer?"

    def _warn(self, what: str) -> None:
        self._is_settled = True
        self._ended.clear()
        _log.warning("kvpool connector: %s", what)


# --- counters --------------------------------------------------------------------------------------------------------


COUNTS = {
    "requests": "requests that were looked up",
    "hits": "requests for which something was loaded",
    "stored": "blocks that were stored on the host",
    "no_room": "blocks that were not stored because everything on the host was in use",
    "spoiled": "blocks that were stored and not kept: a worker could not copy them, or a reset came before",
    "from_host": "blocks that were loaded from the host",
    "from_tiers": "blocks that were loaded from the tiers below the host",
    "failed": "blocks that were promised and could not be loaded; the engine computed them again",
    "slower": "requests that computed blocks that a tier had, because that was faster so far",
    "missed_absent": "blocks that the engine lacked, and neither the host nor a tier had",
    "missed_late": "blocks that the engine lacked, and no tier said in time whether it had them",
    "missed_slower": "blocks that a tier had and that were computed, because that was faster so far",
    "missed_crowded": "blocks that a tier had and that were computed, because the host had no room for them",
    "tier_load_failures": "values that a tier could not bring, was late with, or that were damaged",
    "tier_store_failures": "values that a tier could not store, or not in time",
}
"""Every counter, and what it counts."""


class Increments:
    """Differences between totals."""

    def __init__(self) -> None:
        self._before: Mapping[str, int] = {}

    def since(self, totals: Mapping[str, int]) -> dict[str, int]:
        """How much each total has grown since the last call, without those that have not."""
        if totals == self._before:
            return {}
        before, self._before = self._before, dict(totals)
        return {name: grown for name, total in totals.items() if (grown := total - before.get(name, 0))}
