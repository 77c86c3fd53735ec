"""Why tokens of a prompt were not served from the cache: each of them for one cause. Nothing is changed.

The answer follows the prompt. Behind what the tree holds come blocks that left it, which are remembered (`core/departed.py`),
and blocks that a live request computes. Behind these the prompt has blocks that never were in its scope. For them the answer
looks at other scopes of the tenant, and at the earlier prompt that the prompt followed for the longest time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice, pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.core.cache import Cache
from kvpool.core.departed import NUM_SIBLINGS, Departed, Piece, num_shared
from kvpool.core.handle import KVCacheHandle
from kvpool.core.node import Node
from kvpool.core.prompt import Match, Prompt
from kvpool.pools.arrays import BoolArray, Int32Array, as_bytes
from kvpool.pools.pool import GPU
from kvpool.prefix.tree import match_tokens
from kvpool.scope import ReuseScope
from kvpool.sequences.admit import find_match
from kvpool.stats import EvictionReason, MissCause

WINDOW: Final = 16  # so many equal tokens in a row, at any place, are the same content
AROUND: Final = 8  # tokens that are shown on each side where prompts part
OTHERS: Final = "others"  # what another tenant did


class Departure(NamedTuple):
    """Of what left: why, how long ago, and for which request room was made, if one was admitted then.

    Of another tenant's request only "others" is said, unless an admin asks.
    """

    reason: EvictionReason
    seconds_ago: float
    tenant: str | None
    request_id: Hashable


class Divergence(NamedTuple):
    """Of what an earlier prompt had, too: where the two part, and how."""

    at: int  # the first token that differs
    request_id: Hashable  # of the earlier prompt
    session: str | None
    before: tuple[int, ...]  # a few tokens that both have before it
    here: tuple[int, ...]  # a few tokens of this prompt from there on
    there: tuple[int, ...]  # and of the earlier one
    moved_by: int  # how much farther back the first of the tokens that come again stands now


class Elsewhere(NamedTuple):
    """Of what another scope holds: which one, and in which fields it differs. A salt is shown to nobody but an admin."""

    scope: ReuseScope
    differs_in: tuple[str, ...]


Detail: TypeAlias = Departure | Divergence | Elsewhere | Hashable | None


class MissedSpan(NamedTuple):
    """Tokens `start..end` of a prompt that were not served from the cache, all for the same cause.

    `detail` is a `Departure` of what was evicted, invalidated or expired; a `Divergence` of what diverged; `Elsewhere` for
    another scope; the id of the request that computes what is in flight; of what was first seen the time in seconds for
    which the memory tells it from what was forgotten (None: for ever). Else None.
    """

    start: int
    end: int
    cause: MissCause
    detail: Detail = None

    @property
    def words(self) -> str:
        """The cause and what helps, for people. It tells no more than the detail."""
        detail = self.detail
        if isinstance(detail, Divergence):
            moved = "" if not detail.moved_by else f", {abs(detail.moved_by)} tokens {_TO[detail.moved_by > 0]}"
            return (
                f"an earlier prompt (request {detail.request_id}) has this, too{moved}, but differs from token {detail.at} "
                "on: put what changes, as a date, behind what stays; keep tools in one order; cut a history at its end"
            )
        if isinstance(detail, Departure):
            whose = detail.request_id if detail.request_id is not None else detail.tenant
            room = "" if whose is None else f" to make room for {whose}"
            return f"left the cache {detail.seconds_ago:.0f} s ago ({detail.reason.value}){room}: {_HELP[self.cause]}"
        if isinstance(detail, Elsewhere):
            names = " and ".join("cache_salt" if name == "salt" else name for name in detail.differs_in)
            return f"is cached for another {names}: {_HELP[self.cause]}"
        return _HELP[self.cause]


def tokens_by_cause(spans: Iterable[MissedSpan]) -> dict[MissCause, int]:
    """How many tokens missed for each cause."""
    missed: dict[MissCause, int] = {}
    for span in spans:
        missed[span.cause] = missed.get(span.cause, 0) + span.end - span.start
    return missed


class _Earlier(NamedTuple):
    """An earlier prompt that went on with other tokens than the one asked about."""

    at: int  # the first token that differs
    tokens: Int32Array  # its own from there on
    request_id: Hashable
    session: str | None


class _Question(NamedTuple):
    """What is asked about, and what is known at the beginning."""

    scope: ReuseScope
    tokens: Int32Array
    match: Match
    num_cached: int  # tokens that are served
    newest: int  # of the pieces that had left by then
    serial: int  # of the request that it is; those with a higher one came later
    is_for_all: bool  # whoever asks may know of all tenants


_LAST = 2**62
_CAUSES: Final = {EvictionReason.EXPIRED: MissCause.EXPIRED} | dict.fromkeys(
    (EvictionReason.INVALIDATED, EvictionReason.RESET), MissCause.INVALIDATED
)


def explain(cache: Cache, departed: Departed, prompt: Prompt, is_for_all: bool) -> list[MissedSpan]:
    """What a prompt would miss if it were admitted now, and why."""
    match = find_match(cache, prompt)
    if match.tokens is None:
        return []
    if not prompt._is_named:
        return [MissedSpan(0, len(match.tokens), MissCause.OTHER_SCOPE)]
    num_cached = match.num_tokens(cache.block_size)
    whole = match_tokens(cache, prompt._scope, match.tokens, partial=True)  # also what cannot be reused
    question = _Question(prompt._scope, match.tokens, whole, num_cached, departed.number, _LAST, is_for_all)
    return _joined(_spans(cache, departed, question))


def explain_request(cache: Cache, departed: Departed, handle: KVCacheHandle, is_for_all: bool) -> list[MissedSpan]:
    """What a live request missed when it was admitted. Asked later, it knows less of who computed the same then."""
    tokens = cache.rows.token_ids(handle.row)[: handle.num_prompt_tokens]
    if handle.num_fixed_tokens and not handle.scope.encoder:
        return [MissedSpan(0, len(tokens), MissCause.OTHER_SCOPE)] if len(tokens) else []
    match = match_tokens(cache, handle.scope, tokens[: handle.num_matched_tokens])
    question = _Question(
        handle.scope, tokens, match, handle.num_cached_tokens, handle.departed, handle.serial, is_for_all
    )
    return _joined(_spans(cache, departed, question))


def _spans(cache: Cache, departed: Departed, asked: _Question) -> Iterator[MissedSpan]:
    """Spans from the first missed token on; some are empty, and neighbours may be alike."""
    tokens, size, served, first = asked.tokens, cache.block_size, asked.num_cached, asked.match.num_blocks
    num_blocks = len(tokens) // size
    if served == len(tokens):
        return
    yield from _there(cache, asked)
    busy, known = _in_flight(cache, asked)
    if busy is not None:
        yield MissedSpan(max(served, first * size), known * size, MissCause.IN_FLIGHT, busy.request_id)
    found = departed.recall(asked.scope, tokens, first, known, asked.newest)
    for depth in range(known, found.end):
        piece = found.latest[depth]
        cause = _CAUSES.get(piece.reason, MissCause.EVICTED)
        yield MissedSpan(max(served, depth * size), (depth + 1) * size, cause, _departure(cache, asked, piece))
    start = max(served, found.end * size)
    if found.end == num_blocks:
        yield MissedSpan(start, len(tokens), MissCause.REST_OF_BLOCK)
    elif found.is_forgotten:
        yield MissedSpan(start, len(tokens), MissCause.FORGOTTEN)
    else:
        elsewhere, end = _elsewhere(cache, asked, found.end)
        if elsewhere is not None:
            yield MissedSpan(start, end, MissCause.OTHER_SCOPE, elsewhere)
        earlier = [] if found.branch is None else [_departed_branch(departed, *found.branch)]
        if found.end == known:
            earlier += _live_branch(cache, asked) if busy is None else [_busy_branch(cache, asked, busy)]
        unseen = None if departed.since is None else cache.now - departed.since
        yield from _never_there(asked, max(start, end), max(earlier, key=lambda e: e.at, default=None), unseen)


# --- what is known -----------------------------------------------------------------------------------------------------


def _there(cache: Cache, asked: _Question) -> Iterator[MissedSpan]:
    """What is cached and was not reused."""
    last, path = len(asked.tokens) - 1, asked.match.path
    end = min(asked.match.num_blocks * cache.block_size, last)
    if asked.num_cached < end:
        on_tier = path[-1].tier != GPU
        cause = MissCause.NO_STATE if cache.by_block else MissCause.ON_TIER if on_tier else MissCause.REST_OF_BLOCK
        yield MissedSpan(asked.num_cached, end, cause)
    if asked.match.num_blocks * cache.block_size > last:
        yield MissedSpan(last, last + 1, MissCause.REST_OF_BLOCK)


def _in_flight(cache: Cache, asked: _Question) -> tuple[KVCacheHandle | None, int]:
    """The request that is computing the blocks behind the cached ones, and up to which depth they are the same."""
    rows, size, tokens = cache.rows, cache.block_size, asked.tokens
    found, known = None, asked.match.num_blocks
    start, stop = known * size, (known + 1) * size
    for handle in cache.requests.values() if stop <= len(tokens) else ():
        row, came_before = handle.row, handle.serial < asked.serial and handle.scope == asked.scope
        if not came_before or not handle.publishes or handle.swapped is not None or rows.known_of[row] < stop:
            continue
        if (rows.ids_between(row, start, stop) == tokens[start:stop]).all():
            end = num_shared(rows.token_ids(row), tokens) // size
            if end > known:
                found, known = handle, end
    return found, known


def _departure(cache: Cache, asked: _Question, piece: Piece) -> Departure:
    tenant, request_id = (None, None) if piece.asker is None else piece.asker
    if tenant is not None and tenant != asked.scope.tenant and not asked.is_for_all:
        tenant, request_id = OTHERS, None
    return Departure(piece.reason, cache.now - piece.left_at, tenant, request_id)


def _elsewhere(cache: Cache, asked: _Question, known: int) -> tuple[Elsewhere | None, int]:
    """The scope that holds most of the prompt behind the block `known`, of those that may be told, and up to which token."""
    best, depth = None, known
    for scope in list(cache.roots):
        if scope != asked.scope and (asked.is_for_all or scope.tenant == asked.scope.tenant):
            length = match_tokens(cache, scope, asked.tokens).num_blocks
            if length > depth:
                best, depth = scope, length
    if best is None:
        return None, 0
    names = tuple(each.name for each in fields(best) if getattr(best, each.name) != getattr(asked.scope, each.name))
    return Elsewhere(best if asked.is_for_all else replace(best, salt=""), names), depth * cache.block_size


# --- what never was there ----------------------------------------------------------------------------------------------


def _never_there(asked: _Question, start: int, earlier: _Earlier | None, unseen: float | None) -> Iterator[MissedSpan]:
    """Tokens from `start` on, which are in no block that was ever here behind the tokens before them."""
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
    here = int(again.argmax())
    detail = Divergence(
        earlier.at,
        earlier.request_id,
        earlier.session,
        tuple(asked.tokens[max(0, earlier.at - AROUND) : earlier.at].tolist()),
        tuple(asked.tokens[earlier.at : earlier.at + AROUND].tolist()),
        tuple(earlier.tokens[:AROUND].tolist()),
        at + here - earlier.at - place,
    )
    edges = [0, *(np.flatnonzero(again[1:] != again[:-1]) + 1).tolist(), len(again)]
    for begin, end in pairwise(edges):
        if again[begin]:
            yield MissedSpan(at + begin, at + end, MissCause.DIVERGED, detail)
        else:
            yield MissedSpan(at + begin, at + end, MissCause.FIRST_SEEN, unseen)


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


def _live_branch(cache: Cache, asked: _Question) -> list[_Earlier]:
    """What is cached behind the matched blocks, if anything is: the run most like the prompt, and those that follow it."""
    size, match = cache.block_size, asked.match
    if match.root is None:
        return []
    tip: Node = match.path[-1] if match.path else match.root
    start = match.num_blocks * size
    if tip.end > match.num_blocks:
        return [_earlier(asked, tip, start)]
    query = as_bytes(asked.tokens, start, start + size)
    if tip.children is None:
        return []
    nearest, _ = tip.children.nearest(query)
    for node in (nearest, *islice(reversed(tip.children.values()), NUM_SIBLINGS)):
        if node is not None and node.published_by < asked.serial:
            node.sync()
            return [_earlier(asked, node, start)]
    return []


def _earlier(asked: _Question, node: Node, start: int) -> _Earlier:
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
    return _Earlier(start + shared, np.concatenate(parts), node.request_id, node.session)


def _departed_branch(departed: Departed, piece: Piece, at: int) -> _Earlier:
    parts = [piece.tokens[at - piece.start * departed.block_size :]]
    parts += [following.tokens for following in departed.following(piece)]
    return _Earlier(at, np.concatenate(parts), piece.request_id, piece.session)


def _busy_branch(cache: Cache, asked: _Question, busy: KVCacheHandle) -> _Earlier:
    ids = cache.rows.token_ids(busy.row)
    at = num_shared(ids, asked.tokens)
    return _Earlier(at, ids[at:], busy.request_id, busy.session)


def _joined(spans: Iterator[MissedSpan]) -> list[MissedSpan]:
    """Without empty spans, and with neighbours that say the same made one."""
    joined: list[MissedSpan] = []
    for span in spans:
        if joined and joined[-1][2:] == span[2:] and joined[-1].end == span.start:
            joined[-1] = joined[-1]._replace(end=span.end)
        elif span.start < span.end:
            joined.append(span)
    return joined


_TO: Final = ("nearer to its beginning", "farther back")  # where text stands that moved
_HELP: Final = {
    MissCause.FIRST_SEEN: "was never computed behind the tokens before it: it is new",
    MissCause.EVICTED: "more blocks, a host tier or a pin would keep it",
    MissCause.EXPIRED: "a longer time to live would keep it",
    MissCause.INVALIDATED: "somebody asked to forget it",
    MissCause.OTHER_SCOPE: "what should share a prefix must name the same tenant, adapter, weights, encoder and cache_salt",
    MissCause.IN_FLIGHT: "another request computes it now: wait for that one",
    MissCause.ON_TIER: "lies on a lower tier, and the GPU has no room for it: give it more blocks",
    MissCause.NO_STATE: "is cached, but a layer keeps no state or window there: set checkpoint_every",
    MissCause.REST_OF_BLOCK: "does not fill a block, or is the last token, which is always computed",
    MissCause.FORGOTTEN: "may have been cached once: remember more blocks",
}
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
