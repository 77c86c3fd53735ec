"""Memory pressure: its levels, and the order in which changes are told."""

from __future__ import annotations

import pytest

from kvpool import KVCacheHandle, LayerSpec, MemoryPressure, PressureChange
from managers import FULL, make_manager, manager_with


def test_a_fresh_pool_is_all_free_and_under_no_pressure() -> None:
    manager = make_manager()
    changes: list[PressureChange] = []
    manager.on_memory_pressure(changes.append)
    manager.allocate("a", [1])
    assert (manager.stats().pool().free, manager.inspect.pressure, changes) == (15, MemoryPressure.LOW, [])


def test_every_level_is_reached_on_every_allocation_path() -> None:
    manager = make_manager(gpu_blocks=20)
    seen: list[MemoryPressure] = []
    manager.on_memory_pressure(lambda change: seen.append(change.level))
    handle = manager.allocate("a", num_tokens=48)
    manager.extend(handle, 16)
    manager.commit(handle, 62)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 10)
    assert seen == [MemoryPressure.MEDIUM, MemoryPressure.HIGH, MemoryPressure.CRITICAL]


@pytest.mark.parametrize("gpu_blocks", [(10, 40), (40, 10)])
def test_given_several_pools_then_the_fullest_one_says_how_high_the_pressure_is(gpu_blocks: tuple[int, int]) -> None:
    manager = manager_with(FULL, LayerSpec(kv_heads=2, head_dim=8), gpu_blocks=gpu_blocks)
    seen: list[tuple[MemoryPressure, float, int]] = []
    manager.on_memory_pressure(lambda change: seen.append((change.level, change.usage, change.pool)))
    handle = manager.allocate("a", num_tokens=20)
    assert seen == []
    for _ in range(5):
        manager.extend(handle, 4)
    full = gpu_blocks.index(10)
    assert seen == [
        (MemoryPressure.MEDIUM, 0.6, full),
        (MemoryPressure.HIGH, 0.8, full),
        (MemoryPressure.CRITICAL, 1.0, full),
    ]
    manager.free(handle, keep=False)
    assert seen[3:] == [(MemoryPressure.LOW, 0.0, 0)]


def test_pressure_changes_are_told_in_the_order_in_which_they_happened() -> None:
    manager = manager_with(gpu_blocks=10, block_size=1)
    handles: list[KVCacheHandle] = []
    manager.on_memory_pressure(lambda change: manager.free(handles.pop(), keep=False) if handles else None)
    seen: list[tuple[int, int]] = []
    manager.on_memory_pressure(lambda change: seen.append((int(change.previous), int(change.level))))
    handles.append(manager.allocate("a", num_tokens=5))
    manager.allocate("b", num_tokens=4)
    assert seen == [(0, 2), (2, 0)]
