"""Why tokens of a prompt were not served from the cache: each of them for one cause. Nothing is changed.

The answer follows the prompt. Behind what the tree holds come blocks that left it, which are remembered (`core/departed.py`),
and blocks that a live request computes. Behind these the prompt has blocks that never were in its scope. For them the answer
looks at other scopes of the tenant, and at the earlier prompt that the prompt followed for the longest time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain, islice
from typing import Final

from kvpool.core.cache import Cache
from kvpool.core.departed import Departed, Piece, num_shared
from kvpool.core.handle import KVCacheHandle
from kvpool.core.prompt import Prompt
from kvpool.pools.pool import GPU
from kvpool.prefix.tree import match_tokens
from kvpool.sequences.admit import find_match
from kvpool.sequences.divergence import Question, busy_branch, departed_branch, live_branches, never_there
from kvpool.sequences.missed import Departure, Elsewhere, MissedSpan
from kvpool.stats import EvictionReason, MissCause

WINDOW: Final = 16  # so many equal tokens in a row, at any place, are the same content
AROUND: Final = 8  # tokens that are shown on each side where prompts part
OTHERS: Final = "others"  # what another tenant did

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
    question = Question(prompt._scope, match.tokens, whole, num_cached, departed.number, _LAST, is_for_all)
    return _joined(_spans(cache, departed, question))


def explain_request(cache: Cache, departed: Departed, handle: KVCacheHandle, is_for_all: bool) -> list[MissedSpan]:
    """What a live request missed when it was admitted. Asked later, it knows less of who computed the same then."""
    tokens = cache.rows.token_ids(handle.row)[: handle.num_prompt_tokens]
    if handle.num_fixed_tokens and not handle.scope.encoder:
        return [MissedSpan(0, len(tokens), MissCause.OTHER_SCOPE)] if len(tokens) else []
    match = match_tokens(cache, handle.scope, tokens[: handle.num_matched_tokens])
    question = Question(
        handle.scope, tokens, match, handle.num_cached_tokens, handle.departed, handle.serial, is_for_all
    )
    return _joined(_spans(cache, departed, question))


def _spans(cache: Cache, departed: Departed, asked: Question) -> Iterator[MissedSpan]:
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
        is_live = found.end == known and busy is None
        best = [departed_branch(departed, *found.branches[0])] if found.branches else []
        best += islice(live_branches(cache, asked), 1) if is_live else []
        best += [busy_branch(cache, asked, busy)] if found.end == known and busy is not None else []
        unseen = None if departed.since is None else cache.now - departed.since
        earlier = max(best, key=lambda branch: branch.at, default=None)
        others = (departed_branch(departed, *branch) for branch in found.branches[1:])
        live = live_branches(cache, asked) if is_live else iter(())
        yield from never_there(asked, max(start, end), earlier, chain(live, others), unseen)


# --- what is known -----------------------------------------------------------------------------------------------------


def _there(cache: Cache, asked: Question) -> Iterator[MissedSpan]:
    """What is cached and was not reused."""
    last, path = len(asked.tokens) - 1, asked.match.path
    end = min(asked.match.num_blocks * cache.block_size, last)
    if asked.num_cached < end:
        on_tier = path[-1].tier != GPU
        cause = MissCause.NO_STATE if cache.by_block else MissCause.ON_TIER if on_tier else MissCause.REST_OF_BLOCK
        yield MissedSpan(asked.num_cached, end, cause)
    if asked.match.num_blocks * cache.block_size > last:
        yield MissedSpan(last, last + 1, MissCause.REST_OF_BLOCK)


def _in_flight(cache: Cache, asked: Question) -> tuple[KVCacheHandle | None, int]:
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


def _departure(cache: Cache, asked: Question, piece: Piece) -> Departure:
    tenant, request_id = (None, None) if piece.asker is None else piece.asker
    if tenant is not None and tenant != asked.scope.tenant and not asked.is_for_all:
        tenant, request_id = OTHERS, None
    return Departure(piece.reason, cache.now - piece.left_at, tenant, request_id)


def _elsewhere(cache: Cache, asked: Question, known: int) -> tuple[Elsewhere | None, int]:
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


def _joined(spans: Iterator[MissedSpan]) -> list[MissedSpan]:
    """Without empty spans, and with neighbours that say the same made one."""
    joined: list[MissedSpan] = []
    for span in spans:
        if joined and joined[-1][2:] == span[2:] and joined[-1].end == span.start:
            joined[-1] = joined[-1]._replace(end=span.end)
        elif span.start < span.end:
            joined.append(span)
    return joined
