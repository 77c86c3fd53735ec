"""Per-tenant limits on idle cache: a share that others cannot evict, and a share that it cannot exceed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvpool.eviction import EvictionPolicy


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

    def protected(self, pool: int) -> int:
        """How many of the tenant's unpinned cached blocks other tenants cannot evict."""
        return _protected(self.cached[pool], self.guaranteed[pool], self.pinned[pool])

    def excess(self, pool: int) -> int:
        """How many blocks the tenant's idle cache is over its maximum."""
        limit = self.maximum[pool]
        return 0 if limit is None else max(0, self.cached[pool] - limit)

    def view(self) -> TenantQuota:
        """The numbers as they stand now."""
        return TenantQuota(tuple(self.guaranteed), tuple(self.maximum), tuple(self.cached), tuple(self.pinned))


def _protected(cached: int, guaranteed: int, pinned: int) -> int:
    return max(0, min(cached, guaranteed) - pinned)
