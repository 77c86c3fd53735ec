"""The orders in which idle runs leave, and who may make whom leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.eviction import EvictionPolicy
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.node import Node, Root
from kvpool.prefix.quota import Quota
from kvpool.scope import ReuseScope


class EvictionOrders:
    """One eviction policy per tier for everybody, and one per tier for each tenant that has a quota."""

    def __init__(
        self,
        new_policy: Callable[[], EvictionPolicy],
        num_tiers: int,
        depth_cost: float | None = None,
        first_lost: int = 0,
    ) -> None:
        self.new_policy = new_policy
        self.num_tiers = num_tiers
        self.depth_cost = depth_cost  # of a block, for each one before it; None: eviction counts blocks
        self.first_lost = first_lost  # the first tier whose victims must be computed again
        self.policies = self.new_policies()
        self.quotas: dict[str, Quota] = {}

    def new_policies(self) -> list[EvictionPolicy]:
        """An order for each tier, all empty.

        What leaves a tier for the next takes as long to come back wherever it stood in its prompt; what leaves the last one
        must be computed again, which takes longer the more is before it.
        """
        made = [self.new_policy() for _ in range(self.num_tiers)]
        if self.depth_cost is not None:
            for policy in made[self.first_lost :]:
                policy.weigh(self.depth_cost)
        return made

    def new_root(self, scope: ReuseScope) -> Root:
        """The top of a scope, whose runs leave in the order of their tenant."""
        quota = self.quotas.get(scope.tenant)
        return Root(scope, self.policies if quota is None else quota.policies, quota)

    def evictable(self, pool: BlockPool, tenant: str | None) -> int:
        """How many cached blocks of a pool a request of `tenant` could have evicted."""
        supply = pool.num_cached - pool.num_pinned
        if self.quotas and pool.tier == GPU:
            for quota in self.quotas.values():
                if quota.tenant != tenant:
                    supply -= quota.protected(pool.index)
        return max(supply, 0)

    def victim(self, pool: BlockPool, tenant: str | None) -> Node | None:
        """The next run to lose its tail: the stalest among the policy's choice and those of tenants over their guarantee."""
        policy = self.policies[pool.tier]
        try:
            best: Any = policy.victim()
        except LookupError:
            if len(policy):  # it has candidates: a KeyError or IndexError of its own code, and no word of theirs
                raise
            best = None
        if not self.quotas:
            return best  # type: ignore[no-any-return]
        for quota in self.quotas.values():
            candidates = quota.policies[pool.tier]
            if not len(candidates):
                continue
            if pool.tier == GPU and quota.tenant != tenant and quota.cached[pool.index] <= quota.guaranteed[pool.index]:
                continue
            node = candidates.victim()
            if best is None or node.last_access < best.last_access:
                best = node
        return best  # type: ignore[no-any-return]
