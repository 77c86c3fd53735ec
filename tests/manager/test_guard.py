from __future__ import annotations

import logging
import threading
from functools import partial

import pytest

import managers
from kvpool import KVCacheManager, LayerSpec, MemoryPressure, PressureChange
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from managers import FULL

LOW, MEDIUM, HIGH, CRITICAL = MemoryPressure


make_manager = partial(managers.make_manager, gpu_blocks=20)


def watch(manager: KVCacheManager) -> list[tuple[MemoryPressure, MemoryPressure]]:
    seen: list[tuple[MemoryPressure, MemoryPressure]] = []
    manager.on_memory_pressure(lambda change: seen.append((change.previous, change.level)))
    return seen


# --- levels ----------------------------------------------------------------------------------------------------------


def test_each_level_is_announced_once_on_the_way_up_and_once_on_the_way_down() -> None:
    manager = make_manager()  # 12, 16 and 19 of 20 blocks are the edges
    seen = watch(manager)
    handle = manager.allocate("a", num_tokens=4)
    for _ in range(19):
        manager.extend(handle, 4)
    assert seen == [(LOW, MEDIUM), (MEDIUM, HIGH), (HIGH, CRITICAL)]
    assert manager.inspect.pressure is CRITICAL
    seen.clear()
    for _ in range(20):
        manager.rewind(handle, 4)
    assert seen == [(CRITICAL, HIGH), (HIGH, MEDIUM), (MEDIUM, LOW)]
    assert manager.inspect.pressure is LOW


@pytest.mark.parametrize(("num_blocks", "level"), [(11, LOW), (12, MEDIUM), (15, MEDIUM), (16, HIGH), (19, CRITICAL)])
def test_a_level_begins_exactly_at_its_fraction(num_blocks: int, level: MemoryPressure) -> None:
    manager = make_manager()
    manager.allocate("a", num_tokens=4 * num_blocks)
    assert manager.inspect.pressure is level


def test_a_jump_over_several_levels_is_one_change() -> None:
    manager = make_manager()
    seen = watch(manager)
    manager.free(manager.allocate("a", num_tokens=80))
    assert seen == [(LOW, CRITICAL), (CRITICAL, LOW)]


def test_staying_on_a_level_is_no_news() -> None:
    manager = make_manager()
    manager.allocate("a", num_tokens=52)
    seen = watch(manager)
    for name in range(3):
        manager.allocate(name, num_tokens=4)
        manager.free(manager.get(name))
        manager.stats()
    assert seen == []


def test_idle_cache_is_no_pressure() -> None:
    manager = make_manager()
    seen = watch(manager)
    for first in range(0, 500, 50):
        handle = manager.allocate(first, list(range(first, first + 40)))
        manager.commit(handle, 40)
        manager.free(handle)
    assert manager.inspect.num_free_blocks() == 0
    assert (seen, manager.inspect.usage) == ([], 0.0)


def test_configured_levels_are_used() -> None:
    manager = make_manager(pressure_levels=(0.05, 0.1, 0.5))
    manager.allocate("a", num_tokens=4)
    assert manager.inspect.pressure is MEDIUM
    manager.allocate("b", num_tokens=36)
    assert manager.inspect.pressure is CRITICAL


@pytest.mark.parametrize(
    ("num_blocks", "level", "reached"), [(25, 0.28, 7), (50, 0.14, 7), (50, 0.56, 28), (8, 0.5, 4)]
)
def test_a_level_begins_at_its_fraction_however_floats_round(num_blocks: int, level: float, reached: int) -> None:
    manager = make_manager(gpu_blocks=num_blocks, pressure_levels=(level / 2, level, 1.0))
    for name in range(reached):
        assert manager.inspect.pressure < HIGH
        manager.allocate(name, num_tokens=4)
    assert manager.inspect.pressure is HIGH
    manager.free(manager.get(0))
    assert manager.inspect.pressure is MEDIUM


def test_equal_fractions_leave_a_level_out() -> None:
    manager = make_manager(gpu_blocks=16, pressure_levels=(0.5, 0.5, 0.75))
    seen = watch(manager)
    for name in range(12):
        manager.allocate(name, num_tokens=4)
    assert seen == [(LOW, HIGH), (HIGH, CRITICAL)]


def test_the_fullest_pool_counts_and_is_named() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=2, head_dim=8), gpu_blocks=(100, 10))
    changes: list[PressureChange] = []
    manager.on_memory_pressure(changes.append)
    handle = manager.allocate("a", num_tokens=28)
    (change,) = changes
    assert (change.pool, change.usage, change.level) == (1, 0.7, MEDIUM)
    assert change.reason == "pool 1: 7 of 10 blocks in use, 0 cached, 3 free; pressure rose from LOW to MEDIUM"
    assert manager.inspect.usage == 0.7
    manager.free(handle)
    assert "fell from MEDIUM to LOW" in changes[-1].reason


