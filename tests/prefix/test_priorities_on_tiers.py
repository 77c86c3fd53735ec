"""On every tier, what is less important never pushes out what is more important; drawn at random, block by block."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager, ReuseScope, Tier
from kvpool.scope import Retention, TokenRange
from managers import make_manager

Blocks = dict[tuple[int, int], tuple[Tier, int]]  # (prompt, index): where it is, and its priority
BELOW = {Tier.GPU: (Tier.HOST, Tier.DISK, None), Tier.HOST: (Tier.DISK, None), Tier.DISK: (None,)}


def prompt(number: int) -> list[int]:
    """A prompt that shares nothing with others; some are longer."""
    return [1000 * number + token for token in range(4 * (1 + number % 4))]


def blocks(manager: KVCacheManager) -> Blocks:
    found: Blocks = {}
    for root in manager._cache.roots.values():
        for child in (root.children or {}).values():
            number = int(np.frombuffer(child.key, np.int32)[0]) // 1000
            for node in child.subtree():
                for index in range(node.num_blocks):
                    found[number, node.start + index] = node.tier, node.priority
    return found


def check_step(before: Blocks, after: Blocks, own: int) -> None:
    """What left a tier for a lower one, or for good, was no more important than anything that stands there now.

    Two things are no matter of choice: a request that runs has its blocks on the GPU, and what follows a block that left
    the cache is of no use to anybody.
    """
    for tier, lower in BELOW.items():
        lost = [
            priority
            for (number, index), (where, priority) in before.items()
            if where == tier and after.get((number, index), (None, 0))[0] in lower and number != own
            if index == 0 or (number, index - 1) in after
        ]
        there = [
            priority
            for (number, _), (where, priority) in after.items()
            if where == tier and not (tier == Tier.GPU and number == own)
        ]
        assert not lost or not there or max(lost) <= min(there), f"{tier.name}: {max(lost)} left, {min(there)} is there"


@pytest.mark.quick(
    "back-adaptive-host", "back-priority-host and disk", "through-adaptive-disk", "through-priority-host"
)
@pytest.mark.parametrize(
    "tiers",
    [{"host_blocks": 10}, {"host_blocks": 10, "disk_blocks": 12}, {"disk_blocks": 12}],
    ids=["host", "host and disk", "disk"],
)
@pytest.mark.parametrize("policy", ["adaptive", "priority"])
@pytest.mark.parametrize("host_write", ["back", "through"])
def test_low_priorities_never_push_out_high_ones_on_any_tier(
    tiers: dict[str, int], policy: str, host_write: Any
) -> None:
    for seed in range(2):
        rng, now = Random(seed), [0.0]
        manager = make_manager(
            gpu_blocks=12, policy=policy, clock=lambda now=now: now[0], watermark=0.0, host_write=host_write, **tiers
        )
        levels = rng.choice(([0, 50, 100], [10, 20, 30, 40], [35], list(range(0, 101, 5))))
        for step in range(50):
            now[0] += rng.expovariate(1.0)
            number = rng.randrange(14)
            before = blocks(manager)
            tokens = prompt(number)
            keeping = Retention([TokenRange(0, None, priority=rng.choice(levels))])
            handle = manager.allocate(step, tokens, retention=keeping, scope=ReuseScope())
            manager.commit(handle)
            check_step(before, blocks(manager), number)
            middle = blocks(manager)
            manager.free(handle)
            manager.take_copies()
            check_step(middle, blocks(manager), number)
            manager.check()
