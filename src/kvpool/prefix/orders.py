"""Who leaves first, and when: the orders of eviction, the quotas of tenants, deadlines, and the count of idle blocks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

from kvpool.eviction import EvictionPolicy, contained
from kvpool.pools.pool import GPU, BlockPool
from kvpool.prefix.announcer import Announcer
from kvpool.prefix.context import CacheContext
from kvpool.prefix.node import DEFAULT_PRIORITY, NEVER, Node, Root
from kvpool.scope import ReuseScope


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
        return [contained(policy, self.failures) for policy in made]

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
        return supply if supply > 0 else 0

    def available(self, pool: BlockPool, tenant: str | None) -> int:
        """How many blocks of a pool a request of `tenant` could have: free ones and those that may be evicted for it."""
        return pool.num_free + self.evictable(pool, tenant)

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


class Calendar:
    """Runs actions when their time has come.

    An action is run once, at the earliest time asked for since it last ran; it schedules itself again if it finds that it
    came too early. `next` is when the first one is due: whoever starts an operation compares it with the clock.

    >>> calendar, done = Calendar(), []
    >>> calendar.schedule("tea", 5.0, lambda: done.append("tea") or 1)
    >>> calendar.run_due(4.0), calendar.run_due(5.0), done
    (0, 1, ['tea'])
    """

    __slots__ = ("actions", "_heap", "_serial", "next")

    def __init__(self) -> None:
        self.next = NEVER
        self.actions: dict[Hashable, tuple[float, Callable[[], int]]] = {}
        self._heap: list[tuple[float, int, Any]] = []
        self._serial = 0  # entries of one time run in the order in which they were made

    def __len__(self) -> int:
        return len(self.actions)

    def schedule(self, key: Hashable, when: float, action: Callable[[], int]) -> None:
        """Runs `action` at `when`, unless something earlier is planned for `key` already."""
        planned = self.actions.get(key)
        if planned is not None and planned[0] <= when:
            return
        self.actions[key] = (when, action)
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, key))
        if len(self._heap) > 2 * len(self.actions) + 64:
            self._rebuild()
        self.next = self._heap[0][0]

    def forget(self, key: Hashable) -> None:
        """Plans nothing more for `key`."""
        self.actions.pop(key, None)

    def run_due(self, now: float) -> int:
        """Runs everything that is due and returns the sum of what the actions return."""
        total = 0
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            planned = self.actions.get(key)
            if planned is not None and planned[0] == when:
                del self.actions[key]
                total += planned[1]()
        self.next = self._heap[0][0] if self._heap else NEVER
        return total

    def _rebuild(self) -> None:
        """Drops entries that were forgotten or replaced by earlier ones."""
        live = {(when, key) for key, (when, _) in self.actions.items()}
        self._heap = [entry for entry in self._heap if (entry[0], entry[2]) in live]
        heapq.heapify(self._heap)


class Expiry:
    """Deadlines of runs. `drop` takes an idle leaf whose time is over out of the index."""

    def __init__(self, context: CacheContext, announcer: Announcer, drop: Callable[[Node], None]) -> None:
        self.context = context
        self.announcer = announcer
        self.events = context.events
        self.drop = drop
        self.calendar = Calendar()

    def run(self) -> int:
        """Drops idle leaves whose time to live is over, ends pins and priorities; returns positions dropped."""
        return self.calendar.run_due(self.context.now)

    def watch(self, node: Node) -> None:
        """Notes when a node's time to live or priority ends, if it does."""
        if node.expires_at != NEVER:
            self.calendar.schedule(node, node.expires_at, partial(self._time_is_up, node))
        if node.priority_until != NEVER:
            self.calendar.schedule(node, node.priority_until, partial(self._time_is_up, node))

    def forget(self, node: Node) -> None:
        """Watches a node no more: it left the tree."""
        if self.calendar.actions:
            self.calendar.forget(node)

    def _time_is_up(self, node: Node) -> int:
        """A deadline of a node has passed; returns the positions that left the tree."""
        now, dropped = self.context.now, 0
        if node.priority_until <= now:
            self.set_priority(node, DEFAULT_PRIORITY, NEVER)
        while node.expires_at <= now and node.is_candidate():
            dropped += node.num_blocks
            parent = node.parent
            self.drop(node)
            node = parent
        for when in (node.expires_at, node.priority_until):
            if now < when < NEVER and not node.detached:
                self.calendar.schedule(node, when, partial(self._time_is_up, node))
        return dropped

    def set_priority(self, node: Node, priority: int, until: float) -> None:
        """Changes the retention priority of a node, in the policy and for subscribers."""
        old = node.priority
        node.priority_until = until
        self.watch(node)
        if priority == old:
            return
        policy = node.root.policies[node.tier]
        candidate = node.is_candidate()
        if candidate:
            policy.remove(node)
        node.priority = priority
        if candidate:
            policy.add(node)
        if self.events.listening and node.digests:
            self.announcer.priority_changed(node, old)


