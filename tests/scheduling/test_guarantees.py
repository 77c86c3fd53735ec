"""Tenants whose idle cache is guaranteed beside requests of other tenants: what is kept from them is not promised to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support import add, make_engine, names, request
from toy_engine import ToyEngine

from kvpool import ReuseScope
from kvpool.errors import NeverFitsError
from kvpool.scheduling import CapacityMode, FinishReason
from kvpool.scheduling.capacity import Supply
from managers import cached, make_manager

MINE, YOURS = ReuseScope(tenant="mine"), ReuseScope(tenant="yours")


def guaranteed_engine(mine: int = 0, yours: int = 0, **config: Any) -> ToyEngine:
    """16 blocks, of which tenants have as many idle and guaranteed as is said; `config` is that of the scheduler."""
    engine = make_engine(**config)
    for scope, blocks, first in ((MINE, mine, 1000), (YOURS, yours, 2000)):
        if blocks:
            engine.manager.cache.set_quota(scope.tenant, guaranteed=blocks)
            add(engine, request(scope.tenant, 4 * blocks, 1, first=first, scope=scope))
            engine.drain()
    return engine


def test_a_request_that_needs_blocks_guaranteed_to_another_tenant_is_refused_by_name() -> None:
    engine = guaranteed_engine(mine=10)
    with pytest.raises(
        NeverFitsError, match=r"7 blocks of pool 0: 6 of 16 are available.*10 are guaranteed to 'mine'.*set_quota"
    ):
        add(engine, request("a", 24, 5, scope=YOURS))
    fits, own = request("b", 20, 5, scope=YOURS), request("c", 40, 5, scope=MINE)
    add(engine, fits, own)
    engine.drain(max_steps=60)
    engine.assert_right(fits, own)


def test_a_guarantee_that_is_not_filled_yet_counts_too() -> None:
    manager = make_manager()
    manager.cache.set_quota("mine", guaranteed=10)
    engine = make_engine(manager)
    with pytest.raises(NeverFitsError, match="10 are guaranteed to 'mine'"):
        add(engine, request("a", 24, 5, scope=YOURS))


def test_when_every_block_is_guaranteed_to_another_tenant_then_not_even_one_token_fits() -> None:
    manager = make_manager()
    manager.cache.set_quota("mine", guaranteed=16)
    with pytest.raises(NeverFitsError, match="need 1 blocks of pool 0: 0 of 16 are available to this tenant"):
        add(make_engine(manager), request("a", 1, 1, scope=YOURS))


def test_when_a_guarantee_is_set_later_then_a_waiting_request_that_cannot_fit_beside_it_is_refused() -> None:
    manager = make_manager()
    engine = make_engine(manager)
    add(engine, request("a", 40, 5, scope=YOURS))
    manager.cache.set_quota("mine", guaranteed=10)
    (done,) = engine.step().finished
    assert done.reason is FinishReason.REFUSED
    assert "10 are guaranteed to 'mine'" in done.detail
    assert not engine.scheduler.has_work


def test_when_a_guarantee_is_set_later_then_a_running_request_ends_with_what_it_has() -> None:
    manager = make_manager()
    cached(manager, 40, first=1000, scope=MINE)
    engine = make_engine(manager)
    add(engine, request("a", 8, 40, scope=YOURS))
    engine.step()
    manager.cache.set_quota("mine", guaranteed=10)
    engine.drain(max_steps=60)
    assert engine.finished["a"].reason is FinishReason.REFUSED
    assert len(engine.finished["a"].token_ids) == 6 * 4 - 8 + 1


@pytest.mark.parametrize("chunk", [None, 2])
def test_when_a_waiting_sample_no_longer_fits_then_its_request_leaves_the_step_that_is_being_planned(
    chunk: int | None,
) -> None:
    manager = make_manager(gpu_blocks=8)
    engine = make_engine(manager, max_chunk_tokens=chunk)
    other = request("b", 4, 6, first=100)
    add(engine, request("a", 8, 21, n=2, scope=YOURS))
    while not len(engine.scheduler._queues.resuming):
        engine.step()
    if chunk is not None:  # the sample that stayed gives way too, and computes its tokens again in chunks
        (running,) = [sequence for sequence in engine.scheduler.sequences("a") if sequence.is_running]
        engine.scheduler._queues.preempt(running, 0)
        manager.cache.evict(8)
        assert engine.step().num_decode == 0
    manager.cache.set_quota("mine", guaranteed=4)
    add(engine, other)
    plan = engine.step()
    assert [done.reason for done in plan.finished] == [FinishReason.REFUSED]
    assert names(plan.sequences) == ["b"]
    engine.drain(max_steps=60)
    engine.assert_right(other)


@pytest.mark.parametrize("taken_away", ["resize", "guarantee"])
def test_a_swapped_request_that_no_longer_fits_is_refused(taken_away: str) -> None:
    manager = make_manager(host_blocks=16)
    engine = make_engine(manager, preemption="swap", policy="priority")
    add(engine, request("a", 32, 12, scope=YOURS))
    engine.step()
    add(engine, request("urgent", 40, 4, first=100, scope=YOURS, priority=1))
    engine.step()
    assert engine.scheduler.num_swapped == 1
    if taken_away == "resize":
        engine.scheduler.cancel("urgent")
        manager.cache.resize(6)
    else:
        manager.cache.set_quota("mine", guaranteed=8)
        engine.scheduler.cancel("urgent")
        cached(manager, 32, first=1000, scope=MINE)
    engine.drain(max_steps=60)
    assert engine.finished["a"].reason is FinishReason.REFUSED


def test_given_guaranteed_capacity_then_a_tenant_with_idle_blocks_does_not_take_what_others_were_promised() -> None:
    engine = guaranteed_engine(mine=8, capacity="guaranteed")
    yours, mine = request("b", 8, 24, scope=YOURS), request("a", 24, 4, scope=MINE)
    add(engine, yours)
    engine.step()
    add(engine, mine)  # 8 blocks for it, but the 6 free ones are promised, and it would take those first
    engine.drain(max_steps=60)
    engine.assert_right(yours, mine)
    assert (engine.scheduler.stats.preemptions, engine.scheduler.stats.stalls) == (0, 0)


@pytest.mark.parametrize("capacity", CapacityMode)
def test_given_two_tenants_that_share_out_the_pool_then_both_run_at_once_each_in_its_own_share(
    capacity: CapacityMode,
) -> None:
    engine = guaranteed_engine(mine=8, yours=8, capacity=capacity)
    both = [request("a", 5, 8, scope=MINE), request("b", 5, 8, scope=YOURS)]
    add(engine, *both)
    engine.step()
    assert sorted(names(engine.step().sequences)) == ["a", "b"]
    engine.drain(max_steps=20)
    engine.assert_right(*both)
    assert (engine.scheduler.stats.preemptions, engine.scheduler.stats.stalls) == (0, 0)


def test_a_prefix_that_a_request_reuses_is_not_counted_as_kept_from_others() -> None:
    engine = guaranteed_engine(mine=8, capacity="guaranteed")
    yours, mine = request("b", 4, 5, scope=YOURS), request("a", 32, 5, first=1000, scope=MINE)
    add(engine, yours)
    engine.step()
    add(engine, mine)  # 8 blocks are there already; 2 more of the 6 that are neither taken nor promised
    assert names(engine.step().admitted) == ["a"]
    engine.drain(max_steps=20)
    engine.assert_right(yours, mine)


def test_prefetching_for_one_tenant_leaves_what_another_was_promised() -> None:
    manager = make_manager(gpu_blocks=24, host_blocks=4)
    cached(manager, 16, first=1000, scope=MINE)
    manager.cache.offload(4)
    manager.cache.set_quota("mine", guaranteed=4)
    cached(manager, 32, first=2000)
    manager.cache.set_quota("", guaranteed=8)
    engine = make_engine(manager, capacity="guaranteed", max_sequences=2)
    yours = [request(f"b{i}", 4, 29, first=100 * i, scope=YOURS) for i in range(2)]  # all that is guaranteed to nobody
    add(engine, *yours, request("a", 20, 4, first=1000, scope=MINE))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.stats.prefetched_blocks) == (2, 0)
    engine.drain(max_steps=60)
    engine.assert_right(*yours)
    assert (engine.scheduler.stats.preemptions, engine.scheduler.stats.stalls) == (0, 0)


# --- how much there is for whom --------------------------------------------------------------------------------------


def shared_out() -> Supply:
    """16 blocks: 8 idle and guaranteed to "mine", 3 to "yours", 5 free."""
    manager = make_manager()
    for scope, blocks, first in ((MINE, 8, 1000), (YOURS, 3, 2000)):
        manager.cache.set_quota(scope.tenant, guaranteed=blocks)
        cached(manager, 4 * blocks, first=first, scope=scope)
    return Supply(manager)


def of_tenants(*tenants: str) -> list[Any]:
    """Sequences that run."""
    return [SimpleNamespace(request=SimpleNamespace(scope=ReuseScope(tenant=tenant))) for tenant in tenants]


@pytest.mark.parametrize(
    ("tenant", "running", "room"),
    [
        ("mine", ["mine"], 13),
        ("mine", ["mine", "yours"], 8),  # as much as is there for "yours"
        ("mine", ["yours", "none"], 5),
        ("yours", ["mine"], 8),
        ("none", ["mine"], 5),
        ("none", ["other"], 5),
    ],
)
def test_promises_must_fit_into_what_is_there_for_each_tenant_that_runs(
    tenant: str, running: list[str], room: int
) -> None:
    supply = shared_out()
    admission = supply.manager.can_allocate(num_tokens=1, scope=ReuseScope(tenant=tenant))
    assert supply.room(admission, tenant, of_tenants(*running)) == (room,)


def test_idle_blocks_that_a_request_reuses_are_neither_room_nor_kept() -> None:
    supply = shared_out()
    admission = supply.manager.can_allocate([*range(1000, 1024), 1], scope=MINE)  # reads 6 of its 8 blocks
    assert admission.blocks_available == (7,)
    assert supply.room(admission, "mine", of_tenants("none")) == (5,)
    assert supply.room(admission, "mine", of_tenants("yours")) == (7,)


def test_needs_are_met_from_a_tenants_own_blocks_first_and_then_from_those_that_are_guaranteed_to_nobody() -> None:
    supply = shared_out()
    needs = [("mine", (6,)), ("mine", (3,)), ("yours", (4,)), ("none", (3,))]
    assert supply.num_served(needs) == 4  # 1 of the 5, 1, and 3
    assert supply.num_served([*needs, ("yours", (0,)), ("mine", (1,)), ("none", (0,))]) == 5
    supply.manager.cache.set_quota("", guaranteed=2)
    cached(supply.manager, 8, first=3000)
    assert supply.num_served([("", (5,))]) == 1
    assert supply.num_served([("", (6,))]) == supply.num_served([("none", (4,))]) == 0
    assert supply.num_served([]) == 0
