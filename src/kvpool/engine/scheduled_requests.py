"""The requests that an engine has handed to its scheduler, or will as soon as their adapter is on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

from kvpool.engine.adapters import EngineAdapters
from kvpool.engine.generation import Generation
from kvpool.engine.step_part import StepPart
from kvpool.errors import KVPoolError
from kvpool.scheduling import Request, ScheduledSequence, Scheduler

_T = TypeVar("_T")


class ScheduledRequests(StepPart):
    """What the engine knows of each request in its scheduler: its generation, and its adapter.

    A request whose adapter finds no place on the device waits here. Requests with adapters keep their order, so that those
    who wait are not passed for ever by requests of adapters that are there.
    """

    def __init__(self, scheduler: Scheduler, adapters: EngineAdapters) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self.generations: dict[Hashable, Generation] = {}  # by request id
        self._placed: dict[Hashable, str] = {}  # the adapter of each request that has one
        self._waiting: deque[tuple[Generation, Request]] = deque()  # for a place of their adapter

    def held(self) -> list[Request]:
        """The requests that wait for a place of their adapter."""
        return [request for _, request in self._waiting]

    def num_users(self, adapter_id: str) -> int:
        """Requests in the scheduler with this adapter."""
        return sum(placed == adapter_id for placed in self._placed.values())

    def enqueue(self, generation: Generation, request: Request) -> None:
        """Hands a request to the scheduler once its adapter is on the device; raises if it can never run."""
        if request.scope.adapter and (self._waiting or not self._adapters.place(request.scope.adapter)):
            arrival = self._scheduler.clock() if request.arrival is None else request.arrival
            self._waiting.append((generation, replace(request, arrival=arrival)))
        else:
            self._schedule(generation, request, lambda: self._scheduler.add(request))

    def tend(self) -> None:
        """Hands over requests whose adapter finds a place now, and those whose deadline has passed: they end unused."""
        if not self._waiting:
            return
        now = self._scheduler.clock()
        for generation, request in list(self._waiting):
            if request.deadline is not None and request.deadline <= now:
                self.release(generation)
        waiting, self._waiting = self._waiting, deque()
        while waiting and not self._waiting:  # until one has to wait again
            generation, request = waiting.popleft()
            try:
                self.enqueue(generation, request)
            except KVPoolError as error:
                generation.end(error)
        self._waiting.extend(waiting)

    def release(self, generation: Generation) -> None:
        """Hands a request that waits to the scheduler though its adapter has no place: it is about to be ended."""
        for each in [each for each in self._waiting if each[0] is generation]:
            self._waiting.remove(each)
            try:
                self._scheduler.add(each[1])
                self.generations[generation.id] = generation
            except KVPoolError as error:
                generation.end(error)

    def fork(self, parent: ScheduledSequence, generation: Generation, request: Request) -> bool:
        """Hands a request to the scheduler that goes on from a sequence of the same scope; whether they share blocks."""
        if request.scope.adapter:
            self._adapters.place(request.scope.adapter)  # it is there: the parent uses it
        return self._schedule(generation, request, lambda: self._scheduler.fork(parent, request))

    def _schedule(self, generation: Generation, request: Request, call: Callable[[], _T]) -> _T:
        """Hands a request to the scheduler. If that refuses it, its adapter, which has its place, has one user less."""
        adapter_id = request.scope.adapter
        try:
            answer = call()
        except BaseException:
            if adapter_id:
                self._adapters.let_go(adapter_id)
            raise
        if adapter_id:
            self._placed[request.id] = adapter_id
        self.generations[request.id] = generation
        return answer

    def includes(self, generation: Generation) -> bool:
        """Whether this request is ours and not over. Ids alone do not tell: another engine may have one of the same id."""
        return self.generations.get(generation.id) is generation

    def pop(self, request_id: Hashable) -> Generation | None:
        """A request is over, and its adapter may leave the device."""
        adapter_id = self._placed.pop(request_id, None)
        if adapter_id is not None:
            self._adapters.let_go(adapter_id)
        return self.generations.pop(request_id, None)

    def fail(self, error: KVPoolError) -> None:
        """Ends every request with an error."""
        for generation in [*self.generations.values(), *(generation for generation, _ in self._waiting)]:
            generation.end(error)
        for adapter_id in self._placed.values():
            self._adapters.let_go(adapter_id)
        self.generations.clear()
        self._placed.clear()
        self._waiting.clear()
