"""Which blocks are there for whom: what is guaranteed to a tenant is not there for requests of others."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.manager import KVCacheManager
from kvpool.scheduling.request import ScheduledSequence
from kvpool.scope import ReuseScope
from kvpool.sequences.state import Admission


class Supply:
    """Blocks per GPU pool that are free or evictable, with every tenant's guarantee kept. Numbers only."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.num_pools = len(manager.config.pools)

    def guaranteed_to_others(self, tenant: str, pool: int) -> dict[str, int]:
        """Blocks of a pool that may never be there for requests of a tenant, by the tenants that they are guaranteed to."""
        quotas = self.manager.quotas().items()
        return {other: quota.guaranteed[pool] for other, quota in quotas if other != tenant and quota.guaranteed[pool]}

    def of(self, tenant: str) -> tuple[int, ...]:
        """What requests of a tenant may take."""
        return self.manager.can_allocate(num_tokens=1, scope=ReuseScope(tenant=tenant)).blocks_available

    def room(self, admission: Admission, tenant: str, running: Iterable[ScheduledSequence]) -> tuple[int, ...]:
        """What is left of an admission's supply for all promises together, also those made to other tenants.

        Whoever takes a block takes a free one first, also if some of his own idle ones could give way. So the promises
        must fit into what is there for each tenant that was given one.
        """
        have = admission.blocks_available
        quotas = self.manager.quotas()
        others = {sequence.request.scope.tenant for sequence in running} - {tenant} if quotas else set()
        if not others:
            return have
        before, least = self.of(tenant), list(have)
        for pool in range(self.num_pools):
            kept = quotas[tenant].protected(pool, before[pool] - have[pool]) if tenant in quotas else 0
            own = min(quotas[other].protected(pool) if other in quotas else 0 for other in others)
            least[pool] += min(0, own - kept)
        return tuple(least)

    def num_served(self, needs: list[tuple[str, tuple[int, ...]]]) -> int:
        """How many of these needs, each of a tenant and per pool, can be met in this order."""
        quotas = self.manager.quotas()
        pools = range(self.num_pools)
        own = {tenant: [quota.protected(pool) for pool in pools] for tenant, quota in quotas.items()}
        shared = list(self.of(""))
        for pool, kept in enumerate(own.get("", [])):
            shared[pool] -= kept
        for position, (tenant, of_one) in enumerate(needs):
            for pool, need in enumerate(of_one):
                of_own = min(need, own[tenant][pool]) if tenant in own else 0
                if of_own:
                    own[tenant][pool] -= of_own
                shared[pool] -= need - of_own
            if min(shared) < 0:
                return position
        return len(needs)
