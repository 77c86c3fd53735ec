"""What left the tree, remembered with its tokens, so that a prompt that comes back can be told why it is not there.

The tokens of a block are 64 bytes, its keys and values a hundred kilobytes or more: much more can be remembered than is
held. When a run leaves, nothing is copied and nothing looked up: the array of its tokens stays, in a tuple with what else is
known. It is put where a prompt finds it when somebody asks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import islice
from operator import add
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.core.node import Node
from kvpool.eviction.policy import checksum
from kvpool.pools.arrays import Int32Array, as_bytes, num_common
from kvpool.scope import ReuseScope
from kvpool.stats import EvictionReason

MAX_LOST: Final = 2**18  # beginnings of forgotten pieces that are told from those of what never was; at most 25 MB
NUM_SIBLINGS: Final = 64  # runs of one place among which the one most like a prompt is looked for
Place: TypeAlias = tuple[int, int, int]  # hash of the scope, depth, checksum of all tokens before
WIDTH: Final = 14  # fields of a row
CHUNK: Final = 128 * WIDTH


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
    asker: tuple[str, Hashable] | None = None  # tenant and id of the request that was to be admitted then, if one was

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

    Until somebody asks, what left is rows of 14 fields, one behind the other in arrays of objects. The garbage collector
    neither counts these nor looks into them; with an object for each piece its work costs more than all else here.
    """

    def __init__(self, max_blocks: int, block_size: int, max_lost: int = MAX_LOST) -> None:
        self.block_size = block_size
        self.since: float | None = None  # what left before that time may be taken for what never was
        self.number = 0  # of the last piece
        # Tenant and id of the request that was to be admitted last, and in which tick: what leaves then makes room for it
        self.asker: tuple[str | None, Hashable] = (None, None)
        self.asked_at = -1
        self._max_blocks = max_blocks
        self._max_lost = max_lost
        self._num_blocks = 0
        self._newest: list[Any] = []  # rows of pieces that nobody looked at
        self._chunks: deque[npt.NDArray[Any]] = deque()  # older ones
        self._known: dict[int, Piece] = {}  # the others by number, all of them older
        self._at: dict[Place, dict[bytes, list[Piece]]] = {}
        # Of forgotten pieces: the depth where the last one ended, by the hash of the place and the first block
        self._lost: dict[int, int] = {}
        self._lost_unseen = array("q"), array("q")  # the same of what was forgotten since somebody looked

    def note(self, node: Node, first: int, reason: EvictionReason, now: float, tick: int) -> None:
        """The blocks of a synced run from `first` on leave the tree."""
        self.number += 1
        num_blocks, sum_before = node.num_blocks, node.parent.end_sum
        tenant, request_id = self.asker if tick == self.asked_at else _NOBODY
        newest = self._newest
        newest += (
            node.scope_hash,
            node.start,
            sum_before if sum_before >= 0 else node.sum_before,
            node.key,
            first,
            num_blocks,
            node.root.scope,
            node.tokens,
            reason,
            now,
            node.request_id,
            node.session,
            tenant,
            request_id,
        )
        self._num_blocks = total = self._num_blocks + num_blocks - first
        if len(newest) >= CHUNK:
            self._chunks.append(np.fromiter(newest, object, len(newest)))
            newest.clear()
        if total > self._max_blocks:
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
            lost_until = max(lost_until, self._lost.get(hash((*place, key)), 0))
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
        number = self.number - (len(self._newest) + sum(map(len, self._chunks))) // WIDTH
        for chunk in (*(chunk.tolist() for chunk in self._chunks), self._newest):
            for row in zip(*[iter(chunk)] * WIDTH, strict=True):
                number += 1
                scope_hash, start, before, key, first, num_blocks, scope, tokens, reason, now, name, session, *asker = (
                    row
                )
                piece = Piece(
                    number,
                    (scope_hash, start, before),
                    key,
                    scope,
                    first,
                    num_blocks,
                    tokens,
                    reason,
                    now,
                    name,
                    session,
                )
                if asker[0] is not None:
                    piece = piece._replace(asker=(asker[0], asker[1]))
                at_place = self._at.setdefault(piece.place, {})
                older = at_place.pop(piece.key, _NO_PIECES)  # a place has the youngest last
                at_place[piece.key] = [*filter(None, (self._without(old, piece) for old in older)), piece]
                self._known[number] = piece
        self._chunks.clear()
        self._newest = []
        for beginning, end in zip(*self._lost_unseen, strict=True):
            self._lose(beginning, end)
        self._lost_unseen = array("q"), array("q")

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
            self._num_blocks -= piece.num_blocks - piece.first
            self._lose(hash((*piece.place, piece.key)), piece.start + piece.num_blocks)
            self._bound_lost(piece.left_at)
        while self._num_blocks > enough:
            rows, count = self._chunks.popleft().tolist() if self._chunks else self._newest, 0
            while count < len(rows) and self._num_blocks > enough:
                self._num_blocks -= rows[count + 5] - rows[count + 4]
                count += WIDTH
            self._lose_rows(rows[:count])
            del rows[:count]
            if rows and rows is not self._newest:
                self._chunks.appendleft(np.fromiter(rows, object, len(rows)))

    def _lose_rows(self, rows: list[Any]) -> None:
        beginnings, ends = self._lost_unseen
        beginnings.extend(map(hash, zip(*(rows[field::WIDTH] for field in range(4)), strict=True)))
        ends.extend(map(add, rows[1::WIDTH], rows[5::WIDTH]))
        self._bound_lost(rows[9 - WIDTH])

    def _lose(self, beginning: int, end: int) -> None:
        lost = self._lost
        lost[beginning] = max(end, lost.pop(beginning, 0))

    def _bound_lost(self, left_at: float) -> None:
        """Forgets the older half of the beginnings if they are too many."""
        beginnings, ends = self._lost_unseen
        gone = len(self._lost) + len(ends) - self._max_lost // 2
        if gone <= self._max_lost // 2:
            return
        unseen = max(0, gone - len(self._lost))
        self._lost = dict(islice(self._lost.items(), gone, None))
        del beginnings[:unseen], ends[:unseen]
        self.since = left_at


def num_shared(tokens: Int32Array, prompt: Int32Array) -> int:
    """How many leading tokens two arrays share."""
    length = min(len(tokens), len(prompt))
    differs = tokens[:length] != prompt[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


_NOBODY: Final = (None, None)
_NO_PIECES: list[Piece] = []
_NOTHING: dict[bytes, list[Piece]] = {}
