"""What is evicted of windows and states that nobody reads any more: how much, and in which order."""

from __future__ import annotations

from kvpool import DType, KVCacheConfig, KVCacheManager, LayerSpec, StatePart, StateSpec
from managers import FULL, Clock, cached, computed, make_manager, manager_of_pairs, manager_with, num_cached

STATE = StateSpec((StatePart("conv", (9, 4), DType.FLOAT32),))


def two_windows() -> KVCacheManager:
    """Two requests that part behind eight tokens, under two windows in one pool."""
    manager = manager_with(*(LayerSpec(1, 8, window=window) for window in (2, 8)), block_size=2, gpu_blocks=60)
    computed(manager, "a", [1] * 8 + [3] * 12)
    computed(manager, "b", [1] * 8 + [2] * 12)
    return manager


def test_given_two_windows_in_a_pool_then_no_more_blocks_leave_than_were_asked_for() -> None:
    total = num_cached(two_windows())
    assert total == 22
    for wanted in range(1, total + 1):
        manager = two_windows()
        assert manager.cache.evict(wanted) == wanted
        assert num_cached(manager) == total - wanted
    manager.check()
    assert manager.cache.evict(1) == 0


def test_of_what_was_left_at_once_the_blocks_that_no_end_needs_leave_before_the_run() -> None:
    manager = manager_of_pairs(LayerSpec(1, 8, window=4), gpu_blocks=32)
    longer = computed(manager, "longer", range(12))
    shorter = computed(manager, "shorter", range(7))
    manager.free_batch([shorter, longer])
    found = []
    while manager.cache.evict(1):
        found.append(manager.match_prefix(range(13)).num_tokens)
    assert found == [12, 12, 12, 12, 0, 0]


def test_of_the_states_of_a_conversation_those_before_its_end_leave_first() -> None:
    config = KVCacheConfig([FULL, STATE], 4, gpu_blocks=(64, 24), watermark=0.0, checkpoint_every=4)
    manager = KVCacheManager(config)
    turns = list(range(16)), list(range(32))
    for number, prompt in enumerate(turns):
        handle = manager.allocate(number, prompt, reserve=0)
        while (start := handle.num_committed) < len(prompt):
            end = manager.step_end(handle, start, len(prompt))
            manager.extend(handle, max(0, end - handle.num_reserved))
            manager.commit(handle, end - start)
        manager.free(handle)
    found = []
    while manager.cache.evict(1, pool=1):
        manager.check()
        found.append(tuple(manager.match_prefix([*prompt, 99]).num_tokens for prompt in turns))
    assert found == [(16, 32)] * 3 + [(0, 32)] * 3 + [(0, 28), (0, 0)]


def test_what_was_due_while_it_was_pinned_leaves_once_the_pin_ends() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    pin = manager.cache.pin(cached(manager, 8, ttl=10.0))
    clock.now = 10.0
    assert manager.cache.gc() == 0
    manager.cache.unpin(pin)
    assert manager.cache.gc() == 2
