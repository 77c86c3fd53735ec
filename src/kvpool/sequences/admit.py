"""How a sequence begins: what its prompt would reuse, whether it fits, its admission, and forks.

`find_match` and `plan_admission` change nothing; `allocate` does what they found. `step.py` goes on from there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Admission, AllocStatus, Cache
from kvpool.core.handle import KVCacheHandle, note_sessions, row_of
from kvpool.core.kind import ByBlock
from kvpool.core.node import Node, path_ids
from kvpool.core.prompt import AdmissionPlan, Match, Prompt
from kvpool.core.sessions import common_owner
from kvpool.pools.arrays import Int32Array, copied
from kvpool.pools.pool import GPU, CopyKind, CopyOp
from kvpool.prefix.blocks import Held, hold_blocks, hold_source, let_go_blocks
from kvpool.prefix.evict import bring_up, evict, spare, spare_no_more, take_over
from kvpool.prefix.sessions import session_for
from kvpool.prefix.tree import close, end_at, find_logits, keep_symbols, match_tokens, ref, root_for, tip_of
from kvpool.scope import ReuseScope
from kvpool.sequences.publish import row_computing, track

PARTIAL_REUSE: Final = CopyKind.PARTIAL_REUSE  # a global is several times cheaper than a member of an enum

INHERITED: Final = (  # what a fork has in common with its parent
    *("retention", "ttl", "session", "user", "copied_sessions", "publishes", "is_lease", "family"),
    *("num_fixed_tokens", "num_cached_fixed_tokens", "num_prompt_tokens", "num_matched_tokens"),
)


class PrefixMatch(NamedTuple):
    """What a prompt would reuse if it were admitted now."""

    num_tokens: int  # tokens that need not be computed
    num_blocks: int  # of them, whole blocks
    num_partial_tokens: int  # of them, tokens of one more block
    tokens_by_tier: dict[Tier, int]  # whole blocks by the tier they lie on, in tokens
    has_last_logits: bool  # the prompt hits in full and its logits were stored: no forward pass is needed
    in_flight: bool  # another request is computing the next block of this prompt right now
    last_logits: Any = None  # what was stored for exactly this prompt, see `store_last_logits`


# --- reuse -----------------------------------------------------------------------------------------------------------


def find_match(cache: Cache, prompt: Prompt) -> Match:
    """What a prompt would reuse now. Asked again about the same prompt, it walks the tree only if something changed."""
    tick = cache.tick
    if cache.last_prompt is prompt and cache.last_tick == tick:
        last: Match = cache.last_match
        return last
    tokens, items, fresh = prompt._tokens, prompt._items, None
    if items and tokens is not None:
        tokens, fresh = cache.rows.symbols.encode(tokens, items)
    if tokens is None or not prompt._is_named:
        match = Match(None, [], 0)  # what is not known is like no other
    else:
        match = best_match(cache, tokens, prompt._scope)
    match.tokens, match.fresh = tokens, fresh
    if prompt._outlives_call:
        cache.last_prompt, cache.last_match, cache.last_tick = prompt, match, tick
    return match


def best_match(cache: Cache, tokens: Int32Array, scope: ReuseScope) -> Match:
    """The reusable part of a prompt, and its stored logits if all of it is.

    Without logits the last token must be computed, so at most len - 1 tokens are reused. If the prompt ends with a
    block, that block is held as it is and nothing is written for the last token: its data is there. Every layer group
    must still have what the next query reads.
    """
    if not cache.caches_prefixes or not len(tokens):
        return Match(None, [], 0)
    match = match_tokens(cache, scope, tokens, partial=True)
    if not match.path and match.partial is None:
        return match
    size = cache.block_size
    length = match.num_tokens(size)
    logits = None
    if length == len(tokens):
        if cache.has_logits:
            logits = find_logits(cache, match.root, match.path, tokens)
        if logits is None:
            length -= 1
            if not match.num_partial and all(g.has_last(match.path, match.num_blocks) for g in cache.by_block):
                match = Match(match.root, match.path, match.num_blocks, num_recomputed=1)
    if cache.by_block:
        length, logits = _valid_for_all(cache, match, length, logits)
    held_as_it_is = match.num_recomputed and length == match.num_tokens(size)
    if length % size and not cache.config.partial_match and not held_as_it_is:
        length, logits = length // size * size, None
        if cache.by_block:  # a shorter prefix may read blocks that the longer one did not
            length, _ = _valid_for_all(cache, match, length, None)
    if length != match.num_tokens(size):
        match = _cut_match(cache, match, length)
    if match.partial is not None and not cache.config.copy_on_partial_reuse and not _can_take_over(match):
        match, logits = _whole_blocks(cache, match, match.num_blocks), None
    match.logits = logits
    return match


def _can_take_over(match: Match) -> bool:
    """Whether nobody else has a use for the partly matching block: it is the last one of an idle run on the GPU."""
    source = match.partial
    assert source is not None
    in_use = source.active or source.pins or source.children is not None
    return source.tier == GPU and not in_use and source.end == match.num_blocks + 1


def _valid_for_all(cache: Cache, match: Match, length: int, logits: Any) -> tuple[int, Any]:
    shortened = True
    while shortened and length:
        shortened = False
        for group in cache.by_block:
            ids = path_ids(match.path, match.num_blocks, group.index)
            if match.partial is not None:
                ids = np.append(ids, match.partial.ids[group.index][match.num_blocks - match.partial.start])
            valid = group.longest_valid(ids >= 0, length)
            if valid < length:
                length, logits, shortened = valid, None, True
    return length, logits


def _cut_match(cache: Cache, match: Match, num_tokens: int) -> Match:
    """A match shortened to `num_tokens`: to whole blocks, or by a token of its partial block."""
    blocks, extra = divmod(num_tokens, cache.block_size)
    path = [node for node in match.path if node.start < blocks]
    shorter = Match(match.root, path, blocks, match.partial if extra else None, extra)
    shorter.num_matched_blocks = match.num_matched_blocks
    return shorter


def _whole_blocks(cache: Cache, match: Match, num_blocks: int) -> Match:
    """Whole blocks of a match, at most so many, and as many as all groups allow: a shorter prefix may read what is gone."""
    whole = _cut_match(cache, match, num_blocks * cache.block_size)
    if not cache.by_block:
        return whole
    return _cut_match(cache, whole, _valid_for_all(cache, whole, whole.num_tokens(cache.block_size), None)[0])


def is_whole(cache: Cache, tokens: Int32Array, scope: ReuseScope) -> bool:
    """Whether all of these tokens could be reused now, the last one included."""
    return best_match(cache, tokens, scope).num_tokens(cache.block_size) == len(tokens)


def query_prefix(cache: Cache, prompt: Prompt) -> PrefixMatch:
    match = find_match(cache, prompt)
    logits, size = match.logits, cache.block_size
    by_tier: dict[Tier, int] = {}
    for node in match.path:
        used = min(node.end, match.num_blocks) - node.start
        by_tier[node.tier] = by_tier.get(node.tier, 0) + used * size
    if match.num_recomputed:
        by_tier[match.path[-1].tier] -= 1
    num_tokens = match.num_tokens(size)
    return PrefixMatch(
        num_tokens,
        num_tokens // size,
        num_tokens % size,
        by_tier,
        logits is not None,
        row_computing(cache, match, match.tokens) is not None,
        logits,
    )


# --- does it fit? -----------------------------------------------------------------------------------------------------


def plan_admission(cache: Cache, prompt: Prompt, match: Match, num_tokens: int, lookahead: int) -> AdmissionPlan:
    """Counts what a request takes for which this was found; `num_tokens` places are reserved, plus `lookahead`."""
    scope = prompt._scope
    if cache.is_simple and (not match.path or match.path[-1].tier == GPU):
        size = cache.block_size
        hit_tokens = match.num_blocks * size + match.num_partial - match.num_recomputed
        present = hit_tokens + match.num_recomputed
        num_blocks = -(-((num_tokens if num_tokens > present else present) + lookahead) // size)
        pool = cache.gpu_pools[0]
        need, free = num_blocks - match.num_blocks, pool.num_free
        if need <= free:  # the usual case: nothing has to be evicted, so nothing else has to be counted
            return AdmissionPlan(match, hit_tokens, num_blocks, 0, [need], [free], True, False)
        needs, supply = [need], [cache.orders.available(pool, scope.tenant)]
        if match.path or match.partial is not None:
            count_match(cache, match, needs, supply)
        if needs[0] <= supply[0]:
            return AdmissionPlan(match, hit_tokens, num_blocks, 0, needs, supply, True, True)
    plan = _count(cache, match, num_tokens, lookahead, prompt)
    if not plan.fits and match.partial is not None:
        # The source of a partial block must stay until it is copied: in a full pool, do without it.
        plan = _count(cache, _whole_blocks(cache, match, match.num_blocks), num_tokens, lookahead, prompt)
    while not plan.fits and _brings_too_much(cache, plan):
        plan = _count(cache, _whole_blocks(cache, plan.match, plan.match.path[-1].start), num_tokens, lookahead, prompt)
    return plan


def _brings_too_much(cache: Cache, plan: AdmissionPlan) -> bool:
    """Whether a request would need more than a whole GPU pool, some of it for runs that lower tiers have."""
    pools = zip(plan.needs, cache.gpu_pools, strict=True)
    from_below = bool(plan.match.path) and plan.match.path[-1].tier != GPU
    return from_below and any(need > pool.num_blocks for need, pool in pools)


def _count(cache: Cache, match: Match, num_tokens: int, lookahead: int, prompt: Prompt) -> AdmissionPlan:
    size = cache.block_size
    hit_tokens = match.num_tokens(size)
    num_blocks = -(-(max(num_tokens, hit_tokens + match.num_recomputed) + lookahead) // size)
    needs = [0] * len(cache.gpu_pools)
    for group in cache.groups:
        needs[group.pool] += group.needs(prompt, num_blocks, match.num_blocks)
    supply = cache.supply(prompt._scope.tenant)
    if match.root is not None:
        count_match(cache, match, needs, supply)
    fits = all(need <= have for need, have in zip(needs, supply, strict=True))
    evicts = any(need > pool.num_free for need, pool in zip(needs, cache.gpu_pools, strict=True))
    num_fixed = -(-prompt._fixed_tokens // size)
    return AdmissionPlan(match, hit_tokens, num_blocks, num_fixed, needs, supply, fits, evicts)


def count_match(cache: Cache, match: Match, needs: list[int], supply: list[int]) -> None:
    """Matched idle blocks stop being supply; matched blocks on lower tiers need a place on the GPU."""
    for node in match.path:
        used = min(node.end, match.num_blocks) - node.start
        if node.tier != GPU:
            for group in cache.growing:
                needs[group.pool] += int((node.ids[group.index][:used] >= 0).sum())
        elif not node.active and not node.pins:
            for pool, per_position in cache.full_per_pool:
                supply[pool] -= used * per_position
    source = match.partial
    # Its block is the request's first new one
    if source is not None and not cache.config.copy_on_partial_reuse:
        for pool, per_position in enumerate(cache.per_position):
            needs[pool] -= per_position
    if source is not None and source.tier == GPU and not source.active and not source.pins:
        for pool, per_position in cache.full_per_pool:
            rest = source.num_blocks if source not in match.path else source.end - match.num_blocks
            supply[pool] -= rest * per_position
    for group in cache.by_block:
        supply[group.pool] -= _idle_read_by(cache, match, group)


def _idle_read_by(cache: Cache, match: Match, group: ByBlock) -> int:
    """Blocks of a group on the GPU that the match would read and nobody reads now."""
    pool, num_tokens = group.gpu, match.num_tokens(cache.block_size)
    idle = 0
    parts = [(n, n.start, min(n.end, match.num_blocks)) for n in match.path]
    if match.partial is not None:
        parts.append((match.partial, match.num_blocks, match.num_blocks + 1))
    for node, first, end in parts:
        if node.tier == GPU:
            depths = np.arange(first, end)
            ids = node.ids[group.index][depths - node.start]
            read = ids[(ids >= 0) & group.reads(depths, num_tokens)]
            pinned = cache.pinned_blocks[pool.index]
            unread = read[pool.refs[read] == 0]
            idle += len(unread) if not pinned else sum(int(i) not in pinned for i in unread.tolist())
    return idle


def can_allocate(cache: Cache, prompt: Prompt, num_tokens: int, lookahead: int, wait_for_prefix: bool) -> Admission:
    """OK, LATER or NEVER, with the watermark kept free."""
    found = find_match(cache, prompt)
    plan = plan_admission(cache, prompt, found, num_tokens, lookahead)
    plan = _count(cache, plan.match, num_tokens, lookahead, prompt)
    if plan.match.partial is not None and _below_watermark(cache, plan) is not None:
        # As in `plan`: its idle source, which must stay, would keep the request out for as long as it is cached.
        whole = _count(cache, _whole_blocks(cache, plan.match, plan.match.num_blocks), num_tokens, lookahead, prompt)
        if _below_watermark(cache, whole) is None:
            plan = whole
    needs, supply = tuple(plan.needs), tuple(plan.supply)
    limit = cache.max_seq_len
    longest = max(num_tokens + lookahead, 0 if found.tokens is None else len(found.tokens))
    if limit is not None and longest > limit:
        reason = f"asks for {longest} tokens, over max_seq_len={limit}"
        return Admission(AllocStatus.NEVER, reason, needs, supply, plan.num_hit_tokens)
    at_once = [0] * len(cache.gpu_pools)  # blocks that it would hold right after its admission, reused ones included
    for group in cache.groups:
        at_once[group.pool] += group.held_at_once(
            plan.num_blocks, plan.num_fixed, plan.match.num_blocks, plan.num_hit_tokens
        )
    for pool, total, mark in zip(cache.gpu_pools, at_once, cache.watermarks, strict=True):
        if total > pool.num_blocks - mark:
            most = max(0, pool.num_blocks - mark) // max(1, cache.per_position[pool.index]) * cache.block_size
            reason = (
                f"needs {total} blocks of pool {pool.index}, which has {pool.num_blocks} ({mark} kept as watermark): "
                f"at most {most} tokens fit"
            )
            return Admission(AllocStatus.NEVER, reason, needs, supply, plan.num_hit_tokens)
    if wait_for_prefix:
        producer = row_computing(cache, plan.match, found.tokens)
        if producer is not None:
            handle = cache.rows.handles[producer]
            reason = f"prefix in flight: request {handle.request_id!r} is computing the next block of this prompt"
            return Admission(AllocStatus.LATER, reason, needs, supply, plan.num_hit_tokens)
    short = _below_watermark(cache, plan)
    if short is not None:
        reason = (
            f"needs {needs[short]} blocks of pool {short}; {supply[short]} are free or evictable, "
            f"{cache.watermarks[short]} kept as watermark"
        )
        return Admission(AllocStatus.LATER, reason, needs, supply, plan.num_hit_tokens)
    return Admission(AllocStatus.OK, "fits", needs, supply, plan.num_hit_tokens)


def _below_watermark(cache: Cache, plan: AdmissionPlan) -> int | None:
    """The first pool that could serve the plan only with blocks of its watermark, or not at all."""
    for index, (need, have, mark) in enumerate(zip(plan.needs, plan.supply, cache.watermarks, strict=True)):
        if need and need > have - mark:
            return index
    return None


# --- the admission ---------------------------------------------------------------------------------------------------


def allocate(cache: Cache, handle: KVCacheHandle, prompt: Prompt, num_tokens: int, lookahead: int) -> None:
    """Gives a new handle its row and blocks, reusing the longest cached prefix."""
    rows = cache.rows
    found = find_match(cache, prompt)
    plan = plan_admission(cache, prompt, found, num_tokens, lookahead)
    if not plan.fits:
        cache.counters.allocation_failures += 1
        cache.refuse_shortage(plan.needs, plan.supply, f"request {handle.request_id!r}")
    if cache.departed is not None:
        handle.departed = cache.departed.number
        cache.departed.asker, cache.departed.asked_at = (handle.scope.tenant, handle.request_id), cache.tick
    match, hit_tokens, partial = plan.match, plan.num_hit_tokens, plan.match.partial
    if handle.session is not None:
        handle.user = session_for(cache, handle.scope.tenant, handle.session)
    tip = enter_path(cache, match, handle)
    taken = None
    if partial is not None and not cache.config.copy_on_partial_reuse:
        taken = take_over(cache, partial)
    held: Held = []  # what nothing may evict until the end, although it is read block by block
    if plan.evicts:
        if cache.by_block:
            held = hold_blocks(cache, tip.path(), hit_tokens)
        if partial is not None and taken is None:
            spare(cache, partial)
            hold_source(cache, match, True)
    promoted: dict[Tier, int] = {}  # blocks that come up to the GPU, by the tier where they were
    if match.path and match.path[-1].tier != GPU:
        _promote_path(cache, plan, tip, held, promoted)
    if plan.evicts:
        for pool in cache.gpu_pools:
            evict(cache, pool, plan.needs[pool.index], handle.scope.tenant)
    row = handle.row = rows.new_row(handle, plan.num_blocks, plan.num_fixed)
    rows.tips[row], rows.serials_of[row] = tip, handle.serial
    rows.num_blocks_of[row] = plan.num_blocks
    first_new = match.num_blocks  # the column from which on blocks are new
    if taken is not None:
        for group, block in zip(cache.growing, taken, strict=True):
            rows.tables[group.index][row, first_new] = block
        first_new += 1
    for group in cache.groups:
        cache.counters.blocks_allocated += group.begin(cache, row, tip, plan, first_new)
    if held:
        let_go_blocks(cache, tip, held)
    if partial is not None:
        if taken is None:
            at, depth = row * rows.num_columns + match.num_blocks, match.num_blocks - partial.start
            for group in cache.growing:
                src = copied(partial.ids[group.index], depth, depth + 1)
                if src.item(0) >= 0:
                    dst = copied(rows.flat_tables[group.index], at, at + 1)
                    op = CopyOp(PARTIAL_REUSE, group.index, partial.tier, GPU, src, dst, match.num_partial)
                    cache.copies.append(op)
            if plan.evicts:
                hold_source(cache, match, False)
                spare_no_more(cache, partial)
        note_sessions(handle, partial.sessions)
    present = hit_tokens + match.num_recomputed
    rows.reserved_of[row] = num_tokens if num_tokens > present else present
    rows.written_of[row] = rows.committed_of[row] = hit_tokens
    rows.present_of[row] = present
    _enter_prompt(cache, handle, tip, plan, found, promoted)
    cache.counters.requests += not handle.is_lease
    cache.requests[handle.request_id] = handle
    cache.last_prompt = cache.last_match = None  # it was admitted: nobody need keep its tokens


def enter_path(cache: Cache, match: Match, handle: KVCacheHandle) -> Node:
    """Splits the tree where the match ends, and holds the matched path for a sequence, which uses it from now on."""
    if not match.path:
        root = match.root if match.root is not None else root_for(cache, handle.scope)
        root.active += 1
        return root
    last = match.path[-1] = end_at(cache, match.path[-1], match.num_blocks)
    user = handle.user
    for node in match.path:
        node.hits += 1
        owner = node.owner
        if owner is not None and owner is not user:
            node.owner = common_owner(owner, user)
        if not node.active:
            cache.counters.reuse_gap.add(cache.now - node.last_access_at, node.num_blocks)
    ref(cache, last)
    return last


def _promote_path(cache: Cache, plan: AdmissionPlan, tip: Node, held: Held, promoted: dict[Tier, int]) -> None:
    """Brings matched runs of lower tiers to the GPU.

    From then on the plan needs only what is new, and its path has the runs as they were cut.
    """
    for node, tier in bring_up(cache, tip):
        promoted[tier] = promoted.get(tier, 0) + node.num_blocks
        for pool, num_blocks in enumerate(cache.blocks_per_pool([node])):
            plan.needs[pool] -= num_blocks
        if plan.evicts and cache.by_block:
            held += hold_blocks(cache, [node], plan.num_hit_tokens)
    plan.match.path = tip.path()


def _enter_prompt(
    cache: Cache, handle: KVCacheHandle, tip: Node, plan: AdmissionPlan, found: Match, promoted: dict[Tier, int]
) -> None:
    """The row knows its tokens, who computes their next block is noted, and what was reused is counted on its tier.

    `promoted` says how many blocks came up from lower ones.
    """
    rows, size, counters, row = cache.rows, cache.block_size, cache.counters, handle.row
    match, tokens = plan.match, found.tokens
    if tokens is None:
        rows.known_of[row] = rows.num_history_of[row] = 0
        return
    rows.set_token_ids(row, tokens, match.num_blocks * size)
    handle.num_matched_tokens = match.num_matched_blocks * size
    handle.num_prompt_tokens = len(tokens)
    handle.num_cached_tokens, handle.num_cached_blocks = plan.num_hit_tokens, match.num_blocks
    if handle.publishes and len(tokens) >= (match.num_blocks + 1) * size:
        if match.next_key is None:
            track(cache, row)
        else:  # `track`, where the key is there already
            place = tip, match.next_key
            if cache.producers.setdefault(place, row) == row:
                handle.inflight = place
    if found.fresh:
        keep_symbols(cache, found.fresh)
    if handle.is_lease:
        return
    counters.prompt_tokens += len(tokens)
    counters.prompt_blocks += len(tokens) // size
    if not match.num_blocks and match.partial is None:
        return
    resident, lowest = match.num_blocks, GPU
    for tier, num_blocks in promoted.items():
        counters.hit_tokens[tier] += num_blocks * size
        counters.hit_blocks[tier] += num_blocks
        handle.stats.cached_tokens_from_lower_tiers += num_blocks * size
        resident, lowest = resident - num_blocks, max(lowest, tier)
    counters.hit_tokens[GPU] += resident * size
    counters.hit_blocks[GPU] += resident
    counters.hit_tokens[lowest] -= match.num_recomputed
    if match.partial is not None:
        counters.hit_tokens[match.partial.tier] += match.num_partial
        counters.partial_hit_tokens += match.num_partial
        handle.num_partial_tokens = match.num_partial
        if match.partial.tier != GPU:
            handle.stats.cached_tokens_from_lower_tiers += match.num_partial
    if match.logits is not None:
        handle.last_logits = match.logits
        counters.full_hits_with_logits += 1


# --- fork ------------------------------------------------------------------------------------------------------------


def fork(cache: Cache, parent: KVCacheHandle, request_ids: Sequence[Hashable]) -> list[KVCacheHandle]:
    """Children that share every block of the parent; whoever writes into a shared block gets a copy first."""
    rows, source = cache.rows, row_of(cache.rows, parent)
    close(cache, tip_of(cache, source))
    if parent.family is None:
        parent.family = {source}
    children = []
    for request_id in request_ids:
        child = KVCacheHandle(rows, request_id, parent.scope)
        for name in INHERITED:
            setattr(child, name, getattr(parent, name))
        child.num_cached_tokens = rows.written_of[source]  # it was computed for its parent
        child.num_cached_blocks = child.num_cached_tokens // cache.block_size
        row = child.row = rows.copy_row(source, child)
        rows.serials_of[row] = child.serial
        tip = rows.tips[row]
        ref(cache, tip)
        for group in cache.groups:
            group.fork(cache, source, row, tip)
        parent.family.add(row)
        rows.set_shared(source, True)
        rows.set_shared(row, True)
        cache.requests[request_id] = child
        children.append(child)
    cache.counters.forks += len(children)
    return children
