"""Deadlines: what is due is run by the first operation after its time, however many others there are."""

from __future__ import annotations

from kvpool.core.node import NEVER
from kvpool.core.orders import Calendar
from managers import Clock, cached, make_manager


def due(calendar: Calendar, now: float) -> list[object]:
    """Everything whose time has come."""
    return list(iter(lambda: calendar.due(now), None))


def test_the_next_deadline_is_the_earliest_one_whatever_was_scheduled_before_it() -> None:
    calendar = Calendar()
    for number in range(20):
        calendar.schedule(number, 100.0 + number)
    calendar.schedule("soon", 3.0)
    assert calendar.next == 3.0
    assert due(calendar, 3.0) == ["soon"]
    assert calendar.next == 100.0
    assert due(calendar, 200.0) == list(range(20))
    assert calendar.next == NEVER


def test_a_key_is_due_once_at_the_earliest_time_that_was_asked_for() -> None:
    calendar = Calendar()
    for when in (9.0, 5.0, 7.0):
        calendar.schedule("key", when)
    assert len(calendar) == 1
    assert [due(calendar, now) for now in (4.0, 5.0, 9.0)] == [[], ["key"], []]


def test_what_was_forgotten_is_not_due() -> None:
    calendar = Calendar()
    calendar.schedule("key", 5.0)
    calendar.forget("key")
    assert due(calendar, 5.0) == []


def test_thousands_of_replaced_deadlines_leave_no_trace() -> None:
    calendar = Calendar()
    for number in range(5_000):
        calendar.schedule("key", 10_000.0 - number)
    assert len(calendar._heap) <= 2 * len(calendar) + 64
    assert calendar.next == 10_000.0 - 4_999
    assert due(calendar, 10_000.0) == ["key"]


def test_content_is_not_found_after_its_time_to_live_also_where_many_others_have_one() -> None:
    clock = Clock()
    manager = make_manager(clock=clock, gpu_blocks=64)
    prompts = [cached(manager, 4, 100 * number, ttl=10.0) for number in range(30)]
    clock.now = 9.9
    assert all(manager.match_prefix([*prompt, 1]).num_blocks == 1 for prompt in prompts)
    clock.now = 10.0
    assert not any(manager.match_prefix([*prompt, 1]).num_blocks for prompt in prompts)
