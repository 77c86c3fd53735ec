"""What a host changes for the eviction policy of the GPU: nothing, until something is found on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import KVCacheManager
from kvpool.eviction import policy_names
from managers import Clock, manager_of_pairs

BLOCK = 2  # tokens, of `manager_of_pairs`


class Prompts:
    """Prompts that go on from a prefix of an earlier one, often of a late one, or begin anew."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.known: list[list[int]] = []

    def next(self) -> list[int]:
        random = self.random
        start: list[int] = []
        if self.known and random.random() < 0.8:
            earlier = self.known[-1 - min(int(random.geometric(0.2)), len(self.known)) + 1]
            start = earlier[: BLOCK * int(random.integers(1, len(earlier) // BLOCK + 1))]
        new: list[int] = random.integers(0, 1000, BLOCK * int(random.integers(1, 8)) + 1).tolist()
        self.known.append(start[: 12 * BLOCK] + new)
        return self.known[-1]


def served(manager: KVCacheManager, number: int, prompt: list[int]) -> int:
    """Computes a prompt; returns how many blocks of it were cached."""
    handle = manager.allocate(number, prompt)
    manager.commit(handle)
    manager.free(handle)
    manager.take_copies()
    return handle.num_cached_blocks


@pytest.mark.quick("adaptive", "lru", "priority")
@pytest.mark.parametrize("policy", policy_names())
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), host_blocks=st.integers(1, 3), num_blocks=st.integers(24, 64))
def test_until_something_is_found_on_the_host_it_changes_no_hit(
    policy: str, seed: int, host_blocks: int, num_blocks: int
) -> None:
    clock, prompts = Clock(), Prompts(seed)
    plain = manager_of_pairs(gpu_blocks=num_blocks, host_blocks=0, policy=policy, clock=clock)
    tiered = manager_of_pairs(gpu_blocks=num_blocks, host_blocks=host_blocks, policy=policy, clock=clock)
    for number in range(400):
        clock.now += float(prompts.random.exponential(2.0))
        prompt = prompts.next()
        hits = served(tiered, number, prompt)
        if tiered.stats().hit_blocks["HOST"]:
            break
        assert hits == served(plain, number, prompt)
