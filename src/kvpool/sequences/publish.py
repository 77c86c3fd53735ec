"""Committed blocks enter the prefix tree: as the growing tail of their sequence, or merged with equal ones already there."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvpool.pools.arrays import Int32Array, copied
from kvpool.pools.groups import Group
from kvpool.pools.pool import GPU
from kvpool.prefix.cache import PrefixCache
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import NEVER, Node
from kvpool.prefix.retention import Retention
from kvpool.prefix.tree import Match
from kvpool.sequences.handle import KVCacheHandle, Rows

_NOBODY: list[int] = []


class InFlight:
    """Which request computes which block next: another one with the same prompt can wait instead of computing it too."""

    def __init__(self, context: CacheContext, requests: dict[Hashable, KVCacheHandle]) -> None:
        self.context = context
        self.rows: Rows = context.rows
        self.requests = requests
        self.rows_by_block: dict[tuple[Node, bytes], int] = {}  # (tip, next block) -> the row that computes it

    def row_computing(self, match: Match, tokens: Int32Array | None) -> int | None:
        """The row that is computing the first block of `tokens` that is not cached yet, if any."""
        if match.root is None or tokens is None or not self.rows_by_block:
            return None
        size = self.context.block_size
        start = match.num_blocks * size
        if len(tokens) - start < size:
            return None
        tip: Node = match.path[-1] if match.path else match.root
        if tip.end != match.num_blocks:
            return None
        return self.rows_by_block.get((tip, tokens[start : start + size].tobytes()))

    def track(self, row: int) -> None:
        """Remembers which block a row with a known prompt computes next."""
        rows, size = self.rows, self.context.block_size
        handle = rows.handles[row]
        assert handle is not None
        self.untrack(handle)
        start = rows.committed_of[row] // size * size
        if rows.known_of[row] - start < size:
            return
        tip = rows.tips[row]
        assert tip is not None
        if tip.open_row != row:  # otherwise it ends with what is committed
            self.context.sync(tip)
            start = tip.end * size
        if handle.publishes and rows.known_of[row] - start >= size:
            self.track_block(handle, tip, rows.ids_between(row, start, start + size).tobytes())

    def track_block(self, handle: KVCacheHandle, tip: Node, key: bytes) -> None:
        """Remembers that a request computes the block `key` behind `tip`."""
        place = (tip, key)
        if self.rows_by_block.setdefault(place, handle.row) == handle.row:
            handle.inflight = place

    def untrack(self, handle: KVCacheHandle) -> None:
        """Forgets what a request computes next."""
        if handle.inflight is not None:
            self.rows_by_block.pop(handle.inflight, None)
            handle.inflight = None

    def hand_over(self, handle: KVCacheHandle) -> None:
        """A request ends before its next block was computed. If another one computes the same block, that one is tracked."""
        place = handle.inflight
        self.untrack(handle)
        tips = self.rows.tips
        for other in self.requests.values():
            if other.inflight is None and other.swapped is None and tips[other.row] is place[0]:
                self.track(other.row)


class Publisher:
    """Moves ownership of full, committed blocks from sequences to the tree.

    A sequence that publishes something new opens a node and keeps appending to it without further work. A sequence that
    computed what the tree already holds adopts the tree's blocks and frees its own. Forks that share private blocks
    follow whoever publishes them first, so a block never has two owners.
    """

    def __init__(self, cache: PrefixCache, in_flight: InFlight) -> None:
        self.context = cache.context
        self.rows: Rows = cache.context.rows
        self.has_one_group = len(cache.context.cached) == 1
        self.tree = cache.tree
        self.readers = cache.readers
        self.windows = cache.windows
        self.cache = cache
        self.announcer = cache.announcer
        self.expiry = cache.expiry
        self.mover = cache.mover
        self.events = cache.context.events
        self.in_flight = in_flight

    def publish(self, row: int) -> None:
        """Brings the tree up to date with everything that a row has committed."""
        rows = self.rows
        handle, tip = rows.handles[row], rows.tips[row]
        assert handle is not None and tip is not None
        if not handle.publishes:
            return
        if tip.open_row != row:
            tip = self._attach(row, handle, tip)
        if tip.open_row == row and (handle.retention is not None or self.events.listening):
            self._stored(handle, tip)

    def _stored(self, handle: KVCacheHandle, node: Node) -> None:
        """Gives blocks that a sequence stored in a node of its own their priorities, and tells subscribers of them."""
        parts = [node]
        if handle.retention is not None and not node.detached:
            parts = self._prioritise(handle.retention, node, handle.num_prompt_tokens)
        if self.events.listening:
            for part in parts:
                self.announcer.stored(part)

    def _prioritise(self, retention: Retention, node: Node, num_prompt_tokens: int) -> list[Node]:
        """Cuts a node where priorities change, and sets them; their durations count from the end of the request on.

        Returns the parts of the node. A row that is behind the last cut grows alone from now on.
        """
        parts, size = [node], self.context.block_size
        cuts = retention.cuts(num_prompt_tokens, size)
        if cuts and node.start < cuts[-1]:
            self.context.sync(node)
            for cut in cuts:
                if node.start < cut < node.end:
                    parts.insert(-1, self.tree.split(node, cut - node.start))
        for part in parts:
            priority, _ = retention.priority_at(part.start * size, num_prompt_tokens)
            if priority is not None:
                self.expiry.set_priority(part, priority, NEVER)
        if node.open_row >= 0:
            self.rows.grows_alone_of[node.open_row] = not cuts or node.start >= cuts[-1]
        return parts

    def _attach(self, row: int, handle: KVCacheHandle, tip: Node) -> Node:
        """Merges what a row committed with equal runs below its tip and opens a node for the rest; returns its new tip."""
        rows, size = self.rows, self.context.block_size
        done = rows.committed_of[row] // size
        first = tip.start + tip.num_blocks
        while first < done:
            limit, followers = (done, _NOBODY) if handle.family is None else self._followers(row, first, done)
            if limit == first:
                return tip
            place = handle.inflight
            if place is not None and place[0] is tip:
                key: bytes = place[1]
            else:
                key = rows.ids_between(row, first * size, (first + 1) * size).tobytes()
            child = tip.children.get(key) if tip.children is not None else None
            if child is not None:
                self.context.sync(child)
                tokens = rows.ids_between(row, first * size, limit * size)
                equal = self.tree.common_tokens(child, tokens) // size
                if equal < child.num_blocks:
                    child = self.tree.split(child, equal)
                elif child.open_row >= 0:
                    self.close(child.open_row)
                self._merge([row, *followers], tip, child, first)
            elif followers:
                child = self._closed_child([row, *followers], tip, key, first, limit)
                child.active = 1 + len(followers)
                tip.active -= len(followers)  # each held the tip itself; together they now count as one active child
                for reader in (row, *followers):
                    rows.tips[reader] = child
                self._stored(handle, child)
            else:
                return self._open(row, handle, tip, key, done)
            for follower in followers:
                rows.follow(follower, child.end * size)
                self.in_flight.track(follower)
            tip, first = child, child.end
        return tip

    def _followers(self, row: int, first: int, done: int) -> tuple[int, list[int]]:
        """Rows that share this row's private blocks from `first` on, and how far (at most `done`) all of them may follow.

        A fork follows as far as it has written the same tokens itself. Where one does not (it was rewound, or says that
        other tokens are there), the block stays private to both until one of them has let go of it.
        """
        handle = self.rows.handles[row]
        assert handle is not None and handle.family is not None
        limit, followers = done, []
        for other in handle.family:
            # What rows with another tip say about these columns is published, or out of date where it left their windows.
            alike = other != row and self.rows.tips[other] is self.rows.tips[row]
            if alike and self._shared_length(row, other, first, done):
                limit = min(limit, first + self._agreed_length(row, other, first, done))
                followers.append(other)
        return limit, followers

    def _agreed_length(self, row: int, other: int, first: int, done: int) -> int:
        """How many of the shared blocks from `first` on another row has written with the same tokens."""
        rows, size = self.rows, self.context.block_size
        length = min(self._shared_length(row, other, first, done), rows.written_of[other] // size - first)
        start, stop = first * size, min((first + max(length, 0)) * size, rows.known_of[other])
        if stop > start:
            differs = rows.ids_between(row, start, stop) != rows.ids_between(other, start, stop)
            if differs.any():
                length = int(differs.argmax()) // size
        return max(length, 0)

    def _shared_length(self, row: int, other: int, first: int, done: int) -> int:
        """How many blocks from `first` to `done` two rows hold together, if they hold any from `first` on.

        One may have given up windowed ones. What they hold behind `done` counts too: a row that grows in the tree by itself
        would take it along.
        """
        end = min(self.rows.num_blocks_of[row], self.rows.num_blocks_of[other])
        columns = np.arange(first, end)
        same, held = np.ones(len(columns), np.bool_), np.zeros(len(columns), np.bool_)
        for group in self.context.cached:
            mine, theirs = (self.rows.tables[group.index][r, first:end] for r in (row, other))
            equal = (mine == theirs) & (mine >= 0)
            held |= equal
            if group.slides:
                starts = self.rows.window_start[group.index]
                gone = columns < max(starts[row], starts[other])
                equal |= ((mine < 0) | (theirs < 0)) & (gone | group.keeps_state)  # few columns have a checkpoint
            same &= equal
        length = int(same.argmin()) if not same.all() else len(columns)
        return min(length, done - first) if held[:length].any() else 0

    def publish_postponed(self, family: set[int]) -> None:
        """A fork let go of shared blocks: others of its family may publish them now."""
        rows = self.rows
        for row in list(family):
            handle, tip = rows.handles[row], rows.tips[row]
            assert handle is not None and tip is not None
            closed = handle.swapped is None and tip.open_row != row
            # The last condition only saves time: without a whole block, neither call changes anything.
            if closed and rows.committed_of[row] // self.context.block_size > tip.end:
                self.publish(row)
                self.in_flight.track(row)

    def _open(self, row: int, handle: KVCacheHandle, tip: Node, key: bytes, done: int) -> Node:
        """The row grows in a node of its own behind `tip`, which holds its blocks up to `done`."""
        node = self.tree.new_child(tip, key, handle.serial, handle.ttl, handle.session, handle.copied_sessions)
        node.active = 1  # the row held the tip directly; now it does so through this node
        node.open_row = row
        self.rows.tips[row] = node
        self.rows.grows_alone_of[row] = handle.retention is None
        node.num_blocks = done - node.start  # the rest when it is read: `sync`
        self.tree.add(node)
        if tip.num_remainders:
            self.cache.drop_covered(tip, key)
        return node

    def publish_remainder(self, row: int, handle: KVCacheHandle, tip: Node) -> Node:
        """A row that ends leaves its last, unfilled block to the tree; returns the deepest node that it holds then.

        Nobody writes the block any more, so this costs no copy. It becomes free instead if a fork still holds it or if
        something that begins with the same tokens is cached behind `tip`, which is closed.
        """
        rows, size = self.rows, self.context.block_size
        first, start, end = tip.end, tip.end * size, rows.committed_of[row]
        if not 0 < end - start < size or not handle.publishes or tip.detached:
            return tip
        groups = self.context.cached
        ids = tuple([rows.tables[group.index][row, first : first + 1].copy() for group in groups])
        held = (group.gpu.refs[block[0]] > 1 for group, block in zip(groups, ids, strict=True))
        if handle.family is not None and any(held):
            return tip
        tokens = rows.final_token_ids(row, start, end, rows.num_history_of[row])
        key = tokens.tobytes()
        if tip.nearest_child(key)[1] == len(key):
            return tip
        if tip.num_remainders:
            self.cache.drop_covered(tip, key)
        node = self.tree.new_child(tip, key, handle.serial, handle.ttl, handle.session, handle.copied_sessions)
        node.is_remainder, node.num_blocks, node.tokens, node.ids = True, 1, tokens, ids
        node.active = 1  # as in `_open`
        self.tree.add(node)
        if self.events.listening and self.events.tells_unfilled:
            self._stored(handle, node)
        return node

    def _closed_child(self, readers: list[int], tip: Node, key: bytes, first: int, last: int) -> Node:
        rows, size = self.rows, self.context.block_size
        row = readers[0]
        handle = rows.handles[row]
        assert handle is not None
        node = self.tree.new_child(tip, key, handle.serial, handle.ttl, handle.session, handle.copied_sessions)
        node.num_blocks = last - first
        node.tokens = rows.ids_between(row, first * size, last * size)
        # The same ids in every row, but for windowed blocks that some of them have given up.
        node.ids = tuple([rows.tables[g.index][readers, first:last].max(axis=0) for g in self.context.cached])
        for group in self.context.cached:
            group.publish(node.ids[group.index])
        self.tree.add(node)
        if tip.num_remainders:
            self.cache.drop_covered(tip, key)
        return node

    def _merge(self, readers: list[int], tip: Node, child: Node, first: int) -> None:
        """The readers computed again what `child` holds: they take its blocks and free their own.

        What it has lost on the GPU, it takes from them.
        """
        rows = self.rows
        rows.moves += 1
        first_adopted = child.end
        if child.tier != GPU:
            own = [rows.tables[g.index][readers, first : child.end].max(axis=0) for g in self.context.cached]
            self.mover.adopt_blocks(child, own)
            first_adopted = first
        for reader in readers:
            handle = rows.handles[reader]
            assert handle is not None
            self.readers.hold(child)
            for group in self.context.full:
                self._adopt_full(reader, child, group, first, handle.family is not None)
            for group in self.context.windowed:
                first_adopted = min(first_adopted, self._adopt_windowed(reader, child, group, first))
            self.readers.release(tip)
            rows.tips[reader] = child
            handle.stats.merged_blocks += child.num_blocks
        if first_adopted < child.end:
            self._share_origin(readers, child, first_adopted)

    def _share_origin(self, readers: list[int], child: Node, first: int) -> None:
        """From block `first` on, a run holds blocks that these rows computed: what is wanted of theirs holds for it too.

        What it was published with stays: runs behind it were computed with the blocks that it had before.
        """
        for reader in readers:
            handle = self.rows.handles[reader]
            assert handle is not None
            new = any(child not in self.tree.sessions.get(name, ()) for name in handle.sessions)
            shorter = handle.ttl is not None and (child.ttl is None or handle.ttl < child.ttl)
            if (new or shorter) and child.start < first:
                self.tree.split(child, first - child.start)
            if new:
                self.tree.add_sessions(child, handle.sessions)
            if shorter:
                child.ttl = handle.ttl

    def _adopt_full(self, row: int, child: Node, group: Group, first: int, shared: bool) -> None:
        table = self.rows.tables[group.index]
        own, theirs = table[row, first : child.end], child.ids[group.index]
        doubled = own[own != theirs]
        if len(doubled):
            group.give_back(doubled, shared)
            self.context.counters.blocks_merged += len(doubled)
            table[row, first : child.end] = theirs

    def _adopt_windowed(self, row: int, child: Node, group: Group, first: int) -> int:
        """As `_adopt_full`, where the tree may have lost blocks that this row still has; returns where the first one is."""
        table = self.rows.tables[group.index]
        own, theirs = table[row, first : child.end], child.ids[group.index]
        lost, first_lost = (theirs < 0) & (own >= 0), child.end
        if lost.any():
            first_lost = first + int(lost.argmax())
            theirs = np.where(lost, own, theirs)
            child.set_ids(group.index, theirs)
            if child.digests is not None and self.events.listening:
                self.announcer.stored_blocks(child, group, np.flatnonzero(lost))
        doubled = (own >= 0) & (own != theirs)
        if doubled.any():
            self.windows.enter(child.root, group, theirs[doubled])
            group.gpu.release(own[doubled])
            self.context.counters.blocks_merged += int(doubled.sum())
            table[row, first : child.end] = np.where(doubled, theirs, own)
        return first_lost

    def close(self, row: int) -> None:
        """Ends the growth of a row's open node: the node gets arrays of its own and may have other readers."""
        rows = self.rows
        node = rows.tips[row]
        assert node is not None and node.open_row == row
        size = self.context.block_size
        start, end = node.start, rows.committed_of[row] // size
        node.open_row = -1
        node.num_blocks = end - start
        node.tokens = rows.final_token_ids(row, start * size, end * size, rows.num_history_of[row])
        if self.has_one_group:
            place = row * rows.num_columns
            node.ids = (copied(rows.first_table, place + start, place + end),)
        else:
            node.ids = tuple([rows.tables[group.index][row, start:end].copy() for group in self.context.cached])
        rows.grows_alone_of[row] = False
