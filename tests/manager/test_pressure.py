"""Memory pressure: its levels, and the order in which changes are told."""

from __future__ import annotations

from kvpool import KVCacheHandle, MemoryPressure, PressureChange
from managers import make_manager, manager_with


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


def test_pressure_changes_are_told_in_the_order_in_which_they_happened() -> None:
    manager = manager_with(gpu_blocks=10, block_size=1)
    handles: list[KVCacheHandle] = []
    manager.on_memory_pressure(lambda change: manager.free(handles.pop(), keep=False) if handles else None)
    seen: list[tuple[int, int]] = []
    manager.on_memory_pressure(lambda change: seen.append((int(change.previous), int(change.level))))
    handles.append(manager.allocate("a", num_tokens=5))
    manager.allocate("b", num_tokens=4)
    assert seen == [(0, 2), (2, 0)]
