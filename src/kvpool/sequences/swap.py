"""Moves between tiers: whole requests to the host and back, and cached runs ahead of time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.config import Tier
from kvpool.config.layers import ceil_div
from kvpool.core.cache import Admission, AllocStatus, Cache
from kvpool.core.handle import KVCacheHandle, any_row_of, note_sessions, row_of
from kvpool.core.kind import Group
from kvpool.core.node import Node, path_ids
from kvpool.core.prompt import Match
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU, BlockPool, CopyKind, CopyOp
from kvpool.prefix.evict import bring_up, demote, enforce_quota, evict, make_room, num_fitting
from kvpool.prefix.tree import end_at, match_tokens, ref, root_for, unref
from kvpool.scope import ReuseScope
from kvpool.sequences.admit import count_match, enter_path
from kvpool.sequences.publish import publish, track, untrack
from kvpool.sequences.release import release_gpu, release_host

# --- out -------------------------------------------------------------------------------------------------------------


def can_swap_out(cache: Cache, handles: Sequence[KVCacheHandle]) -> Admission:
    """OK, LATER (the host is full) or NEVER (it could not hold them even if empty)."""
    held = _held(cache, _rows_of(cache, handles))
    needs = _distinct_needs(cache, held)
    supply = []
    status, reason = AllocStatus.OK, "fits"
    for index, tiers in enumerate(cache.pools):
        host = tiers[Tier.HOST]
        have = cache.orders.available(host, None)
        supply.append(have)
        if needs[index] > host.num_blocks:
            status = AllocStatus.NEVER
            reason = f"needs {needs[index]} host blocks of pool {index}, which has {host.num_blocks}"
        elif needs[index] > have and status is AllocStatus.OK:
            status = AllocStatus.LATER
            reason = f"needs {needs[index]} host blocks of pool {index}, {have} are free or evictable"
    return Admission(status, reason, tuple(needs), tuple(supply))


def _held(cache: Cache, row_list: list[int]) -> list[list[Int32Array]]:
    """Per group and row: the block ids that carry data, -1 elsewhere."""
    return [[group.written_ids(cache.rows, row) for row in row_list] for group in cache.groups]


def _distinct_needs(cache: Cache, held: list[list[Int32Array]]) -> list[int]:
    needs = [0] * len(cache.pools)
    for group, of_group in zip(cache.groups, held, strict=True):
        needs[group.pool] += len(_distinct(of_group))
    return needs


def swap_out(cache: Cache, handles: Sequence[KVCacheHandle]) -> int:
    """Moves requests to the host; returns how many blocks are copied."""
    row_list = _rows_of(cache, handles)
    held = _held(cache, row_list)
    needs = _distinct_needs(cache, held)
    for index, need in enumerate(needs):
        host = cache.pools[index][Tier.HOST]
        have = cache.orders.available(host, None)
        if need > have:
            raise cache.shortage(host, need, have, f"swapping out {len(handles)} requests")
    for index, need in enumerate(needs):
        evict(cache, cache.pools[index][Tier.HOST], need, None)
    swapped: list[list[Int32Array]] = [[] for _ in handles]
    moved = 0
    for group, of_group in zip(cache.groups, held, strict=True):
        num_copied, images = _copy(cache, group, of_group, CopyKind.SWAP_OUT)
        moved += num_copied
        for blocks, image in zip(swapped, images, strict=True):
            blocks.append(image)
    for handle, row, blocks in zip(handles, row_list, swapped, strict=True):
        _leave_gpu(cache, handle, row)
        handle.swapped = blocks
        handle.stats.swaps += 1
    for tiers in cache.pools:
        tiers[Tier.HOST].note_peak()
    cache.counters.swaps_out += len(handles)
    cache.counters.swapped_blocks += moved
    return moved


def _leave_gpu(cache: Cache, handle: KVCacheHandle, row: int) -> None:
    rows = cache.rows
    rows.keep_token_ids(row)
    root = root_for(cache, handle.scope)
    ref(cache, root)
    untrack(cache, handle)
    node = rows.tips[row]
    while node is not node.root:  # the host gets copies of the path, and nobody knows it any more
        note_sessions(handle, node.sessions)
        node = node.parent
    release_gpu(cache, handle, row)
    for table in rows.tables:
        table[row, :] = -1
    rows.tips[row] = root
    rows.present_of[row] = 0
    rows.following.pop(row, None)
    rows.set_shared(row, False)
    rows.serials_of[row] = -1
    rows.moves += 1
    enforce_quota(cache, root)


def _copy(cache: Cache, group: Group, of_group: list[Int32Array], kind: CopyKind) -> tuple[int, list[Int32Array]]:
    """Plans copies of all blocks of some rows to the other tier; returns how many, and each row's blocks there."""
    source, target = (Tier.GPU, Tier.HOST) if kind is CopyKind.SWAP_OUT else (Tier.HOST, Tier.GPU)
    src, pool = _distinct(of_group), group.on(target)
    dst = pool.take(len(src))
    if len(src):
        cache.copies.append(CopyOp(kind, group.index, source, target, src, dst))
    images = []
    for ids in of_group:
        image = np.full(len(ids), -1, np.int32)
        present = ids >= 0
        image[present] = dst[np.searchsorted(src, ids[present])]
        images.append(image)
    holders = np.concatenate([i[i >= 0] for i in images]) if images else dst
    np.add.at(pool.refs, holders, 1)
    if target == Tier.GPU:
        pool.refs[dst[pool.refs[dst] == 1]] = group.single_owner
    return len(src), images