class IdleLedger:
    """The only one who changes `num_cached` and `num_pinned` of pools and quotas, but for host copies: they count themselves.

    Blocks of full groups count with their run. Those of windowed groups count by themselves on the GPU, with the sequences
    whose window covers them; below it they count with their run, because nobody reads one of them alone there.
    """

    def __init__(self, context: CacheContext) -> None:
        self.pools = context.pools
        self.windowed = context.windowed
        self.full_per_pool = context.full_per_pool
        # The pool of each tier when there is one full group and nothing else: counting is then one addition.
        plain = self.full_per_pool == [(0, 1)] and not self.windowed and len(self.pools) == 1
        self.only_pools = self.pools[0] if plain else None

    def add_cached(self, root: Root, pool: BlockPool, change: int) -> None:
        """`change` blocks became idle (or, if negative, stopped being so)."""
        pool.num_cached += change
        if root.quota is not None and pool.tier == GPU:
            root.quota.cached[pool.index] += change

    def add_pinned(self, root: Root, pool: BlockPool, change: int) -> None:
        """`change` idle blocks became pinned (or, if negative, stopped being so)."""
        pool.num_pinned += change
        if root.quota is not None and pool.tier == GPU:
            root.quota.pinned[pool.index] += change

    def count_positions(self, node: Node, change: int) -> None:
        """`change` positions of full groups in a run became idle (or, if negative, stopped being so)."""
        if self.only_pools is not None and node.root.quota is None:
            self.only_pools[node.tier].num_cached += change
            return
        for index, per_position in self.full_per_pool:
            self.add_cached(node.root, self.pools[index][node.tier], change * per_position)

    def count_run(self, node: Node, change: int) -> None:
        """A run became idle (`change` 1) or stopped being so (-1): its blocks that count with it are cached, or not."""
        if self.only_pools is not None and node.root.quota is None:
            self.only_pools[node.tier].num_cached += change * node.num_blocks
            return
        self.count_positions(node, change * node.num_blocks)
        if self.windowed and node.tier != GPU:
            for pool, num_blocks in self._windowed_below(node):
                self.add_cached(node.root, pool, change * num_blocks)

    def count_pinned_run(self, node: Node, change: int) -> None:
        """An idle run became pinned (`change` 1) or stopped being so (-1)."""
        for index, per_position in self.full_per_pool:
            self.add_pinned(node.root, self.pools[index][node.tier], change * node.num_blocks * per_position)
        if self.windowed and node.tier != GPU:
            for pool, num_blocks in self._windowed_below(node):
                self.add_pinned(node.root, pool, change * num_blocks)

    def _windowed_below(self, node: Node) -> Iterator[tuple[BlockPool, int]]:
        """(pool, blocks) of each windowed group of a run below the GPU."""
        for group in self.windowed:
            yield group.on(node.tier), int((node.ids[group.index] >= 0).sum())
