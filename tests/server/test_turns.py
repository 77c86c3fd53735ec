"""Who comes when: a crowd does not keep the event loop from all else, and a step wakes it once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool.server.answers import HOLE, EventForm, as_event
from kvpool.server.limits import AT_ONCE, Turns
from kvpool.server.served_model import LoopNotifier


def test_given_a_crowd_then_it_begins_in_order_and_others_come_between() -> None:
    async def crowd() -> list[object]:
        turns, happened = Turns(), []
        loop = asyncio.get_running_loop()

        async def begin(number: int) -> None:
            await turns.mine()
            happened.append(number)

        def look(times: int) -> None:
            happened.append("look")
            if times:
                loop.call_soon(look, times - 1)

        loop.call_soon(look, 20)
        await asyncio.gather(*(begin(number) for number in range(10)))
        return happened

    happened = asyncio.run(crowd())
    assert [what for what in happened if what != "look"] == list(range(10))
    between = "".join("x" if what == "look" else "." for what in happened).strip("x").split("x")
    assert max(map(len, between)) == AT_ONCE


def test_given_one_of_a_crowd_that_leaves_then_the_others_have_their_turn() -> None:
    async def crowd() -> int:
        turns = Turns()
        tasks = [asyncio.ensure_future(turns.mine()) for _ in range(7)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[4].cancel()
        return sum(outcome is None for outcome in await asyncio.gather(*tasks, return_exceptions=True))

    assert asyncio.run(crowd()) == 5


class _Engine:
    """Calls what it is told to after its step."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def after_step(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


class _Woken:
    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_given_a_step_with_news_for_many_then_the_loop_is_called_once_and_wakes_some_at_a_turn() -> None:
    async def step() -> list[int]:
        engine: Any = _Engine()
        notifier = LoopNotifier(asyncio.get_running_loop(), engine)
        requests: list[Any] = [_Woken() for _ in range(40)]
        for request in requests:
            notifier.put(request)
        (call,) = engine.calls
        call()
        seen = []
        while not seen or seen[-1] < 40:
            await asyncio.sleep(0)
            seen.append(sum(request.wake.is_set() for request in requests))
        notifier.put(requests[0])
        assert len(engine.calls) == 2
        return seen

    assert asyncio.run(step()) == [16, 32, 40]


def test_given_a_loop_that_is_closed_then_what_has_news_for_it_is_cancelled() -> None:
    engine: Any = _Engine()
    loop = asyncio.new_event_loop()
    notifier = LoopNotifier(loop, engine)
    before: Any = _Woken()
    after: Any = _Woken()
    notifier.put(before)
    loop.close()
    notifier.put(after)
    engine.calls[0]()
    assert (before.is_cancelled, after.is_cancelled) == (True, True)


@given(st.text(st.characters()), st.text())
def test_given_any_text_then_the_form_of_an_event_says_what_json_does(text: str, model: str) -> None:
    def part(content: str) -> dict[str, Any]:
        return {"model": model, "choices": [{"delta": {"content": content}, "finish_reason": None}]}

    assert EventForm(part(HOLE)).filled(text) == as_event(part(text))
