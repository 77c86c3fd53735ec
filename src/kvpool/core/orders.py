"""Who leaves first, and when: the orders of eviction, the quotas of tenants, deadlines, and the count of idle blocks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from kvpool.core.node import NEVER, Node
from kvpool.eviction import EvictionPolicy, LeaversFirst, contained
from kvpool.pools.pool import GPU, BlockPool


class TenantQuota(NamedTuple):
    """The quota of one tenant as it stands now: GPU blocks of each pool."""

    guaranteed: tuple[int, ...]
    maximum: tuple[int | None, ...]
    cached: tuple[int, ...]  # unread cached blocks of the tenant
    pinned: tuple[int, ...]  # of the cached ones

    def protected(self, pool: int, num_reused: int = 0) -> int:
        """Unpinned cached blocks that other tenants cannot evict, once a request of the tenant reads `num_reused` of them."""
        return _protected(self.cached[pool] - num_reused, self.guaranteed[pool], self.pinned[pool])


class Quota:
    """Limits of one tenant, in GPU blocks per pool, and its own eviction order.

    `cached` counts the tenant's unreferenced cached blocks. While it is at or below `guaranteed`, other tenants' requests
    do not evict them; when it would pass `maximum`, the tenant's own blocks go first. Blocks of running requests are not
    limited here: that is the scheduler's decision. A guarantee holds in each pool against requests that need room in that
    pool; a run that leaves for the sake of one pool takes its blocks of the others along.
    """

    __slots__ = ("cached", "guaranteed", "maximum", "pinned", "policies", "tenant")

    def __init__(
        self, tenant: str, guaranteed: list[int], maximum: list[int | None], policies: list[EvictionPolicy]
    ) -> None:
        self.tenant = tenant
        self.guaranteed = guaranteed
        self.maximum = maximum
        self.policies = policies
        self.cached = [0] * len(guaranteed)
        self.pinned = [0] * len(guaranteed)  # of the cached ones

    def protected(self, pool: int, num_reused: int = 0, num_pinned: int = 0) -> int:
        """How many of the tenant's unpinned cached blocks other tenants cannot evict.

        Once it reads `num_reused` of its cached blocks, of which `num_pinned` are pinned, they are idle no more.
        """
        return _protected(self.cached[pool] - num_reused, self.guaranteed[pool], self.pinned[pool] - num_pinned)

    def excess(self, pool: int) -> int:
        """How many blocks the tenant's idle cache is over its maximum."""
        limit = self.maximum[pool]
        return 0 if limit is None else max(0, self.cached[pool] - limit)

    def view(self) -> TenantQuota:
        """The numbers as they stand now."""
        return TenantQuota(tuple(self.guaranteed), tuple(self.maximum), tuple(self.cached), tuple(self.pinned))


def _protected(cached: int, guaranteed: int, pinned: int) -> int:
    return max(0, min(cached, guaranteed) - pinned)


class EvictionOrders:
    """One eviction policy per tier for everybody, and one per tier for each tenant that has a quota."""

    def __init__(
        self,
        new_policy: Callable[[], EvictionPolicy],
        num_tiers: int,
        failures: deque[tuple[str, Exception]],
        depth_cost: float | None = None,
        first_lost: int = 0,
    ) -> None:
        self.new_policy = new_policy
        self.num_tiers = num_tiers
        self.failures = failures  # of a user's policy
        self.depth_cost = depth_cost  # of a block, for each one before it; None: eviction counts blocks
        self.first_lost = first_lost  # the first tier whose victims must be computed again
        self.leavers_go_first = False
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
        kept = [contained(policy, self.failures) for policy in made]
        return [LeaversFirst(policy) for policy in kept] if self.leavers_go_first else kept

    def let_leavers_go(self) -> None:
        """From now on, runs of ended sessions go first. Until the first one ends, nobody looks for them."""
        if not self.leavers_go_first:
            self.leavers_go_first = True
            for policies in (self.policies, *[quota.policies for quota in self.quotas.values()]):
                policies[:] = [LeaversFirst(policy) for policy in policies]

    def available(self, pool: BlockPool, tenant: str | None) -> int:
        """How many blocks of a pool a request of `tenant` could have: free ones and those that may be evicted for it."""
        evictable = pool.num_cached - pool.num_pinned
        if self.quotas and pool.tier == GPU:
            for quota in self.quotas.values():
                if quota.tenant != tenant:
                    evictable -= quota.protected(pool.index)
        return pool.num_free + (evictable if evictable > 0 else 0)

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
            if best is None or (not node.leaves, node.last_access) < (not best.leaves, best.last_access):
                best = node
        return best  # type: ignore[no-any-return]


class Calendar:
    """Deadlines, each of which is due once, at the earliest time asked for since it was due last.

    Whoever finds that it came too early schedules it again. `next` is when the first one is due: whoever starts an operation
    compares it with the clock.

    >>> calendar = Calendar()
    >>> calendar.schedule("tea", 5.0)
    >>> calendar.due(4.0), calendar.due(5.0), calendar.due(5.0)
    (None, 'tea', None)
    """

    __slots__ = ("times", "_heap", "_serial", "next")

    def __init__(self) -> None:
        self.next = NEVER
        self.times: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Any]] = []
        self._serial = 0  # entries of one time are due in the order in which they were made

    def __len__(self) -> int:
        return len(self.times)

    def schedule(self, key: Hashable, when: float) -> None:
        """`key` is due at `when`, unless something earlier is planned for it already."""
        planned = self.times.get(key)
        if planned is not None and planned <= when:
            return
        self.times[key] = when
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, key))
        if len(self._heap) > 2 * len(self.times) + 64:
            self._heap = [entry for entry in self._heap if self.times.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        self.next = self._heap[0][0]

    def forget(self, key: Hashable) -> None:
        """Plans nothing more for `key`."""
        self.times.pop(key, None)

    def due(self, now: float) -> Any:
        """The next key whose time has come; None if there is none."""
        found = None
        while found is None and self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            if self.times.get(key) == when:
                del self.times[key]
                found = key
        self.next = self._heap[0][0] if self._heap else NEVER
        return found