# --- in --------------------------------------------------------------------------------------------------------------


def can_swap_in(cache: Cache, handles: Sequence[KVCacheHandle]) -> Admission:
    """OK, LATER or NEVER, with the watermark kept free."""
    matches = _residents(cache, handles, _rows_of(cache, handles, are_swapped=True))
    of_tenants = _gpu_needs(cache, handles, matches)
    needs = _in_all(cache, of_tenants)
    supply = _gpu_supply(cache, of_tenants, matches)
    for index, (pool, mark) in enumerate(zip(cache.gpu_pools, cache.watermarks, strict=True)):
        if needs[index] > pool.num_blocks - mark:
            reason = f"needs {needs[index]} blocks of pool {index}, which has {pool.num_blocks} ({mark} as watermark)"
            return Admission(AllocStatus.NEVER, reason, tuple(needs), tuple(supply))
        if needs[index] and needs[index] > supply[index] - mark:
            reason = f"needs {needs[index]} blocks of pool {index}, {supply[index]} are free or evictable"
            return Admission(AllocStatus.LATER, reason, tuple(needs), tuple(supply))
    return Admission(AllocStatus.OK, "fits", tuple(needs), tuple(supply))


def _residents(cache: Cache, handles: Sequence[KVCacheHandle], row_list: list[int]) -> list[Match]:
    """What each request takes from the prefix cache: equally much for all that share host blocks behind it.

    They come back sharing private blocks, as forks do, and forks that share private blocks have the same tip.
    """
    matches = [_resident(cache, handle, row) for handle, row in zip(handles, row_list, strict=True)]
    if cache.by_block:
        return matches
    group = cache.full[0]
    least = np.empty(group.on(Tier.HOST).num_blocks, np.int64)
    while True:
        counts = [match.num_blocks for match in matches]
        wanted = [ids[ids >= 0] for ids in _missing(cache, handles, counts)[group.index]]
        least[:] = max(counts, default=0)
        for blocks, count in zip(wanted, counts, strict=True):
            least[blocks] = np.minimum(least[blocks], count)
        common = [int(least[b].min(initial=count)) for b, count in zip(wanted, counts, strict=True)]
        if common == counts:
            return matches
        matches = [_resident(cache, h, h.row, count) for h, count in zip(handles, common, strict=True)]


def _resident(cache: Cache, handle: KVCacheHandle, row: int, limit: int | None = None) -> Match:
    """Full blocks of a swapped request, at most `limit`, that the GPU still has in the prefix cache."""
    rows, size = cache.rows, cache.block_size
    if not handle.publishes or cache.by_block:
        return Match(None, [], 0)
    final = min(rows.committed_of[row], rows.known_of[row]) // size * size
    if limit is not None:
        final = min(final, limit * size)
    return match_tokens(cache, handle.scope, rows.token_ids(row)[:final], only_tier=Tier.GPU)


def _missing(cache: Cache, handles: Sequence[KVCacheHandle], num_resident: list[int]) -> list[list[Int32Array]]:
    """Host ids to bring back per group and row (-1: not needed)."""
    wanted: list[list[Int32Array]] = []
    for group in cache.groups:
        of_group = []
        for handle, resident in zip(handles, num_resident, strict=True):
            assert handle.swapped is not None
            ids = handle.swapped[group.index].copy()
            if group.grows:
                ids[:resident] = -1
            of_group.append(ids)
        wanted.append(of_group)
    return wanted


