"""Cached runs moved between tiers on request: down before memory is short, up before their request comes."""

from __future__ import annotations

from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU, BlockPool
from kvpool.scope import ReuseScope
from kvpool.sequences.admission import AdmissionPlanner
from kvpool.sequences.state import CacheState


class Onboarding:
    """`offload` and `onboard`: what eviction and admission do on their own, done ahead of time."""

    def __init__(self, state: CacheState, admissions: AdmissionPlanner) -> None:
        self.state = state
        self.cache = state.cache
        self.tree = state.cache.tree
        self.readers = state.cache.readers
        self.admissions = admissions

    def offload(self, source: BlockPool, num_blocks: int) -> int:
        """Moves up to `num_blocks` of the runs that would be evicted next one tier down; returns how many moved."""
        cache = self.cache
        if cache.mover.lower_tier[source.tier] is None:
            raise InvalidArgumentError(
                f"there is no tier below {source.tier.name}: configure host_blocks or disk_blocks"
            )
        before, mover = source.num_free, cache.mover
        while (moved := source.num_free - before) < num_blocks:
            victim = cache.orders.victim(source, None)
            if victim is None:
                break
            wanted = min(victim.num_blocks, ceil_div(num_blocks - moved, cache.blocks_per_position[source.index]))
            if mover.demote(victim, wanted):
                continue
            part = min(wanted, mover.num_fitting(victim, evicting=False))
            if part:  # more would push out below what has just gone there
                mover.demote(victim, part)
            break
        return source.num_free - before

    def onboard(self, tokens: Int32Array, scope: ReuseScope) -> int:
        """Brings the cached prefix of `tokens` up to the GPU; returns how many blocks move."""
        state, cache = self.state, self.cache
        match = self.tree.match(scope, tokens, partial=False)
        if not match.path or match.path[-1].tier == GPU:
            return 0
        needs, supply = [0] * len(state.pools), state.supply(scope.tenant)
        self.admissions.count_match(match, needs, supply)
        state.refuse_shortage(needs, supply, f"onboarding a prefix of {match.num_blocks} blocks")
        node = match.path[-1]
        if node.end > match.num_blocks:
            node = self.tree.split(node, match.num_blocks - node.start)
        self.readers.hold(node)
        for pool, need in zip(state.gpu_pools, needs, strict=True):
            cache.make_room(pool, need, scope.tenant)
        moved = 0
        for part in node.path():
            if part.tier != GPU:
                cache.mover.promote(part)
                moved += part.num_blocks
        self.readers.release(node)
        cache.enforce_quota(node.root)
        return moved
