"""How a sequence begins: admitted, or forked off another. `step.py` has its steps, `release.py` its end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.handle import GivenHandle, KVCacheHandle, note_sessions
from kvpool.core.node import Node, path_ids
from kvpool.core.prompt import AdmissionPlan, Match, Prompt
from kvpool.pools.arrays import copied, put
from kvpool.pools.pool import GPU, CopyKind, CopyOp
from kvpool.prefix.blocks import Held, hold_blocks, hold_source, let_go_blocks
from kvpool.prefix.evict import bring_up, evict, spare, spare_no_more, take_over
from kvpool.prefix.readers import ref
from kvpool.prefix.tree import close, end_at, keep_symbols, root_for, tip_of
from kvpool.scope import ReuseScope
from kvpool.sequences.admission import find_match, plan_admission
from kvpool.sequences.publish import track, track_block

INHERITED = (  # what a fork has in common with its parent
    "retention",
    "ttl",
    "session",
    "copied_sessions",
    "publishes",
    "is_lease",
    "encoder_tokens",
    "num_cached_encoder_tokens",
    "num_prompt_tokens",
    "num_matched_tokens",
    "family",
)

PARTIAL_REUSE: Final = CopyKind.PARTIAL_REUSE  # a global is several times cheaper than a member of an enum
_NOTHING: Held = []


# --- admission -------------------------------------------------------------------------------------------------------


def allocate(cache: Cache, handle: KVCacheHandle, prompt: Prompt, num_tokens: int, lookahead: int) -> None:
    """Gives a new handle its row and blocks, reusing the longest cached prefix."""
    rows, size = cache.rows, cache.block_size
    found = find_match(cache, prompt)
    plan = plan_admission(cache, prompt, found, num_tokens, lookahead)
    if not plan.fits:
        cache.counters.allocation_failures += 1
        cache.refuse_shortage(plan.needs, plan.supply, f"request {handle.request_id!r}")
    match, hit_tokens, partial = plan.match, plan.num_hit_tokens, plan.match.partial
    tip = enter_path(cache, match, handle.scope)
    taken = None
    if partial is not None and not cache.config.copy_on_partial_reuse:
        taken = take_over(cache, partial)
    held = _protect(cache, plan, tip, taken is None) if plan.evicts else _NOTHING
    promoted = _promote_path(cache, plan, tip, held) if match.path and match.path[-1].tier != GPU else None
    if plan.evicts:
        for pool in cache.gpu_pools:
            evict(cache, pool, plan.needs[pool.index], handle.scope.tenant)
    row = handle.row = rows.new_row(handle, plan.num_blocks, plan.num_fixed)
    rows.tips[row], rows.serials_of[row] = tip, handle.serial
    _fill_tables(cache, row, tip, plan, taken)
    if held:
        let_go_blocks(cache, tip, held)
    if partial is not None:
        if taken is None:
            _copy_partial(cache, row, match)
            if plan.evicts:
                hold_source(cache, match, False)
                spare_no_more(cache, partial)
        note_sessions(handle, partial.sessions)
    present = hit_tokens + match.num_recomputed
    rows.reserved_of[row] = num_tokens if num_tokens > present else present
    rows.written_of[row] = rows.committed_of[row] = hit_tokens
    rows.present_of[row] = present
    tokens = found.tokens
    if tokens is None:
        rows.known_of[row] = rows.num_history_of[row] = 0
    else:
        rows.set_token_ids(row, tokens, match.num_blocks * size)
        handle.num_matched_tokens = match.num_matched_blocks * size
        handle.num_prompt_tokens = len(tokens)
        handle.num_cached_tokens, handle.num_cached_blocks = hit_tokens, match.num_blocks
        if not handle.is_lease:
            _count_request(cache, handle, promoted, match)
        if handle.publishes:
            if match.next_key is not None:
                track_block(cache, handle, tip, match.next_key)
            elif len(tokens) >= (match.num_blocks + 1) * size:
                track(cache, row)
        if found.fresh:
            keep_symbols(cache, found.fresh)
    cache.counters.requests += not handle.is_lease
    cache.requests[handle.request_id] = handle
    cache.last_prompt = cache.last_match = None  # it was admitted: nobody need keep its tokens


def _protect(cache: Cache, plan: AdmissionPlan, tip: Node, copies: bool) -> Held:
    """Sees to it that nothing is evicted that a plan reuses. Blocks read one by one are held until `let_go_blocks`."""
    source = plan.match.partial
    held = hold_blocks(cache, tip.path(), plan.num_hit_tokens) if cache.by_block else _NOTHING
    if copies and source is not None:
        spare(cache, source)
        hold_source(cache, plan.match, True)
    return held


def enter_path(cache: Cache, match: Match, scope: ReuseScope) -> Node:
    """Splits the tree where the match ends and holds the matched path."""
    if not match.path:
        root = match.root if match.root is not None else root_for(cache, scope)
        root.active += 1
        return root
    last = match.path[-1] = end_at(cache, match.path[-1], match.num_blocks)
    for node in match.path:
        node.hits += 1
        if not node.active:
            cache.counters.reuse_gap.add(cache.now - node.last_access_at, node.num_blocks)
    ref(cache, last)
    return last


def _promote_path(cache: Cache, plan: AdmissionPlan, tip: Node, held: Held) -> dict[Tier, int]:
    """Brings matched runs of lower tiers to the GPU; returns how many blocks came from each tier.

    From then on the plan needs only what is new, and its path has the runs as they were cut.
    """
    promoted: dict[Tier, int] = {}
    for node, tier in bring_up(cache, tip):
        promoted[tier] = promoted.get(tier, 0) + node.num_blocks
        for pool, num_blocks in enumerate(cache.blocks_per_pool([node])):
            plan.needs[pool] -= num_blocks
        if plan.evicts and cache.by_block:
            held += hold_blocks(cache, [node], plan.num_hit_tokens)
    plan.match.path = tip.path()
    return promoted


def _fill_tables(cache: Cache, row: int, tip: Node, plan: AdmissionPlan, taken: list[int] | None) -> None:
    """Matched ids, then that of the block taken over from the tree, if any, then new ones."""
    rows = cache.rows
    hit_blocks, num_blocks = plan.match.num_blocks, plan.num_blocks
    rows.num_blocks_of[row] = num_blocks
    path = plan.match.path
    first = hit_blocks
    if taken is not None:
        first += 1
        for table, block in zip(rows.tables, taken, strict=False):  # encoder tables come last and lose nothing
            table[row, hit_blocks] = block
    new = num_blocks - first
    if cache.is_simple:
        table, place = rows.first_table, row * rows.num_columns
        if hit_blocks:
            put(table, place, path_ids(path, hit_blocks, 0), 0, hit_blocks)
        if new:
            put(table, place + first, cache.gpu_pools[0].take(new), 0, new)
        cache.counters.blocks_allocated += new
        return
    for group in cache.groups:
        cache.counters.blocks_allocated += group.begin(cache, row, tip, plan, first)


def _copy_partial(cache: Cache, row: int, match: Match) -> None:
    source, rows = match.partial, cache.rows
    assert source is not None
    at, first = row * rows.num_columns + match.num_blocks, match.num_blocks - source.start
    for group in cache.growing:
        src = copied(source.ids[group.index], first, first + 1)
        if src.item(0) >= 0:
            dst = copied(rows.flat_tables[group.index], at, at + 1)
            op = CopyOp(PARTIAL_REUSE, group.index, source.tier, GPU, src, dst, match.num_partial)
            cache.copies.append(op)


def _count_request(cache: Cache, handle: KVCacheHandle, promoted: dict[Tier, int] | None, match: Match) -> None:
    counters, size = cache.counters, cache.block_size
    counters.prompt_tokens += handle.num_prompt_tokens
    counters.prompt_blocks += handle.num_prompt_tokens // size
    if not match.num_blocks and match.partial is None:
        return
    if not promoted:
        counters.hit_tokens[0] += match.num_blocks * size - match.num_recomputed  # GPU, whose name costs more
        counters.hit_blocks[0] += match.num_blocks
    else:
        _count_promoted(cache, handle, promoted, match)
    if match.partial is not None:
        counters.hit_tokens[match.partial.tier] += match.num_partial
        counters.partial_hit_tokens += match.num_partial
        handle.num_partial_tokens = match.num_partial
        if match.partial.tier != GPU:
            handle.stats.cached_tokens_from_lower_tiers += match.num_partial
    if match.logits is not None:
        handle.last_logits = match.logits
        counters.full_hits_with_logits += 1


def _count_promoted(cache: Cache, handle: KVCacheHandle, promoted: dict[Tier, int], match: Match) -> None:
    """Hits of a request some of whose blocks were brought up from lower tiers."""
    counters, size = cache.counters, cache.block_size
    resident = match.num_blocks - sum(promoted.values())
    counters.hit_tokens[GPU] += resident * size
    counters.hit_blocks[GPU] += resident
    for tier, num_blocks in promoted.items():
        counters.hit_tokens[tier] += num_blocks * size
        counters.hit_blocks[tier] += num_blocks
        handle.stats.cached_tokens_from_lower_tiers += num_blocks * size
    counters.hit_tokens[max(promoted)] -= match.num_recomputed


# --- fork ------------------------------------------------------------------------------------------------------------


def fork(cache: Cache, parent: GivenHandle, request_ids: Sequence[Hashable]) -> list[KVCacheHandle]:
    """Children that share every block of the parent; whoever writes into a shared block gets a copy first."""
    source = cache.row_of(parent)
    close(cache, tip_of(cache, source))
    if parent.family is None:
        parent.family = {source}
    children = []
    for request_id in request_ids:
        child = KVCacheHandle(cache.rows, request_id, parent.scope)
        for name in INHERITED:
            setattr(child, name, getattr(parent, name))
        child.num_cached_tokens = parent.num_written
        child.num_cached_blocks = parent.num_written // cache.block_size
        _share_row(cache, source, child)
        cache.requests[request_id] = child
        children.append(child)
    cache.counters.forks += len(children)
    return children


def _share_row(cache: Cache, source: int, child: KVCacheHandle) -> None:
    rows = cache.rows
    row = child.row = rows.new_row(child, rows.num_blocks_of[source], rows.num_fixed.item(source))
    for name in ("reserved", "written", "committed", "num_blocks", "present"):
        array = getattr(rows, name)
        array[row] = array[source]
    rows.first_held[:, row] = rows.first_held[:, source]
    rows.serials_of[row] = child.serial
    rows.share_token_ids(source, row)
    tip = rows.tips[row] = rows.tips[source]
    assert tip is not None and child.family is not None
    ref(cache, tip)
    if source in rows.following:
        rows.follow(row, rows.following[source])
    for group in cache.groups:
        group.fork(cache, source, row, tip)
    child.family.add(row)
    rows.set_shared(source, True)
    rows.set_shared(row, True)
