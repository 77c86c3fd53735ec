"""The messages of one node in their order, whatever was lost, sent twice or started over, into an index.

A feed decides by numbers and by nothing else that a network can change; timestamps only tell whether a number that comes
again is the same message, so clocks need not agree. Where messages are missing, it asks for them, keeps what comes meanwhile,
and goes on. Where they cannot be had, it forgets the node rather than keep blocks whose removal it may have missed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.wire_events import AllBlocksCleared, WireBatch

_REMEMBERED = 1024
_MOST_WAITING = 10_000
_ATTEMPTS = 3


class FeedStats(NamedTuple):
    """What happened to a feed: messages applied, sent twice and missed for good, gaps, and how often the node began anew."""

    num_applied: int
    num_duplicates: int
    num_lost: int
    num_gaps: int
    num_restarts: int


class NodeFeed:
    """Follows one node. `can_replay` says whether missing messages can be asked for.

    Its owner hands it live messages, and whenever `wanted` is a number, asks the node for the messages from there on and
    hands those to `replayed`, then calls `replay_ended`, also when nothing came.
    """

    def __init__(self, index: ClusterIndex, node: Hashable, *, can_replay: bool) -> None:
        self._index = index
        self._node = node
        self._can_replay = can_replay
        self._next: int | None = None  # the number of the next message; None before the first
        self._stamps: OrderedDict[int, float] = OrderedDict()
        self._waiting: list[tuple[int, WireBatch]] | None = None  # what came while others are asked for
        self._attempts = 0
        self._num_applied = self._num_duplicates = self._num_lost = self._num_gaps = self._num_restarts = 0
        index.add_node(node)

    @property
    def wanted(self) -> int | None:
        """The number from which on messages are missing and should be asked for; None if all is well."""
        return None if self._waiting is None else self._next or 0

    @property
    def stats(self) -> FeedStats:
        """What happened so far."""
        return FeedStats(self._num_applied, self._num_duplicates, self._num_lost, self._num_gaps, self._num_restarts)

    def live(self, number: int, batch: WireBatch) -> None:
        """A message as it was sent."""
        if self._waiting is not None:
            if len(self._waiting) == _MOST_WAITING:
                self._waiting.clear()  # the next gap will show it
            self._waiting.append((number, batch))
        elif self._next is not None and number < self._next:
            self._again(number, batch)
        elif number == (self._next or 0):
            self._apply(number, batch)
        else:
            self._num_gaps += 1
            self._missing(number, batch)

    def replayed(self, number: int, batch: WireBatch) -> None:
        """A message that was asked for."""
        is_snapshot = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        expected = self._next or 0
        if number < expected and not is_snapshot:
            self._num_duplicates += 1
            return
        if number > expected and not is_snapshot:
            self._lose(number - expected)
        self._apply(number, batch)

    def replay_ended(self) -> None:
        """All that was asked for has come, or nothing will come."""
        waiting, self._waiting = self._waiting or [], None
        self._attempts += 1
        for number, batch in waiting:
            if self._waiting is None and self._next is not None and number < self._next:
                self._num_duplicates += 1
            elif self._waiting is None and number != (self._next or 0):
                self._missing(number, batch)
            elif self._waiting is None:
                self._apply(number, batch)
            else:
                self._waiting.append((number, batch))
        if self._waiting is None:
            self._attempts = 0

    def start_over(self) -> None:
        """The connection broke or the node is gone: what it held is not known any more, until it says so."""
        self._index.clear_node(self._node)
        self._next = None
        self._stamps.clear()
        self._waiting = [] if self._can_replay else None
        self._attempts = 0

    # --- what a message is -------------------------------------------------------------------------------------------

    def _apply(self, number: int, batch: WireBatch) -> None:
        self._index.apply(self._node, batch.events)
        self._next = number + 1
        self._num_applied += 1
        self._stamps[number] = batch.timestamp
        if len(self._stamps) > _REMEMBERED:
            self._stamps.popitem(last=False)

    def _again(self, number: int, batch: WireBatch) -> None:
        """A number that was there: the same message, or the first ones of a node that began anew."""
        stamp = self._stamps.get(number)
        oldest = next(iter(self._stamps.values()), batch.timestamp)
        is_same = batch.timestamp == stamp if stamp is not None else number > 0 and batch.timestamp <= oldest
        if is_same:
            self._num_duplicates += 1
            return
        self._num_restarts += 1
        self._index.clear_node(self._node)
        self._next = None
        self._stamps.clear()
        if number == 0:
            self._apply(number, batch)
        else:
            self._missing(number, batch)

    def _missing(self, number: int, batch: WireBatch) -> None:
        """Messages before this one are missing: they are asked for, or the node's blocks are not known any more."""
        if self._can_replay and self._attempts < _ATTEMPTS:
            self._waiting = [(number, batch)]
        else:
            self._attempts = 0
            self._lose(number - (self._next or 0))
            self._apply(number, batch)

    def _lose(self, num_messages: int) -> None:
        """Goes on without messages. What they removed is not known, so nothing is: a block that is there may come again."""
        self._num_lost += num_messages
        self._index.clear_node(self._node)
