"""Memory that is locked for a GPU part by part. The driver's calls are recorded here; tests on a GPU make them."""

from __future__ import annotations

import mmap
import threading
import warnings
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")

from kvpool.storage import memory as memory_module  # noqa: E402
from kvpool.storage.memory import HostMemory, LinkedMemory, PageLocks  # noqa: E402

MEGABYTE = 2**20


class Recorded(PageLocks):
    """Locks nothing, and refuses all but the first calls."""

    def __init__(self, refuse_after: int = 1000) -> None:
        super().__init__()
        self.gate = threading.Semaphore(1000)  # a call passes it
        self.calls: list[tuple[str, int]] = []
        self.refuse_after = refuse_after
        self.changed = threading.Condition()

    def lock(self, address: int, size: int) -> bool:
        self.gate.acquire()
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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Locks the memory of the host beside a GPU that is not there."""
    recorded = Recorded()
    monkeypatch.setattr(memory_module, "page_locks", recorded)
    monkeypatch.setattr(memory_module, "_cpus_near", lambda gpu: set())
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext())
    return recorded


def blocks(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


def test_given_host_memory_in_parts_then_it_is_there_at_once_and_who_needs_a_block_waits_for_its_part(
    driver: Recorded,
) -> None:
    driver.gate = threading.Semaphore(0)
    host = HostMemory(5, MEGABYTE // 2, torch.device("cuda", 0), in_parts=True)
    host.tensor[4].fill_(7)  # nobody waits for the lock to use it from the CPU
    driver.gate.release()
    assert host.lock(blocks(1, 0))
    assert host.part_blocks == 2
    assert not host.pinned
    driver.gate.release(2)
    assert host.lock(blocks(4))
    assert host.pinned
    assert (host.tensor[4] == 7).all()
    first = host.tensor.data_ptr()
    assert driver.calls == [("lock", first), ("lock", first + MEGABYTE), ("lock", first + 2 * MEGABYTE)]
    host.close()
    assert not host.pinned
    assert sorted(driver.calls[3:]) == sorted(("unlock", address) for _, address in driver.calls[:3])


def test_given_blocks_that_do_not_fill_pages_then_each_part_begins_with_a_page_and_a_block(driver: Recorded) -> None:
    host = HostMemory(3000, 1000, torch.device("cuda", 0), in_parts=True)
    assert host.lock(blocks(2999))
    part = host.part_blocks
    assert part * 1000 >= MEGABYTE
    assert part * 1000 % mmap.PAGESIZE == 0
    assert [address - host.tensor.data_ptr() for _, address in driver.calls] == list(range(0, 3_000_000, part * 1000))
    host.close()


def test_given_a_memory_that_is_closed_while_it_is_locked_then_nothing_stays_locked(driver: Recorded) -> None:
    driver.gate = threading.Semaphore(0)
    host = HostMemory(8, MEGABYTE, torch.device("cuda", 0), in_parts=True)
    driver.gate.release()
    host.lock(blocks(0))
    driver.gate.release()  # the part that the thread is at
    host.close()
    assert "kvpool-lock-memory" not in {thread.name for thread in threading.enumerate()}
    calls = [call for call, _ in driver.calls]
    assert calls.count("lock") == calls.count("unlock") <= 2


def test_given_host_memory_that_is_refused_then_its_first_parts_are_fast_and_the_rest_works(driver: Recorded) -> None:
    driver.refuse_after, driver.gate = 1, threading.Semaphore(1)
    host = HostMemory(2, MEGABYTE, torch.device("cuda", 0), in_parts=True)
    assert host.lock(blocks(0))
    with pytest.warns(RuntimeWarning, match="could not be locked"):
        assert driver.gate.release() or not host.lock(blocks(1))
    assert host.lock(blocks(0))
    assert not host.pinned
    host.close()


def test_given_host_memory_in_one_part_then_it_is_locked_when_it_is_there(driver: Recorded) -> None:
    host = HostMemory(3, MEGABYTE, torch.device("cuda", 0))
    assert host.pinned
    assert len(driver.calls) == 1
    host.close()
