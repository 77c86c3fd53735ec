"""Where a prompt parts from earlier ones that have the same text behind that place."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.core.cache import Cache
from kvpool.core.departed import NUM_SIBLINGS, Departed, Piece, num_shared
from kvpool.core.handle import KVCacheHandle
from kvpool.core.node import Node
from kvpool.core.prompt import Match
from kvpool.pools.arrays import BoolArray, Int32Array, as_bytes
from kvpool.scope import ReuseScope
from kvpool.sequences.missed import Divergence, MissedSpan
from kvpool.stats import MissCause

WINDOW: Final = 16  # so many equal tokens in a row, at any place, are the same content
AROUND: Final = 8  # tokens that are shown on each side where prompts part
MOST_OTHERS: Final = 8  # earlier prompts that are looked at to say how many part at one place


class Question(NamedTuple):
    """What is asked about, and what is known at the beginning."""

    scope: ReuseScope
    tokens: Int32Array
    match: Match
    num_cached: int  # tokens that are served
    newest: int  # of the pieces that had left by then
    serial: int  # of the request that it is; those with a higher one came later
    is_for_all: bool  # whoever asks may know of all tenants


class Earlier(NamedTuple):
    """An earlier prompt that went on with other tokens than the one asked about."""

    at: int  # the first token that differs
    tokens: Int32Array  # its own from there on
    request_id: Hashable
    session: str | None


def never_there(
    asked: Question, start: int, earlier: Earlier | None, others: Iterable[Earlier], unseen: float | None
) -> Iterator[MissedSpan]:
    """Tokens from `start` on, which are in no block that was ever here behind the tokens before them.

    `earlier` is the prompt that they followed for the longest time, and `others` may part from them where it does.
    """
    total = len(asked.tokens)
    if earlier is None:
        yield MissedSpan(start, total, MissCause.FIRST_SEEN, unseen)
        return
    at = max(start, earlier.at)
    yield MissedSpan(start, at, MissCause.REST_OF_BLOCK)
    again, place = _repeated(asked.tokens[at:], earlier.tokens)
    if not again.any():
        yield MissedSpan(at, total, MissCause.FIRST_SEEN, unseen)
        return
    here = at + int(again.argmax())
    detail = Divergence(
        earlier.at,
        earlier.request_id,
        earlier.session,
        tuple(asked.tokens[max(0, earlier.at - AROUND) : earlier.at].tolist()),
        tuple(asked.tokens[earlier.at : earlier.at + AROUND].tolist()),
        tuple(earlier.tokens[:AROUND].tolist()),
        here - earlier.at - place,
        here,
        1 + _num_alike(earlier, others, asked.tokens[here : here + WINDOW]),
    )
    edges = [0, *(np.flatnonzero(again[1:] != again[:-1]) + 1).tolist(), len(again)]
    for begin, end in pairwise(edges):
        if again[begin]:
            yield MissedSpan(at + begin, at + end, MissCause.DIVERGED, detail)
        else:
            yield MissedSpan(at + begin, at + end, MissCause.FIRST_SEEN, unseen)


def _num_alike(earlier: Earlier, others: Iterable[Earlier], text: Int32Array) -> int:
    """How many of the others go on with tokens of their own, and have a text behind them."""
    searched = text.tobytes()
    seen = {earlier.tokens[:AROUND].tobytes()}
    for other in islice(others, MOST_OTHERS):
        begin, tokens = other.tokens[:AROUND].tobytes(), other.tokens.tobytes()
        found = tokens.find(searched)
        while found % 4 and found >= 0:  # between two tokens
            found = tokens.find(searched, found + 1)
        if found >= 0:
            seen.add(begin)
    return len(seen) - 1


def _repeated(tokens: Int32Array, earlier: Int32Array) -> tuple[BoolArray, int]:
    """Which tokens are in a run of `WINDOW` that the earlier prompt has, too; and where it has the first such run."""
    again = np.zeros(len(tokens), np.bool_)
    if min(len(tokens), len(earlier)) < WINDOW:
        return again, 0
    mine, theirs = _windows(tokens), _windows(earlier)
    for begin in np.flatnonzero(np.isin(mine, theirs)).tolist():
        again[begin : begin + WINDOW] = True
    place = int((theirs == mine[again.argmax()]).argmax()) if again.any() else 0
    return again, place


def _windows(tokens: Int32Array) -> npt.NDArray[np.uint64]:
    """A hash of every `WINDOW` tokens in a row."""
    count = len(tokens) - WINDOW + 1
    wide = tokens.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for offset in range(WINDOW):
        hashes = hashes * _FACTOR + wide[offset : offset + count]
    return hashes


def live_branches(cache: Cache, asked: Question) -> Iterator[Earlier]:
    """What is cached behind the matched blocks: the run most like the prompt, and the others, the youngest first."""
    size, match = cache.block_size, asked.match
    if match.root is None:
        return
    tip: Node = match.path[-1] if match.path else match.root
    start = match.num_blocks * size
    if tip.end > match.num_blocks:
        yield _earlier(asked, tip, start)
    elif tip.children is not None:
        nearest, _ = tip.children.nearest(as_bytes(asked.tokens, start, start + size))
        others = (node for node in islice(reversed(tip.children.values()), NUM_SIBLINGS) if node is not nearest)
        for node in (nearest, *others):
            if node is not None and node.published_by < asked.serial:
                node.sync()
                yield _earlier(asked, node, start)


def _earlier(asked: Question, node: Node, start: int) -> Earlier:
    """The prompt that goes on with a run from the token `start` on, where the prompt asked about does so, too."""
    tokens = node.tokens[start - node.start * node.root.rows.block_size :]
    shared = num_shared(tokens, asked.tokens[start:])
    parts, length = [tokens[shared:]], len(tokens) - shared
    following: Node | None = node
    while following is not None and following.children is not None and length < 2 * len(asked.tokens):
        following = next((n for n in reversed(following.children.values()) if n.published_by < asked.serial), None)
        if following is not None:
            following.sync()
            parts.append(following.tokens)
            length += len(following.tokens)
    return Earlier(start + shared, np.concatenate(parts), node.request_id, node.session)


def departed_branch(departed: Departed, piece: Piece, at: int) -> Earlier:
    """The prompt of which a piece left that parts from the prompt asked about at a token."""
    parts = [piece.tokens[at - piece.start * departed.block_size :]]
    parts += [following.tokens for following in departed.following(piece)]
    return Earlier(at, np.concatenate(parts), piece.request_id, piece.session)


def busy_branch(cache: Cache, asked: Question, busy: KVCacheHandle) -> Earlier:
    """A prompt that is computed now."""
    ids = cache.rows.token_ids(busy.row)
    at = num_shared(ids, asked.tokens)
    return Earlier(at, ids[at:], busy.request_id, busy.session)


_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
