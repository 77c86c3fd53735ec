"""The consumer of the event stream: rebuilds what a cache holds from its events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvpool.errors import InvalidArgumentError, InvariantError
from kvpool.events.kinds import Event, PoolSize, Removed, Stored, Updated

if TYPE_CHECKING:
    from kvpool.config import Tier


class MirroredBlock(NamedTuple):
    tier: Tier
    priority: int


class CacheMirror:
    """What a cache holds, rebuilt from its events: {group: {digest: (tier, priority)}}. Not thread-safe.

    A router keeps one per worker and sends a request where `longest_prefix` is largest. The mirror checks events: it raises
    `InvariantError` if an event contradicts the ones before it, and ignores that event.

    `windows` gives, for each group of sliding-window layers, how many blocks before the next token must be held.
    Such a group may hold a block whose parent has left the cache.
    """

    def __init__(self, windows: Mapping[int, int] | None = None) -> None:
        self._windows = dict(windows or {})
        for group, num_blocks in self._windows.items():
            if num_blocks < 1:
                raise InvalidArgumentError(f"a window is at least 1 block, got {num_blocks} for group {group}")
        self.pools: tuple[PoolSize, ...] = ()
        self.blocks: dict[int, dict[bytes, MirroredBlock]] = {}
        self.last_event_id: int | None = None

    def clear(self) -> None:
        """Forgets everything, before a new snapshot is applied."""
        self.pools = ()
        self.blocks = {}
        self.last_event_id = None

    def apply(self, events: Iterable[Event]) -> None:
        """Applies these events, which must continue the ones applied before."""
        for event in events:
            # all events of a snapshot carry the id of the last event it includes
            if self.last_event_id is not None and event.event_id - self.last_event_id not in (0, 1):
                raise InvariantError(f"event {event.event_id} follows event {self.last_event_id}: resync() first")
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            elif isinstance(event, Updated):
                self._update(event)
            else:
                self.pools = event.pools
            self.last_event_id = event.event_id

    def longest_prefix(self, digests: Sequence[bytes], groups: Collection[int] | None = None) -> int:
        """How many of the first blocks of a prompt could be reused: all groups that ever stored hold what they need.

        It does not look for sink blocks of windowed groups.
        """
        chosen = self.blocks if groups is None else groups
        num_tried = len(digests)
        num_blocks = np.arange(1, num_tried + 1)  # of every prefix that is tried
        usable = np.full(num_tried, bool(chosen))
        for group in chosen:
            held = self.blocks.get(group, {})
            is_held = np.fromiter(map(held.__contains__, digests), dtype=np.bool_, count=num_tried)
            last_missing = np.maximum.accumulate(np.where(is_held, 0, num_blocks))
            usable &= num_blocks - last_missing >= np.minimum(num_blocks, self._windows.get(group, num_tried))
        return int(num_blocks[usable].max(initial=0))

    def _store(self, event: Stored) -> None:
        parent, group = event.parent, event.group
        if parent is not None and group not in self._windows and not any(parent in g for g in self.blocks.values()):
            raise InvariantError(f"event {event.event_id} stored blocks below an unknown parent {parent.hex()}")
        held = self.blocks.get(group, {})
        added = dict.fromkeys(event.digests, MirroredBlock(event.tier, event.priority))
        if len(added) < len(event.digests) or not held.keys().isdisjoint(added):
            raise InvariantError(f"event {event.event_id} stored a block of group {group} that was stored already")
        self.blocks.setdefault(group, held).update(added)

    def _remove(self, event: Removed) -> None:
        held = self._check_held(event)
        for digest in event.digests:
            if held[digest].tier != event.tier:
                raise InvariantError(
                    f"event {event.event_id} removed block {digest.hex()} of group {event.group} "
                    f"from {event.tier.name}, but it was in {held[digest].tier.name}"
                )
        for digest in event.digests:
            del held[digest]

    def _update(self, event: Updated) -> None:
        held = self._check_held(event)
        changed: dict[bytes, MirroredBlock] = {}
        for digest in event.digests:
            tier, priority = held[digest]
            if event.old_tier not in (None, tier) or event.old_priority not in (None, priority):
                raise InvariantError(
                    f"event {event.event_id} updated block {digest.hex()} of group {event.group} from "
                    f"{(event.old_tier, event.old_priority)}, but it had {(tier, priority)}"
                )
            new_tier = tier if event.new_tier is None else event.new_tier
            new_priority = priority if event.new_priority is None else event.new_priority
            changed[digest] = MirroredBlock(new_tier, new_priority)
        held.update(changed)

    def _check_held(self, event: Removed | Updated) -> dict[bytes, MirroredBlock]:
        held = self.blocks.get(event.group, {})
        named = set(event.digests)
        if len(named) < len(event.digests) or not held.keys() >= named:
            unknown = next((digest.hex() for digest in event.digests if digest not in held), "named twice")
            raise InvariantError(
                f"event {event.event_id} {type(event).__name__.lower()} a block that group {event.group} "
                f"does not hold: {unknown}"
            )
        return held
