"""What left the tree, remembered with its tokens, so that a prompt that comes back can be told why it is not there.

The tokens of a block are 64 bytes, its keys and values a hundred kilobytes or more: much more can be remembered than is
held. When a run leaves, nothing is copied and nothing looked up: the array of its tokens stays, in a tuple with what else is
known. It is put where a prompt finds it when somebody asks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from kvpool.core.node import Node
from kvpool.eviction.policy import checksum
from kvpool.pools.arrays import Int32Array, as_bytes, num_common
from kvpool.scope import ReuseScope
from kvpool.stats import EvictionReason

MAX_LOST: Final = 2**18  # beginnings of forgotten pieces that are told from those of what never was; about 40 MB
NUM_SIBLINGS: Final = 64  # runs of one place among which the one most like a prompt is looked for
Place: TypeAlias = tuple[int, int, int]  # hash of the scope, depth, checksum of all tokens before


class Piece(NamedTuple):
    """Blocks of a run that left together: those from `first` on. The tokens before these tell whose they are."""

    number: int  # of all that ever left, in their order
    place: Place  # where the run begins
    key: bytes  # its first block
    scope: ReuseScope
    first: int
    num_blocks: int  # of the run, those before `first` included
    tokens: Int32Array
    reason: EvictionReason
    left_at: float
    request_id: Hashable  # of who published it
    session: str | None
    asker: tuple[str, Hashable] | None  # tenant and id of the request that was to be admitted then, if one was

    @property
    def start(self) -> int:
        """The depth of its run."""
        return self.place[1]


class Recalled(NamedTuple):
    """What is remembered of a prompt."""

    latest: dict[int, Piece]  # by depth: the piece with which a block left last
    end: int  # the depth of its first block that neither was there when it was asked for, nor is remembered
    is_forgotten: bool  # something that began like the prompt and went on behind `end` was forgotten
    branches: list[tuple[Piece, int]]  # pieces that part from the prompt in that block, and at which of its tokens


class Departed:
    """The runs that left, of at most `max_blocks` blocks; the oldest are forgotten first.

    Whoever uses it holds the manager's lock. Of a forgotten piece its beginning is kept and where it ended: so a prompt that
    was never seen is told from one that is forgotten. `since` is None while that is so for all that ever left.
    """

    def __init__(self, max_blocks: int, block_size: int, max_lost: int = MAX_LOST) -> None:
        self.block_size = block_size
        self.since: float | None = None  # what left before that time may be taken for what never was
        self.number = 0  # of the last piece
        self._max_blocks = max_blocks
        self._max_lost = max_lost
        self._num_blocks = 0
        self._asker: tuple[str, Hashable] | None = None
        self._asked_at = -1
        self._pending: list[tuple[Any, ...]] = []  # pieces that nobody looked at
        self._known: dict[int, Piece] = {}  # the others by number, all of them older
        self._at: dict[Place, dict[bytes, list[Piece]]] = {}
        self._lost: dict[
            tuple[Place, bytes], int
        ] = {}  # beginnings of forgotten pieces: the depth where the last one ended

    def note_asker(self, tenant: str, request_id: Hashable, tick: int) -> None:
        """What leaves in the operation of this tick makes room for a request."""
        self._asker, self._asked_at = (tenant, request_id), tick

    def note(self, node: Node, first: int, reason: EvictionReason, now: float, tick: int) -> None:
        """The blocks of a synced run from `first` on leave the tree."""
        self.number = number = self.number + 1
        num_blocks, sum_before = node.num_blocks, node.parent.end_sum
        self._pending.append(
            (
                number,
                (node.scope_hash, node.start, sum_before if sum_before >= 0 else node.sum_before),
                node.key,
                node.root.scope,
                first,
                num_blocks,
                node.tokens,
                reason,
                now,
                node.request_id,
                node.session,
                self._asker if tick == self._asked_at else None,
            )
        )
        self._num_blocks += num_blocks - first
        if self._num_blocks > self._max_blocks:
            self._forget()

    def recall(self, scope: ReuseScope, tokens: Int32Array, first: int, known: int, newest: int) -> Recalled:
        """What is remembered of a prompt whose blocks before `first` are cached, and before `known` at least about to be.

        Pieces after the number `newest` count only where the prompt parts from them.
        """
        self._look_at_pending()
        size, scope_hash, before, depth, lost_until = self.block_size, hash(scope), 0, 0, 0
        num_blocks = len(tokens) // size
        latest: dict[int, Piece] = {}
        parting: list[tuple[int, int, Piece]] = []  # by the token where it parts, and by age
        while depth <= known and depth < num_blocks:
            place, key = (scope_hash, depth, before), as_bytes(tokens, depth * size, (depth + 1) * size)
            for piece in self._at.get(place, _NOTHING).get(key, ()):
                if piece.scope != scope:
                    continue
                shared = depth * size + num_shared(piece.tokens, tokens[depth * size :])
                parting.append((shared, piece.number, piece))
                if piece.number <= newest:  # the last one of a list left last
                    for block in range(max(first, depth + piece.first), shared // size):
                        if block not in latest or latest[block].number < piece.number:
                            latest[block] = piece
            lost_until = max(lost_until, self._lost.get((place, key), 0))
            before = checksum(key, before)
            while known in latest:
                known += 1
            depth += 1
        if known < num_blocks:
            parting += self._siblings(place, scope, tokens)
        branches = [
            (at, p.start + p.num_blocks, number, p)
            for at, number, p in parting
            if known <= at // size < p.start + p.num_blocks
        ]
        branches.sort(reverse=True)
        parted = [(piece, at) for at, _, _, piece in branches if at // size == branches[0][0] // size]
        return Recalled(latest, known, lost_until > known, parted)

    def _siblings(self, place: Place, scope: ReuseScope, tokens: Int32Array) -> Iterator[tuple[int, int, Piece]]:
        """The youngest runs that began at a place: which token of the prompt is the first that they do not have."""
        if place[1] * self.block_size > len(tokens):
            return
        query = as_bytes(tokens, place[1] * self.block_size, (place[1] + 1) * self.block_size)
        for key, pieces in islice(reversed(self._at.get(place, _NOTHING).items()), NUM_SIBLINGS):
            if key != query and pieces[-1].scope == scope:
                shared = num_common(key, query) // 4
                yield place[1] * self.block_size + shared, pieces[-1].number, pieces[-1]

    def following(self, piece: Piece) -> Iterator[Piece]:
        """Pieces that went on where this one ended, one behind the other, the youngest of several."""
        found: Piece | None = piece
        while found is not None:
            place = found.place[0], found.start + found.num_blocks, checksum(found.tokens.data, found.place[2])
            behind = [
                pieces[-1] for pieces in self._at.get(place, _NOTHING).values() if pieces[-1].scope == piece.scope
            ]
            found = max(behind, default=None)
            if found is not None:
                yield found

    # --- the work ----------------------------------------------------------------------------------------------------

    def _look_at_pending(self) -> None:
        """Puts what left since the last time where prompts find it."""
        for piece in map(Piece._make, self._pending):
            at_place = self._at.setdefault(piece.place, {})
            older = at_place.pop(piece.key, _NO_PIECES)  # a place has the youngest last
            at_place[piece.key] = [*filter(None, (self._without(old, piece) for old in older)), piece]
            self._known[piece.number] = piece
        self._pending.clear()

    def _without(self, old: Piece, piece: Piece) -> Piece | None:
        """What is left of a piece once blocks of it left again with another one; None if nothing is."""
        size, end = self.block_size, max(old.first, min(old.num_blocks, piece.first))
        beyond = old.num_blocks > piece.num_blocks or end == old.num_blocks
        if beyond or num_shared(piece.tokens, old.tokens) < old.num_blocks * size:
            return old
        self._num_blocks -= old.num_blocks - end
        if end == old.first:
            del self._known[old.number]
            return None
        rest = self._known[old.number] = old._replace(num_blocks=end, tokens=old.tokens[: end * size])
        return rest

    def _forget(self) -> None:
        """Forgets the oldest pieces, some more than must be."""
        enough = self._max_blocks - self._max_blocks // 64
        left_at = None
        known, at = self._known, self._at
        while known and self._num_blocks > enough:
            piece = known.pop(next(iter(known)))
            at_place = at[piece.place]
            alike = at_place[piece.key]
            del alike[0]  # the oldest of them
            if not alike:
                del at_place[piece.key]
                if not at_place:
                    del at[piece.place]
            self._lose(piece.place, piece.key, piece.first, piece.num_blocks)
            left_at = piece.left_at
        gone = 0
        while self._num_blocks > enough:
            _, place, key, _, first, num_blocks, _, _, left_at, *_ = self._pending[gone]
            self._lose(place, key, first, num_blocks)
            gone += 1
        del self._pending[:gone]
        if len(self._lost) > self._max_lost:
            self._lost = dict(islice(self._lost.items(), self._max_lost // 2, None))
            self.since = left_at

    def _lose(self, place: Place, key: bytes, first: int, num_blocks: int) -> None:
        lost, end = self._lost, place[1] + num_blocks
        self._num_blocks -= num_blocks - first
        lost[place, key] = max(end, lost.pop((place, key), 0))


def num_shared(tokens: Int32Array, prompt: Int32Array) -> int:
    """How many leading tokens two arrays share."""
    length = min(len(tokens), len(prompt))
    differs = tokens[:length] != prompt[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


_NO_PIECES: list[Piece] = []
_NOTHING: dict[bytes, list[Piece]] = {}
