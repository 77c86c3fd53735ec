from __future__ import annotations

from typing import Any

import pytest

from kvpool import KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.core.orders import TenantQuota
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from managers import FULL, cached, make_manager, running

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
MINE, YOURS = ReuseScope(tenant="mine"), ReuseScope(tenant="yours")


def held(manager: KVCacheManager, tenant: str) -> int:
    manager.check()
    return manager.stats().tenants[tenant][0]


def test_a_tenant_never_keeps_more_than_its_maximum() -> None:
    manager = make_manager()
    manager.cache.set_quota("mine", maximum=3)
    for first in range(0, 60, 20):
        cached(manager, 16, first, scope=MINE)
        assert held(manager, "mine") == 3
    assert manager.stats().evictions["quota"] == 9


@pytest.mark.parametrize(
    "idle",
    [
        lambda manager, handle: manager.free(handle),
        lambda manager, handle: manager.free_batch([handle, manager.allocate("other", [1])]),
        lambda manager, handle: manager.swap_out(handle),
        lambda manager, handle: manager.rewind(handle, 16),
    ],
    ids=["free", "free_batch", "swap_out", "rewind"],
)
def test_the_maximum_holds_by_whatever_path_blocks_become_idle(idle: Any) -> None:
    manager = make_manager(host_blocks=16)
    manager.cache.set_quota("mine", maximum=1)
    handle = manager.allocate("a", list(range(16)), scope=MINE)
    manager.commit(handle, 16)
    idle(manager, handle)
    assert held(manager, "mine") == 1


def test_the_maximum_holds_when_a_prefix_is_brought_up() -> None:
    manager = make_manager(host_blocks=16)
    manager.cache.set_quota("mine", maximum=3)
    lower = cached(manager, 12, scope=MINE)
    assert manager.cache.offload(3) == 3
    cached(manager, 12, 100, scope=MINE)
    assert held(manager, "mine") == 3
    assert manager.cache.onboard(lower, scope=MINE) == 3
    assert held(manager, "mine") == 3


def test_the_maximum_holds_again_when_a_pin_ends() -> None:
    manager = make_manager()
    tokens = cached(manager, 16, scope=MINE)
    pin = manager.cache.pin(tokens, MINE)
    manager.cache.set_quota("mine", maximum=1)
    assert held(manager, "mine") == 4
    manager.cache.unpin(pin)
    assert held(manager, "mine") == 1


def test_a_new_quota_applies_to_what_is_cached_already() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    cached(manager, 16, scope=MINE)
    manager.cache.set_quota("mine", maximum=2)
    assert held(manager, "mine") <= 2


def test_others_cannot_evict_what_is_guaranteed() -> None:
    manager = make_manager(gpu_blocks=8)
    manager.cache.set_quota("mine", guaranteed=2)
    tokens = cached(manager, 16, scope=MINE)
    manager.allocate("a", num_tokens=24, scope=YOURS)
    assert manager.match_prefix([*tokens, 1], MINE).num_blocks == 2
    with pytest.raises(OutOfBlocksError):
        manager.allocate("b", num_tokens=4, scope=YOURS)
    assert manager.cache.evict(100) == 0
    manager.allocate("c", num_tokens=8, scope=MINE)  # the tenant itself may
    assert held(manager, "mine") == 0


def test_a_guarantee_that_is_not_used_costs_others_nothing() -> None:
    manager = make_manager(gpu_blocks=8)
    manager.cache.set_quota("mine", guaranteed=6)
    manager.allocate("a", num_tokens=32, scope=YOURS)
    assert manager.inspect.num_free_blocks() == 0