def _gpu_needs(cache: Cache, handles: Sequence[KVCacheHandle], matches: list[Match]) -> dict[str | None, list[int]]:
    """Blocks per pool that the requests of each tenant take. Only those of one tenant can share host blocks."""
    of_tenants: dict[str | None, list[int]] = {}
    for tenant in dict.fromkeys(handle.scope.tenant for handle in handles):
        own = [i for i, handle in enumerate(handles) if handle.scope.tenant == tenant]
        needs = _distinct_needs(cache, _missing(cache, [handles[i] for i in own], [matches[i].num_blocks for i in own]))
        for group in cache.growing:
            needs[group.pool] += sum(len(group.fresh_columns(cache.rows, handles[i].row)) for i in own)
        of_tenants[tenant] = needs
    return of_tenants


def _gpu_supply(cache: Cache, needs: dict[str | None, list[int]], matches: list[Match]) -> list[int]:
    """Blocks per pool that are free or may be evicted for all of them once they hold what they find.

    A pinned run that they hold protects no other run of its tenant any more. What is guaranteed to a tenant gives way
    to its own requests alone.
    """
    held: dict[Node, int] = {}
    for match in matches:
        for node in match.path:
            if not node.active:
                held[node] = max(held.get(node, 0), min(node.end, match.num_blocks) - node.start)
    supply = cache.supply(None)
    per_position = dict(cache.full_per_pool)
    for index in range(len(supply)):
        blocks = [(node, length * per_position.get(index, 0)) for node, length in held.items()]
        supply[index] -= sum(count for node, count in blocks if not node.pins)
        for tenant, quota in cache.orders.quotas.items():
            own = [(node, count) for node, count in blocks if node.tenant == tenant]
            num_held, num_pinned = sum(n for _, n in own), sum(n for node, n in own if node.pins)
            kept = quota.protected(index, num_held, num_pinned)
            supply[index] += quota.protected(index) - kept
            if tenant in needs:
                supply[index] += kept if len(needs) == 1 else min(kept, needs[tenant][index])
    return supply


def _in_all(cache: Cache, needs: dict[str | None, list[int]]) -> list[int]:
    return [sum(of_tenant[pool.index] for of_tenant in needs.values()) for pool in cache.gpu_pools]


def swap_in(cache: Cache, handles: Sequence[KVCacheHandle]) -> int:
    """Brings requests back; returns how many blocks are copied."""
    row_list = _rows_of(cache, handles, are_swapped=True)
    matches = _residents(cache, handles, row_list)
    needs = _gpu_needs(cache, handles, matches)
    cache.refuse_shortage(
        _in_all(cache, needs), _gpu_supply(cache, needs, matches), f"swapping in {len(handles)} requests"
    )
    for handle, row, match in zip(handles, row_list, matches, strict=True):
        _hold_resident(cache, handle, row, match.num_blocks)
    make_room(cache, needs)
    wanted = _missing(cache, handles, [m.num_blocks for m in matches])
    moved = 0
    for group, of_group in zip(cache.groups, wanted, strict=True):
        num_copied, images = _copy(cache, group, of_group, CopyKind.SWAP_IN)
        moved += num_copied
        table = cache.rows.tables[group.index]
        for row, image in zip(row_list, images, strict=True):
            back = image >= 0
            table[row, : len(image)][back] = image[back]
            if group.grows:
                fresh = group.fresh_columns(cache.rows, row)
                table[row, fresh] = group.take(len(fresh))
    _join_families(cache, handles, wanted)
    for handle, row in zip(handles, row_list, strict=True):
        release_host(cache, handle)
        cache.rows.serials_of[row] = handle.serial
        cache.rows.moves += 1
        if handle.family is not None:
            cache.rows.set_shared(row, True)
        publish(cache, row)
        if handle.publishes:
            track(cache, row)
    cache.counters.swaps_in += len(handles)
    cache.counters.swapped_blocks += moved
    return moved


