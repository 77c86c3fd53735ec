"""Memory of others that is locked for a GPU part by part. The driver's calls are recorded here; tests on a GPU make them."""

from __future__ import annotations

import mmap
import threading
import warnings

import pytest

pytest.importorskip("torch")

from kvpool.storage import memory as memory_module
from kvpool.storage.memory import LinkedMemory, PageLocks

MEGABYTE = 2**20


class Recorded(PageLocks):
    """Locks nothing, and refuses all but the first calls."""

    def __init__(self, refuse_after: int = 1000) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.refuse_after = refuse_after
        self.changed = threading.Condition()

    def lock(self, address: int, size: int) -> bool:
        with self.changed:
            is_refused = len(self.calls) >= self.refuse_after
            self.calls.append(("refused" if is_refused else "lock", address))
            self.changed.notify_all()
        return not is_refused

    def unlock(self, address: int) -> None:
        with self.changed:
            self.calls.append(("unlock", address))
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.calls) >= count, 60)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_LOCKED_AT_ONCE", MEGABYTE)


def mapped(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def until(linked: LinkedMemory, memory: memoryview, views: list[memoryview]) -> None:
    """Waits until all views can be copied."""
    done = threading.Event()
    while not linked.has(memory, MEGABYTE, views):
        assert not done.wait(0.001)


def test_given_a_memory_then_its_parts_are_locked_in_the_background_and_unlocked_at_the_end() -> None:
    driver, memory = Recorded(), mapped(3 * MEGABYTE + 4096)
    linked = LinkedMemory(driver)
    assert not linked.is_locked
    views = [memory[:64], memory[-64:]]
    linked.has(memory, MEGABYTE, views)
    until(linked, memory, views)
    assert linked.is_locked
    locked = [address for _, address in driver.calls]
    assert [call for call, _ in driver.calls] == ["lock"] * 4
    assert [address - locked[0] for address in locked] == [0, MEGABYTE, 2 * MEGABYTE, 3 * MEGABYTE]
    linked.close()
    assert sorted(driver.calls[4:]) == [("unlock", address) for address in locked]
    assert not linked.is_locked
    assert not linked.has(memory, MEGABYTE, views)


def test_given_another_memory_then_the_one_before_is_unlocked() -> None:
    driver, first, second = Recorded(), mapped(2 * MEGABYTE), mapped(4 * MEGABYTE)
    linked = LinkedMemory(driver)
    until(linked, first, [first])
    until(linked, second, [second[-1:]])
    calls = [call for call, _ in driver.calls]
    assert (calls.count("lock"), calls.count("unlock")) == (6, 2)
    linked.close()


def test_given_a_system_that_refuses_then_what_is_locked_can_be_copied_and_the_rest_cannot() -> None:
    driver, memory = Recorded(refuse_after=1), mapped(2 * MEGABYTE)
    linked = LinkedMemory(driver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        until(linked, memory, [memory[:1]])
        driver.wait_for(2)
    assert not linked.has(memory, MEGABYTE, [memory[:1], memory[MEGABYTE : MEGABYTE + 1]])
    assert not linked.is_locked
    linked.close()