def test_of_several_tenants_the_stalest_run_over_its_guarantee_goes_first() -> None:
    manager = make_manager(gpu_blocks=8)
    manager.cache.set_quota("mine", guaranteed=1)
    manager.cache.set_quota("yours", guaranteed=1)
    older, newer = cached(manager, 8, scope=MINE), cached(manager, 8, scope=YOURS)
    cached(manager, 8, scope=ReuseScope())
    manager.cache.evict(1)
    assert manager.match_prefix([*older, 1], MINE).num_blocks == 1
    manager.cache.evict(1)
    assert manager.match_prefix([*newer, 1], YOURS).num_blocks == 1
    assert manager.cache.evict(100) == 2  # the tenant without quota has no guarantee
    manager.check()


def test_guaranteed_windowed_blocks_are_shielded_too() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=24)
    manager.cache.set_quota("mine", guaranteed=8)
    cached(manager, 16, scope=MINE)
    assert held(manager, "mine") == 8
    assert manager.cache.evict(100) == 0
    manager.cache.set_quota("mine", guaranteed=6)
    assert manager.cache.evict(100) == 2
    assert held(manager, "mine") == 6


def with_guarantees(*layers: LayerSpec, num_tokens: int, gpu_blocks: int) -> KVCacheManager:
    """Two tenants whose idle cache is all guaranteed to them."""
    manager = make_manager(*layers, gpu_blocks=gpu_blocks)
    for scope, first in ((MINE, 100), (YOURS, 200)):
        cached(manager, num_tokens, first, scope=scope)
        manager.cache.set_quota(scope.tenant, guaranteed=num_tokens // 4 * len(layers))
    return manager


def test_a_batch_of_several_tenants_takes_from_each_only_for_its_own_sequences() -> None:
    manager = with_guarantees(FULL, num_tokens=12, gpu_blocks=8)
    handles = [running(manager, "a", 4, 300, scope=MINE), running(manager, "b", 4, 400, scope=YOURS)]
    manager.extend_batch(handles, 8)  # two blocks for each of them, and none is free
    assert (held(manager, "mine"), held(manager, "yours")) == (1, 1)
    with pytest.raises(OutOfBlocksError, match="needs 2 blocks of pool 0 on GPU; 1 of"):
        manager.extend_batch(handles, [8, 0])  # one of the two would be the other tenant's
    assert (held(manager, "mine"), held(manager, "yours")) == (1, 1)
    assert [handle.num_reserved for handle in handles] == [12, 12]
    assert manager.stats().extend_failures == 1


def test_a_batch_of_several_tenants_takes_its_own_shares_of_a_pool_that_groups_share() -> None:
    manager = with_guarantees(FULL, SLIDING, num_tokens=12, gpu_blocks=16)
    handles = [running(manager, "a", 4, 300, scope=MINE), running(manager, "b", 4, 400, scope=YOURS)]
    manager.extend_batch(handles, 8)
    assert sum(manager.stats().tenants[tenant][0] for tenant in ("mine", "yours")) == 4
    assert min(held(manager, "mine"), held(manager, "yours")) > 0


def test_copies_for_forks_of_several_tenants_are_taken_from_their_own_shares() -> None:
    manager = with_guarantees(FULL, num_tokens=8, gpu_blocks=6)
    parents = [running(manager, "a", 2, 300, scope=MINE), running(manager, "b", 2, 400, scope=YOURS)]
    children = [child for parent in parents for child in manager.fork(parent, (parent.request_id, 1))]
    manager.extend_batch([*parents, *children])
    assert (held(manager, "mine"), held(manager, "yours")) == (1, 1)


def test_the_quotas_in_force_can_be_read() -> None:
    manager = make_manager()
    assert manager.cache.quotas() == {}
    manager.cache.set_quota("mine", guaranteed=2, maximum=0.5)
    cached(manager, 12, scope=MINE)
    manager.cache.pin(range(4), MINE)
    quota = manager.cache.quotas()["mine"]
    assert quota == TenantQuota(guaranteed=(2,), maximum=(8,), cached=(3,), pinned=(1,))
    assert [quota.protected(0, num_reused) for num_reused in range(4)] == [1, 1, 0, 0]


def test_a_new_quota_counts_the_pinned_blocks_of_windows_too() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    tokens = cached(manager, 32, scope=MINE)
    manager.cache.pin(tokens[:16], MINE)  # 4 blocks, of which the window reads the last 2
    manager.cache.set_quota("mine", maximum=64)
    manager.check()
    counted = manager.cache.quotas()["mine"]
    assert counted.pinned == (4 + 2,)
    assert counted.cached == (manager.stats().pool().cached,)


def test_fractions_are_of_each_pool() -> None:
    manager = make_manager(gpu_blocks=16)
    manager.cache.set_quota("mine", maximum=0.25)
    cached(manager, 32, scope=MINE)
    assert held(manager, "mine") == 4


def test_a_quota_without_limits_is_removed() -> None:
    manager = make_manager()
    manager.cache.set_quota("mine", guaranteed=2, maximum=4)
    tokens = cached(manager, 8, scope=MINE)
    manager.cache.set_quota("mine")
    assert manager.stats().tenants == {}
    assert manager.cache.evict(100) == 2
    assert manager.match_prefix([*tokens, 1], MINE).num_blocks == 0
    manager.check()


def test_a_smaller_gpu_pool_may_cost_a_tenant_its_guarantee() -> None:
    manager = make_manager(gpu_blocks=8)
    manager.cache.set_quota("mine", guaranteed=4)
    cached(manager, 16, scope=MINE)
    assert manager.cache.resize(2).num_evicted == 2
    assert held(manager, "mine") == 2
    assert manager.cache.evict(100) == 0  # what is left is guaranteed as before


def test_excess_blocks_are_offloaded_where_there_is_a_lower_tier() -> None:
    manager = make_manager(host_blocks=8)
    manager.cache.set_quota("mine", maximum=1)
    tokens = cached(manager, 12, scope=MINE)
    assert manager.match_prefix([*tokens, 1], MINE).tokens_by_tier == {Tier.GPU: 4, Tier.HOST: 8}
    manager.check()


@pytest.mark.parametrize(
    ("tenant", "limits", "named"),
    [
        ("t", {"guaranteed": 17}, "guaranteed=17"),
        ("t", {"guaranteed": -1}, "guaranteed=-1"),
        ("t", {"guaranteed": 1.5}, "guaranteed=1.5"),
        ("t", {"guaranteed": float("nan")}, "guaranteed=nan"),
        ("t", {"maximum": float("inf")}, "maximum=inf"),
        ("t", {"maximum": True}, "maximum"),
        ("t", {"maximum": "4"}, "maximum"),
        ("t", {"guaranteed": 5, "maximum": 4}, "guaranteed=5 is more than maximum=4"),
        ("t", {"guaranteed": 9}, "add up to 17"),
        (None, {"guaranteed": 1}, "tenant"),
        (["t"], {"guaranteed": 1}, "tenant"),
    ],
)
def test_a_quota_that_cannot_be_is_refused_by_name(tenant: Any, limits: dict[str, Any], named: str) -> None:
    manager = make_manager()
    manager.cache.set_quota("yours", guaranteed=8)
    with pytest.raises(InvalidArgumentError, match=named):
        manager.cache.set_quota(tenant, **limits)
    assert set(manager.stats().tenants) == {"yours"}


def test_a_tenant_loses_what_it_has_above_its_guarantee_and_no_block_more() -> None:
    manager = make_manager(gpu_blocks=12)
    manager.cache.set_quota("t", guaranteed=4)
    scope = ReuseScope(tenant="t")
    for name, tokens, of in (("own", range(20), scope), ("young", range(50, 62), ReuseScope())):
        handle = manager.allocate(name, list(tokens), scope=of)
        manager.commit(handle)
        manager.free(handle)
    manager.allocate(
        "other", list(range(100, 124))
    )  # 4 blocks are free, one is above the guarantee, one of the young goes
    assert manager.match_prefix(list(range(21)), scope=scope).num_tokens == 16
    assert manager.match_prefix(list(range(50, 63))).num_tokens == 8
    manager.check()
