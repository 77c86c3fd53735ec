"""Room for the steps of live sequences: asked for, refused before anything changes, or made by eviction."""

from __future__ import annotations

from kvpool.core.cache import Cache
from kvpool.prefix.evict import evict, make_room
from kvpool.stats import EvictionReason


def require(cache: Cache, needs: list[int], tenant: str | None, what: str) -> None:
    """Raises, before anything changes, if the GPU pools cannot serve `needs`; then evicts to make room."""
    for pool, need in zip(cache.gpu_pools, needs, strict=True):
        if need > pool.num_free and need > (available := cache.orders.available(pool, tenant)):
            raise cache.shortage(pool, need, available, what)
    for pool, need in zip(cache.gpu_pools, needs, strict=True):
        make_room(cache, pool, need, tenant)


def require_each(cache: Cache, needs: dict[str, list[int]], what: str) -> None:
    """`require` for sequences of several tenants: what is guaranteed to a tenant gives way to its own sequences only."""
    quotas = cache.orders.quotas
    totals = [sum(of_tenant) for of_tenant in zip(*needs.values(), strict=True)]
    for pool, total, shared in zip(cache.gpu_pools, totals, cache.supply(None), strict=True):
        own = (min(n[pool.index], quotas[t].protected(pool.index)) for t, n in needs.items() if t in quotas)
        available = shared + sum(own)
        if total > available:
            raise cache.shortage(pool, total, available, what)
    make_room_for_each(cache, needs)


def make_room_for_each(cache: Cache, needs: dict[str, list[int]]) -> None:
    """Evicts until the needs of all tenants are free. The caller has checked that enough is evictable."""
    for pool in cache.gpu_pools:
        missing = sum(of_tenant[pool.index] for of_tenant in needs.values()) - pool.num_free
        of_tenants = [(tenant, of_tenant[pool.index]) for tenant, of_tenant in needs.items()]
        for tenant, most in of_tenants if len(needs) == 1 else [(None, missing), *of_tenants]:
            if missing > 0:
                missing -= evict(cache, pool, min(missing, most), tenant, EvictionReason.CAPACITY)
