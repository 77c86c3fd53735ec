"""Translates events of a manager to those of the wire, and gives everything cached as such events to late subscribers.

In a manager, a block is in one tier and moves. On the wire, the new medium gains it first and the old one loses it then, so
that a reader never thinks that the last copy is gone. The event about a moved block needs its parent and tokens, so these are
kept here as long as the block is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvpool.cluster.wire_events import AllBlocksCleared, BlockRemoved, BlockStored, WireEvent, wire_hash
from kvpool.config import GroupKind, KVCacheConfig, Tier
from kvpool.config.layers import ceil_div
from kvpool.events import Event, Removed, Stored, Updated
from kvpool.pools.arrays import Int32Array
from kvpool.pools.symbols import encoded_key
from kvpool.prefix.digests import root_digest
from kvpool.scope import MultimodalItem, ReuseScope

PLACES = {
    Tier.GPU: ("GPU", None),
    Tier.HOST: ("CPU", "LOCAL"),
    Tier.DISK: ("STORAGE", "LOCAL"),
    Tier.REMOTE: ("STORAGE", "REMOTE"),
}
_KINDS: dict[str, str] = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING: "sliding_window",
    GroupKind.CHUNKED: "chunked_local_attention",
    GroupKind.STATE: "mamba",
    GroupKind.CROSS: "cross_attention",
}


class GroupNames(NamedTuple):
    """The name of a layer group on the wire."""

    kind: str
    window: int | None


class _StoredRun(NamedTuple):
    """What one `Stored` event says about all its blocks."""

    parent: int | None
    hashes: tuple[int, ...]
    tokens: Int32Array
    block_size: int
    lora_name: str | None
    extra_keys: Sequence[Any] | None
    group: int
    session: str | None


class _StoredBlock(NamedTuple):
    """A cached block: its place in its run, and its tier."""

    run: _StoredRun
    position: int
    tier: Tier


def group_names(config: KVCacheConfig) -> dict[int, GroupNames]:
    """The layer groups of a cache as the wire calls them."""
    return {group.index: GroupNames(_KINDS.get(group.kind, str(group.kind)), group.window) for group in config.groups}


def scope_keys(scope: ReuseScope) -> tuple[str | None, tuple[str, ...]]:
    """A scope on the wire: the name of the adapter, and one key of the first block for everything else that isolates it.
    Nobody can read the name of a tenant from the key.

    >>> scope_keys(ReuseScope(adapter="sql"))
    ('sql', ())
    """
    is_plain = scope == ReuseScope(adapter=scope.adapter)
    return scope.adapter or None, () if is_plain else (root_digest(scope).hex(),)


def item_name(item: MultimodalItem) -> str:
    """What an image or another item is called on the wire, by its content."""
    return encoded_key(item.key).hex()


def item_keys(items: Iterable[tuple[int, int, str]], block_size: int, num_blocks: int) -> list[list[str]]:
    """For each block the images and other items with placeholders in it: the name, and the position relative to the block.

    Items are (position, length, name).
    """
    found: list[list[str]] = [[] for _ in range(num_blocks)]
    for position, length, name in items:
        for block in range(max(0, position // block_size), min(num_blocks, ceil_div(position + length, block_size))):
            found[block].append(f"{name}@{position - block * block_size}")
    return found


class WireTranslator:
    """Follows the events of one manager. Not thread-safe; costs some 300 bytes for every cached block and layer group."""

    def __init__(self, groups: Mapping[int, GroupNames]) -> None:
        self._groups = dict(groups)
        self._held: dict[
            int, dict[bytes, _StoredBlock]
        ] = {}  # by group and digest; parents stand before their children

    @property
    def num_blocks(self) -> int:
        """Cached blocks, over all layer groups."""
        return sum(map(len, self._held.values()))

    def translate(self, events: Iterable[Event]) -> list[WireEvent]:
        """These events in the form of the wire. They must continue the events of the last call."""
        found: list[WireEvent] = []
        for event in events:
            if isinstance(event, Stored):
                found += self._stored(event)
            elif isinstance(event, Removed):
                found.append(self._removed(event))
            elif isinstance(event, Updated) and event.new_tier is not None:
                found += self._moved(event, event.new_tier)
        return found

    def start_over(self, events: Iterable[Event]) -> list[WireEvent]:
        """Like `translate`, after events were lost. `events` must describe everything that is cached now."""
        self._held.clear()
        return [AllBlocksCleared(), *self.translate(events)]

    def snapshot(self) -> list[WireEvent]:
        """Everything that is cached, for a reader that knows nothing."""
        found: list[WireEvent] = [AllBlocksCleared()]
        for held in self._held.values():
            found += self._runs(held.values())
        return found

    # --- events ------------------------------------------------------------------------------------------------------

    def _stored(self, event: Stored) -> Iterator[WireEvent]:
        lora_name, first_keys = scope_keys(event.scope)
        extra: Sequence[Any] | None = None
        if event.multimodal or (first_keys and event.parent is None):
            items = [(*item[:2], item_name(item)) for item in event.multimodal]
            keys = item_keys(items, event.block_size, len(event.digests))
            if event.parent is None:
                keys[0][:0] = first_keys
            extra = [each or None for each in keys]
        run = _StoredRun(
            None if event.parent is None else wire_hash(event.parent),
            tuple(map(wire_hash, event.digests)),
            event.tokens.copy(),  # a view would keep the manager's larger array alive
            event.block_size,
            lora_name,
            extra,
            event.group,
            event.session,
        )
        held = self._held.setdefault(event.group, {})
        held.update((digest, _StoredBlock(run, index, event.tier)) for index, digest in enumerate(event.digests))
        yield self._as_stored(run, 0, len(run.hashes), event.tier)

    def _removed(self, event: Removed) -> WireEvent:
        held = self._held[event.group]
        for digest in event.digests:
            del held[digest]
        return self._as_removed(event.digests, event.tier, event.group)

    def _moved(self, event: Updated, tier: Tier) -> Iterator[WireEvent]:
        assert event.old_tier is not None
        held = self._held[event.group]
        for digest in event.digests:
            held[digest] = held[digest]._replace(tier=tier)
        yield from self._runs(held[digest] for digest in event.digests)
        yield self._as_removed(event.digests, event.old_tier, event.group)

    # --- as the wire has them ----------------------------------------------------------------------------------------

    def _runs(self, blocks: Iterable[_StoredBlock]) -> Iterator[WireEvent]:
        """Blocks as events, those that follow each other in one."""
        numbered = enumerate(blocks)
        for (_, tier, _), same in groupby(
            numbered, lambda each: (id(each[1].run), each[1].tier, each[1].position - each[0])
        ):
            members = [held for _, held in same]
            yield self._as_stored(members[0].run, members[0].position, members[-1].position + 1, tier)

    def _as_stored(self, run: _StoredRun, begin: int, end: int, tier: Tier) -> BlockStored:
        medium, locality = PLACES[tier]
        names = self._groups[run.group]
        return BlockStored(
            run.hashes[begin:end],
            run.hashes[begin - 1] if begin else run.parent,
            run.tokens[begin * run.block_size : end * run.block_size].tolist(),
            run.block_size,
            medium,
            run.lora_name,
            None if run.extra_keys is None else run.extra_keys[begin:end],
            run.group,
            names.kind,
            names.window,
            locality,
            run.session,
        )

    def _as_removed(self, digests: Iterable[bytes], tier: Tier, group: int) -> BlockRemoved:
        medium, locality = PLACES[tier]
        return BlockRemoved(tuple(map(wire_hash, digests)), medium, group, locality)