def test_an_operation_that_fails_is_measured_too_and_changes_no_level() -> None:
    manager = make_manager()
    seen = watch(manager)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("a", num_tokens=84)
    assert seen == []


def test_the_peak_of_every_pool_is_noted() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=2, head_dim=8), gpu_blocks=(100, 10))
    manager.free(manager.allocate("a", num_tokens=20))
    assert [pool.peak_referenced for pool in manager.stats().pools] == [5, 5]


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_a_callback_may_call_the_manager() -> None:
    manager = make_manager()
    victim = manager.allocate("victim", num_tokens=40)
    levels: list[MemoryPressure] = []

    def relieve(change: PressureChange) -> None:
        levels.append(change.level)
        if change.level >= HIGH and victim.is_live:
            manager.free(victim)

    manager.on_memory_pressure(relieve)
    manager.allocate("b", num_tokens=36)
    assert levels == [CRITICAL, LOW]
    assert manager.inspect.pressure is LOW
    manager.check()


def test_a_callback_runs_while_other_threads_can_use_the_manager() -> None:
    manager = make_manager()
    free_blocks: list[int] = []

    def ask_elsewhere(change: PressureChange) -> None:
        thread = threading.Thread(target=lambda: free_blocks.append(manager.inspect.num_free_blocks()))
        thread.start()
        thread.join(timeout=10.0)

    manager.on_memory_pressure(ask_elsewhere)
    manager.allocate("a", num_tokens=48)
    assert free_blocks == [8]


def test_a_raising_callback_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager()

    def broken(change: PressureChange) -> None:
        raise RuntimeError("out of luck")

    manager.on_memory_pressure(broken)
    seen = watch(manager)
    with caplog.at_level(logging.ERROR, logger="kvpool"):
        handle = manager.allocate("a", num_tokens=48)
    assert handle.num_reserved == 48
    assert seen == [(LOW, MEDIUM)]
    assert "out of luck" in caplog.text


def test_a_callback_stops_when_it_is_told_to() -> None:
    manager = make_manager()
    seen: list[str] = []

    def notice(change: PressureChange) -> None:
        seen.append(change.level.name)

    stop_first, stop_second = manager.on_memory_pressure(notice), manager.on_memory_pressure(notice)
    stop_first()
    stop_first()  # once more changes nothing, also not for the other registration
    manager.allocate("a", num_tokens=48)
    assert seen == ["MEDIUM"]
    stop_second()
    manager.free(manager.get("a"))
    assert seen == ["MEDIUM"]


def test_a_callback_may_stop_itself() -> None:
    manager = make_manager()
    calls: list[int] = []

    def once(change: PressureChange) -> None:
        calls.append(1)
        stop()

    stop = manager.on_memory_pressure(once)
    manager.free(manager.allocate("a", num_tokens=80))
    assert calls == [1]


def test_a_callback_must_be_callable() -> None:
    with pytest.raises(InvalidArgumentError, match="callable"):
        make_manager().on_memory_pressure(None)


# --- the lock --------------------------------------------------------------------------------------------------------


def test_an_operation_inside_another_is_measured_once_at_the_end() -> None:
    manager = make_manager()
    seen = watch(manager)
    with manager._guard:
        handle = manager.allocate("a", num_tokens=80)
        manager.free(handle)
        assert seen == []
    assert seen == []
    with manager._guard:
        manager.allocate("b", num_tokens=80)
    assert seen == [(LOW, CRITICAL)]


def test_threads_see_whole_operations_only() -> None:
    manager = make_manager(gpu_blocks=64)
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for turn in range(30):
                handle = manager.allocate((name, turn), list(range(turn, turn + 9)))
                manager.commit(handle, 9 - handle.num_cached_tokens)
                manager.extend(handle, 3)
                manager.free(handle)
                manager.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_given_a_clock_that_fails_then_the_operation_says_so_and_the_next_one_works() -> None:
    manager = make_manager()
    context, clock = manager._cache, manager._cache.clock

    def fail() -> float:
        raise OSError("no time")

    context.clock = fail
    with pytest.raises(OSError, match="no time"):
        manager.allocate("a", num_tokens=4)
    context.clock = clock
    assert manager.allocate("a", num_tokens=4).num_blocks == 1
    manager.check()
