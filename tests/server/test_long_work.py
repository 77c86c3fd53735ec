"""Work that takes long: bounded in all and for a key, and keys take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from kvpool.server.errors import Problem
from kvpool.server.long_work import LongWork, in_thread


class Desk:
    """Pieces of work that note when they begin, and end when they are told to."""

    def __init__(self, work: LongWork) -> None:
        self.work = work
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def ask(self, name: str, size: int = 1) -> None:
        """A piece of the key that is the first letter of its name."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._piece(name, size))
        await settled()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks.pop(name)
        await settled()

    async def _piece(self, name: str, size: int) -> None:
        async with self.work.turn(name[0], size):
            self.begun.append(name)
            await self._ends[name].wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(total: int, per_key: int, story: Callable[[Desk], Awaitable[None]], waiting: int = 100) -> None:
    async def told() -> None:
        desk = Desk(LongWork(total, per_key, waiting))
        await story(desk)
        for task in desk.tasks.values():
            task.cancel()
        await asyncio.gather(*desk.tasks.values(), return_exceptions=True)
        await asyncio.wait_for(desk.work.turn("z", total).__aenter__(), 5)  # all of it is free again

    asyncio.run(told())


def test_given_a_key_that_asked_for_much_then_another_one_begins_next() -> None:
    async def story(desk: Desk) -> None:
        for name in ("a1", "a2", "a3", "b1", "b2"):
            await desk.ask(name)
        assert desk.begun == ["a1"]
        for name in ("a1", "a2", "b1", "a3"):
            await desk.end(name)
        assert desk.begun == ["a1", "a2", "b1", "a3", "b2"]

    run(1, 1, story)


def test_given_room_then_a_key_still_has_its_own_limit() -> None:
    async def story(desk: Desk) -> None:
        for name in ("a1", "a2", "b1", "c1"):
            await desk.ask(name)
        assert desk.begun == ["a1", "b1"]
        await desk.end("b1")
        assert desk.begun == ["a1", "b1", "c1"]

    run(2, 1, story)


def test_given_a_large_piece_then_small_ones_do_not_pass_it_for_ever() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask("a1", 2)
        await desk.ask("b1", 3)
        await desk.ask("c1", 1)
        assert desk.begun == ["a1"]
        await desk.end("a1")
        assert desk.begun == ["a1", "b1"]
        await desk.end("b1")
        assert desk.begun == ["a1", "b1", "c1"]

    run(3, 2, story)


def test_given_a_piece_over_every_limit_then_it_runs_alone() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask("a1", 9)
        await desk.ask("b1")
        assert desk.begun == ["a1"]
        await desk.end("a1")
        assert desk.begun == ["a1", "b1"]

    run(3, 2, story)


def test_given_a_request_that_ends_while_it_waits_then_the_next_one_begins() -> None:
    async def story(desk: Desk) -> None:
        for name in ("a1", "b1", "c1"):
            await desk.ask(name)
        desk.tasks["b1"].cancel()
        await settled()
        await desk.end("a1")
        assert desk.begun == ["a1", "c1"]

    run(1, 1, story)


def test_given_a_request_that_ends_as_its_turn_comes_then_its_room_is_free() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask("a1")
        await desk.ask("b1")
        desk._ends["a1"].set()
        await asyncio.sleep(0)  # a1 goes on and gives b1 its turn
        desk.tasks["b1"].cancel()
        await settled()
        assert desk.begun == ["a1"]

    run(1, 1, story)


def test_given_as_many_that_wait_as_a_key_may_have_then_the_next_is_refused() -> None:
    async def story(desk: Desk) -> None:
        for name in ("a1", "a2", "a3", "b1"):
            await desk.ask(name)
        with pytest.raises(Problem) as refused:
            await desk.tasks.pop("a3")
        assert refused.value.status == 429
        await desk.end("a1")
        assert desk.begun == ["a1", "a2"]

    run(1, 1, story, waiting=1)


def test_given_a_request_that_ends_while_a_thread_works_then_its_turn_ends_with_the_thread() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def story(desk: Desk) -> None:
        async def works() -> None:
            async with desk.work.turn("a"):
                await in_thread(lambda: begun.set() or go_on.wait(30))

        task = asyncio.create_task(works())
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await desk.ask("b1")
        assert desk.begun == []
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()
        await settled()
        assert desk.begun == ["b1"]

    run(1, 1, story)
