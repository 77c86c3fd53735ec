"""Swaps of several tenants' requests at once, beside guarantees and pins: one that is refused has changed nothing."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, Pin, ReuseScope
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, PinBudgetError
from managers import FULL, counted

TENANTS = ("a", "b", "c")
NUM_OPERATIONS = 150


class TenantsMachine:
    """Few tokens in a small pool: requests of a tenant find each other's blocks, and room is short."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        layers = rng.choice(([FULL], [FULL, LayerSpec(kv_heads=2, head_dim=8)]))
        config = KVCacheConfig(layers, block_size=2, gpu_blocks=rng.randrange(8, 20), host_blocks=40, watermark=0)
        self.manager = KVCacheManager(config, clock=lambda: 0.0)
        self.live: list[KVCacheHandle] = []
        self.pins: list[Pin] = []
        self.number = 0
        self.swapped_in: set[bool] = set()  # whether swaps of several tenants were done, or refused

    def books(self) -> Any:
        tables = [handle.block_ids().tolist() for handle in self.live if not handle.is_swapped]
        runs = [
            (run.number, run.block_ids[0].tolist(), run.is_read, run.is_pinned) for run in self.manager.inspect.runs()
        ]
        return tables, [handle.num_committed for handle in self.live], runs, counted(self.manager.stats())

    def admit(self) -> None:
        self.number += 1
        tokens = [1] * self.rng.randrange(1, 12) + [self.number] * self.rng.randrange(3)
        scope = ReuseScope(tenant=self.rng.choice(TENANTS))
        try:
            handle = self.manager.allocate(self.number, tokens, scope=scope)
        except OutOfBlocksError:
            return
        self.manager.commit(handle)
        self.live.append(handle)

    def end(self) -> None:
        if self.live:
            self.manager.free(self.live.pop(self.rng.randrange(len(self.live))))

    def pin(self) -> None:
        tokens, scope = [1] * self.rng.randrange(2, 12), ReuseScope(tenant=self.rng.choice(TENANTS))
        try:
            self.pins.append(self.manager.cache.pin(tokens, scope=scope))
        except (InvalidArgumentError, PinBudgetError):
            return  # nothing of it is cached, or too much is pinned

    def unpin(self) -> None:
        if self.pins:
            self.manager.cache.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def set_quota(self) -> None:
        guaranteed, maximum = self.rng.choice((0, 2, 4, 6)), self.rng.choice((None, None, 6))
        try:
            self.manager.cache.set_quota(self.rng.choice(TENANTS), guaranteed=guaranteed, maximum=maximum)
        except InvalidArgumentError:
            return  # more than there is

    def some(self, swapped: bool) -> list[KVCacheHandle]:
        chosen = [handle for handle in self.live if handle.is_swapped == swapped]
        return self.rng.sample(chosen, self.rng.randrange(len(chosen) + 1))

    def swap_out(self) -> None:
        handles = self.some(swapped=False)
        if self.manager.can_swap_out(*handles):
            self.manager.swap_out(*handles)

    def swap_in(self) -> None:
        handles = self.some(swapped=True)
        expected = bool(self.manager.can_swap_in(*handles))
        before = self.books()
        try:
            self.manager.swap_in(*handles)
            self.manager.check()
        except OutOfBlocksError:
            assert not expected
            assert self.books() == before
        else:
            assert expected
        if len({handle.scope.tenant for handle in handles}) > 1:
            self.swapped_in.add(expected)


OPERATIONS = {
    TenantsMachine.admit: 6,
    TenantsMachine.end: 2,
    TenantsMachine.pin: 2,
    TenantsMachine.unpin: 1,
    TenantsMachine.set_quota: 1,
    TenantsMachine.swap_out: 4,
    TenantsMachine.swap_in: 4,
}


@pytest.mark.slow
def test_given_tenants_pins_and_quotas_when_requests_are_swapped_then_all_of_them_are_or_none() -> None:
    swapped_in: set[bool] = set()
    for seed in range(40):
        rng = Random(f"tenants {seed}")
        machine = TenantsMachine(rng)
        for _ in range(NUM_OPERATIONS):
            rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0](machine)
        machine.manager.check()
        swapped_in |= machine.swapped_in
    assert swapped_in == {False, True}
