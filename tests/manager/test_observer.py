"""Observers of a manager: told of what succeeded, in order, and never in the way; and the questions anybody may ask."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import managers
from kvpool import DType, Pin, ReuseHint, StatePart, StateSpec, Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError


class Notes:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.verbs: list[str] = []
        self.told: list[tuple[Any, ...]] = []

    def done(self, verb: str, now: float, result: Any, arguments: tuple[Any, ...]) -> None:
        self.verbs.append(verb)
        self.told.append((now, result, arguments))


make_manager = partial(managers.make_manager, clock=lambda: 7.0)


def test_given_an_observer_then_it_is_told_of_each_operation_once_and_in_order() -> None:
    manager, notes = make_manager(host_blocks=8), Notes()
    manager.observe(notes)
    one = manager.allocate("one", [1, 2, 3, 4, 5])
    manager.commit(one)
    manager.extend(one)
    manager.commit(one, [6])
    (two,) = manager.fork(one, "two")
    manager.swap_out(one, two)
    manager.swap_in(one, two)
    manager.rewind(two, 1)
    manager.free_batch([one, two])
    manager.cache.onboard([1, 2, 3, 4])
    manager.cache.reset()
    assert notes.verbs == [
        *("allocate", "commit", "extend_batch", "commit_batch", "fork", "swap_out", "swap_in", "rewind"),
        *("free_batch", "onboard", "reset_prefix_cache"),
    ]
    assert notes.told[0][:2] == (7.0, one)
    assert notes.told[-1] == (7.0, 1, ())


def test_given_images_in_a_commit_then_an_observer_is_told_of_those_that_begin_there() -> None:
    manager, notes = make_manager(), Notes()
    handle = manager.allocate("a", [1, 9, 9, 2, 9, 9, 9], multimodal=[(1, 2, "cat"), (4, 3, "dog")], lookahead=4)
    manager.observe(notes)
    manager.commit(handle, [1, 9, 9])
    manager.commit(handle, [2, 9, 9, 9])
    manager.extend(handle, 4)
    notes.told.pop()
    manager.commit(handle, [8, 8, 5], multimodal=[(0, 2, "bird")])
    manager.commit_batch([handle], None, [1])
    items = [
        [tuple(item) for item in arguments[-1]] if arguments[-1] is not None else None for _, _, arguments in notes.told
    ]
    assert items == [[(1, 2, "cat")], [(1, 3, "dog")], [(0, 2, "bird")], None]


def test_given_every_operation_that_changes_a_manager_then_an_observer_is_told_of_it() -> None:
    layers = (managers.FULL, StateSpec((StatePart("state", (4,), DType.FLOAT32),)))
    manager, notes = make_manager(*layers, host_blocks=8), Notes()
    manager.observe(notes)
    one = manager.allocate("one", range(8), reserve=4)
    pins: list[Pin] = []
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("slot_mapping", lambda: manager.slot_mapping([one], 0, 4)),
        ("slot_mapping", lambda: manager.state_places([one], 0, 4)),
        ("mark_written", lambda: manager.mark_written(one, 4)),
        ("commit_batch", lambda: manager.commit(one, 4)),
        ("store_last_logits", lambda: manager.store_last_logits(one, "logits", 4)),
        ("narrow", lambda: manager.narrow(one, 4)),
        ("hint", lambda: manager.hint(one, ReuseHint("tool_calls"))),
        ("pin", lambda: pins.append(manager.cache.pin(range(4)))),
        ("unpin", lambda: manager.cache.unpin(pins.pop())),
        ("free", lambda: manager.free(one)),
        ("set_quota", lambda: manager.cache.set_quota("t", maximum=2)),
        ("offload", lambda: manager.cache.offload(1)),
        ("onboard", lambda: manager.cache.onboard(range(4))),
        ("defragment", lambda: manager.cache.defragment()),
        ("resize", lambda: manager.cache.resize(8)),
        ("evict", lambda: manager.cache.evict(1)),
        ("invalidate", lambda: manager.cache.invalidate(range(4))),
    ]
    for verb, call in calls:
        notes.verbs.clear()
        call()
        assert notes.verbs == [verb]


def test_given_an_operation_that_raises_then_the_observer_hears_nothing_of_it() -> None:
    manager, notes = make_manager(gpu_blocks=1), Notes()
    manager.observe(notes)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("long", list(range(9)))
    assert notes.verbs == []


def test_given_an_observer_that_raises_then_the_operation_is_done_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Notes):
        def done(self, verb: str, now: float, result: Any, arguments: tuple[Any, ...]) -> None:
            raise RuntimeError("broken observer")

    manager, notes = make_manager(), Notes()
    manager.observe(Broken())
    manager.observe(notes)
    manager.free(manager.allocate("a", [1]))
    assert notes.verbs == ["allocate", "free"]
    assert "broken observer" in caplog.text
    manager.check()


def test_given_an_observer_that_raises_then_the_log_line_is_written_outside_the_lock() -> None:
    class Broken(Notes):
        def done(self, verb: str, now: float, result: Any, arguments: tuple[Any, ...]) -> None:
            raise RuntimeError("broken observer")

    class AsksAnotherThread(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            asking = threading.Thread(target=manager.stats, daemon=True)
            asking.start()
            asking.join(10)
            answered.append(not asking.is_alive())

    manager, answered, handler = make_manager(), list[bool](), AsksAnotherThread()
    manager.observe(Broken())
    logging.getLogger("kvpool").addHandler(handler)
    try:
        manager.allocate("a", [1])
    finally:
        logging.getLogger("kvpool").removeHandler(handler)
    assert answered == [True]


def test_given_an_observer_that_stopped_then_it_hears_nothing_more() -> None:
    manager, first, second = make_manager(), Notes(), Notes()
    stop = manager.observe(first)
    manager.observe(second)
    stop()
    manager.allocate("a", [1])
    assert (first.verbs, second.verbs) == ([], ["allocate"])


def test_given_an_observer_that_is_there_twice_when_one_ends_then_it_is_told_once() -> None:
    manager, notes = make_manager(), Notes()
    stop = manager.observe(notes)
    manager.observe(notes)
    stop()
    stop()
    manager.allocate("a", [1])
    assert notes.verbs == ["allocate"]


def test_what_cannot_observe_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="observe takes an object with a method done, got 3"):
        make_manager().observe(3)


def test_given_numbers_of_numpy_then_the_observer_is_told_plain_ones() -> None:
    manager, notes = make_manager(host_blocks=8), Notes()
    manager.observe(notes)
    manager.cache.evict(np.int64(1), pool=np.int64(0))
    manager.cache.offload(np.int64(1), pool=np.int64(0))
    manager.cache.resize(np.int64(20), pool=np.int64(0))
    assert [[type(value) for value in arguments] for _, _, arguments in notes.told] == [[int, int, Tier]] * 3
    manager.cache.set_quota("a", guaranteed=np.int64(1), maximum=np.float64(0.5))
    assert [type(value) for value in notes.told[-1][2]] == [str, int, float]


@pytest.mark.parametrize("name", ["on_operation", "on_memory_pressure"])
def test_a_callback_that_cannot_be_called_is_refused(name: str) -> None:
    manager = make_manager()
    with pytest.raises(InvalidArgumentError, match=f"{name} takes a callable, got 3"):
        getattr(manager, name)(3)
    manager.allocate("a", [1])


def test_given_pools_on_some_tiers_then_the_manager_says_which_and_how_large() -> None:
    manager = make_manager(host_blocks=8)
    assert (
        manager.inspect.num_blocks(),
        manager.inspect.num_blocks(tier=Tier.HOST),
        manager.inspect.num_blocks(tier=Tier.DISK),
    ) == (16, 8, 0)
    assert manager.inspect.has_tier(Tier.HOST)
    assert manager.inspect.has_tier(Tier.DISK, Tier.HOST)
    assert not manager.inspect.has_tier(Tier.DISK)
    manager.cache.resize(20)
    assert manager.inspect.num_blocks() == 20
    with pytest.raises(InvalidArgumentError):
        manager.inspect.has_tier(Tier.REMOTE)


def test_given_cached_runs_then_each_is_shown_with_its_place_owner_and_state() -> None:
    manager = make_manager(host_blocks=8)
    old = manager.allocate("old", [1, 2, 3, 4, 5, 6, 7, 8])
    manager.commit(old)
    blocks = old.block_ids().tolist()
    manager.free(old)
    manager.cache.pin([1, 2, 3, 4])
    (pinned, rest) = sorted(manager.inspect.runs(), key=lambda run: run.start)
    assert [ids.tolist() for ids in (*pinned.block_ids, *rest.block_ids)] == [blocks[:1], blocks[1:]]
    assert (pinned.is_pinned, rest.is_pinned, pinned.is_read, rest.start) == (True, False, False, 1)
    assert (pinned.published_by, pinned.tier, pinned.idle_seconds) == (old.serial, Tier.GPU, 0.0)


def test_given_an_invalidated_run_that_is_still_read_then_it_is_not_among_the_cached_ones() -> None:
    manager = make_manager()
    reader = manager.allocate("reader", [1, 2, 3, 4, 5, 6, 7, 8])
    manager.commit(reader)
    assert len(manager.inspect.runs()) == manager.stats().num_cached_runs == 1
    manager.cache.invalidate([1, 2, 3, 4])
    assert len(manager.inspect.runs()) == manager.stats().num_cached_runs == 0