def _hold_resident(cache: Cache, handle: KVCacheHandle, row: int, num_blocks: int) -> None:
    """Replaces the hold on the root by one on what is still cached, and shows it in the tables."""
    root = cache.rows.tips[row]
    match = _resident(cache, handle, row, num_blocks)  # again: the tree was cut for those before it
    tip = enter_path(cache, match, handle)
    cache.rows.tips[row] = tip
    unref(cache, root)
    for group in cache.full:
        ids = path_ids(tip.path(), match.num_blocks, group.index)
        cache.rows.tables[group.index][row, : match.num_blocks] = ids


def _join_families(cache: Cache, handles: Sequence[KVCacheHandle], wanted: list[list[Int32Array]]) -> None:
    """Requests that went to the host with a common prefix come back sharing its blocks, as forks do."""
    for group, of_group in zip(cache.groups, wanted, strict=True):
        if not of_group or not group.grows:  # others share what does not grow, too
            continue
        ids = np.concatenate(of_group)
        owners = np.repeat(np.arange(len(handles)), [len(part) for part in of_group])
        order = np.argsort(ids, kind="stable")
        ids, owners = ids[order], owners[order]
        shared = (ids[1:] == ids[:-1]) & (ids[1:] >= 0)
        for left, right in set(zip(owners[:-1][shared].tolist(), owners[1:][shared].tolist(), strict=True)):
            one, other = handles[left], handles[right]
            family = (one.family or {one.row}) | (other.family or {other.row})
            for row in family:
                member = cache.rows.handles[row]
                member.family = family


def offload(cache: Cache, source: BlockPool, num_blocks: int) -> int:
    """Moves up to `num_blocks` of the runs that would be evicted next one tier down; returns how many moved."""
    if cache.lower_tier[source.tier] is None:
        raise InvalidArgumentError(f"there is no tier below {source.tier.name}: configure host_blocks or disk_blocks")
    before = source.num_free
    while (moved := source.num_free - before) < num_blocks:
        victim = cache.orders.victim(source, None)
        if victim is None:
            break
        wanted = min(victim.num_blocks, ceil_div(num_blocks - moved, cache.blocks_per_position[source.index]))
        if demote(cache, victim, wanted):
            continue
        part = min(wanted, num_fitting(cache, victim, evicting=False))
        if part:  # more would push out below what has just gone there
            demote(cache, victim, part)
        break
    return source.num_free - before


def onboard(cache: Cache, tokens: Int32Array, scope: ReuseScope) -> int:
    """Brings the cached prefix of `tokens` up to the GPU; returns how many blocks move."""
    match = match_tokens(cache, scope, tokens)
    if not match.path or match.path[-1].tier == GPU:
        return 0
    needs, supply = [0] * len(cache.pools), cache.supply(scope.tenant)
    count_match(cache, match, needs, supply)
    cache.refuse_shortage(needs, supply, f"onboarding a prefix of {match.num_blocks} blocks")
    return _bring_back(cache, end_at(cache, match.path[-1], match.num_blocks))


def onboard_run(cache: Cache, node: Node) -> int:
    """Brings a cached run and all before it up to the GPU; returns how many blocks move: none if there is no room."""
    needs, supply = [0] * len(cache.pools), cache.supply(node.tenant)
    count_match(cache, Match(node.root, node.path(), node.end), needs, supply)
    fits = all(need <= have for need, have in zip(needs, supply, strict=True))
    return _bring_back(cache, node) if fits and node.tier != GPU else 0


def _bring_back(cache: Cache, node: Node) -> int:
    """Brings up a run and all before it, as if somebody had used them now."""
    ref(cache, node)
    moved = sum(part.num_blocks for part, _ in bring_up(cache, node))
    unref(cache, node)
    enforce_quota(cache, node.root)
    return moved


def _distinct(of_group: list[Int32Array]) -> Int32Array:
    """The different block ids among several rows, ascending, without -1."""
    ids = np.unique(np.concatenate(of_group)) if of_group else np.empty(0, np.int32)
    return ids[ids >= 0]


def _rows_of(cache: Cache, handles: Sequence[KVCacheHandle], are_swapped: bool = False) -> list[int]:
    """The rows of different requests, all of them on the GPU or all of them swapped out."""
    if len({id(handle) for handle in handles}) != len(handles):
        raise InvalidArgumentError("the same request stands twice in the list to swap")
    rows: list[int] = []
    for handle in handles:
        rows.append(any_row_of(cache.rows, handle) if are_swapped else row_of(cache.rows, handle))
        if are_swapped and handle.swapped is None:
            raise SequenceStateError(f"request {handle.request_id!r} is not swapped out")
    return rows
